"""Chapter 13b's exercises: a part of all blocks, a merge, the values of the last block, and ids that are not pages."""

import math

import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    drawn,
    jaxpr_of,
    normal,
    play_kernel,
    repeated,
    require_close,
    require_loads_together,
    run_kernel,
    wide,
)

UNITS = [  # Blocks of each unit, and how many parts.
    ((5, 1, 7, 3), 4), ((5, 1, 7, 3), 5), ((5, 1, 7, 3), 1), ((1, 1, 1, 1, 1, 1, 1), 3), ((40,), 7),
    ((2, 30, 1, 1, 9), 6), ((3, 3, 3, 3), 4), ((2, 1), 5),
]  # fmt: skip
SIDE = 64  # Tokens of a block, rows of a WGMMA, and head_dim, in exercise 3.


@checker
def check_part(answer) -> str:
    """Exercise 1: `answer(part, num_parts, blocks)` is (first unit, first block in it, how many blocks) of a part."""
    anything = lambda rng: (tuple(rng.integers(1, 20, int(rng.integers(1, 9))).tolist()), int(rng.integers(1, 20)))
    for blocks, num_parts in (*UNITS, *drawn(anything)):
        parts = []
        for part in range(num_parts):
            given = answer(part, num_parts, np.array(blocks))
            try:
                numbers = tuple(given)
                parts.append(tuple(int(x) for x in numbers))
            except (TypeError, ValueError) as error:
                raise NotYet(f"part gives {given!r}; it must be (unit, block, steps).") from error
            if parts[-1] != numbers:
                raise NotYet(f"part gives {given!r}; all three must be whole numbers.")
        _judge_parts(parts, blocks, f"for {num_parts} parts of units with {list(blocks)} blocks")
    return "Every block is in one part, and no part has two blocks more than another."


@checker
def check_merge(answer) -> str:
    """Exercise 2: `answer(outs, lses)` is (out, lse), from those of any number of pieces."""
    for name, outs, lses in _pieces():
        args = [jnp.asarray(x, jnp.float32) for x in (outs, lses)]
        given = run_kernel(answer, *args)
        _require_lse_first(answer, *args)
        _require_no_rescaling(answer, *args)
        if not isinstance(given, tuple) or len(given) != 2:
            raise NotYet(f"{name}: the answer must be (out, lse).")
        top = lses.max(axis=0)
        exact_lse = np.logaddexp.reduce(lses, axis=0)
        weights = np.exp(lses - np.where(np.isneginf(exact_lse), 0.0, exact_lse))
        exact = np.einsum("pr,prh->rh", weights, outs)
        wrongs = (
            (outs.mean(axis=0), "pieces have not the same weight: one may hold nearly all of the sum."),
            (outs.sum(axis=0), "each piece is divided by its own sum already: weigh them."),
        )
        said = "subtract the largest lse first; where all pieces are empty, out is 0 and lse -inf"
        likely = [(top, "the sums of exponentials add up; the largest lse is not all.")]
        require_close(given[1], exact_lse, 1e-4, f"{name}, lse ({said})", likely)
        require_close(given[0], exact, 1e-4, f"{name}, out ({said})", wrongs)
    return "All weights are known before the first value is read, and empty pieces count for nothing."


@checker
def check_last_block(answer) -> str:
    """Exercise 3: `answer(p, v, seen)` is p v, whatever the values from row `seen` on are."""
    for seen, poison, there in (
        (22, None, "NaN"), (22, 22, "NaN"), (64, None, "NaN"), (1, 1, "inf"), (30, 7, "NaN"), (50, 63, "NaN"),
        (0, 0, "NaN"), (30, 7, "inf"),
    ):  # fmt: skip
        p = normal(seen, (SIDE, SIDE), jnp.bfloat16).at[:, seen:].set(0)
        v = normal(seen + 1, (SIDE, SIDE), jnp.bfloat16)
        if poison is not None:
            where = v.at[poison:] if poison >= seen else v.at[poison, 17]  # After the end, or a token's own.
            v = where.set(float(there))
        out = run_kernel(answer, p, v, jnp.asarray([seen], jnp.int32))
        with np.errstate(invalid="ignore"):
            exact = wide(p)[:, :seen] @ wide(v)[:seen]
        what = f"{seen} tokens in the block"
        if out.shape == exact.shape and np.isnan(wide(out)[np.isfinite(exact)]).any():
            raise NotYet(
                f"{what}: {there} from row {max(poison or 0, seen)} of v, where no token is, has reached the "
                f"result. 0 times {there} is NaN: write zeros over these values, from row `seen` on."
            )
        if out.shape == exact.shape and np.isfinite(wide(out)[~np.isfinite(exact)]).any():
            raise NotYet(
                f"{what}: token {poison} has {'an' if there == 'inf' else 'a'} {there} of its own, which is gone from "
                "the result: clear no other rows."
            )
        require_close(out, exact, 1e-3, f"{what}; rows 0 to {seen - 1} of v must stay as they are")
    played = play_kernel(answer, p, v, jnp.asarray([seen], jnp.int32))
    require_loads_together(played)
    _require_copied(played, v.shape)
    return "Nothing after the last token reaches the result, and a token's own NaN stays."


@checker
def check_ids(answer) -> str:
    """Exercise 4: `answer(pages, ids)` holds the pages of these ids, and zeros for an id that is not a page."""
    for num_pages, page_size, head_dim, ids in (
        (6, 16, 64, (4, 0, 5, 2)),
        (6, 16, 64, (3, 6, 1, 0)),
        (9, 8, 128, (7, -1, 2, 16, 8)),
        (6, 16, 64, (2**31 - 1, 1, -(2**31), 0)),
    ):
        pages = normal(5, (num_pages, page_size, head_dim), jnp.bfloat16)
        values = np.asarray(pages, np.float64)
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
        for column, page in enumerate(ids):
            mine = wide(out).reshape(exact.shape)[column] if out.size == exact.size else exact[column]
            where = f"ids {ids}, column {column}"
            if 0 <= page < num_pages and (mine != exact[column]).any():
                raise NotYet(f"{where}: page {page} is in the cache, but its tokens are not in the result.")
            for other, theirs in enumerate(values):
                if not 0 <= page < num_pages and (mine == theirs).all():
                    raise NotYet(f"{where}: {page} is not a page, and the result has page {other}, another sequence's.")
        require_close(out, exact.reshape(-1, head_dim), 0, f"ids {ids}")
        played = play_kernel(answer, pages, jnp.asarray(ids, jnp.int32))
        require_loads_together(played)
        _require_copied(played, pages.shape)
        _require_near_indices(played, num_pages)
        _require_no_other_page(played, num_pages, ids)
    return "No number becomes an address of somebody else's page, and the barrier gets all of its arrivals."


def _require_copied(played, shape) -> None:
    """Raises NotYet if a block reads an input of this shape in global memory, by no copy to shared memory."""
    for block in (block for kernel in played for block in kernel):
        if any(memory.shape == shape for memory, _ in block.fetched):
            raise NotYet("an input is read straight from global memory: keep the copies, and use what TMA brings")


def _require_near_indices(played, num_pages: int) -> None:
    """Raises NotYet if a copy's index lies so far outside of the array that a GPU may wrap it around."""
    for block in (block for kernel in played for block in kernel):
        for box in (event.box for event in block.events if event.kind == "load" and event.box):
            if box[0][0] > num_pages:
                raise NotYet(
                    f"a copy is started at page {box[0][0]}: others are added to such an index, and it may wrap around "
                    f"into the array. The first index after the last page is {num_pages}."
                )


def _require_no_other_page(played, num_pages: int, ids) -> None:
    """Raises NotYet if a page is copied that is not among `ids`, even if its tokens are overwritten later."""
    for block in (block for kernel in played for block in kernel):
        for box in (event.box for event in block.events if event.kind == "load" and event.box):
            if 0 <= (page := int(box[0][0])) < num_pages and page not in ids:
                raise NotYet(
                    f"ids {ids}: the kernel copies page {page}, another sequence's, even if its tokens are not in the "
                    "result: let TMA deliver the zeros."
                )


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


def _require_lse_first(answer, outs, lses) -> None:
    """Raises NotYet if a block of threads reads an out before it has read the lse of all pieces, or several rows."""
    (kernel,) = play_kernel(answer, outs, lses)
    for block in (block for block in kernel if block.is_whole):
        is_lse = [memory.shape == lses.shape for memory, _ in block.fetched]
        read = [box for memory, box in block.fetched if memory.shape != lses.shape]
        if not all(is_lse[: len(lses)]):
            raise NotYet(
                "an out is read before all lse are known, so its result must be rescaled later: read the lse of all "
                "pieces in the first pass, as the loop above does"
            )
        if len(set(read)) > len(outs):
            raise NotYet('a block of threads merges several rows, one after the other: give each its own (axis "row")')
        if len(read) > len(outs):
            raise NotYet("an out is read twice: once is enough, and outs are nearly all that this kernel reads")


def _require_no_rescaling(answer, outs, lses) -> None:
    """Raises NotYet if more numbers are multiplied than each out by its weight, and the sum at the end."""
    times = sum(
        often
        for equation, often in repeated(jaxpr_of(answer, outs, lses))
        if equation.primitive.name == "mul" and math.prod(equation.outvars[0].aval.shape) >= outs.shape[-1]
    )
    if 2 * len(outs) <= times < math.inf:
        raise NotYet(
            "the sums so far are rescaled with every piece: all weights are known before the first out is read, so "
            "multiply each out once, by its weight, and only the sum after that"
        )


def _pieces():
    """(name, outs (pieces, rows, head_dim), lses (pieces, rows)), float64."""
    rng = np.random.default_rng(13)
    yield "five pieces of two rows of 256", rng.standard_normal((5, 2, 256)), rng.standard_normal((5, 2))
    outs, lses = rng.standard_normal((4, 4, 128)), rng.standard_normal((4, 4))
    yield "large and small logits", outs, lses + np.array([900.0, -900.0, 90.0, 0.0])
    yield "three pieces", rng.standard_normal((3, 4, 128)), rng.standard_normal((3, 4))
    lses[0, 1] = lses[2, 1] = lses[1:, 2] = lses[:3, 3] = lses[:, 0] = -np.inf
    yield "pieces of which some see nothing", np.where(np.isneginf(lses)[..., None], 0.0, outs), lses
