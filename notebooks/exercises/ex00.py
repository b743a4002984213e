"""Checkers of the exercises of chapter 0."""

import math

import jax
import numpy as np

from cookbook.lab import roofline

from .judge import NotYet, checker, normal, require_close, run_kernel


@checker
def check_least_time(answer):
    """`answer(flops, nbytes)` returns (milliseconds, "compute" or "memory"), at bf16 on an H200."""
    work = {
        "adding two arrays of 2**29 bf16": (2**29, 3 * 2**30),
        "a matmul of 4096 x 4096": (2 * 4096**3, 3 * 4096**2 * 2),
        "a matmul of 512 x 512": (2 * 512**3, 3 * 512**2 * 2),
        "a matmul of 64 x 8192 by 8192 x 8192": (2 * 64 * 8192**2, (2 * 64 * 8192 + 8192**2) * 2),
    }
    for name, (flops, nbytes) in work.items():
        bound = roofline.bound(flops, nbytes, "bf16")
        ms, limit = answer(flops, nbytes)
        if not math.isclose(ms, bound.ms, rel_tol=1e-3):
            raise NotYet(
                f"{name} ({flops:.3g} FLOP, {nbytes:.3g} bytes) takes at least {bound.ms:.4g} ms, not {ms:.4g}"
            )
        if limit != bound.limited_by:
            raise NotYet(f"{name} is bound by {bound.limited_by}, not by {limit!r}")
    return "The longer of the two times is the bound; its name tells what to improve."


@checker
def check_axpy(answer):
    """`answer(a, x, y)` is a kernel that computes a x + y, for a Python number a and float32 arrays."""
    for a, shape in ((2.5, (256,)), (-0.75, (64, 384))):
        x, y = normal(1, shape), normal(2, shape)
        out = run_kernel(lambda x, y, a=a: answer(a, x, y), x, y)
        exact = a * np.asarray(x, np.float64) + np.asarray(y, np.float64)
        require_close(out, exact, 1e-6, f"a = {a}, float32{list(shape)}")
    return "One kernel, two inputs, every element."


@checker
def check_patient_sum(answer):
    """`answer(x, y)` is a kernel that computes x + y by way of shared memory, without a race."""
    x, y = normal(3, (8, 128)), normal(4, (8, 128))
    out = run_kernel(answer, x, y)
    if str(jax.make_jaxpr(answer)(x, y)).count("copy_gmem_to_smem") < 2:
        raise NotYet("both inputs must still be copied to shared memory: keep the copies and add what is missing")
    require_close(out, np.asarray(x, np.float64) + np.asarray(y, np.float64), 1e-6, "float32[8, 128]")
    return "Each copy is waited for before its target is read."
