"""Copies an op of the cookbook, and nothing that it does not need, into another package.

    make lift OP=attention TO=../their_package/kernels

The files keep their folders and their licence, and a line says which version they are of. Then one small call runs
where the op now stands, on a GPU or interpreted, and must give the results of the cookbook's own call. Earlier lifts
stay, and share the files that both need. A file that is yours, or that you have changed, is never written over.
"""

import argparse
import ast
import functools
import inspect
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cookbook"
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
ORIGIN = "# From the Pallas kernel cookbook"  # Begins the second line of each lifted file.
EXPORT = re.compile(r"^from \.\w* import (\w+) as \1$", re.M)
UNCALLED = {
    "fuse": "it makes kernels of your functions",
    "blackwell.matmul_mxfp8": "JAX's interpreter has no block-scaled MMA",
}

# Makes the call in a package, and stores its results where its operands were.
CALL = """
import contextlib, functools, importlib, pickle, sys

root, package, op, axis, file = sys.argv[1:]
sys.path.insert(0, root)
import jax

host, kernels = importlib.import_module(f"{package}._host"), importlib.import_module(package)
fn = functools.reduce(getattr, op.split("."), kernels)
with open(file, "rb") as stored:
    operands, options = pickle.load(stored)
call = lambda: fn(*operands, *([axis] if axis else []), **options)
if axis:
    call = jax.shard_map(call, mesh=jax.make_mesh((1,), (axis,)), in_specs=(), out_specs=jax.P(), check_vma=False)
with contextlib.nullcontext() if jax.default_backend() == "gpu" else host.interpreting():
    results = jax.device_get(jax.tree.leaves(call()))
assert package == "cookbook" or "cookbook" not in sys.modules, "it imports the cookbook"
with open(file, "wb") as stored:
    pickle.dump(results, stored)
"""


def main() -> int:
    import cookbook
    from bench.ops import OPS

    usage = "make lift OP=attention TO=../their_package/kernels [ARGS=--force]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__.splitlines()[0])
    parser.add_argument("op", help="its name in cookbook, such as attention or blackwell.matmul")
    parser.add_argument("to", type=pathlib.Path, help="the folder of a package, which may be new")
    parser.add_argument("--force", action="store_true", help="write over files that differ")
    args = parser.parse_args()
    if args.op not in OPS:
        parser.error(f"OP={args.op}: not an op of the cookbook; must be one of {', '.join(OPS)}")
    target = args.to.resolve()
    if target.is_relative_to(ROOT) and not target.is_relative_to(ROOT / "build"):
        parser.error(f"TO={args.to}: a folder of the cookbook; must be one of another package")
    counts = {file: len((target / file).read_text().splitlines()) for file in lift(args.op, target, args.force)}
    for file, count in counts.items():
        print(f"{count:6} lines  {args.to / file}")
    print(f"{sum(counts.values()):6} lines in all, of version {cookbook.__version__}, licence: {args.to / 'LICENSE'}")
    if args.op in UNCALLED:
        print(f"Nothing was called: {UNCALLED[args.op]}.")
    else:
        print(compare(args.op, target))
    return 0


def function(op: str):
    import cookbook

    return functools.reduce(getattr, op.split("."), cookbook)


def needed(op: str) -> list[pathlib.Path]:
    """The files of an op and of what it imports, without packages' own, relative to the cookbook."""
    found, left = set(), [pathlib.Path(inspect.getfile(function(op)))]
    while left:
        file = left.pop()
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                source = file.parents[node.level - 1] / (node.module or "").replace(".", "/")
                files = [source.with_suffix(".py"), *(source / f"{alias.name}.py" for alias in node.names)]
                left += [each for each in files if each.is_file() and each not in found]
    return sorted(file.relative_to(PACKAGE) for file in found)


def lift(op: str, target: pathlib.Path, force: bool = False) -> list[pathlib.Path]:
    """Copies the files of an op, writes those of their packages, and returns all, relative to `target`.

    Raises:
      SystemExit: without `force`, a file that stands there is not as this version would write it. Nothing is written.
    """
    texts = {file: marked((PACKAGE / file).read_text()) for file in needed(op)}
    for room in {room for file in texts for room in file.parents}:
        init = target / room / "__init__.py"
        before = init.read_text() if init.exists() else ""
        if room == pathlib.Path() and before and ORIGIN not in before:
            print(f"{init} is yours and stays as it is: import {op} there from .{module_of(op)}")
        else:
            texts[room / "__init__.py"] = index(room, exports(before) | export(op, room))
    texts[pathlib.Path("LICENSE")] = (ROOT / "LICENSE").read_text()
    changed = sorted(str(target / file) for file, text in texts.items() if is_changed(target, file, text))
    if changed and not force:
        raise SystemExit(
            "These files are yours, changed, or of another version, and would be written over:\n  "
            + "\n  ".join(changed)
            + "\nLift into another folder, or keep a copy and pass ARGS=--force."
        )
    for file, text in texts.items():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_text(text)
    return sorted(file for file in texts if file.suffix == ".py")


def is_changed(target: pathlib.Path, file: pathlib.Path, text: str) -> bool:
    """Whether there is such a file, and it is not as lifting wrote it, or would write it."""
    if not (target / file).exists():
        return False
    before = (target / file).read_text()
    if file.name == "__init__.py" and before:
        return before != index(file.parent, exports(before))
    return before not in ("", text)


def marked(text: str) -> str:
    """`text` of a file, with the version after its licence."""
    import cookbook

    return f"{LICENCE}{ORIGIN} {cookbook.__version__}.\n{text.removeprefix(LICENCE)}"


def module_of(op: str) -> str:
    return function(op).__module__.removeprefix("cookbook.")


def exports(text: str) -> set[str]:
    """The lines of an `__init__.py` that export an op."""
    return {match[0] for match in EXPORT.finditer(text)}


def export(op: str, room: pathlib.Path) -> set[str]:
    """The line by which a room exports `op`, if that stands in it."""
    (*holders, name), rooms = op.split("."), module_of(op).split(".")
    if holders and room == pathlib.Path():
        return {f"from . import {holders[0]} as {holders[0]}"}
    if tuple(rooms[: len(room.parts)]) == room.parts:
        return {f"from .{rooms[len(room.parts)]} import {name} as {name}"}
    return set()


def index(room: pathlib.Path, lines: set[str]) -> str:
    """The `__init__.py` of a room that exports these ops."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())).partition("\n")[0]
    body = ["", *sorted(lines)] if lines else []
    return marked("\n".join([f'"""{docstring}"""', *body, ""]))


def compare(op: str, target: pathlib.Path) -> str:
    """Makes one call of the lifted op and of the cookbook's, and says how they compare.

    Raises:
      SystemExit: the lifted op fails, or its results are others.
    """
    import numpy as np

    root, package = target, target.name
    while (root.parent / "__init__.py").exists():
        root = root.parent
        package = f"{root.name}.{package}"
    pairs = zip(called(op, ROOT, "cookbook"), called(op, root.parent, package), strict=True)
    if not all(np.array_equal(np.float64(ours), np.float64(theirs), equal_nan=True) for ours, theirs in pairs):
        raise SystemExit(f"{package}.{op}: its results are not those of cookbook.{op}")
    return f"{package}.{op} was called, and gives the results of cookbook.{op}, bit for bit."


def called(op: str, root: pathlib.Path, package: str) -> list:
    """The results of a small call of `op` in a package, whose folder lies in `root`."""
    from bench.ops import OPS

    problem = OPS[op]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "call"
        file.write_bytes(pickle.dumps((list(problem.arrays().values()), problem.options)))
        command = [sys.executable, "-c", CALL, str(root), package, op, problem.axis or "", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": ""})
        if done.returncode:
            raise SystemExit(f"{package}.{op} fails where it stands:\n{done.stderr[-4000:]}")
        return pickle.loads(file.read_bytes())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
