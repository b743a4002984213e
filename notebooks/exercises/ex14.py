"""Chapter 14's exercises: keys that a query sees, tiles of a batch, the mask of a tile, and a neighbour's NaN."""

import collections
import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, equations, normal, require_answers, require_close, run_kernel, wide

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
# Queries and keys of each sequence; the keys of most begin at no multiple of 8.
MASKED = (((70, 1, 20), (70, 90, 150)), ((3, 0, 64, 30), (13, 5, 64, 20)))
UNKNOWN = (  # Raised where a traced value is asked for.
    jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError,
)  # fmt: skip
HOST_CALLS = {"io_callback", "pure_callback"}
Tile = collections.namedtuple("Tile", "token num_q source first_kv num_kv first_q")
# Whether a row of a tile sees a key; and other rules, each with what is wrong with it.
SEES = lambda row, key, t: (key >= t.first_kv) & (key < t.num_kv) & (key <= t.first_q + row)
MASKS = (
    (lambda row, key, t: key <= row, "this is the mask of a sequence that begins at row 0 of k and has no past. A "
     "row's position is first_q + row."),
    (lambda row, key, t: (key >= t.first_kv) & (key <= t.first_kv + row) & (key < t.num_kv), "the mask is aligned at "
     "the starts: the last query must see the last key. A row's position is first_q + row."),
    (lambda row, key, t: (key >= t.first_kv) & (key <= t.first_q + row), "the keys from num_kv on belong to the "
     "sequence after it, and rows after the last query see them."),
    (lambda row, key, t: (key < t.num_kv) & (key <= t.first_q + row), "the keys before first_kv belong to the sequence "
     "before."),
    (lambda row, key, t: (key >= t.first_kv) & (key < t.num_kv) & (key <= t.first_kv + t.first_q + row), "first_q "
     "already counts from source, as first_kv does: do not add the two."),
    (lambda row, key, t: (key >= t.first_kv) & (key < t.num_kv) & (key < t.first_q + row), "a query sees the key at "
     "its own position, too."),
    (lambda row, key, t: (key >= t.first_kv) & (key < t.num_kv) & (row >= 0), "every row sees all keys of the "
     "sequence; a query must not see keys after its own position."),
    (lambda row, key, t: SEES(row, key, t) & (row < t.num_q), "rows after the last query see what a query there would "
     "see: nobody stores their results, so their number need not be compared."),
)  # fmt: skip


@checker
def check_keys(answer) -> str:
    """Exercise 1: `answer(t, i, cu_q, cu_kv, left)` is (first, end) of the rows of k that a query sees."""

    def queries(q_lens, kv_lens, left):
        cu_q, cu_kv = (np.append(0, np.cumsum(lens)) for lens in (q_lens, kv_lens))
        return [(t, i, cu_q, cu_kv, left) for i, num_q in enumerate(q_lens) for t in range(num_q)]

    def draw(rng):
        cases = queries([2, *rng.integers(0, 6, 3)], rng.integers(0, 9, 4), int(rng.integers(0, 9)))
        return cases[rng.integers(len(cases))]

    def rows(t, i, cu_q, cu_kv, left, *, aligned=True, start=True, bound=True):
        num_q, num_kv = np.diff(cu_q)[i], np.diff(cu_kv)[i]
        position = num_kv - num_q + t if aligned else t
        first = max(position - left, 0) if bound else position - left
        return [int(cu_kv[i] * start + key) for key in range(first, max(position + 1, 0))]

    @functools.wraps(answer)
    def of_range(*case):
        given = answer(*case)
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise NotYet(f"keys_of gives {given!r}; it must be (first, end).")
        if given[1] < given[0]:
            raise NotYet(f"keys_of gives {given}: where nothing is seen, first and end are equal.")
        return list(range(*map(operator.index, given)))

    likely = (
        (dict(aligned=False), "That is aligned at the starts; the last query sees the last key."),
        (dict(start=False), "The answer counts keys of the sequence; rows of k are asked for."),
        (dict(bound=False), "A sequence has no keys before its first."),
    )
    said = "Its last query sees its last key, and each query `left` keys before its own position."
    cases = [case for lens, left in itertools.product(SEQUENCES, (0, 1, 3, 100)) for case in queries(*lens, left)]
    require_answers(of_range, cases, rows, likely, said, draw=draw)
    return "Aligned at the ends: a chunk, a decode token and a whole prompt are one case."


@checker
def check_tiles(answer) -> str:
    """Exercise 2: `answer(cu_q, queries, most)`, under `jax.jit`, is (first rows, numbers of queries) of the tiles,
    sequence after sequence, and of the unused rows of a list of `most` rows."""

    def tiles(cu_q, queries):
        borders = itertools.pairwise(cu_q.tolist())
        return [(row, min(queries, end - row)) for start, end in borders for row in range(start, end, queries)]

    @functools.wraps(answer)
    def in_pairs(cu_q, queries):
        most = len(cu_q) - 1 + int(cu_q[-1]) // queries
        try:
            traced = jax.jit(lambda cu_q: answer(cu_q, queries, most)).trace(jnp.asarray(cu_q, jnp.int32))
        except UNKNOWN as error:
            raise NotYet(
                "the lengths are values on the GPU, which are not known while it is traced: no NumPy, and no Python "
                "loop over them."
            ) from error
        if HOST_CALLS & {equation.primitive.name for equation in equations(traced.jaxpr.jaxpr)}:
            raise NotYet("the lengths go to the host, which makes the list: the GPU waits for that. Let XLA make it.")
        given = traced.lower().compile()(jnp.asarray(cu_q, jnp.int32))
        if not isinstance(given, tuple | list) or len(given) != 2 or any(np.shape(x) != (most,) for x in given):
            raise NotYet("tiles_of must return two arrays of `most` numbers: write its body.")
        found = list(zip(*(np.asarray(x).tolist() for x in given), strict=True))
        if (least := min(num for _, num in found)) < 0:
            raise NotYet(f"a row of the list has {least} queries: rows after the last tile must have 0.")
        while found and not found[-1][1]:
            found.pop()
        return found

    likely = (
        (lambda cu_q, n: [(row, min(n, cu_q[-1] - row)) for row in range(0, cu_q[-1], n)], "A tile reaches over the "
         "border of a sequence."),
        (lambda cu_q, n: [(row, n) for row, _ in tiles(cu_q, n)], "A tile reaches over the border of a sequence."),
        (lambda *case: tiles(*case)[::-1], "The tiles are right, but their order is not that of the rows."),
    )  # fmt: skip
    said = (
        "Each sequence begins a tile, its last one may have fewer queries, an empty sequence has no tile, and all rows "
        "after the last tile have 0 queries."
    )
    cases = [(np.append(0, np.cumsum(lengths)), queries) for lengths, queries in BATCHES]
    draw = lambda rng: (np.append(0, np.cumsum(rng.integers(0, 200, 6))), int(rng.integers(30, 99)))
    require_answers(in_pairs, cases, tiles, likely, said, draw=draw)
    return "No tile reaches over a border, every query has one, and the host never sees the lengths."


@checker
def check_mask(answer) -> str:
    """Exercise 3: `answer(v, listed)` are the sums of the values that each row of each tile sees."""
    for q_lens, kv_lens in MASKED:
        listed = _list(q_lens, kv_lens)
        v = normal(sum(kv_lens), (sum(kv_lens) // 8 * 8 + 128, 64), jnp.bfloat16)
        out = run_kernel(answer, v, jnp.asarray(listed))
        sums = lambda sees, v=v, listed=listed: np.stack([_seen_sums(v, tile, sees) for tile in listed])
        likely = ((sums(sees), said) for sees, said in MASKS)
        what = f"sequences of {q_lens} queries and {kv_lens} keys, (tile, row, column)"
        require_close(out, sums(SEES), 2e-3, what, likely)
    return (
        "All in the coordinates of the list. The end of the keys matters only for rows that are no queries; the "
        "package therefore drops that comparison under a causal mask."
    )


@checker
def check_sums(answer) -> str:
    """Exercise 4: `answer(v, weights, cu_kv)` are the weighted sums of the rows of each sequence."""
    few, more = np.array([0, 5, 13, 13, 22], np.int32), np.array([0, 0, 31, 32, 39, 40], np.int32)
    # Rows in a block of the sequence after them (4), of the one before them (6, 14), and after all sequences.
    cases = (0, None), (np.nan, 4), (np.inf, 4), (np.nan, 6), (np.inf, 14), (np.nan, 22), (np.inf, 23)
    for poison, at, cu_kv, columns in (*((*case, few, 128) for case in cases), (np.nan, 31, more, 256)):
        v = np.array(normal(14, (-(-cu_kv[-1] // 8) * 8, columns)))
        if at is not None:
            v[at] = poison
        weights = normal(15, (len(v),))
        out = np.asarray(run_kernel(answer, jnp.asarray(v), weights, jnp.asarray(cu_kv)))
        parts = [slice(start, end) for start, end in itertools.pairwise(cu_kv)]
        exact = np.array([wide(weights)[part] @ v[part] for part in parts])
        lost = lambda x: ~np.isfinite(x)
        if at is not None and out.shape == exact.shape and (wrong := (lost(out) != lost(exact)).any(axis=1)).any():
            seq = int(np.argmax(wrong))
            foreign = f"and so does the sum of sequence {seq}, to which the row does not belong"
            own = f"but the sum of sequence {seq}, to which the row belongs, has lost it"
            what = own if lost(exact[seq]).any() else foreign
            raise NotYet(f"row {at} holds {poison}, {what}")
        require_close(out, exact, 1e-4, "without any NaN" if at is None else f"with {poison} in row {at}")
    return "The products of foreign rows may be NaN, and zeros take their place before they are added."


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
    return sees(row, key, t) @ wide(v)[t.source + key]
