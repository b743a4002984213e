"""The recurrent kernels on a GPU: sizes that fill it, sequences too long for the interpreter, equal bits."""

import functools
import inspect

import delta
import jax
import numpy as np
import pytest
from ssd_problems import error, more, operands

import cookbook
from cookbook import gated_delta_rule, ssd

delta_module, ssd_module = (inspect.getmodule(getattr(cookbook, name)) for name in ("gated_delta_rule", "ssd"))
LENGTH, STRETCH = 65536, 4096


def drift(ours, exact) -> float:
    """Error of the last tokens over that of the first ones, where both have seen enough tokens before."""
    first, last = (
        error(ours[:, rows], exact[:, rows]) for rows in (slice(STRETCH, 2 * STRETCH), slice(-STRETCH, None))
    )
    assert first < 2**-6, first
    return last / first


@pytest.mark.parametrize("heads", [(2, 8), (16, 80)], ids=["in parts", "two columns a block"])
def test_gated_delta_rule_does_not_drift(gpu, heads):
    key_heads, heads = heads
    *args, state, _ = delta.problem(1, LENGTH, key_heads, heads, 128, 128, decay=1e-4, seed=5)
    run = jax.jit(functools.partial(gated_delta_rule, initial_state=state))
    out = run(*args)
    # Token by token, a few heads of each key head: the states of all tokens of all heads would take a while.
    few = heads // key_heads
    reference = functools.partial(delta_module.gated_delta_rule_reference, initial_state=state[:, -few:])
    q, k, v, g, beta = args
    exact = jax.jit(reference)(q[:, :, -1:], k[:, :, -1:], *(x[:, :, -few:] for x in (v, g, beta)))
    assert drift(out[:, :, -few:], exact) < 1.5
    assert all((out == run(*args)).all() for _ in range(3))


@pytest.mark.parametrize("heads, groups", [(8, 1), (160, 2)], ids=["in parts", "whole"])
def test_ssd_does_not_drift(gpu, heads, groups):
    args = operands(1, LENGTH, heads, 64, groups, 128, steps=(1e-4, 1e-3))
    run = jax.jit(ssd)
    out = run(*args)
    x, dt, a, b, c = args
    few = (x[:, :, -2:], dt[:, :, -2:], a[-2:], b[:, :, -1:], c[:, :, -1:])
    exact, _ = jax.jit(ssd_module.ssd_reference)(*few)
    assert drift(out[:, :, -2:], exact) < 1.5
    assert all((out == run(*args)).all() for _ in range(3))


@pytest.mark.parametrize("seed", range(6))
def test_gated_delta_rule_of_random_sizes(gpu, seed):
    rng = np.random.default_rng(seed)
    key_heads, dims = int(rng.integers(1, 20)), rng.choice((64, 128), 2)
    heads, batch = key_heads * int(rng.choice((1, 2, 3, 4))), int(rng.integers(1, 4))
    lens = [int(n) for n in rng.integers(0, 700, 5)] if seed % 2 else None
    args = delta.problem(1 if lens else batch, int(rng.integers(1, 900)), key_heads, heads, *map(int, dims), lens=lens,
                         padding=5 if lens else 0, seed=seed)  # fmt: skip
    *tokens, state, cu = args
    how = dict(initial_state=state, cu_seqlens=cu, return_final_state=True)
    out, final = jax.jit(functools.partial(gated_delta_rule, **how))(*tokens)
    exact, exact_final = jax.jit(functools.partial(delta_module.gated_delta_rule_reference, **how))(*tokens)
    assert error(out, exact) < 2**-7 and error(final, exact_final) < 2**-7


@pytest.mark.parametrize("seed", range(6))
def test_ssd_of_random_sizes(gpu, seed):
    rng = np.random.default_rng(seed)
    groups, dims = int(rng.integers(1, 9)), (int(rng.choice((64, 128))), int(rng.choice((64, 128, 256))))
    heads, batch = groups * int(rng.integers(1, 12)), int(rng.integers(1, 5))
    args = operands(batch, int(rng.integers(1, 1500)), heads, dims[0], groups, dims[1], seed=seed)
    d, initial, *_ = more(args[0], args[3])
    how = dict(d=d, initial_state=initial)
    out, final = jax.jit(functools.partial(ssd, return_final_state=True, **how))(*args)
    exact, exact_final = jax.jit(functools.partial(ssd_module.ssd_reference, **how))(*args)
    assert error(out, exact) < 2**-7 and error(final, exact_final) < 2**-7


@pytest.mark.parametrize("state_dim", [128, 256])
def test_x_is_read_before_the_chunk_after_next_takes_its_place(gpu, state_dim):
    """A state of 256 columns leaves two slots for chunks, and its products keep other loads waiting."""
    args = operands(2, 576, 4, 64, 2, state_dim)
    d, initial, *_ = more(args[0], args[3])
    run = jax.jit(functools.partial(ssd, d=d, initial_state=initial, return_final_state=True))
    out, final = run(*args)
    exact, _ = jax.jit(functools.partial(ssd_module.ssd_reference, d=d, initial_state=initial))(*args)
    assert error(out, exact) < 2**-7
    for _ in range(50):
        again = run(*args)
        assert (again[0] == out).all() and (again[1] == final).all()
