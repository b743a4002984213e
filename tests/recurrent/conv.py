"""The causal convolution in NumPy's float64, with gradients by hand: shares no code with the package."""

import jax.numpy as jnp
import numpy as np

from tests.arrays import array


def problem(batch=1, length=40, columns=200, taps=4, lens=None, dtype=jnp.bfloat16, seed=0):
    """x, weight, bias, initial states, and cotangents of y and of the final states."""
    rng = np.random.default_rng(seed)
    num_seqs = batch if lens is None else len(lens)
    shapes = (batch, length, columns), (columns, taps), (columns,), *[(num_seqs, columns, taps - 1)] * 2
    x, weight, bias, state, d_state = (array(rng.normal(size=shape) + 0.1, dtype) for shape in shapes)
    return x, weight, bias, state, array(rng.normal(size=x.shape), dtype), d_state


def starts(lens) -> np.ndarray:
    return np.cumsum([0, *lens], dtype=np.int32)


def exact(x, weight, bias, state, dy, d_state, *, lens=None, silu=True):
    """(y, final states, gradients of x, weight, bias and the initial states)."""
    x, weight, bias, state, dy, d_state = (np.asarray(m, np.float64) for m in (x, weight, bias, state, dy, d_state))
    (batch, length, _), taps = x.shape, weight.shape[1]
    begin = None if lens is None else starts(lens)
    seqs = (
        [(b, 0, length) for b in range(batch)]
        if lens is None
        else [(0, *pair) for pair in zip(begin, begin[1:], strict=False)]
    )
    y, dx, d_weight = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weight)
    final, d_initial = np.zeros_like(state), np.zeros_like(state)
    d_bias = np.zeros_like(bias)
    for i, (b, first, end) in enumerate(seqs):
        rows, num = np.concatenate([state[i].T, x[b, first:end]]), end - first
        z = bias + sum(weight[:, j] * rows[j : j + num] for j in range(taps))
        gate = 1 / (1 + np.exp(-z))
        y[b, first:end], final[i] = (z * gate if silu else z), rows[num:].T
        dz = dy[b, first:end] * ((gate + z * gate * (1 - gate)) if silu else 1)
        d_rows = np.zeros_like(rows)
        d_rows[num:] = d_state[i].T
        for j in range(taps):
            d_rows[j : j + num] += weight[:, j] * dz
            d_weight[:, j] += (dz * rows[j : j + num]).sum(0)
        d_bias += dz.sum(0)
        dx[b, first:end], d_initial[i] = d_rows[taps - 1 :], d_rows[: taps - 1].T
    return y, final, dx, d_weight, d_bias, d_initial


def distance(x, y) -> float:
    """Frobenius distance over the norm of `y`."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))
