"""Chapter 19b's exercises: halves of a pair, tiles in any order, a scale of MXFP8 and a kernel for it, and columns."""

import contextlib
import math
import re
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, drawn, normal, require_close, run_kernel
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

COLUMNS = (
    (256, 2, False), (256, 2, True), (256, 1, True), (192, 2, True), (240, 2, True), (248, 2, True), (128, 2, False),
    (128, 2, True), (64, 1, False), (64, 1, True), (16, 1, False), (16, 2, True), (160, 3, False), (176, 3, False),
)  # fmt: skip
PLACES = ((0, 0, 256), (256, 512, 256), (768, 192, 64), (1280, 96, 96))  # (row, col, tile_n)
BLOCKS = (
    (1.0,), (448.0,), (449.0,), (224.0, -3.0), (225.0,), (-500.0, 2.0), (0.01, 1e-5), (1e30, -3.0), (7.0, -7.5),
    (3.5,), (3.6,), (0.0, 1e-3), (255.0,), (256.0,),
)  # fmt: skip
# Exercise 2: the tiles of each block that runs, in the order in which hardware hands them out; rows of a tile.
ORDER, ROWS = ((0, 3, 5, 6), (1, 4), (2,)), 64


@checker
def check_held(answer) -> str:
    """Exercise 1: `answer(row, col, tile_n, half)` has three slices: rows of A, columns of B, columns of o."""
    for place in (*PLACES, *drawn(lambda rng: (256, 32, 32) * rng.integers(0, 8, 3) + (0, 0, 32))):
        for half in range(2):
            got = answer(*place, half)
            if got is None:
                raise NotYet("held returns None: write its body.")
            if not isinstance(got, tuple | list) or [type(part) for part in got] != [slice] * 3:
                raise NotYet(f"held{(*place, half)} is {got!r}; it must be three slices.")
            want = _held(*place, half)
            for name, mine, right in zip(("rows of A", "columns of B", "columns of o"), got, want, strict=True):
                if (mine.start, mine.stop) != (right.start, right.stop):
                    raise NotYet(
                        f"held{(*place, half)}: the {name} are {mine.start} to {mine.stop}, and {right.start} to "
                        f"{right.stop} is right. {_HELD_HINTS[name]}"
                    )
    return "Own rows, half of B, and sums of all columns: that is where the bytes are saved."


@checker
def check_order(answer) -> str:
    """Exercise 2: `answer(x)` is 2 x, computed tile by tile, whichever block gets a tile, and when."""
    x = normal(21, (sum(map(len, ORDER)) * ROWS, ROWS), jnp.bfloat16)
    if "try_cluster_cancel" not in str(jax.make_jaxpr(lambda x: answer(x))(x)):
        raise NotYet("no launch is cancelled: keep plgpu.dynamic_scheduling_loop, which asks for the next tile.")
    try:
        out = run_kernel(answer, x, stand_ins=_launch_control)
    except NotYet as problem:
        hint, said = _order_hint(str(problem)), str(problem)
        raise NotYet(f"{hint} {said[0].upper()}{said[1:]}" if hint else said) from problem
    require_close(out, 2 * np.asarray(x, np.float64), 1e-6, "twice x")
    return "The ring counts what this block has done, and the tile's number only says where in memory it is."


@checker
def check_exponent(answer) -> str:
    """Exercise 3: `answer(block)` is the exponent of the block's scale."""
    given = {}
    for values in (*BLOCKS, *drawn(lambda rng: tuple((rng.standard_normal(3) * 10.0 ** rng.integers(-9, 9)).tolist()))):
        block = np.zeros(32, np.float32)
        block[: len(values)] = values
        given[values] = got = answer(block)
        if got is None:
            raise NotYet("exponent returns None: write its body.")
        if isinstance(got, bool) or not hasattr(got, "__float__") or float(got) != int(got):
            raise NotYet(f"for a block with {values} it is {got!r}; it must be a whole number.")
    for values, got in given.items():
        if int(got) != (want := _exponent(values)):
            hint = _scale_hint(max(map(abs, values)), int(got))
            raise NotYet(f"for a block with {values} it is {int(got)}, and {want} is right: {hint}")
    return "Nothing saturates, and no bit is given away."


@checker
def check_quantize(answer) -> str:
    """Exercise 4: `answer(x)` is (values, exponents) of the MXFP8 form of x."""
    x = _rows_to_quantize()
    given = run_kernel(answer, jnp.asarray(x))
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise NotYet("the answer must be (values, exponents).")
    values, exponents = (np.asarray(part) for part in given)
    largest = np.abs(x.reshape(len(x), -1, 32)).max(axis=2).T
    if exponents.shape != largest.shape:
        raise NotYet(f"exponents have shape {exponents.shape}; it must be {largest.shape}: a row for each block.")
    exact = np.vectorize(lambda most: _exponent((most,)))(largest)
    if (wrong := exponents != exact).any():
        block, row = np.argwhere(wrong)[0]
        raise NotYet(
            f"row {row}, block {block}: the exponent is {exponents[block, row]}, and {exact[block, row]} is right: "
            f"{_scale_hint(largest[block, row], exponents[block, row])}"
        )
    scaled = np.asarray(jnp.asarray(x * np.exp2(-exact.T.astype(np.float32)).repeat(32, axis=1), jnp.float8_e4m3fn))
    require_close(values, scaled, 1e-6, "the values")
    return "No logarithm: an exponent can be read from the bits of a float."


@checker
def check_columns(answer) -> str:
    """Exercise 5: `answer(tile_n, accumulators, scaled)` is the number of columns that are allocated, or None."""
    anything = lambda rng: (int(8 * rng.integers(1, 33)), int(rng.integers(1, 4)), bool(rng.integers(2)))
    given = {case: answer(*case) for case in (*COLUMNS, *drawn(anything))}
    if not any(given.values()):
        raise NotYet("columns returns 0 for all: write its body.")
    for case, got in given.items():
        if got is not None and (isinstance(got, bool) or not isinstance(got, int | np.integer)):
            raise NotYet(f"columns{case} is {got!r}; it must be a whole number, or None.")
        if got != (want := _columns(*case)):
            raise NotYet(f"columns{case} is {got}, and {want} is right. {_columns_hint(given)}")
    return "So two accumulators of 256 columns leave no room for scales."


def _columns(tile_n, accumulators, scaled):
    scales = 4 + 4 * math.ceil(tile_n / 128) if scaled else 0
    allocated = 32
    while allocated < accumulators * tile_n + scales:
        allocated *= 2
    return allocated if allocated <= 512 else None


def _columns_hint(given):
    def plainly(tile_n, accumulators, scaled):
        total = accumulators * tile_n + (4 + 4 * math.ceil(tile_n / 128) if scaled else 0)
        return total if total <= 512 else None

    def unscaled(tile_n, accumulators, scaled):
        return _columns(tile_n, accumulators, False)

    def unlimited(tile_n, accumulators, scaled):
        scales = 4 + 4 * math.ceil(tile_n / 128) if scaled else 0
        return max(32, 2 ** math.ceil(math.log2(accumulators * tile_n + scales)))

    likely = (
        (plainly, "It allocates powers of two, from 32 on."),
        (unscaled, "Scales take columns as well."),
        (unlimited, "There are 512 columns."),
    )
    for wrong, text in likely:
        if all(wrong(*case) == got for case, got in given.items()):
            return text
    return "Add up sums and scales, round up to a power of two, and compare with 512."


_HELD_HINTS = {
    "rows of A": "Each block has 128 rows of its own.",
    "columns of B": "Each block holds half of the columns, block 0 the first.",
    "columns of o": "A block multiplies its rows with both halves of B.",
}


def _held(row, col, tile_n, half):
    return (
        slice(row + half * 128, row + (half + 1) * 128),
        slice(col + half * tile_n // 2, col + (half + 1) * tile_n // 2),
        slice(col, col + tile_n),
    )


def _exponent(values):
    exponent = -200
    while max(map(abs, np.float32(values))) > 448 * 2.0**exponent:
        exponent += 1
    return exponent


def _scale_hint(largest, exponent):
    reached = float(largest) / 2.0 ** int(exponent)
    if reached > 448:
        return f"its largest value becomes {reached:.5g}, and e4m3 ends at 448: it saturates."
    return f"its largest value becomes {reached:.5g}, and half the scale would do."


def _rows_to_quantize():
    """(64, 128) of random values, in blocks of many sizes; the largest of some is 448 times a power of two, or just
    above."""
    x = np.asarray(normal(41, (ROWS, 128)))
    x = x * np.exp2(np.random.default_rng(42).integers(-20, 20, (ROWS, 4))).repeat(32, axis=1).astype(np.float32)
    for row, most in (
        (3, 448.0),
        (4, -448.0),
        (5, 448.0 * (1 + 2**-20)),
        (6, 3.5),
        (7, -7.25),
        (8, 2.0**-9),
        (9, 511.0),
    ):
        x[row, 32:64] = x[row, 32:64] * (0.9 * abs(most) / np.abs(x[row, 32:64]).max())
        x[row, 40] = most
    return x.astype(np.float32)


def _order_hint(problem: str) -> str:
    if re.search(r"waits at \S+:\d+ `pl\.loop\(first, count\)", problem):
        return "At the end a block waits for the fills of its own tiles, and for no others."
    if re.search(r"write at .* and write at", problem):
        return "Two blocks write to the same place: a tile's number says where in memory it is."
    if any(sign in problem for sign in ("never end", "race", "observed")):
        return "A slot follows from how many tiles this block has had before."
    return ""


def _loop_without_hardware(grid_names, *, thread_axis=None, cluster_axes=(), init_carry=None):
    """`plgpu.dynamic_scheduling_loop` for an interpreter: each block gets the tiles of its row of ORDER. Blocks without
    a row, whose launch is cancelled on a GPU, get none."""
    block = lax.axis_index(grid_names[0])
    count = sum(jnp.where(block == b, len(tiles), 0) for b, tiles in enumerate(ORDER))

    def tile_of(turn):
        of_all = [(b, t, tile) for b, tiles in enumerate(ORDER) for t, tile in enumerate(tiles)]
        return sum(jnp.where((block == b) & (turn == t), tile, 0) for b, t, tile in of_all)

    def loop(body):
        def one(turn, carry):
            info = types.SimpleNamespace(index=(tile_of(turn),), local_index=turn, num_local_steps=None)
            return body(info) or carry if init_carry is None else body(info, carry=carry)

        carry = lax.fori_loop(0, count, one, jnp.int32(0) if init_carry is None else init_carry)
        return None if init_carry is None else carry

    return loop


@contextlib.contextmanager
def _launch_control():
    with unittest.mock.patch.object(plgpu, "dynamic_scheduling_loop", _loop_without_hardware):
        yield
