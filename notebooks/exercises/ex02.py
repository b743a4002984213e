"""The checkers of the exercises of chapter 2."""

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, run_kernel
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE, STAGES = (16, 256), 3  # Tile and slots of exercise 1.
SMEM_BYTES = 232_448  # Shared memory that one block may use on Hopper.


@checker
def check_ring(answer) -> str:
    """Exercise 1: `answer(x_gmem, o_gmem, slots, arrived, num_tiles)` negates its tiles, without a race.

    It is the body of a kernel of one warpgroup: `x_gmem` and `o_gmem` are (16 * num_tiles, 256) in bfloat16, `slots`
    is SMEM of (3, 16, 256), `arrived` three barriers of one arrival each.
    """

    def ring(x):
        def kernel(x_gmem, o_gmem, slots, arrived):
            answer(x_gmem, o_gmem, slots, arrived, x.shape[0] // TILE[0])

        return plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[plgpu.SMEM((STAGES, *TILE), x.dtype), plgpu.Barrier(num_barriers=STAGES)],
        )(x)

    for num_tiles in (7, STAGES):  # No multiple of the ring's length, and the ring just filled.
        x = normal(num_tiles, (num_tiles * TILE[0], TILE[1]), jnp.bfloat16)
        try:
            out = run_kernel(ring, x)
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
    return "every access to a slot is ordered, whatever the speed of the copies."


@checker
def check_conflict_degree(answer) -> str:
    """Exercise 2: `answer(pitch_bytes)` is how many turns a warp takes to read a column of 4-byte elements.

    Lane i reads 4 bytes at `i * pitch_bytes`, a multiple of 4; shared memory has 32 banks of 4 bytes.
    """
    for pitch in (4, 8, 12, 16, 24, 80, 96, 128, 132, 144, 192, 256, 260, 512, 1024, 4100):
        want = int(np.bincount(np.arange(32) * (pitch // 4) % 32).max())  # 32 different words, lane by lane.
        if (got := answer(pitch)) != want:
            raise NotYet(f"at {pitch} bytes a row it gives {got!r}: write down the banks of lanes 0, 1, 2, 3, ...")
    best = min(int(np.bincount(np.arange(32) * (pitch // 4) % 32).max()) for pitch in range(16, 4096, 16))
    return f"and TMA's rule of 16 bytes means that padding alone gets such a column down to {best} turns, not to 1."


@checker
def check_num_stages(answer) -> str:
    """Exercise 3: `answer(bytes_per_second, latency_s, num_sms, tile_bytes)` is the least depth of a ring that hides
    the latency, with one block an SM; or as many slots as fit into shared memory, if those are too few."""
    for case, hint in (
        ((2.0e12, 1.0e-6, 125, 16_000), "as many bytes in flight as Little's law asks for are enough"),
        ((2.1e12, 1.0e-6, 125, 16_000), "part of a slot holds no tile: round to the side that hides the latency"),
        ((2.4e12, 0.8e-6, 132, 8192), "bytes in flight of one SM, over bytes of one slot"),
        ((4.8e12, 1.1e-6, 148, 4096), "bytes in flight of one SM, over bytes of one slot"),
        ((2.4e12, 0.9e-6, 132, 65536), "one slot may be enough"),
        ((8.0e12, 2.0e-6, 16, 32768), f"the {SMEM_BYTES:,} bytes of shared memory hold only so many slots"),
    ):
        if (got := answer(*case)) != (want := _num_stages(*case)):
            rate, latency, num_sms, tile_bytes = case
            problem = f"for {rate / 1e12} TB/s, {latency * 1e6:.1f} µs, {num_sms} SMs and slots of {tile_bytes:,} bytes"
            if not isinstance(got, int | float):
                raise NotYet(f"{problem} it gives {got!r}, not a number")
            raise NotYet(f"{problem} it gives {got}, too {'few' if got < want else 'many'}. Hint: {hint}.")
    return "the ring is as deep as the latency asks, and no deeper."


def _num_stages(bytes_per_second, latency_s, num_sms, tile_bytes) -> int:
    in_flight = round(bytes_per_second * latency_s / num_sms)  # Rounded: 1e-6 is no binary number.
    return min(max(1, -(-in_flight // tile_bytes)), SMEM_BYTES // tile_bytes)
