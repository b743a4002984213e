# SPDX-License-Identifier: Apache-2.0
"""One token of Mamba-2's recurrence for each sequence, its state updated in place: decode.

    S = exp(dt a) S + dt x bᵀ        y = S c + d x        for each sequence and head

Shapes: x (B, H, P), dt (B, H), a and d (H,), b and c (B, G, N), state (B, H, P, N) in float32, y as x. Head h of x goes
with head h // (H // G) of b and c. P is a multiple of 8, and N 64, 128, 256 or a multiple of 128 up to 1024. x, b, c,
dt, a and d are of any float dtype, each its own, and all arithmetic is float32.

Role table: one warpgroup per block takes all rows of a state, some at a time: it loads them straight into registers, 16
bytes per thread, updates them, sums their products with c across the threads that share a row, and stores them back. It
has no barriers: nothing is shared.

Other names of the arguments, in `selective_state_update` of mamba_ssm, which takes the state first:

    here            there
    x, b, c         x, B, C
    dt (B, H)       dt (B, H, P), of one value for each head; dt_bias, dt_softplus
    a, d (H,)       A (H, P, N) and D (H, P), of one value for each head
    state           state (B, H, P, N), of any float dtype, changed in place; state_batch_indices
    y               out; z, a gate

Bound by: memory, one read and one write of the states.

Not supported: differentiation (`ssd` has it), `jax.vmap`.
Chapter: notebooks/17b_delta_rule.ipynb.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ... import _device, _host
from ..._device import WARP, WARPGROUP
from .. import arguments

VECTOR = 4  # Values of a thread's load: 16 bytes.
ROW_UNIT = 8  # Rows of 64 values that a warpgroup loads at once.
LOG2E = math.log2(math.e)


def ssd_step_reference(x, dt, a, b, c, state, *, d=None):
    """(y, new state) in at least float32."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    spread = lambda m: jnp.repeat(m.astype(dtype), x.shape[1] // m.shape[1], axis=1)
    wide, dt = x.astype(dtype), dt.astype(dtype)
    decay = jnp.exp(dt * jnp.maximum(a.astype(dtype), jnp.finfo(dtype).min))
    state = decay[..., None, None] * state + (dt[..., None] * wide)[..., None] * spread(b)[:, :, None]
    y = (state * spread(c)[:, :, None]).sum(-1)
    return y if d is None else y + d[:, None] * wide, state


@dataclasses.dataclass(frozen=True)
class Config:
    tile_values: int = 64  # Values of a state that a thread holds at a time: loads in flight.

    def __post_init__(self):
        if self.tile_values not in (8, 16, 32, 64, 128):
            raise ValueError(f"{self.tile_values=} must be 8, 16, 32, 64 or 128 (registers of a thread)")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    config: Config

    @property
    def width(self) -> int:
        """Columns of a piece: what the threads of a warp, or fewer, load at once."""
        return min(self.state_dim, WARP * VECTOR)

    @property
    def rows(self) -> int:
        """Rows of a state that the block has in its registers at a time."""
        fit = max(ROW_UNIT, self.config.tile_values * WARPGROUP // self.state_dim)
        return math.gcd(self.head_dim, 1 << (fit.bit_length() - 1))

    @property
    def layout(self):
        """Threads side by side share a row, 16 bytes each."""
        return _device.lanes_layout(self.width // VECTOR, self.width, VECTOR)


def _kernel(x_gmem, dt_gmem, a_gmem, b_gmem, c_gmem, d_gmem, state_gmem, y_gmem, *, plan: Plan):
    seq, head = lax.axis_index("seq_index"), lax.axis_index("head_index")
    group = _device.div(head, plan.heads // plan.groups)
    shape, starts = (plan.rows, plan.width), range(0, plan.state_dim, plan.width)
    dt = dt_gmem[seq, head].astype(jnp.float32)
    a = jnp.maximum(a_gmem[head].astype(jnp.float32), float(jnp.finfo(jnp.float32).min))  # -inf times 0 is NaN.
    decay = jnp.exp2(dt * a * LOG2E)

    def load(ref, layout):
        return _device.load(ref, layout).astype(jnp.float32)

    def shared(gmem):
        """A row of b or c in pieces, the same for all rows of the state."""
        pieces = [load(gmem.at[seq, group, pl.ds(start, plan.width)], plan.layout.reduce(0)) for start in starts]
        return [lax.broadcast_in_dim(piece, shape, [1]) for piece in pieces]

    b, c = shared(b_gmem), shared(c_gmem)

    @pl.loop(0, plan.head_dim // plan.rows)
    def _(tile):
        rows = pl.ds(tile * plan.rows, plan.rows)
        at = [state_gmem.at[seq, head, rows, pl.ds(start, plan.width)] for start in starts]
        x = load(x_gmem.at[seq, head, rows], plan.layout.reduce(1))
        scaled = lax.broadcast_in_dim(dt * x, shape, [0])
        state = [load(ref, plan.layout) * decay + scaled * piece for ref, piece in zip(at, b, strict=True)]
        y = functools.reduce(jnp.add, [s * piece for s, piece in zip(state, c, strict=True)]).sum(axis=1)
        for ref, piece in zip(at, state, strict=True):
            _device.store(ref, piece)
        y = y if d_gmem is None else y + d_gmem[head].astype(jnp.float32) * x
        _device.store(y_gmem.at[seq, head, rows], y.astype(y_gmem.dtype))


@functools.partial(jax.jit, static_argnames=("config", "params"))
def _call(x, dt, a, b, c, d, state, config: Config, params):
    """(y, state), from arrays to arrays."""
    (_, heads, size), (_, groups, state_dim) = x.shape, b.shape
    plan, state = Plan(heads, groups, size, state_dim, config), _host.ref_of("ssd_step", state)
    y = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(len(x), heads),
        grid_names=("seq_index", "head_index"),
        compiler_params=params,
    )(x, dt, a, b, c, d, state)
    return _host.apart((y, jax.freeze(state)))


@functools.partial(jax.jit, static_argnames=("config", "params"))
def _call_on_ref(x, dt, a, b, c, d, state, config: Config, params):
    """Inside `jit` a Ref is the value that it has at the time, and XLA gives all its values one buffer: no copies."""
    y, state[...] = _call(x, dt, a, b, c, d, state[...], config, params)
    return y


def _check(x, dt, a, b, c, d, state) -> None:
    op = f"{_host.PACKAGE}.ssd_step"
    for name, m, axes in (("x", x, "B, H, P"), ("b", b, "B, G, N")):
        if m.ndim != 3:
            raise ValueError(f"{op}: {name}.shape={m.shape}; must be ({axes}): one token of each sequence")
    (batch, heads, size), (_, groups, state_dim) = x.shape, b.shape
    for name, m, shape in (
        ("dt", dt, (batch, heads)), ("a", a, (heads,)), ("b", b, (batch, groups, state_dim)), ("c", c, b.shape),
        ("d", d, (heads,)), ("state", state, (batch, heads, size, state_dim)),
    ):  # fmt: skip
        if m is not None and m.shape != shape:
            raise ValueError(f"{op}: {name}.shape={m.shape}; must be {shape}, to go with {x.shape=} and {b.shape=}")
    for name, m in (("x", x), ("dt", dt), ("a", a), ("b", b), ("c", c), ("d", d)):
        if m is not None and m.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise ValueError(f"{op}: {name}.dtype={m.dtype}; must be bfloat16, float16 or float32: cast it")
    if state.dtype != jnp.float32:
        raise ValueError(f"{op}: {state.dtype=}; must be float32, since it sums over all tokens: cast it")
    arguments.check_groups("ssd_step", "x", heads, "b and c", groups)
    if size % ROW_UNIT or (state_dim != 64 and state_dim % 128) or not 64 <= state_dim <= 1024:
        raise ValueError(
            f"{op}: heads of x have {size} values, those of b and c {state_dim}; must be a multiple of {ROW_UNIT}, and "
            "64 or a multiple of 128 up to 1024: pad with zeros (jnp.pad)"
        )


def ssd_step(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    state: jax.Array,
    *,
    d: jax.Array | None = None,
    config: Config | None = None,
    **others,
) -> tuple[jax.Array, jax.Array]:
    """One token of Mamba-2's recurrence for each sequence, its state updated in place.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`,
    with `check_vma=False`.

    Args:
      x: (B, H, P), bfloat16, float16 or float32, as are all others but `state`, each its own; P is a multiple of 8.
      dt: (B, H), at least 0: how far the token moves the state.
      a: (H,), at most 0: the token multiplies the state by exp(dt a); -inf clears it where dt is not 0.
      b, c: (B, G, N); G divides H, and N is 64 or a multiple of 128 up to 1024.
      state: (B, H, P, N), float32; an array, or a Ref (`jax.new_ref`).
      d: (H,), how much of x is added to y; None for nothing.
      config: values per thread; None chooses.
      others: arguments that other libraries have, such as `z` and `dt_bias`, if they are None or False.

    Returns:
      (y, state), y of the shape and dtype of `x`. Donate the state to `jax.jit` (`donate_argnums`), or XLA copies it
      first, unless it was made in the same `jit` and is not used afterwards. With a Ref: y alone, and the Ref is
      written; nothing is copied.

    Raises:
      ValueError: a shape or dtype is not supported, or the state varies over a mesh that `jax.shard_map` checks
        (give it check_vma=False); RuntimeError: no GPU.
    """
    _host.elsewhere("ssd_step", others, arguments.ELSEWHERE)
    x, dt, a, b, c, d = arguments.arrays("ssd_step", dict(x=x, dt=dt, a=a, b=b, c=c), dict(d=d))
    state, by_ref = arguments.state_or_ref("ssd_step", state)
    _check(x, dt, a, b, c, d, state)
    config = _host.require_config("ssd_step", config, Config) or Config()
    if 0 in x.shape:
        return jnp.zeros_like(x) if by_ref else (jnp.zeros_like(x), state)
    _host.require_target("ssd_step")
    refuse = functools.partial(_host.without_gradient, "ssd_step", "ssd_step_reference, of the same module,")
    x, dt, a, b, c, d = refuse(x, dt, a, b, c, d)
    state = state if by_ref else refuse(state)[0]
    call = _call_on_ref if by_ref else _call
    return call(x, dt, a, b, c, d, state, config, _host.compiler_params(approx_math=True))


ssd_step.Config = Config  # `cookbook.ssd_step` is this function, not its module.


def flops(batch: int, heads: int, head_dim: int, state_dim: int) -> int:
    """Two multiply-adds and a multiplication for each value of a state."""
    return 5 * batch * heads * head_dim * state_dim


def bytes_moved(batch: int, heads: int, head_dim: int, groups: int, state_dim: int) -> int:
    """The states of 32 bits, read and written; x, y, b and c of 16 bits."""
    return batch * (8 * heads * head_dim * state_dim + 4 * heads * head_dim + 4 * groups * state_dim)
