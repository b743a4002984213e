"""The sweeps of the attention ops: what they try fits an H200 or is refused by name, and tables say what was found.

The times are made up: no GPU is needed to see what becomes of them.
"""

import dataclasses
import itertools
import sys

import jax.numpy as jnp
import pytest

import bench.__main__ as bench
import cookbook
import lab
from bench import tune
from tests.lowering import lowered

SWEEPS = [*itertools.chain(*tune.SWEEPS.values())]
QUICK = ("hd256", "paged_attention/b64")
each_sweep = pytest.mark.parametrize(
    "sweep",
    [
        pytest.param(sweep, id=sweep.name, marks=[] if any(x in sweep.name for x in QUICK) else pytest.mark.slow)
        for sweep in SWEEPS
    ],
)


def test_a_sweep_of_each_op_and_size_of_heads():
    assert [*tune.SWEEPS] == ["attention", "varlen_attention", "ragged_paged_attention", "paged_attention"]
    forward = [sweep for sweep in tune.SWEEPS["attention"] if sweep.op is cookbook.attention]
    assert [sweep.case.shapes[0][3] for sweep in forward] == [64, 128, 256]
    assert all(len(set(sweep.configs)) == len(sweep.configs) <= 24 for sweep in SWEEPS)
    assert len({sweep.name for sweep in SWEEPS}) == len(SWEEPS)


@each_sweep
def test_what_is_tried_lowers_or_is_refused_by_the_plan(sweep):
    fit, configs = 0, dict.fromkeys([sweep.default(), *sweep.configs[4::8]])  # Two or three: lowering takes a second.
    for config in configs:
        try:
            lowered(sweep.call(config), *sweep.case.avals)
            fit += 1
        except ValueError as refusal:
            assert any(text in str(refusal) for text in ("bytes of shared memory", "too few registers")), refusal
    assert fit
    assert sweep.default() in sweep.configs


def small(head_dim=64, **changed) -> tune.Sweep:
    """A sweep of a problem that the interpreter computes."""
    case = tune.SWEEPS["attention"][0].case
    case = dataclasses.replace(case, shapes=((1, 128, 1, head_dim),) * 3, size="small", **changed)
    config = cookbook.attention.Config
    configs = config(block_kv=64), config(), config(compute_wgs=3), config(num_stages=9)
    return tune.Sweep(case, cookbook.attention, configs, 3, dict(is_causal=True))


def found_by(sweep, monkeypatch):
    """The table of a search in which the second is the fastest, the third fails and the last does not fit."""
    a, b, c, d = sweep.configs
    trials = {a: 2.0, b: 1.0, c: float("nan"), d: float("nan")}
    failures = {c: "XlaRuntimeError: ptxas", d: "ValueError: cookbook.attention: needs too much"}
    tuning = sys.modules[lab.autotune.__module__].Tuning("attention", "small", b, trials, failures)
    monkeypatch.setattr(lab, "autotune", lambda *_, **__: tuning)
    with lab.interpret():
        return tune._sweep(sweep, sweep.case.inputs())


def test_the_table_of_a_sweep(monkeypatch):
    sweep = small(flops=2e9)
    monkeypatch.setattr(tune.Sweep, "default", lambda self: self.configs[0])
    found = found_by(sweep, monkeypatch)
    assert [(row["config"]["block_kv"], row["ms"], row["default"]) for row in found["rows"]] == [
        (128, 1.0, False), (64, 2.0, True)
    ]  # fmt: skip
    assert found["refused"] == 1 and found["failed"] == ["XlaRuntimeError: ptxas"] and "wrong" not in found
    text = "\n".join(tune.table(sweep.case, "attention", found))
    assert "2 configurations, 1 more do not fit" in text and "failed: XlaRuntimeError" in text
    assert "1.    1.0000 ms        2 TFLOP/s   128 x 128, 2 stages" in text
    assert "128 x 64, 2 stages  <- the op's own choice, 2.000 x" in text


def test_a_winner_that_is_wrong_is_said(monkeypatch):
    wrong = small(reference=lambda *args: 2 * tune.SWEEPS["attention"][0].case.reference(*args))
    monkeypatch.setattr(tune.Sweep, "default", lambda self: None)
    found = found_by(wrong, monkeypatch)
    assert found["wrong"] > 0.4 and "WRONG" in tune.table(wrong.case, "attention", found)[-1]


def test_without_a_gpu_the_recorded_tables_are_shown(no_gpu, results_folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "attention", "--tune"])
    assert bench.main() == 0 and capsys.readouterr().out.count("not recorded") == len(tune.SWEEPS["attention"])
    assert "Not recorded yet" in tune.blocks_table()
    rows = [
        dict(config=dict(block_kv=kv, num_stages=stages, compute_wgs=2), ms=ms, default=ms == 1.25)
        for kv, stages, ms in ((64, 3, 1.0), (128, 2, 1.25), (64, 2, 2.0))
    ]
    entry = dict(value=dict(rows=rows, refused=1, failed=[]), provenance=dict(gpu="NVIDIA H200", date="2026-11-29"))
    lab.results.save("tune_attention", "h200", dict(values={sweep.name: entry for sweep in SWEEPS}))
    assert bench.main() == 0 and "<- the op's own choice, 1.250 x" in capsys.readouterr().out
    table = tune.blocks_table()
    flops = tune.SWEEPS["attention"][0].case.flops / 1e9
    assert f"| 64 | 128 | {flops:.0f} (3) | **{flops / 1.25:.0f} (2)** | - | - |" in table
    assert "the fastest (128 x 64, 3 stages) takes 20.0% less time than the package's choice. (Recorded on" in table
    assert table.count("\n| ") == 6 and lab.say(table).text == table


def test_gradients_are_those_of_attention():
    """Both ways to make them, without a configuration and with one."""
    args = tune.SWEEPS["attention"][0].case
    q, k, v = dataclasses.replace(args, shapes=((1, 128, 1, 64),) * 3).inputs()
    with lab.interpret():
        one, two = (op(q, k, v, is_causal=True) for op in tune.OPS.values() if "kernel" in op.__name__)
        other = tune.attention_in_two_kernels(q, k, v, is_causal=True, config=tune.TwoKernels(num_stages=2))
    for x, y, z in zip(one, two, other, strict=True):
        assert jnp.allclose(x, y, atol=0.1, rtol=0.02) and jnp.allclose(y, z, atol=0.1, rtol=0.02)
