"""A family is its folder and the two shared files: copied into an empty package, with nothing else, it works.

Two families are built on another: the products of nvlink and blackwell are gemm's, so they are copied with gemm.
"""

import ast
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ["_host.py", "_numerics.py"]
BUILT_ON = {"nvlink": ["gemm"], "blackwell": ["gemm"]}

# Runs without site's .pth files, one of which leads to this checkout. `kernels` is no more than a folder.
PROGRAM = """
import importlib, pathlib, sys
folder, family, paths = sys.argv[1], sys.argv[2], {paths}
sys.path[:] = [folder, *sys.path, *paths]
import jax, jax.numpy as jnp, numpy as np

files = sorted(pathlib.Path(folder, "kernels").glob(f"{{family}}/*.py")) or [pathlib.Path(family)]
names = [f"{{family}}.{{path.stem}}" for path in files if path.stem != "__init__"] if len(files) > 1 else [family]
for package in ("cookbook", "kernels"):
    for name in names:
        importlib.import_module(f"{{package}}.{{name}}")
for name, module in sys.modules.items():
    if name.partition(".")[0] in ("cookbook", "kernels") and module.__spec__.has_location:
        assert pathlib.Path(module.__file__).is_relative_to(folder), module.__file__
assert not any(name.endswith(".lab") for name in sys.modules)

from kernels import _mgpu
{use}
try:
    call()
except RuntimeError as error:
    assert "`from kernels import _mgpu`" in str(error) and "`with _host.interpreting():`" in str(error), error
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
from kernels.rows.softmax import softmax
x = jax.random.normal(jax.random.key(0), (5, 300))
call, wanted = lambda: softmax(x), jax.nn.softmax(x)
""",
    "gemm": """
from kernels.gemm.matmul import matmul
a, b = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in (0, 1))
call, wanted = lambda: matmul(a, b), a @ b
""",
    "attn": """
from kernels.attn.attention import attention
x = jax.random.normal(jax.random.key(0), (1, 64, 1, 64), jnp.bfloat16)
call, wanted = lambda: attention(x, x, x), jax.nn.dot_product_attention(x, x, x)
""",
    "recurrent": """
from kernels.recurrent.linear_attention import linear_attention
x = jax.random.normal(jax.random.key(0), (1, 64, 1, 64), jnp.bfloat16) / 4
pairs = jnp.tril(x[0, :, 0] @ x[0, :, 0].T)
call, wanted = lambda: linear_attention(x, x, x, scale=1.0), (pairs @ x[0, :, 0])[None, :, None]
""",
    "blackwell": """
from kernels.blackwell import matmul
a, b = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in (0, 1))
call, wanted = lambda: matmul(a, b), a @ b
""",
    # On one device, since the interpreter has no semaphores.
    "nvlink": """
from kernels.nvlink.all_gather_matmul import all_gather_matmul
a, b = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in (0, 1))
product = lambda a, b: all_gather_matmul(a, b, "x")
product = jax.shard_map(product, mesh=jax.make_mesh((1,), ("x",)), out_specs=jax.P("x"))
call, wanted = lambda: product(a, b), a @ b
""",
}


def test_every_family_is_lifted():
    folders = {path.parent.name for path in (ROOT / "cookbook").glob("*/__init__.py")} - {"lab", "serving"}
    files = {path.stem for path in (ROOT / "cookbook").glob("[a-z]*.py")}
    assert USES.keys() == folders | files


def imports(path: pathlib.Path) -> set[str]:
    """Modules of its own folder that a file needs, directly or not."""
    found, left = set(), [path]
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = {node.module} if node.module else {alias.name for alias in node.names}
                left += [path.with_name(f"{name}.py") for name in names - found]
                found |= names
    return found


def test_an_op_of_attention_brings_no_other():
    """Serving lifts attention over pages without the backward pass, or any other op."""
    folder = ROOT / "cookbook" / "attn"
    ops = {"attention", "attention_fp8", "paged_attention", "ragged_paged_attention", "varlen_attention", "write_kv"}
    for op in ops:
        needed = imports(folder / f"{op}.py")
        assert not needed & ops, (op, needed)
        assert ("attention_bwd" in needed) == (op == "attention"), (op, needed)


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
