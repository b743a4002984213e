"""Chapter 13's exercises: slots of tokens, what bounds a step, pages in order, and the tokens at the end."""

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, play_kernel, require_answers, require_close, run_kernel, wide

HBM, TENSOR = 4.8e12, 989e12  # Bytes and operations a second.
ROWS = 64  # Rows of a WGMMA.
STEPS = (  # Lengths, query heads, KV heads, head_dim.
    ((8192,) * 64, 32, 8, 128),
    ((300, 0, 70, 5000), 32, 32, 128),
    ((1000, 24), 8, 1, 64),
    ((7000,), 64, 1, 256),
)
PAGE, BLOCK, COLUMNS = 16, 64, 12  # Tokens of a page and of a block; pages of exercise 4's sequence.


@checker
def check_slots(answer) -> str:
    """Exercise 1: `answer(block_tables, seqs, positions, page_size)` are slots of tokens, -1 for a position of -1."""
    cases = []
    for page_size, seed in ((16, 0), (4, 1), (32, 2)):
        rng = np.random.default_rng(seed)
        tables = rng.permutation(24).reshape(3, 8).astype(np.int32)
        seqs = rng.integers(0, 3, 40)
        positions = np.where(rng.random(40) < 0.15, -1, rng.integers(0, 8 * page_size, 40))
        cases.append((tables, seqs, positions, page_size))

    def slots(tables, seqs, positions, page_size):
        found = tables[seqs, positions // page_size] * page_size + positions % page_size
        return np.where(positions < 0, -1, found).tolist()

    real = lambda t, s, p, n, slot: np.where(p < 0, -1, slot(t, s, p, n)).tolist()
    likely = (
        (lambda *case: real(*case, lambda t, s, p, n: p), "The table is not used: tokens lie where their page lies."),
        (lambda *case: real(*case, lambda t, s, p, n: t[s, p // n]), "That is the page; a slot is one of its tokens."),
        (lambda *case: real(*case, lambda t, s, p, n: t[s, p // n] * n), "That is the page's first slot: add the place "
         "in the page."),
        (lambda *case: real(*case, lambda t, s, p, n: t[s, p // n] + p % n), "A page has page_size slots: multiply."),
        (lambda *case: real(*case, lambda t, s, p, n: t[0, p // n] * n + p % n), "Each sequence has its row of the "
         "table."),
        (lambda *case: real(*case, lambda t, s, p, n: t[s, p % n % t.shape[1]] * n + p // n), "Exchange // and %."),
    )  # fmt: skip
    said = "A token with position -1 is padding, and its slot is -1; others: page * page_size + place in the page."
    require_answers(answer, cases, slots, likely, said)
    return "A page from the table, a place in the page; and tokens that are padding have no slot."


@checker
def check_times(answer) -> str:
    """Exercise 2: `answer(kv_lens, num_heads, num_kv_heads, head_dim)` are µs of memory and µs of the tensor cores."""
    likely = (
        (dict(unit=1.0), "That is in seconds; it must be µs."),
        (dict(unit=1e3), "That is in ms; it must be µs."),
        (dict(nbytes=2), "Memory: there are keys and there are values, and each number has 2 bytes."),
        (dict(flops=2), "Tensor cores: a multiplication and an addition are two operations; q k and p v two products."),
        (dict(flops=1), "Tensor cores: two products, and a multiplication and an addition for each: 4 operations."),
        (dict(tokens=lambda lens: max(lens) * len(lens)), "No sequence reads more than its own tokens."),
        (lambda lens, heads, _, dim: _times(lens, heads, heads, dim), "The cache has KV heads only, and a group of "
         "query heads reads its KV head once."),
        (lambda lens, heads, kv_heads, dim: (_times(lens, heads, kv_heads, dim)[0], _times(lens, heads, heads, dim)[1]),
         "Tensor cores: a group of query heads is one unit: its heads are rows of the same product."),
        (lambda lens, heads, kv_heads, dim: _times(lens, heads, kv_heads, dim, rows=heads // kv_heads), "Rows that "
         "nobody asked for cost as much: the tensor cores multiply all 64."),
    )  # fmt: skip
    said = "Memory: each key and value once. Tensor cores: 64 rows for each unit, whatever its group."
    require_answers(answer, STEPS, _times, likely, said, draw=_step)
    return "A unit's 64 rows cost the same for every group, and still less than its keys and values."


def _step(rng):
    kv_heads = int(rng.integers(1, 9))
    return (
        tuple(rng.integers(1, 9000, 5).tolist()),
        kv_heads * int(rng.integers(1, 9)),
        kv_heads,
        8 * int(rng.integers(4, 30)),
    )


@checker
def check_in_order(answer) -> str:
    """Exercise 3: `answer(pages, block_tables)` holds each sequence's tokens in one piece, KV head by KV head."""
    for page_size, columns in ((16, 4), (32, 2), (64, 1)):
        pages = normal(page_size, (9, page_size, 2, 64), jnp.bfloat16)
        tables = np.random.default_rng(page_size).permutation(9)[: 2 * columns].reshape(2, columns).astype(np.int32)
        out = run_kernel(answer, pages, jnp.asarray(tables), copies={"load": 32 // min(page_size, 32)})
        exact = wide(pages)[tables].reshape(2, -1, 2, 64).swapaxes(1, 2)
        tokens = min(page_size, 32)
        likely = [(exact.reshape(2, 2, -1, tokens, 64)[:, :, :: 32 // tokens].repeat(32 // tokens, axis=2)
                   .reshape(exact.shape), "a page is copied twice: each copy has its own position")]  # fmt: skip
        first_rows = exact.reshape(2, 2, -1, page_size, 64)[:, :, :, :tokens]
        first_rows = np.tile(first_rows, (1, 1, 1, page_size // tokens, 1)).reshape(exact.shape)
        likely += [(first_rows, "every block of threads copies the page's first rows")]
        require_close(out, exact, 0, f"with pages of {page_size} tokens", likely)
    return "Each copy looks up its own page, and begins at its own row of it."


@checker
def check_tail(answer) -> str:
    """Exercise 4: `answer(q, k_pages, v_pages, pages, kv_len)` is (out, lse) of a unit, whose length is any number."""
    q = normal(1, (ROWS, 64), jnp.bfloat16)
    k, v = (normal(seed, (COLUMNS + 3, PAGE, 64), jnp.bfloat16) for seed in (2, 3))
    pages = np.random.default_rng(4).permutation(COLUMNS + 3)[:COLUMNS].astype(np.int32)
    for kv_len in (150, 40, 192):
        args = q, k, v, jnp.asarray(pages), jnp.asarray([kv_len], jnp.int32)
        given = run_kernel(answer, *args)
        if not isinstance(given, tuple) or len(given) != 2:
            raise NotYet("the answer must be (out, lse).")
        keys, values = (x[pages].reshape(-1, 64) for x in wide(k, v))
        s = wide(q) @ keys.T / 8
        exact, likely = _lse(s[:, :kv_len]), _wrong_ends(s, kv_len)
        require_close(given[1], exact, 1e-3, f"{kv_len} tokens, lse", likely)
        weights = np.exp(s[:, :kv_len] - exact[:, None])
        require_close(given[0], weights @ values[:kv_len], 0.02, f"{kv_len} tokens, out")
        loaded = (play_kernel(answer, *args)[0][0].count("load") - 1) // (2 * BLOCK // PAGE)  # One copy is of q.
        if loaded > (needed := -(-kv_len // BLOCK)):
            raise NotYet(f"{kv_len} tokens: {loaded} blocks are loaded, and {needed} have a token: load none in vain")
    return "The last block is loaded too, and only its tokens before the end count."


def _wrong_ends(s, kv_len: int):
    """lse where other tokens count, and what is said of it; `s` has the logits of all columns."""
    column, loaded = np.arange(s.shape[1]), -(-kv_len // BLOCK) * BLOCK
    zeros = np.where(column < kv_len, s, 0.0)[:, :loaded]
    for counted, said in (
        (s[:, : kv_len // BLOCK * BLOCK], "the tokens after the last whole block do not count: round their number up"),
        (s[:, :loaded], "tokens after the end count: column i of a block is token block * block_kv + i"),
        (zeros, "a masked logit of 0 has a weight, exp(0) = 1: it must be -inf"),
        (s[:, : kv_len + 1], "one token too many counts: the last one is kv_len - 1"),
        (s[:, : kv_len - 1], "one token too few counts: the last one is kv_len - 1"),
        (s[:, column % BLOCK < kv_len % BLOCK], "every block is cut like the last one: only that has an end in it"),
    ):
        if counted.shape[1]:
            yield _lse(counted), said


def _lse(s):
    return np.logaddexp.reduce(s, axis=1)


def _times(kv_lens, num_heads, num_kv_heads, head_dim, *, unit=1e6, nbytes=4, flops=4, rows=ROWS, tokens=sum):
    """µs of memory and of the tensor cores; the keywords spoil them."""
    numbers = tokens(kv_lens) * num_kv_heads * head_dim
    return float(unit * nbytes * numbers / HBM), float(unit * flops * rows * numbers / TENSOR)
