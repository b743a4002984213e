# SPDX-License-Identifier: Apache-2.0
"""One or a few more tokens of each sequence through the causal convolution, its state updated in place: decode.

    y[t, d] = act(bias[d] + sum over j < W of weight[d, j] x[t - (W - 1) + j, d])        x[-1], ..: the state's

Shapes: x (B, D) or (B, T, D), state (B, D, W - 1), weight (D, W), bias (D,), y as x. All arrays are bfloat16, float16
or float32, each its own; sums are float32. W is from 2 to 8. The state's last column is the latest token; afterwards it
holds the last W - 1 of both.

Role table: one warpgroup per block has 128 channels of a sequence, one per thread. It has no barriers: nothing is
shared. A thread reads its channel of the state before it writes it.

Other names of the arguments:

    here                 causal_conv1d_update of causal_conv1d     causal_conv1d_update of fla
    x (B, T, D)          x (B, D, T)                               x (B, T, D)
    state (B, D, W - 1)  conv_state (B, D, W - 1 or more)          cache (B, D, W), one token more
    y                    its result                                its result, and the cache

Bound by: memory, one read and one write of the states.

Not supported: differentiation (`causal_conv1d` has it), `jax.vmap`. Where D is not a multiple of 128, the state is
padded, and so copied.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import WARPGROUP
from .. import arguments
from .causal_conv1d import causal_conv1d_reference
from .plan import convolve, silu

LAYOUT = plgpu.Layout.WG_STRIDED((WARPGROUP,), 1)


def causal_conv1d_step_reference(x, state, weight, bias=None, *, activation=None):
    """(y, new state) in at least float32."""
    rows = x if x.ndim == 3 else x[:, None]
    y, state = causal_conv1d_reference(rows, weight, bias, activation=activation, initial_state=state)
    return y.reshape(x.shape), state


def _kernel(x_gmem, weight_gmem, bias_gmem, state_gmem, y_gmem, *, has_silu: bool):
    (_, length, _), (_, taps) = x_gmem.shape, weight_gmem.shape
    seq = lax.axis_index("seq_index")
    columns = pl.ds(lax.axis_index("tile") * WARPGROUP, WARPGROUP)
    load = lambda ref: _device.load(ref, LAYOUT).astype(jnp.float32)
    weight = [load(weight_gmem.at[columns, tap]) for tap in range(taps)]
    bias = None if bias_gmem is None else load(bias_gmem.at[columns])

    def token(t, before):
        before = (*before, load(x_gmem.at[seq, t, columns]))
        y = convolve(weight, bias, before)
        y = silu(y) if has_silu else y
        _device.store(y_gmem.at[seq, t, columns], y.astype(y_gmem.dtype))
        return before[1:]

    state = tuple(load(state_gmem.at[seq, columns, i]) for i in range(taps - 1))
    state = token(0, state) if length == 1 else lax.fori_loop(0, length, token, state)
    for i, value in enumerate(state):
        _device.store(state_gmem.at[seq, columns, i], value.astype(state_gmem.dtype))


@functools.partial(jax.jit, static_argnames=("has_silu", "params"))
def _call(x, weight, bias, state, has_silu: bool, params):
    """(y, state), from arrays to arrays."""
    columns = x.shape[-1]
    x, weight, bias, state = (
        x if x is None else _padded(x, axis) for x, axis in ((x, 2), (weight, 0), (bias, 0), (state, 1))
    )
    state = _host.ref_of("causal_conv1d_step", state)
    y = _host.kernel(
        functools.partial(_kernel, has_silu=has_silu),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(len(x), x.shape[-1] // WARPGROUP),
        grid_names=("seq_index", "tile"),
        compiler_params=params,
    )(x, weight, bias, state)
    y, state = _host.apart((y, jax.freeze(state)))
    return y[..., :columns], state[:, :columns]


def _padded(x, axis: int):
    return _host.pad_to_tiles(x, tuple(WARPGROUP if i == axis else 1 for i in range(x.ndim)))


@functools.partial(jax.jit, static_argnames=("has_silu", "params"))
def _call_on_ref(x, weight, bias, state, has_silu: bool, params):
    """Inside `jit` a Ref is the value that it has at the time, and XLA gives all its values one buffer: no copies."""
    y, state[...] = _call(x, weight, bias, state[...], has_silu, params)
    return y


def causal_conv1d_step(
    x: jax.Array,
    state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    **others,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """One or a few more tokens of each sequence through `causal_conv1d`, its state updated in place.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`,
    with `check_vma=False`.

    Args:
      x: (B, D), a token of each sequence, or (B, T, D); bfloat16, float16 or float32, as are all others, each its own.
      state: (B, D, W - 1), the tokens before, the latest last, as `causal_conv1d` returns it; an array, or a Ref
        (`jax.new_ref`).
      weight: (D, W), W from 2 to 8; the last column is that of the token itself.
      bias: (D,), or None for zeros.
      activation: "silu", which "swish" is too, or None.
      others: arguments that other libraries have, such as `cache_seqlens`, if they are None or False.

    Returns:
      (y, state), y of the shape and dtype of `x`. Donate the state to `jax.jit` (`donate_argnums`), or XLA copies it
      first, unless it was made in the same `jit` and is not used afterwards. With a Ref: y alone, and the Ref is
      written; nothing is copied if D is a multiple of 128.

    Raises:
      ValueError: a shape or dtype is not supported, or the state varies over a mesh that `jax.shard_map` checks
        (give it check_vma=False); RuntimeError: no GPU.
    """
    op = "causal_conv1d_step"
    _host.elsewhere(op, others, arguments.ELSEWHERE)
    x, weight, bias = arguments.arrays(op, dict(x=x, weight=weight), dict(bias=bias))
    state, by_ref = arguments.state_or_ref(op, state)
    if x.ndim not in (2, 3):
        raise ValueError(f"{_host.PACKAGE}.{op}: {x.shape=}; must be (B, D) or (B, T, D): reshape it")
    has_silu = arguments.check_conv(op, x, weight, bias, activation, "state", state, len(x))
    if 0 in x.shape:
        return x if by_ref else (x, state)
    _host.require_target(op)
    refuse = functools.partial(_host.without_gradient, op, "causal_conv1d")
    leaves, tree = jax.tree.flatten((x, weight, bias))
    rows, weight, bias = jax.tree.unflatten(tree, refuse(*leaves))
    state = state if by_ref else refuse(state)[0]
    rows = rows if x.ndim == 3 else rows[:, None]
    params = _host.compiler_params(approx_math=x.dtype.itemsize == 2, unsafe_no_auto_barriers=True)
    out = (_call_on_ref if by_ref else _call)(rows, weight, bias, state, has_silu, params)
    return out.reshape(x.shape) if by_ref else (out[0].reshape(x.shape), out[1])


def flops(tokens: int, columns: int, taps: int) -> int:
    """A multiply-add for each value and tap."""
    return 2 * tokens * columns * taps


def bytes_moved(seqs: int, tokens: int, columns: int, taps: int, itemsize: int) -> int:
    """The states, read and written; x and y; the weights."""
    return itemsize * columns * (2 * seqs * (taps - 1) + 2 * tokens + taps)
