"""The machine code of every op: who gives a slot back must have what it has loaded from it."""

import importlib

import pytest

import cookbook
import lab
from bench.problems import CASES, _ssd

with_d = lambda x, dt, a, b, c: cookbook.ssd(x, dt, a, b, c, d=a)
PROBLEMS = {case.op: (case, case.kernel) for case in CASES}  # The last one of each op; and one that had such a race.
PROBLEMS |= {"ssd with d": (_ssd(4, 8192, 32, 1, 64, 256), with_d)}
# Arrivals while loads of another slot are in flight: the next step's weights; the sums of decays of a chunk, whose
# slot is given back later.
OTHERS = {"matmul_int8_weights": 1, "ssd with d": 1}


def early_arrivals(op) -> list[str]:
    case, kernel = PROBLEMS[op]
    return lab.compile_for(case.gpu or "h200", kernel, *case.kernel_avals).early_arrivals


@pytest.mark.parametrize("op", PROBLEMS)
def test_no_slot_is_given_back_while_it_is_read(op):
    found = early_arrivals(op)
    assert len(found) == OTHERS.get(op, 0), found


def test_a_mutant_without_its_fence_is_caught(mutant):
    mutant(importlib.import_module("cookbook.rows.norm_backward"), "plgpu", commit_smem=lambda: None)
    assert len(early_arrivals("rms_norm_backward")) == 1
