"""Checkers of the exercises of chapter 21."""

import functools
import math
import operator
import re

import jax
import numpy as np

import cookbook

from .judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide

SHARED = {"_device.py", "_host.py", "_numerics.py"}
LIFTS = (
    ("softmax",), ("add",), ("matmul", "ragged_dot_fp8"), ("paged_attention", "write_kv", "rms_norm"), ("ssd",),
    ("all_gather",), ("matmul_reduce_scatter", "matmul"), ("blackwell.matmul",), ("softmax", "blackwell.matmul_mxfp8"),
)  # fmt: skip


@checker
def check_files_to_copy(answer):
    """`answer(ops)` returns the sorted names of what has to be copied out of `cookbook/` for these ops."""

    def files(*ops):
        families = {operator.attrgetter(op)(cookbook).__module__.split(".")[1] for op in ops}
        families |= {"gemm"} if families & {"nvlink", "blackwell"} else set()
        families |= {"select"} if "gemm" in families else set()
        return sorted(SHARED | {f"{name}.py" if name == "elementwise" else name for name in families})

    of_ops = functools.wraps(answer)(lambda *ops: answer(ops))
    everything = sorted({op for ops in LIFTS for op in ops})
    said = "The sorted names: each op's family, those that it is built on, and the three shared files, no more."
    draw = lambda rng: rng.choice(everything, 3).tolist()
    require_answers(of_ops, LIFTS, files, otherwise=said, draw=draw)
    return "A family, what it is built on, and the three shared files."


@checker
def check_squared_relu(answer):
    """`answer(x)` is max(x, 0) ** 2, and its gradient is a kernel too."""
    for n in (128, 384):
        x, d_out = normal(n, n).at[-3].set(np.nan), normal(n + 1, n)
        positive = np.maximum(wide(x), 0)
        require_close(run_kernel(answer, x), positive**2, 1e-6, f"float32[{n}]")
        d_x = run_kernel(lambda x, d_out: jax.vjp(answer, x)[1](d_out)[0], x, d_out, launches=2)
        require_close(d_x, 2 * positive * wide(d_out), 1e-6, f"the gradient, float32[{n}]")
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
    require_close(out, 2 * wide(x) + wide(y), 1e-6, "float32[8, 128]")
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
    dict(add=1.0, matmul=0.2, softmax=0.1),
    dict(add=1.02, matmul=0.2, softmax=0.1),
    dict(add=1.04, matmul=0.2, softmax=0.1),
    dict(add=0.5, matmul=0.207, softmax=0.108),
    dict(add=1.0, matmul=0.2),
    dict(add=math.nan, matmul=0.2, softmax=0.1),
    dict(add=1.0, matmul=0.2, softmax=0.1, new=3.0),
    dict(softmax=0.2, matmul=0.3, add=1.0),
)


def _run(rng):
    recorded = {f"p{i}": dict(ms=rng.uniform(0.1, 9), spread=rng.uniform(0, 0.1)) for i in range(4)}
    return recorded, {name: rng.uniform(0.9, 1.3) * entry["ms"] for name, entry in recorded.items()}


@checker
def check_regressed(answer):
    """`answer(recorded, measured)` returns the sorted names of problems that have become slower, or have no time."""

    def slower(recorded, measured, *, share=lambda ms, spread: max(0.03, 2 * spread), missing=math.inf):
        limit = lambda name: (1 + share(**recorded[name])) * recorded[name]["ms"]
        return sorted(name for name in recorded if not measured.get(name, missing) <= limit(name))

    likely = (
        (dict(share=lambda ms, spread: 0.03), "A problem may be slower by twice its spread."),
        (dict(share=lambda ms, spread: 2 * spread), "Every problem is allowed 3%."),
        (dict(share=lambda ms, spread: max(0.03, 2 * spread / ms)), "The spread is a share of `ms`, not a time."),
        (dict(missing=0.0), "A problem that was not measured counts."),
    )
    said = "Slower by more than 3% and than twice the spread; or not measured, or NaN; nothing is recorded of others."
    require_answers(answer, [(RECORDED, run) for run in RUNS], slower, likely, said, draw=_run)
    return "Noise passes, a regression does not, and neither does silence."
