"""Chapter 11b's exercises: the phases of a window, dealing out tiles, a ring that goes on, mask and heads."""

import collections
import functools
import heapq
import itertools

import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, require_answers, wide

KINDS = "passed by", "masked", "whole", "masked", "passed by"
WG_ROWS = 64  # Queries of a compute warpgroup.
WINDOWS = list(itertools.product((2, 3), (64, 128), (0, 1, 63, 64, 130, 200, 500, 5000)))  # wgs, block_kv, left.
# Batch, queries, keys, query heads, KV heads, head_dim, block_kv.
MASKED = (
    (1, 128, 128, 2, 2, 64, 64), (1, 64, 64, 4, 2, 64, 64), (1, 128, 256, 2, 1, 64, 128), (2, 64, 320, 3, 1, 128, 64),
)  # fmt: skip
COUNTED = ((1, 192, 192, 2, 64), (2, 128, 320, 1, 128))  # Batch, queries, keys, heads, head_dim.


@checker
def check_deal(answer) -> str:
    """Exercise 2: `answer(steps, blocks)` lists for each block the tiles that it computes; `steps` of each tile."""
    causal = [i + 1 for _ in range(64) for i in range(32)]
    cases = {
        "equal tiles": ([32] * 500, 132),
        "causal tiles": (causal, 132),
        "one long tile": ([1] * 40 + [9], 6),
        "fewer tiles than blocks": ([3, 1, 2], 5),
    }
    for i, (steps, blocks) in enumerate(judge.drawn(_tiles)):
        cases[f"tiles drawn at random, {i}"] = steps, blocks
    for name, (steps, blocks) in cases.items():
        given = answer(list(steps), blocks)
        try:
            rows = [[int(tile) for tile in row] for row in given]
        except TypeError as error:
            raise NotYet(f"{name}: the answer is {given!r}; it must be lists of tiles, one for each block.") from error
        if len(rows) != blocks:
            raise NotYet(f"{name}: there are {len(rows)} lists for {blocks} blocks; one without a tile is [].")
        times = collections.Counter(itertools.chain.from_iterable(rows))
        if wrong := [tile for tile in {*times, *range(len(steps))} if times[tile] != (0 <= tile < len(steps))]:
            raise NotYet(f"{name}: tile {wrong[0]} is computed {times[wrong[0]]} times; each of {len(steps)} is once.")
        longest, good = max(sum(steps[tile] for tile in row) for row in rows), _makespan(steps, blocks)
        if longest > 1.02 * good:
            raise NotYet(
                f"{name}: the last block is done after {longest} steps; {good} are possible. Which tiles should come "
                "first, and which block should get the next one?"
            )
    return "The block that is free takes the longest tile that is left: none ends much later than the others."


def _tiles(rng) -> tuple[list[int], int]:
    """A case of exercise 2 that nobody knows beforehand."""
    return rng.integers(1, 33, int(rng.integers(300, 600))).tolist(), int(rng.integers(2, 140))


@checker
def check_phases(answer) -> str:
    """Exercise 1: `answer(first_q, wg, wgs, block_kv, left)` counts a warpgroup's steps: passed by, masked, whole,
    masked, passed by, when query i sees keys i - left to i."""
    cases = [
        (first_q, wg, wgs, block_kv, left)
        for wgs, block_kv, left in WINDOWS
        for first_q in range(0, 6 * WG_ROWS * wgs, WG_ROWS * wgs)
        for wg in range(wgs)
    ]

    @functools.wraps(answer)
    def steps(*case):
        given = answer(*case)
        if not isinstance(given, tuple | list) or len(given) != 5 or min(given) < 0:
            raise NotYet(f"phases{case} is {given!r}; it must be five numbers of steps, none below 0.")
        return [kind for kind, count in zip(KINDS, given, strict=True) for _ in range(int(count))]

    said = "These are the tile's steps, from the last block on: one for each block that any of its warpgroups sees."
    require_answers(steps, cases, _steps, otherwise=said, draw=_window)
    return "Each warpgroup goes through every block of the tile, and works for none of them in vain."


def _window(rng) -> tuple[int, ...]:
    """A case of exercise 1 that nobody knows beforehand."""
    wgs, tile = int(rng.integers(1, 5)), int(rng.integers(0, 9))
    return tile * wgs * WG_ROWS, int(rng.integers(wgs)), wgs, 64 * int(rng.integers(1, 5)), int(rng.integers(0, 900))


@checker
def check_count(answer) -> str:
    """Exercise 3: `answer(q, k, v)` is out, by blocks that each compute tile after tile."""
    for batch, num_q, num_kv, heads, head_dim in COUNTED:
        q = judge.normal(1, (batch, num_q, heads, head_dim), jnp.bfloat16)
        k, v = (judge.normal(seed, (batch, num_kv, heads, head_dim), jnp.bfloat16) for seed in (2, 3))
        where = f"out with {num_kv // WG_ROWS} steps in a tile, {batch} batches and a head_dim of {head_dim}"
        try:
            out = judge.run_kernel(answer, q, k, v)
        except NotYet as problem:
            raise NotYet(_with_hint(str(problem))) from None
        judge.require_close(out, _attention(q, k, v), 0.02, where)
        played = judge.play_kernel(answer, q, k, v)[0]
        _require_stages(played, others=1)  # The queries.
        if any(block.count("store") < 2 for block in played):
            raise NotYet("a block of threads computes one tile and ends: let each compute several tiles")
        _require_ahead(played)
    return "The ring does not notice where a tile ends."


def _require_stages(played, others: int = 0) -> None:
    """Raises NotYet where keys or values have one stage; `others`: arrays that may be loaded again and again."""
    for block in played:
        if sum(ring.loads > 2 and len(ring.stages) < 2 for ring in block.rings) > others:
            raise NotYet("keys or values have a single stage: keep two, so that one is loaded while the other is read")


def _require_ahead(played) -> None:
    """Raises NotYet if a block loads nothing of a tile before all products of the tile before it have ended."""
    for block in played:
        loads, products = ([event for event in block.events if event.kind == kind] for kind in ("load", "product"))
        tiles = block.count("store")
        for tile in range(1, tiles):
            first, last = loads[tile * len(loads) // tiles], products[tile * len(products) // tiles - 1]
            if last.end & first.known:
                raise NotYet(
                    "the memory warpgroup waits for a tile's last p v before it copies anything of the next tile: let "
                    "the counts go on, and say that the queries have been read as soon as they have been"
                )


def _with_hint(problem: str) -> str:
    """The problem and, if barriers are the problem, a question that helps."""
    if not any(said in problem for said in ("never end", "phase", "race", "observed barrier", "stage")):
        return problem
    stop = "" if problem.endswith((".", "?")) else "."
    return f"{problem}{stop} A ring's barriers go on when the next tile begins: do the counts go on too, in both roles?"


@checker
def check_mask(answer) -> str:
    """Exercise 4: `answer(q, k, v)` is out, with a causal mask that is aligned at the ends, and KV heads that query
    heads share."""
    for batch, num_q, num_kv, heads, kv_heads, head_dim, block_kv in MASKED:
        q = judge.normal(1, (batch, num_q, heads, head_dim), jnp.bfloat16)
        k, v = (judge.normal(seed, (batch, num_kv, kv_heads, head_dim), jnp.bfloat16) for seed in (2, 3))
        case = f"{num_q} queries, {num_kv} keys, {heads} query heads, {kv_heads} KV heads, heads of {head_dim}"
        blocked = functools.partial(answer, block_kv=block_kv)
        try:
            out = judge.run_kernel(blocked, q, k, v)
        except NotYet as problem:
            if "beyond the end" in str(problem):
                raise NotYet(f"{case}: {problem}: is there such a KV head, and such a block of keys?") from None
            raise
        if np.isnan(wide(out)).any():
            raise NotYet(f"{case}: out has NaN: in its first step a query sees no key. Does the mask know where it is?")
        more = num_kv - num_q
        judge.require_close(out, _attention(q, k, v, more), 0.02, f"{case}: out", _wrong_masks(q, k, v, block_kv))
        played = judge.play_kernel(blocked, q, k, v)[0]
        _require_stages(played)
        _require_needed(played, case, more, block_kv)
    return "The last query sees every key, and each group of query heads reads one KV head."


def _require_needed(played, case: str, more: int, block_kv: int) -> None:
    """Raises NotYet if a tile loads blocks of keys that none of its queries sees."""
    for block in played:
        stored = [event.box for event in block.events if event.kind == "store" and event.box]
        if not stored:
            continue
        first_q = stored[0][1][0]
        needed = -(-(first_q + more + WG_ROWS) // block_kv)
        if block.count("load") > 1 + 2 * needed:
            raise NotYet(
                f"{case}: the tile from query {first_q} on needs {needed} blocks of keys and values, and loads more: "
                "no query sees the others"
            )


def _wrong_masks(q, k, v, block_kv: int):
    """Results of likely mistakes, and what is said of them."""
    heads, kv_heads, more = q.shape[2], k.shape[2], k.shape[1] - q.shape[1]
    tile_end = np.arange(q.shape[1]) // WG_ROWS * WG_ROWS + WG_ROWS
    visited = lambda end: -(-end // block_kv) * block_kv
    neighbours = f"{heads // kv_heads} neighbouring query heads read one KV head"
    for said, wrong in (
        (f"query heads take turns at the KV heads: {neighbours}", dict(more=more, heads=np.arange(heads) % kv_heads)),
        (
            f"a query head reads the KV head of its own number: {neighbours}",
            dict(more=more, heads=np.minimum(np.arange(heads), kv_heads - 1)),
        ),
        ("the queries are aligned with the first keys; the last query must see the last key", dict(more=0)),
        (
            "the mask is right, but blocks of keys that it lets through are never visited",
            dict(more=more, end=visited(tile_end)),
        ),
        ("a query sees the key at its own position too", dict(more=more - 1)),
        ("every key of the blocks that are visited is seen: where is the mask?", dict(end=visited(tile_end + more))),
    ):
        yield _attention(q, k, v, **wrong), said


def _attention(q, k, v, more=None, heads=None, end=None):
    """out in float64: query i sees keys up to i + more (None: all), before end[i]; `heads`, the KV head of each query
    head."""
    q, k, v = (x.swapaxes(1, 2) for x in wide(q, k, v))
    heads = np.arange(q.shape[1]) // (q.shape[1] // k.shape[1]) if heads is None else heads
    s = q @ k[:, heads].swapaxes(2, 3) / np.sqrt(q.shape[-1])
    i, j = np.arange(s.shape[2])[:, None], np.arange(s.shape[3])
    sees = np.full(s.shape[2:], True) if more is None else j <= i + more
    s = np.where(sees if end is None else sees & (j < end[:, None]), s, -np.inf)
    with np.errstate(invalid="ignore"):
        most = s.max(axis=-1, keepdims=True)
        p = np.exp(s - np.where(np.isneginf(most), 0, most))
        out = p / p.sum(axis=-1, keepdims=True) @ v[:, heads]
    return out.swapaxes(1, 2)


def _steps(first_q, wg, wgs, block_kv, left) -> list[str]:
    """Kinds of the steps of a warpgroup."""
    queries, kinds = first_q + np.arange(WG_ROWS * wgs)[:, None], []
    for block in reversed(range(-(-(first_q + WG_ROWS * wgs) // block_kv))):
        keys = block * block_kv + np.arange(block_kv)
        sees = (keys <= queries) & (keys >= queries - left)
        if sees.any():
            mine = sees[wg * WG_ROWS : (wg + 1) * WG_ROWS]
            kinds.append("whole" if mine.all() else "masked" if mine.any() else "passed by")
    return kinds


def _makespan(steps, blocks: int) -> int:
    """Steps until all blocks are done, if each block that is done takes the longest tile left."""
    done = [0] * blocks
    for n in sorted(steps, reverse=True):
        heapq.heapreplace(done, done[0] + n)
    return max(done)
