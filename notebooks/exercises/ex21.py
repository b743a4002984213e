"""Checkers of the exercises of chapter 21."""

import inspect
import math
import re

import jax
import numpy as np

import cookbook

from .judge import NotYet, checker, drawn, normal, require_close, run_kernel

SHARED = {"_device.py", "_host.py", "_numerics.py"}
LIFTS = (
    ("softmax",),
    ("add",),
    ("matmul", "ragged_dot_fp8"),
    ("paged_attention", "write_kv", "rms_norm"),
    ("ssd",),
    ("all_gather",),
    ("matmul_reduce_scatter", "matmul"),
)


@checker
def check_files_to_copy(answer):
    """`answer(ops)` returns the sorted names of what has to be copied out of `cookbook/` for these ops."""
    everything = sorted({op for ops in LIFTS for op in ops})
    for ops in (*LIFTS, *drawn(lambda rng: tuple(rng.choice(everything, 3).tolist()))):
        families = {inspect.getmodule(getattr(cookbook, op)).__name__.split(".")[1] for op in ops}
        families |= {"gemm"} if "nvlink" in families else set()
        want = sorted(SHARED | {f"{name}.py" if name == "elementwise" else name for name in families})
        got = answer(ops)
        if missing := set(want) - set(got):
            raise NotYet(f"for {', '.join(ops)} it leaves out {min(missing)}, and an import would fail")
        if more := set(got) - set(want):
            raise NotYet(f"for {', '.join(ops)} it copies {min(more, key=str)!r}, which is not needed")
        if list(got) != want:
            raise NotYet(f"for {', '.join(ops)} it returns {got}; it must be sorted: {want}")
    return "A family, what it is built on, and the three shared files."


@checker
def check_squared_relu(answer):
    """`answer(x)` is max(x, 0) ** 2, and its gradient is a kernel too."""
    for n in (128, 512):
        x, d_out = normal(n, n).at[-3].set(np.nan), normal(n + 1, n)
        positive = np.maximum(np.asarray(x, np.float64), 0)
        require_close(run_kernel(answer, x), positive**2, 1e-6, f"float32[{n}]")
        d_x = run_kernel(lambda x, d_out: jax.vjp(answer, x)[1](d_out)[0], x, d_out, launches=2)
        require_close(d_x, 2 * positive * np.asarray(d_out, np.float64), 1e-6, f"the gradient, float32[{n}]")
    return "The forward and the backward pass are a kernel each."


def beside_the_kernel(fn, *avals) -> list[str]:
    """Operations of XLA around the kernels of `fn`, as a GPU's program has them."""
    lowered = jax.jit(lambda *args: fn(*args)).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    return [name for name in re.findall(r"= \"?stablehlo\.(\w+)", lowered) if name != "custom_call"]


@checker
def check_twice_plus(answer):
    """`answer(x, y)` is 2 x + y of two (8, 128) arrays, and launches one kernel and nothing else."""
    x, y = normal(1, (8, 128)), normal(2, (8, 128))
    out = run_kernel(answer, x, y)
    require_close(out, 2 * np.asarray(x, np.float64) + np.asarray(y, np.float64), 1e-6, "float32[8, 128]")
    if others := beside_the_kernel(answer, x, y):
        raise NotYet(
            f"XLA has a `{others[0]}` beside the kernel, and as_torch_kernel refuses it: leave the kernel alone"
        )
    return "One kernel and nothing beside it: PyTorch can call it."


RECORDED = {
    "add": dict(ms=1.0, spread=0.002),
    "matmul": dict(ms=0.2, spread=0.01),
    "softmax": dict(ms=0.1, spread=0.05),
}
RUNS = (
    (dict(add=1.0, matmul=0.2, softmax=0.1), [], "nothing has changed"),
    (dict(add=1.02, matmul=0.2, softmax=0.1), [], "add is 2% slower, less than the 3% that every problem is allowed"),
    (dict(add=1.04, matmul=0.2, softmax=0.1), ["add"], "add is 4% slower"),
    (dict(add=0.5, matmul=0.207, softmax=0.108), ["matmul"], "softmax is 8% slower, less than twice its spread"),
    (dict(add=1.0, matmul=0.2), ["softmax"], "softmax was not measured"),
    (dict(add=math.nan, matmul=0.2, softmax=0.1), ["add"], "add gave NaN"),
    (dict(add=1.0, matmul=0.2, softmax=0.1, new=3.0), [], "nothing is recorded of a new problem"),
    (dict(softmax=0.2, matmul=0.3, add=1.0), ["matmul", "softmax"], "two are slower; names are sorted"),
)


def _run(rng):
    recorded = {f"p{i}": dict(ms=rng.uniform(0.1, 9), spread=rng.uniform(0, 0.1)) for i in range(4)}
    slower = dict(zip(recorded, rng.uniform(-0.1, 0.3, 4), strict=True))
    want = [name for name, share in slower.items() if share > max(0.03, 2 * recorded[name]["spread"])]
    measured = {name: (1 + share) * recorded[name]["ms"] for name, share in slower.items()}
    return recorded, (measured, want, f"with {recorded} recorded and {measured} measured")


@checker
def check_regressed(answer):
    """`answer(recorded, measured)` returns the sorted names of problems that have become slower, or have no time."""
    for recorded, (measured, want, why) in (*((RECORDED, run) for run in RUNS), *drawn(_run)):
        got = answer(recorded, measured)
        if list(got) != want:
            raise NotYet(f"{why}: the answer must be {want}, not {got}")
    return "Noise passes, a regression does not, and neither does silence."
