"""Figures: measured on a GPU, recorded with where and of what, returned as recorded elsewhere, stale when they are."""

import functools
import importlib
import json
import math
import sys

import jax
import jax.numpy as jnp
import pytest
from lab_kernels import add_one

import cookbook
from cookbook import lab
from cookbook.lab import interpreter, results, source

H200 = dict(gpu="NVIDIA H200", driver="580.1", jax="0.11.2", jaxlib="0.11.2", ptxas="13.0", date="2026-11-20")


@pytest.fixture
def h200(monkeypatch, results_folder):
    """This process records as if on an H200."""
    monkeypatch.setattr(results, "machine", lambda: H200)
    monkeypatch.setattr(results, "this_gpu", lambda: "h200")
    return results_folder / "h200"


def double(x):
    return x * 2


def record(fn, problem="double/64/f32", impl="cookbook"):
    return results.write(problem, impl, ms=0.5, min_ms=0.4, spread=0.01, flops=5e11, nbytes=1e9, fn=fn)


# Rows


def test_a_row_survives_the_round_trip(h200):
    row = record(double)
    assert results.read("double/64/f32") == row
    assert (
        row["provenance"].items()
        >= (H200 | dict(inputs="random normal", source=lab.results.source_hash(double))).items()
    )
    record(double, impl="XLA")
    assert results.read("double/64/f32") == row and results.rows("double")["double/64/f32"].keys() == {
        "cookbook",
        "XLA",
    }
    assert results.topics() == ["double"]


def test_a_file_has_the_documented_form(h200):
    record(double)
    text = (h200 / "double.json").read_text()
    data = json.loads(text)
    assert data["rows"]["double/64/f32"]["cookbook"]["ms"] == 0.5
    assert text == json.dumps(data, indent=1, sort_keys=True) + "\n"
    assert [path.name for path in h200.iterdir()] == ["double.json"]


def test_nothing_recorded_is_nothing(h200):
    assert results.read("no/such/problem") is None and results.rows("no") == {} and results.topics() == []


def test_values_are_computed_on_a_gpu_and_read_elsewhere(h200, monkeypatch):
    monkeypatch.setattr(interpreter, "on_gpu", lambda: True)
    monkeypatch.setenv("COOKBOOK_RECORD", "1")
    assert results.value("02_memory/conflicts", lambda: {"1": [1.0, 2.0]}) == {"1": [1.0, 2.0]}
    monkeypatch.setattr(interpreter, "on_gpu", lambda: False)
    assert results.value("02_memory/conflicts", lambda: 1 / 0) == {"1": [1.0, 2.0]}
    assert results.recorded("02_memory/conflicts") == "recorded on NVIDIA H200, 2026-11-20"
    assert results.value("02_memory/unknown", lambda: 1 / 0) is None
    assert "no recorded value" in results.recorded("02_memory/unknown")


def test_a_value_is_stored_only_when_recording(h200, monkeypatch):
    monkeypatch.setattr(interpreter, "on_gpu", lambda: True)
    monkeypatch.delenv("COOKBOOK_RECORD", raising=False)
    assert results.value("02_memory/conflicts", lambda: 7) == 7
    assert not h200.exists()


# Measurements without a GPU


def test_a_known_problem_gives_the_recorded_figure(h200, no_gpu):
    record(double)
    found = lab.measure(double, jnp.ones(64), problem="double/64/f32")
    assert (found.median_ms, found.recorded, found.stale) == (0.5, True, False)
    assert (found.tflops, found.tbps) == pytest.approx((1000, 2))
    assert "0.5 ms" in repr(found) and "recorded on NVIDIA H200, 2026-11-20" in repr(found)
    assert "STALE" not in repr(found)


def test_a_stale_figure_says_so(h200, no_gpu):
    record(double)
    found = lab.measure(lambda x: x * 3, jnp.ones(64), problem="double/64/f32")
    assert found.stale and "STALE" in repr(found)


def test_an_unknown_problem_gives_no_figure_and_no_exception(h200, no_gpu):
    for problem in ("double/128/f32", None):
        found = lab.measure(double, jnp.ones(64), problem=problem)
        assert math.isnan(found.median_ms) and not found.recorded and "no recorded figure" in repr(found)
        assert math.isnan(found.tflops)


def test_nothing_is_run_without_a_gpu(h200, no_gpu):
    record(None)
    found = lab.measure(lambda x: 1 / 0, None, problem="double/64/f32")
    assert found.median_ms == 0.5 and not found.stale  # Of what code it was is not known.
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


# The source hash


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`load(text)` imports `text` as the module `ours`, anew each time."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(text, name="ours"):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        source.linecache.checkcache()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return importlib.import_module(name)

    yield load
    for name in ("ours", "other"):
        sys.modules.pop(name, None)


PROGRAM = '''
import functools
import jax

FACTOR = 2

def helper(x):
    return x * FACTOR

def fn(x):
    """Says something."""
    return inner(helper, x)  # Calls.

def inner(f, x):
    return (lambda y: f(y) + 1)(x)

def unrelated(x):
    return x

jitted = jax.jit(fn)
bound = functools.partial(fn, 3)
'''


def test_the_hash_ignores_comments_docstrings_layout_and_unrelated_code(module):
    known = source.source_hash(module(PROGRAM).fn)
    for old, new in (
        ("# Calls.", "# Calls the inner function."),
        ('"""Says something."""', '"""Says another thing."""'),
        ('    """Says something."""\n', ""),
        ("x * FACTOR", "(x  *  FACTOR)"),
        ("def unrelated(x):\n    return x", "def unrelated(x):\n    return 2 * x"),
        ("\nFACTOR", "\n\n\n\nFACTOR"),
    ):
        assert PROGRAM.replace(old, new) != PROGRAM
        assert source.source_hash(module(PROGRAM.replace(old, new)).fn) == known, new


@pytest.mark.parametrize("take", ["fn", "jitted", "bound"])
def test_the_hash_follows_what_the_function_reaches(module, take):
    known = source.source_hash(getattr(module(PROGRAM), take))
    for old, new in (
        ("inner(helper, x)", "inner(helper, x) + 0"),
        ("x * FACTOR", "x + FACTOR"),
        ("FACTOR = 2", "FACTOR = 4"),
        ("f(y) + 1", "f(y) - 1"),
    ):
        assert PROGRAM.replace(old, new) != PROGRAM
        assert source.source_hash(getattr(module(PROGRAM.replace(old, new)), take)) != known, new


def test_the_hash_knows_arguments_bound_and_closed_over():
    def scaled(factor):
        return lambda x: x * factor

    hashes = [functools.partial(double, 3), functools.partial(double, 4), scaled(3), scaled(4), double]
    assert len({source.source_hash(fn) for fn in hashes}) == len(hashes)
    assert source.source_hash(scaled(3)) == source.source_hash(scaled(3))


def test_the_hash_follows_other_modules_of_ours(module):
    user = "import other\ndef fn(x):\n    return other.helper(x)\n"
    module("def helper(x):\n    return x\n", "other")
    known = source.source_hash(module(user).fn)
    module("def helper(x):\n    return -x\n", "other")
    assert source.source_hash(module(user).fn) != known


def test_a_function_of_the_package_counts_with_its_whole_module():
    op = getattr(cookbook, "softmax", None)
    if not callable(op):
        from cookbook.rows.softmax import softmax as op
    assert source.module_hashes(lambda x: op(x)).keys() >= {"cookbook.rows.softmax", "cookbook._mgpu"}
    assert not any("lab" in name for name in source.module_hashes(lambda x: lab.run(op, x)))


def test_libraries_do_not_count():
    assert source._Reach(jnp.sum).parts == set()
    assert source.module_hashes(lambda x: jax.nn.softmax(x)) == {}


def test_a_changed_module_of_the_package_makes_its_rows_stale(h200, monkeypatch):
    from cookbook.rows.softmax import softmax

    record(softmax, "softmax/64/f32")
    record(double)
    assert results.stale_list() == []
    known = source._module_hash
    monkeypatch.setattr(source, "_module_hash", lambda m: "new" if m.__name__ == "cookbook.rows.softmax" else known(m))
    assert results.stale_list() == [("softmax/64/f32", "cookbook")]
