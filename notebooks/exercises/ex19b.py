"""Chapter 19b's exercises: halves of a pair, tiles in any order, a scale of MXFP8 and a kernel for it."""

import contextlib
import functools
import inspect
import math
import re
import types
import unittest.mock

import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

PLACES = ((0, 0, 256), (256, 512, 256), (768, 192, 64), (1280, 96, 96))  # (row, col, tile_n)
BLOCKS = (
    (1.0,), (448.0,), (449.0,), (224.0, -3.0), (225.0,), (-500.0, 2.0), (0.01, 1e-5), (1e30, -3.0), (7.0, -7.5),
    (3.5,), (3.6,), (0.0, 1e-3), (255.0,), (256.0,), (448.0 + 2.0**-15,), (*(1.0,) * 31, -450.0),
)  # fmt: skip
# Exercise 2: the tiles of each block that runs, in the order in which hardware hands them out. The task has the first
# seven tiles; with the five others nothing is right for seven alone.
ORDERS = ((0, 3, 5, 6), (1, 4), (2,)), ((0,), (1, 3, 4), (2,))
ROWS = 64  # A tile has as many.


@checker
def check_held(answer) -> str:
    """Exercise 1: `answer(row, col, tile_n, half)` has three slices: rows of A, columns of B, columns of o."""

    @functools.wraps(answer)
    def borders(*case):
        given = answer(*case)
        if not isinstance(given, tuple | list) or [type(part) for part in given] != [slice] * 3:
            raise NotYet(f"held{case} is {given!r}; it must be three slices.")
        if any(part.step not in (None, 1) for part in given):
            raise NotYet(f"held{case} is {given!r}; a block holds all rows and columns between: no steps.")
        return tuple((part.start, part.stop) for part in given)

    def held(row, col, tile_n, half, *, own_rows=True, halves=True, all_sums=True):
        first_col, cols = col + half * tile_n // 2, tile_n // 2
        mine = (first_col, first_col + cols)
        rows = row + 128 * half * own_rows
        return (rows, rows + 128), mine if halves else (col, col + tile_n), (col, col + tile_n) if all_sums else mine

    likely = (
        (dict(own_rows=False), "Each block has 128 rows of its own."),
        (dict(halves=False), "Each block holds half of the columns of B, block 0 the first."),
        (dict(all_sums=False), "A block multiplies its rows with both halves of B, so it has all columns of o."),
    )
    said = "Rows of A, columns of B, columns of o, each as (first, end)."
    cases = [(*place, half) for place in PLACES for half in (0, 1)]
    draw = lambda rng: ((256, 32, 32, 1) * rng.integers(0, (8, 8, 8, 2)) + (0, 0, 32, 0)).tolist()
    require_answers(borders, cases, held, likely, said, draw=draw)
    return "Own rows, half of B, and sums of all columns: that is where the bytes are saved."


@checker
def check_order(answer) -> str:
    """Exercise 2: `answer(x)` is 2 x, computed tile by tile, whichever block gets a tile, and when."""
    answer = inspect.unwrap(answer)  # A trace that `jax.jit` keeps would have no stand-in for launch control.
    for order in ORDERS:
        _require_any_order(answer, order)
    return "The ring counts what this block has done, and the tile's number only says where in memory it is."


def _require_any_order(answer, order):
    tiles, sizes = sum(map(len, order)), set()
    stand_in = functools.partial(_launch_control, order, sizes)
    x = normal(21, (tiles * ROWS, ROWS), jnp.bfloat16)
    if "try_cluster_cancel" not in str(judge.jaxpr_of(answer, x)):
        raise NotYet("no launch is cancelled: keep plgpu.dynamic_scheduling_loop, which asks for the next tile.")
    try:
        out = run_kernel(answer, x, stand_ins=stand_in)
    except NotYet as problem:
        hint, said = _order_hint(str(problem)), str(problem)
        raise NotYet(f"{hint} {said[0].upper()}{said[1:]}" if hint else said) from problem
    require_close(out, 2 * np.asarray(x, np.float64), 1e-6, "twice x")
    _require_dtype(out, x.dtype, "twice x")
    with stand_in():
        (played,) = judge.play_kernel(answer, x)
    first, last = played[0], played[-1]
    if last.count("load") or last.count("store"):
        raise NotYet("a block whose launch is cancelled never runs, and its tile would be missing: use the loop.")
    if sizes != {tiles}:
        raise NotYet(f"the grid has {max(sizes)} blocks for {tiles} tiles: each tile needs one block.")
    for kind in ("load", "store"):
        if (found := _values(first, kind) / ROWS**2) != len(order[0]):
            raise NotYet(f"the first block {kind}s {found:g} tiles, and it gets {len(order[0])}.")
    judge.require_order([played])
    judge.require_rings([[first]], in_flight=2)
    judge.require_drained([played], "wait at the end for as many fills as this block has had, and for no fewer.")


def _values(block, kind: str) -> int:
    """Values that a block copies to shared memory ("load"), or from there ("store")."""
    return sum(math.prod(event.shape) for event in block.events if event.kind == kind)


def _require_dtype(out, dtype, what: str):
    if out.dtype != dtype:
        raise NotYet(f"{what}: the result is {out.dtype}; it must be {jnp.dtype(dtype)}.")


@checker
def check_exponent(answer) -> str:
    """Exercise 3: `answer(block)` is the exponent of the block's scale."""

    def block_of(values):
        return (np.pad(np.float32(values), (0, 32 - len(values))),)

    def whole(block):
        exponent = answer(block)
        return int(exponent) if exponent is not None and exponent == int(exponent) else exponent

    right = lambda block: _exponent(block.tolist())
    likely = (
        (lambda block: math.floor(math.log2(np.abs(block).max())) - 8, "Then some value is above 448, where e4m3 ends: "
         "it saturates."),
        (lambda block: math.floor(math.log2(np.abs(block).max())) - 7, "Half the scale would do for some blocks."),
        (lambda block: math.ceil(math.log2(max(block.max(), 1e-9) / 448)), "A negative value counts, too."),
    )  # fmt: skip
    said = "The largest absolute value over the scale is at most 448, and above 224."
    draw = lambda rng: block_of(rng.standard_normal(32) * 10.0 ** rng.integers(-9, 9))
    require_answers(functools.wraps(answer)(whole), map(block_of, BLOCKS), right, likely, said, draw=draw)
    return "Nothing saturates, and no bit is given away."


@checker
def check_quantize(answer) -> str:
    """Exercise 4: `answer(x)` is (values, exponents) of the MXFP8 form of x."""
    x = _rows_to_quantize()
    _require_quantized(answer, x[:, :64])
    _require_quantized(answer, x)
    return "No logarithm: an exponent can be read from the bits of a float."


def _require_quantized(answer, x):
    given = run_kernel(answer, jnp.asarray(x))
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise NotYet("the answer must be (values, exponents).")
    values, exponents = (np.asarray(part) for part in given)
    _require_dtype(values, jnp.float8_e4m3fn, "the values")
    _require_dtype(exponents, jnp.int32, "the exponents")
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
    ((block, *_),) = judge.play_kernel(answer, jnp.asarray(x))
    if (found := _values(block, "load")) > x.size:
        raise NotYet(f"{found} values are loaded of the {x.size} that x has: load each once.")


def _exponent(values):
    exponent = -200
    while max(map(abs, np.float32(values))) > 448 * 2.0**exponent:
        exponent += 1
    return exponent


def _scale_hint(largest, exponent):
    reached = float(largest) / 2.0 ** int(exponent)
    if reached > 448:
        return f"its largest value becomes {reached:.8g}, and e4m3 ends at 448: it saturates."
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
        (10, 448.0 + 2.0**-15),
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
        return "A stage follows from how many tiles this block has had before."
    return ""


def _loop_without_hardware(order, sizes, grid_names, *, thread_axis=None, cluster_axes=(), init_carry=None):
    """`plgpu.dynamic_scheduling_loop` for an interpreter: each block gets the tiles of its row of `order`. Blocks
    without a row, whose launch is cancelled on a GPU, get none. `sizes` collects the sizes of the grids that ask."""
    block = lax.axis_index(grid_names[0])
    sizes.add(int(lax.axis_size(grid_names[0])))
    count = sum(jnp.where(block == b, len(tiles), 0) for b, tiles in enumerate(order))

    def tile_of(turn):
        of_all = [(b, t, tile) for b, tiles in enumerate(order) for t, tile in enumerate(tiles)]
        return sum(jnp.where((block == b) & (turn == t), tile, 0) for b, t, tile in of_all)

    def loop(body):
        def one(turn, carry):
            info = types.SimpleNamespace(index=(tile_of(turn),), local_index=turn, num_local_steps=None)
            return body(info) or carry if init_carry is None else body(info, carry=carry)

        carry = lax.fori_loop(0, count, one, jnp.int32(0) if init_carry is None else init_carry)
        return None if init_carry is None else carry

    return loop


@contextlib.contextmanager
def _launch_control(order, sizes):
    loop = functools.partial(_loop_without_hardware, order, sizes)
    with unittest.mock.patch.object(plgpu, "dynamic_scheduling_loop", loop):
        yield
