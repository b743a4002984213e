"""Checkers of the exercises of chapter 1."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import cookbook
import lab

from .judge import NotYet, checker, normal, require_answers, require_close, run_kernel, speed, wide

TIMED = jax.ShapeDtypeStruct((2**26,), jnp.bfloat16)
WARPS = ((2, 2), (4, 4), (16, 16), (16, 0), (4, 12), (8, 64), (4, 128), (16, 144), (16, 8192))  # nbytes, stride.
CHAINS = ((2, 1), (1, 2), (2, 2), (3, 4), (5, 7))  # Inputs, kernels.


@checker
def check_lines_of_a_warp(answer):
    """`answer(nbytes, stride)` returns how many lines of 128 bytes the 32 threads of a warp touch."""

    def warp(rng):
        nbytes = int(2 ** rng.integers(1, 5))
        return nbytes, nbytes * int(rng.integers(0, 20))

    lines = lambda nbytes, stride: len({i * stride // 128 for i in range(32)})
    said = "Thread i begins at i * stride: how many different lines of 128 bytes are these?"
    require_answers(answer, WARPS, lines, otherwise=said, draw=warp)
    return "Threads next to each other, bytes next to each other: few lines."


@checker
def check_gain_of_fusing(answer):
    """`answer(num_inputs, num_kernels)` returns how many times faster one fused kernel is, if memory bounds it."""
    gain = lambda inputs, kernels: (inputs + 1 + 2 * (kernels - 1)) / (inputs + 1)
    said = "Count the arrays that cross HBM apart, each kernel's inputs and its result, and those that do so fused."
    require_answers(answer, CHAINS, gain, otherwise=said, draw=lambda rng: rng.integers(1, 30, 2).tolist())
    return "The arithmetic does not occur in the formula, because memory is the bound."


@checker
def check_swiglu(answer):
    """`answer(gate, up)` is a kernel: silu(gate) * up in float32, rounded once to bf16, 16 bytes a load."""
    for n, scale in ((1024, 1), (4096, 8)):
        gate, up = normal(5, n, jnp.bfloat16) * scale, normal(6, n, jnp.bfloat16)
        out = run_kernel(answer, gate, up)
        if out.dtype != jnp.bfloat16:
            raise NotYet(f"the result is {out.dtype}; it must be bfloat16, as the inputs are")
        exact = wide(gate) / (1 + np.exp(-wide(gate))) * wide(up)
        require_close(out, exact, 8e-2, f"bf16[{n}]")
        error = np.linalg.norm(wide(out) - exact) / np.linalg.norm(exact)
        if error > 2.5e-3:  # One rounding to bf16 makes 1.7e-3; computing in bf16 makes 2.9e-3 or more.
            raise NotYet(
                f"its error is {error:.1e}, more than one rounding makes: compute in float32, round at the end"
            )
    praise = "Right in float32, rounded once" + _require_wide_loads(answer, gate, up)
    return praise + speed(answer, cookbook.fuse(lambda gate, up: jax.nn.silu(gate) * up), TIMED, TIMED)


def _require_wide_loads(answer, *args) -> str:
    try:
        ptx = lab.compile_for("h200", answer, *args).ptx
    except lab.ToolchainMissing:
        return "; the width of its loads was not checked, because no compiler is installed."
    loads = re.findall(r"\b(ld\.global(?:\.\w+)*?(?:\.v(\d))?\.[a-z](\d+))\b", ptx)
    narrow = [op for op, count, bits in loads if int(count or 1) * int(bits) < 128]
    if narrow:
        raise NotYet(f"it loads with {narrow[0]}; name a layout that gives each thread 8 neighbours, 16 bytes a load")
    return ", and 16 bytes a load."


@checker
def check_relu_of_any_length(answer):
    """`answer(x)` is a kernel: max(x, 0) of a bf16 array of any length from 128 on."""
    for n in (1024, 128, 4096, 1000, 2500, 4097, 3071):
        x = normal(n, n, jnp.bfloat16).at[-3].set(jnp.nan)
        try:
            out = run_kernel(answer, x)
        except NotYet as problem:
            raise NotYet(f"length {n}: {problem}") from None
        require_close(out, np.maximum(wide(x), 0), 0, f"length {n}")
    odd = jax.ShapeDtypeStruct((TIMED.size - 1,), TIMED.dtype)
    praise = "Every element is written, and nothing beyond the end is touched."
    return praise + speed(answer, cookbook.fuse(jax.nn.relu), odd)
