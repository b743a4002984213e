"""The exercises of chapter 8: solutions are accepted; wrong answers and untouched skeletons are not."""

import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook.gemm.core import Config, Tiles
from tests.exercises.answers import NOTEBOOKS, accepted, rejected, skeletons

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex08  # noqa: E402

skeleton = skeletons("08_persistent_matmul")


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


def test_busy_share_solution():
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


def test_busy_share_skeleton():
    rejected(ex08.check_busy_share(skeleton("exercise-1")["busy_share"]), "write its body")


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


# Exercise 2


def wave_of(order, blocks, cluster):
    if cluster == (1, 1):
        return [order(i) for i in range(blocks)]
    wave = []
    for i in range(blocks):
        row, column = order(i // 2)
        wave.append((2 * row + i % 2, column) if cluster == (2, 1) else (row, 2 * column + i % 2))
    return wave


def count(wave):
    return len({row for row, _ in wave}) + len({column for _, column in wave})


def handed_out(blocks, cluster):
    return 2 * blocks if cluster == (1, 1) else 3 * blocks // 2


def panels(order, blocks, cluster):
    """As a simulation: each read of a panel is noted with the cluster that it serves."""
    reads = set()
    for i, (row, column) in enumerate(wave_of(order, blocks, cluster)):
        reader = i if cluster == (1, 1) else i // 2
        reads |= {("A", row, reader), ("B", column, reader)}
    return len({read[:2] for read in reads}), len(reads)


def wrong_panels(distinct=None, out=None):
    """An answer that is right but for the count given."""

    def answer(order, blocks, cluster):
        right = panels(order, blocks, cluster)
        wave = wave_of(order, blocks, cluster)
        first = right[0] if distinct is None else distinct(order, blocks, cluster, wave)
        return first, right[1] if out is None else out(blocks, cluster, wave)

    return answer


def half_the_tiles(order, blocks, cluster, wave):
    return count([order(i) for i in range(blocks if cluster == (1, 1) else blocks // 2)])


def the_other_dim(order, blocks, cluster, wave):
    return count(wave_of(order, blocks, cluster[::-1]))


def test_panels_solution():
    accepted(ex08.check_panels(panels))
    accepted(ex08.check_panels(lambda *case: (count(wave_of(*case)), handed_out(*case[1:]))))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (wrong_panels(lambda order, blocks, cluster, wave: len(set(wave))), "Those are tiles"),
        (wrong_panels(lambda order, blocks, cluster, wave: 2 * blocks), "count it once"),
        (wrong_panels(lambda order, blocks, cluster, wave: count([order(i) for i in range(blocks)])), "not of block i"),
        (wrong_panels(half_the_tiles), "stands for two tiles"),
        (wrong_panels(the_other_dim), "doubles the row"),
        (wrong_panels(out=lambda blocks, cluster, wave: 2 * blocks), "handed out once"),
        (wrong_panels(out=lambda blocks, cluster, wave: count(wave)), "every block that asks"),
        (wrong_panels(out=lambda blocks, pair, wave: 2 * blocks if pair == (1, 1) else blocks), "Only one of the two"),
        (wrong_panels(lambda *case: 7), "Write down the tiles"),
        (lambda *case: (3.0, 4), "counts are ints"),
        (lambda *case: 3, "must be a pair"),
        (raises, "raised KeyError"),
    ],
)  # fmt: skip
def test_panels_wrong(wrong, said):
    rejected(ex08.check_panels(wrong), said)


def test_panels_skeleton():
    rejected(ex08.check_panels(skeleton("exercise-2")["panels"]), "fill in both")


def test_panels_places_clusters_as_the_package_does():
    """Row by row: the tiles of the exercise's clusters are those of `Tiles.place`."""
    grid, clusters = (4, 6), 5
    for dim in (0, 1):
        order = lambda i: tuple(int(x) for x in plgpu.planar_snake(jnp.int32(i), grid, 1, grid[1]))
        tiles = wave_of(order, 2 * clusters, (2 - dim, 1 + dim))
        for cluster in range(clusters):
            first, second = tiles[2 * cluster : 2 * cluster + 2]
            assert second[dim] == first[dim] + 1 and first[dim] % 2 == 0 and first[1 - dim] == second[1 - dim]
            assert (first[0] // (2 - dim), first[1] // (1 + dim)) == order(cluster)


# Exercise 3


def model(m, n, k, tile, num_sms, add, split):
    tiles = math.ceil(m / tile[0]) * math.ceil(n / tile[1])
    waves, steps = math.ceil(tiles * split / num_sms), math.ceil(math.ceil(k / 64) / split)
    return waves * steps + (add * split if split > 1 else 0)


def choose_split(m, n, k, tile, num_sms, add):
    best, least = None, math.inf
    for split in range(1, math.ceil(k / 64) + 1):
        if (time := model(m, n, k, tile, num_sms, add, split)) < least:
            best, least = split, time
    return best


def least(time, last=False):
    """The answer that minimises `time(*case, split)` in place of the model."""

    def answer(*case):
        splits = range(1, math.ceil(case[2] / 64) + 1)
        return min(splits, key=lambda split: (time(*case, split), -split if last else split))

    return answer


def one_wave(m, n, k, tile, num_sms, add, split):
    return math.ceil(math.ceil(k / 64) / split) + (add * split if split > 1 else 0)


def parts_of_steps(m, n, k, tile, num_sms, add, split):
    waves = math.ceil(math.ceil(m / tile[0]) * math.ceil(n / tile[1]) * split / num_sms)
    return waves * math.ceil(k / 64) / split + (add * split if split > 1 else 0)


def fill(m, n, k, tile, num_sms, add):
    return max(1, min(num_sms // (math.ceil(m / tile[0]) * math.ceil(n / tile[1])), math.ceil(k / 64)))


def test_split_solution():
    accepted(ex08.check_split(choose_split))
    accepted(ex08.check_split(lambda *case: np.int64(choose_split(*case))))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda *case: 1, "leaves SMs idle"),
        (fill, "Filling the SMs is not all"),
        (least(lambda *case: model(*case[:5], 0.0, case[6])), "Adding the parts costs"),
        (least(one_wave), "run in waves"),
        (least(parts_of_steps), "a whole number of steps"),
        (least(model, last=True), "the smallest"),
        (lambda *case: 3, "Compute the time of every split"),
        (lambda *case: 0, "from 1 to the number of steps"),
        (lambda *case: 10**6, "from 1 to the number of steps"),
        (lambda *case: float(choose_split(*case)), "is an int"),
        (raises, "raised KeyError"),
    ],
)
def test_split_wrong(wrong, said):
    rejected(ex08.check_split(wrong), said)


def test_split_skeleton():
    rejected(ex08.check_split(skeleton("exercise-3")["choose_split"]), "write its body")


def test_split_cases_differ():
    """Some are best whole, some split, and no answer is that of another."""
    answers = [choose_split(*case) for case in ex08.SPLIT_CASES]
    assert 1 in answers and len(set(answers)) >= 4
