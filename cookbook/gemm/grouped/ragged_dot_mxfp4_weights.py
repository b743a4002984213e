# SPDX-License-Identifier: Apache-2.0
"""Product of groups of rows with a matrix of MXFP4 weights each: e2m1 values, and a power of two for each 32 along K.

    o[rows of group g] = lhs[rows of group g] @ (e2m1 * 2^e)[g], computed as oᵀ = rhsᵀ lhsᵀ

Shapes: lhs (M, K), w (G, ceil(N / 64), ceil(K / 64), 512), scales (G, ceil(K / 64), N), group_sizes (G,), o (M, N). lhs
is bfloat16, w uint32, scales uint16, o bfloat16 or float16; sums are float32. K must be a multiple of 8. Weights are
exact. Results in bfloat16 for few rows a group are products in FP8 of lhs in two halves (`dense/halves.py`), whose sums
of 32 values of K have about 14 bits. In products of 16 bits, sums are 2^-40 of their size until the end, so results
below 2^-86 lose bits.

Role and barrier tables: `kernel.py`; weights and scales: `dense/four_bits.py`; tiles: `plan.py`.

Bound by: the memory that the weights come from with few rows a group; with many, the tensor cores.

Not supported: float16 rows; biases; batches (use `jax.vmap`); differentiation. Source: gpt-oss (2025),
whose experts these are.
"""

import functools

import jax
import jax.numpy as jnp

from ... import _host
from ..dense.four_bits import E2M1
from ..dense.kernel_int8_weights import Config, in_both_forms
from ..dense.matmul_int4_weights import check_sizes
from ..dense.matmul_mxfp4_weights import widened
from ..references import flops as flops
from .ragged_dot import ragged_dot_reference
from .ragged_dot_int4_weights import grouped
from .ragged_dot_int4_weights import ranked as ranked_of_integers


def ragged_dot_mxfp4_weights_reference(lhs, w, scales, group_sizes, group_offset=0):
    dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    return ragged_dot_reference(lhs, widened(w, scales, dtype)[:, : lhs.shape[1]], group_sizes, group_offset)


@functools.lru_cache(4096)
def default_config(m: int, n: int, k: int, num_groups: int, num_sms: int = 132) -> Config:
    """The configuration of the least predicted time, of results in bfloat16: for few rows it is in FP8."""
    return ranked(m, n, k, num_groups, 1, num_sms)[0]


def ranked(m: int, n: int, k: int, num_groups: int, count: int, num_sms: int = 132) -> list[Config]:
    """The `count` configurations of the least predicted time, the best first: those that are worth timing."""
    dtype = jnp.dtype(jnp.bfloat16)
    return in_both_forms(ranked_of_integers(m, n, k, num_groups, count, num_sms), E2M1(dtype), dtype, warpgroups=4)


def ragged_dot_mxfp4_weights(
    lhs: jax.Array,
    w: jax.Array,
    scales: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | None = None,
    out_dtype: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """The product of `lhs` and one matrix of MXFP4 weights for each group of rows; weights are exact.

    Few rows are multiplied in FP8 if the result is bfloat16, which hides what these sums lose: see `config`.

    `cookbook.pack_mxfp4` packs weights and scales, once, from gpt-oss's layout.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      lhs: (M, K); bfloat16, K a multiple of 8.
      w: (G, ceil(N / 64), ceil(K / 64), 512); uint32, as packed.
      scales: (G, ceil(K / 64), N); uint16, as packed. An N that is not a multiple of 8 costs a copy of them.
      group_sizes, group_offset: as `cookbook.ragged_dot` takes them.
      out_dtype: bfloat16 or float16; None for the dtype of `lhs`.
      config: tiles, stages, cluster and order; None for the fastest predicted ones. With `fp8=False` products are of
        16 bits.

    Returns:
      (M, N) of `out_dtype`, from float32 sums, rounded once; zeros in rows that belong to no group of w. In FP8 a row
      of lhs with an infinity gives NaN.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    op = "ragged_dot_mxfp4_weights"
    lhs, w, scales = (_host.as_array(op, name, x) for name, x in (("lhs", lhs), ("w", w), ("scales", scales)))
    return grouped(op, *checked(op, lhs, w, scales), group_sizes, group_offset, out_dtype=out_dtype, config=config)


def checked(op: str, lhs, w, scales):
    """The first operands of `grouped`.

    Raises:
      ValueError: they do not go together.
    """
    sizes = _, n, k = check_sizes(op, lhs, w, scales, (jnp.bfloat16,), "lhs", grouped=True)
    if scales.shape != (units := (len(w), -(-k // 64), n)) or scales.dtype != jnp.uint16:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {scales.shape=}, {scales.dtype=}; must be {units} and uint16: pack weights and "
            f"scales together, with {_host.PACKAGE}.pack_mxfp4"
        )
    return sizes, lhs, w, [scales], E2M1(lhs.dtype)


ragged_dot_mxfp4_weights.Config = Config  # `cookbook.ragged_dot_mxfp4_weights` is this function, not its module.


def bytes_moved(m: int, n: int, k: int, num_groups: int, itemsize: int = 2) -> int:
    """Rows and the weights of the `num_groups` groups that have rows read once, the result written once."""
    return itemsize * m * (k + n) + num_groups * (k * n // 2 + n * -(-k // 32))
