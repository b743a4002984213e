"""Collects the wheels that a GPU host without a network needs beside JAX, NumPy and Matplotlib.

They are the tools that `make run`, `make test` and `make record` call, for Python 3.12 on x86-64 Linux, in the locked
versions. Names of extras (`site`) or of packages (`matplotlib`) add those with all that they need.
"""

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "wheelhouse"
HOST_HAS = ("jax", "jaxlib", "numpy", "scipy", "matplotlib")  # With what JAX and NumPy themselves need.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 26, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]

HOW_TO_INSTALL = """
{count} wheels, {megabytes:.0f} MB, in {target}. Copy that folder and the checkout to the GPU host, and there:

  python3 -m pip install --no-index --no-deps --target ../cookbook-tools WHEELHOUSE/*.whl
  export PYTHONPATH=$(realpath ../cookbook-tools)
  make run PYTHON=python3        # and make test, make record, make bench

That python3 is a Python 3.12 with JAX's CUDA build, NumPy and Matplotlib. If it lacks Matplotlib, add it here:
make wheelhouse ARGS=matplotlib; to build the site there: make wheelhouse ARGS=site."""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [name for argument in sys.argv[1:] for name in _names(extras.get(argument, [argument]))]
    skipped = {*HOST_HAS, "jupyterlab", "pip"} - set(named)
    wanted = _names(project["dependencies"] + extras["dev"]) + named
    names = _closure(wanted, skipped)

    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir(parents=True)
    requirements = TARGET / "requirements.txt"
    requirements.write_text("".join(block for name, block in _locked() if name in names))
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        + ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", f"--dest={TARGET}"]
        + [f"--platform={platform}" for platform in PLATFORMS]
        + ["--require-hashes", f"--requirement={requirements}"],
        check=True,
    )
    requirements.unlink()
    wheels = list(TARGET.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(HOW_TO_INSTALL.format(count=len(wheels), megabytes=size / 1e6, target=TARGET.relative_to(ROOT)))


def _names(requirements: list[str]) -> list[str]:
    return [_normal(Requirement(requirement).name) for requirement in requirements]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _closure(wanted: list[str], skipped: set[str]) -> set[str]:
    """`wanted` and all that it needs in turn, as installed here, without `skipped` and what only that needs."""
    found, waiting = set(), list(wanted)
    while waiting:
        name = waiting.pop()
        if name in found or name in skipped:
            continue
        found.add(name)
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(_normal(requirement.name))
    return found


def _locked():
    """Yields (name, its lines with hashes) for every package of the lock."""
    for block in re.split(r"(?m)^(?=[a-z0-9])", (ROOT / "requirements.lock").read_text()):
        if match := re.match(r"[a-z0-9-]+(?===)", block):
            yield match.group(), block


if __name__ == "__main__":
    main()
