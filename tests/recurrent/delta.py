"""Problems of the gated delta rule for its tests, and the arithmetic of flash-linear-attention, whose errors are the
yardstick: the same chunks, with its roundings to 16 bits."""

import jax.numpy as jnp
import numpy as np

import lab
from cookbook.recurrent.delta.gated_delta_rule import gated_delta_rule_reference
from tests.arrays import array

CHUNK = 64


def problem(batch=1, length=100, key_heads=1, heads=1, key_dim=64, value_dim=64, *, lens=None, decay=0.05, beta=None,
            dtype=jnp.bfloat16, seed=0, padding=0, correlated=0.0, unit=True):  # fmt: skip
    """(q, k, v, g, beta, initial_state, cu_seqlens); NaN after the last of the packed sequences with these `lens`.

    The tokens' decays are random, `decay` on average; `correlated` is the part of a key that all keys share.
    Without `unit` keys and queries have any norm.
    """
    rng = np.random.default_rng(seed)
    length = length if lens is None else sum(lens) + padding
    normal = lambda heads, dim: rng.normal(size=(batch, length, heads, dim))
    q, k, v = normal(key_heads, key_dim), normal(key_heads, key_dim), normal(heads, value_dim)
    k = (1 - correlated) ** 0.5 * k + correlated**0.5 * rng.normal(size=key_dim)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) if unit else x for x in (q, k))
    g = -2 * decay * rng.uniform(size=v.shape[:3])
    beta = rng.uniform(size=g.shape) if beta is None else np.full(g.shape, beta)
    state = rng.normal(size=(batch if lens is None else len(lens), heads, value_dim, key_dim))
    if padding:
        for x in (q, k, v, g, beta):
            x[:, -padding:] = np.nan
    arrays = [array(x, dtype) for x in (q, k, v)] + [array(x, jnp.float32) for x in (g, beta, state)]
    return *arrays, None if lens is None else array(np.cumsum([0, *lens]), jnp.int32)


def chunked(q, k, v, g, beta, state, rounded=lambda x: x, scale=None):
    """(o, final state) of one sequence by chunks, in float32, or float64 where v is; NumPy's. `rounded` is what becomes
    of numbers that flash-linear-attention keeps in 16 bits."""
    dtype = np.float64 if v.dtype == np.float64 else np.float32
    heads, scale = v.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    q, k, v, g, beta = (np.asarray(x)[0].astype(dtype) for x in (q, k, v, g, beta))
    q, k = (np.repeat(x, heads // x.shape[1], axis=1) for x in (q, k))
    state, out = np.asarray(state)[0].astype(dtype), np.empty_like(v)
    for first in range(0, len(v), CHUNK):
        tokens = slice(first, first + CHUNK)
        q_c, k_c, v_c = (x[tokens].swapaxes(0, 1) for x in (q, k, v))  # (heads, tokens, columns)
        betas, cum = beta[tokens].T[..., None], np.cumsum(g[tokens].T, axis=1, dtype=dtype)[..., None]
        decay = np.exp(np.minimum(cum - cum.swapaxes(1, 2), 0))
        lower = np.tril(betas * decay * (k_c @ k_c.swapaxes(1, 2)), -1)
        inverse = rounded(np.linalg.inv(np.eye(lower.shape[1], dtype=dtype) + lower))
        u, w = (rounded(inverse @ rounded(x)) for x in (betas * v_c, betas * np.exp(cum) * k_c))
        u = u - w @ rounded(state).swapaxes(1, 2)
        weights = rounded(np.tril(decay * (q_c @ k_c.swapaxes(1, 2))))
        from_state = np.exp(cum) * (q_c @ rounded(state).swapaxes(1, 2))
        out[tokens] = (scale * (from_state + weights @ rounded(u))).swapaxes(0, 1)
        state = np.exp(cum[:, -1:]) * state + rounded(np.exp(cum[:, -1:] - cum) * u).swapaxes(1, 2) @ k_c
    return out[None], state[None]


def sequences(q, k, v, g, beta, state, cu):
    """The problem of each sequence alone."""
    if cu is None:
        return [[x[i : i + 1] for x in (q, k, v, g, beta, state)] for i in range(len(v))]
    tokens = [slice(int(a), int(b)) for a, b in zip(cu[:-1], cu[1:], strict=True)]
    return [[*(x[:, t] for x in (q, k, v, g, beta)), state[i : i + 1]] for i, t in enumerate(tokens)]


def errors(args) -> list[float]:
    """Relative errors of flash-linear-attention's arithmetic against float64: of o, and of the final states."""
    rounded = lambda x: x.astype(args[0].dtype).astype(x.dtype)
    pairs = []
    for one in sequences(*args):
        if one[0].shape[1] == 0:
            continue
        exact = chunked(*(np.asarray(x, np.float64) for x in one))
        o, state = chunked(*one, rounded=rounded)
        pairs.append([(o.astype(one[2].dtype), exact[0]), (state, exact[1])])
    flat = lambda arrays: np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays])
    norms = []
    for result in zip(*pairs, strict=True):
        ours, exact = (flat(arrays) for arrays in zip(*result, strict=True))
        norms.append(float(np.linalg.norm(ours - exact) / np.linalg.norm(exact)))
    return norms


def check(op, args, *, gpu=None, **how):
    """`lab.check` of o and the final states, whose errors may be 1.5 times flash-linear-attention's. That of states may
    be an epsilon of the operands, two roundings: there may be few numbers that they depend on."""
    call = lambda op: (
        lambda q, k, v, g, beta, state, cu: op(
            q, k, v, g, beta, initial_state=state, cu_seqlens=cu, return_final_state=True, **how
        )
    )
    reference = lambda *args: gated_delta_rule_reference(
        *args[:5], initial_state=args[5], cu_seqlens=args[6], return_final_state=True, scale=how.get("scale")
    )
    of_o, of_states = (1.5 * error for error in errors(args))
    tolerance = of_o, max(of_states, float(jnp.finfo(args[0].dtype).eps))
    return lab.check(call(op), reference, *args, tolerance=tolerance, gpu=gpu)
