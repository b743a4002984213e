"""Chapter 13's exercises: slots of tokens, what bounds a step, pages in order, a part of all blocks, and a merge."""

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_close, run_kernel

HBM, TENSOR = 4.8e12, 989e12  # Bytes and operations a second.
ROWS = 64  # Rows of a WGMMA.
UNITS = [  # Blocks of each unit, and how many parts.
    ((5, 1, 7, 3), 4),
    ((5, 1, 7, 3), 5),
    ((5, 1, 7, 3), 1),
    ((1, 1, 1, 1, 1, 1, 1), 3),
    ((40,), 7),
    ((2, 30, 1, 1, 9), 6),
    ((3, 3, 3, 3), 4),
]


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
    for lens, heads, kv_heads, head_dim in (
        ((8192,) * 64, 32, 8, 128),
        ((300, 0, 70, 5000), 32, 32, 128),
        ((1000, 24), 8, 1, 64),
        ((7000,), 64, 1, 256),
    ):
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


@checker
def check_part(answer) -> str:
    """Exercise 3: `answer(part, num_parts, blocks)` is (first unit, first block in it, how many blocks) of a part."""
    for blocks, num_parts in UNITS:
        parts = []
        for part in range(num_parts):
            given = answer(part, num_parts, np.array(blocks))
            if given is None:
                raise NotYet("part returns None: write its body, and return unit, block and steps.")
            try:
                parts.append(tuple(int(x) for x in given))
            except (TypeError, ValueError) as error:
                raise NotYet(f"the answer is {given!r}; it must be (unit, block, steps).") from error
        _judge_parts(parts, blocks, f"for {num_parts} parts of units with {list(blocks)} blocks")
    return "Every block is in one part, and no part has two blocks more than another."


@checker
def check_in_order(answer) -> str:
    """Exercise 3: `answer(pages, block_tables)` holds each sequence's tokens in one piece, KV head by KV head."""
    for page_size, columns in ((16, 4), (32, 2), (64, 1)):
        pages = normal(page_size, (9, page_size, 2, 64), jnp.bfloat16)
        tables = np.random.default_rng(page_size).permutation(9)[: 2 * columns].reshape(2, columns).astype(np.int32)
        out = run_kernel(answer, pages, jnp.asarray(tables))
        exact = np.asarray(pages, np.float32)[tables].reshape(2, -1, 2, 64).swapaxes(1, 2)
        if out.shape == exact.shape:
            _judge_order(np.asarray(out, np.float32), exact, page_size)
        require_close(out, exact, 0, f"with pages of {page_size} tokens")
    return "Each copy looks up its own page, and begins at its own row of it."


@checker
def check_merge(answer) -> str:
    """Exercise 5: `answer(outs, lses)` is (out, lse), from those of any number of pieces."""
    for name, outs, lses in _pieces():
        given = run_kernel(answer, *(jnp.asarray(x, jnp.float32) for x in (outs, lses)))
        if not isinstance(given, tuple) or len(given) != 2:
            raise NotYet(f"{name}: the answer must be (out, lse).")
        out, lse = (np.asarray(part, np.float64) for part in given)
        _judge_merge(out, lse, outs, lses, name)
    return "All weights are known before the first value is read, and empty pieces count for nothing."


def _judge_order(out, exact, page_size: int) -> None:
    """Raises NotYet for the likely mistakes, 32 tokens a block of threads."""
    tokens = min(page_size, 32)
    first_half, second_half = out[:, :, :tokens], out[:, :, tokens : 2 * tokens]
    if (first_half == exact[:, :, :tokens]).all() and (second_half == first_half).all():
        if page_size < 32:
            raise NotYet(f"with pages of {page_size} tokens, a page is copied twice: each copy has its own position")
        if page_size > 32:
            raise NotYet(f"with pages of {page_size} tokens, every block of threads copies the page's first rows")


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
    where = f"for {heads} heads, {kv_heads} of keys, head_dim = {head_dim}, {tokens} tokens"
    exact = 1e6 * nbytes / HBM
    if not close(memory, exact):
        for wrong, hint in (
            (exact / 1e6, "that is in seconds; it must be µs."),
            (exact / 1e3, "that is in ms; it must be µs."),
            (exact / 2, "there are keys and there are values, and each number has 2 bytes."),
            (exact * heads / kv_heads, "the cache has heads of keys, and a group of query heads reads them together."),
            (exact * max(lens) * len(lens) / tokens, "no sequence reads more than its own tokens: the sum of kv_lens."),
            (exact / 2 * heads / kv_heads, "keys and values, 2 bytes each, of the heads of keys."),
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


def _judge_parts(parts, blocks, where: str) -> None:
    """Raises NotYet unless the parts are equal and follow each other."""
    ends = np.cumsum(blocks)
    steps = [part[2] for part in parts]
    if min(steps) < 0:
        raise NotYet(f"{where}, part {int(np.argmin(steps))} has {min(steps)} blocks.")
    if sum(steps) != ends[-1]:
        raise NotYet(f"{where}, all parts together have {sum(steps)} blocks of {ends[-1]}.")
    if max(steps) - min(steps) > 1:
        raise NotYet(f"{where}, the parts have {steps} blocks: they may differ by one.")
    start = 0
    for part, (unit, block, count) in enumerate(parts):
        if count == 0:
            continue
        if not 0 <= unit < len(blocks):
            raise NotYet(f"{where}, part {part} begins in unit {unit}; there are units 0 to {len(blocks) - 1}.")
        if not 0 <= block < blocks[unit]:
            hint = " It counts from the start of its unit, not of the row." if block == start and unit else ""
            hint = " A part that begins where a unit ends begins in the next." if block == blocks[unit] else hint
            raise NotYet(
                f"{where}, part {part} begins with block {block} of unit {unit}, which has {blocks[unit]}.{hint}"
            )
        if ends[unit] - blocks[unit] + block != start:
            right = int(np.searchsorted(ends, start, side="right"))
            raise NotYet(
                f"{where}, part {part} begins with block {block} of unit {unit}; the parts before end before block "
                f"{start - ends[right] + blocks[right]} of unit {right}."
            )
        start += count


def _pieces():
    """(name, outs (pieces, rows, head_dim), lses (pieces, rows)), float64."""
    rng = np.random.default_rng(13)
    outs, lses = rng.standard_normal((4, 4, 128)), rng.standard_normal((4, 4))
    yield "large and small logits", outs, lses + np.array([900.0, -900.0, 90.0, 0.0])
    yield "three pieces", rng.standard_normal((3, 4, 128)), rng.standard_normal((3, 4))
    lses[0, 1] = lses[2, 1] = lses[1:, 2] = lses[:3, 3] = lses[:, 0] = -np.inf
    yield "pieces of which some see nothing", np.where(np.isneginf(lses)[..., None], 0.0, outs), lses


def _judge_merge(out, lse, outs, lses, name: str) -> None:
    top = lses.max(axis=0)
    weights = np.exp(lses - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        exact_lse = np.where(np.isneginf(top), 0.0, top) + np.log(total)
    exact = np.einsum("pr,prh->rh", weights, outs) / np.where(total > 0, total, 1.0)[:, None]
    if out.shape != exact.shape or lse.shape != exact_lse.shape:
        raise NotYet(
            f"{name}: out and lse have shapes {out.shape} and {lse.shape}; they must be {exact.shape} and "
            f"{exact_lse.shape}: the pieces' axis is gone."
        )
    close = lambda x, y: np.allclose(x, y, rtol=1e-4, atol=1e-4)  # An answer in float32 is right too.
    if close(out, exact) and close(lse, exact_lse):
        return
    if np.isnan(out).any() or np.isnan(lse).any():
        if np.isneginf(exact_lse).any():
            raise NotYet(f"{name}: there is a NaN. Where all pieces are empty, out must be 0 and lse -inf.")
        raise NotYet(f"{name}: there is a NaN. Does exp(lse) overflow, or become 0? Subtract the largest lse first.")
    if not np.isfinite(lse[np.isfinite(exact_lse)]).all():
        raise NotYet(f"{name}: lse is infinite. Subtract the largest lse first.")
    if close(lse, exact_lse) and close(out, outs.mean(axis=0)):
        raise NotYet(f"{name}: pieces have not the same weight: one may hold nearly all of the sum.")
    if close(lse, exact_lse) and close(out, outs.sum(axis=0)):
        raise NotYet(f"{name}: each piece is divided by its own sum already: weigh them.")
    if close(lse, top):
        raise NotYet(f"{name}: the sums of exponentials add up; the largest lse is not all.")
    if close(lse, exact_lse):
        raise NotYet(f"{name}: lse is right, out is not. A piece's weight is exp(its lse), as a share of all.")
    raise NotYet(f"{name}: lse must be the natural logarithm of the sum of all exp(lse).")
