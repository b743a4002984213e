"""Configurations that together have every structure of the kernel of `cookbook.gemm.kernel`."""

from cookbook.gemm.plan import Config

SMALL = Config(64, 128, split_dim=1)  # The least that two warpgroups can share out.

# (M, N, K), whether b is given as (N, K), and the configuration. Four SMs have more tiles than clusters, so that slots,
# barriers and pieces go on from tile to tile; there are tails in all three dimensions.
STRUCTURES = {
    "small": ((130, 264, 200), False, SMALL),
    "two stages": ((260, 264, 200), False, Config(num_stages=2, store_slots=3)),
    "snake along N": ((520, 264, 72), False, Config(256, 128, grid_minor_dim=1, grid_tile_width=1, store_slots=1)),
    "more slots than pieces": ((130, 520, 72), False, Config(64, 256, split_dim=1, store_slots=4)),
    "more stages than steps": ((130, 77, 72), True, Config(64, 32, split_dim=1, num_stages=9)),
    "tiles of 96": ((520, 200, 72), True, Config(128, 96, cluster_m=2)),
    "tiles of 160": ((264, 328, 136), True, Config(128, 160, cluster_n=2, num_stages=3)),
    "tiles of 224": ((72, 232, 136), True, Config(64, 224, split_dim=1, split_k=2)),
    "clusters of 2 x 2": ((300, 264, 136), False, Config(128, 128, cluster_m=2, cluster_n=2)),
    "clusters of 4 x 1": ((264, 264, 136), False, Config(64, 128, split_dim=1, cluster_m=4, num_stages=2)),
    "clusters of 1 x 4": ((72, 520, 72), False, Config(64, 128, split_dim=1, cluster_n=4)),
    "a part without a step": ((72, 136, 264), False, Config(64, 128, split_dim=1, split_k=5)),
    "eight parts": ((72, 40, 520), False, Config(128, 64, split_k=8)),
    "parts of another kernel": ((130, 136, 200), False, Config(64, 128, split_dim=1, split_k=3, second_kernel=True)),
    "tail of halves": ((650, 72, 72), True, Config(128, 192, cluster_m=2, tail_split=2, num_stages=3)),
    "tail of thirds": ((650, 72, 136), True, Config(128, 192, tail_split=3, store_slots=3)),
    "tail of quarters": ((200, 264, 72), True, Config(64, 256, split_dim=1, cluster_m=2, cluster_n=1, tail_split=4)),
    "swapped tiles of 8": ((13, 650, 200), True, Config(128, 8, swapped=True)),
    "swapped tiles of 24": ((40, 648, 200), False, Config(128, 24, store_slots=1, swapped=True)),
    "swapped clusters": ((264, 600, 72), False, Config(128, 96, cluster_m=2, store_slots=1, swapped=True)),
    "swapped parts": ((40, 264, 200), False, Config(128, 40, split_k=3, swapped=True)),
    "swapped tail": ((104, 584, 72), False, Config(128, 96, tail_split=3, swapped=True)),
}

SLOW = {  # Others differ from each of these in one thing alone.
    "two stages", "snake along N", "tiles of 96", "tiles of 160", "clusters of 1 x 4", "eight parts", "tail of halves",
    "swapped clusters", "swapped tiles of 24",
}  # fmt: skip
