"""The hash of the program that a figure timed: the same wherever its code stands, another for another program."""

import json
import random
import sys
import types

import jax
import jax.numpy as jnp
import nbformat
import pytest

import lab
from bench import problems
from cookbook import _host
from lab import program, results

sys.path.append(str(results.ROOT.parent / "tools"))

KERNEL = """
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax, jax.numpy as jnp

def {body}(x_gmem, o_gmem):
    at = jax.lax.axis_index("block"){comment}
    o_gmem[pl.ds(at * 128, 128)] = x_gmem[pl.ds(at * 128, 128)] + {value}

def {name}(x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel({body}, out_type=out, grid=(x.size // 128,), grid_names=("block",))(x * 2)
"""
X = jax.ShapeDtypeStruct((1024,), jnp.float32)


def written(name="add", body="kernel", comment="", value=1.0, before=""):
    module = types.ModuleType("written")
    exec(before + KERNEL.format(name=name, body=body, comment=comment, value=value), module.__dict__)
    return getattr(module, name)


def test_where_code_stands_and_what_it_is_called_does_not_count():
    known = program.digest(written(), X)
    moved = written("plus", "other", "  # Why.", before="unused = 1\n" * 9)
    assert program.digest(moved, X) == known
    assert program.digest(jax.jit(lambda x: jax.jit(moved)(x)), X, gpu="h100") == known


def test_a_program_is_of_a_known_gpu_or_of_this_machines(pretend_gpu, monkeypatch):
    """A grid has as many blocks as the GPU has SMs: the last has 148."""
    blocks = lambda x: written()(x[: 128 * _host.require_target("add").num_sms])
    x = jax.ShapeDtypeStruct((128 * 200,), jnp.float32)
    same = {gpu: program.digest(blocks, x, gpu=gpu) for gpu in ("h100", "h200", "gh200", "h100-pcie", "b200")}
    assert same["h100"] == same["h200"] == same["gh200"] and len(set(same.values())) == 3
    pretend_gpu("NVIDIA B300", "10.3")
    assert program.digest(blocks, x, gpu="b300") == same["b200"]
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices(backend="cpu"))
    with pytest.raises(ValueError, match="gpu = 'a100' is not known; it must be one of 'h200-nvl', 'h100'"):
        program.digest(blocks, x, gpu="a100")


def test_what_is_computed_counts_in_a_kernel_and_around_it():
    around = lambda x: written()(x) + 1
    other = jax.ShapeDtypeStruct((2048,), jnp.float32)
    programs = [(written(), X), (written(value=2.0), X), (around, X), (written(), other), (lambda x: x * 2, X)]
    assert len({program.digest(fn, x) for fn, x in programs}) == len(programs)
    swapped = [program.digest(lambda x, y, i=i: (x - y, y - x)[i], X, X) for i in (0, 1)]
    assert swapped[0] != swapped[1]


def test_figures_are_noted_where_that_is_asked_for(tmp_path, monkeypatch, no_gpu, results_folder):
    file = tmp_path / "programs"
    lab.measure(written(), X, problem="add/1024/f32")
    assert not file.exists()
    monkeypatch.setenv("COOKBOOK_PROGRAMS", str(file))
    lab.measure(written(), X, problem="add/1024/f32")
    lab.measure(written(), X, problem="add/1024/f32", impl="xla", of=False)
    lab.measure(None, problem="add/1024/f32", impl="quack")
    lab.measure(lambda x: x + None, X, problem="add/1024/f32", impl="broken")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["impl"] for line in lines] == ["cookbook", "broken"]
    assert lines[0]["program"] == program.digest(written(), X) and "TypeError" in lines[1]["error"]


@pytest.fixture
def rows(results_folder, monkeypatch):
    """Rows of programs "a", "b", one without a program, and one of another JAX."""
    of = lambda **more: dict(ms=1.0, provenance=dict(jax=jax.__version__) | more)
    entries = dict(right=of(program="a"), wrong=of(program="b"), bare=of(), old=of(program="b") | {})
    entries["old"]["provenance"]["jax"] = "0.1"
    results.save("add", "h200", dict(rows={"add/1/f32": entries}))
    return lambda: {impl: row["provenance"] for impl, row in results.load("add", "h200")["rows"]["add/1/f32"].items()}


def test_rows_of_other_programs_are_marked_and_the_mark_is_taken_back(rows):
    import stale

    names = ("right", "wrong", "bare", "old")
    found = {("add/1/f32", impl): ["a"] for impl in names}
    assert stale.update(found, stamp=False) == ["h200 add/1/f32 wrong"]
    assert [impl for impl in names if rows()[impl].get("stale")] == ["wrong"] and "program" not in rows()["bare"]
    assert stale.update(found | {("add/1/f32", "wrong"): ["c", "b"]}, stamp=True) == []
    assert not any(row.get("stale") for row in rows().values()) and rows()["bare"]["program"] == "a"


def test_values_of_other_programs_are_marked_too(results_folder):
    import stale

    of = lambda program: dict(value=1, provenance=dict(jax=jax.__version__, program=program))
    results.save("tune_add", "h200", dict(values={"tune_add/1": of("a"), "tune_add/2": of("b")}))
    found = {("tune_add/1", "value"): ["a"], ("tune_add/2", "value"): ["a"]}
    assert stale.update(found, stamp=False) == ["h200 tune_add/2 value"]
    marked = {name: entry["provenance"].get("stale") for name, entry in results.values("tune_add").items()}
    assert marked == {"tune_add/1": None, "tune_add/2": True}


def test_a_sample_of_the_recorded_rows_is_marked_rightly():
    """`python tools/stale.py` looks at all of them."""
    known = [
        (case, impl, row["provenance"])
        for case in problems.CASES
        for impl in case.ours()
        if (row := results.read(case.problem, impl)) and "program" in row["provenance"]
    ]
    assert len(known) > 50
    for case, impl, provenance in random.Random(7).sample(known, 6):
        if provenance["jax"] == jax.__version__:
            is_fresh = program.digest(*flat(case.program(impl))) == provenance["program"]
            assert is_fresh != provenance.get("stale", False), f"{case.problem}, {impl}: run tools/stale.py"


def flat(of):
    fn, args = of
    return fn, *args


def test_a_notebooks_hash_is_that_of_its_own_code(tmp_path):
    def hashed(*cells):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbformat.write(notebook, tmp_path / "a.ipynb")
        return program.notebook_hash(tmp_path / "a.ipynb")

    known = hashed("n = 1", "%matplotlib inline\nn + 1")
    assert hashed("n  =  1  # Why.", "n + 1") == known
    assert len({known, hashed("n = 2", "n + 1"), hashed("n + 1", "n = 1"), hashed("n = 1"), hashed("n = ")}) == 5
    drawings = "from figures.memory import ring\n\nring.draw()", "ring.draw()", "start_here.race.draw()"
    assert hashed("n = 1", *drawings, "n + 1") == known
    assert len({known, hashed("n = 1", "n + 1", "ring.draw"), hashed("n = 1", "n + 1", "import os\nos.draw()")}) == 3
    said = [hashed("n = 1", f"n + 1\nlab.say({text})") for text in ('"One."', 'f"Two: {n}."')]
    assert said[0] == said[1] != known
