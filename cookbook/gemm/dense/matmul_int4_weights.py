# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and 4-bit integer weights with scales of groups along K.

    o = x @ ((q - zeros) * scales), computed as oᵀ = wᵀ xᵀ, where q are integers from 0 to 15

Shapes: x (M, K), w (ceil(N / 64), ceil(K / 64), 512), scales and zeros (ceil(K / group_size), N), o (M, N). x is
bfloat16 or float16, w uint32, o bfloat16, float16 or float32; sums are float32. K must be a multiple of 8, the 16 bytes
of a row of x that TMA asks for. A weight times its scale is rounded once, to the dtype of x: so the error is that of a
product with a 16-bit matrix of the same values.

Role and barrier tables: `kernel.py`, where the operand `a` is w and the operand `b` is x; the kernel is that of
`kernel_int8_weights.py`; `four_bits.py` says how weights lie and what becomes of them; `pack.py` packs them.

Bound by: the memory that the weights come from with few rows of x, the tensor cores with many.

Not supported: groups out of order (GPTQ's `desc_act`); zero points that are no integers; batches (use `jax.vmap`);
differentiation. Chapter: notebooks/09c_four_bits.ipynb. Source: Frantar et al., "MARLIN" (2024), for packing weights in
the order of a warp's operands; GPTQ (2022) and AWQ (2023), for the use.
"""

import jax
import jax.numpy as jnp

from ... import _host
from .. import arguments
from ..launch import fused_product
from ..references import exact_product, rounded
from ..references import flops as flops
from ..tiles import Tiles
from . import cost_int8_weights
from .four_bits import E2M1, Integers, in_runs
from .kernel_int8_weights import Config, in_form, kernel, plan_of, require_config
from .pack import integers, shape_of
from .split_rows import split_rows

GROUPS = 32, 64, 128  # Sizes of groups along K.


def matmul_int4_weights_reference(x, w, scales, zeros=None, group_size=128, weight_dtype=jnp.bfloat16):
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return exact_product(x, rounded(weights_reference(w, scales, zeros, group_size, x.shape[1], dtype), weight_dtype))


def weights_reference(w, scales, zeros, group_size, k, dtype):
    """The (K, N) weights."""
    of_rows = lambda groups: jnp.repeat(groups.astype(dtype), group_size, axis=0)[:k]
    q = integers(w)[: scales.shape[1], :k].T.astype(dtype)
    return (q - (8 if zeros is None else of_rows(zeros))) * of_rows(scales)


def default_config(m: int, n: int, k: int, num_sms: int = 132) -> Config:
    """The configuration of the least predicted time for an (m, k) by (k, n) product."""
    return cost_int8_weights.default_config(m, n, k, num_sms, bits=4)


def ranked(m: int, n: int, k: int, count: int, num_sms: int = 132) -> list[Config]:
    """The `count` configurations of the least predicted time, the best first: those that are worth timing."""
    return cost_int8_weights.ranked(m, n, k, count, num_sms, bits=4)


def matmul_int4_weights(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array,
    *,
    zeros: jax.Array | None = None,
    group_size: int = 128,
    out_dtype: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`x @ ((q - zeros) * scales)`, q being the 4-bit integers of `w`; float32 sums, rounded once.

    Weights are packed once, by `cookbook.pack_int4`, or from the layouts of checkpoints by `cookbook.pack_int4_gptq`
    and `cookbook.pack_int4_awq`.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (M, K); bfloat16 or float16, K a multiple of 8.
      w: (ceil(N / 64), ceil(K / 64), 512); uint32, q from 0 to 15 as packed.
      scales: (ceil(K / group_size), N), of a floating dtype; at most 127 beside x in float16. The fastest are bfloat16
        beside x in bfloat16. An N that is not a multiple of 8 costs a copy of them.
      zeros: of the shape of scales, integers from 0 to 16 of any dtype; None for 8, so that weights are -8 to 7. An N
        that is not a multiple of 16 costs a copy of them.
      group_size: how many values of K share a scale: 32, 64 or 128.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `x`.
      config: tiles, stages, cluster and order; None chooses by shape.

    Returns:
      (M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    op = "matmul_int4_weights"
    x, w, scales = (_host.as_array(op, name, value) for name, value in (("x", x), ("w", w), ("scales", scales)))
    group_size = size_of_groups(op, group_size)
    m, n, k = check_sizes(op, x, w, scales, (jnp.bfloat16, jnp.float16))
    of_groups, form = check_groups(op, scales, zeros, (-(-k // group_size), n), group_size, x.dtype)
    return product(op, x, w, of_groups, form, (m, n, k), out_dtype, config)


matmul_int4_weights.Config = Config  # `cookbook.matmul_int4_weights` is this function, not its module.


def size_of_groups(op: str, group_size) -> int:
    group_size = _host.option(op, "group_size", group_size, int)
    if group_size not in GROUPS:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {group_size=}; must be one of {GROUPS}: repeat the scales of larger ones"
        )
    return group_size


def group_size_of(k: int, groups: int) -> int:
    """The size of groups of which there are so many along K; GROUPS[-1] if none has that number of them."""
    return next((size for size in GROUPS if -(-k // size) == groups), GROUPS[-1])


def check_sizes(op: str, x, w, scales, dtypes, name: str = "x", grouped: bool = False) -> tuple[int, int, int]:
    """M, N and K of the product of x, of this `name`, and packed weights; `dtypes` are those that x may have."""
    if x.dtype not in dtypes or w.dtype != jnp.uint32:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        found = f"{name}.dtype={x.dtype}, {w.dtype=}"
        raise ValueError(f"{_host.PACKAGE}.{op}: {found}; must be {names}, and uint32: pack the weights")
    if x.ndim != 2 or w.ndim != 3 + grouped or scales.ndim != 2 + grouped:
        found = f"{name}.shape={x.shape}, {w.shape=}, {scales.shape=}"
        rule = "be (M, K), and w and scales of a matrix" + (
            " for each group" if grouped else ": use jax.vmap for batches"
        )
        raise ValueError(f"{_host.PACKAGE}.{op}: {found}; {name} must {rule}")
    arguments.require_rows(op, name, x)
    (m, k), n = x.shape, scales.shape[-1]
    if w.shape[-3:] != shape_of(n, k):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {w.shape=} beside K = {k} of {name} and N = {n} of scales; must end with "
            f"{shape_of(n, k)}, blocks of 64 by 64"
        )
    _host.require_indices(op, M=m, N=n, K=k)
    return m, n, k


def check_groups(op: str, scales, zeros, groups: tuple[int, ...], group_size: int, dtype) -> tuple[list, Integers]:
    """The arrays of the shape `groups` as the kernel reads them, and the format; `dtype` is that of x."""
    if scales.shape != groups or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {scales.shape=}, {scales.dtype=}; must be {groups}, floats, one for each group"
        )
    of_groups = [scales.astype(jnp.float32) if scales.dtype.itemsize > 4 else scales]
    if zeros is not None:
        zeros = _host.as_array(op, "zeros", zeros)
        if zeros.shape != groups or zeros.dtype == jnp.bool_:
            raise ValueError(
                f"{_host.PACKAGE}.{op}: {zeros.shape=}, {zeros.dtype=}; must be {groups}, an integer for each scale"
            )
        of_groups.append(zeros if zeros.dtype in (jnp.uint8, dtype) else zeros.astype(dtype))
    zeros_dtype = None if zeros is None else of_groups[1].dtype
    return of_groups, Integers(dtype, of_groups[0].dtype, group_size, zeros_dtype)


def product(op: str, x, w, of_groups, form: Integers | E2M1, sizes, out_dtype, config):
    """The product of checked operands: `of_groups` are the arrays that `form` names."""
    m, n, k = sizes
    out_dtype = _host.require_float(op, x.dtype if out_dtype is None else out_dtype)
    require_config(op, config, form)
    x, w, *of_groups = _host.without_gradient(op, f"{_host.PACKAGE}.matmul of widened weights", x, w, *of_groups)
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    target = _host.require_tensor_cores(op)
    config = config or in_form(default_config(m, n, k, target.num_sms), form, out_dtype)
    tiles, vectors = Tiles(n, m, k, config.tile_k, config, target.num_sms), {}
    if config.fp8:
        x, of_rows = split_rows(x)
        vectors["row_scale"] = of_rows[0, :m] if config.second_kernel else of_rows.ravel()  # It begins with M of them.
    plan, w = plan_of(tiles, w, x, out_dtype, target.interpreted, four_bits=form), in_runs(w)
    of_groups = [_host.pad_to_tiles(numbers, (1, 16 // numbers.dtype.itemsize)) for numbers in of_groups]
    return fused_product(kernel, x, (w, *of_groups), vectors, plan=plan, params=_host.compiler_params())


def bytes_moved(m: int, n: int, k: int, group_size: int = 128, itemsize: int = 2) -> int:
    """x and the result, of `itemsize` bytes, the weights and a scale of 2 bytes for each group, each once."""
    return itemsize * m * (k + n) + n * k // 2 + 2 * n * -(-k // group_size)
