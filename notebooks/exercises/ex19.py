"""Chapter 19's exercises: columns of tensor memory, halves of a pair, two warpgroups of a kernel, a scale of MXFP8."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_close, run_kernel
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook._mgpu import Ring, rem

COLUMNS = (
    (256, 2, False), (256, 2, True), (256, 1, True), (192, 2, True), (240, 2, True), (248, 2, True), (128, 2, False),
    (128, 2, True), (64, 1, False), (64, 1, True), (16, 1, False), (16, 2, True), (160, 3, False), (176, 3, False),
)  # fmt: skip
PLACES = ((0, 0, 256), (256, 512, 256), (768, 192, 64), (1280, 96, 96))  # (row, col, tile_n)
BLOCKS = (
    (1.0,), (448.0,), (449.0,), (224.0, -3.0), (225.0,), (-500.0, 2.0), (0.01, 1e-5), (1e30, -3.0), (7.0, -7.5),
    (3.5,), (3.6,), (0.0, 1e-3), (255.0,), (256.0,),
)  # fmt: skip

# Exercises 3 and 4: the kernel's tile, its slots and accumulators, and tiles, all of one block.
SIDE, TILE_K, STAGES, ACCUMULATORS, TILES, STEPS = 128, 64, 2, 3, 5, 2
LOAD, MULTIPLY, STORE = 0, 1, 2


@checker
def check_columns(answer) -> str:
    """Exercise 1: `answer(tile_n, accumulators, scaled)` is the number of columns that are allocated, or None."""
    given = {case: answer(*case) for case in COLUMNS}
    if not any(given.values()):
        raise NotYet("columns returns 0 for all: write its body.")
    for case, got in given.items():
        if got is not None and (isinstance(got, bool) or not isinstance(got, int | np.integer)):
            raise NotYet(f"columns{case} is {got!r}; it must be a whole number, or None.")
        if got != (want := _columns(*case)):
            raise NotYet(f"columns{case} is {got}, and {want} is right. {_columns_hint(given)}")
    return "So two accumulators of 256 columns leave no room for scales."


@checker
def check_held(answer) -> str:
    """Exercise 2: `answer(row, col, tile_n, half)` has three slices: rows of A, columns of B, columns of o."""
    for place in PLACES:
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
def check_multiply(answer) -> str:
    """Exercise 3: `answer(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, steps)` multiplies one tile."""
    a, b = normal(31, (SIDE, STEPS * TILE_K), jnp.bfloat16), normal(32, (TILES * STEPS * TILE_K, SIDE), jnp.bfloat16)
    kernel = lambda a, b: _kernel(a, b, answer, _store_plainly)
    _require_calls(kernel, a, b, tcgen05_mma="nothing is multiplied yet: write the body of multiply.",
                   tcgen05_commit_arrive="nobody tells the store warpgroup that the sums are done, and it would wait "
                   "for ever: commit to summed.")  # fmt: skip
    require_close(run_kernel(kernel, a, b), _products(a, b), 1e-2, "the products")
    return "The accumulators take turns, and none is overwritten before it has been loaded."


@checker
def check_store(answer) -> str:
    """Exercise 4: `answer(acc_tmem, o_smem, o_gmem)` stores the squares of a tile's sums."""
    a, b = normal(41, (SIDE, STEPS * TILE_K), jnp.bfloat16), normal(42, (TILES * STEPS * TILE_K, SIDE), jnp.bfloat16)
    kernel = lambda a, b: _kernel(a, b, _multiply, answer, accumulators=1)
    _require_calls(kernel, a, b, copy_smem_to_gmem="nothing is stored yet: write the body of store_squares.")
    require_close(run_kernel(kernel, a, b), _products(a, b) ** 2, 3e-2, "the squares")
    return "Squared on the way out, while the tensor cores go on."


@checker
def check_exponent(answer) -> str:
    """Exercise 5: `answer(block)` is the exponent of the block's scale."""
    given = {}
    for values in BLOCKS:
        block = np.zeros(32, np.float32)
        block[: len(values)] = values
        given[values] = got = answer(block)
        if got is None:
            raise NotYet("exponent returns None: write its body.")
        if isinstance(got, bool) or not hasattr(got, "__float__") or float(got) != int(got):
            raise NotYet(f"for a block with {values} it is {got!r}; it must be a whole number.")
    for values, got in given.items():
        if int(got) != (want := _exponent(values)):
            reached = max(map(abs, values)) / 2.0 ** int(got)
            hint = (
                f"its largest value becomes {reached:.5g}, and e4m3 ends at 448: it saturates."
                if reached > 448
                else f"its largest value becomes {reached:.5g}, and half the scale would do."
            )
            raise NotYet(f"for a block with {values} it is {int(got)}, and {want} is right: {hint}")
    return "Nothing saturates, and no bit is given away."


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


def _products(a, b):
    """One product for each tile, one below the other."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64).reshape(TILES, -1, SIDE)
    return (a @ b).reshape(-1, SIDE)


def _require_calls(kernel, *args, **missing):
    """Raises NotYet with the message of an operation that `kernel` never calls: run, it would wait for ever."""
    traced = str(jax.make_jaxpr(kernel)(*args))
    for operation, message in missing.items():
        if operation not in traced:
            raise NotYet(message)


def _multiply(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, steps, accumulators=1):
    """The multiply warpgroup that exercise 4 is given."""
    mine = rem(turn, accumulators)
    pl.when(turn >= accumulators)(lambda: plgpu.barrier_wait(stored.at[mine]))

    @pl.loop(0, steps)
    def _(step):
        slot = ring.wait(turn * steps + step)
        acc = acc_tmem.at[:, pl.ds(mine * SIDE, SIDE)]
        plgpu.tcgen05_mma(acc, a_smem.at[slot], b_smem.at[slot], ring.freed.at[slot], accumulate=step > 0)

    plgpu.tcgen05_commit_arrive(summed.at[mine])


def _store_plainly(acc_tmem, o_smem, o_gmem):
    """The store warpgroup that exercise 3 is given."""
    for at in range(0, SIDE, 64):
        values = plgpu.async_load_tmem(acc_tmem.at[:, pl.ds(at, 64)], layout=plgpu.Layout.TCGEN05)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[...] = values.astype(o_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[:, pl.ds(at, 64)])
    plgpu.wait_load_tmem()


def _kernel(a, b, multiply, store, accumulators=ACCUMULATORS):
    """A block that multiplies `a` by each of the TILES matrices that lie in `b` one below the other."""

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc_tmem, filled, freed, summed, stored):
        role, ring = lax.axis_index("role"), Ring(filled, freed, STAGES)

        @pl.loop(0, TILES)
        def _(turn):
            mine = rem(turn, accumulators)

            @pl.when(role == LOAD)
            def _():
                @pl.loop(0, STEPS)
                def _(step):
                    slot = ring.fill(turn * STEPS + step)
                    plgpu.copy_gmem_to_smem(
                        a_gmem.at[:, pl.ds(step * TILE_K, TILE_K)], a_smem.at[slot], filled.at[slot]
                    )
                    rows = pl.ds((turn * STEPS + step) * TILE_K, TILE_K)
                    plgpu.copy_gmem_to_smem(b_gmem.at[rows], b_smem.at[slot], filled.at[slot])

            @pl.when(role == MULTIPLY)
            def _():
                multiply(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, STEPS)

            @pl.when(role == STORE)
            def _():
                plgpu.barrier_wait(summed.at[mine])
                sums = acc_tmem.at[:, pl.ds(mine * SIDE, SIDE)]
                store(sums, o_smem, o_gmem.at[pl.ds(turn * SIDE, SIDE)])
                plgpu.barrier_arrive(stored.at[mine])

        pl.when(role == LOAD)(lambda: ring.drain(TILES * STEPS))

        @pl.when(role == MULTIPLY)
        def _():
            @pl.loop(TILES - accumulators, TILES)
            def _(turn):
                plgpu.barrier_wait(stored.at[rem(turn, accumulators)])

        pl.when(role == STORE)(lambda: plgpu.wait_smem_to_gmem(0))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((TILES * SIDE, SIDE), jnp.bfloat16),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((STAGES, SIDE, TILE_K), a.dtype),
            plgpu.SMEM((STAGES, TILE_K, SIDE), b.dtype),
            plgpu.SMEM((SIDE, 64), jnp.bfloat16),
            plgpu.TMEM((SIDE, ACCUMULATORS * SIDE), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=ACCUMULATORS, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=ACCUMULATORS, orders_tensor_core=True),
        ],
    )(a, b)
