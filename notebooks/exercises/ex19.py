"""Chapter 19's exercises: a commit that comes too early, when tiles start, and two warpgroups of a kernel."""

import contextlib
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook._device import Ring, rem

# (tiles, accumulators, time of a tile's products, time of its store).
SCHEDULES = ((5, 1, 3, 1), (5, 2, 3, 1), (6, 2, 2, 2), (6, 2, 1, 3), (7, 3, 1, 2), (3, 4, 1, 2), (1, 2, 4, 1))

# Exercises 3 and 4: the kernel's tile, its stages and accumulators, and tiles, all of one block.
SIDE, TILE_K, STAGES, ACCUMULATORS, TILES, STEPS = 128, 64, 2, 3, 5, 2
LOAD, MULTIPLY, STORE = 0, 1, 2
QUARTER = 32  # Columns of each buffer of exercise 4.


@checker
def check_commit(answer) -> str:
    """Exercise 1: `answer(a, b)` is a @ b, summed in two halves whose products share one barrier."""
    a, b = normal(11, (SIDE, 3 * TILE_K), jnp.bfloat16), normal(12, (3 * TILE_K, SIDE), jnp.bfloat16)
    _require_calls(answer, a, b, tcgen05_mma="nothing is multiplied: keep both products of the step.",
                   async_load="nothing is loaded from tensor memory: keep the last lines.")  # fmt: skip
    try:
        out = run_kernel(answer, a, b, stand_ins=_commits_of_their_own, report_first=True)
    except NotYet as problem:
        raise NotYet(_commit_hint(str(problem))) from problem
    require_close(out, wide(a) @ wide(b), 1e-2, "the product")
    return "One arrival for each step, after both products, and one wait for each arrival."


@checker
def check_starts(answer) -> str:
    """Exercise 2: `answer(tiles, accumulators, multiply, store)` lists when the products of each tile start."""
    likely = (
        (dict(waits=False), "Its accumulator is one that an earlier tile has to leave first."),
        (dict(in_turn=False), "One warpgroup stores, one tile after the other."),
        (lambda tiles, _, *times: _starts(tiles, 1, *times), "The tile before it may be in another accumulator."),
    )
    said = "It waits for the products of the tile before, and for the store of the tile whose accumulator it gets."
    draw = lambda rng: rng.integers(1, 7, 4).tolist()
    require_answers(answer, SCHEDULES, _starts, likely, said, draw=draw)
    return "Where a store takes longer than a tile's products, more accumulators only put off the wait."


@checker
def check_multiply(answer) -> str:
    """Exercise 3: `answer(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, steps)` multiplies one tile."""
    a, b = normal(31, (SIDE, STEPS * TILE_K), jnp.bfloat16), normal(32, (TILES * STEPS * TILE_K, SIDE), jnp.bfloat16)
    kernel = lambda a, b: _kernel(a, b, answer, _store_plainly)
    _require_calls(kernel, a, b, tcgen05_mma="nothing is multiplied yet: write the body of multiply.",
                   tcgen05_commit_arrive="nobody tells the store warpgroup that the sums are done, and it would wait "
                   "for ever: commit to summed.")  # fmt: skip
    require_close(run_kernel(kernel, a, b), _products(a, b), 1e-2, "the products")
    calls = _calls(answer, lambda answer: judge.jaxpr_of(lambda a, b: _kernel(a, b, answer, _store_plainly), a, b))
    if calls.count("barrier_wait") > calls.count("tcgen05_mma") + 1:
        raise NotYet("it waits more than once per step and once per tile: the tensor cores tell of a product's end.")
    steps = STEPS + 1
    a, b = normal(33, (SIDE, steps * TILE_K), jnp.bfloat16), normal(34, (3 * steps * TILE_K, SIDE), jnp.bfloat16)
    require_close(run_kernel(kernel, a, b), _products(a, b), 1e-2, f"the products of tiles with {steps} steps")
    return "The accumulators take turns, and none is overwritten before it has been loaded."


@checker
def check_store(answer) -> str:
    """Exercise 4: `answer(acc_tmem, o_smem, o_gmem)` stores the squares of a tile's sums."""
    rng = np.random.default_rng(41)  # Few bits of each value are set, so sums and squares are exact in float32.
    shapes = (SIDE, STEPS * TILE_K), (2 * STEPS * TILE_K, SIDE)  # Two tiles.
    a, b = (jnp.asarray(rng.integers(-9, 10, shape) / 8, jnp.bfloat16) for shape in shapes)
    buffers = plgpu.SMEM((2, SIDE, QUARTER), jnp.bfloat16)
    kernel = lambda a, b: _kernel(a, b, _multiply, answer, accumulators=1, o_smem=buffers)
    _require_calls(kernel, a, b, copy_smem_to_gmem="nothing is stored yet: write the body of store_squares.")
    race = "the next tile's products may overwrite sums still being loaded, a race: call plgpu.wait_load_tmem()."
    _require_calls(kernel, a, b, wait_load_tmem=race)  # The interpreter sees this race in some orders only.
    sums = _products(a, b)
    out = run_kernel(kernel, a, b)
    if out.shape == sums.shape and (wide(out) == _rounded(_rounded(sums) ** 2)).all():
        raise NotYet("the sums are rounded to bfloat16 before they are squared: square in float32, and round once.")
    require_close(out, _rounded(sums**2), 0, "the squares")
    stored = lambda answer: _kernel(a, b, _multiply, answer, accumulators=1, o_smem=buffers)
    calls = _calls(answer, lambda answer: jax.eval_shape(lambda: stored(answer)))
    last = {name: len(calls) - calls[::-1].index(name) for name in ("async_load_tmem", "wait_load_tmem")}
    if last["wait_load_tmem"] < last["async_load_tmem"]:
        raise NotYet(race)
    copies = calls[: len(calls) - calls[::-1].index("copy_smem_to_gmem")]
    if "wait for 1" not in calls or "wait for 0" in copies:
        raise NotYet("no quarter is written while the one before is stored: leave one in flight, wait_smem_to_gmem(1).")
    return "Squared on the way out, while the tensor cores go on."


def _calls(answer, trace) -> list[str]:
    """The operations that `answer` asks for, in their order, while `trace(answer)` traces a kernel with it; a wait for
    stores with how many it leaves in flight."""
    calls, names = [], ("tcgen05_mma", "barrier_wait", "async_load_tmem", "wait_load_tmem", "copy_smem_to_gmem")

    def noted(name, operation):
        return lambda *args, **how: calls.append(name) or operation(*args, **how)

    def waited(n, **how):
        calls.append(f"wait for {n}")
        return wait(n, **how)

    def noting(*args):
        calls.clear()
        with contextlib.ExitStack() as patches:
            for name in names:
                patches.enter_context(unittest.mock.patch.object(plgpu, name, noted(name, getattr(plgpu, name))))
            patches.enter_context(unittest.mock.patch.object(plgpu, "wait_smem_to_gmem", waited))
            return answer(*args)

    wait = plgpu.wait_smem_to_gmem
    trace(noting)
    return calls


def _commit_hint(problem: str) -> str:
    """A kernel's fault in its waits and commits, from the interpreter's `problem`."""
    if "deallocated" in problem or "async_load_tmem" in problem:
        return "The sums are loaded before the last products have ended: nobody waits for the last arrival at `freed`."
    if "no threads observed" in problem:
        return "The tensor cores arrive at `freed` again before anybody has waited for the arrival before."
    if "race" in problem:
        return (
            "A commit covers the products that were started before it, and no other. A stage is filled again while "
            f"a product reads it: {problem}"
        )
    return f"Each arrival at `freed` is waited for once: {problem}" if "never end" in problem else problem


@contextlib.contextmanager
def _commits_of_their_own():
    """A barrier in a product's own line becomes a commit after it. On a GPU it is one; the interpreter has the barrier
    tell of that product alone."""
    multiply = plgpu.tcgen05_mma

    def mma(acc, a, b, barrier=None, **how):
        multiply(acc, a, b, **how)
        if barrier is not None:
            plgpu.tcgen05_commit_arrive(barrier)

    with unittest.mock.patch.object(plgpu, "tcgen05_mma", mma):
        yield


def _starts(tiles, accumulators, multiply, store, *, waits=True, in_turn=True):
    starts, stored = [], []
    for tile in range(tiles):
        start = starts[-1] + multiply if starts else 0
        if waits and tile >= accumulators:
            start = max(start, stored[tile - accumulators])
        starts.append(start)
        stored.append(max(start + multiply, stored[-1] if stored and in_turn else 0) + store)
    return [float(time) for time in starts]


def _products(a, b):
    """One product for each tile, one below the other."""
    return (wide(a) @ wide(b).reshape(-1, a.shape[1], SIDE)).reshape(-1, SIDE)


def _rounded(x):
    return wide(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16))


def _require_calls(kernel, *args, **missing):
    """Raises NotYet with the message of an operation that `kernel` never calls: run, it would wait for ever."""
    traced = str(judge.jaxpr_of(kernel, *args))
    for operation, message in missing.items():
        if operation not in traced:
            raise NotYet(message)


def _multiply(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, steps, accumulators=1):
    """The multiply warpgroup that exercise 4 is given."""
    mine = rem(turn, accumulators)
    pl.when(turn >= accumulators)(lambda: plgpu.barrier_wait(stored.at[mine]))

    @pl.loop(0, steps)
    def _(step):
        stage = ring.wait(turn * steps + step)
        acc = acc_tmem.at[:, pl.ds(mine * SIDE, SIDE)]
        plgpu.tcgen05_mma(acc, a_smem.at[stage], b_smem.at[stage], ring.freed.at[stage], accumulate=step > 0)

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


def _kernel(a, b, multiply, store, accumulators=ACCUMULATORS, o_smem=None):
    """A block that multiplies `a` by each of the matrices that lie in `b` one below the other."""
    steps = a.shape[1] // TILE_K
    tiles = b.shape[0] // a.shape[1]

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc_tmem, filled, freed, summed, stored):
        role, ring = lax.axis_index("role"), Ring(filled, freed, STAGES)

        @pl.loop(0, tiles)
        def _(turn):
            mine = rem(turn, accumulators)

            @pl.when(role == LOAD)
            def _():
                @pl.loop(0, steps)
                def _(step):
                    stage = ring.acquire(turn * steps + step)
                    plgpu.copy_gmem_to_smem(
                        a_gmem.at[:, pl.ds(step * TILE_K, TILE_K)], a_smem.at[stage], filled.at[stage]
                    )
                    rows = pl.ds((turn * steps + step) * TILE_K, TILE_K)
                    plgpu.copy_gmem_to_smem(b_gmem.at[rows], b_smem.at[stage], filled.at[stage])

            @pl.when(role == MULTIPLY)
            def _():
                multiply(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, steps)

            @pl.when(role == STORE)
            def _():
                plgpu.barrier_wait(summed.at[mine])
                sums = acc_tmem.at[:, pl.ds(mine * SIDE, SIDE)]
                store(sums, o_smem, o_gmem.at[pl.ds(turn * SIDE, SIDE)])
                plgpu.barrier_arrive(stored.at[mine])

        pl.when(role == LOAD)(lambda: ring.drain(tiles * steps))

        @pl.when(role == MULTIPLY)
        def _():
            @pl.loop(tiles - accumulators, tiles)
            def _(turn):
                plgpu.barrier_wait(stored.at[rem(turn, accumulators)])

        pl.when(role == STORE)(lambda: plgpu.wait_smem_to_gmem(0))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles * SIDE, SIDE), jnp.bfloat16),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((STAGES, SIDE, TILE_K), a.dtype),
            plgpu.SMEM((STAGES, TILE_K, SIDE), b.dtype),
            o_smem or plgpu.SMEM((SIDE, 64), jnp.bfloat16),
            plgpu.TMEM((SIDE, ACCUMULATORS * SIDE), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=ACCUMULATORS, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=ACCUMULATORS, orders_tensor_core=True),
        ],
    )(a, b)
