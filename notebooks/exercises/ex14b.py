"""Chapter 14b's exercises: rows that a neighbour spoils, ragged stores, heads that share a tile, and a deal."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    normal,
    play_kernel,
    require_answers,
    require_close,
    require_loads_together,
    run_kernel,
    wide,
)
from exercises.memory import overlap

STORES = (  # Queries of tiles; their rows and columns.
    ((16, 3, 9, 15, 1), 16, 128),
    ((1, 2, 4, 8, 7, 16), 16, 64),
    ((5, 32, 30, 19), 32, 192),
)
SPOILT = (((5, 1, 20, 3), 8), ((16, 16), 8), ((1, 1, 1, 9, 2), 4), ((7,), 16))  # Queries of sequences; rows of a tile.
WEIGHTS = (  # T, S, N, heads of a tile, and the size of logits: exp overflows where the maximum is not subtracted.
    (32, 64, 2, 2, 1),
    (32, 96, 12, 4, 1),
    (16, 40, 32, 16, 1),
    (32, 64, 2, 2, 60),
)
DEALS = [(1, 5), (4, 16), (4, 18), (3, 20), (5, 3), (4, 4), (4, 0), (7, 30)]  # Blocks, tiles.


@checker
def check_spoilt(answer) -> str:
    """Exercise 1: `answer(tokens, nums, order, rows, num_rows)` lists the rows that other tiles spoil."""

    def spoilt(tokens, nums, order, rows, num_rows, *, wins=lambda order: order):
        stored = np.full_like(nums, rows)
        last = _last(tokens, stored, wins(order), num_rows)
        return np.flatnonzero(last != _last(tokens, nums, order, num_rows)).tolist()

    def written_twice(tokens, nums, order, rows, num_rows):
        return [row for row in range(num_rows) if sum(t <= row < t + rows for t in tokens) > 1]

    def batch(lengths, rows, seed):
        tokens, nums = _tiles(lengths, rows)
        numbers = np.arange(len(tokens))
        orders = numbers, numbers[::-1], *(np.random.default_rng(seed + i).permutation(numbers) for i in range(2))
        return [(tokens, nums, order.tolist(), rows, int(sum(lengths))) for order in orders]

    likely = (
        (written_twice, "These rows are written more than once; some of them end up right."),
        (dict(wins=lambda order: order[::-1]), "These rows are wrong after the *first* store; the last one wins."),
        (dict(wins=sorted), "This is right for the order of the list; tiles store in `order`."),
        (lambda *case: spoilt(*case)[::-1], "Give the rows in rising order."),
    )
    said = "A row is spoilt if the last tile that stores it is not its own; `out` has `num_rows` rows."
    draw = lambda rng: batch(rng.integers(1, 20, 4).tolist(), int(rng.integers(2, 12)), rng.integers(99))[2]
    cases = [case for lengths, rows in SPOILT for case in batch(lengths, rows, 0)]
    require_answers(answer, cases, spoilt, likely, said, draw=draw)
    return (
        "In the order of the list each tile repairs what the tiles before it have spoilt. "
        "In other orders some rows stay spoilt."
    )


@checker
def check_store(answer) -> str:
    """Exercise 2: `answer(x, tokens, nums, num_rows)` stores the first `nums` rows of each tile from `tokens` on."""
    for seed, (lengths, rows, width) in enumerate(STORES):
        order = np.random.default_rng(seed).permutation(len(lengths))
        nums, tokens = np.array(lengths, np.int32)[order], (np.cumsum(lengths) - lengths).astype(np.int32)[order]
        x, num_rows = normal(seed, (len(lengths), rows, width)), sum(lengths) + rows
        answer_to = functools.partial(answer, num_rows=num_rows)
        args = x, jnp.asarray(tokens), jnp.asarray(nums)
        given = run_kernel(answer_to, *args, copies={"store": rows.bit_length()})
        played = play_kernel(answer_to, *args)
        if any(block.stored for block in itertools.chain(*played)):
            raise NotYet("it stores rows by themselves: store them by TMA, with copies of fixed sizes")
        _require_loads_once(played)
        _require_stores_together(played)
        if given.shape != (num_rows, width):
            raise NotYet(f"the result has shape {given.shape}; it must be {(num_rows, width)}")
        out = np.asarray(given)[: sum(lengths)]
        exact = np.concatenate([np.asarray(x[tile])[: nums[tile]] for tile in np.argsort(order)])
        require_close(out, exact, 0, f"{lengths} queries in tiles of {rows} rows")
    return "The number of rows, written in binary, is the list of boxes."


@checker
def check_weights(answer) -> str:
    """Exercise 3: `answer(s, heads)` is the causal softmax of logits, with `heads` heads in a tile."""
    for num_q, num_kv, num_heads, heads, size in WEIGHTS:
        s = size * normal(num_q + num_kv, (num_q, num_heads, num_kv))
        where = f"T = {num_q}, S = {num_kv}, N = {num_heads}, {heads} head{'s' * (heads > 1)} in a tile"
        copies = dict.fromkeys(("load", "store"), 64 // heads)  # One for each query of a tile.
        answer_to = functools.partial(answer, heads=heads)
        out = run_kernel(answer_to, s, copies=copies)
        played = play_kernel(answer_to, s)
        if any(block.stored or block.fetched for block in itertools.chain(*played)):
            raise NotYet("it loads or stores rows by themselves: copy them by TMA, in both directions")
        require_loads_together(played)
        _require_stores_together(played)
        exact = _weights(s, heads, lambda row, heads=heads: row // heads)
        if size > 1 and np.isnan(out).any():  # The same shape had none.
            raise NotYet(f"{where}: with large logits exponentials overflow: subtract each row's maximum first")
        require_close(out, exact, 1e-4, where, _wrong_weights(s, heads))
    return "Row r of a tile is query r / heads and head r mod heads, from the load through the mask to the store."


@checker
def check_deal(answer) -> str:
    """Exercise 4: `answer(block, blocks, total)` lists the tiles of a block, dealt out back and forth."""

    def mine(block, blocks, total, *, up=True, turns=True):
        waves = -(-total // blocks) if up else total // blocks
        places = (blocks - 1 - block if wave % 2 and turns else block for wave in range(waves))
        return [n for wave, place in enumerate(places) if (n := wave * blocks + place) < total]

    likely = (
        (dict(turns=False), "That is one direction, every wave like the first."),
        (dict(up=False), "No block computes the last tiles, which fill no whole wave."),
        (lambda *case: mine(*case)[::-1], "The right tiles, in another order."),
    )
    said = "Every second wave begins with the last block, and the last wave may be short."
    cases = [(block, *deal) for deal in DEALS for block in range(deal[0])]

    def draw(rng):
        blocks, total = rng.integers((1, 0), (12, 60)).tolist()
        return int(rng.integers(blocks)), blocks, total

    require_answers(answer, cases, mine, likely, said, draw=draw)
    return "A rule of arithmetic alone: each block knows its tiles without any communication."


def _require_loads_once(played) -> None:
    """Raises NotYet if a block copies some rows of `x` (tiles, rows, columns) to shared memory twice."""
    for block in itertools.chain(*played):
        boxes = [event.box for event in block.events if event.kind == "load" and len(event.box or ()) == 3]
        if any(itertools.starmap(overlap, itertools.combinations(boxes, 2))):
            raise NotYet("it loads the same rows twice: one copy to shared memory is enough")


def _require_stores_together(played) -> None:
    """Raises NotYet if a block waits for one store to GMEM before it starts the next."""
    for block in itertools.chain(*played):
        stores = [event for event in block.events if event.kind == "store"]
        if any(first.end & second.known for first, second in itertools.pairwise(stores)):
            raise NotYet("it waits for one store before it starts the next: start all of them, then wait once")


def _tiles(lengths, rows: int):
    """(first row, number of queries) of the tiles of sequences of these lengths."""
    ends = np.cumsum(lengths)
    firsts = [
        (row, min(rows, int(end) - row))
        for end, length in zip(ends, lengths, strict=True)
        for row in range(int(end) - length, int(end), rows)
    ]
    return tuple(np.array(column) for column in zip(*firsts, strict=True))


def _last(tokens, nums, order, num_rows: int):
    """Tile that stored each row last, if tile n stores `nums[n]` rows; -1 for none."""
    last = np.full(num_rows, -1)
    for n in order:
        last[tokens[n] : tokens[n] + nums[n]] = n
    return last


def _weights(s, heads: int, query, stored=None):
    """The softmax of logits, tile by tile, if row r of a tile is masked as query `query(r)`, and its results are stored
    as those of row `stored(r)`."""
    s = wide(s)
    (num_q, num_heads, num_kv), queries = s.shape, 64 // heads
    rows, key = np.arange(64), np.arange(num_kv)
    target = rows if stored is None else stored(rows)
    out = np.zeros_like(s)
    for first, head in itertools.product(range(0, num_q, queries), range(0, num_heads, heads)):
        place = slice(first, first + queries), slice(head, head + heads)
        position = num_kv - num_q + first + query(rows)
        tile = np.where(key <= position[:, None], s[place].reshape(64, num_kv), -np.inf)
        p = np.exp(tile - tile.max(axis=1, keepdims=True))
        mine = np.empty_like(p)
        mine[target] = p / p.sum(axis=1, keepdims=True)
        out[place] = mine.reshape(queries, heads, num_kv)
    return out


def _wrong_weights(s, heads: int):
    """Results of likely mistakes, and what is said of them."""
    by_query, by_row, by_head = lambda row: row // heads, lambda row: row, lambda row: row % heads
    head_by_head = lambda row: row % (64 // heads) * heads + row // (64 // heads)
    mask = f"the mask takes the row for the query; a query has {heads} neighbouring rows"
    store = "rows are loaded query by query, and stored head by head"
    for said, how in (
        (f"{mask}. And {store}.", (by_row, head_by_head)),
        (f"{mask}.", (by_row, None)),
        (f"{store}.", (by_query, head_by_head)),
        ("row mod heads is the head; which one is the query?", (by_head, None)),
        (f"row mod heads is the head; which one is the query? And {store}.", (by_head, head_by_head)),
    ):
        yield _weights(s, heads, *how), said
