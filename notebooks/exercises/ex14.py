"""Chapter 14's exercises: keys that a query sees, tiles of a batch, the mask of a tile, and a neighbour's NaN."""

import collections
import itertools

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, drawn, normal, require_close, run_kernel

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
# Queries and keys of each sequence: no key of these begins at a multiple of 8 but the first of all.
MASKED = (((70, 1, 20), (70, 90, 150)), ((3, 0, 64, 30), (13, 5, 64, 20)))
Tile = collections.namedtuple("Tile", "token num_q source first_kv num_kv first_q")
# Whether a row of a tile sees a key; and other rules, each with what is wrong with it.
SEES = lambda row, key, t: (key >= t.first_kv) & (key < t.num_kv) & (key <= t.first_q + row)
MASKS = {
    "this is the mask of a sequence that begins at row 0 of k and has no past. A row's position is first_q + row.": (
        lambda row, key, t: key <= row
    ),
    "the mask is aligned at the starts: the last query must see the last key. A row's position is first_q + row.": (
        lambda row, key, t: (key >= t.first_kv) & (key <= t.first_kv + row) & (key < t.num_kv)
    ),
    "the keys from num_kv on belong to the sequence after it, and rows after the last query see them.": (
        lambda row, key, t: (key >= t.first_kv) & (key <= t.first_q + row)
    ),
    "the keys before first_kv belong to the sequence before.": (
        lambda row, key, t: (key < t.num_kv) & (key <= t.first_q + row)
    ),
    "first_q already counts from source, as first_kv does: do not add the two.": (
        lambda row, key, t: (key >= t.first_kv) & (key < t.num_kv) & (key <= t.first_kv + t.first_q + row)
    ),
    "a query sees the key at its own position, too.": (
        lambda row, key, t: (key >= t.first_kv) & (key < t.num_kv) & (key < t.first_q + row)
    ),
    "every row sees all keys of the sequence; a query must not see keys after its own position.": (
        lambda row, key, t: (key >= t.first_kv) & (key < t.num_kv) & (row >= 0)
    ),
}


@checker
def check_keys(answer) -> str:
    """Exercise 1: `answer(t, i, cu_q, cu_kv, left)` is (first, end) of the rows of k that a query sees."""
    anything = lambda rng: ((rng.integers(0, 6, 4).tolist(), rng.integers(0, 9, 4).tolist()), int(rng.integers(0, 9)))
    for (q_lens, kv_lens), left in (*itertools.product(SEQUENCES, (0, 1, 3, 100)), *drawn(anything)):
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
def check_tiles(answer) -> str:
    """Exercise 2: `answer(cu_q, queries)` is (first rows, numbers of queries) of the tiles, sequence after sequence."""
    anything = lambda rng: (rng.integers(0, 200, 6).tolist(), int(rng.integers(1, 99)))
    for lengths, queries in (*BATCHES, *drawn(anything)):
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
def check_mask(answer) -> str:
    """Exercise 3: `answer(v, listed)` are the sums of the values that each row of each tile sees."""
    for q_lens, kv_lens in MASKED:
        listed = _list(q_lens, kv_lens)
        v = normal(sum(kv_lens), (sum(kv_lens) // 8 * 8 + 128, 64), jnp.bfloat16)
        out = np.asarray(run_kernel(answer, v, jnp.asarray(listed)), np.float64)
        shape = (len(listed), 64, 64)
        if out.shape != shape:
            raise NotYet(f"the result has shape {out.shape}; it must be {shape}")
        for n, tile in enumerate(listed):
            fields = ", ".join(f"{name} {x}" for name, x in zip(Tile._fields, tile, strict=True))
            where = f"sequences of {q_lens} queries and {kv_lens} keys, tile {n} ({fields})"
            exact = _seen_sums(v, tile, SEES)
            if said := _mask_hint(out[n], v, tile, exact):
                raise NotYet(f"{where}: {said}")
            require_close(out[n], exact, 2e-3, where)
    return "All in the coordinates of the list. The end of the keys matters only for rows that are no queries."


@checker
def check_sums(answer) -> str:
    """Exercise 4: `answer(v, weights, cu_kv)` are the weighted sums of the rows of each sequence."""
    cu_kv = np.array([0, 5, 13, 13, 22], np.int32)
    for poisoned in ((), (4,), (22, 23)):
        v = np.array(normal(14, (24, 128)))
        v[list(poisoned)] = np.nan
        weights = normal(15, (24,))
        out = np.asarray(run_kernel(answer, jnp.asarray(v), weights, jnp.asarray(cu_kv)))
        parts = [slice(start, end) for start, end in itertools.pairwise(cu_kv)]
        exact = np.array([np.asarray(weights, np.float64)[part] @ v[part] for part in parts])
        if out.shape == exact.shape and (wrong := (np.isnan(out) != np.isnan(exact)).any(axis=1)).any():
            seq = int(np.argmax(wrong))
            if np.isnan(exact[seq]).any():
                raise NotYet(
                    f"row {poisoned[0]} holds NaN, and the sum of sequence {seq}, to which it belongs, has none"
                )
            where = f"row {poisoned[0]} holds NaN, and so does" if poisoned else "there is a NaN in"
            raise NotYet(f"{where} the sum of sequence {seq}, to which that row does not belong")
        require_close(out, exact, 1e-4, f"with NaN in rows {list(poisoned)}" if poisoned else "without any NaN")
    return "Zeros take the place of the products, so no NaN is multiplied."


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


def _list(q_lens, kv_lens):
    """The list of tiles of 64 queries, with the fields of `Tile`."""
    cu_q, cu_kv = (np.append(0, np.cumsum(lens)) for lens in (q_lens, kv_lens))
    found = []
    for i, (num_q, num_kv) in enumerate(zip(q_lens, kv_lens, strict=True)):
        before = cu_kv[i] % 8
        for first in range(0, num_q, 64):
            size, end = min(64, num_q - first), before + num_kv
            found.append((cu_q[i] + first, size, cu_kv[i] - before, before, end, end - num_q + first))
    return np.array(found, np.int32)


def _seen_sums(v, tile, sees):
    """The sums of the values of a tile's rows, if row `row` sees key `key` where `sees(row, key, tile)`."""
    t = Tile(*tile)
    row, key = np.arange(64)[:, None], np.arange(-(-t.num_kv // 64) * 64)
    return sees(row, key, t) @ np.asarray(v, np.float64)[t.source + key]


def _mask_hint(out, v, tile, exact):
    """Names the mistake that explains the sums of a tile."""
    close = lambda wanted: np.allclose(out, wanted, rtol=2e-3, atol=2e-3)
    if close(exact):
        return None
    return next((said for said, sees in MASKS.items() if close(_seen_sums(v, tile, sees))), None)
