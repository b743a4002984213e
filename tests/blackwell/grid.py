"""Configurations that together have every structure of the kernel of `cookbook.blackwell.kernel`."""

from cookbook.blackwell.plan import Config

SMALL = Config(tile_n=64, num_stages=2)

# For the interpreter: (M, N, K), whether b is given as (N, K), and the configuration. Four SMs have more tiles
# than blocks, so that slots, accumulators and pieces go on from tile to tile; there are tails in all three dimensions.
STRUCTURES = {
    "small": ((392, 200, 136), False, SMALL),
    "wide": ((136, 1160, 200), False, Config(tile_n=256, num_stages=2)),
    "one accumulator": ((392, 200, 72), True, Config(tile_n=64, num_accumulators=1)),
    "two store warpgroups": ((264, 520, 72), False, Config(tile_n=128, epilogue_wgs=2)),
    "narrow": ((520, 77, 72), True, Config(tile_n=32, store_slots=1, num_stages=3)),
    "narrow pieces": ((264, 328, 72), True, Config(tile_n=96, epilogue_tile_n=16, store_slots=3, epilogue_wgs=2)),
    "snake along N": ((520, 392, 72), True, Config(tile_n=64, grid_minor_dim=1, grid_tile_width=2)),
    "more stages than steps": ((130, 77, 72), True, Config(tile_n=64, num_stages=6)),
}
SLOW = {"wide", "narrow", "snake along N", "more stages than steps"}  # Others differ from each in one thing alone.

# For the compiler: every rung, with narrow and wide tiles.
WIDTHS = (64, 128, 256)
RUNGS = {
    "one CTA": {},
    "one accumulator": dict(num_accumulators=1),
    "two store warpgroups": dict(epilogue_wgs=2),
    "launch control": dict(schedule="dynamic"),
    "two CTAs": dict(two_ctas=True),
    "two CTAs, launch control": dict(two_ctas=True, schedule="dynamic"),
    "two CTAs, two store warpgroups": dict(two_ctas=True, epilogue_wgs=2),
}


def of_rung(rung: str, width: int) -> Config:
    return Config(tile_n=width, **RUNGS[rung])
