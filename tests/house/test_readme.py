"""The README: its programs run, what they print is what it shows, and its tables leave nothing out."""

import inspect
import os
import pathlib
import re
import subprocess
import sys

import cookbook
import lab
from bench.ops import OPS

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_it_is_short_and_rendered():
    assert len(README.splitlines()) <= 150
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "site")]
    import render_readme

    assert render_readme.rendered(README) == README, "run: make figures"


def test_the_race_is_the_one_that_it_shows(tmp_path):
    program, report = PROGRAMS[0], re.search(r"```text\n(race: .*?)```", README, re.S)[1]

    def said(text: str) -> str:
        (tmp_path / "double.py").write_text(text)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        ran = subprocess.run(
            [sys.executable, "double.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert said(program).split() == report.split()
    before, wait, after = re.split(r"( *plgpu.barrier_wait\(arrived\)\n)", program)
    lines = before.splitlines(keepends=True)
    assert said("".join([*lines[:-1], wait, lines[-1], after])) == ""


def test_a_kernel_is_used_as_it_says(no_gpu):
    program = PROGRAMS[1].replace("from kernels import", "from cookbook import").replace("4096, 16, 128", "128, 2, 64")
    found = {}
    with lab.interpret() as seen:
        exec(program, found)  # noqa: S102
    assert found["out"].shape == found["loss_gradient"].shape == (2, 128, 2, 64) and not seen.races_found


def test_the_table_has_every_op_and_its_gradient():
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\| (yes|no|yes; no) \|$", README, re.M)
    listed = {}
    for ops, gradient in rows:
        groups = ops.split(";") if ";" in gradient else [ops]
        for group, answer in zip(groups, gradient.split("; "), strict=True):
            listed |= {name: answer == "yes" for name in re.findall(r"`([\w.]+)`", group)}
    public = {name for name in cookbook.__all__ if inspect.isfunction(inspect.unwrap(getattr(cookbook, name)))}
    assert listed.keys() == public | {name for name in OPS if name.startswith("blackwell.")}
    assert listed == {name: bool(OPS[name].gradients) for name in listed}
