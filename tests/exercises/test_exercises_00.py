"""Chapter 0's exercises: right answers pass, and each likely mistake is turned down in our words."""

import pathlib
import sys

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from lab import roofline

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex00, judge  # noqa: E402

PEAKS = roofline.PEAKS["h200"]


def turned_down(verdict, said: str):
    assert not verdict, verdict
    assert repr(verdict).startswith("Not yet: ") and said in verdict.text, verdict


# The least time


def least_time(flops, nbytes, combine=max, peak="bf16", label=lambda compute, memory: compute > memory):
    compute, memory = flops / PEAKS[peak].value * 1e3, nbytes / PEAKS["hbm"].value * 1e3
    return combine(compute, memory), "compute" if label(compute, memory) else "memory"


def test_least_time():
    assert ex00.check_least_time(least_time)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(combine=lambda compute, memory: compute + memory), "at least"),
        (dict(combine=min), "at least"),
        (dict(peak="fp8"), "at least"),
        (dict(label=lambda compute, memory: compute < memory), "bound by memory"),
        (dict(label=lambda compute, memory: False), "bound by compute"),
    ],
)
def test_wrong_least_time(wrong, said):
    turned_down(ex00.check_least_time(lambda flops, nbytes: least_time(flops, nbytes, **wrong)), said)


def test_least_time_in_seconds():
    in_seconds = lambda flops, nbytes: (least_time(flops, nbytes)[0] / 1e3, least_time(flops, nbytes)[1])
    turned_down(ex00.check_least_time(in_seconds), "at least")


def test_least_time_of_no_kind():
    turned_down(ex00.check_least_time(lambda flops, nbytes: None), "raised TypeError")


# a x + y


def element_wise(compute, *arrays):
    """A kernel that stores `compute` of the arrays' values."""

    def body(*refs):
        refs[-1][...] = compute(*(ref[...] for ref in refs[:-1]))

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype))(*arrays)


def test_axpy():
    assert ex00.check_axpy(lambda a, x, y: element_wise(lambda x, y: a * x + y, x, y))


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, x, y: x + y,
        lambda a, x, y: a * y + x,
        lambda a, x, y: a * (x + y),
        lambda a, x, y: a * x - y,
        lambda a, x, y: 2.5 * x + y,
    ],
)
def test_wrong_axpy(compute):
    turned_down(ex00.check_axpy(lambda a, x, y: element_wise(lambda x, y: compute(a, x, y), x, y)), "it must be")


def test_axpy_that_is_no_kernel():
    turned_down(ex00.check_axpy(lambda a, x, y: a * x + y), "must be a kernel")


def test_axpy_that_is_not_written_to_its_end():
    def half(a, x, y):
        def body(x_gmem, y_gmem, o_gmem):
            half = (slice(0, x.shape[0] // 2), ...)
            o_gmem[half] = a * x_gmem[half] + y_gmem[half]

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)

    turned_down(ex00.check_axpy(half), "never written")


def test_axpy_that_no_gpu_runs():
    sort = lambda a, x, y: element_wise(lambda x, y: jax.numpy.sort(a * x + y), x, y)
    turned_down(ex00.check_axpy(sort), "cannot be compiled for a GPU")


def test_answers_that_never_end(monkeypatch):
    monkeypatch.setattr(judge, "SECONDS", 2)

    def loops(a, x, y):
        while True:
            pass

    turned_down(ex00.check_axpy(loops), "has not ended after 2 s")


# The sum and the product


def two_outputs(x, y, order=(0, 1, 2, 3), outputs=2, compute=lambda x, y: (x + y, x * y)):
    def body(*refs):
        x_gmem, y_gmem, sum_gmem, product_gmem = (refs[i] for i in order)
        sum_gmem[...], product_gmem[...] = compute(x_gmem[...], y_gmem[...])

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=(out,) * outputs if outputs > 1 else out)(x, y)


def test_sum_and_product():
    assert ex00.check_sum_and_product(two_outputs)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(outputs=1), "cannot be compiled for a GPU"),
        (dict(order=(2, 3, 0, 1)), "never written"),  # Outputs first.
        (dict(order=(0, 1, 3, 2)), "the sum: element"),
        (dict(compute=lambda x, y: (x + y, x - y)), "the product: element"),
    ],
)
def test_wrong_sum_and_product(wrong, said):
    turned_down(ex00.check_sum_and_product(lambda x, y: two_outputs(x, y, **wrong)), said)


def test_sum_and_product_outside_of_the_kernel():
    outside = lambda x, y: (element_wise(lambda x, y: x + y, x, y), x * y)
    turned_down(ex00.check_sum_and_product(outside), "mul is computed outside of the kernel")
    alone = lambda x, y: element_wise(lambda x, y: x + y, x, y)
    turned_down(ex00.check_sum_and_product(alone), "must return two arrays")


# The race


def sum_by_smem(x, y, waits=(0, 1), wait_before=(), combine=lambda x, y: x + y, rows=None, direct=False):
    """`rows` copies x in so many pieces; `direct` adds what lies in global memory."""

    def body(x_gmem, y_gmem, o_gmem, x_smem, y_smem, x_arrived, y_arrived):
        arrived = x_arrived, y_arrived
        for i in wait_before:
            plgpu.barrier_wait(arrived[i])
        for row in range(rows or 1):
            part = row if rows else ...
            plgpu.copy_gmem_to_smem(x_gmem.at[part], x_smem.at[part], x_arrived)
        plgpu.copy_gmem_to_smem(y_gmem, y_smem, y_arrived)
        for i in waits:
            plgpu.barrier_wait(arrived[i])
        o_gmem[...] = combine(*(ref[...] for ref in ((x_gmem, y_gmem) if direct else (x_smem, y_smem))))

    tile = plgpu.SMEM(x.shape, x.dtype)
    scratch = [tile, tile, plgpu.Barrier(num_arrivals=rows or 1), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=scratch)(x, y)


def test_patient_sum():
    assert ex00.check_patient_sum(sum_by_smem)
    assert ex00.check_patient_sum(lambda x, y: sum_by_smem(x, y, waits=(1, 0)))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(waits=(0,)), "race: read"),
        (dict(waits=(1,)), "race: read"),
        (dict(waits=()), "race: read"),
        (dict(combine=lambda x, y: x - y), "it must be"),
        (dict(direct=True), "it reads an input in global memory"),
        (dict(rows=8), "a block starts 9 copies to shared memory, and 2 would do"),
    ],
)
def test_wrong_patient_sum(wrong, said):
    turned_down(ex00.check_patient_sum(lambda x, y: sum_by_smem(x, y, **wrong)), said)


def test_sum_without_the_copies():
    turned_down(ex00.check_patient_sum(lambda x, y: element_wise(lambda x, y: x + y, x, y)), "must still be copied")


def test_sum_that_waits_for_ever():
    wrong = lambda x, y: sum_by_smem(x, y, wait_before=(0,))
    turned_down(ex00.check_patient_sum(wrong), "would never end: every warpgroup waits")
    assert ex00.check_patient_sum(sum_by_smem), "a right answer after a deadlock"


def test_the_map_has_every_chapter():
    from figures.start_here.course_map import CHAPTERS

    assert {path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb")} <= {name for name, *_ in CHAPTERS}
