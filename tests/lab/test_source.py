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
    "__init__.py": "from .add import plus as plus\nfrom cookbook.gemm.dot import dot\n",
    "_mgpu.py": "limit = 3\nother_limit = 4\n",
    "add.py": "from . import _mgpu\n\ndef plus(x): return _mgpu.limit\n",
    "gemm/__init__.py": "",
    "gemm/core.py": """from .. import _mgpu\nimport math

def tile(): return math.pi * _mgpu.limit

def cut(): return 1
""",
    "gemm/dot.py": "from .core import tile\n\ndef dot(x): return tile()\n\ndot.Config = 1\n",
    "gemm/other.py": "from . import core\n\nwhole = core\n",
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

    write()
    return write


def notebook(tmp_path, *cells: str):
    cells = [dict(cell_type="code", source=cell.splitlines(keepends=True)) for cell in cells]
    (tmp_path / "n.ipynb").write_text(json.dumps(dict(cells=cells)))
    return source.notebook_hash(tmp_path / "n.ipynb")


DOT = {"gemm.dot: def dot", "gemm.dot: dot.Config", "gemm.core: def tile", "gemm.core: import math", "_mgpu: limit"}
PLUS = {"add: def plus", "_mgpu: limit"}
CORE = {"gemm.other: whole", "gemm.core: def tile", "gemm.core: def cut", "gemm.core: import math", "_mgpu: limit"}


@pytest.mark.parametrize(
    "code, statements",
    [
        ("import cookbook\ncookbook.dot(1)", DOT),
        ("import cookbook as c\nc.gemm.dot.dot(1)", DOT),
        ("from cookbook import dot\ndot(1)", DOT),
        ("from cookbook import dot", set()),
        ("import cookbook.gemm.dot as d\nd.dot.Config", DOT),
        ("import cookbook.gemm.dot\ncookbook.gemm.dot.dot", DOT),
        ("from cookbook.gemm import core\ncore.cut()", {"gemm.core: def cut"}),
        ("from cookbook import gemm\ngemm.other.whole", CORE),
        ("from cookbook import _mgpu\nuse(_mgpu)", {"_mgpu: limit", "_mgpu: other_limit"}),
        ("from cookbook import plus as add, lab\nimport cookbook.lab.results\nlab.run(add)", PLUS),
        ("import cookbook\nfrom cookbook import lab\nlab.add, cookbook.lab.add", set()),
        ("import numpy\nnumpy.add", set()),
    ],
)
def test_statements_that_code_reaches(package, code, statements):
    program = source._statements(code)
    _, names = source._reached(program, range(len(program)))
    homes = {source._home(name) for name in names} - {source.OUTSIDE}
    found = {line.removeprefix("cookbook.") for home in homes for line in source._code(*home)}
    assert len(found) == len(statements) and all(any(map(line.startswith, statements)) for line in found), found


def test_a_notebooks_hash(package, tmp_path):
    cells = "from cookbook import dot", "dot(1)"
    known = notebook(tmp_path, *cells)
    assert notebook(tmp_path, "%matplotlib inline\n# why\nfrom cookbook import dot", "\ndot( 1 )") == known
    assert notebook(tmp_path, cells[0], "dot(2)") != known
    core, dot, limits = FILES["gemm/core.py"], FILES["gemm/dot.py"], FILES["_mgpu.py"]
    for same in (
        dict(add="def plus(x): return -x", gemm__other="x = 2", lab____init__="ours = 2"),
        dict(gemm__core=core.replace("import math", "import math  # For pi.\n\n")),
        dict(gemm__core=core.replace("return 1", "return 2"), _mgpu=limits.replace("4", "5")),
        dict(gemm__dot=dot + "def unrelated(): return 1"),
    ):
        package(**same)
        assert notebook(tmp_path, *cells) == known, same
    for change in (
        dict(gemm__dot=dot.replace("tile()", "-tile()")),
        dict(gemm__dot=dot.replace("= 1", "= 2")),
        dict(gemm__core=core.replace("math.pi", "math.e")),
        dict(gemm__core=core.replace("import math", "import cmath as math")),
        dict(_mgpu=limits.replace("3", "4")),
    ):
        package(**change)
        assert notebook(tmp_path, *cells) != known, change


def test_a_modules_own_names_do_not_count(package, tmp_path):
    cells = "import cookbook\nfrom cookbook import dot", "print(cookbook.__file__, dot(1))"
    assert notebook(tmp_path, *cells)
    _, names = source._reached([s for cell in cells for s in source._statements(cell)], range(3))
    assert "cookbook.__file__" in names and source._hashes(names).keys() == {"cookbook.gemm.dot.dot"}


def test_a_name_that_is_gone_changes_what_was_recorded_of_it(package):
    known = source._hashes({"cookbook.dot", "cookbook.gemm.core.cut"})
    assert known.keys() == {"cookbook.gemm.dot.dot", "cookbook.gemm.core.cut"} and not source.changed(dict(uses=known))
    package(gemm__core=FILES["gemm/core.py"].replace("cut", "chop"))
    assert source.changed(dict(uses=known)) and source._hashes({"cookbook.gemm.core.cut"}) == {
        "cookbook.gemm.core.cut": None
    }


def test_a_kernels_code():
    uses = lambda fn: source.code_of(fn)["uses"].keys()
    softmax, matmul = {"cookbook.rows.softmax.softmax"}, {"cookbook.gemm.matmul.matmul"}
    assert uses(cookbook.softmax) == uses(functools.partial(cookbook.softmax, config=1)) == softmax
    assert uses(jax.jit(cookbook.matmul)) == matmul and "code" not in source.code_of(cookbook.softmax)
    assert uses(lambda x: cookbook.softmax(x)) >= softmax
    reached = {line.split(": ")[0] for line in source._code("cookbook.gemm.matmul", "matmul")}
    gemm = {f"cookbook.gemm.{name}" for name in ("matmul", "core", "roles", "cost")}
    assert reached == gemm | {"cookbook._mgpu", "cookbook._numerics"}


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
    assert known["uses"].keys() == {"cookbook.rows.softmax.softmax"}
    for changes, same in ((SAME, True), (OTHER, False)):
        for old, new in changes:
            assert PROGRAM.count(old) == 1, old
            assert (source.code_of(getattr(load(PROGRAM.replace(old, new)), take)) == known) == same, (old, new)


def test_in_a_notebook_the_running_cell_counts(monkeypatch):
    cells = ["", "from cookbook import add, softmax", "n = 1\nx = 2", "n = n + 1", "def fn():\n    return add(n)"]
    code = lambda *cells: monkeypatch.setattr(sys.modules["__main__"], "In", cells, False) or source.code_of(lambda: 0)
    known = code(*cells, "measure(fn, 3)")
    assert known["uses"].keys() == {"cookbook.elementwise.add"}
    assert code(*cells, "x = 3", "no Python", "def other(n):\n    return n", "measure(fn, 3)") == known
    assert code(*cells, "measure(fn, 3)", "measure(fn, 3)") == known
    for i, (old, new) in {2: ("n = 1", "n = 3"), 3: ("+ 1", "+ 2"), 4: ("add(n)", "add(-n)")}.items():
        changed = [cell.replace(old, new) if i == j else cell for j, cell in enumerate(cells)]
        assert code(*changed, "measure(fn, 3)") != known, new
    assert code(*cells, "n = 3", "measure(fn, 3)") != known
    assert code(*cells, "measure(fn, 4)") != known
    assert source.code_of(cookbook.softmax).keys() == {"uses"}


def test_functions_that_hand_arguments_on_do_not_count():
    for module, name in source.ON_THE_HOST:
        program = source._program(module)
        assert source._binding(program, name, len(program)), "it is there"
        assert source._hashes({f"{module}.{name}"}) == {}
