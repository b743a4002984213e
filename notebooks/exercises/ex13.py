"""Chapter 13's exercises: slots of tokens, what bounds a step, pages in order, and a window."""

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

ROWS = 64  # Rows of a WGMMA.
STEPS = (  # Lengths, query heads, KV heads, head_dim, bytes and operations per second.
    ((8192,) * 64, 32, 8, 128, 4.8e12, 989e12),
    ((300, 0, 70, 5000), 32, 32, 128, 3.35e12, 989e12),
    ((1000, 24), 8, 1, 64, 2e12, 312e12),
    ((7000,), 64, 1, 256, 8e12, 2250e12),
)


@checker
def check_slots(answer) -> str:
    """Exercise 1: `answer(block_tables, seqs, positions, page_size)` are slots of tokens, -1 for a position of -1."""
    cases = []
    for page_size, seed, columns in ((16, 0, 8), (4, 1, 12), (32, 2, 6)):
        rng = np.random.default_rng(seed)
        tables = rng.permutation(24).reshape(-1, columns).astype(np.int32)
        seqs = rng.integers(0, len(tables), 40)
        positions = np.where(rng.random(40) < 0.15, -1, rng.integers(0, columns * page_size, 40))
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
    """Exercise 2: `answer(kv_lens, num_heads, num_kv_heads, head_dim, hbm, tensor)` are two times, in µs."""
    likely = (
        (dict(unit=1.0), "That is in seconds; it must be µs."),
        (dict(unit=1e3), "That is in ms; it must be µs."),
        (dict(nbytes=2), "Memory: there are keys and there are values, and each number has 2 bytes."),
        (dict(flops=2), "Tensor cores: a multiplication and an addition are two operations; q k and p v two products."),
        (dict(flops=1), "Tensor cores: two products, and a multiplication and an addition for each: 4 operations."),
        (dict(tokens=lambda lens: max(lens) * len(lens)), "No sequence reads more than its own tokens."),
        (lambda lens, heads, _, *rest: _times(lens, heads, heads, *rest), "The cache has KV heads only, and a group of "
         "query heads reads its KV head once."),
        (lambda *case: (_times(*case)[0], _times(*case[:2], *case[1:2], *case[3:])[1]),
         "Tensor cores: a group of query heads is one unit: its heads are rows of the same product."),
        (lambda lens, heads, kv_heads, *rest: _times(lens, heads, kv_heads, *rest, rows=heads // kv_heads), "Rows that "
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
        1e11 * int(rng.integers(10, 90)),
        1e12 * int(rng.integers(300, 3000)),
    )


@checker
def check_in_order(answer) -> str:
    """Exercise 3: `answer(pages, tables)` holds each sequence's tokens in one piece, KV head by KV head."""
    for page_size, columns, block_kv in ((16, 4, 32), (32, 2, 32), (64, 3, 32), (16, 8, 64)):
        num_pages = 2 * columns + 1
        pages = normal(page_size, (num_pages, page_size, 2, 64), jnp.bfloat16)
        tables = np.random.default_rng(page_size).permutation(num_pages)[1:].reshape(2, columns).astype(np.int32)
        args, how = (pages, jnp.asarray(tables)), {} if block_kv == 32 else dict(block_kv=block_kv)
        given = lambda *args, how=how: answer(*args, **how)
        tokens = min(page_size, block_kv)
        copies, where = block_kv // tokens, f"with pages of {page_size} tokens and block_kv = {block_kv}"
        out = run_kernel(given, *args, copies={"load": copies})
        exact = wide(pages)[tables].reshape(2, -1, 2, 64).swapaxes(1, 2)
        twice = exact.reshape(2, 2, -1, tokens, 64)[:, :, ::copies].repeat(copies, axis=2).reshape(exact.shape)
        first_rows = exact.reshape(2, 2, -1, page_size, 64)[:, :, :, :tokens]
        first_rows = np.tile(first_rows, (1, 1, 1, page_size // tokens, 1)).reshape(exact.shape)
        likely = (
            (twice, "a page is copied twice: each copy has its own position"),
            (first_rows, "every block of threads copies the page's first rows"),
        )
        require_close(out, exact, 0, where, likely)
        _require_loads(play_kernel(given, *args), [copies] * 3, where)
    return "Each copy looks up its own page, and begins at its own row of it."


@checker
def check_window(answer) -> str:
    """Exercise 4: `answer(q, k_pages, v_pages, tables, lens, window)` attends to the last `window` tokens alone."""
    q = normal(1, (2, 2 * ROWS, 64), jnp.bfloat16)
    for lens, window, page_size, how in (
        ((150, 40), 1000, 64, {}),
        ((190, 130), 70, 16, {}),
        ((192, 64), 64, 64, {}),
        ((150, 133), 20, 16, dict(block_kv=128)),
        ((185, 192), 130, 128, dict(num_stages=3)),
    ):
        columns, block = -(-192 // page_size), how.get("block_kv", 64)
        k, v = (normal(seed, (2 * columns + 3, page_size, 2, 64), jnp.bfloat16) for seed in (2, 3))
        tables = np.random.default_rng(4).permutation(len(k))[3:].reshape(2, columns).astype(np.int32)
        args = q, k, v, jnp.asarray(tables), jnp.asarray(lens, jnp.int32)
        given = lambda *args, window=window, how=how: answer(*args, window, **how)
        where = f"lengths {lens[0]} and {lens[1]}, window {window}, pages of {page_size} tokens"
        where += "".join(f", {name} = {value}" for name, value in how.items())
        # Copies of small pages would pass for stages.
        in_flight = how.get("num_stages", 2) if page_size >= block else None
        out = run_kernel(given, *args, in_flight=in_flight, undrained="keep ring.drain, after as many fills")
        logits, values = _unmasked(q, k, v, tables)
        exact = _attended(logits, values, lens, window)
        require_close(out, exact, 0.02, where, _wrong_windows(block, logits, values, lens, window))
        blocks = [-(-length // block) - max(length - window, 0) // block for length in lens]
        first, last = (1 + 2 * max(1, block // page_size) * num for num in blocks)  # One copy is of q.
        _require_loads(play_kernel(given, *args), [first, None, last], where, together=False)
    return "Blocks before the window are never loaded, and the mask cuts both ends."


def _require_loads(played, counts, where: str, together: bool = True) -> None:
    """Raises NotYet unless the first, the middle and the last block of threads start so many copies (None: any
    number); with `together`, all before they wait for one."""
    blocks = played[0] if len(played[0]) == 3 else [played[0][0], played[0][0], played[0][-1]]
    for block, count in zip(blocks, counts, strict=True):
        if count is not None and (found := block.count("load")) != count:
            raise NotYet(f"{where}: a block of threads starts {found} copies to shared memory; {count} are needed")
    if together:
        require_loads_together(played)


def _unmasked(q, k, v, tables):
    """(logits, values) of all tokens in the table, (sequences, KV heads, ...), float64."""
    keys, values = (wide(x)[tables].reshape(2, -1, 2, 64).swapaxes(1, 2) for x in (k, v))
    return wide(q).reshape(2, 2, ROWS, 64) @ keys.swapaxes(2, 3) / 8, values


def _attended(logits, values, lens, window, *, begin=lambda first: first, end=lambda length: length):
    """out over the last `window` tokens. The keywords spoil it: another first token, another end."""
    token, length = np.arange(logits.shape[-1]), np.asarray(lens)[:, None]
    seen = (token >= begin(np.maximum(length - window, 0))) & (token < end(length))
    s = np.where(seen[:, None, None], logits, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True) @ values).reshape(2, -1, 64)


def _wrong_windows(block, *case):
    """out where other tokens count, and what is said of it."""
    for spoilt, said in (
        (dict(begin=lambda first: 0 * first), "tokens before the window count"),
        (dict(begin=lambda first: first // block * block), "the window's first block is not masked"),
        (dict(begin=lambda first: first - 1), "one token too many counts: a window of 1 is the last token"),
        (dict(begin=lambda first: first + 1), "one token too few counts: a window of 1 is the last token"),
        (dict(end=lambda length: -(-length // block) * block), "tokens after the end count"),
    ):
        yield _attended(*case, **spoilt), said


def _times(
    kv_lens, num_heads, num_kv_heads, head_dim, hbm, tensor, *, unit=1e6, nbytes=4, flops=4, rows=ROWS, tokens=sum
):
    """µs of memory and of the tensor cores; the keywords spoil them."""
    numbers = tokens(kv_lens) * num_kv_heads * head_dim
    return float(unit * nbytes * numbers / hbm), float(unit * flops * rows * numbers / tensor)
