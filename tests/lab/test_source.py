"""The hashes that tie figures and notebooks to code: what changes them, and what does not."""

import functools
import importlib
import json
import sys

import jax
import jax.numpy as jnp
import pytest

import cookbook
from cookbook import lab
from cookbook.lab import source

FILES = {
    "__init__.py": "from .add import add as add\nfrom cookbook.gemm.dot import dot\n",
    "_mgpu.py": "limit = 3\n",
    "add.py": "from . import _mgpu\n\ndef add(x): return x\n",
    "gemm/__init__.py": "",
    "gemm/core.py": "from .. import _mgpu\n",
    "gemm/dot.py": "from .core import tile\n\ndef dot(x): return x\n",
    "gemm/other.py": "from . import core\n",
    "lab/__init__.py": "ours = 1\n",
}


@pytest.fixture
def package(monkeypatch, tmp_path):
    """`package(path=text)` writes a package of the files above, some of them changed; `/` is `__` in a keyword."""
    monkeypatch.setattr(source, "PACKAGE", tmp_path)

    def write(**changed):
        for path, text in (FILES | {f"{name.replace('__', '/')}.py": text for name, text in changed.items()}).items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text)
        source._parsed_at.cache_clear()  # The same nanosecond is two texts' here, and nowhere else.

    write()
    return write


def notebook(tmp_path, *cells: str):
    cells = [dict(cell_type="code", source=cell.splitlines(keepends=True)) for cell in cells]
    (tmp_path / "n.ipynb").write_text(json.dumps(dict(cells=cells)))
    return source.notebook_hash(tmp_path / "n.ipynb")


@pytest.mark.parametrize(
    "code, modules",
    [
        ("import cookbook\ncookbook.dot(1)", "_mgpu gemm.core gemm.dot"),
        ("import cookbook as c\nc.gemm.dot.dot(1)", "_mgpu gemm.core gemm.dot"),
        ("from cookbook import dot", "_mgpu gemm.core gemm.dot"),
        ("from cookbook import gemm\ngemm.other.x", "_mgpu gemm.core gemm.other"),
        ("from cookbook.gemm import core, other", "_mgpu gemm.core gemm.other"),
        ("from cookbook.gemm.dot import dot", "_mgpu gemm.core gemm.dot"),
        ("import cookbook.add", "_mgpu add"),
        ("from cookbook import add as plus, lab\nimport cookbook.lab.results", "_mgpu add"),
        ("import cookbook\nfrom cookbook import lab\nlab.add, cookbook.lab.add", ""),
        ("import numpy\nnumpy.add", ""),
    ],
)
def test_modules_that_code_reaches(package, code, modules):
    found = source._closure(source._names_of_ours(source.ast.parse(code)))
    assert found == {f"cookbook.{name}" for name in modules.split()}


def test_a_notebooks_hash(package, tmp_path):
    cells = "from cookbook import dot", "dot(1)"
    known = notebook(tmp_path, *cells)
    assert notebook(tmp_path, "%matplotlib inline\n# why\nfrom cookbook import dot", "\ndot( 1 )") == known
    assert notebook(tmp_path, cells[0], "dot(2)") != known
    package(add="def add(x): return -x", gemm__other="x = 2", lab____init__="ours = 2")
    assert notebook(tmp_path, *cells) == known
    package(gemm__core='"""Tiles."""\n\nfrom .. import _mgpu  # For a limit.\n')
    assert notebook(tmp_path, *cells) == known
    for change in (dict(gemm__dot="def dot(x): return -x"), dict(gemm__core="tile = 2"), dict(_mgpu="limit = 4")):
        package(**change)
        assert notebook(tmp_path, *cells) != known, change


def test_a_kernels_modules():
    gemm = {"cookbook._mgpu", "cookbook._numerics", "cookbook.gemm.matmul"}
    rows = {"cookbook._mgpu", "cookbook.rows.core", "cookbook.rows.softmax"}
    modules = lambda fn: source.code_of(fn)["modules"].keys()
    assert modules(cookbook.softmax) == modules(functools.partial(cookbook.softmax, config=1)) == rows
    assert modules(jax.jit(cookbook.matmul)) >= gemm and not rows & modules(cookbook.matmul) - gemm
    assert "code" not in source.code_of(cookbook.softmax)
    assert modules(lambda x: cookbook.softmax(x)) >= rows


@pytest.mark.parametrize("fn", [jnp.add, jnp.sum, functools.partial(jax.nn.softmax, axis=0), lab.run, None, len])
def test_other_peoples_code_and_the_laboratory_do_not_count(fn):
    assert source.code_of(fn) == {}


PROGRAM = '''
import functools
import jax
from cookbook import softmax, rms_norm

FACTOR = 2

def helper(x):
    return x * FACTOR

def fn(x):
    """Says something."""
    return inner(helper, x)  # Calls.

def inner(f, x):
    return (lambda y: f(y) + 1)(softmax(x))

def unrelated(FACTOR):
    return rms_norm(FACTOR)

FACTOR_OF_ANOTHER = 2
jitted = jax.jit(fn)
bound = functools.partial(fn, 3)
'''


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Imports a text as a module, anew each time."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(text):
        (tmp_path / "ours.py").write_text(text)
        sys.modules.pop("ours", None)
        importlib.invalidate_caches()
        return importlib.import_module("ours")

    yield load
    sys.modules.pop("ours", None)


SAME = (
    ("# Calls.", "# Calls the inner function."),
    ('"""Says something."""', '"""Says another thing."""'),
    ('    """Says something."""\n', ""),
    ("x * FACTOR", "(x  *  FACTOR)"),
    ("return rms_norm(FACTOR)", "return 2 * FACTOR"),
    ("ANOTHER = 2", "ANOTHER = 3"),
    ("\nFACTOR =", "\n\n\n\nFACTOR ="),
)
OTHER = (
    ("inner(helper, x)", "inner(helper, x) + 0"),
    ("x * FACTOR", "x + FACTOR"),
    ("FACTOR = 2\n\ndef", "FACTOR = 4\n\ndef"),
    ("f(y) + 1", "f(y) - 1"),
)


@pytest.mark.parametrize("take", ["fn", "jitted", "bound"])
def test_a_functions_code_is_what_it_reaches_by_name(load, take):
    known = source.code_of(getattr(load(PROGRAM), take))
    assert "cookbook.rows.softmax" in known["modules"] and "cookbook.rows.rms_norm" not in known["modules"]
    for changes, same in ((SAME, True), (OTHER, False)):
        for old, new in changes:
            assert PROGRAM.count(old) == 1, old
            assert (source.code_of(getattr(load(PROGRAM.replace(old, new)), take)) == known) == same, (old, new)


def test_in_a_notebook_the_running_cell_counts(monkeypatch):
    cells = ["", "from cookbook import add, softmax", "n = 1\nx = 2", "n = n + 1", "def fn():\n    return add(n)"]
    code = lambda *cells: monkeypatch.setattr(sys.modules["__main__"], "In", cells, False) or source.code_of(lambda: 0)
    known = code(*cells, "measure(fn, 3)")
    assert known["modules"].keys() >= {"cookbook.elementwise"} and "cookbook.rows.softmax" not in known["modules"]
    assert code(*cells, "x = 3", "no Python", "def other(n):\n    return n", "measure(fn, 3)") == known
    assert code(*cells, "measure(fn, 3)", "measure(fn, 3)") == known
    for i, (old, new) in {2: ("n = 1", "n = 3"), 3: ("+ 1", "+ 2"), 4: ("add(n)", "add(-n)")}.items():
        changed = [cell.replace(old, new) if i == j else cell for j, cell in enumerate(cells)]
        assert code(*changed, "measure(fn, 3)") != known, new
    assert code(*cells, "n = 3", "measure(fn, 3)") != known
    assert code(*cells, "measure(fn, 4)") != known
    assert source.code_of(cookbook.softmax).keys() == {"modules"}
