"""Chapter 8's exercises: the busy share of the SMs, a persistent kernel, a store that overlaps, and a multicast."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, speed, wide

import cookbook

# (m, n, tile, num_sms, cluster) of exercise 1.
SHARE_CASES = [
    (4096, 4096, (128, 256), 132, 1), (4096, 4352, (128, 256), 132, 1), (8192, 8192, (128, 128), 132, 2),
    (512, 512, (128, 256), 132, 1), (4100, 4096, (128, 256), 132, 1), (4224, 1000, (128, 256), 132, 2),
    (1000, 300, (128, 128), 10, 4), (2048, 2048, (128, 128), 133, 2), (129, 64, (128, 64), 6, 2),
    (640, 384, (128, 128), 6, 4),
]  # fmt: skip

# ((m, k, n), blocks) of the kernels: 6 tiles on 4 blocks, 3 on 2, 7 on 2.
GRIDS = (((128, 192, 384), 4), ((192, 128, 128), 2), ((64, 320, 896), 2))
IDLE = ((128, 192, 128), 3)  # 2 tiles on 3 blocks.


@checker
def check_busy_share(answer) -> str:
    """Exercise 1: `answer(m, n, tile, num_sms, cluster)` is the share of the SMs' time in which they compute tiles."""
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
    """Exercise 2: `answer(a, b, num_blocks)` is a @ b, computed by a grid of that many blocks."""
    for shape, num_blocks in GRIDS:
        played = _play_and_compare(answer, shape, num_blocks)
        _require_own_tiles(played, shape, num_blocks)
        _require_ahead(played, shape[1] // 64)
    shape, num_blocks = IDLE
    operands = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (shape[:2], shape[1:]))
    played = judge.play_kernel(functools.partial(answer, num_blocks=num_blocks), *operands)
    _require_own_tiles(played, shape, num_blocks)
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    ours = functools.partial(answer, num_blocks=132)
    return "Each block takes every tile that is its own." + speed(ours, cookbook.matmul, large, large)


@checker
def check_overlap(answer) -> str:
    """Exercise 3: `answer(a, b, num_blocks)` is a @ b; a tile is stored while the next one is computed."""
    for shape, num_blocks in GRIDS:
        played = _play_and_compare(answer, shape, num_blocks)
        _require_ahead(played, shape[1] // 64)
        for block in itertools.chain.from_iterable(played):
            stores = [event for event in block.events if event.kind == "store"]
            if any(first.end & second.known for first, second in itertools.pairwise(stores)):
                raise NotYet(
                    "a tile is stored only after the block waits until the tile before has left shared memory: there "
                    "are two stages, so wait for the tile that was in this one"
                )
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    ours = functools.partial(answer, num_blocks=132)
    said = "Each stage is stored into once TMA has read it, and nobody waits for more than that."
    return said + speed(ours, cookbook.matmul, large, large)


def _play_and_compare(answer, shape, num_blocks: int):
    """The kernel of `answer`, played, once its grid and its product are right."""
    a, b = normal(1, shape[:2], jnp.bfloat16), normal(2, shape[1:], jnp.bfloat16)
    fn = functools.partial(answer, num_blocks=num_blocks)
    played = judge.require_order_of(fn, a, b)
    if (grid := _grid(fn, a, b)) != num_blocks:
        raise NotYet(
            f"for num_blocks={num_blocks} the kernel launches {grid} blocks: it must be a grid of {num_blocks}"
        )
    if any(block.is_sending for block in itertools.chain.from_iterable(played)):
        raise NotYet(
            "the block ends while TMA may still send from its shared memory, which then belongs to another block: wait "
            "for the last stores after the loop"
        )
    out = run_kernel(fn, a, b, in_flight=2)
    require_close(out, wide(a) @ wide(b), 0.02, f"{shape} on {num_blocks} blocks")
    return played


def _require_own_tiles(played, shape, num_blocks: int) -> None:
    """Raises NotYet if a block computes more tiles than are its own (TMA cuts off what lies beyond the result), or
    others, or in another order."""
    m, k, n = shape
    columns = _cdiv(n, 128)
    indices = dict.fromkeys((0, num_blocks // 2, num_blocks - 1))  # Those that are played.
    for index, block in zip(indices, itertools.chain.from_iterable(played), strict=True):
        own = list(range(index, _cdiv(m, 64) * columns, num_blocks))
        computed = sum(event.kind == "product" for event in block.events) // (k // 64)
        who = f"{shape} on {num_blocks} blocks: block {index}"
        if computed > len(own):
            raise NotYet(
                f"{who} computes {computed} tile{'s' * (computed > 1)}, and {len(own)} "
                f"{'is' if len(own) == 1 else 'are'} its own: those beyond the result are time lost"
            )
        boxes = [event.box for event in block.events if event.kind == "store" and event.box]
        stored = [row // 64 * columns + column // 128 for (row, _), (column, _) in boxes]
        in_turn = [tile for tile, _ in itertools.groupby(stored)]
        if in_turn and in_turn != own:
            raise NotYet(
                f"{who} computes the tiles {in_turn}, and {own} are its own: tiles of one turn are neighbours, "
                "whose loads meet in L2"
            )


def _require_ahead(played, num_steps: int) -> None:
    """Raises NotYet if a block loads nothing of a tile before all products of the tile before it have ended."""
    for block in itertools.chain.from_iterable(played):
        loads, products = ([event for event in block.events if event.kind == kind] for kind in ("load", "product"))
        for next_tile in range(num_steps, len(products), num_steps):
            if products[next_tile - 1].end & loads[2 * next_tile].known:
                raise NotYet(
                    "the memory warpgroup waits for the end of a tile before it loads the next one: let it run ahead, "
                    "as far as the ring has stages"
                )


@checker
def check_multicast(answer) -> str:
    """Exercise 4: `answer(cluster, row, col, block)` lists the copies of one step: (operand, panel, shared)."""

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
    """The right answer of exercise 1, and with other keywords the likely wrong ones."""
    rows, columns = (_cdiv(size, t) if tiles_up else size / t for size, t in zip((m, n), tile, strict=True))
    clusters = (math.ceil(rows / cluster) if clusters_up else rows / cluster) * columns
    at_once = num_sms // cluster
    waves = math.ceil(clusters / at_once) if waves_up else clusters / at_once
    return rows * columns / (waves * (num_sms if rest_idles else at_once * cluster))
