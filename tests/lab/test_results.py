"""Figures: measured on a GPU, recorded with where and of what, returned as recorded elsewhere, stale when they are."""

import json
import math

import jax.numpy as jnp
import pytest
from lab_kernels import add_one

import lab
from lab import interpreter, results

H200 = dict(gpu="NVIDIA H200", driver="580.1", jax="0.11.2", jaxlib="0.11.2", ptxas="13.0", date="2026-11-20")


@pytest.fixture
def h200(monkeypatch, results_folder):
    """This process records as if on an H200."""
    monkeypatch.setattr(results, "machine", lambda: H200)
    monkeypatch.setattr(results, "this_gpu", lambda: "h200")
    return results_folder / "h200"


def double(x):
    return x * 2


def record(program, problem="double/64/f32", impl="cookbook"):
    return results.write(problem, impl, ms=0.5, min_ms=0.4, spread=0.01, flops=5e11, nbytes=1e9, program=program)


# Rows


def test_a_row_survives_the_round_trip(h200):
    row = record("5e1f")
    assert results.read("double/64/f32") == row
    assert row["provenance"] == H200 | dict(inputs="random normal", program="5e1f")
    record("5e1f", impl="XLA")
    assert results.read("double/64/f32") == row and results.rows("double")["double/64/f32"].keys() == {
        "cookbook",
        "XLA",
    }
    assert results.topics() == ["double"]


def test_an_h100_stands_in_for_what_it_alone_has_measured(monkeypatch, h200):
    record("5e1f", "double/64/f32")
    monkeypatch.setattr(results, "machine", lambda: H200 | dict(gpu="NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(results, "this_gpu", lambda: "h100")
    for problem in ("double/64/f32", "double/128/f32", "triple/64/f32"):
        record("5e1f", problem, impl="xla")
    results.write_timeline("triple/trace", dict(lanes=[]), "5e1f")
    results.write("all_gather/64KB/bf16", "xla", devices=2, ms=0.5, min_ms=0.4, spread=0.01)
    rows = results.rows("double")
    assert rows["double/64/f32"].keys() == {"cookbook"}  # Figures that stand beside each other are of one GPU.
    assert results.gpu_of(rows["double/128/f32"]["xla"]["provenance"]["gpu"]) == "h100"
    assert results.topics() == ["double", "triple"] and results.topics("h100") == ["double", "triple"]
    with monkeypatch.context() as on_an_h100:
        on_an_h100.setenv("COOKBOOK_GPU", "h100")
        assert results.rows("double")["double/64/f32"].keys() == {"xla"}
        assert results.folders("h200x2") == ["h100x2", "h200x2"] and results.folders("b200") == ["b200"]
    assert results.read_timeline("triple/trace")["lanes"] == []
    assert results.hosts() == [2] and results.rows("all_gather", "h200x2").keys() == {"all_gather/64KB/bf16"}
    assert results.rows("double", "b200") == {} and results.hosts("b200") == []


def test_a_file_has_the_documented_form(h200):
    record("5e1f")
    text = (h200 / "double.json").read_text()
    data = json.loads(text)
    assert data["rows"]["double/64/f32"]["cookbook"]["ms"] == 0.5
    assert text == json.dumps(data, indent=1, sort_keys=True) + "\n"
    assert [path.name for path in h200.iterdir()] == ["double.json"]


def test_nothing_recorded_is_nothing(h200):
    assert results.read("no/such/problem") is None and results.rows("no") == {} and results.topics() == []


def test_values_are_computed_on_a_gpu_and_read_elsewhere(h200, monkeypatch):
    monkeypatch.setattr(interpreter, "on_gpu", lambda *_: True)
    monkeypatch.setenv("COOKBOOK_RECORD", "1")
    assert results.value("02_memory/conflicts", lambda: {"1": [1.0, 2.0]}) == {"1": [1.0, 2.0]}
    monkeypatch.setattr(interpreter, "on_gpu", lambda *_: False)
    assert results.value("02_memory/conflicts", lambda: 1 / 0) == {"1": [1.0, 2.0]}
    assert results.recorded("02_memory/conflicts") == "recorded on NVIDIA H200, 2026-11-20"
    assert results.value("02_memory/unknown", lambda: 1 / 0) is None
    assert "no recorded value" in results.recorded("02_memory/unknown")


def test_a_value_is_stored_only_when_recording(h200, monkeypatch):
    monkeypatch.setattr(interpreter, "on_gpu", lambda *_: True)
    monkeypatch.delenv("COOKBOOK_RECORD", raising=False)
    assert results.value("02_memory/conflicts", lambda: 7) == 7
    assert not h200.exists()


@pytest.mark.parametrize("measure, wanted", [("0", {"1": 2.0}), ("1", 7)])
def test_a_gpu_that_tests_share_gives_no_figures(h200, monkeypatch, measure, wanted):
    monkeypatch.setattr(interpreter, "on_gpu", lambda *_: True)
    monkeypatch.setenv("COOKBOOK_RECORD", "1")
    assert results.value("02_memory/conflicts", lambda: {"1": 2.0}) == {"1": 2.0}
    record("5e1f")
    monkeypatch.setenv("COOKBOOK_MEASURE", measure)
    monkeypatch.setattr(lab.timing, "_kernel_ms", lambda *_: [7.0])
    assert results.value("02_memory/conflicts", lambda: 7) == wanted
    found = lab.measure(double, jnp.ones(64), problem="double/64/f32")
    assert (found.median_ms, found.recorded) == ((0.5, True) if measure == "0" else (7.0, False))


# Measurements without a GPU


def test_a_known_problem_gives_the_recorded_figure(h200, no_gpu):
    record("5e1f")
    found = lab.measure(double, jnp.ones(64), problem="double/64/f32")
    assert (found.median_ms, found.recorded, found.stale) == (0.5, True, False)
    assert (found.tflops, found.tbps) == pytest.approx((1000, 2))
    assert "0.5 ms" in repr(found) and "recorded on NVIDIA H200, 2026-11-20" in repr(found)
    assert "STALE" not in repr(found)


def test_a_stale_figure_says_so(h200, no_gpu):
    row = record("5e1f")
    row["provenance"]["stale"] = True  # As tools/stale.py says.
    results.save("double", "h200", dict(rows={"double/64/f32": dict(cookbook=row)}))
    found = lab.measure(double, jnp.ones(64), problem="double/64/f32")
    assert found.stale and "STALE" in repr(found)
    assert results.stale("double/64/f32") and results.stale_list() == [("double/64/f32", "cookbook")]
    record("5e1f")  # Measured again.
    assert not results.stale("double/64/f32") and results.stale_list() == []


def test_an_unknown_problem_gives_no_figure_and_no_exception(h200, no_gpu):
    for problem in ("double/128/f32", None):
        found = lab.measure(double, jnp.ones(64), problem=problem)
        assert math.isnan(found.median_ms) and not found.recorded and "no recorded figure" in repr(found)
        assert math.isnan(found.tflops)


def test_nothing_is_run_without_a_gpu(h200, no_gpu):
    record(None)
    found = lab.measure(lambda x: 1 / 0, None, problem="double/64/f32")
    assert found.median_ms == 0.5 and not found.stale  # The record does not say of which code it was.
    assert math.isnan(lab.first_call_seconds(lambda x: 1 / 0, None))


def test_a_peer_that_is_not_jax_has_a_recorded_figure(h200, no_gpu):
    record(None, impl="quack")
    assert not lab.measure(None, problem="double/64/f32", impl="quack").stale


def test_iterations_must_be_positive():
    with pytest.raises(ValueError, match="iterations = 0"):
        lab.measure(double, jnp.ones(64), iterations=0)


def test_measured_on_a_gpu(gpu, results_folder, monkeypatch):
    monkeypatch.setenv("COOKBOOK_RECORD", "1")
    x = jnp.ones((8192, 128))
    found = lab.measure(add_one, x, problem="add_one/8192x128/f32", nbytes=2 * x.nbytes)
    assert 1e-4 < found.min_ms <= found.median_ms < 10 and not found.recorded
    row = results.read("add_one/8192x128/f32", gpu=results.this_gpu())
    assert row["ms"] == found.median_ms and row["provenance"]["driver"] != "unknown"
    assert 0.01 < lab.first_call_seconds(add_one, x) < 20
