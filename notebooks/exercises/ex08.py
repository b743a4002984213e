"""Chapter 8's exercises: the busy share of the SMs, what L2 reads and hands out, and the choice of a split of K."""

import math

import numpy as np
from exercises.judge import NotYet, checker

TILE_K = 64  # Values of K in a step.

# (m, n, tile, num_sms, cluster) of exercise 1.
SHARE_CASES = [
    (4096, 4096, (128, 256), 132, 1),
    (4096, 4352, (128, 256), 132, 1),
    (8192, 8192, (128, 128), 132, 2),
    (512, 512, (128, 256), 132, 1),
    (4100, 4096, (128, 256), 132, 1),
    (4224, 1000, (128, 256), 132, 2),
    (1000, 300, (128, 128), 10, 4),
    (2048, 2048, (128, 128), 133, 2),
    (129, 64, (128, 64), 6, 2),
    (640, 384, (128, 128), 6, 4),
]

# (name of the order, its function, blocks, (cluster_m, cluster_n)) of exercise 2.
PANEL_CASES = [
    (name, order, blocks, cluster)
    for name, order in {
        "row by row, 32 columns": lambda i: (i // 32, i % 32),
        "strips of 8 rows": lambda i: (i % 8, i // 8),
        "a single column": lambda i: (i, 0),
        "strips of 3 columns": lambda i: (i // 3, i % 3),
    }.items()
    for blocks in (12, 132)
    for cluster in ((1, 1), (2, 1), (1, 2))
]

# (m, n, k, tile, num_sms, add) of exercise 3.
SPLIT_CASES = [
    (512, 512, 32768, (128, 128), 132, 1.0),
    (512, 512, 32768, (128, 128), 132, 30.0),
    (4096, 4096, 4096, (128, 256), 132, 2.0),
    (4096, 4352, 4096, (128, 256), 132, 2.0),
    (128, 256, 1000, (128, 256), 132, 0.5),
    (128, 256, 1000, (128, 256), 132, 0.0),
    (384, 500, 5000, (128, 128), 40, 1.5),
    (100, 100, 64, (128, 128), 132, 1.0),
    (1024, 1280, 8192, (128, 256), 132, 3.0),
]


@checker
def check_busy_share(answer) -> str:
    """Exercise 1: `answer(m, n, tile, num_sms, cluster)` is the share of the SMs' time in which they compute tiles."""
    given = {case: answer(*case) for case in SHARE_CASES}
    for case, got in given.items():
        if got is None:
            raise NotYet("busy_share returns None: write its body.")
        if not isinstance(got, int | float | np.number) or isinstance(got, bool):
            raise NotYet(f"busy_share{case} is {got!r}; a share is a number.")
        if not math.isclose(got, want := _share(*case), rel_tol=1e-6):
            raise NotYet(f"busy_share{case} is {float(got):.4g}, and {want:.4g} is right. {_share_hint(given)}")
    return "You can tell from the shape alone what the last wave will cost."


@checker
def check_panels(answer) -> str:
    """Exercise 2: `answer(order, blocks, cluster)` is the pair of distinct panels and of panels handed out."""
    given = {}
    for i, (_, order, blocks, cluster) in enumerate(PANEL_CASES):
        got = answer(order, blocks, cluster)
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise NotYet(f"panels returns {got!r}; it must be a pair, (distinct, handed_out).")
        if None in tuple(got):
            raise NotYet("there is no count yet: fill in both.")
        if not all(isinstance(count, int | np.integer) and not isinstance(count, bool) for count in got):
            raise NotYet(f"panels returns {got!r}; counts are ints.")
        given[i] = tuple(map(int, got))
    for which, text in enumerate(("distinct panels", "panels handed out")):
        for i, (name, order, blocks, cluster) in enumerate(PANEL_CASES):
            if given[i][which] != (want := _panels(order, blocks, cluster)[which]):
                raise NotYet(
                    f"{name}, {blocks} blocks, {cluster=}: {given[i][which]} {text}, and {want} is "
                    f"right. {_panels_hint(which, [given[i][which] for i in given])}"
                )
    return "A cluster leaves what comes from HBM as it is, and takes a quarter off what L2 hands out."


@checker
def check_split(answer) -> str:
    """Exercise 3: `answer(m, n, k, tile, num_sms, add)` is the split with the least predicted time."""
    given = {case: answer(*case) for case in SPLIT_CASES}
    for case, got in given.items():
        if got is None:
            raise NotYet("choose_split returns None: write its body.")
        if not isinstance(got, int | np.integer) or isinstance(got, bool):
            raise NotYet(f"choose_split{case} is {got!r}; a number of parts is an int.")
        steps = -(-case[2] // TILE_K)
        if not 1 <= got <= steps:
            raise NotYet(f"choose_split{case} is {got}; it must be from 1 to the number of steps, {steps}.")
        if got != (want := _split(*case)):
            times = f"{got} takes {_steps(*case, got):g} steps, {want} takes {_steps(*case, want):g}"
            raise NotYet(f"choose_split{case}: {times}. {_split_hint(given)}")
    return "You split where SMs idle, and no further than the sum of the parts allows."


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _share(m, n, tile, num_sms, cluster, *, tiles_up=True, waves_up=True, clusters_up=True, rest_idles=True) -> float:
    """The right answer of exercise 1, and with other keywords the likely wrong ones."""
    rows, columns = (_cdiv(size, t) if tiles_up else size / t for size, t in zip((m, n), tile, strict=True))
    clusters = (math.ceil(rows / cluster) if clusters_up else rows / cluster) * columns
    at_once = num_sms // cluster
    waves = math.ceil(clusters / at_once) if waves_up else clusters / at_once
    return rows * columns / (waves * (num_sms if rest_idles else at_once * cluster))


def _share_hint(given: dict) -> str:
    likely = (
        (lambda *case: 100 * _share(*case), "A share is at most 1: no percentages."),
        (lambda *case: 1 - _share(*case), "That is the share in which they idle."),
        (lambda *case: _share(*case[:4], 1), "The clusters are missing: a wave has num_sms // cluster of them."),
        (lambda *case: _share(*case, tiles_up=False), "A part of a tile at the edge is a tile."),
        (lambda *case: _share(*case, clusters_up=False), "Each column of tiles begins with a cluster of its own."),
        (lambda *case: _share(*case, rest_idles=False), "SMs that no cluster fits on idle, and count."),
        (lambda *case: _share(*case, waves_up=False), "The last wave takes as long as the others."),
    )
    texts = (
        text
        for wrong, text in likely
        if all(math.isclose(wrong(*case), got, rel_tol=1e-6) for case, got in given.items() if got is not None)
    )
    return next(texts, "Count the tiles, then the waves, then divide.")


def _wave(order, blocks: int, cluster: tuple[int, int]) -> list[tuple[int, int]]:
    """The tiles of the first wave."""
    rows, cols = cluster
    corners = [(order(i)[0] * rows, order(i)[1] * cols) for i in range(blocks // (rows * cols))]
    return [(row + i, col + j) for row, col in corners for i in range(rows) for j in range(cols)]


def _panels(order, blocks: int, cluster: tuple[int, int]) -> tuple[int, int]:
    tiles = _wave(order, blocks, cluster)
    distinct = len({row for row, _ in tiles}) + len({column for _, column in tiles})
    return distinct, 2 * blocks if cluster == (1, 1) else 3 * (blocks // 2)


def _panels_hint(which: int, given: list[int]) -> str:
    tiles = [_wave(*case[1:]) for case in PANEL_CASES]
    orders = [[case[1](i) for i in range(case[2])] for case in PANEL_CASES]
    halved = [order[: len(order) // 2] if case[3] != (1, 1) else order
              for order, case in zip(orders, PANEL_CASES, strict=True)]  # fmt: skip
    crossed = [_wave(case[1], case[2], case[3][::-1]) for case in PANEL_CASES]
    count = lambda wave: len({row for row, _ in wave}) + len({column for _, column in wave})
    likely = (
        (
            ([len(set(wave)) for wave in tiles], "Those are tiles. Tiles of the same row share a panel of A."),
            ([2 * len(wave) for wave in tiles], "Tiles of the same row need the same panel of A: count it once."),
            ([count(wave) for wave in orders], "With clusters, order(i) is the place of cluster i, not of block i."),
            ([count(wave) for wave in halved], "With clusters, each place of the order stands for two tiles."),
            ([count(wave) for wave in crossed], "a cluster (2, 1) doubles the row, (1, 2) the column."),
        ),
        (
            ([2 * len(wave) for wave in tiles], "The two blocks of a cluster share one panel: it is handed out once."),
            ([count(wave) for wave in tiles], "L2 hands a panel to every block that asks, also if another had it."),
            (
                [len(wave) * (1 if case[3] != (1, 1) else 2) for wave, case in zip(tiles, PANEL_CASES, strict=True)],
                "Only one of the two operands is shared: the blocks of a cluster still differ in the other.",
            ),
        ),
    )
    return next((text for wrong, text in likely[which] if wrong == given), "Write down the tiles of the wave first.")


def _steps(m, n, k, tile, num_sms, add, split, *, waves=True, steps_up=True) -> float:
    """The time of the model of exercise 3, in steps."""
    blocks = _cdiv(m, tile[0]) * _cdiv(n, tile[1]) * split
    steps = _cdiv(k, TILE_K)
    part = _cdiv(steps, split) if steps_up else steps / split
    return (_cdiv(blocks, num_sms) if waves else 1) * part + (add * split if split > 1 else 0)


def _split(*case, last=False, add=None, **how) -> int:
    """The right answer of exercise 3, and with other keywords the likely wrong ones."""
    *shape, cost = case
    add = cost if add is None else add
    splits = range(1, _cdiv(case[2], TILE_K) + 1)
    return min(splits, key=lambda split: (_steps(*shape, add, split, **how), -split if last else split))


def _split_hint(given: dict) -> str:
    def fill(m, n, k, tile, num_sms, add):
        tiles = _cdiv(m, tile[0]) * _cdiv(n, tile[1])
        return max(1, min(num_sms // tiles, _cdiv(k, TILE_K)))

    likely = (
        (lambda *case: 1, "A split of 1 leaves SMs idle where tiles are few."),
        (fill, "Filling the SMs is not all: adding the parts has a price, and a second wave may be worth it."),
        (lambda *case: _split(*case, add=0.0), "Adding the parts costs `add` steps each."),
        (lambda *case: _split(*case, waves=False), "More blocks than SMs run in waves, one after the other."),
        (lambda *case: _split(*case, steps_up=False), "A part has a whole number of steps: the longest decides."),
        (lambda *case: _split(*case, last=True), "Of several equal ones, the smallest."),
    )
    texts = (text for wrong, text in likely if all(wrong(*case) == got for case, got in given.items()))
    return next(texts, "Compute the time of every split, and take the least.")
