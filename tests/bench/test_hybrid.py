"""The training step of the hybrid model: the same with kernels as in plain XLA, and of the size that it says."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from bench import hybrid
from lab import program, results, timing

bench = importlib.import_module("bench.__main__")
# Both round activations to bfloat16, by 2**-9 of them, but at other places; and AdamW's first steps are as long for
# small gradients as for large ones. Losses differ by 0.0022; if one op had no gradient, by 0.038 or more.
TOLERANCE = 8e-3


def losses(ops: hybrid.Ops, steps: int = 3) -> np.ndarray:
    """Losses of so many steps on one batch. They are one program: Python's loop would trace the kernels twice."""
    tokens = jnp.asarray(hybrid.tokens_of_chain(hybrid.TINY))
    next_one = lambda training, _: hybrid.step(ops, hybrid.TINY, training, tokens)
    train = lambda training: jax.lax.scan(next_one, training, length=steps)[1]
    return np.asarray(jax.jit(train)(hybrid.start(hybrid.TINY)))


@functools.cache
def plain_losses() -> np.ndarray:
    return losses(hybrid.PLAIN)


def test_the_model_has_about_100m_parameters():
    assert 95e6 < hybrid.num_params(hybrid.FULL) < 105e6 and len(hybrid.FULL.layers) == 12
    assert hybrid.name(hybrid.FULL) == "hybrid/104m_b8_t2048/bf16"
    fn, (training, tokens) = hybrid.program(hybrid.PLAIN, hybrid.FULL)
    assert jax.eval_shape(fn, training, tokens) == (training, jax.ShapeDtypeStruct((), jnp.float32))


def test_losses_are_those_of_plain_xla_and_fall():
    """One layer of each kind."""
    assert {kind for kinds in hybrid.TINY.layers for kind in kinds} == {"attention", "delta", "glu", "moe"}
    with lab.interpret(detect_races=False):
        found = losses(hybrid.KERNELS)
    np.testing.assert_allclose(found, plain_losses(), rtol=0, atol=TOLERANCE)
    assert abs(found[0] - np.log(hybrid.TINY.vocabulary)) < 0.2
    assert (np.diff(found) < -0.1).all()


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(hybrid.Ops)])
def test_a_missing_gradient_is_more_than_the_tolerance(name):
    op = getattr(hybrid.PLAIN, name)
    without = lambda *args, **options: jax.lax.stop_gradient(op(*args, **options))
    found = losses(dataclasses.replace(hybrid.PLAIN, **{name: without}))
    assert np.abs(found - plain_losses()).max() > 2 * TOLERANCE


def test_the_text_is_a_markov_chain():
    sizes = dataclasses.replace(hybrid.TINY, batch=8, length=4096)
    tokens = [hybrid.tokens_of_chain(sizes, seed) for seed in (0, 1)]
    assert tokens[0].shape == (8, 4097) and tokens[0].dtype == np.int32 and (tokens[0] != tokens[1]).any()
    assert 0 <= tokens[0].min() and tokens[0].max() < sizes.vocabulary
    pairs = [set(zip(x[:, :-1].ravel().tolist(), x[:, 1:].ravel().tolist(), strict=True)) for x in tokens]
    # At most four successors each, whatever the seed; nearly all pairs occur.
    assert len(pairs[0] | pairs[1]) <= 4 * sizes.vocabulary and len(pairs[0] & pairs[1]) > 3 * sizes.vocabulary


@pytest.mark.slow  # Ten seconds.
def test_the_step_lowers_for_an_h200():
    """One layer of each kind, which the others repeat."""
    for ops in hybrid.IMPLS.values():
        fn, args = hybrid.program(ops, dataclasses.replace(hybrid.FULL, layers=hybrid.PERIOD[1::2]))
        assert len(program.digest(fn, *args, gpu="h200")) == 16


def test_recorded_figures_are_shown(results_folder, monkeypatch, capsys):
    monkeypatch.setenv("COOKBOOK_MEASURE", "0")
    assert hybrid.run() is None and "not recorded" in capsys.readouterr().out
    problem = hybrid.name(hybrid.FULL)
    provenance = dict(gpu="NVIDIA H200", date="2026-11-29", jax="0.11.2")
    row = lambda ms: dict(ms=ms, min_ms=ms, spread=0.0, flops=None, nbytes=None, provenance=provenance)
    more = lambda ms, nbytes: dict(value=dict(wall_ms=ms, temporary_bytes=nbytes), provenance=provenance)

    def verdict(ms: float, nbytes: float) -> bool:
        data = dict(rows={problem: dict(cookbook=row(ms), xla=row(90.0))})
        data["values"] = {f"{problem}/cookbook": more(ms + 1, nbytes), f"{problem}/xla": more(95.0, 8e9)}
        results.save("hybrid", "h200", data)
        return hybrid.run()

    assert verdict(30.0, 4e9) is True
    out = capsys.readouterr().out
    assert "3.00 times as fast as plain XLA, with 0.50 of its memory" in out and "target reached" in out
    assert "528516 tokens/s" in out and "4.00 GB" in out
    assert verdict(61.0, 4e9) is False and verdict(30.0, 8e9) is False
    assert capsys.readouterr().out.count("target MISSED") == 2


def test_figures_are_taken_where_there_is_a_gpu(monkeypatch, capsys):
    """As on a GPU, with XLA in place of the kernels, and CUPTI's times made up."""
    monkeypatch.setattr(hybrid, "IMPLS", dict.fromkeys(hybrid.IMPLS, hybrid.PLAIN))
    monkeypatch.setattr(results, "measuring", lambda *_: True)
    monkeypatch.setattr(timing, "_kernel_ms", lambda fn, args, iterations, devices: [0.5] * iterations)
    assert hybrid.run(3, dataclasses.replace(hybrid.TINY, layers=hybrid.PERIOD[3:])) is False
    out = capsys.readouterr().out
    assert out.count("0.50 ms of kernels") == 2 and "1.00 times as fast as plain XLA, with 1.00 of its memory" in out


def test_bench_runs_it(monkeypatch, capsys):
    monkeypatch.setattr(bench.hybrid, "run", lambda iterations: print(f"{iterations} steps"))
    monkeypatch.setattr(bench, "_ceilings", lambda iterations: None)
    monkeypatch.setattr("sys.argv", ["bench", "hybrid", "--iterations", "7"])
    assert bench.main() == 0 and "7 steps" in capsys.readouterr().out
