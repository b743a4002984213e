"""The fuzzer: it covers every op, finds what is broken, and its lines run again. Some cases of each op pass."""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cookbook
from fuzz import sweep
from fuzz.cases import Draw, compare, run, text
from fuzz.ops import OPS
from fuzz.sweep import again, drawn

SEED = 3


def test_every_public_op_is_fuzzed():
    assert OPS.keys() == set(cookbook.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_case_is_right(op):
    _, case = drawn([op], SEED, 0, share=0.1)
    assert run(OPS[op], case) in (None, "refused"), text(op, case)


@pytest.mark.parametrize("op", OPS)
def test_a_seed_draws_the_same_cases_again_and_json_holds_them(op):
    for index in range(30):
        case = drawn([op], 1, index)[1]
        assert json.loads(json.dumps(case)) == case == drawn([op], 1, index)[1]
    assert drawn([op], 1, 0) != drawn([op], 2, 0)


SOFTMAX = dict(shape=[3, 40], dtype="float32", values="normal", grad=False, view=None, seed=7)
softmax = cookbook.softmax
# Each is wrong in a way of its own; so is what the fuzzer says.
BROKEN = {
    "leaves the last column out": (lambda x: softmax(x.at[:, -1].set(-jnp.inf)), {}, "wrong"),
    "shifts by one": (lambda x: jnp.roll(softmax(x), 1), {}, "wrong"),
    "NaN of one row gets into another": (lambda x: softmax(x) + 0 * x[:1], dict(values="nan", seed=3), "nan"),
    "returns another shape": (lambda x: softmax(x)[1:], {}, "shape"),
    "raises": (lambda x: softmax(x, config="none"), {}, "AttributeError"),
    "its gradient is half": (
        lambda x: 0.5 * softmax(x) + 0.5 * lax.stop_gradient(softmax(x)),
        dict(grad=True),
        "gradient of x",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_op_is_found_and_its_line_runs_again(name, monkeypatch):
    broken, change, said = BROKEN[name]
    case = SOFTMAX | change
    assert run(OPS["softmax"], case) is None
    monkeypatch.setattr(cookbook, "softmax", broken)
    line = text("softmax", case)
    assert said in again(line)
    monkeypatch.undo()
    assert again(line) is None


def test_a_refusal_needs_a_rule_and_a_rule_a_refusal():
    op, case = OPS["matmul_blocked"], dict(m=8, n=8, k=4, dtype="bfloat16", values="normal", view=None, seed=1)
    ruled = lambda words: dataclasses.replace(op, refuses=lambda case: words)
    assert run(op, case) == "refused"
    assert "no rule says so" in run(ruled(None), case)
    assert "says not 'K is odd'" in run(ruled("K is odd"), case)
    assert "was not refused" in run(ruled("K is odd"), case | dict(k=8))


@pytest.mark.parametrize(
    "out, exact, is_right",
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.1], [1.0, 2.0], False),
        ([np.nan, 2.0], [np.nan, 2.0], True),
        ([np.nan, 2.0], [1.0, 2.0], False),
        ([1.0, 2.0], [np.nan, 2.0], False),
        ([np.inf, 2.0], [-np.inf, 2.0], False),
        ([np.inf, 2.0], [1e9, 2.0], True),  # float16 ends before.
        ([65504, 2.0], [-1e9, 2.0], False),
        ([0.0, 2.0], [1e-9, 2.0], True),
    ],
)
def test_results_are_compared(out, exact, is_right):
    assert (compare(np.float16(out), np.float64(exact), 0.0) is None) == is_right


def test_sizes_are_often_at_an_edge():
    draw = Draw(np.random.default_rng(1))
    sizes = [draw.size(100, 8) for _ in range(300)]
    assert {0, 8, 16, 24, 32, 96} <= set(sizes) and max(sizes) <= 100 and all(size % 8 == 0 for size in sizes)


def fuzz(*args: str):
    done = subprocess.run([sys.executable, "-m", "fuzz", *args], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_the_command_counts_cases_and_a_case_without_an_end_fails():
    code, said = fuzz("--ops", "merge_attention", "--cases", "3")
    assert code == 0 and re.search(r"merge_attention +3 +0 +0\n3 cases of seed 1, 0 failed", said), said
    code, said = fuzz("--ops", "merge_attention", "--cases", "1", "--limit", "0")
    (line,) = re.findall("make fuzz CASE='(.*)'", said)
    assert code == 1 and "no end after" in said
    assert fuzz(line) == (0, "right\n")


@pytest.mark.slow
def test_a_process_is_renewed_before_its_memory_is_full(monkeypatch, capsys):
    started = []
    start = sweep.Worker.start
    monkeypatch.setattr(sweep.Worker, "start", lambda worker, index: (started.append(index), start(worker, index)))
    monkeypatch.setattr(sweep, "CASES_EACH", 2)
    args = argparse.Namespace(ops="merge_attention", cases=5, seconds=200, seed=1, workers=2, limit=240)
    assert sweep.sweep(args) == 0 and sorted(started) == [0, 1, 4]
    assert "5 cases of seed 1, 0 failed" in capsys.readouterr().out


def test_processes_share_the_gpus(monkeypatch):
    for ops, seen in ((["all_gather"], "1,0"), (["all_gather", "softmax"], "1")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        sweep.work(None, ops, 1, range(1, 1, 2))  # No case.
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
