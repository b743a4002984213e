"""The exercises of chapter 17b: solutions are accepted; wrong answers are not."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import gated_delta_rule
from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex17b  # noqa: E402

ROWS, COLUMNS = (plgpu.Layout.WGMMA.reduce(dim) for dim in (1, 0))


def load(ref, layout=plgpu.Layout.WGMMA):
    return plgpu.load(ref, layout=layout, optimized=False)


def spread(values, dim, shape):
    return lax.broadcast_in_dim(values, shape, [dim])


def product(a_smem, b_smem):
    def multiply(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a_smem.shape[0], b_smem.shape[1]), jnp.float32))


# Errors written token by token


def right_error(state, q, k, v, beta):
    return beta * (v - state(k))


def write_errors(q, k, v, beta, *, change=right_error, late=True):
    """Token by token, in a loop of Python."""

    def body(q_gmem, k_gmem, v_gmem, beta_gmem, y_gmem):
        state = plgpu.layout_cast(jnp.zeros((64, 128), jnp.float32), plgpu.Layout.WGMMA)
        for t in range(len(q)):
            q_t, k_t = (spread(load(ref.at[t], COLUMNS), 1, (64, 128)) for ref in (q_gmem, k_gmem))
            read = lambda x, state=state: (state * x).sum(axis=1)
            written = change(read, q_t, k_t, load(v_gmem.at[t], ROWS), beta_gmem[t])
            before, state = state, state + spread(written, 0, (64, 128)) * k_t
            y_gmem[t] = ((state if late else before) * q_t).sum(axis=1)

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32))(q, k, v, beta)


def test_write_errors_solution():
    accepted(ex17b.check_write_errors(write_errors))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(change=lambda s, q, k, v, beta: beta * v), "read what the state has for the key first"),
        (dict(change=lambda s, q, k, v, beta: v - s(k)), "beta says which part"),
        (dict(change=lambda s, q, k, v, beta: beta * v - s(k)), "not of the value alone"),
        (dict(change=lambda s, q, k, v, beta: v - beta * s(k)), "not of what was read alone"),
        (dict(change=lambda s, q, k, v, beta: beta * (v + s(k))), "must be subtracted"),
        (dict(change=lambda s, q, k, v, beta: beta * (s(k) - v)), "the sign of the error"),
        (dict(change=lambda s, q, k, v, beta: beta * (v - s(q))), "the query was read for"),
        (dict(late=False), "reads the state before the token"),
    ],
)
def test_write_errors_wrong(wrong, said):
    rejected(ex17b.check_write_errors(lambda *args: write_errors(*args, **wrong)), said)


def delta_in_xla(q, k, v, beta):
    def token(state, row):
        q, k, v, beta = row
        state = state + jnp.outer(beta * (v - state @ k), k)
        return state, state @ q

    return lax.scan(token, jnp.zeros((64, 128)), (q, k, v, beta))[1]


def the_packages(q, k, v, beta):
    q, k, v = (x[None, :, None].astype(jnp.bfloat16) for x in (q, k, v))
    return gated_delta_rule(q, k, v, jnp.zeros((1, len(beta), 1)), beta[None, :, None], scale=1.0)[0, :, 0]


@pytest.mark.parametrize("wrong, said", [(delta_in_xla, "must be a kernel"), (the_packages, "is the package's kernel")])
def test_write_errors_without_a_kernel_of_its_own(wrong, said):
    rejected(ex17b.check_write_errors(wrong), said)


# The triangle


def masked_exponent(exponent, t, s):
    return jnp.exp(jnp.where(s < t, exponent, -jnp.inf))


def selected(exponent, t, s):
    """Nothing is multiplied by 0."""
    return jnp.where(s < t, jnp.exp(exponent), 0.0)


def lower(k, beta, cum, *, decay=masked_exponent, beta_dim=0, sign=1.0):
    def body(k_gmem, beta_gmem, of_rows, of_columns, o_gmem, k_smem, loaded):
        plgpu.copy_gmem_to_smem(k_gmem, k_smem, loaded)
        plgpu.barrier_wait(loaded)
        shape = (64, 64)
        t, s = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=plgpu.Layout.WGMMA) for i in (0, 1))
        exponent = spread(load(of_rows, ROWS), 0, shape) - spread(load(of_columns, COLUMNS), 1, shape)
        factor = 1.0 if beta_dim is None else spread(load(beta_gmem, (ROWS, COLUMNS)[beta_dim]), beta_dim, shape)
        o_gmem[...] = sign * factor * product(k_smem, k_smem.T) * decay(exponent, t, s)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[plgpu.SMEM(k.shape, k.dtype), plgpu.Barrier()],
    )(k, beta, cum, cum)


def diagonal_apart(exponent, t, s):
    return jnp.exp(jnp.minimum(exponent, 0.0)) * (s < t)


@pytest.mark.parametrize("right", [masked_exponent, selected, diagonal_apart])
def test_lower_solution(right):
    accepted(ex17b.check_lower(lambda *args: lower(*args, decay=right)))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(beta_dim=1), "that of the column s"),
        (dict(beta_dim=None), "beta is missing"),
        (dict(decay=lambda x, t, s: (s < t).astype(jnp.float32)), "the decay is missing"),
        (dict(decay=lambda x, t, s: jnp.exp(jnp.where(s <= t, x, -jnp.inf))), "the diagonal is not zero"),
        (dict(decay=lambda x, t, s: jnp.exp(x) * (s < t)), "mask the exponent"),
        (dict(decay=lambda x, t, s: jnp.exp(x) * jnp.where(s < t, 1.0, 0.0)), "mask the exponent"),
        (dict(decay=lambda x, t, s: jnp.exp(jnp.where(s > t, -x, -jnp.inf))), "above the diagonal"),
        (dict(decay=lambda x, t, s: jnp.exp(jnp.where(s != t, x, -jnp.inf))), "above the diagonal"),
        (dict(decay=lambda x, t, s: jnp.exp(jnp.where(s < t, -x, -jnp.inf))), "it must be"),
        (dict(sign=-1.0), "the sign is the other one"),
    ],
)
def test_lower_wrong(wrong, said):
    rejected(ex17b.check_lower(lambda *args: lower(*args, **wrong)), said)


def lower_in_xla(k, beta, cum):
    k = k.astype(jnp.float32)
    return jnp.tril(beta[:, None] * (k @ k.T) * jnp.exp(jnp.minimum(cum[:, None] - cum, 0)), -1)


def test_lower_outside_of_a_kernel():
    rejected(ex17b.check_lower(lower_in_xla), "must be a kernel")
    half = lambda k, beta, cum: lower(k, beta, cum, beta_dim=None) * beta[:, None]
    rejected(ex17b.check_lower(half), "computed outside of the kernel")


# Doubling


def between(size, block):
    index = np.arange(size)
    return (index[:, None] ^ index) // block == 1


def double(d, lower, block):
    e = np.where(between(len(d), block), lower, 0)
    return d - d @ e @ d


def block_by_block(d, lower, block):
    d = d.copy()
    for i in range(0, len(d), 2 * block):
        above, below = slice(i, i + block), slice(i + block, i + 2 * block)
        d[below, above] = -d[below, below] @ lower[below, above] @ d[above, above]
    return d


def inverted(d, lower, block):
    """The blocks' inverses, by NumPy, without d."""
    same = np.arange(len(d)) // (2 * block)
    return np.linalg.inv(np.eye(len(d)) + np.where(same[:, None] == same, lower, 0))


def inverted_of_d(d, lower, block):
    return np.linalg.inv(np.linalg.inv(d) + np.where(between(len(d), block), lower, 0))


def row_by_row(d, lower, block):
    """The same inverses without NumPy's, and without d."""
    inverse, same = np.eye(len(d)), np.arange(len(d)) // (2 * block)
    lower = np.where(same[:, None] == same, lower, 0)
    for row in range(1, len(d)):
        inverse[row] -= lower[row, :row] @ inverse[:row]
    return inverse


@pytest.mark.parametrize("right", [double, block_by_block])
def test_double_solution(right):
    accepted(ex17b.check_double(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda d, lower, block: d, "nothing has changed"),
        (lambda d, lower, block: 2 * d - double(d, lower, block), "a sign is wrong"),
        (lambda d, lower, block: d - np.where(between(len(d), block), lower, 0), "on both sides"),
        (lambda d, lower, block: d - d @ lower @ d, "mask it"),
        (lambda d, lower, block: d @ d, "nothing has changed"),
        (lambda d, lower, block: 3 * d, "not the inverse"),
        (lambda d, lower, block: d[0], "has shape"),
        (inverted, "NumPy inverts a matrix in it"),
        (inverted_of_d, "NumPy inverts a matrix in it"),
        (row_by_row, "computed anew, without d"),
    ],
)
def test_double_wrong(wrong, said):
    rejected(ex17b.check_double(wrong), said)


# The state after a chunk


def next_state(state, k, v, beta, inverse, *, commits=(True, True, True), turned=False, **how):
    def body(state_gmem, k_gmem, v_gmem, beta_gmem, inverse_gmem, o_gmem, k_smem, v_smem, inverse_smem, s_smem,
             e_smem, u_smem, loaded):  # fmt: skip
        for pair in ((k_gmem, k_smem), (v_gmem, v_smem), (inverse_gmem, inverse_smem)):
            plgpu.copy_gmem_to_smem(*pair, loaded)
        plgpu.barrier_wait(loaded)
        commit = lambda i: plgpu.commit_smem() if commits[i] else None
        old, v_c = load(state_gmem), plgpu.load(v_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        per_row = spread(load(beta_gmem, ROWS), 0, v_c.shape)
        s_smem[...] = old.astype(k.dtype)
        commit(0)
        found = product(k_smem, s_smem.T) * how.get("reads", 1.0)
        if how.get("at") == "value":
            errors = per_row * v_c - found
        else:
            errors = (v_c - found) * (per_row if how.get("at", "first") == "first" else 1.0)
        e_smem[...] = errors.astype(k.dtype)
        commit(1)
        u = errors if how.get("skips") else product(inverse_smem.T if turned else inverse_smem, e_smem)
        u_smem[...] = (u * per_row if how.get("at") == "last" else u).astype(k.dtype)
        commit(2)
        change = product(u_smem.T, k_smem)
        o_gmem[...] = change if how.get("forgets") else old + change

    tile = lambda *shape: plgpu.SMEM(shape, k.dtype)
    wide, square = tile(64, 128), tile(64, 64)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(state.shape, jnp.float32),
        scratch_types=[wide, square, square, wide, square, square, plgpu.Barrier(num_arrivals=3)],
    )(state, k, v, beta, inverse)


def with_beta_first(state, k, v, beta, inverse):
    """The same in another order: beta of the values and of what was read, and one accumulator for both."""

    def body(state_gmem, k_gmem, v_gmem, beta_gmem, inverse_gmem, o_gmem, k_smem, inverse_smem, x_smem, s_smem, loaded):
        plgpu.copy_gmem_to_smem(k_gmem, k_smem, loaded)
        plgpu.copy_gmem_to_smem(inverse_gmem, inverse_smem, loaded)
        plgpu.barrier_wait(loaded)
        old = load(state_gmem)
        s_smem[...] = (-old).astype(k.dtype)
        plgpu.commit_smem()
        v_c, per_row = load(v_gmem).astype(jnp.float32), spread(load(beta_gmem, ROWS), 0, (64, 64))
        for factor in (per_row * v_c + per_row * product(k_smem, s_smem.T), None):
            u = product(inverse_smem, x_smem) if factor is None else factor
            plgpu.commit_smem()  # All warps have read it.
            x_smem[...] = u.astype(k.dtype)
            plgpu.commit_smem()
        o_gmem[...] = product(x_smem.T, k_smem) + old

    tile = lambda *shape: plgpu.SMEM(shape, k.dtype)
    scratch = [tile(64, 128), tile(64, 64), tile(64, 64), tile(64, 128), plgpu.Barrier(num_arrivals=2)]
    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(state.shape, jnp.float32), scratch_types=scratch
    )(state, k, v, beta, inverse)  # fmt: skip


@pytest.mark.parametrize("right", [next_state, with_beta_first])
def test_next_state_solution(right):
    accepted(ex17b.check_next_state(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(reads=0.0, skips=True), "still a state that adds"),
        (dict(reads=0.0), "the old state is not read"),
        (dict(skips=True), "the inverse is missing"),
        (dict(reads=-1.0), "it must be subtracted"),
        (dict(turned=True), "the inverse is transposed"),
        (dict(at="none"), "beta is missing"),
        (dict(at="last"), "beta comes before the inverse"),
        (dict(at="value"), "not of v alone"),
        (dict(forgets=True), "the old state is lost"),
        (dict(commits=(False, True, True)), "commit what you have stored"),
        (dict(commits=(True, False, True)), "commit what you have stored"),
        (dict(commits=(True, True, False)), "commit what you have stored"),
    ],
)
def test_next_state_wrong(wrong, said):
    rejected(ex17b.check_next_state(lambda *args: next_state(*args, **wrong)), said)


def test_next_state_outside_of_a_kernel():
    def in_xla(state, k, v, beta, inverse):
        return state + (inverse @ (beta[:, None] * (v - k @ state.T))).T @ k

    rejected(ex17b.check_next_state(in_xla), "must be a kernel")
    double = lambda state, *args: next_state(2.0 * state, *args)
    rejected(ex17b.check_next_state(double), "computed outside of the kernel")
