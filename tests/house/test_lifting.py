"""A family is its folder and the three shared files: copied into an empty package, with nothing else, it works.

Some families are built on another and are copied with it: the experts of gemm are chosen by select's `top_k`, and the
products of nvlink, blackwell and loss are gemm's.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import cookbook
from bench.ops import OPS

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
import lift  # noqa: E402

SHARED = ["_device.py", "_host.py", "_numerics.py"]
BUILT_ON = {"gemm": ["select"]} | dict.fromkeys(("nvlink", "blackwell", "loss"), ["gemm", "select"])

# Runs without site's .pth files, one of which leads to this checkout. `kernels` is no more than a folder.
PROGRAM = """
import importlib, pathlib, sys
folder, family, paths = sys.argv[1], sys.argv[2], {paths}
sys.path[:] = [folder, *sys.path, *paths]
import jax, jax.numpy as jnp, numpy as np

kernels = pathlib.Path(folder, "kernels")
files = sorted(kernels.glob(f"{{family}}/**/*.py")) or [kernels / f"{{family}}.py"]
names = [".".join(path.relative_to(kernels).with_suffix("").parts) for path in files if path.stem != "__init__"]
for package in ("cookbook", "kernels"):
    for name in names:
        importlib.import_module(f"{{package}}.{{name}}")
for name, module in sys.modules.items():
    if name.partition(".")[0] in ("cookbook", "kernels") and module.__spec__.has_location:
        assert pathlib.Path(module.__file__).is_relative_to(folder), module.__file__
assert not any(name.endswith(".lab") for name in sys.modules)

from kernels import _host
{use}
try:
    call()
except RuntimeError as error:
    assert "`from kernels import _host`" in str(error) and "`with _host.interpreting():`" in str(error), error
    assert str(error).startswith("kernels."), error
else:
    raise AssertionError("there is no GPU, and yet it runs")
with _host.interpreting(num_sms=2):
    np.testing.assert_allclose(np.asarray(call(), np.float32), np.asarray(wanted, np.float32), rtol=2e-2, atol=2e-2)
"""

USES = {
    "elementwise": """
from kernels.elementwise import add
x = jnp.linspace(-1, 1, 300)
call, wanted = lambda: add(x, x), x + x
""",
    "rows": """
from kernels.rows import softmax
x = jax.random.normal(jax.random.key(0), (5, 300))
call, wanted = lambda: softmax(x), jax.nn.softmax(x)
""",
    "select": """
from kernels.select import top_k
x = jax.random.normal(jax.random.key(0), (5, 300))
call, wanted = lambda: top_k(x, 3)[1], jax.lax.top_k(x, 3)[1]
""",
    "gemm": """
from kernels.gemm import matmul
a, b = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in (0, 1))
call, wanted = lambda: matmul(a, b), a @ b
""",
    "attn": """
from kernels.attn import attention
x = jax.random.normal(jax.random.key(0), (1, 64, 1, 64), jnp.bfloat16)
call, wanted = lambda: attention(x, x, x), jax.nn.dot_product_attention(x, x, x)
""",
    "recurrent": """
from kernels.recurrent import linear_attention
x = jax.random.normal(jax.random.key(0), (1, 64, 1, 64), jnp.bfloat16) / 4
pairs = jnp.tril(x[0, :, 0] @ x[0, :, 0].T)
call, wanted = lambda: linear_attention(x, x, x, scale=1.0), (pairs @ x[0, :, 0])[None, :, None]
""",
    "loss": """
from kernels.loss import linear_cross_entropy
x, w = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) / 8 for i in (0, 1))
labels = jnp.arange(64)
call, wanted = lambda: linear_cross_entropy(x, w, labels), -jnp.mean(jnp.diag(jax.nn.log_softmax(x @ w.T)))
""",
    "blackwell": """
from kernels.blackwell import matmul
a, b = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in (0, 1))
call, wanted = lambda: matmul(a, b), a @ b
""",
    # On one device, since the interpreter has no semaphores.
    "nvlink": """
from kernels.nvlink import all_gather_matmul
a, b = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in (0, 1))
product = lambda a, b: all_gather_matmul(a, b, "x")
product = jax.shard_map(product, mesh=jax.make_mesh((1,), ("x",)), out_specs=jax.P("x"))
call, wanted = lambda: product(a, b), a @ b
""",
}


def test_every_family_is_lifted():
    folders = {path.parent.name for path in (ROOT / "cookbook").glob("*/__init__.py")}
    files = {path.stem for path in (ROOT / "cookbook").glob("[a-z]*.py")}
    assert USES.keys() == folders | files


def test_an_op_of_attention_brings_no_other():
    """Serving lifts attention over pages without the backward pass, or any other op."""
    ops = {"attention", "attention_fp8", "paged_attention", "ragged_paged_attention", "varlen_attention", "write_kv"}
    for op in ops:
        files = lift.needed(op)
        assert {file.stem for file in files} & ops == {op}
        assert any(file.parent.name == "backward" for file in files) == (op == "attention"), (op, files)


@pytest.mark.parametrize("family", USES)
def test_a_family_works_on_its_own(family, tmp_path):
    for package in ("cookbook", "kernels"):
        (tmp_path / package).mkdir()
        for path in SHARED:
            shutil.copy(ROOT / "cookbook" / path, tmp_path / package)
        for name in [family, *BUILT_ON.get(family, [])]:
            source = ROOT / "cookbook" / name
            if source.is_dir():
                shutil.copytree(source, tmp_path / package / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source.with_suffix(".py"), tmp_path / package)
    (tmp_path / "cookbook" / "__init__.py").touch()
    paths = [path for path in sys.path if path and not pathlib.Path(path).is_relative_to(ROOT / "tests")]
    paths = [path for path in paths if not (pathlib.Path(path) / "cookbook").exists()]
    code = PROGRAM.format(paths=json.dumps(paths), use=USES[family])
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path), family]
    environment = os.environ | dict(JAX_PLATFORMS="cpu")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "op",
    [
        "softmax",
        *(
            pytest.param(op, marks=pytest.mark.slow)
            for op in ("attention", "all_gather_matmul", "glu", "linear_cross_entropy")
        ),
    ],
)
def test_an_op_is_lifted_and_called(op, tmp_path, monkeypatch, capsys):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["lift.py", op, str(tmp_path / "theirs" / "kernels")])
    assert lift.main() == 0
    said, kernels = capsys.readouterr().out, tmp_path / "theirs" / "kernels"
    assert f"theirs.kernels.{op} was called" in said
    assert (kernels / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    for file in kernels.rglob("*.py"):
        assert str(file.relative_to(kernels)) in said
        licence, version = file.read_text().splitlines()[:2]
        assert licence == "# SPDX-License-Identifier: Apache-2.0" and cookbook.__version__ in version


def test_each_op_brings_all_that_it_imports(tmp_path):
    for op in OPS:
        lift.lift(op, tmp_path / op.replace(".", "_"))
    code = f"""
import functools, importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
for op in {list(OPS)}:
    package = importlib.import_module(op.replace(".", "_"))
    assert callable(functools.reduce(getattr, op.split("."), package)), op
assert "cookbook" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_second_op_joins_the_first(tmp_path):
    kernels = tmp_path / "kernels"
    lift.lift("softmax", kernels)
    (kernels / "mine.py").write_text("mine = 1")
    lift.lift("rms_norm", kernels)
    lift.lift("blackwell.matmul", kernels)
    exports = [line for line in (kernels / "__init__.py").read_text().splitlines() if line.startswith("from")]
    assert exports == [
        "from . import blackwell as blackwell",
        "from .rows import rms_norm as rms_norm",
        "from .rows import softmax as softmax",
    ]
    assert (kernels / "mine.py").read_text() == "mine = 1"


@pytest.mark.parametrize(
    "file, text",
    [
        ("rows/softmax.py", "theirs = 1\n"),
        ("_device.py", None),  # A lifted file that they changed.
        ("rows/__init__.py", "# SPDX-License-Identifier: Apache-2.0\ntheirs = 1\n"),
        ("LICENSE", "Another licence.\n"),
    ],
)
def test_no_file_of_theirs_is_written_over(file, text, tmp_path):
    if text is None:
        lift.lift("rms_norm", tmp_path)
        text = (tmp_path / file).read_text() + "theirs = 1\n"
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=f"{re.escape(file)}\nLift into another folder, or .*--force"):
        lift.lift("softmax", tmp_path)
    assert (tmp_path / file).read_text() == text and sorted(tmp_path.rglob("*")) == before
    lift.lift("softmax", tmp_path, force=True)
    assert (tmp_path / file).read_text() != text


def test_their_own_index_stays(tmp_path, capsys):
    (tmp_path / "__init__.py").write_text("theirs = 1")
    lift.lift("softmax", tmp_path)
    assert (tmp_path / "__init__.py").read_text() == "theirs = 1"
    assert "import softmax there from .rows.softmax" in capsys.readouterr().out


@pytest.mark.parametrize("op, to", [("softmix", "build/x"), ("softmax", "cookbook/rows"), ("softmax", ".")])
def test_a_wrong_name_or_place_is_refused(op, to, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lift.py", op, to])
    with pytest.raises(SystemExit):
        lift.main()
    assert "must be one of" in capsys.readouterr().err


def test_an_op_that_computes_something_else_is_found(tmp_path):
    lift.lift("softmax", tmp_path / "kernels")
    file = tmp_path / "kernels" / "rows" / "softmax.py"
    file.write_text(file.read_text().replace("jnp.exp2(", "1.5 * jnp.exp2("))
    with pytest.raises(SystemExit, match="not those of cookbook.softmax"):
        lift.compare("softmax", tmp_path / "kernels")


def test_pip_brings_the_kernels_alone(tmp_path):
    """It reads what `pip install .` installs from the wheel. The checkout stays as it was."""
    before = {path.name for path in ROOT.iterdir()}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"needs the build backend, from a package index: {done.stderr[-300:]}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("METADATA")]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"cookbook"}
    assert "cookbook/py.typed" in names and f"\nVersion: {cookbook.__version__}\n" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(re.match(r"Requires-Dist: (\w+)", line)[1] for line in required) == ["jax", "numpy"]
    assert {path.name for path in ROOT.iterdir()} == before
