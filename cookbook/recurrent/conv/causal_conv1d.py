# SPDX-License-Identifier: Apache-2.0
"""The short depthwise convolution before a recurrence: each channel, summed over its last W tokens.

    y[t, d] = act(bias[d] + sum over j < W of weight[d, j] x[t - (W - 1) + j, d])        act: silu, or none

Shapes: x (B, T, D), weight (D, W), bias (D,), states (B, D, W - 1), y as x. x[-1] and so on are the initial state's:
its last column is the token before the first. All arrays are bfloat16, float16 or float32, each its own; sums are
float32. W is from 2 to 8; T and D are free.

Role table: one warpgroup per block has a run of rows of one sequence, and a tile of columns. It walks down the rows:
its threads load some, 8 or 16 bytes each at a time, straight into registers, where the W - 1 rows before them still
are. There are no barriers: nothing is shared. `plan.py` says how blocks are cut, and `kernel_backward.py` has the
gradients, which one kernel computes in the same way.

Other names of the arguments, and other layouts:

    here                   causal_conv1d_fn of causal_conv1d    causal_conv1d of fla
    x (B, T, D)            x (B, D, T)                          x (B, T, D)
    weight (D, W)          weight (D, W)                        weight (D, W)
    initial_state          initial_states (B, D, W - 1)         initial_state (B, D, W)
    return_final_state     return_final_states                  output_final_state
    states (B, D, W - 1)   (B, D, W - 1)                        (B, D, W), one token more
    cu_seqlens             seq_idx (B, T)                       cu_seqlens

A state from fla is `theirs[:, :, 1:]` here. That of transformers' Mamba-2 and Qwen3-Next is as fla's, and their weight
is a `conv1d.weight` of (D, 1, W), `weight[:, 0]` here.

Bound by: memory, one read of x and one write of y. Backward: x and dy are read and dx is written.

Not supported: second derivatives, other activations, dilation, groups of channels.
Chapter: notebooks/23b_norms.ipynb.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ... import _host
from .. import arguments
from . import kernel, kernel_backward
from .plan import COLUMNS_MIN, Config, Plan, default_config


def causal_conv1d_reference(x, weight, bias=None, *, activation=None, cu_seqlens=None, initial_state=None):
    """(y, final state) in at least float32."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    (batch, length, columns), taps = x.shape, weight.shape[1]
    rows = x.astype(dtype).reshape(-1, columns)
    starts = jnp.arange(batch + 1) * length if cu_seqlens is None else cu_seqlens
    states = jnp.zeros((len(starts) - 1, columns, taps - 1), dtype) if initial_state is None else initial_state
    seq, row = jnp.searchsorted(starts[1:], jnp.arange(len(rows)), side="right"), jnp.arange(len(rows))
    is_real, seq = seq < len(starts) - 1, jnp.minimum(seq, len(starts) - 2)

    def tap(seq, row, first):
        """The rows `row` of the sequences `seq`, those before the first one by their initial states."""
        before = states.astype(dtype)[seq, :, jnp.clip(row - first + taps - 1, 0, taps - 2)]
        return jnp.where((row >= first)[:, None], rows[jnp.clip(row, 0, len(rows) - 1)], before)

    y = sum(weight[:, j].astype(dtype) * tap(seq, row - (taps - 1) + j, starts[seq]) for j in range(taps))
    y = y if bias is None else y + bias.astype(dtype)
    y = jnp.where(is_real[:, None], y if activation is None else jax.nn.silu(y), 0)
    final = [tap(jnp.arange(len(starts) - 1), starts[1:] - (taps - 1) + j, starts[:-1]) for j in range(taps - 1)]
    return y.reshape(x.shape), jnp.stack(final, -1)


def _last_rows(plan: Plan, cu_seqlens):
    """(the last W - 1 rows of each sequence, the first row of each): (num_seqs, W - 1) and (num_seqs, 1)."""
    if plan.is_packed:
        starts = plan.sequences.starts(cu_seqlens)
    else:
        starts = np.arange(plan.num_seqs + 1, dtype=np.int32) * plan.length
    return starts[1:, None] + np.arange(1 - plan.taps, 0, dtype=np.int32), starts[:-1, None]


def _states(x_rows, initial, rows, first):
    """States (num_seqs, W - 1, D) after `rows`, of which `x_rows` are those of x."""
    if initial is None:
        before = jnp.zeros((), x_rows.dtype)
    else:
        at = jnp.clip(rows - first + initial.shape[1], 0, initial.shape[1] - 1)
        before = jnp.take_along_axis(initial, at[..., None], axis=1)
    dtype = x_rows.dtype if initial is None else initial.dtype
    return jnp.where((rows >= first)[..., None], x_rows.astype(dtype), before)


def _params(x):
    return _host.compiler_params(approx_math=x.dtype.itemsize == 2, unsafe_no_auto_barriers=True)


@functools.partial(jax.jit, static_argnames=("plan", "has_final", "params"))
def _launch(x, weight, bias, initial, cu_seqlens, *, plan: Plan, has_final: bool, params):
    """(y, final states (num_seqs, W - 1, D) or None) of rows x and weight (W, D)."""
    y = kernel.launch(plan, x, weight, bias, initial, cu_seqlens, params)
    if not has_final:
        return y, None
    with _host.own_options():
        rows, first = _last_rows(plan, cu_seqlens)
        return y, _states(x[jnp.maximum(rows, 0)], initial, rows, first)


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def _launch_backward(operands, dy, d_final, *, plan: Plan, params):
    """The gradients of the operands but cu_seqlens."""
    x, weight, bias, initial, cu_seqlens = operands
    dx, sums, d_initial = kernel_backward.launch(plan, x, dy, weight, bias, initial, cu_seqlens, params)
    if d_final is not None:
        with _host.own_options():
            rows, first = _last_rows(plan, cu_seqlens)
            of = lambda x_rows, initial: _states(x_rows, initial, rows, first)
            _, pull = jax.vjp(of, x[jnp.maximum(rows, 0)], initial)
            dx_rows, more = pull(d_final)
            dx = dx.at[jnp.maximum(rows, 0)].add(dx_rows)
            d_initial = None if initial is None else d_initial + more
    dweight, dbias = sums[:-1].astype(weight.dtype), None if bias is None else sums[-1].astype(bias.dtype)
    return dx, dweight, dbias, d_initial


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _conv(plan: Plan, backward_plan: Plan, has_final: bool, x, weight, bias, initial, cu_seqlens):
    return _launch(x, weight, bias, initial, cu_seqlens, plan=plan, has_final=has_final, params=_params(x))


def _conv_fwd(plan: Plan, backward_plan: Plan, has_final: bool, *operands):
    forward = functools.partial(_launch, plan=plan, has_final=has_final, params=_params(operands[0]))
    return _host.without_derivative("causal_conv1d", forward)(*operands), operands


def _conv_bwd(plan: Plan, backward_plan: Plan, has_final: bool, operands, cotangents):
    _host.require_target("causal_conv1d")
    gradients = functools.partial(_launch_backward, plan=backward_plan, params=_params(operands[0]))
    return *_host.without_derivative("causal_conv1d", gradients)(operands, *cotangents), None


_conv.defvjp(_conv_fwd, _conv_bwd)


def plans(sizes, itemsize: int, has_silu: bool, config: Config | None, target: _host.Target) -> tuple[Plan, Plan]:
    """The plans of the forward and of the backward kernel; `sizes` are (sequences, rows, whether they are packed, D,
    W)."""
    num_seqs, num_rows, is_packed, columns, taps = sizes
    # Packed sequences may be of any length: many are cut like one.
    seqs, length = (1, num_rows) if is_packed else (num_seqs, num_rows // num_seqs)
    chosen = functools.partial(default_config, seqs, length, columns, taps, itemsize, target.num_sms)
    of = lambda config: Plan(*sizes, has_silu, config, target.interpreted)
    return of(config or chosen()), of(chosen(gradients=True))


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    config: Config | None = None,
    **others,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The causal convolution of each channel with its own weights; bitwise reproducible from run to run.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (B, T, D), bfloat16, float16 or float32, as are all others, each its own.
      weight: (D, W), W from 2 to 8; the last column is that of the token itself.
      bias: (D,), or None for zeros.
      activation: "silu", which "swish" is too, or None.
      cu_seqlens: (num_seqs + 1,), integers: where packed sequences begin in a batch of 1, and where the last one ends.
        States then have num_seqs in the place of B. The first one begins at 0.
      initial_state: (B, D, W - 1), the tokens before the first one, the latest last; None for zeros.
      return_final_state: also return the last W - 1 tokens of each sequence, which is the state for more of it.
      config: rows and columns per block of the forward pass; None chooses by shape.
      others: arguments that other libraries have, such as `seq_idx` and `residual`, if they are None or False.

    Returns:
      y, of the shape and dtype of `x`, zeros after the last packed sequence; with `return_final_state` also the
      states, (B, D, W - 1), of the dtype of `initial_state`, or without one of `x`.

    Raises:
      ValueError: a shape, dtype or number is not supported, or `config` does not fit the shape; RuntimeError: no GPU.
    """
    op = "causal_conv1d"
    _host.elsewhere(op, others, arguments.ELSEWHERE)
    optional = dict(bias=bias, cu_seqlens=cu_seqlens, initial_state=initial_state)
    x, weight, bias, cu_seqlens, state = arguments.arrays(op, dict(x=x, weight=weight), optional)
    return_final_state = _host.option(op, "return_final_state", return_final_state, bool)
    if x.ndim != 3:
        raise ValueError(f"{_host.PACKAGE}.{op}: {x.shape=}; must be (B, T, D): reshape it")
    num_seqs = arguments.check_packed(op, cu_seqlens, len(x))
    has_silu = arguments.check_conv(op, x, weight, bias, activation, "initial_state", state, num_seqs)
    (batch, length, columns), taps = x.shape, weight.shape[1]
    padded = max(columns, COLUMNS_MIN)
    config = _require_config(config, padded)
    _host.require_indices(op, rows=batch * length, columns=columns)
    if 0 in x.shape:
        state = jnp.zeros((num_seqs, columns, taps - 1), x.dtype) if state is None else state
        return (x, state) if return_final_state else x
    target = _host.require_target(op)
    rows_of_state = None if state is None else jnp.swapaxes(state, 1, 2)
    pad = lambda x: x if x is None or padded == columns else jnp.pad(
        x, [(0, 0)] * (x.ndim - 1) + [(0, padded - columns)]
    )  # fmt: skip
    operands = [pad(m) for m in (x.reshape(-1, columns), weight.T, bias, rows_of_state)]
    sizes = num_seqs, batch * length, cu_seqlens is not None, padded, taps
    both = plans(sizes, x.dtype.itemsize, has_silu, config, target)
    leaves, tree = jax.tree.flatten((*operands, cu_seqlens))
    y, final = _conv(*both, return_final_state, *jax.tree.unflatten(tree, _host.reverse_only(op, *leaves)))
    y = y[:, :columns].reshape(x.shape)
    return (y, jnp.swapaxes(final[..., :columns], 1, 2)) if return_final_state else y


causal_conv1d.Config = Config  # `cookbook.causal_conv1d` is this function, not its module.


def _require_config(config: Config | None, columns: int) -> Config | None:
    config = _host.require_config("causal_conv1d", config, Config)
    if config and (columns % config.vec or config.vec * COLUMNS_MIN > columns):
        raise ValueError(
            f"{_host.PACKAGE}.causal_conv1d: config.vec={config.vec}; must divide the {columns} columns, and 128 times "
            "it be no more than these: pass a smaller power of 2"
        )
    return config


def flops(rows: int, columns: int, taps: int) -> int:
    """A multiply-add for each value and tap."""
    return 2 * rows * columns * taps


def bytes_moved(rows: int, columns: int, itemsize: int) -> int:
    """x is read and y is written."""
    return 2 * rows * columns * itemsize
