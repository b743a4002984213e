"""The machine code of every op: who gives a slot back must have what it has loaded from it, and no register is written
while a product reads it."""

import dataclasses
import glob
import importlib
import re
import shutil
import subprocess

import pytest

import cookbook
import lab
from bench.problems import CASES, _ssd

with_d = lambda x, dt, a, b, c: cookbook.ssd(x, dt, a, b, c, d=a)
PROBLEMS = {case.op: (case, case.kernel) for case in CASES}  # The last one of each op; and one that had such a race.
PROBLEMS |= {"ssd with d": (_ssd(4, 8192, 32, 1, 64, 256), with_d)}
# Arrivals while loads of another slot are in flight: the next step's weights; the sums of decays of a chunk, whose
# slot is given back later.
OTHERS = dict.fromkeys((f"matmul_{kind}_weights" for kind in ("int8", "int4", "mxfp4")), 1) | {
    "ragged_dot_mxfp4_weights": 1, "ssd with d": 1,
}  # fmt: skip


def compiled(op):
    case, kernel = PROBLEMS[op]
    return lab.compile_for(case.gpu or "h200", kernel, *case.kernel_avals)


@pytest.mark.parametrize("op", PROBLEMS)
def test_no_slot_is_given_back_while_it_is_read_and_no_register_written(op, tmp_path):
    of_op = compiled(op)
    found = of_op.early_arrivals
    assert len(found) == OTHERS.get(op, 0), found
    assert of_op.overwritten_operands == []
    if old := old_ptxas():
        for kernel in of_op.kernels or [of_op]:
            if re.search(r"HGMMA\S* R\d+, R\d+", kernel.sass):
                assert assembled(kernel, old, tmp_path).overwritten_operands == []


def old_ptxas() -> str | None:
    """A ptxas of this machine before 13.3, which wrote such registers. The one of our lock is newer."""
    for path in filter(None, [shutil.which("ptxas"), *glob.glob("/usr/local/cuda*/bin/ptxas")]):
        version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if (found := re.search(r"V(\d+)\.(\d+)", version)) and tuple(map(int, found.groups())) < (13, 3):
            return path
    return None


def assembled(kernel, ptxas: str, directory):
    """`kernel` as `ptxas` makes it."""
    (directory / "kernel.ptx").write_text(kernel.ptx)
    cubin = directory / "kernel.cubin"
    subprocess.run([ptxas, "-arch=sm_90a", "-O3", directory / "kernel.ptx", "-o", cubin], check=True)
    return dataclasses.replace(kernel, cubin=cubin.read_bytes())


def test_a_mutant_without_its_fence_is_caught(mutant):
    mutant(importlib.import_module("cookbook.rows.norm_backward"), "plgpu", commit_smem=lambda: None)
    assert len(compiled("rms_norm_backward").early_arrivals) == 1
