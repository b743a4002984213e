"""The fuzzer: it covers every op, finds what is broken, and its lines run again. Some cases of each op pass."""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

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
GRADIENT = SOFTMAX | dict(grad=True)
softmax, counted = cookbook.softmax, itertools.count()


def launched(body):
    """Zero, from a kernel of one block that copies zeros."""
    zeros = jnp.zeros((64, 128))
    scratch = [plgpu.SMEM(zeros.shape, zeros.dtype), plgpu.Barrier()]
    out = jax.ShapeDtypeStruct(zeros.shape, zeros.dtype)
    return plgpu.kernel(body, out_type=out, scratch_types=scratch)(zeros)[0, 0]


def read_too_early(x_gmem, o_gmem, x_smem, barrier):
    """Interpreted, its result is right all the same."""
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
    o_gmem[...] = x_smem[...]
    plgpu.barrier_wait(barrier)


def sorts(x_gmem, o_gmem, x_smem, barrier):
    """The interpreter can do that, and Mosaic cannot."""
    o_gmem[...] = jnp.sort(x_gmem[...])


def unordered():
    """A number of another rounding error in each run, as sums have in the order of arrival."""
    number = lambda: jax.pure_callback(lambda: np.float32(1e-9 * next(counted)), jax.ShapeDtypeStruct((), jnp.float32))
    return lax.platform_dependent(cuda=lambda: jnp.float32(0), default=number)  # It cannot be lowered for another one.


def with_gradient(addend):
    """softmax, whose gradient has something added."""
    fn = jax.custom_vjp(lambda x: softmax(x))
    fn.defvjp(lambda x: (softmax(x), x), lambda x, ct: (jax.vjp(softmax, x)[1](ct)[0] + addend(),))
    return fn


# Each is wrong in a way of its own; so is what the fuzzer says.
BROKEN = {
    "leaves the last column out": (lambda x: softmax(x.at[:, -1].set(-jnp.inf)), SOFTMAX, "wrong"),
    "shifts by one": (lambda x: jnp.roll(softmax(x), 1), SOFTMAX, "wrong"),
    "NaN of one row gets into another": (
        lambda x: softmax(x) + 0 * x[:1],
        SOFTMAX | dict(values="nan", seed=3),
        "nan",
    ),
    "returns another shape": (lambda x: softmax(x)[1:], SOFTMAX, "shape"),
    "raises": (lambda x: 1 // 0, SOFTMAX, "ZeroDivisionError"),
    "has a race": (lambda x: softmax(x) + launched(read_too_early), SOFTMAX, "race: "),
    "sums without an order": (lambda x: softmax(x) + unordered(), SOFTMAX, "two runs of the same case differ"),
    "does not compile": (lambda x: softmax(x) + launched(sorts), SOFTMAX, "sort"),
    "does not compile at a GPU's sizes": (
        lambda x: softmax(x) + launched(sorts), SOFTMAX | dict(shape=[300, 4000], lowered_only=True), "sort",
    ),
    "its gradient is half": (lambda x: 0.5 * (softmax(x) + lax.stop_gradient(softmax(x))), GRADIENT, "gradient of x"),
    "its gradient has a race": (with_gradient(lambda: launched(read_too_early)), GRADIENT, "gradient: race: "),
    "its gradient sums without an order": (with_gradient(unordered), GRADIENT, "gradient: two runs of the same case"),
    "its gradient does not compile": (
        with_gradient(lambda: launched(sorts)), GRADIENT | dict(lowered_only=True), "gradient: ",
    ),
}  # fmt: skip


@functools.cache
def fault_of_softmax(line: str) -> str | None:
    return again(line)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_op_is_found(name, monkeypatch, no_gpu):
    broken, case, said = BROKEN[name]
    line = text("softmax", case)
    assert fault_of_softmax(line) is None
    monkeypatch.setattr(cookbook, "softmax", broken)
    assert said in (again(line) or "")


def doubled(case, x):
    ((out, slack),) = OPS["softmax"].reference(case, 2 * x)
    return [(out, slack + 1e9)]


@pytest.mark.parametrize(
    "reference, case, said",
    [
        (lambda case, x: OPS["softmax"].reference(case, x[:, ::-1]), SOFTMAX, "wrong"),
        (lambda case, x: [(np.full_like(x, np.nan), 0.0)], SOFTMAX, "wrong"),
        (lambda case, x: [(x, np.inf)], SOFTMAX, "wrong"),  # A slack that lets all pass.
        (lambda case, x: OPS["softmax"].reference(case, x[:2]), SOFTMAX, "shape"),
        (lambda case, x: [], SOFTMAX, "1 results in place of 0"),
        (doubled, GRADIENT, "gradient of x"),  # Its slack hides the values, and not the gradient.
    ],
)
def test_a_broken_reference_is_found(reference, case, said):
    assert said in run(dataclasses.replace(OPS["softmax"], reference=reference), case)


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
    assert {0, 8, 16, 24, 32, 40, 48, 96} <= set(sizes) and max(sizes) <= 100 and all(size % 8 == 0 for size in sizes)


def fuzz(*args: str):
    done = subprocess.run([sys.executable, "-m", "fuzz", *args], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_the_command_counts_cases_and_a_case_without_an_end_fails():
    code, said = fuzz("--ops", "merge_attention", "--cases", "3")
    assert code == 0 and re.search(r"merge_attention +3 +0 +0( +3)?\n3 cases of seed 1, 0 failed", said), said
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
    args = argparse.Namespace(ops="merge_attention", cases=5, seconds=200, seed=1, workers=2, limit=240, compile=False)
    assert sweep.sweep(args) == 0 and sorted(started) == [0, 1, 4]
    assert "5 cases of seed 1, 0 failed" in capsys.readouterr().out


def test_processes_share_the_gpus(monkeypatch):
    for ops, seen in ((["all_gather"], "1,0"), (["all_gather", "softmax"], "1")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        sweep.work(None, ops, 1, range(1, 1, 2))  # No case.
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
