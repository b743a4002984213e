"""Operands of SSD for its tests, and SSD in chunks as plain NumPy."""

import jax.numpy as jnp
import numpy as np

from tests.arrays import array

BF16 = jnp.bfloat16


def operands(batch=1, length=100, heads=1, head_dim=64, groups=1, state_dim=64, dtype=BF16, steps=(0.01, 1.0), seed=0):
    """x, dt, a, b, c. `steps`: between which dt lies, in any order of magnitude."""
    rng = np.random.default_rng(seed + length + heads)
    normal = lambda *shape, scale=1.0: array((rng.normal(size=shape) + 0.1) * scale, dtype)
    dt = array(np.exp(rng.uniform(*np.log(steps), size=(batch, length, heads))), jnp.float32)
    a = array(-rng.uniform(0.1, 2.0, size=heads), jnp.float32)
    b, c = (normal(batch, length, groups, state_dim, scale=1 / 8) for _ in range(2))
    return normal(batch, length, heads, head_dim), dt, a, b, c


def more(x, b, num_seqs=None, seed=9):
    """d, initial states, and gradients of y and of the final states."""
    rng = np.random.default_rng(seed)
    shape = num_seqs or len(x), *x.shape[2:], b.shape[3]
    d, initial, dy, d_final = (rng.normal(size=s) for s in (x.shape[2:3], shape, x.shape, shape))
    return (
        array(d, jnp.float32), array(initial / 8, jnp.float32), array(dy, x.dtype),
        array(d_final / 8, jnp.float32),
    )  # fmt: skip


def chunked(x, dt, a, b, c, chunk, rounded=lambda m: m):
    """(y, final state) of one head of one sequence in float64, with operands of products `rounded`: the arithmetic of
    the kernel, and of flash-linear-attention's. x (T, P), dt (T,), b and c (T, N)."""
    x, dt, b, c = (np.asarray(m, np.float64) for m in (x, dt, b, c))
    state, y = np.zeros((x.shape[1], b.shape[1])), np.zeros(x.shape)
    for first in range(0, len(x), chunk):
        rows = slice(first, first + chunk)
        cum = np.cumsum(dt[rows] * float(a))
        decay = np.tril(np.exp(np.minimum(cum[:, None] - cum, 0.0)))
        weights = rounded(c[rows] @ b[rows].T * decay * dt[rows])
        y[rows] = weights @ x[rows] + np.exp(cum)[:, None] * (c[rows] @ rounded(state).T)
        scaled = rounded(x[rows] * (np.exp(cum[-1] - cum) * dt[rows])[:, None])
        state = np.exp(cum[-1]) * state + scaled.T @ b[rows]
    return y, state


def error(result, exact) -> float:
    """Relative Frobenius distance."""
    result, exact = (np.asarray(m, np.float64) for m in (result, exact))
    return np.linalg.norm(result - exact) / np.linalg.norm(exact)
