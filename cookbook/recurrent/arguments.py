# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of the recurrent ops, and what they return where there are no tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host
from .._device import PIECE

SSD_STATE_DIMS = (64, 128, 256)
CONV_WIDTHS = range(2, 9)

# Arguments of fla's, mamba_ssm's and transformers' functions, and what says the same here.
ELSEWHERE = dict(
    output_final_state="call it return_final_state", return_final_states="call it return_final_state",
    initial_states="call it initial_state", return_varlen_states="call it return_final_state",
    use_qk_l2norm_in_kernel="divide q and k by their norms before", head_first="give heads as the third axis",
    normalize="results are not divided by sums of weights", seq_idx="say where sequences begin by cu_seqlens",
    A="call it a", B="call it b", C="call it c", D="call it d", z="multiply the result by jax.nn.silu(z)",
    dt_bias="add it to dt", dt_softplus="pass jax.nn.softplus(dt) as dt",
    dt_limit="pass jnp.clip(dt, *dt_limit) as dt", state_batch_indices="pass the states of these sequences",
    h0="call it initial_state", residual="add it to the result", cache="call it initial_state",
    final_states_out="call it with return_final_state=True", cache_indices="pass the states of these sequences",
    conv_state_indices="pass the states of these sequences", cache_seqlens="a state has its latest token last",
)  # fmt: skip
ELSEWHERE_OF_DELTA = ELSEWHERE | dict(use_qk_l2norm_in_kernel="call it use_qk_l2norm")


def normalized(x):
    """Heads of queries or keys divided by sqrt(sum(x**2) + 1e-6), in at least float32, of the dtype of `x`."""
    values = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (values * lax.rsqrt((values * values).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def arrays(op: str, required: dict, optional: dict | None = None) -> list:
    """The values of `required`, and those of `optional`, which may be None, as JAX arrays.

    Raises:
      ValueError: JAX can make no array of one.
    """
    made = [_host.as_array(op, *item) for item in required.items()]
    return made + [None if x is None else _host.as_array(op, name, x) for name, x in (optional or {}).items()]


def state_or_ref(op: str, state) -> tuple:
    """(a state that a step changes, as a JAX array or as the Ref that it is; whether it is one).

    Raises:
      ValueError: it is neither.
    """
    if not isinstance(state, jax.Ref):
        return _host.as_array(op, "state", state), False
    _host.require_local(op, "state", state)
    return state, True


def check_packed(op: str, cu_seqlens, batch: int) -> int:
    """The number of sequences, of operands with this `batch`.

    Raises:
      ValueError: `cu_seqlens` does not fit them.
    """
    if cu_seqlens is None:
        return batch
    if batch != 1:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: cu_seqlens with a batch of {batch}; packed sequences lie in a batch of 1: reshape"
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: cu_seqlens is {cu_seqlens.shape}, {cu_seqlens.dtype}; must be (num_seqs + 1,) "
            "integers: the first row of each sequence, and the end of the last one"
        )
    return len(cu_seqlens) - 1


def check_state(op: str, name: str, state, shape: tuple[int, ...]) -> None:
    """Checks a state that a caller gives.

    Raises:
      ValueError: it is no float32 array of this shape.
    """
    if state is not None and (state.shape != shape or state.dtype != jnp.float32):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name} is {state.shape}, {state.dtype}; must be {shape}, float32: cast it; a "
            "state with the keys' axis before the values' is transposed by jnp.swapaxes(state, -1, -2)"
        )


def check_delta(op: str, axes: str, q, k, v, g, beta, per_channel: bool = False) -> None:
    """Checks the operands of a delta rule, whose `axes` before the heads are "B, T" or "B"; with gates `per_channel` of
    the keys, or one for each head.

    Raises:
      ValueError: they do not fit each other, or no kernel takes them.
    """
    where, num_axes, dims = f"{_host.PACKAGE}.{op}", 2 + len(axes.split(", ")), (64, 128)
    for name, x, heads in (("q", q, "K, N"), ("k", k, "K, N"), ("v", v, "H, P")):
        if x.ndim != num_axes:
            raise ValueError(f"{where}: {name}.shape={x.shape}; must be ({axes}, {heads}): reshape it")
        if x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != q.dtype:
            raise ValueError(f"{where}: {name}.dtype={x.dtype}; q, k, v must be all bfloat16 or all float16: cast them")
    if q.shape != k.shape or k.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            f"{where}: {q.shape=}, {k.shape=}, {v.shape=}; q and k must have the same shape, and v their ({axes})"
        )
    check_groups(op, "v", v.shape[-2], "q and k", k.shape[-2])
    if k.shape[-1] not in dims or v.shape[-1] not in dims:
        raise ValueError(
            f"{where}: heads of q and k have {k.shape[-1]} values, those of v {v.shape[-1]}; each must be one of {dims}"
            ": pad with zeros (jnp.pad)"
        )
    shapes = dict(g=(*v.shape[:-1], k.shape[-1]) if per_channel else v.shape[:-1], beta=v.shape[:-1])
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != shapes[name] or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{where}: {name} is {x.shape}, {x.dtype}; must be {shapes[name]}, of a floating-point dtype: cast it"
            )


def check_conv(op: str, x, weight, bias, activation, state_name: str, state, num_seqs: int) -> bool:
    """Whether the activation is silu. `state` is the argument `state_name`, or None.

    Raises:
      ValueError: the operands do not fit each other, or no kernel takes them.
    """
    where, columns = f"{_host.PACKAGE}.{op}", x.shape[-1]
    if weight.ndim != 2 or len(weight) != columns or weight.shape[1] not in CONV_WIDTHS:
        raise ValueError(
            f"{where}: weight.shape={weight.shape}; must be ({columns}, W), a row for each channel of x, with W from "
            f"{CONV_WIDTHS[0]} to {CONV_WIDTHS[-1]}: reshape it; fewer taps are padded with zeros on the left"
        )
    for name, m, shape in (
        ("x", x, x.shape), ("weight", weight, weight.shape), ("bias", bias, (columns,)),
        (state_name, state, (num_seqs, columns, weight.shape[1] - 1)),
    ):  # fmt: skip
        if m is not None and m.shape != shape:
            raise ValueError(
                f"{where}: {name}.shape={m.shape}; must be {shape}, to go with {x.shape=} and {weight.shape=}"
            )
        if m is not None and m.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise ValueError(f"{where}: {name}.dtype={m.dtype}; must be bfloat16, float16 or float32: cast it")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{where}: {activation=}; must be 'silu', 'swish' or None: apply others to the result")
    return activation is not None


def check_ssd(op: str, x, dt, a, b, c, d, initial_state, cu_seqlens, names=None) -> None:
    """Checks the arrays, whose `names` may be others than those of `ssd`.

    Raises:
      ValueError: they do not fit each other, or no kernel takes them.
    """
    where, name_of = f"{_host.PACKAGE}.{op}", lambda name: (names or {}).get(name, name)
    for name, m in (("x", x), ("b", b), ("c", c)):
        if m.ndim != 4:
            raise ValueError(
                f"{where}: {name_of(name)}.shape={m.shape}; must be (B, T, heads, values of a head): reshape it"
            )
        if m.dtype not in (jnp.bfloat16, jnp.float16) or m.dtype != x.dtype:
            all_names = ", ".join(map(name_of, "xbc"))
            raise ValueError(
                f"{where}: {name_of(name)}.dtype={m.dtype}; {all_names} must be all bfloat16 or all float16: cast them"
            )
    (batch, length, heads, size), (*_, groups, state_dim) = x.shape, b.shape
    for name, m, shape in (
        ("b", b, (batch, length, groups, state_dim)), ("c", c, b.shape), ("dt", dt, (batch, length, heads)),
        ("a", a, (heads,)), ("d", d, (heads,)),
    ):  # fmt: skip
        if m is not None and m.shape != shape:
            shapes = f"{name_of('x')}.shape={x.shape} and {name_of('b')}.shape={b.shape}"
            raise ValueError(f"{where}: {name_of(name)}.shape={m.shape}; must be {shape}, to go with {shapes}")
    for name, m in (("dt", dt), ("a", a), ("d", d)):
        if m is not None and not jnp.issubdtype(m.dtype, jnp.floating):
            raise ValueError(f"{where}: {name}.dtype={m.dtype}; must be a floating-point dtype: cast it")
    check_groups(op, name_of("x"), heads, name_of("b"), groups)
    if size % PIECE or state_dim not in SSD_STATE_DIMS:
        raise ValueError(
            f"{where}: heads of {name_of('x')} have {size} values, those of {name_of('b')} {state_dim}; must be a "
            f"multiple of {PIECE}, and one of {SSD_STATE_DIMS}: pad with zeros (jnp.pad)"
        )
    check_state(op, "initial_state", initial_state, (check_packed(op, cu_seqlens, batch), heads, size, state_dim))


def check_groups(op: str, of: str, heads: int, by: str, groups: int) -> None:
    """Checks that as many heads of one operand read each head of another.

    Raises:
      ValueError: they do not.
    """
    if heads % groups if groups else heads:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {heads} heads of {of} are not a multiple of {groups} heads of {by}: repeat these"
        )


def untouched(x, initial_state, state_shape: tuple[int, ...]):
    """(results, final states) of no tokens: those of `x`, which has no values, and the initial states."""
    states = jnp.zeros(state_shape, jnp.float32) if initial_state is None else initial_state
    return jnp.zeros(x.shape, x.dtype), states
