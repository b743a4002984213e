"""Checkers of the exercises of chapter 0."""

from unittest import mock

import jax

import cookbook
from lab import roofline

from .judge import (
    NotYet,
    checker,
    drawn,
    normal,
    play_kernel,
    require_answers,
    require_close,
    require_loads_together,
    require_staged,
    run_kernel,
    speed,
    wide,
)

TIMED = (jax.ShapeDtypeStruct((8192,), "float32"),) * 2  # One warpgroup holds them in its registers.
WORK = (  # Operations and bytes.
    (2 * 4096**3, 3 * 4096**2 * 2),  # A matmul of 4096 x 4096, and one of 512 x 512.
    (2 * 512**3, 3 * 512**2 * 2),
    (2 * 64 * 8192**2, (2 * 64 * 8192 + 8192**2) * 2),  # 64 rows times a matrix of 8192 x 8192.
    (2**29, 3 * 2**30),  # Two arrays of 2**29 bf16 are added: last, since the chapter asks for a guess of it.
)


@checker
def check_least_time(answer):
    """`answer(flops, nbytes)` returns (milliseconds, "compute" or "memory"), at bf16 on an H200."""

    right_bound, refusal = roofline.bound, NotYet("write the two divisions yourself, without `lab.roofline.bound`")

    def least(flops, nbytes):
        bound = right_bound(flops, nbytes, "bf16", "h200")
        return bound.ms, bound.limited_by

    likely = (
        (lambda *work: (least(*work)[0] / 1e3, least(*work)[1]), "That is in seconds."),
        (lambda *work: (least(*work)[0], "compute"), "The longer of the two times is the bound, by memory or not."),
    )
    with mock.patch.object(roofline, "bound", side_effect=refusal):
        require_answers(answer, WORK, least, likely, "Divide each by its peak; the longer time is the least one.",
                        draw=lambda rng: (10 ** rng.uniform(6, 14, 2)).tolist())  # fmt: skip
    return "The longer of the two times is the bound, and its name tells you which one to shorten."


@checker
def check_axpy(answer):
    """`answer(a, x, y)` is a kernel that computes a x + y, for a Python number a and float32 arrays."""
    for a, shape in ((2.5, (256,)), (-0.75, (64, 384)), (1.25, _any_shape())):
        x, y = normal(1, shape), normal(2, shape)
        out = run_kernel(lambda x, y, a=a: answer(a, x, y), x, y)
        require_close(out, a * wide(x) + wide(y), 1e-6, f"a = {a}, float32{list(shape)}")
    ours = cookbook.fuse(lambda x, y: 2.5 * x + y)
    return "One kernel, two inputs, every element." + speed(lambda x, y: answer(2.5, x, y), ours, *TIMED)


@checker
def check_sum_and_product(answer):
    """`answer(x, y)` is a kernel that returns (x + y, x * y)."""
    for shape in ((256,), (16, 128), _any_shape()):
        x, y = normal(7, shape), normal(8, shape)
        outs = run_kernel(answer, x, y)
        if not isinstance(outs, tuple | list) or len(outs) != 2:
            raise NotYet("it must return two arrays, the sum and the product")
        require_close(outs[0], wide(x) + wide(y), 1e-6, f"the sum, float32{list(shape)}")
        require_close(outs[1], wide(x) * wide(y), 1e-6, f"the product, float32{list(shape)}")
    ours = cookbook.fuse(lambda x, y: (x + y, x * y))
    return "Inputs first, outputs in the order of out_type." + speed(answer, ours, *TIMED)


@checker
def check_patient_sum(answer):
    """`answer(x, y)` is a kernel that computes x + y by way of shared memory, without a race."""
    for shape in ((8, 128), (24, 256), (64, 128), _any_shape()):
        x, y = normal(3, shape), normal(4, shape)
        try:
            out = run_kernel(answer, x, y, copies={"load": 2})
        except NotYet as problem:
            if "no threads observed" not in str(problem):
                raise
            raise NotYet(
                "a barrier completes once for each copy, and you wait once: for two copies on one barrier, write "
                "`plgpu.Barrier(num_arrivals=2)`"
            ) from None
        require_staged(answer, x, y, loads=2)
        require_loads_together(play_kernel(answer, x, y))
        require_close(out, wide(x) + wide(y), 1e-6, f"float32{list(shape)}")
    praise = "The kernel waits for each copy before it reads its target. The interpreter found no race."
    return praise + speed(answer, cookbook.add, x, y)


def _any_shape() -> tuple[int, int]:
    """Rows and columns that nobody knows beforehand; two such tiles of float32 fit in shared memory."""
    return drawn(lambda rng: (8 * int(rng.integers(4, 15)), 128 * int(rng.integers(1, 3))), times=1)[0]
