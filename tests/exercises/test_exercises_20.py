"""The exercises of chapter 20: mended kernels are accepted; broken ones and untouched skeletons are not."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex20  # noqa: E402

CELLS = {c["id"]: "".join(c["source"]) for c in json.loads((NOTEBOOKS / "20_debugging.ipynb").read_text())["cells"]}
CHECKS = {
    1: (ex20.check_squared, "squared"),
    2: (ex20.check_negated, "negated"),
    3: (ex20.check_two_readers, "two_readers"),
    4: (ex20.check_off_by_one, "halved"),
}


def kernel(number: int, *changes):
    """The kernel of an exercise's cell, with texts of it replaced."""
    source = CELLS[f"exercise-{number}"].split("\n\nex20.")[0]
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = dict(jax=jax, jnp=jnp, lax=lax, pl=pl, plgpu=plgpu)
    exec(source, names)
    return names[CHECKS[number][1]]


MENDED = {
    1: ("            o_smem[...] =", "            plgpu.wait_smem_to_gmem(0)\n            o_smem[...] ="),
    2: ("x.shape[0] // 64,", "pl.cdiv(x.shape[0], 64),"),
    3: ("num_arrivals=3", "num_arrivals=2"),
    4: ("min(slots + 1, tiles)", "min(slots, tiles)"),
}


@pytest.mark.parametrize("number", CHECKS)
def test_mended(number):
    accepted(CHECKS[number][0](kernel(number, MENDED[number])))


@pytest.mark.parametrize(
    "number, said",
    [(1, "there is a race: write"), (2, "never written"), (3, "has 2 of 3 arrivals"), (4, "phase|race")],
)
def test_skeleton(number, said):
    verdict = CHECKS[number][0](kernel(number))
    rejected(verdict, next((part for part in said.split("|") if part in verdict.text), said))


@pytest.mark.parametrize(
    "number, changes, said",
    [
        (1, [MENDED[1], ("x_smem[...] * x_smem", "2 * x_smem")], "it must be"),
        (1, [("            plgpu.commit_smem()\n", ""), MENDED[1]], "there is a race: read"),
        (2, [MENDED[2], ("-x_smem", "x_smem")], "it must be"),
        (3, [("num_arrivals=3", "num_arrivals=1")], "phase"),
        (4, [MENDED[4], ("/ 2", "* 2")], "it must be"),
        (4, [("min(slots + 1, tiles)", "slots - 1")], "never end"),
        (4, [MENDED[4], ("slots=2", "slots=1")], "this is no ring"),
        (1, [("x_smem[...] * x_smem[...]", "x_gmem[rows] ** 2"), MENDED[1]], "it reads an input in global memory"),
    ],
)
def test_wrong(number, changes, said):
    rejected(CHECKS[number][0](kernel(number, *changes)), said)


def test_without_the_copies():
    def squared(x):
        def body(x_gmem, o_gmem):
            o_gmem[...] = x_gmem[...] * x_gmem[...]

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    rejected(ex20.check_squared(squared), "must still be copied to shared memory")
    rejected(ex20.check_squared(lambda x: x * x), "must be a kernel")


# The evidence


def test_evidence_solution():
    accepted(ex20.check_evidence(((2, 1), 5, 3)))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (((0, 0), 5, 3), "shows another"),
        (((2, 1), 3, 5), "other way round"),
        (((2, 1), 4, 3), "coefficients"),
        (((2, 1), 5, 4), "coefficients"),
        ((2, 5, 3), "shows another"),
        ((None, None, None), "three things"),
        (5, "three things"),
    ],
)
def test_evidence_wrong(wrong, said):
    rejected(ex20.check_evidence(wrong), said)


def test_evidence_holds():
    """One tile is wrong, and its coefficients are as the answer says."""
    a, b, out = (np.asarray(x, np.float32) for x in ex20.evidence())
    wrong = np.abs(out - a @ b).reshape(4, 64, -1, 64).max(axis=(1, 3)) > 0.01
    assert np.argwhere(wrong).tolist() == [[2, 1]]
    rows, columns = slice(128, 192), slice(64, 128)
    terms = [(a[rows, i : i + 32] @ b[i : i + 32, columns]).ravel() for i in range(0, 256, 32)]
    found, *_ = np.linalg.lstsq(np.stack(terms, axis=1), out[rows, columns].ravel())
    assert found.round(2).tolist() == [1, 1, 1, 2, 1, 0, 1, 1]
