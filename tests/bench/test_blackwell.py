"""`make bench` and `make record` on a B200, which nobody here has: as far as a pretended one goes."""

import dataclasses
import re
import sys
import types

import jax
import jax.numpy as jnp
import nbformat
import pytest

import lab
from bench import __main__ as bench
from bench import problems
from cookbook import _host
from cookbook.blackwell import cost as blackwell_cost
from lab import program, results, roofline, timing
from tests.house.test_house import ROOT

B200, H200 = ("NVIDIA B200", "10.0"), ("NVIDIA H200", "9.0")
CASES = [case for case in problems.CASES if case.op.startswith("blackwell.")]


@pytest.fixture
def b200(pretend_gpu, monkeypatch, results_folder):
    """This process records as if on a B200, on which every kernel takes 0.5 ms."""
    monkeypatch.setenv("COOKBOOK_RECORD", "1")
    machine = dict(gpu="NVIDIA B200", driver="580.1", jax="0.11.2", jaxlib="0.11.2", ptxas="13.0", date="2026-11-23")
    monkeypatch.setattr(results, "machine", lambda: machine)
    monkeypatch.setattr(timing, "_kernel_ms", lambda fn, args, iterations, devices: [0.5] * iterations)
    monkeypatch.setattr(bench.time, "sleep", lambda seconds: None)
    pretend_gpu(*B200)
    return results_folder


def small(**changes):
    """A problem whose kernel XLA stands in for: no B200 runs the real one here."""
    case = problems._blackwell_matmul(256, 128, 64)
    return dataclasses.replace(case, kernel=lambda a, b: jnp.matmul(a, b), **changes)


def test_each_gpu_runs_the_problems_of_its_tensor_cores(pretend_gpu):
    ops = lambda: {case.op for case in problems.CASES if problems.runnable(case)}
    everything = {case.op for case in problems.CASES}
    if not lab.on_gpu():  # Nothing is run, and everything is shown.
        assert ops() == everything
    pretend_gpu(*B200)
    on_b200 = ops()
    pretend_gpu(*H200)
    on_h200 = ops()
    assert on_b200 | on_h200 == everything and {"softmax", "add", "matmul"} <= on_h200
    assert on_b200 - on_h200 == {"blackwell.matmul", "blackwell.matmul_mxfp8", "blackwell.ragged_dot"}
    assert not {"attention", "matmul_fp8", "moe"} & on_b200 and {"softmax", "add"} <= on_b200


def test_nothing_is_promised_of_a_b200():
    assert CASES and all(case.target is None for case in CASES)


def test_problems_trace():
    """Kernel, reference and the peer that takes the same inputs agree on the result's shape and dtype."""
    for case in CASES:
        with _host.building_for(_host.Target("NVIDIA B200", 148)):
            out = jax.eval_shape(case.kernel, *case.avals)
        assert out.shape == jax.eval_shape(case.reference, *case.avals).shape and out.dtype == jnp.bfloat16
        if "cublas" in case.peers:
            assert jax.eval_shape(case.peers["cublas"], *case.avals) == out


def test_inputs_of_mxfp8_are_finite():
    case = problems._blackwell_mxfp8(64, 96, 128)
    a, b, a_scales, b_scales = case.inputs()
    assert (a_scales.shape, b_scales.shape) == ((64, 4), (96, 4)) and a_scales.dtype == jnp.float8_e8m0fnu
    assert bool(jnp.isfinite(case.reference(a, b, a_scales, b_scales)).all())


def test_figures_go_to_the_folder_of_the_b200_and_are_read_there(b200, monkeypatch, capsys):
    case = small(headline=True)
    assert results.this_gpu() == "b200" and bench._run(case, 3, tune=False) is True
    row = results.read(case.problem, gpu="b200")
    assert row["ms"] == 0.5 and row["provenance"]["gpu"] == "NVIDIA B200"
    assert row["provenance"]["program"] == program.digest(case.kernel, *case.avals, gpu="b200")
    assert results.read(case.problem, "cublas", gpu="b200")["ms"] == 0.5 and results.topics("h200") == []
    monkeypatch.undo()
    monkeypatch.setattr(results, "ROOT", b200)
    monkeypatch.setattr(lab.interpreter, "on_gpu", lambda *_: False)
    found = lab.measure(None, problem=case.problem, gpu="b200", of=False)
    assert found.recorded and found.median_ms == 0.5 and "recorded on NVIDIA B200" in repr(found)
    bound = roofline.bound(found.flops, found.nbytes, "bf16", "b200")
    assert roofline.compare(found, gpu="b200").fraction == pytest.approx(bound.ms / 0.5)
    for folder in ("tools", "site"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import render_readme

    line = render_readme._line("b200", case, render_readme.rate_text)
    assert line.startswith(f"| `{case.problem}` | ") and line.endswith(" | NVIDIA B200 |\n") and "cublas" in line


def test_values_of_a_notebook_go_there_too(b200):
    assert results.value("19_blackwell/tiles", lambda: 7) == 7
    assert results.stored("19_blackwell/tiles", "b200") == 7 and results.stored("19_blackwell/tiles") is None


@pytest.mark.parametrize("gpu, is_hopper", [(B200, False), (H200, True)])
def test_everything_runs_what_the_gpu_has(pretend_gpu, monkeypatch, results_folder, gpu, is_hopper):
    """`make bench` without OP: the engine, and kernels across GPUs, are Hopper's."""
    pretend_gpu(*gpu)
    ran = set()
    monkeypatch.setattr(bench, "_run", lambda case, *_: ran.add(case.op))
    monkeypatch.setattr(bench, "_ceilings", lambda iterations: None)
    monkeypatch.setattr(bench, "_print_dispatch", ran.add)
    monkeypatch.setattr(bench.serving, "run", lambda: ran.add("serving"))
    monkeypatch.setattr(bench.hybrid, "run", lambda iterations: ran.add("hybrid"))
    monkeypatch.setattr(bench.collectives, "run", lambda *_: ran.add("collectives") or [])
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert bench.main() == 0
    assert ({"serving", "hybrid", "collectives", "paged_attention", "matmul"} <= ran) == is_hopper
    assert ("blackwell.matmul" in ran) != is_hopper and "softmax" in ran


def test_configurations_are_timed_and_read(b200, monkeypatch):
    """`lab.autotune`, with XLA in place of a kernel that cannot run here."""

    def matmul(a, b, config=None):
        return a @ b

    problem = blackwell_cost.Problem(64, 64, 64, True, 2, 2)
    configs, x = blackwell_cost.to_try(problem, 2), jnp.ones((64, 64))
    found = lab.autotune(matmul, x, x, configs=configs, gpu="b200")
    assert found.ms == 0.5 and len(found.trials) == len(configs) and not found.failures
    monkeypatch.undo()
    monkeypatch.setattr(results, "ROOT", b200)
    monkeypatch.setattr(lab.interpreter, "on_gpu", lambda *_: False)
    read = lab.autotune(matmul, x, x, configs=configs, gpu="b200")
    assert read.recorded and read.best == found.best
    with pytest.raises(RuntimeError, match="nothing was recorded for matmul"):
        lab.autotune(matmul, x, x, configs=configs)


def test_an_older_gpu_shows_what_was_recorded_on_a_b200(b200, pretend_gpu):
    """On an H200 nothing of a B200 is run: not timed, and checked in the interpreter."""
    results.write("19_blackwell/x", "cookbook", ms=0.25, min_ms=0.25, spread=0.0)
    pretend_gpu(*H200)
    assert lab.on_gpu() and not lab.on_gpu("b200")
    found = lab.measure(lambda: 1 / 0, problem="19_blackwell/x", gpu="b200")
    assert found.recorded and found.median_ms == 0.25
    assert results.value("19_blackwell/y", lambda: 1 / 0, gpu="b200") is None


BEFORE = "parameters", "setup"  # Cells that make the operands.
CHAPTERS = {
    "19_blackwell": (*BEFORE, "published", "guess", "step", "bound", "instruments", "one", "predict", "ring", "roles",
                     "persistent", "ladder"),
    "19b_pairs": (*BEFORE, "count", "instruments", "rung-4", "pair", "launch", "ladder"),
}  # fmt: skip


@pytest.mark.parametrize("stem", CHAPTERS)
def test_a_chapter_measures_its_rungs_on_a_b200(b200, monkeypatch, capsys, stem):
    """Its cells, as `make record` would run them there; the compiler, which needs no B200, is left out."""
    nothing = types.SimpleNamespace(registers=0, spill_bytes=0, smem_bytes=0, ptx="")
    monkeypatch.setattr(lab, "compile_for", lambda *args, **kwargs: nothing)
    monkeypatch.setattr(program, "digest", lambda *args, **how: "of no kernel")  # No program of 256 rows is wanted.
    monkeypatch.setattr(lab, "show_diff", lambda *_: None)
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    notebook = nbformat.read(ROOT / f"notebooks/{stem}.ipynb", as_version=4)
    cells, names = {cell.id: cell.source for cell in notebook.cells}, {}
    for cell in CHAPTERS[stem]:
        exec(cells[cell], names)
        names["timing_size"] = 256  # The operands are made, and nothing multiplies them.
        names |= dict.fromkeys(("facts", "predict"), lambda *_: None)
    assert names["a_big"].shape == (256, 256) and hasattr(names["a_big"], "devices")
    rows, kernels = results.rows(stem, "b200"), names["KERNELS"]
    assert len(rows) == len(kernels) + (stem == "19b_pairs") and kernels.keys() <= names["RUNGS"].keys()
    assert {row["cookbook"]["ms"] for problem, row in rows.items() if "cublas" not in problem} == {0.5}
    assert results.topics("b200") == [stem] and results.topics("h200") == []
    if stem == "19b_pairs":
        assert rows["19b_pairs/cublas"]["cublas"]["ms"] == 0.5
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("[measured on NVIDIA B200]") and shown.count(" 500 ") == len(rows)


def test_the_second_chapter_shows_the_rungs_of_the_first(b200):
    for name in ("1_one_stage", "2_a_ring", "3_roles", "4_one_accumulator", "4_two_accumulators"):
        results.write(f"19_blackwell/{name}", "cookbook", ms=0.25, min_ms=0.25, spread=0.0)
    cell = next(
        cell.source
        for cell in nbformat.read(ROOT / "notebooks/19b_pairs.ipynb", as_version=4).cells
        if cell.id == "ladder"
    )
    names = dict(re=re, lab=lab, flops=1.0)
    exec(cell[cell.index("def problem_of") : cell.index("def timed")], names)
    exec(cell[cell.index("def recorded") : cell.index("def where")], names)
    first = nbformat.read(ROOT / "notebooks/19_blackwell.ipynb", as_version=4).cells
    rungs = re.findall(r'"(\d: [\w ]+)":', next(c.source for c in first if c.id == "ladder"))
    assert len(rungs) == 5 and {names["recorded"](name).median_ms for name in rungs} == {0.25}


def test_the_results_page_has_a_section_of_the_b200(b200, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "site"))
    import measured

    assert "Nothing has been measured" in "\n".join(measured._blackwell())
    case = CASES[0]
    results.write(case.problem, "cookbook", ms=0.1, min_ms=0.1, spread=0.0, flops=case.flops, nbytes=case.nbytes)
    page = "\n".join(measured._blackwell())
    share = roofline.bound(case.flops, case.nbytes, "bf16", "b200").ms / 0.1
    assert f"### {case.op}" in page and f"{share:.0%}" in page and "NVIDIA B200" in page


def test_the_command_skips_what_the_gpu_has_not(pretend_gpu, monkeypatch, results_folder, capsys):
    pretend_gpu(*H200)
    ran = []
    monkeypatch.setattr(bench, "_run", lambda case, *_: ran.append(case.op))
    monkeypatch.setattr(bench, "_ceilings", lambda iterations: None)
    monkeypatch.setattr(sys, "argv", ["bench", "blackwell.matmul"])
    assert bench.main() == 0 and not ran
    assert "This GPU has not the tensor cores of blackwell.matmul." in capsys.readouterr().out
