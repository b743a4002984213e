"""Checkers of the exercises of chapter 6."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, drawn, normal, require_answers, require_close, run_kernel, wide

import cookbook

SMEM_OF_AN_SM = 233_472  # Bytes of shared memory of one SM of an H100 or H200.
RESERVED = 1_024  # Bytes that CUDA keeps for itself for each block on the SM.
BARRIER = 8  # Bytes of one barrier; a ring has one for each stage.
ITEMSIZE = 2  # Bytes of a bfloat16.
_TILES = ((128, 128, 64), (128, 192, 64), (64, 256, 64), (128, 72, 64), (64, 56, 64), (64, 64, 128), (128, 224, 64))
CASES = [(*tile, blocks) for blocks in range(1, 6) for tile in _TILES]

# Name: num_stages (max_concurrent_steps), delay_release, and the products that wgmma_wait leaves running.
CONFIGURATIONS = {"A": (2, 0, 0), "B": (4, 1, 1), "C": (4, 1, 2), "D": (4, 2, 1)}
# Sizes at which every ring refills its stages, and with many tiles: order is judged there, and nothing is run.
LONG, MANY_ROWS, MANY_COLUMNS = 64 * 25, 128 * 67, 128 * 69
STEP = 10  # The step that exercise 2 asks about.


@checker
def check_transposed_a(answer) -> str:
    """Exercise 1: `answer(a, b)` is a.T @ b, for a stored as (K, M)."""
    operands = (jax.ShapeDtypeStruct((LONG, size), jnp.bfloat16) for size in (MANY_ROWS, MANY_COLUMNS))
    played = judge.require_order_of(answer, *operands, in_flight=2)
    _require_all_of_k(played[0][0], 1)
    for k, m, n in _sizes((128, 128, 128), (448, 256, 128)):
        a, b = normal(4, (k, m), jnp.bfloat16), normal(5, (k, n), jnp.bfloat16)
        out = run_kernel(answer, a, b, as_it_lies=True)
        likely = [(wide(a) @ wide(b), "that is a @ b: a is read as if it were stored as (M, K)")] if k == m else []
        require_close(out, wide(a).T @ wide(b), 0.02, f"a of {k} x {m}", likely)
    _require_windows(played[0], lambda depth, rows, columns: ((depth, rows), (depth, columns)))
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    ours = lambda a, b: cookbook.matmul_pipelined(a, b, transpose_a=True)
    return "The kernel reads the operand as it lies." + judge.speed(answer, ours, large, large)


def _require_all_of_k(block, products_per_step: int) -> None:
    """Raises NotYet unless the block multiplies LONG / tile_k times. tile_k is a side of what it loads."""
    sides = {side for event in block.events if event.kind == "load" for side in event.shape}
    steps = block.count("product") / products_per_step
    if steps not in {LONG / side for side in sides}:
        raise NotYet(f"for K = {LONG} a block multiplies in {steps:g} steps, and these are not all of K")


def _require_windows(blocks, needed) -> None:
    """Raises NotYet unless each block loads what its tile needs: `needed(depth, rows, columns)`, pairs of a first index
    and a size, for each step."""
    for block in blocks:
        loads = collections.Counter(event.box for event in block.events if event.kind == "load")
        stored = [event.box for event in block.events if event.kind == "store"]
        if len(stored) != 1 or None in (*loads, *stored):  # Its result alone is judged.
            continue
        for tile_k in {size for box in loads for _, size in box}:
            steps = ((start, tile_k) for start in range(0, LONG, tile_k))
            if loads == collections.Counter(window for depth in steps for window in needed(depth, *stored[0])):
                break
        else:
            (row, _), (column, _) = stored[0]
            raise NotYet(
                f"for K = {LONG}, the block whose tile begins at ({row}, {column}) loads other windows than its tile "
                "needs: follow mi, ni and ki in the index maps"
            )


def _sizes(*known):
    """These (K, M, N), and one that no answer knows beforehand."""
    draw = lambda rng: (64 * int(rng.integers(1, 9)), 128 * int(rng.integers(3, 5)), 128 * int(rng.integers(3, 5)))
    return *known, *drawn(draw, 1)


@checker
def check_wrong_release(answer) -> str:
    """Exercise 2: `answer` is the name of the one wrong configuration, and the step whose product may still read the
    stage that is refilled when STEP has ended."""
    if not isinstance(answer, tuple) or len(answer) != 2 or None in answer:
        raise NotYet('answer with a pair: the name of a configuration and a step, such as ("A", 3).')
    name, step = answer
    if name not in CONFIGURATIONS:
        raise NotYet(f"{name!r} is no configuration; there are {', '.join(CONFIGURATIONS)}.")
    num_stages, delay_release, wait = CONFIGURATIONS[name]
    if wait <= delay_release:
        running = f"only the last {wait} may still run" if wait else "no product runs"
        refilled = f"that of the step {delay_release} before" if delay_release else "its own"
        raise NotYet(
            f"{name} is right: when a step ends, {running}, and the stage that is refilled is {refilled}. Look for "
            "a stage that is refilled while its product runs."
        )
    if step != STEP - delay_release:
        raise NotYet(
            f"{name} it is. But when step {STEP} has ended, the stage of another step than {step!r} is refilled: "
            "delay_release counts back from the step that just ended."
        )
    return f"wgmma_wait({wait}) lets product {step} run on while TMA refills its stage for step {step + num_stages}."


@checker
def check_gated(answer) -> str:
    """Exercise 3: `answer(a, gate, up)` is silu(a @ gate) * (a @ up)."""
    shapes = (MANY_ROWS, LONG), (LONG, MANY_COLUMNS), (LONG, MANY_COLUMNS)
    played = judge.require_order_of(
        answer, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), in_flight=2
    )
    block = played[0][0]
    _require_all_of_k(block, 2)
    for k, m, n in _sizes((448, 256, 128)):
        _require_gated(answer, m, n, k)
    loads, products = block.count("load"), [event for event in block.events if event.kind == "product"]
    if 2 * loads > 3 * len(products):
        raise NotYet(
            f"a block loads {loads} windows for {len(products)} products: A is loaded once for each of the two. One "
            "step must use its window of A twice."
        )
    _require_windows(played[0], lambda depth, rows, columns: ((rows, depth), *((depth, columns),) * 2))
    *step, later = products[:3]  # The products of the first step, and the first one of the second.
    if ended := sum(event.end & later.known == event.end for event in step):
        raise NotYet(
            f"the result is right, but {ended} of a step's two products must end before the next step starts, and the "
            "tensor cores idle. wgmma_wait(n) leaves n products running, not n steps: leave both running, and keep "
            "their stage for as long"
        )
    return "A is loaded once for both products, neither of them ever crosses HBM, and the tensor cores stay busy."


def _require_gated(answer, m, n, k) -> None:
    a, gate, up = (normal(seed, shape, jnp.bfloat16) for seed, shape in ((1, (m, k)), (2, (k, n)), (3, (k, n))))
    out = run_kernel(answer, a, gate, up)
    a, gate, up = wide(a, gate, up)
    by_gate, by_up, silu = a @ gate, a @ up, lambda x: x / (1 + np.exp(-x))
    likely = (
        (by_gate, "that is a @ gate alone: the pipeline must load `up` too, and a second accumulator sum its product"),
        (silu(by_gate) * by_gate, "`gate` stands in both products: the third window is that of `up`"),
        (silu(by_up) * by_gate, "silu belongs to the product with `gate`, not to that with `up`"),
        (by_gate * by_up, "the two products are multiplied without silu"),
        (by_gate + by_up, "both products are in one accumulator: each needs its own"),
    )
    require_close(out, silu(by_gate) * by_up, 0.02, "silu(a @ gate) * (a @ up)", likely)


@checker
def check_stages(answer) -> str:
    """Exercise 4: `answer(tile_m, tile_n, tile_k, blocks)` is the depth of the deepest ring with which `blocks` blocks
    fit on an SM, or 0."""
    likely = (
        (dict(of_b=False, output=False), "A stage holds a tile of A and a tile of B."),
        (lambda *case: _stages(*case[:3], 1), "The SM's shared memory is shared by all its blocks."),
        (dict(beside=0), "The barriers stay beside the tile of the output: do both fit?"),
        (dict(output=False), "The tile of the output takes the ring's place: does it fit?"),
        (dict(reserved=0), "CUDA reserves 1 KB of every block."),
        (dict(barrier=0, beside=0), "Each stage has a barrier of 8 bytes."),
    )
    said = "Count the bytes of one stage first, and what else a block needs."
    require_answers(answer, CASES, _stages, likely, said, draw=_case)
    return "Your rings fill the SM, and not a byte more."


def _case(rng):
    tile_m, tile_n = 64 * int(rng.integers(1, 4)), 8 * int(rng.integers(1, 33))
    return tile_m, tile_n, 64 * int(rng.integers(1, 3)), int(rng.integers(1, 7))


def _stages(
    tile_m, tile_n, tile_k, blocks, *, reserved=RESERVED, barrier=BARRIER, beside=BARRIER, of_b=True, output=True
) -> int:
    """The right answer of exercise 4, and with other keywords the likely wrong ones."""
    budget = SMEM_OF_AN_SM // blocks - reserved
    stage = ITEMSIZE * (tile_m + tile_n * of_b) * tile_k
    stages = max(budget, 0) // (stage + barrier)
    room_for_output = ITEMSIZE * tile_m * tile_n + beside * stages <= budget
    return stages if room_for_output or not output else 0
