# SPDX-License-Identifier: Apache-2.0
"""Product of groups of rows with a matrix each, of scaled 8-bit floats: one kernel for all groups.

    o[rows of group g] = (lhs * scale_lhs)[rows of group g] @ (rhs[g] * scale_rhs[g])

Shapes: lhs (M, K), rhs (G, K, N), or (G, N, K) with `transpose_rhs`, group_sizes (G,), o (M, N). lhs and rhs are
float8_e4m3fn; scales are float32; o is bfloat16, float16 or float32. Rows of lhs and, as it is read, of rhs must be
multiples of 16 values along K. Scales are of one of two kinds:

    by row and column   scale_lhs (M,), scale_rhs (G, N): applied to the sums
    by block            scale_lhs (M, K / 128), scale_rhs (G, N / 128, K / 128): one for each row and 128 values of K of
                        lhs, and for each square of 128 of a matrix; with a plain rhs (G, K / 128, N / 128)

Role and barrier tables: `kernel.py`; tiles: `plan.py`; scales: `kernel_fp8.py`. A step is 128 values of K, a block:
its sums are scaled and added to the earlier steps' sums in float32 registers, so a tile has at most 128x128 values,
half as many as in a plain product.

Bound by: the tensor cores; with scales by block also the additions, which take a quarter of the products' time. They
overlap with the products of the warpgroup's next step and of the other warpgroup.

Not supported: other sizes of blocks; batches (use `jax.vmap`); differentiation. The tensor cores want both operands
with K along their rows: a plain rhs is transposed, at the cost of one copy; store weights as (G, N, K). Chapter: 16b.
Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), for the blocks and why sums are promoted.
"""

import functools

import jax
import jax.numpy as jnp

from ... import _host
from ..arguments import product_sizes
from ..plan import identity
from ..references import flops as flops
from ..tiles import Config
from . import arguments, cost
from .kernel import grouped_product
from .kernel_fp8 import BLOCK, IN_FLIGHT, kernel, pad_column_scales, pad_row_scales
from .plan import row_plan
from .ragged_dot import ragged_dot_reference

DTYPE = jnp.dtype(jnp.float8_e4m3fn)
REGISTER_VALUES = 200  # Registers that a thread, which has 232, can use for sums and scales.


def ragged_dot_fp8_reference(lhs, rhs, scale_lhs, scale_rhs, group_sizes, group_offset=0, transpose_rhs=False):
    dtype = jnp.promote_types(jnp.float32, scale_lhs.dtype)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    if scale_rhs.ndim == 2:
        lhs, rhs = lhs * scale_lhs.reshape(-1, 1), rhs * jnp.expand_dims(scale_rhs, 2 if transpose_rhs else 1)
    else:
        spread = lambda x, axis, size: jnp.repeat(x, BLOCK, axis)[(slice(None),) * axis + (slice(size),)]
        lhs = lhs * spread(scale_lhs, 1, lhs.shape[1])
        rhs = rhs * spread(spread(scale_rhs, 1, rhs.shape[1]), 2, rhs.shape[2])
    return ragged_dot_reference(lhs, rhs, group_sizes, group_offset, transpose_rhs)


def default_config(m, n, k, num_groups, out_dtype=jnp.bfloat16, by_block=False, num_sms=132) -> Config:
    """The configuration of the least predicted time, if groups are alike."""
    return ranked(m, n, k, num_groups, 1, out_dtype, by_block, num_sms)[0]


@functools.lru_cache(4096)
def ranked(m, n, k, num_groups, count, out_dtype=jnp.bfloat16, by_block=False, num_sms=132) -> list[Config]:
    """The `count` configurations of the least predicted time, the best first: those that are worth timing."""
    problem = cost.RaggedProblem(m, n, k, num_groups, True, DTYPE, jnp.dtype(out_dtype), num_sms=num_sms)
    return [config for config in cost.ranked(problem) if not by_block or _fits_blocks(config)][:count]


def _fits_blocks(config: Config) -> bool:
    """Whether a warpgroup has one block's columns, and registers for the sums of all steps and of those in flight."""
    (rows, cols), mine = config.compute_tile, config.compute_tile[0 if config.swapped else 1]
    values = rows * cols * (1 + IN_FLIGHT) // 128
    # With `swapped` a thread also keeps scales of many rows, a quarter of the columns, for these steps and the next.
    values += cols * IN_FLIGHT // 2 if config.swapped else 0
    return values <= REGISTER_VALUES and BLOCK % mine == 0


def _check(op: str, lhs, rhs, scale_lhs, scale_rhs, transpose_rhs: bool):
    """(M, N, K) and whether scales are of blocks."""
    if lhs.dtype != DTYPE or rhs.dtype != DTYPE:
        raise ValueError(f"{_host.PACKAGE}.{op}: {lhs.dtype=}, {rhs.dtype=}; both must be {DTYPE}: scale and cast them")
    m, n, k = product_sizes(op, dict(lhs=lhs, rhs=rhs), transpose_b=transpose_rhs, grouped=True, along_k=True)
    by_block, blocks = scale_rhs.ndim == 3, (-(-n // BLOCK), -(-k // BLOCK))
    wanted = rhs.shape[:1] + (blocks if transpose_rhs else blocks[::-1]) if by_block else (rhs.shape[0], n)
    fits = scale_lhs.shape == (m, blocks[1]) if by_block else scale_lhs.shape in ((m,), (m, 1))
    if not fits or scale_rhs.shape != wanted or not all(
        jnp.issubdtype(x.dtype, jnp.floating) for x in (scale_lhs, scale_rhs)
    ):  # fmt: skip
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {scale_lhs.shape=}, {scale_rhs.shape=}; must be floats: ({m},) and "
            f"{(rhs.shape[0], n)}, one for each row and column, or {(m, blocks[1])} and {rhs.shape[:1] + blocks} (the "
            "last two exchanged if rhs is not transposed), one for each block of 128"
        )
    return (m, n, k), by_block


def ragged_dot_fp8(
    lhs: jax.Array,
    rhs: jax.Array,
    scale_lhs: jax.Array,
    scale_rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | None = None,
    transpose_rhs: bool = False,
    out_dtype: _host.DType = jnp.bfloat16,
    config: Config | None = None,
) -> jax.Array:
    """`lhs * scale_lhs` times one matrix of `rhs * scale_rhs` for each group of rows, of 8-bit floats, rounded once.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      lhs: (M, K); float8_e4m3fn.
      rhs: (G, K, N), which costs a copy, or (G, N, K) with `transpose_rhs`; float8_e4m3fn.
      scale_lhs: (M,) or (M, 1), one for each row; or (M, K / 128, rounded up), one for each 128 values of it.
      scale_rhs: (G, N), one for each column; or (G, N / 128, K / 128), both rounded up, one for each square of 128,
        which lie as rhs does: (G, K / 128, N / 128) if rhs is (G, K, N).
      group_sizes, group_offset: as `cookbook.ragged_dot` takes them.
      transpose_rhs: matrices are given transposed, and are read as they lie.
      out_dtype: bfloat16, float16 or float32.
      config: tiles, stages, cluster and order; None for the fastest predicted ones.

    Returns:
      (M, N) of `out_dtype`; zeros in rows that belong to no group of rhs.

    Raises:
      ValueError: a rank, shape, dtype, scale or row length is not supported; RuntimeError: no GPU.
    """
    op = "ragged_dot_fp8"
    names = "lhs", "rhs", "scale_lhs", "scale_rhs"
    lhs, rhs, scale_lhs, scale_rhs = (
        _host.as_array(op, name, x) for name, x in zip(names, (lhs, rhs, scale_lhs, scale_rhs), strict=True)
    )
    transpose_rhs = _host.option(op, "transpose_rhs", transpose_rhs, bool)
    out_dtype = _host.require_float(op, out_dtype)
    _host.require_config(op, config, Config)
    (m, n, k), by_block = _check(op, lhs, rhs, scale_lhs, scale_rhs, transpose_rhs)
    num_groups = rhs.shape[0]
    group_sizes, group_offset = arguments.check_groups(op, group_sizes, group_offset, m, num_groups)
    operands = lhs, rhs, scale_lhs, scale_rhs
    lhs, rhs, scale_lhs, scale_rhs = _host.without_gradient(
        op, f"{_host.PACKAGE}.ragged_dot of 16-bit operands", *operands
    )
    if 0 in (m, n, k, num_groups):
        return jnp.zeros((m, n), out_dtype)
    target = _host.require_tensor_cores(op)
    config = config or default_config(m, n, k, num_groups, out_dtype, by_block, target.num_sms)
    if by_block and not _fits_blocks(config):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config.tile_m=} x {config.tile_n=}, {config.split_dim=}: with scales of blocks a "
            "warpgroup has at most 64 x 128 values (64 x 80 with swapped), and columns of o that divide 128"
        )
    plan = row_plan(m, n, k, num_groups, DTYPE, True, identity, out_dtype, config, target.num_sms, target.interpreted)
    if not transpose_rhs:
        rhs, scale_rhs = rhs.mT, scale_rhs.mT if by_block else scale_rhs
    table = plan.tiles.table_of(group_sizes, group_offset)
    of_rows = pad_row_scales(scale_lhs.reshape(m, -1), plan)
    of_matrices = scale_rhs.astype(jnp.float32) if by_block else pad_column_scales(scale_rhs, plan)
    return grouped_product(kernel, lhs, rhs, table, of_rows, of_matrices, plan=plan, params=_host.compiler_params())


ragged_dot_fp8.Config = Config  # `cookbook.ragged_dot_fp8` is this function, not its module.


def bytes_moved(m: int, n: int, k: int, num_groups: int, itemsize: int = 2) -> int:
    """Rows and the matrices of the `num_groups` groups that have rows read once, the result written once."""
    return m * k + num_groups * k * n + itemsize * m * n
