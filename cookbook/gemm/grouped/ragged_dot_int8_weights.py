# SPDX-License-Identifier: Apache-2.0
"""Product of groups of rows with a matrix of 8-bit integers each, which become 16-bit on the way to the tensor cores.

    o[rows of group g] = lhs[rows of group g] @ rhs[g] * scales[g], computed as oᵀ = rhsᵀ lhsᵀ

Shapes: lhs (M, K), rhs (G, K, N), or (G, N, K) with `transpose_rhs`, scales (G, N), group_sizes (G,), o (M, N). lhs is
bfloat16 or float16, rhs int8, o bfloat16 or float16; sums are float32. Rows of lhs and of rhs, as it is read, must be
multiples of 16 bytes. 8-bit integers are exact in either 16-bit float, so that only the quantization itself errs.

Role and barrier tables: `kernel.py`; what is done with weights and scales: `kernel_int8_weights.py`; tiles: `plan.py`.

Bound by: the memory that the weights come from with few rows a group; with many, the tensor cores.

Not supported: zero points, scales of groups along K; batches (use `jax.vmap`); differentiation. The
tensor cores want weights with K along their rows: a plain rhs is transposed, at the cost of one copy; store weights as
(G, N, K). Chapter: 16b.
"""

import functools
import math
import statistics

import jax
import jax.numpy as jnp

from ... import _host
from .. import cost
from ..arguments import product_sizes
from ..dense import cost_int8_weights
from ..dense.kernel_int8_weights import Config, plan_of, require_config
from ..references import flops as flops
from ..tiles import resident
from . import arguments
from .kernel import grouped_product
from .kernel_fp8 import pad_column_scales
from .kernel_int8_weights import kernel
from .plan import RowTiles
from .ragged_dot import ragged_dot_reference


def ragged_dot_int8_weights_reference(lhs, rhs, scales, group_sizes, group_offset=0, transpose_rhs=False):
    dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    matrices = rhs.astype(dtype) * jnp.expand_dims(scales.astype(dtype), 2 if transpose_rhs else 1)
    return ragged_dot_reference(lhs.astype(dtype), matrices, group_sizes, group_offset, transpose_rhs)


@functools.lru_cache(4096)
def default_config(m: int, n: int, k: int, num_groups: int, num_sms: int = 132) -> Config:
    """The configuration of the least predicted time, if groups are alike."""
    return ranked(m, n, k, num_groups, 1, num_sms)[0]


def ranked(m: int, n: int, k: int, num_groups: int, count: int, num_sms: int = 132, bits: int = 8) -> list[Config]:
    """The `count` configurations of the least predicted time, the best first: those that are worth timing."""
    with_rows = min(m, num_groups)
    rows = -(-m // with_rows)

    def predict(c: Config) -> float:
        """Microseconds: the time of one group's product, as often as its tiles fit into the waves of all."""
        across = max(1.0, rows / c.tile_n + 0.5) if bits == 8 else expected_tiles(rows, c.tile_n)
        tiles = with_rows * across * -(-n // (c.tile_m * c.cluster_m))
        waves = max(1.0, tiles / resident(num_sms, c.cluster_m) + 0.5)
        conversion = (*CONVERT_4, share(c)) if bits == 4 else None
        one = cost_int8_weights.predict(c, c.tile_n, c.tile_m * c.cluster_m, k, num_sms, bits, conversion)
        one -= cost.H200.start
        memory = (with_rows * n * k * bits / 8 + 2 * m * (n + k)) / cost.H200.read / 1e6
        return cost.H200.start + cost.longer(waves * one, memory)

    # Groups differ: some have more rows than the mean.
    found = cost_int8_weights.candidates(2 * rows, n, k, num_sms, bits)
    # Long steps of 4 bits gain nothing and leave more of the last one empty: gpt-oss's experts took longer.
    longest, widest = (128, 192) if bits == 4 else (256, 256)
    found = [c for c in found if c.split_k == 1 and c.tile_k <= longest and c.tile_n <= widest]
    return sorted(found, key=predict)[:count]


def expected_tiles(rows: int, tile_n: int) -> float:
    """Tiles of a group that has `rows` rows on average, if each row chooses its group at random."""
    sizes, reach = statistics.NormalDist(rows, math.sqrt(rows)), 9 * math.sqrt(rows)  # All groups are within it.
    first = max(1, int((rows - reach) // tile_n))
    return first + sum(1 - sizes.cdf(tiles * tile_n) for tiles in range(first, int((rows + reach) // tile_n) + 2))


# us of a step of 4-bit weights, and of each 16,384 of them. These and the numbers of `share` were fitted to times of
# grouped MXFP4 products with gpt-oss's and Qwen3's experts on one H200, and not checked on other sizes.
CONVERT_4 = 0.13, 0.28


def share(c: Config) -> float:
    """The share of the products of 4-bit weights that conversion does not hide."""
    if c.tile_n <= 48:
        return 1.4 / c.warpgroups
    return 0.6 if c.overlap or c.tile_k == 64 else 0.8


def _check(op: str, lhs, rhs, scales, transpose_rhs: bool) -> tuple[int, int, int]:
    if lhs.dtype not in (jnp.bfloat16, jnp.float16) or rhs.dtype != jnp.int8:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {lhs.dtype=}, {rhs.dtype=}; must be bfloat16 or float16, and int8: cast them"
        )
    m, n, k = product_sizes(op, dict(lhs=lhs, rhs=rhs), transpose_b=transpose_rhs, grouped=True, along_k=True)
    if scales.shape != (rhs.shape[0], n) or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {scales.shape=}, {scales.dtype=}; must be {(rhs.shape[0], n)}, one float for each "
            "column"
        )
    return m, n, k


def ragged_dot_int8_weights(
    lhs: jax.Array,
    rhs: jax.Array,
    scales: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | None = None,
    transpose_rhs: bool = False,
    out_dtype: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`lhs` times one matrix of `rhs * scales` for each group of rows, dequantized on the way to the tensor core.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      lhs: (M, K); bfloat16 or float16.
      rhs: (G, K, N), which costs a copy, or (G, N, K) with `transpose_rhs`; int8.
      scales: (G, N), of a floating dtype: what one unit of a column of a matrix stands for.
      group_sizes, group_offset: as `cookbook.ragged_dot` takes them.
      transpose_rhs: matrices are given transposed, and are read as they lie.
      out_dtype: bfloat16 or float16; None for the dtype of `lhs`.
      config: tiles, stages, cluster and order; None for the fastest predicted ones.

    Returns:
      (M, N) of `out_dtype`, from float32 sums, rounded once; zeros in rows that belong to no group of rhs.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    op = "ragged_dot_int8_weights"
    lhs, rhs, scales = (_host.as_array(op, name, x) for name, x in (("lhs", lhs), ("rhs", rhs), ("scales", scales)))
    transpose_rhs = _host.option(op, "transpose_rhs", transpose_rhs, bool)
    (m, n, k), num_groups = _check(op, lhs, rhs, scales, transpose_rhs), rhs.shape[0]
    out_dtype = _host.require_float(op, lhs.dtype if out_dtype is None else out_dtype)
    if out_dtype == jnp.float32:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {out_dtype=}; must be bfloat16 or float16, because tiles are transposed: cast it"
        )
    require_config(op, config)
    if config is not None and config.split_k > 1:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config=}; must be of split_k=1: the device alone knows how many tiles there are"
        )
    group_sizes, group_offset = arguments.check_groups(op, group_sizes, group_offset, m, num_groups)
    lhs, rhs, scales = _host.without_gradient(
        op, f"{_host.PACKAGE}.ragged_dot of dequantized weights", lhs, rhs, scales
    )
    if 0 in (m, n, k, num_groups):
        return jnp.zeros((m, n), out_dtype)
    target = _host.require_tensor_cores(op)
    config = config or default_config(m, n, k, num_groups, target.num_sms)
    tiles = RowTiles(n, m, k, config.tile_k, config, target.num_sms, num_groups=num_groups, axis=1)
    plan = plan_of(tiles, rhs, lhs, out_dtype, target.interpreted, stacked=True)
    table, scales = tiles.table_of(group_sizes, group_offset), pad_column_scales(scales, plan)
    rhs = rhs if transpose_rhs else rhs.mT
    return grouped_product(kernel, lhs, rhs, table, scales, plan=plan, params=_host.compiler_params())


ragged_dot_int8_weights.Config = Config  # `cookbook.ragged_dot_int8_weights` is this function, not its module.


def bytes_moved(m: int, n: int, k: int, num_groups: int, itemsize: int = 2) -> int:
    """Rows and the matrices of the `num_groups` groups that have rows read once, the result written once."""
    return itemsize * m * k + num_groups * k * n + itemsize * m * n
