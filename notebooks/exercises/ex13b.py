"""Chapter 13b's exercises: a part of all blocks, a merge, the values of the last block, and ids that are no page."""

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, drawn, normal, require_close, run_kernel

UNITS = [  # Blocks of each unit, and how many parts.
    ((5, 1, 7, 3), 4),
    ((5, 1, 7, 3), 5),
    ((5, 1, 7, 3), 1),
    ((1, 1, 1, 1, 1, 1, 1), 3),
    ((40,), 7),
    ((2, 30, 1, 1, 9), 6),
    ((3, 3, 3, 3), 4),
    ((2, 1), 5),
]
SIDE = 64  # Tokens of a block, rows of a WGMMA, and head_dim, in exercise 3.


@checker
def check_part(answer) -> str:
    """Exercise 1: `answer(part, num_parts, blocks)` is (first unit, first block in it, how many blocks) of a part."""
    anything = lambda rng: (tuple(rng.integers(1, 20, int(rng.integers(1, 9))).tolist()), int(rng.integers(1, 20)))
    for blocks, num_parts in (*UNITS, *drawn(anything)):
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
def check_merge(answer) -> str:
    """Exercise 2: `answer(outs, lses)` is (out, lse), from those of any number of pieces."""
    for name, outs, lses in _pieces():
        given = run_kernel(answer, *(jnp.asarray(x, jnp.float32) for x in (outs, lses)))
        if not isinstance(given, tuple) or len(given) != 2:
            raise NotYet(f"{name}: the answer must be (out, lse).")
        out, lse = (np.asarray(part, np.float64) for part in given)
        _judge_merge(out, lse, outs, lses, name)
    return "All weights are known before the first value is read, and empty pieces count for nothing."


@checker
def check_last_block(answer) -> str:
    """Exercise 3: `answer(p, v, seen)` is p v, whatever the values from row `seen` on are."""
    for seen, poison in ((22, None), (22, 40), (64, None), (1, 1), (30, 7), (50, 63)):
        p = normal(seen, (SIDE, SIDE), jnp.bfloat16).at[:, seen:].set(0)
        v = normal(seen + 1, (SIDE, SIDE), jnp.bfloat16)
        if poison is not None:
            v = v.at[poison:, 17].set(np.nan) if poison >= seen else v.at[poison, 17].set(np.nan)
        args = p, v, jnp.asarray([seen], jnp.int32)
        out = np.asarray(run_kernel(answer, *args), np.float64)
        with np.errstate(invalid="ignore"):
            exact = np.asarray(p, np.float64)[:, :seen] @ np.asarray(v, np.float64)[:seen]
        _judge_last_block(out, exact, seen, poison)
    return "Zeros stand where no token is, and a token's own NaN stays."


@checker
def check_ids(answer) -> str:
    """Exercise 4: `answer(pages, ids)` holds the pages of these ids, and zeros for an id that is no page."""
    num_pages = 6
    pages = normal(5, (num_pages, 16, 64), jnp.bfloat16)
    values = np.asarray(pages, np.float64)
    for ids in ((4, 0, 5, 2), (3, num_pages, 1, 0), (-1, 2, num_pages + 7, 5), (2**31 - 1, 1, -(2**31), 0)):
        try:
            out = run_kernel(answer, pages, jnp.asarray(ids, jnp.int32), copies={"load": len(ids)})
        except NotYet as problem:
            if "never end" in str(problem):
                raise NotYet(
                    f"ids {ids}: the kernel waits for a copy that was never started. The barrier counts all of them: "
                    "start each copy, and let TMA deliver the zeros."
                ) from problem
            raise
        exact = np.stack([values[i] if 0 <= i < num_pages else np.zeros_like(values[0]) for i in ids])
        if out.shape == (len(ids) * 16, 64):
            _judge_ids(np.asarray(out, np.float64).reshape(exact.shape), values, exact, ids)
        require_close(out, exact.reshape(-1, 64), 0, f"ids {ids}")
    return "No number becomes an address of somebody else's page, and the barrier gets all of its arrivals."


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


def _judge_last_block(out, exact, seen: int, poison: int | None) -> None:
    """Raises NotYet unless `out` is `exact`, which has NaN only for a token's own."""
    if out.shape != exact.shape:
        raise NotYet(f"the result has shape {out.shape}; it must be {exact.shape}")
    what = f"{seen} tokens in the block"
    is_finite = np.isfinite(exact)
    if (~np.isfinite(out[is_finite])).any():
        raise NotYet(
            f"{what}: NaN from row {max(poison, seen)} of v, where no token is, has reached the result. 0 times NaN is "
            "NaN: write zeros over these values, from row `seen` on."
        )
    if np.isfinite(out[~is_finite]).any():
        raise NotYet(
            f"{what}: token {poison} has a NaN of its own, which is gone from the result: clear no other rows."
        )
    if not np.allclose(out[is_finite], exact[is_finite], rtol=2e-3, atol=2e-2):
        raise NotYet(f"{what}: the result is wrong. Rows 0 to {seen - 1} of v must stay as they are.")


def _judge_ids(out, values, exact, ids) -> None:
    """Raises NotYet for the first page that is not as it should be."""
    for column, (page, mine, right) in enumerate(zip(ids, out, exact, strict=True)):
        if (mine == right).all():
            continue
        where = f"ids {ids}, column {column}"
        if 0 <= page < len(values):
            raise NotYet(f"{where}: page {page} is in the cache, but its tokens are not in the result.")
        theirs = [i for i, other in enumerate(values) if (mine == other).all()]
        if theirs:
            raise NotYet(
                f"{where}: {page} is no page, and the result has page {theirs[0]}, which is another sequence's."
            )
        raise NotYet(f"{where}: {page} is no page; its tokens must be zeros.")
