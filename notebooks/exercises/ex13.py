"""Chapter 13's exercises: slots of tokens, what bounds a step, pages in order, and the tokens at the end."""

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, drawn, normal, play_kernel, require_close, run_kernel

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
    for page_size, seed in ((16, 0), (4, 1), (32, 2)):
        rng = np.random.default_rng(seed)
        tables = rng.permutation(24).reshape(3, 8).astype(np.int32)
        seqs = rng.integers(0, 3, 40)
        positions = np.where(rng.random(40) < 0.15, -1, rng.integers(0, 8 * page_size, 40))
        given = answer(tables.copy(), seqs.copy(), positions.copy(), page_size)
        if given is None:
            raise NotYet("slot_mapping returns None: write its body.")
        given = np.asarray(given)
        if given.shape != positions.shape:
            raise NotYet(f"slots has the shape {given.shape}; it must have one slot for each token, {positions.shape}.")
        if given.dtype.kind != "i":
            raise NotYet(f"slots are {given.dtype}; they must be integers: // instead of /.")
        _judge_slots(given, tables, seqs, positions, page_size)
    return "A page from the table, a place in the page; and tokens that are padding have no slot."


@checker
def check_times(answer) -> str:
    """Exercise 2: `answer(kv_lens, num_heads, num_kv_heads, head_dim)` are µs of memory and µs of the tensor cores."""
    for lens, heads, kv_heads, head_dim in (*STEPS, *drawn(_step)):
        given = answer(np.array(lens), heads, kv_heads, head_dim)
        if given is None:
            raise NotYet("times returns None: write its body, and return both times.")
        try:
            memory, tensor = (float(x) for x in given)
        except (TypeError, ValueError) as error:
            raise NotYet(
                f"the answer is {given!r}; it must be two numbers: µs of memory, µs of tensor cores."
            ) from error
        _judge_times(memory, tensor, lens, heads, kv_heads, head_dim)
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
        exact = np.asarray(pages, np.float32)[tables].reshape(2, -1, 2, 64).swapaxes(1, 2)
        if out.shape == exact.shape:
            _judge_order(np.asarray(out, np.float32), exact, page_size)
        require_close(out, exact, 0, f"with pages of {page_size} tokens")
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
        out, lse = (np.asarray(part, np.float64) for part in given)
        keys, values = (np.asarray(x, np.float64)[pages].reshape(-1, 64) for x in (k, v))
        s = np.asarray(q, np.float64) @ keys.T / 8
        _judge_tail(lse, s, kv_len)
        weights = np.exp(s[:, :kv_len] - _lse(s[:, :kv_len])[:, None])
        require_close(lse, _lse(s[:, :kv_len]), 1e-3, f"{kv_len} tokens, lse")
        require_close(out, weights @ values[:kv_len], 0.02, f"{kv_len} tokens, out")
        loaded = (play_kernel(answer, *args)[0][0].count("load") - 1) // (2 * BLOCK // PAGE)  # One copy is of q.
        if loaded > (needed := -(-kv_len // BLOCK)):
            raise NotYet(f"{kv_len} tokens: {loaded} blocks are loaded, and {needed} have a token: load none in vain")
    return "The last block is loaded too, and only its tokens before the end count."


def _judge_order(out, exact, page_size: int) -> None:
    """Raises NotYet for the likely mistakes, 32 tokens a block of threads."""
    tokens = min(page_size, 32)
    first_half, second_half = out[:, :, :tokens], out[:, :, tokens : 2 * tokens]
    if (first_half == exact[:, :, :tokens]).all() and (second_half == first_half).all():
        if page_size < 32:
            raise NotYet(f"with pages of {page_size} tokens, a page is copied twice: each copy has its own position")
        if page_size > 32:
            raise NotYet(f"with pages of {page_size} tokens, every block of threads copies the page's first rows")


def _judge_tail(lse, s, kv_len: int) -> None:
    """Raises NotYet for the likely mistakes, by the tokens that `lse` counts; `s` has the logits of all columns."""
    if lse.shape != s.shape[:1]:
        raise NotYet(f"lse has the shape {lse.shape}; it must be {s.shape[:1]}")
    whole, loaded = kv_len // BLOCK * BLOCK, -(-kv_len // BLOCK) * BLOCK
    zeros = np.where(np.arange(s.shape[1]) < kv_len, s, 0.0)[:, :loaded]
    by_block = s[:, np.arange(s.shape[1]) % BLOCK < kv_len % BLOCK]
    for counted, said in (
        (s[:, :whole], "the tokens after the last whole block do not count: round the number of blocks up"),
        (s[:, :loaded], "tokens after the end count: column i of a block is token block * block_kv + i"),
        (zeros, "a masked logit of 0 has a weight, exp(0) = 1: it must be -inf"),
        (s[:, : kv_len + 1], "one token too many counts: the last one is kv_len - 1"),
        (s[:, : kv_len - 1], "one token too few counts: the last one is kv_len - 1"),
        (by_block, "every block is cut like the last one: only the last one has an end in it"),
    ):
        is_other = counted.shape[1] and not np.allclose(_lse(counted), _lse(s[:, :kv_len]), atol=1e-2)
        if is_other and np.allclose(lse, _lse(counted), atol=2e-3):
            raise NotYet(f"{kv_len} tokens: {said}")


def _lse(s):
    return np.logaddexp.reduce(s, axis=1)


def _judge_slots(given, tables, seqs, positions, page_size: int) -> None:
    column, offset = positions // page_size, positions % page_size
    padding = positions < 0
    exact = np.where(padding, -1, tables[seqs, column] * page_size + offset)
    if (given == exact).all():
        return
    real = ~padding
    if (given[real] == exact[real]).all():
        raise NotYet(f"a token with position -1 is padding: its slot must be -1, and is {given[padding][0]}.")
    for wrong, hint in (
        (column * page_size + offset, "the table is not used: tokens lie where their page lies."),
        (tables[seqs, column], "that is the page; a slot is page * page_size + offset."),
        (tables[seqs, column] * page_size, "that is the page's first slot: add the place in the page."),
        (tables[seqs, column] + offset, "a page has page_size slots: multiply."),
        (tables[0, column] * page_size + offset, "each token has a sequence, and each sequence its row of the table."),
        (
            tables[seqs, offset % tables.shape[1]] * page_size + column,
            "// and % are exchanged: the column is position // page_size.",
        ),
    ):
        if (given[real] == wrong[real]).all():
            raise NotYet(hint)
    token = int(np.flatnonzero(real & (given != exact))[0])
    raise NotYet(
        f"with page_size = {page_size}, token {token} (sequence {seqs[token]}, position {positions[token]}) gets slot "
        f"{given[token]}; its page is {tables[seqs[token], column[token]]}, so it must be {exact[token]}."
    )


def _judge_times(memory: float, tensor: float, lens, heads: int, kv_heads: int, head_dim: int) -> None:
    tokens = sum(lens)
    nbytes, operations = 4 * kv_heads * head_dim * tokens, 4 * ROWS * kv_heads * head_dim * tokens
    close = lambda x, y: np.isclose(x, y, rtol=1e-3)
    where = f"for {heads} query heads, {kv_heads} KV heads, head_dim = {head_dim}, {tokens} tokens"
    exact = 1e6 * nbytes / HBM
    if not close(memory, exact):
        for wrong, hint in (
            (exact / 1e6, "that is in seconds; it must be µs."),
            (exact / 1e3, "that is in ms; it must be µs."),
            (exact / 2, "there are keys and there are values, and each number has 2 bytes."),
            (
                exact * heads / kv_heads,
                "the cache has KV heads only, and a group of query heads reads its KV head once.",
            ),
            (exact * max(lens) * len(lens) / tokens, "no sequence reads more than its own tokens: the sum of kv_lens."),
            (exact / 2 * heads / kv_heads, "count keys and values, 2 bytes a number, for the KV heads only."),
        ):
            if close(memory, wrong):
                raise NotYet(f"memory: {hint}")
        raise NotYet(f"{where}, memory takes {exact:.4g} µs (each key and value once), and not {memory:.4g}.")
    exact = 1e6 * operations / TENSOR
    if not close(tensor, exact):
        useful = exact * heads / kv_heads / ROWS
        for wrong, hint in (
            (useful, "that counts the rows that somebody asked for; the tensor cores multiply all 64."),
            (
                exact / 2,
                "a multiplication and an addition are two operations; and there are two products, q k and p v.",
            ),
            (exact / 4, "two products, and a multiplication and an addition for each: 4 operations."),
            (exact * heads / kv_heads, "a group of query heads is one unit: its heads are rows of the same product."),
            (exact / 1e6, "that is in seconds; it must be µs."),
        ):
            if close(tensor, wrong) and not close(useful, exact):
                raise NotYet(f"tensor cores: {hint}")
        raise NotYet(f"{where}, the tensor cores take {exact:.4g} µs (64 rows for each unit), and not {tensor:.4g}.")
