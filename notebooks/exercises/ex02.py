"""Checkers of the exercises of chapter 2."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, drawn, normal, require_answers, require_close, run_kernel, wide
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook

TILE, STAGES = (16, 256), 3  # Tile and stages of the ring of exercise 2.
SMEM_BYTES = 232_448  # Shared memory that one block may use on Hopper.
BY_TMA = "the result must leave by TMA: write it to shared memory, and send it with copy_smem_to_gmem"
PITCHES = (4, 8, 12, 16, 24, 80, 96, 128, 132, 144, 192, 256, 260, 512, 1024, 4100)
RINGS = (  # Arguments of `num_stages`.
    (2.0e12, 1.0e-6, 125, 16_000, 0), (2.1e12, 1.0e-6, 125, 16_000, 0), (2.1e12, 1.0e-6, 125, 16_000, 1),
    (2.4e12, 0.8e-6, 132, 8192, 2), (4.8e12, 1.1e-6, 148, 4096, 1), (2.4e12, 0.9e-6, 132, 65536, 0),
    (8.0e12, 2.0e-6, 16, 32768, 1),
)  # fmt: skip


@checker
def check_sum_by_tma(answer) -> str:
    """`answer(x, y)` is a kernel that adds two bfloat16 arrays of (16 n, 256) through SMEM, 16 rows per block, with one
    barrier for both loads."""
    for num_tiles in (3, _any_number()):
        shape = num_tiles * TILE[0], TILE[1]
        x, y = (normal(seed, shape, jnp.bfloat16) for seed in (5, 6))
        try:
            out = run_kernel(answer, x, y, copies={"load": 2, "store": 1})
        except NotYet as problem:
            if "no threads observed" not in str(problem):
                raise
            raise NotYet("the barrier flips twice and one wait sees one flip: it must expect two arrivals") from problem
        judge.require_staged(answer, x, y, loads=2)
        require_close(out, wide(x) + wide(y), 2**-8, f"bf16{list(shape)}")
    _require_sent(answer, x, y, stores=1)
    _require_one_tile_per_block(answer, x, y)
    praise = "Two arrivals, one flip, and the TMA sees the sums."
    return praise + judge.speed(answer, cookbook.add, *(jax.ShapeDtypeStruct((1 << 16, TILE[1]), x.dtype),) * 2)


def _require_sent(answer, *args, stores: int) -> None:
    """Raises NotYet unless each block writes global memory by `stores` copies, and by no other way."""
    for equation in judge.equations(judge.jaxpr_of(answer, *args)):
        if equation.primitive.name in ("swap", "store", "addupdate") and "gmem" in str(equation.invars[0].aval):
            raise NotYet(f"a register is stored directly to global memory: {BY_TMA}")
    for block in itertools.chain.from_iterable(judge.play_kernel(answer, *args)):
        if (count := block.count("store")) != stores:
            raise NotYet(f"a block starts {count} copies out, and must start {stores}: {BY_TMA}")


def _require_one_tile_per_block(answer, x, y) -> None:
    played = judge.play_kernel(answer, x, y)
    for block in itertools.chain.from_iterable(played):
        for load in (event for event in block.events if event.kind == "load"):
            if tuple(load.shape) != TILE:
                raise NotYet(f"a block loads a tile of {tuple(load.shape)}; it must be {TILE}, one tile per block")
    judge.require_loads_together(played)
    for block in itertools.chain.from_iterable(played):
        if block.count("wait") > 1:
            raise NotYet("it waits more than once: let both loads arrive at one barrier, and wait for it once")


@checker
def check_ring(answer) -> str:
    """`answer(x_gmem, o_gmem, stages, arrived, num_tiles)` negates its tiles, without a race.

    It is the body of a kernel of one warpgroup: `x_gmem` and `o_gmem` are (16 * num_tiles, 256) in bfloat16, `stages`
    is SMEM of (3, 16, 256), `arrived` three barriers of one arrival each.
    """

    def ring(x):
        def kernel(x_gmem, o_gmem, stages, arrived):
            answer(x_gmem, o_gmem, stages, arrived, x.shape[0] // TILE[0])

        return plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[plgpu.SMEM((STAGES, *TILE), x.dtype), plgpu.Barrier(num_barriers=STAGES)],
        )(x)

    # Not a multiple of the ring's length, where its order is judged, too; the ring just filled; and any number.
    for num_tiles in (7, STAGES, _any_number()):
        x = normal(num_tiles, (num_tiles * TILE[0], TILE[1]), jnp.bfloat16)
        try:
            out = run_kernel(ring, x, in_flight=STAGES, report_first=True)
        except NotYet as problem:
            if "copy_smem_to_gmem read-side operations" not in str(problem):
                raise
            raise NotYet("the kernel ends before its last copies to GMEM do: wait for all of them.") from problem
        wrong = (np.asarray(out) != np.asarray(-x)).reshape(num_tiles, -1).any(axis=1)
        if wrong.any():
            tiles = ", ".join(map(str, np.flatnonzero(wrong)))
            raise NotYet(
                f"with {num_tiles} tiles, the result is wrong in tile {tiles}: never written, or of other data?"
            )
        if num_tiles == 7:
            judge.require_staged(ring, x, loads=1)
            _require_sent(ring, x, stores=num_tiles)
            _require_loads_in_flight(ring, x)
    praise = "Every access to a stage is ordered, whatever the speed of the copies."
    return praise + judge.speed(
        ring, cookbook.fuse(jnp.negative), jax.ShapeDtypeStruct((1024 * TILE[0], TILE[1]), jnp.bfloat16)
    )


def _require_loads_in_flight(ring, x) -> None:
    """Raises NotYet if no later tile is being loaded when a tile leaves that is not the last."""
    for block in itertools.chain.from_iterable(judge.play_kernel(ring, x)):
        loads = sent = 0
        for event in block.events:
            loads, sent = loads + (event.kind == "load"), sent + (event.kind == "store")
            if event.kind == "store" and loads <= sent < block.count("store"):
                raise NotYet(
                    f"no load is in flight while tile {sent - 1} is negated: refill one stage in every step, not all "
                    "of them when the last is empty"
                )


@checker
def check_conflict_degree(answer) -> str:
    """`answer(pitch_bytes)` is how many turns a warp takes to read a column of 4-byte elements.

    Lane i reads 4 bytes at `i * pitch_bytes`, a multiple of 4; shared memory has 32 banks of 4 bytes.
    """
    turns = lambda pitch_bytes: int(np.bincount(np.arange(32) * (pitch_bytes // 4) % 32).max())
    pitches, said = [(pitch,) for pitch in PITCHES], "Write down the banks of lanes 0, 1, 2, 3, ..."
    draw = lambda rng: (4 * int(rng.integers(1, 2000)),)
    require_answers(answer, pitches, turns, otherwise=said, draw=draw)
    best = min(turns(pitch) for pitch in range(16, 4096, 16))
    return f"TMA copies rows of a multiple of 16 bytes, so padding alone gets such a column to {best} turns, not to 1."


@checker
def check_num_stages(answer) -> str:
    """`answer(bytes_per_second, load_s, num_sms, tile_bytes, lag)` is the least number of stages of a ring.

    They keep enough loads in flight, with one block per SM; or they are as many as fit into shared memory.
    """
    no_lag = lambda *case: _num_stages(*case[:4], 0)
    likely = (
        (no_lag, "A ring that refills so many tiles late has as many loads fewer than stages."),
        (lambda rate, seconds, _, *rest: _num_stages(rate, seconds, 1, *rest), "Each SM has its share in flight."),
        (dict(most=1 << 40), f"The {SMEM_BYTES:,} bytes of shared memory hold only so many stages."),
        (dict(up=0), "Part of a tile cannot be in flight: round up."),
        (dict(least=2), "One load may be enough."),
    )
    said = "Bytes in flight of one SM, over bytes of one tile, and the lag."
    require_answers(answer, RINGS, _num_stages, likely, said, draw=_ring)
    return "As many loads in flight as the latency asks for, and the stages that the lag keeps."


def _any_number() -> int:
    """Tiles that nobody knows beforehand, more than the ring has stages."""
    return drawn(lambda rng: int(rng.integers(STAGES + 1, 4 * STAGES)), times=1)[0]


def _ring(rng):
    """A case with `loads` and half a tile in flight, per SM and in sum, so that no rounding of floats decides it."""
    load_s, half_sms, tile_bytes, lag = rng.uniform(5e-7, 2e-6), *rng.integers((4, 512, 0), (80, 60_000, 4)).tolist()
    loads, num_sms = rng.integers(0, 12) + 0.5, 2 * half_sms + 1
    return loads * tile_bytes * num_sms / load_s, load_s, num_sms, tile_bytes, lag


def _num_stages(bytes_per_second, load_s, num_sms, tile_bytes, lag, least=1, most=SMEM_BYTES, up=1) -> int:
    in_flight = round(bytes_per_second * load_s / num_sms)  # Rounded, because 1e-6 is not a binary number.
    loads = -(-in_flight // tile_bytes) if up else in_flight // tile_bytes
    return min(max(least, loads) + lag, most // tile_bytes)
