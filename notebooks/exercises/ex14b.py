"""Chapter 14b's exercises: rows that a neighbour spoils, ragged stores, heads that share a tile, and a deal."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, drawn, normal, require_close, run_kernel

SPOILT = (((5, 1, 20, 3), 8), ((16, 16), 8), ((1, 1, 1, 9, 2), 4), ((7,), 16))  # Queries of sequences; rows of a tile.
WEIGHTS = ((32, 64, 2, 2), (32, 96, 4, 4), (8, 40, 16, 8))  # T, S, N, and heads of a tile.
DEALS = [(1, 5), (4, 16), (4, 18), (3, 20), (5, 3), (4, 4), (4, 0), (7, 30)]  # Blocks, tiles.


@checker
def check_spoilt(answer) -> str:
    """Exercise 1: `answer(tokens, nums, order, rows, num_rows)` lists the rows that other tiles spoil."""
    for lengths, rows in (*SPOILT, *drawn(lambda rng: (rng.integers(1, 20, 4).tolist(), int(rng.integers(2, 12))))):
        tokens, nums = _tiles(lengths, rows)
        numbers = np.arange(len(tokens))
        for order in (*(np.random.default_rng(seed).permutation(numbers) for seed in (0, 1)), numbers, numbers[::-1]):
            where = f"for tiles of {nums.tolist()} rows, {rows} of each stored, in the order {order.tolist()}"
            given = answer(tokens.copy(), nums.copy(), order.tolist(), rows, sum(lengths))
            if given is None:
                raise NotYet("spoilt returns None: write its body.")
            try:
                given = [int(row) for row in given]
            except (TypeError, ValueError) as error:
                raise NotYet(f"{where}, the answer is {given!r}; it must be a list of rows.") from error
            _judge_spoilt(given, tokens, nums, order, rows, sum(lengths), where)
    return (
        "In the order of the list each tile repairs what the tiles before it have spoilt. "
        "In other orders some rows stay spoilt."
    )


@checker
def check_store(answer) -> str:
    """Exercise 2: `answer(x, tokens, nums, num_rows)` stores the first `nums` rows of each tile from `tokens` on."""
    for lengths, seed in (((16, 3, 9, 15, 1), 0), ((1, 2, 4, 8, 7, 16), 1)):
        order = np.random.default_rng(seed).permutation(len(lengths))
        nums, tokens = np.array(lengths, np.int32)[order], (np.cumsum(lengths) - lengths).astype(np.int32)[order]
        x, num_rows = normal(seed, (len(lengths), 16, 128)), sum(lengths) + 16
        answer_to = functools.partial(answer, num_rows=num_rows)
        given = run_kernel(answer_to, x, jnp.asarray(tokens), jnp.asarray(nums), copies={"store": 5})
        out = np.asarray(given)[: sum(lengths)]
        exact = np.concatenate([np.asarray(x[tile])[: nums[tile]] for tile in np.argsort(order)])
        require_close(out, exact, 0, f"tiles of {lengths} rows")
    return "The number of rows, written in binary, is the list of boxes."


@checker
def check_weights(answer) -> str:
    """Exercise 3: `answer(s, heads)` is the causal softmax of logits, with `heads` heads in a tile."""
    for num_q, num_kv, num_heads, heads in WEIGHTS:
        s = normal(num_q + num_kv, (num_q, num_heads, num_kv))
        where = f"T = {num_q}, S = {num_kv}, N = {num_heads}, {heads} head{'s' * (heads > 1)} in a tile"
        out = np.asarray(run_kernel(functools.partial(answer, heads=heads), s))
        query = lambda row, heads=heads: row // heads
        exact = _weights(s, heads, query)
        if out.shape == exact.shape and (said := _weights_hint(out, s, heads, exact)):
            raise NotYet(f"{where}: {said}")
        require_close(out, exact, 1e-4, where)
    return "Row r of a tile is query r / heads and head r mod heads, from the load through the mask to the store."


@checker
def check_deal(answer) -> str:
    """Exercise 4: `answer(block, blocks, total)` lists the numbers of the tiles of a block, dealt out to and fro."""
    for blocks, total in (*DEALS, *drawn(lambda rng: rng.integers((1, 0), (12, 60)).tolist())):
        where = f"for {total} tiles and {blocks} blocks"
        dealt = []
        for block in range(blocks):
            given = answer(block, blocks, total)
            if given is None:
                raise NotYet("my_tiles returns None: write its body.")
            try:
                dealt.append([int(number) for number in given])
            except (TypeError, ValueError) as error:
                raise NotYet(f"{where}, block {block} gets {given!r}; it must be a list of numbers.") from error
        _judge_deal(dealt, blocks, total, where)
    return "A rule of arithmetic alone: each block knows its tiles without any communication."


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


def _judge_spoilt(given: list[int], tokens, nums, order, rows: int, num_rows: int, where: str):
    """Raises NotYet unless `given` are the rows that do not end up with their own tile's result."""
    stored, owner = np.full_like(nums, rows), _last(tokens, nums, order, num_rows)
    wanted = np.flatnonzero(_last(tokens, stored, order, num_rows) != owner).tolist()
    if given == wanted:
        return
    if over := [row for row in given if not 0 <= row < num_rows]:
        raise NotYet(f"{where}, row {over[0]} is given, and out has {num_rows} rows.")
    if sorted(given) == wanted:
        raise NotYet(f"{where}, the rows are right; give them in rising order.")
    times = sum(np.bincount(np.arange(t, min(t + rows, num_rows)), minlength=num_rows) for t in tokens)
    if given == np.flatnonzero(times > 1).tolist():
        raise NotYet(f"{where}, these rows are written more than once; some of them end up right.")
    if given == np.flatnonzero(_last(tokens, stored, order[::-1], num_rows) != owner).tolist():
        raise NotYet(f"{where}, these rows are wrong after the *first* store; the last one wins.")
    if given == np.flatnonzero(_last(tokens, stored, np.sort(order), num_rows) != owner).tolist():
        raise NotYet(f"{where}, this is right for the order of the list; tiles store in `order`.")
    if more := sorted(set(given) - set(wanted)):
        raise NotYet(f"{where}, row {more[0]} is given, and its own tile is the last to store it.")
    row = min(set(wanted) - set(given), default=None)
    if row is None:
        raise NotYet(f"{where}, a row is given twice.")
    raise NotYet(f"{where}, row {row} is missing: another tile stores it after its own.")


def _weights(s, heads: int, query, stored=None):
    """The softmax of logits, tile by tile, if row r of a tile is masked as query `query(r)`, and its results are stored
    as those of row `stored(r)`."""
    s = np.asarray(s, np.float64)
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


def _weights_hint(out, s, heads: int, exact):
    """Names the mistake that explains the weights."""
    close = lambda wanted: np.allclose(out, wanted, rtol=1e-3, atol=1e-4)
    if close(exact):
        return None
    queries = 64 // heads
    by_query, by_row, by_head = lambda row: row // heads, lambda row: row, lambda row: row % heads
    head_by_head = lambda row: row % queries * heads + row // queries
    mask = f"the mask takes the row for the query; a query has {heads} neighbouring rows"
    store = "rows are loaded query by query, and stored head by head"
    likely = {
        f"{mask}. And {store}.": (by_row, head_by_head),
        f"{mask}.": (by_row, None),
        f"{store}.": (by_query, head_by_head),
        "row mod heads is the head; which one is the query?": (by_head, None),
        f"row mod heads is the head; which one is the query? And {store}.": (by_head, head_by_head),
    }
    return next((said for said, how in likely.items() if close(_weights(s, heads, *how))), None)


def _judge_deal(dealt: list[list[int]], blocks: int, total: int, where: str):
    """Raises NotYet unless tile after tile goes to the blocks, to and fro."""
    every = [number for mine in dealt for number in mine]
    if over := [number for number in every if not 0 <= number < total]:
        raise NotYet(f"{where}, tile {over[0]} is computed, and there is none.")
    if missing := set(range(total)) - set(every):
        raise NotYet(f"{where}, no block computes tile {min(missing)}.")
    if len(every) > total:
        twice = next(number for number in every if every.count(number) > 1)
        raise NotYet(f"{where}, tile {twice} is computed twice.")
    for block, mine in enumerate(dealt):
        wanted = [
            number
            for wave in range(-(-total // blocks))
            if (number := wave * blocks + (blocks - 1 - block if wave % 2 else block)) < total
        ]
        if mine == list(range(block, total, blocks)) and mine != wanted:
            raise NotYet(f"{where}, block {block} gets {mine}: that is one direction, every wave like the first.")
        if sorted(mine) == wanted and mine != wanted:
            raise NotYet(f"{where}, block {block} gets {mine}: the right tiles, in another order.")
        if mine != wanted:
            raise NotYet(f"{where}, block {block} gets {mine}; it must be {wanted}.")
