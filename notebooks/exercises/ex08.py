"""Chapter 8's exercises: the busy share of the SMs, a persistent kernel, a multicast, and a split of K."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, speed, wide

import cookbook

# (m, n, tile, num_sms, cluster) of exercise 2.
SHARE_CASES = [
    (4096, 4096, (128, 256), 132, 1), (4096, 4352, (128, 256), 132, 1), (8192, 8192, (128, 128), 132, 2),
    (512, 512, (128, 256), 132, 1), (4100, 4096, (128, 256), 132, 1), (4224, 1000, (128, 256), 132, 2),
    (1000, 300, (128, 128), 10, 4), (2048, 2048, (128, 128), 133, 2), (129, 64, (128, 64), 6, 2),
    (640, 384, (128, 128), 6, 4),
]  # fmt: skip


@checker
def check_busy_share(answer) -> str:
    """Exercise 2: `answer(m, n, tile, num_sms, cluster)` is the share of the SMs' time in which they compute tiles."""
    likely = (
        (lambda *case: 100 * _share(*case), "A share is at most 1: no percentages."),
        (lambda *case: 1 - _share(*case), "That is the share in which they idle."),
        (lambda *case: _share(*case[:4], 1), "The clusters are missing: a wave has num_sms // cluster of them."),
        (dict(tiles_up=False), "A part of a tile at the edge is a tile."),
        (dict(clusters_up=False), "Each column of tiles begins with a cluster of its own."),
        (dict(rest_idles=False), "SMs that no cluster fits on idle, and count."),
        (dict(waves_up=False), "The last wave takes as long as the others."),
    )
    said = "Count the tiles, then the waves, then divide."
    require_answers(answer, SHARE_CASES, _share, likely, said, draw=_share_case)
    return "You can tell from the shape alone what the last wave will cost."


@checker
def check_persistent(answer) -> str:
    """Exercise 1: `answer(a, b, blocks)` is a @ b, computed by a grid of that many blocks."""
    for shape, blocks in (((128, 192, 384), 4), ((192, 128, 128), 2)):
        a, b = normal(1, shape[:2], jnp.bfloat16), normal(2, shape[1:], jnp.bfloat16)
        fn = functools.partial(answer, blocks=blocks)
        if (grid := _grid(fn, a, b)) != blocks:
            raise NotYet(f"for blocks={blocks} the kernel launches {grid} blocks: it must be a grid of {blocks}")
        out = run_kernel(fn, a, b, in_flight=2)
        require_close(out, wide(a) @ wide(b), 0.02, f"{shape} on {blocks} blocks")
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    ours = functools.partial(answer, blocks=132)
    return "Each block takes every tile that is its own." + speed(ours, cookbook.matmul, large, large)


@checker
def check_multicast(answer) -> str:
    """Exercise 3: `answer(cluster, row, col, block)` lists the copies of one step: (operand, panel, shared)."""

    def copies(cluster, row, col, block):
        along = cluster == (2, 1)  # Two rows of tiles and one column: B's panel is the same.
        return [("a", 2 * row + block if along else row, not along), ("b", col if along else 2 * col + block, along)]

    @functools.wraps(answer)
    def in_order(*case):
        given = answer(*case)
        return sorted(given) if isinstance(given, list) and all(isinstance(copy, tuple) for copy in given) else given

    every = lambda row, col: [(cluster, row, col, block) for cluster in ((2, 1), (1, 2)) for block in (0, 1)]
    draw = lambda rng: every(*rng.integers(0, 50, 2).tolist())[rng.integers(4)]
    alone = lambda *case: [(operand, panel, False) for operand, panel, _ in copies(*case)]
    likely = [(alone, "Nothing is shared: L2 hands out as much as without a cluster.")]
    said = (
        'A step has a copy of "a" and one of "b". Each block needs the panels of its own tile; the copy that both call '
        "is of the panel that they share, and of no other: else a block gets half of a neighbour's, or waits for ever."
    )
    require_answers(in_order, every(0, 0) + every(3, 5), copies, likely, said, draw=draw)
    return "Both blocks name the same panel in the copy that they share, and only in that."


@checker
def check_split(answer) -> str:
    """Exercise 4: `answer(a, b, split)` holds the sums over parts of K: part p has every split-th step, from p on."""
    for (m, k, n), split in (((64, 576, 256), 3), ((64, 384, 128), 2)):  # Three steps: the ring of two goes round.
        a, b = normal(3, (m, k), jnp.bfloat16), normal(4, (k, n), jnp.bfloat16)
        out = run_kernel(functools.partial(answer, split=split), a, b, in_flight=2)
        a, b = wide(a, b)
        exact = np.einsum("mtsk,tskn->smn", a.reshape(m, -1, split, 64), b.reshape(-1, split, 64, n))
        parts = np.einsum("msk,skn->smn", a.reshape(m, split, -1), b.reshape(split, -1, n))
        first = np.repeat(parts[:1], split, axis=0)
        likely = (
            (first, "every part is the sum over the first steps of K: the slices of K must move with the part"),
            (parts, "these parts are contiguous: part p takes every split-th step, from p on"),
            (np.repeat((a @ b)[None], split, axis=0), "this is the sum over all of K: each part has its own steps"),
        )
        require_close(out, exact, 1e-3, f"({m}, {k}, {n}) in {split} parts", likely)
    return "More blocks than tiles, and an order of the sum that is yours to fix."


def _grid(fn, *args) -> int:
    """Number of blocks of the kernel that `fn` launches."""
    found = judge.equations(judge.jaxpr_of(fn, *args))
    return math.prod(next(eqn.params["meshes"][0].grid for eqn in found if "meshes" in eqn.params))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _share_case(rng):
    m, n, tile_m, tile_n = (int(x) for x in rng.integers((1, 1, 64, 64), (5000, 5000, 257, 257)))
    return m, n, (tile_m, tile_n), int(rng.integers(8, 150)), int(rng.integers(1, 5))


def _share(m, n, tile, num_sms, cluster, *, tiles_up=True, waves_up=True, clusters_up=True, rest_idles=True) -> float:
    """The right answer of exercise 2, and with other keywords the likely wrong ones."""
    rows, columns = (_cdiv(size, t) if tiles_up else size / t for size, t in zip((m, n), tile, strict=True))
    clusters = (math.ceil(rows / cluster) if clusters_up else rows / cluster) * columns
    at_once = num_sms // cluster
    waves = math.ceil(clusters / at_once) if waves_up else clusters / at_once
    return rows * columns / (waves * (num_sms if rest_idles else at_once * cluster))
