"""The exercises of chapter 8: solutions are accepted; wrong answers and untouched skeletons are not."""

import math
import sys

import numpy as np
import pytest

from cookbook.gemm.plan import Config, Tiles
from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import changed, mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex08, judge  # noqa: E402


def raises(*args):
    raise KeyError("tile")


# Exercise 1


def busy_share(m, n, tile, num_sms, cluster):
    """As a simulation: waves of clusters, each SM marked."""
    rows, columns = math.ceil(m / tile[0]), math.ceil(n / tile[1])
    clusters = [sum(row + i < rows for i in range(cluster)) for _ in range(columns) for row in range(0, rows, cluster)]
    at_once, busy, time = num_sms // cluster, 0, 0
    while clusters:
        wave, clusters = clusters[:at_once], clusters[at_once:]
        busy, time = busy + sum(wave), time + 1
    return busy / (time * num_sms)


def sizes(m, n, tile):
    return math.ceil(m / tile[0]), math.ceil(n / tile[1])


def percent(*case):
    return 100 * busy_share(*case)


def idle_share(*case):
    return 1 - busy_share(*case)


def without_clusters(m, n, tile, num_sms, cluster):
    return busy_share(m, n, tile, num_sms, 1)


def whole_tiles_only(m, n, tile, num_sms, cluster):
    rows, columns = m / tile[0], n / tile[1]
    clusters = math.ceil(rows / cluster) * columns
    return rows * columns / (math.ceil(clusters / (num_sms // cluster)) * num_sms)


def no_last_wave(m, n, tile, num_sms, cluster):
    rows, columns = sizes(m, n, tile)
    return rows * columns / (math.ceil(rows / cluster) * columns / (num_sms // cluster) * num_sms)


def clusters_across_columns(m, n, tile, num_sms, cluster):
    rows, columns = sizes(m, n, tile)
    return rows * columns / (math.ceil(rows / cluster * columns / (num_sms // cluster)) * num_sms)


def without_the_rest(m, n, tile, num_sms, cluster):
    return busy_share(m, n, tile, num_sms, cluster) * num_sms / (num_sms // cluster * cluster)


def test_busy_share_simulated():
    accepted(ex08.check_busy_share(busy_share))


def test_busy_share_solution_in_numpy():
    def share(m, n, tile, num_sms, cluster):
        rows, columns = (-(-np.array([m, n]) // np.array(tile))).tolist()
        waves = np.ceil(-(-rows // cluster) * columns / (num_sms // cluster))
        return np.float64(rows * columns) / (waves * num_sms)

    accepted(ex08.check_busy_share(share))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (percent, "no percentages"),
        (idle_share, "they idle"),
        (without_clusters, "clusters are missing"),
        (whole_tiles_only, "at the edge is a tile"),
        (no_last_wave, "last wave takes as long"),
        (clusters_across_columns, "a cluster of its own"),
        (without_the_rest, "no cluster fits on"),
        (lambda *case: "97 %", "is a number"),
        (lambda *case: 1.0, "Count the tiles"),
        (raises, "raised KeyError"),
    ],
)
def test_busy_share_wrong(wrong, said):
    rejected(ex08.check_busy_share(wrong), said)


@pytest.mark.parametrize("cluster", [1, 2])
def test_busy_share_counts_as_the_package_does(cluster):
    """The waves of the exercise are the turns of the package's busiest block."""
    cases = [case for case in ex08.SHARE_CASES if case[4] == cluster and case[1] % case[2][1] == 0]
    assert cases
    for m, n, tile, num_sms, _ in cases:
        tiles = Tiles(m, n, 64, 64, Config(*tile, cluster_m=cluster), num_sms)
        turns = math.ceil(tiles.count / tiles.clusters)
        rows, columns = sizes(m, n, tile)
        assert busy_share(m, n, tile, num_sms, cluster) == pytest.approx(rows * columns / (turns * num_sms))


# Exercises 1 and 4, kernels: the solutions with one mistake

FREE = """                        plgpu.wgmma_wait(0)
                        ring.free(number(turn, step))"""
LOAD, REFILL = "plgpu.barrier_wait(loaded", "pl.when(step + stages < steps)(lambda: load(step + stages))"


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("block + turn * blocks", "block + turn", ""),
        ("turn * steps + step", "step", ""),
        ("grid=(blocks,)", "grid=(2 * blocks,)", "must be a grid of 4"),
        ("+ blocks - 1, blocks)", ", blocks)", ""),
        (
            FREE,
            "\n".join(reversed(FREE.split("\n"))),
            "a copy starts while a WGMMA of another warpgroup may still read",
        ),
        ("stages=2", "stages=1", "this is no ring"),
        ("tile_m, tile_n = tile", "tile_m, tile_n = tile\n    while tile: pass", "has not ended"),
        ("    )(a, b)", "    )(a + a, b)", "outside of the kernel"),
    ],
)
def test_persistent_wrong(right, wrong, said, monkeypatch):
    """Where nothing is said: a race or a phase that nobody observed, whichever the interpreter meets first."""
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("08_persistent_matmul", "exercise-persistent", right, wrong), said)


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("(step * split + part) * TILE_K", "step * TILE_K", "must move with the part"),
        ("(step * split + part) * TILE_K", "(part * steps + step) * TILE_K", "these parts are contiguous"),
        ("o_gmem.at[part, rows, cols]", "o_gmem.at[0, rows, cols]", "race"),
        ("TILE_K // split, (tiles * split,)", "TILE_K // split, (tiles,)", "never written"),
        ("    )(a, b)", "    )(a, b) + 1", "outside of the kernel"),
        ("plgpu.wgmma_wait(0)", "plgpu.wgmma_wait(1)", "a copy starts while the last WGMMA may still read the slot"),
    ],
)
def test_split_wrong(right, wrong, said):
    rejected(mistaken("08_persistent_matmul", "exercise-split", right, wrong), said)


def test_split_without_a_ring():
    """Each step is loaded when it is needed."""
    changes = ("pl.loop(0, min(stages, steps))(load)", ""), (REFILL, ""), (LOAD, f"load(step)\n                {LOAD}")
    rejected(changed("08_persistent_matmul", "exercise-split", *changes), "a ring of 2 slots is used as if it had 1")


# Exercise 3


def tile_of(cluster, row, col, block):
    return (2 * row + block, col) if cluster == (2, 1) else (row, 2 * col + block)


@pytest.mark.parametrize(
    "shared, said",
    [
        (lambda cluster, block: "a", "cluster (2, 1): block 0 computes tile (0, 0), and receives half of panel 0 and"),
        (lambda cluster, block: "b", "cluster (1, 2): block 0 computes tile (0, 0)"),
        (lambda cluster, block: "", "nothing is shared"),
        (lambda cluster, block: "ab"[cluster == (2, 1)] if block else "", "only one block calls"),
    ],
)
def test_multicast_wrong(shared, said):
    def copies(*case):
        return [(o, panel, o == shared(case[0], case[3])) for o, panel in zip("ab", tile_of(*case), strict=True)]

    rejected(ex08.check_multicast(copies), said)


@pytest.mark.parametrize(
    "given, said",
    [
        (None, "must be a list"),
        ([("a", 0, True)], "two copies"),
        ([("a", 0, False), ("b", 0, True)], "receives panel 0 of A; it needs panel 1"),
    ],
)
def test_multicast_of_another_form(given, said):
    rejected(ex08.check_multicast(lambda *case: given), said)
