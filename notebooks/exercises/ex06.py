"""Chapter 6's exercises: the depth of a ring, the rule of `delay_release`, and an index map."""

import numpy as np
from exercises.judge import NotYet, checker

SMEM_OF_AN_SM = 233_472  # Bytes of shared memory of one SM of an H200.
RESERVED = 1_024  # Bytes that CUDA keeps for itself for each block on the SM.
BARRIER = 8  # Bytes of one barrier; a ring has one for each slot.
ITEMSIZE = 2  # Bytes of a bfloat16.
_TILES = ((128, 128, 64), (128, 192, 64), (64, 256, 64), (128, 72, 64), (64, 56, 64), (64, 64, 128))
CASES = [(*tile, blocks) for blocks in range(1, 6) for tile in _TILES]

# Name: slots (max_concurrent_steps), delay_release, and the products that wgmma_wait leaves running.
CONFIGURATIONS = {"A": (2, 0, 0), "B": (4, 1, 1), "C": (4, 1, 2), "D": (4, 2, 1)}
STEP = 10  # The step that exercise 2 asks about.


@checker
def check_stages(answer) -> str:
    """Exercise 1: `answer(tile_m, tile_n, tile_k, blocks)` is the depth of the deepest ring with which `blocks` blocks
    fit on an SM, or 0."""
    given = {case: answer(*case) for case in CASES}
    for case, got in given.items():
        if got is None:
            raise NotYet("stages_for returns None: write its body.")
        if not isinstance(got, int | np.integer) or isinstance(got, bool):
            raise NotYet(f"stages_for{case} is {got!r}; a number of slots is an int (a division? try //).")
        if got != (want := _stages(*case)):
            raise NotYet(f"stages_for{case} is {got}, and {want} is right. {_hint(given)}")
    return "Your rings fill the SM, and not a byte more."


@checker
def check_wrong_release(answer) -> str:
    """Exercise 2: `answer` is the name of the one wrong configuration, and the step whose product may still read the
    slot that is refilled when STEP has ended."""
    if not isinstance(answer, tuple) or len(answer) != 2 or None in answer:
        raise NotYet('answer with a pair: the name of a configuration and a step, such as ("A", 3).')
    name, step = answer
    if name not in CONFIGURATIONS:
        raise NotYet(f"{name!r} is no configuration; there are {', '.join(CONFIGURATIONS)}.")
    slots, delay_release, wait = CONFIGURATIONS[name]
    if wait <= delay_release:
        running = f"only the last {wait} may still run" if wait else "no product runs any more"
        refilled = f"that of the step {delay_release} before" if delay_release else "its own"
        raise NotYet(
            f"{name} is right: when a step ends, {running}, and the slot that is refilled is {refilled}. Look for "
            "a slot that is refilled while its product runs."
        )
    if step != STEP - delay_release:
        raise NotYet(
            f"{name} it is. But when step {STEP} has ended, the slot of another step than {step!r} is refilled: "
            "delay_release counts back from the step that just ended."
        )
    return f"wgmma_wait({wait}) lets product {step} run on while TMA refills its slot for step {step + slots}."


@checker
def check_index_map(answer) -> str:
    """Exercise 3: `answer(mi, tile_m, tile_k)` is the block shape and the index map of A stored as (K, M)."""
    for tile_m, tile_k in ((128, 64), (64, 128)):
        stored = np.random.default_rng(6).standard_normal((4 * tile_k, 3 * tile_m))
        for mi in range(3):
            block_shape, index_map = answer(mi, tile_m, tile_k)
            if block_shape is None or index_map is None:
                raise NotYet("there is no block shape or no index map yet: fill in both.")
            if not callable(index_map):
                raise NotYet(f"index_map is {index_map!r}; it must be a function of ki.")
            if tuple(block_shape) != (tile_k, tile_m):
                raise NotYet(
                    f"for tile_m={tile_m} and tile_k={tile_k} the block shape is {tuple(block_shape)}; the array is "
                    "stored as (K, M), and so is its window."
                )
            for ki in range(4):
                _require_window(index_map(ki), ki, mi, stored, (tile_k, tile_m))
    return "The kernel can read the operand as it lies."


def _stages(tile_m, tile_n, tile_k, blocks, *, reserved=RESERVED, barrier=BARRIER, of_b=True, output=True) -> int:
    """The right answer of exercise 1, and with other keywords the likely wrong ones."""
    budget = SMEM_OF_AN_SM // blocks - reserved
    slot = ITEMSIZE * (tile_m + tile_n * of_b) * tile_k
    stages = max(budget, 0) // (slot + barrier)
    room_for_output = ITEMSIZE * tile_m * tile_n + barrier * stages <= budget
    return stages if room_for_output or not output else 0


def _hint(given: dict) -> str:
    """Names the likely mistake that explains all answers."""
    likely = (
        (lambda case: _stages(*case, of_b=False, output=False), "A slot holds a tile of A and a tile of B."),
        (lambda case: _stages(*case[:3], 1), "The SM's shared memory is shared by all its blocks."),
        (lambda case: _stages(*case, output=False), "The tile of the output takes the ring's place: does it fit?"),
        (lambda case: _stages(*case, reserved=0), "CUDA reserves 1 KB of every block."),
        (lambda case: _stages(*case, barrier=0), "Each slot has a barrier of 8 bytes."),
    )
    texts = (text for wrong, text in likely if all(wrong(case) == got for case, got in given.items()))
    return next(texts, "Count the bytes of one slot first, and what else a block needs.")


def _require_window(index, ki: int, mi: int, stored: np.ndarray, block_shape: tuple[int, int]) -> None:
    """Raises NotYet if the window at `index` is not that of step `ki` and tile `mi`."""
    if not isinstance(index, tuple | list) or len(index) != 2:
        raise NotYet(f"index_map({ki}) is {index!r}; it must be a pair, one index for each side of the array.")
    start = [int(i) * size for i, size in zip(index, block_shape, strict=True)]
    if any(at + size > side for at, size, side in zip(start, block_shape, stored.shape, strict=True)):
        raise NotYet(f"for mi={mi} index_map({ki}) is {index}, beyond the array: it counts windows, not elements.")
    window = stored[start[0] : start[0] + block_shape[0], start[1] : start[1] + block_shape[1]]
    tile_k, tile_m = block_shape
    if not np.array_equal(window, stored[ki * tile_k : (ki + 1) * tile_k, mi * tile_m : (mi + 1) * tile_m]):
        raise NotYet(f"for mi={mi} index_map({ki}) is {index}: not the window of step {ki} of K and tile {mi} of M.")
