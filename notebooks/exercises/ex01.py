"""Checkers of the exercises of chapter 1."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

import cookbook
import lab

from .judge import (
    NotYet,
    checker,
    drawn,
    equations,
    jaxpr_of,
    normal,
    play_kernel,
    require_answers,
    require_close,
    run_kernel,
    speed,
    wide,
)
from .memory import overlap

TIMED = jax.ShapeDtypeStruct((2**26,), jnp.bfloat16)
WARPS = ((2, 2), (4, 4), (16, 16), (16, 0), (4, 12), (8, 64), (4, 128), (16, 144), (16, 8192))  # nbytes, stride.
LEAST_BLOCKS = 1024  # On large arrays: in rung 2, fewer of one tile each do not reach HBM's bandwidth.
CHAINS = ((2, 1), (1, 2), (2, 2), (3, 4), (5, 7))  # Inputs, kernels.


def _any_tiles() -> int:
    """A length of whole tiles that no answer can have by heart."""
    (tiles,) = drawn(lambda rng: int(rng.integers(5, 12)), 1)
    return 1024 * tiles


def _any_length() -> int:
    (length,) = drawn(lambda rng: int(rng.integers(1025, 6000)), 1)
    return length


def _num_blocks(answer, *args) -> int:
    found = equations(jaxpr_of(answer, *args))
    return math.prod(next(equation.params["meshes"][0].grid for equation in found if "meshes" in equation.params))


def _require_grid(answer, *args):
    """Raises NotYet if few blocks do all of the work of `args`, which are large."""
    blocks = _num_blocks(answer, *args)
    if blocks == 1:
        raise NotYet("one block does all of the work, so 131 SMs do nothing: give the kernel a grid, a tile per block")
    if blocks < LEAST_BLOCKS:
        raise NotYet(
            f"{blocks} blocks do all of the work on {args[0].size:,} elements, too few to keep HBM busy: give the "
            "kernel a grid, a tile per block"
        )


def _played(answer, *args):
    return list(itertools.chain.from_iterable(play_kernel(answer, *args)))


def _require_once(answer, *args):
    """Raises NotYet if a block loads or stores an element more than once."""
    for block in _played(answer, *args):
        if any(overlap(*pair) for pair in itertools.combinations(block.stored, 2)):
            raise NotYet("a block stores the same element more than once: every store is needed once")
        for (memory, box), (other, its_box) in itertools.combinations(block.fetched, 2):
            if memory is other and overlap(box, its_box):
                raise NotYet("a block loads the same element more than once: every load is needed once")


def _elements(block) -> int:
    """How many elements a block stores, each counted once."""
    return len({i for ((start, size),) in block.stored for i in range(start, start + size)})


def _require_shares(answer, *args):
    """Raises NotYet if the blocks together store fewer elements of `args`, which are large, than there are, or, where
    all of them but the last store as many, more. Only the first, a middle and the last block are played."""
    n, num_blocks, blocks = args[0].size, _num_blocks(answer, *args), _played(answer, *args)
    if not all(block.is_whole for block in blocks):
        return
    stored = [_elements(block) for block in blocks]
    if num_blocks * max(stored) < n:
        raise NotYet(
            f"of {n:,} elements many are never written: there are {num_blocks:,} blocks, of {max(stored):,} at most"
        )
    if abs(num_blocks * stored[0] - n) < stored[0] and (num_blocks - 1) * stored[0] + stored[-1] > n:
        raise NotYet(f"length {n:,}: {APART}")


APART = (
    "two blocks write the same element, and nothing orders blocks: give the tail to the block that writes the last "
    "whole tile"
)


def _require_apart(answer, x):
    """Raises NotYet if two blocks store the same element, or one block a tile more than once. The interpreter sees the
    former only if both are at the same step."""
    blocks = _played(answer, x)
    for first, second in itertools.combinations(blocks, 2):
        if any(overlap(one, other) for one in first.stored for other in second.stored):
            raise NotYet(f"length {x.size}: {APART}")
    for block in blocks:
        if sum(size for ((_, size),) in block.stored) - _elements(block) >= 1024:
            raise NotYet(f"length {x.size}: a block stores the same elements more than once; only the tail may overlap")


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
    """`answer(gate, up)` is a kernel: silu(gate) * up in float32, rounded once to bf16, 16 bytes per load."""
    for n, scale in ((1024, 1), (4096, 8), (_any_tiles(), 4)):
        gate, up = normal(5, n, jnp.bfloat16) * scale, normal(6, n, jnp.bfloat16)
        out = run_kernel(answer, gate, up)
        if out.dtype != jnp.bfloat16:
            raise NotYet(f"the result is {out.dtype}; it must be bfloat16, as the inputs are")
        exact = wide(gate) / (1 + np.exp(-wide(gate))) * wide(up)
        require_close(out, exact, 8e-2, f"bf16[{n}]")
        error = np.sqrt(np.mean((wide(out) / exact - 1) ** 2))
        if error > 2e-3:  # One rounding to bf16 makes 1.6e-3, two make 2.3e-3.
            raise NotYet(
                f"its error is {error:.1e}, more than one rounding makes: compute in float32, round at the end"
            )
    _require_grid(answer, TIMED, TIMED)
    _require_shares(answer, TIMED, TIMED)
    _require_once(answer, *[jax.ShapeDtypeStruct((4096,), jnp.bfloat16)] * 2)
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
        raise NotYet(f"it loads with {narrow[0]}; name a layout that gives each thread 8 neighbours, 16 bytes per load")
    return ", and 16 bytes per load."


@checker
def check_relu_of_any_length(answer):
    """`answer(x)` is a kernel: max(x, 0) of a bf16 array of any length from 128 on."""
    for n in (1024, 128, 4096, 1000, 2500, 4097, 3071, _any_length()):
        x = normal(n, n, jnp.bfloat16).at[-3].set(jnp.nan)
        try:
            out = run_kernel(answer, x)
        except NotYet as problem:
            raise NotYet(f"length {n}: {problem}") from None
        require_close(out, np.maximum(wide(x), 0), 0, f"length {n}")
    odd = jax.ShapeDtypeStruct((TIMED.size - 1,), TIMED.dtype)
    _require_grid(answer, odd)
    for longer in (-1, 1):  # A tail that is shifted back within itself, and one that reaches into a whole tile.
        _require_shares(answer, jax.ShapeDtypeStruct((TIMED.size + longer,), TIMED.dtype))
    # At most three blocks of whole tiles: the first, a middle and the last block are played.
    for length in (200, 300, *(3 * 1024 + left for left in (1, 100, 101, 127, 500, 1023, _any_length() % 1024))):
        _require_apart(answer, jax.ShapeDtypeStruct((length,), jnp.bfloat16))
    praise = "Every element is written, and nothing beyond the end is touched."
    return praise + speed(answer, cookbook.fuse(jax.nn.relu), odd)
