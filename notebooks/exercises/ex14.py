"""Chapter 14's exercises: keys that a query sees, tiles of a batch, a neighbour's NaN, ragged stores, and a deal."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_close, run_kernel

BATCHES = [  # Lengths of queries, and queries of a tile.
    ((100, 1, 37, 64), 64),
    ((3, 0, 0, 5), 4),
    ((0, 128, 0, 1, 129, 0), 64),
    ((1,) * 9, 16),
    ((16, 32, 15), 16),
]
SEQUENCES = [  # Queries and keys of each sequence.
    ((4, 1, 3, 5), (4, 6, 8, 2)),
    ((1, 0, 7), (1, 3, 7)),
    ((6, 2), (0, 9)),
]
DEALS = [(1, 5), (4, 16), (4, 18), (3, 20), (5, 3), (4, 4), (4, 0), (7, 30)]  # Blocks, tiles.


@checker
def check_tiles(answer) -> str:
    """Exercise 2: `answer(cu_q, queries)` is (first rows, numbers of queries) of the tiles, sequence after sequence."""
    for lengths, queries in BATCHES:
        where = f"for lengths {lengths} and {queries} queries a tile"
        cu_q = np.append(0, np.cumsum(lengths))
        given = answer(cu_q.copy(), queries)
        if given is None:
            raise NotYet("tiles_of returns None: write its body.")
        try:
            rows, nums = (np.asarray(x).astype(int).tolist() for x in given)
            given = list(zip(rows, nums, strict=True))
        except (TypeError, ValueError) as error:
            raise NotYet(f"{where}, the answer must be two arrays with one entry for each tile.") from error
        _judge_tiles(given, cu_q, queries, where)
    return "No tile reaches over a border, and every query has one."


@checker
def check_sums(answer) -> str:
    """Exercise 3: `answer(v, weights, cu_kv)` are the weighted sums of the rows of each sequence."""
    cu_kv = np.array([0, 5, 13, 13, 22], np.int32)
    for poisoned in ((), (4,), (22, 23)):
        v = np.array(normal(14, (24, 128)))
        v[list(poisoned)] = np.nan
        weights = normal(15, (24,))
        out = np.asarray(run_kernel(answer, jnp.asarray(v), weights, jnp.asarray(cu_kv)))
        parts = [slice(start, end) for start, end in itertools.pairwise(cu_kv)]
        exact = np.array([np.asarray(weights, np.float64)[part] @ v[part] for part in parts])
        if out.shape == exact.shape and (np.isnan(out) & ~np.isnan(exact)).any():
            seq = int(np.argmax((np.isnan(out) & ~np.isnan(exact)).any(axis=1)))
            raise NotYet(f"row {poisoned[0]} holds NaN, and so does the sum of sequence {seq}, which ends elsewhere")
        require_close(out, exact, 1e-4, f"with NaN in rows {list(poisoned)}" if poisoned else "without any NaN")
    return "Zeros take the place of the products, so no NaN is multiplied."


@checker
def check_store(answer) -> str:
    """Exercise 4: `answer(x, tokens, nums, num_rows)` stores the first `nums` rows of each tile from `tokens` on."""
    for lengths, seed in (((16, 3, 9, 15, 1), 0), ((1, 2, 4, 8, 7, 16), 1)):
        order = np.random.default_rng(seed).permutation(len(lengths))
        nums, tokens = np.array(lengths, np.int32)[order], (np.cumsum(lengths) - lengths).astype(np.int32)[order]
        x, num_rows = normal(seed, (len(lengths), 16, 128)), sum(lengths) + 16
        given = run_kernel(functools.partial(answer, num_rows=num_rows), x, jnp.asarray(tokens), jnp.asarray(nums))
        out = np.asarray(given)[: sum(lengths)]
        exact = np.concatenate([np.asarray(x[tile])[: nums[tile]] for tile in np.argsort(order)])
        require_close(out, exact, 0, f"tiles of {lengths} rows")
    return "The number of rows, written in binary, is the list of boxes."


@checker
def check_keys(answer) -> str:
    """Exercise 1: `answer(t, i, cu_q, cu_kv, left)` is (first, end) of the rows of k that a query sees."""
    for (q_lens, kv_lens), left in itertools.product(SEQUENCES, (0, 1, 3, 100)):
        cu_q, cu_kv = (np.append(0, np.cumsum(lens)) for lens in (q_lens, kv_lens))
        for i, (num_q, num_kv) in enumerate(zip(q_lens, kv_lens, strict=True)):
            for t in range(num_q):
                where = (
                    f"for query {t} of sequence {i}, which has {num_q} queries and {num_kv} keys from row "
                    f"{cu_kv[i]} on, and left = {left}"
                )
                given = answer(t, i, cu_q.copy(), cu_kv.copy(), left)
                if given is None:
                    raise NotYet("keys_of returns None: write its body.")
                try:
                    first, end = (int(x) for x in given)
                except (TypeError, ValueError) as error:
                    raise NotYet(f"{where}, the answer is {given!r}; it must be (first, end).") from error
                _judge_keys(first, end, t, num_q, num_kv, int(cu_kv[i]), left, where)
    return "Aligned at the ends: a chunk, a decode token and a whole prompt are one case."


@checker
def check_deal(answer) -> str:
    """Exercise 5: `answer(block, blocks, total)` lists the numbers of the tiles of a block, dealt out to and fro."""
    for blocks, total in DEALS:
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


def _judge_tiles(given: list[tuple[int, int]], cu_q, queries: int, where: str):
    """Raises NotYet unless `given` are (first row, number) of the tiles."""
    wanted = [
        (first, min(queries, int(end) - first))
        for start, end in itertools.pairwise(cu_q)
        for first in range(int(start), int(end), queries)
    ]
    if given == wanted:
        return
    if any(num <= 0 for _, num in given):
        raise NotYet(f"{where}, there is a tile without queries: an empty sequence has no tile.")
    if any(num > queries for _, num in given):
        raise NotYet(f"{where}, a tile has {max(num for _, num in given)} queries.")
    starts = [int(start) for start in cu_q[1:-1]]
    for first, num in given:
        if crossed := [start for start in starts if first < start < first + num]:
            raise NotYet(
                f"{where}, the tile of rows {first} to {first + num - 1} reaches over the border at row {crossed[0]}."
            )
    if sorted(given) == wanted:
        raise NotYet(f"{where}, the tiles are right, but their order is not that of the rows.")
    if len(given) != len(wanted):
        raise NotYet(f"{where}, there are {len(given)} tiles; it must be {len(wanted)}.")
    n = next(n for n, pair in enumerate(zip(given, wanted, strict=True)) if pair[0] != pair[1])
    raise NotYet(
        f"{where}, tile {n} begins at row {given[n][0]} with {given[n][1]} queries; it must begin at row "
        f"{wanted[n][0]} with {wanted[n][1]}."
    )


def _judge_keys(first: int, end: int, t: int, num_q: int, num_kv: int, start: int, left: int, where: str):
    """Raises NotYet unless the query sees the rows from `first` to `end`."""
    position = num_kv - num_q + t
    seen = [start + j for j in range(num_kv) if position - left <= j <= position]
    if end < first:
        raise NotYet(f"{where}, the end, {end}, lies before the first, {first}: where nothing is seen they are equal.")
    given = list(range(first, end))
    if given == seen:
        return
    if not seen:
        raise NotYet(f"{where}, it sees nothing, and rows {first} to {end - 1} are given.")
    if [row + start for row in given] == seen:
        raise NotYet(f"{where}, the answer counts keys of the sequence; rows of k are asked for.")
    if given == [start + j for j in range(num_kv) if t - left <= j <= t]:
        raise NotYet(f"{where}, the answer is aligned at the starts; the last query sees the last key.")
    if any(row < start for row in given):
        raise NotYet(f"{where}, row {first} belongs to the sequence before.")
    if any(row >= start + num_kv for row in given):
        raise NotYet(f"{where}, row {end - 1} belongs to the sequence after it.")
    raise NotYet(f"{where}, it sees rows {seen[0]} to {seen[-1]}, not {first} to {end - 1}.")


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
