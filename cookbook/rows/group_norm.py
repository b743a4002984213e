# SPDX-License-Identifier: Apache-2.0
"""Normalisation of heads, or of other groups of the last axis, with a gate: Mamba-2's, Qwen3-Next's, fla's.

    norm_before_gate:  y = norm(x) * silu(gate)        otherwise:  y = norm(x * silu(gate))
    norm(t)[c] = (t[c] - mean) / sqrt(mean((t - mean)**2) + eps) * weight[c] + bias[c]

where means are those of the group that c is in, and that which is subtracted is 0 with `is_rms_norm`.

Shapes: x and gate (..., C), groups of G neighbouring columns; weight and bias (C,), or (G,) if all groups share them; y
has the shape of x. All are float32, bfloat16 or float16, each its own. The arithmetic is float32.

Role table: a group is a row of `rms_norm` (`norm.py`), so several heads of 64 to 256 share a warpgroup, and each has
neighbouring threads of one warp to itself. Groups with weights of their own take turns: the weight is a matrix, and
row r of x has its row r % groups. The backward kernel is that of all norms (`norm_backward.py`): dgate comes with dx.

Bound by: memory (two reads, one write; backward three reads, two writes).
Not supported: groups longer than 65536, activations other than silu, second derivatives.
Chapter: notebooks/23b_norms.ipynb. Sources: Dao and Gu, "Transformers are SSMs" (2024); Wu and He, "Group
Normalization" (2018).
"""

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host
from . import core, norm_vjp
from .norm import Norm
from .plan import Config


def group_norm_reference(
    x, weight, bias=None, gate=None, group_size=None, eps=1e-5, norm_before_gate=True, is_rms_norm=True
):
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    groups = lambda v: v.astype(dtype).reshape(*v.shape[:-1], -1, group_size or x.shape[-1])
    t, share = groups(x), 1 if gate is None else groups(jax.nn.silu(gate.astype(dtype)))
    t = t if norm_before_gate else t * share
    t = t if is_rms_norm else t - jnp.mean(t, axis=-1, keepdims=True)
    y = t * lax.rsqrt(jnp.mean(t * t, axis=-1, keepdims=True) + eps) * groups(weight)
    y = y if bias is None else y + groups(bias)
    return (y * share if norm_before_gate else y).reshape(x.shape)


def group_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    gate: jax.Array | None = None,
    group_size: int | None = None,
    eps: float = 1e-5,
    norm_before_gate: bool = True,
    is_rms_norm: bool = True,
    out_dtype: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Normalises groups of the last axis, each by itself, and multiplies by `silu(gate)`: after the norm or before it.

    A layer of Mamba-2 has `gate=z, norm_before_gate=False, group_size=d_inner // n_groups` and a weight for each
    column; Qwen3-Next and fla's gated delta net have x and gate of (..., heads, head_dim), and one weight of a head.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (..., C) float32, bfloat16 or float16.
      weight: (C,), or (group_size,) for all groups alike, of any of these dtypes; None for ones.
      bias: as `weight`; None for zeros.
      gate: of the shape of `x` and any of these dtypes; None for no gate.
      group_size: columns of a group, a divisor of C, at most 65536; None for C.
      eps: added to the mean of squares, 0 or more.
      norm_before_gate: whether what is normalised is x, not `x * silu(gate)`.
      is_rms_norm: whether no mean is subtracted.
      out_dtype: dtype of the result, any of these; None for the dtype of `x`.
      config: groups per block, a multiple that their size sets; None chooses by shape.

    Returns:
      (..., C) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype or group size is not supported, or `config` does not fit the shape;
        RuntimeError: no GPU.
    """
    op = "group_norm"
    x = core.require_floats(op, "x", x)
    gates = norm_vjp.require_second(op, "gate", gate, x)
    size = x.shape[-1] if group_size is None else _host.option(op, "group_size", group_size, int)
    if size != x.shape[-1] and (size < 1 or x.shape[-1] % size):
        raise ValueError(f"{_host.PACKAGE}.{op}: {group_size=}; must divide {x.shape[-1]}, the columns of x")
    rows = x.reshape(*x.shape[:-1], x.shape[-1] // max(size, 1), size)
    rows = core.require_rows(op, "x", rows)
    weight = jnp.ones(size, x.dtype) if weight is None else weight
    weights = [_weight(op, name, w, x, size) for name, w in (("weight", weight), ("bias", bias)) if w is not None]
    groups = max(w.size for w in weights) // max(size, 1)
    if groups > 1:
        weights = [jnp.broadcast_to(w.reshape(-1, size), (groups, size)) for w in weights]
    norm_before_gate, is_rms_norm = (
        _host.option(op, name, value, bool)
        for name, value in (("norm_before_gate", norm_before_gate), ("is_rms_norm", is_rms_norm))
    )
    kind = ("after" if norm_before_gate else "before") if gates else None
    norm = Norm(op, norm_vjp.require_eps(op, eps), not is_rms_norm, kind, max(groups, 1))
    out_dtype = _host.require_float(op, x.dtype if out_dtype is None else out_dtype)
    arrays = [rows, *(gate.reshape(rows.shape) for gate in gates)]
    return norm_vjp.apply(norm, arrays, weights, out_dtype, config)[0].reshape(x.shape)


def _weight(op: str, name: str, weight, x, size: int):
    weight = core.require_floats(op, name, weight)
    if weight.shape not in (x.shape[-1:], (size,)):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name}.shape={weight.shape}; must be {x.shape[-1:]}, one value for each column of "
            f"x, or {(size,)}, one for each of a group"
        )
    return weight


group_norm.Config = Config  # `cookbook.group_norm` is this function, not its module.


def flops(rows: int, cols: int) -> int:
    """A square, an addition and two multiplications for each value; silu of the gate, and its product."""
    return 9 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    """x and the gate read, y written."""
    return 3 * rows * cols * itemsize
