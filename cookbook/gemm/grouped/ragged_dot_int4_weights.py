# SPDX-License-Identifier: Apache-2.0
"""Product of groups of rows with a matrix of 4-bit integers each, with scales of groups along K.

    o[rows of group g] = lhs[rows of group g] @ ((q - zeros) * scales)[g], computed as oᵀ = rhsᵀ lhsᵀ

Shapes: lhs (M, K), w (G, ceil(N / 64), ceil(K / 64), 512), scales and zeros (G, ceil(K / group_size), N), group_sizes
(G,), o (M, N). lhs is bfloat16 or float16, w uint32, o bfloat16 or float16; sums are float32. K must be a multiple of
8. A weight times its scale is rounded once, to the dtype of lhs.

Role and barrier tables: `kernel.py`; weights and scales: `dense/four_bits.py`; tiles: `plan.py`.

Bound by: the memory that the weights come from with few rows a group; with many, the tensor cores.

Not supported: biases; batches (use `jax.vmap`); differentiation.
"""

import functools

import jax
import jax.numpy as jnp

from ... import _host
from ..dense.four_bits import E2M1, Integers, in_runs
from ..dense.kernel_int8_weights import Config, in_form, plan_of, require_config
from ..dense.matmul_int4_weights import check_groups, check_sizes, size_of_groups, weights_reference
from ..dense.split_rows import SplitRows, split_rows
from ..references import flops as flops
from ..references import rounded
from . import arguments
from .kernel import grouped_product
from .kernel_int8_weights import kernel_four_bits, pad_bias
from .plan import RowTiles
from .ragged_dot import ragged_dot_reference
from .ragged_dot_int8_weights import ranked as ranked_of_bits


def ragged_dot_int4_weights_reference(lhs, w, scales, group_sizes, group_offset=0, zeros=None, group_size=128,
                                      weight_dtype=jnp.bfloat16):  # fmt: skip
    dtype, k = jnp.promote_types(lhs.dtype, jnp.float32), lhs.shape[1]
    of_matrix = lambda w, scales, zeros=None: weights_reference(w, scales, zeros, group_size, k, dtype)
    matrices = jax.vmap(of_matrix)(w, scales, *(() if zeros is None else (zeros,)))
    return ragged_dot_reference(lhs, rounded(matrices, weight_dtype), group_sizes, group_offset)


@functools.lru_cache(4096)
def default_config(m: int, n: int, k: int, num_groups: int, num_sms: int = 132) -> Config:
    """The configuration of the least predicted time, if groups are alike."""
    return ranked(m, n, k, num_groups, 1, num_sms)[0]


def ranked(m: int, n: int, k: int, num_groups: int, count: int, num_sms: int = 132) -> list[Config]:
    """The `count` configurations of the least predicted time, the best first: those that are worth timing."""
    return ranked_of_bits(m, n, k, num_groups, count, num_sms, bits=4)


def ragged_dot_int4_weights(
    lhs: jax.Array,
    w: jax.Array,
    scales: jax.Array,
    group_sizes: jax.Array,
    *,
    zeros: jax.Array | None = None,
    group_size: int = 128,
    group_offset: jax.Array | None = None,
    out_dtype: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`lhs` times one matrix of `(q - zeros) * scales` for each group of rows, q being the 4-bit integers of `w`.

    `cookbook.pack_int4` packs weights, once.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      lhs: (M, K); bfloat16 or float16, K a multiple of 8.
      w: (G, ceil(N / 64), ceil(K / 64), 512); uint32, q from 0 to 15 as packed.
      scales, zeros, group_size: as `cookbook.matmul_int4_weights` takes them, with a leading axis of G.
      group_sizes, group_offset: as `cookbook.ragged_dot` takes them: groups of rows, not along K.
      out_dtype: bfloat16 or float16; None for the dtype of `lhs`.
      config: tiles, stages, cluster and order; None for the fastest predicted ones.

    Returns:
      (M, N) of `out_dtype`, from float32 sums, rounded once; zeros in rows that belong to no group of w.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    op = "ragged_dot_int4_weights"
    lhs, w, scales = (_host.as_array(op, name, x) for name, x in (("lhs", lhs), ("w", w), ("scales", scales)))
    operands = checked(op, lhs, w, scales, zeros, group_size)
    return grouped(op, *operands, group_sizes, group_offset, out_dtype=out_dtype, config=config)


ragged_dot_int4_weights.Config = Config  # `cookbook.ragged_dot_int4_weights` is this function, not its module.


def checked(op: str, lhs, w, scales, zeros, group_size: int):
    """The first operands of `grouped`.

    Raises:
      ValueError: they do not go together.
    """
    group_size = size_of_groups(op, group_size)
    sizes = _, n, k = check_sizes(op, lhs, w, scales, (jnp.bfloat16, jnp.float16), "lhs", grouped=True)
    along_k = len(w), -(-k // group_size), n
    return sizes, lhs, w, *check_groups(op, scales, zeros, along_k, group_size, lhs.dtype)


def grouped(
    op: str, sizes, lhs, w, of_groups, form: Integers | E2M1, group_sizes, group_offset, *, out_dtype=None, config=None,
    bias=None,
):  # fmt: skip
    """The grouped product of checked operands, plus (G, N) `bias`: `of_groups` are the arrays that `form` names.

    `lhs` may be `SplitRows` where the default configuration multiplies in FP8; then `out_dtype` is given.
    """
    (m, n, k), num_groups = sizes, len(w)
    out_dtype = _host.require_float(op, lhs.dtype if out_dtype is None else out_dtype)
    if out_dtype == jnp.float32:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {out_dtype=}; must be bfloat16 or float16, because tiles are transposed: cast it"
        )
    require_config(op, config, form)
    if config is not None and config.split_k > 1:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config=}; must be of split_k=1: the device alone knows how many tiles there are"
        )
    group_sizes, group_offset = arguments.check_groups(op, group_sizes, group_offset, m, num_groups)
    instead = f"{_host.PACKAGE}.ragged_dot of widened weights"
    operands, tree = jax.tree.flatten((lhs, w, of_groups))
    lhs, w, of_groups = jax.tree.unflatten(tree, _host.without_gradient(op, instead, *operands))
    if 0 in (m, n, k, num_groups):
        return jnp.zeros((m, n), out_dtype)
    target = _host.require_tensor_cores(op)
    config = config or in_form(default_config(m, n, k, num_groups, target.num_sms), form, out_dtype, warpgroups=4)
    tiles = RowTiles(n, m, k, config.tile_k, config, target.num_sms, num_groups=num_groups, axis=1)
    of_rows = None
    if config.fp8:
        lhs, of_rows = lhs if isinstance(lhs, SplitRows) else split_rows(lhs)
        of_rows = of_rows[None]  # As `pad_row_scales` makes them.
    plan = plan_of(tiles, w, lhs, out_dtype, target.interpreted, stacked=True, four_bits=form)
    of_groups = [_host.pad_to_tiles(numbers, (1, 1, 16 // numbers.dtype.itemsize)) for numbers in of_groups]
    table, params = tiles.table_of(group_sizes, group_offset), _host.compiler_params()
    bias = None if bias is None else pad_bias(bias, plan)
    return grouped_product(
        kernel_four_bits, lhs, (in_runs(w), *of_groups), table, of_rows, bias, plan=plan, params=params
    )


def bytes_moved(m: int, n: int, k: int, num_groups: int, group_size: int = 128, itemsize: int = 2) -> int:
    """Rows and the weights of the `num_groups` groups that have rows read once, the result written once."""
    return itemsize * m * (k + n) + num_groups * (k * n // 2 + 2 * n * -(-k // group_size))
