"""The exercises of chapter 17: solutions are accepted; wrong answers and untouched skeletons are not."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import _device
from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex17  # noqa: E402

# Parts combined


def combine(first, second):
    (d0, s0), (d1, s1) = first, second
    return d0 * d1, d1 * s0 + s1


def combine_in_jax(first, second):
    return tuple(jnp.asarray(x) for x in combine(first, second))


@pytest.mark.parametrize("right", [combine, combine_in_jax])
def test_combine_solution(right):
    accepted(ex17.check_combine(right))


def in_place(first, second):
    first[1][:] = second[0] * first[1] + second[1]
    return first[0] * second[0], first[1]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda first, second: (first[0] * second[0], first[1] + second[1]), "decays there"),
        (lambda first, second: combine(second, first), "exchanged"),
        (lambda first, second: (first[0] + second[0], combine(first, second)[1]), "the decay is wrong"),
        (lambda first, second: (first[0] * second[0], second[0] * first[1]), "the state is wrong"),
        (lambda first, second: (first[0] * second[0], 3.0), "has shape ()"),
        (lambda first, second: 3.0, "must be a pair"),
        (in_place, "state that it was given"),
        (lambda first, second: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_combine_wrong(wrong, said):
    rejected(ex17.check_combine(wrong), said)


# Decays


def decays(cum):
    exponent = cum[:, None] - cum
    return np.exp(np.where(np.tri(len(cum), dtype=bool), exponent, -np.inf))


def cut_at_zero(cum):
    return np.tril(np.exp(np.minimum(cum[:, None] - cum, 0)))


def decays_in_jax(cum):
    exponent = jnp.where(jnp.tri(len(cum), dtype=bool), cum[:, None] - cum, -jnp.inf)
    return jnp.exp(exponent)


@pytest.mark.parametrize("right", [decays, cut_at_zero, decays_in_jax])
def test_weights_solution(right):
    accepted(ex17.check_weights(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda cum: np.tri(16) * np.exp(cum[:, None] - cum), "are NaN"),
        (lambda cum: np.tril(np.exp(cum)[:, None] * np.exp(-cum)), "are NaN"),
        (lambda cum: np.exp(cum[:, None] - cum), "come after it"),
        (lambda cum: np.exp(np.minimum(cum[:, None] - cum, 0)), "come after it"),
        (lambda cum: decays(cum).T, "exchanged"),
        (lambda cum: np.tril(np.exp(cum[:, None] - cum)), "mask the exponent, not the exponential"),
        (lambda cum: jnp.tril(jnp.exp(cum[:, None] - cum)), "mask the exponent, not the exponential"),
        (lambda cum: decays(2 * cum), "it must be"),
        (lambda cum: cum, "has shape (16,)"),
        (lambda cum: cum[99], "raised IndexError"),
    ],
)
def test_weights_wrong(wrong, said):
    rejected(ex17.check_weights(wrong), said)


# A chunk added


def add_chunk(acc, k_smem, v_smem, w, scaled_smem, *, commits=True, weighs=True):
    v = plgpu.load(v_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    if weighs:
        v = v * lax.broadcast_in_dim(w, v.shape, [0])
    scaled_smem[...] = v.astype(scaled_smem.dtype)
    if commits:
        plgpu.commit_smem()
    plgpu.wgmma(acc, scaled_smem.T, k_smem)


def add_and_wait(acc, k_smem, v_smem, w, scaled_smem):
    """Right too: half of the columns of the values after the other, and a wait that is not needed."""
    for half in (pl.ds(0, 32), pl.ds(32, 32)):
        rows = lax.broadcast_in_dim(w, (64, 32), [0])
        v = plgpu.load(v_smem.at[:, half], layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
        _device.store(scaled_smem.at[:, half], (rows * v).astype(scaled_smem.dtype))
    plgpu.commit_smem()
    plgpu.wgmma(acc, scaled_smem.T, k_smem)
    plgpu.wgmma_wait(0)


@pytest.mark.parametrize("right", [add_chunk, add_and_wait])
def test_add_chunk_solution(right):
    accepted(ex17.check_add_chunk(right))


def commits_first(acc, k_smem, v_smem, w, scaled_smem):
    plgpu.commit_smem()
    add_chunk(acc, k_smem, v_smem, w, scaled_smem, commits=False)


def not_transposed(acc, k_smem, v_smem, w, scaled_smem):
    plgpu.wgmma(acc, v_smem, k_smem)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda *args: add_chunk(*args, commits=False), "commit what you have stored"),
        (lambda *args: add_chunk(*args, weighs=False), "the weights are missing"),
        (commits_first, "commit what you have stored"),
        (not_transposed, "the state after two chunks"),
        (lambda *args: 1 / 0, "cannot be compiled for a GPU: ZeroDivisionError"),
    ],
)
def test_add_chunk_wrong(wrong, said):
    rejected(ex17.check_add_chunk(wrong), said)


# One token


def token_step(state, q, k, v, decay, *, late=False, decays=True, reads_before=False, key=True):
    def body(state_gmem, q_gmem, k_gmem, v_gmem, decay_gmem, after_gmem, y_gmem):
        before = plgpu.load(state_gmem, layout=plgpu.Layout.WGMMA, optimized=False)

        def along(ref, dim):
            layout = plgpu.Layout.WGMMA.reduce(1 - dim)
            return lax.broadcast_in_dim(plgpu.load(ref, layout=layout, optimized=False), before.shape, [dim])

        g = decay_gmem[0] if decays else 1.0
        added = along(v_gmem, 0) * along(k_gmem, 1) if key else along(v_gmem, 0)
        after = g * (before + added) if late else g * before + added
        after_gmem[...] = after
        y_gmem[...] = ((before if reads_before else after) * along(q_gmem, 1)).sum(axis=1)

    out_type = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (state.shape, v.shape)]
    return plgpu.kernel(body, out_type=out_type)(state, q, k, v, decay)


def test_token_step_solution():
    accepted(ex17.check_token_step(token_step))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(decays=False), "does not decay"),
        (dict(late=True), "decays after the token"),
        (dict(key=False, decays=False), "without the key"),
        (dict(reads_before=True), "reads the state before the token"),
    ],
)
def test_token_step_wrong(wrong, said):
    rejected(ex17.check_token_step(lambda *args: token_step(*args, **wrong)), said)


def test_token_step_outside_of_a_kernel():
    rejected(ex17.check_token_step(lambda s, q, k, v, g: (s, s @ q)), "must be a kernel")
