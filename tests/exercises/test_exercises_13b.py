"""The exercises of chapter 13b: other right answers are accepted, and each wrong one is told its mistake."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex13b, judge  # noqa: E402

# Exercise 1


def part_by_running_sums(part, num_parts, blocks):
    """As the chapter's kernel has it: the long parts are spread over all."""
    ends = np.cumsum(blocks)
    start, stop = part * ends[-1] // num_parts, (part + 1) * ends[-1] // num_parts
    unit = min(np.searchsorted(ends, start, side="right"), len(blocks) - 1)
    return unit, start - (ends[unit] - blocks[unit]), stop - start


def part_by_counting(part, num_parts, blocks):
    """As the package has it: the long parts come first."""
    share, extra = divmod(int(sum(blocks)), num_parts)
    start, unit = part * share + min(part, extra), 0
    while unit < len(blocks) - 1 and start >= blocks[unit]:
        start, unit = start - blocks[unit], unit + 1
    return unit, start, share + (part < extra)


@pytest.mark.parametrize("right", [part_by_running_sums, part_by_counting])
def test_part_solutions(right):
    accepted(ex13b.check_part(right))


def whole_units(part, num_parts, blocks):
    return part % len(blocks), 0, blocks[part % len(blocks)]


def rest_in_the_last(part, num_parts, blocks):
    share = sum(blocks) // num_parts
    unit, block, _ = part_by_counting(0, 1, blocks)
    ends = np.cumsum(blocks)
    unit = min(np.searchsorted(ends, part * share, side="right"), len(blocks) - 1)
    steps = share if part < num_parts - 1 else sum(blocks) - share * (num_parts - 1)
    return unit, part * share - (ends[unit] - blocks[unit]), steps


def rounded_up(part, num_parts, blocks):
    share = -(-sum(blocks) // num_parts)
    unit, block, _ = rest_in_the_last(part, num_parts, blocks)
    return unit, block, min(share, sum(blocks) - part * share)


def from_the_row(part, num_parts, blocks):
    unit, _, steps = part_by_running_sums(part, num_parts, blocks)
    return unit, part * sum(blocks) // num_parts, steps


def side_left(part, num_parts, blocks):
    ends = np.cumsum(blocks)
    start, stop = part * ends[-1] // num_parts, (part + 1) * ends[-1] // num_parts
    unit = np.searchsorted(ends, start)
    return unit, start - (ends[unit] - blocks[unit]), stop - start


def always_the_first(part, num_parts, blocks):
    return 0, 0, part_by_running_sums(part, num_parts, blocks)[2]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (rest_in_the_last, "they may differ by one"),
        (rounded_up, "blocks"),
        (from_the_row, "counts from the start of its unit"),
        (side_left, "begins in the next"),
        (always_the_first, "the parts before end before"),
        (whole_units, "blocks"),
        (lambda p, n, b: (*part_by_counting(p, n, b)[:2], 1), "all parts together"),
        (lambda p, n, b: (len(b), 0, part_by_counting(p, n, b)[2]), "there are units 0 to 3"),
        (lambda p, n, b: 3, "it must be (unit, block, steps)"),
        (lambda *args: None, "write its body"),
    ],
)
def test_part_wrong(wrong, said):
    rejected(ex13b.check_part(wrong), said)


# Exercise 2


def merge_by_one(outs, lses):
    """As the chapter's `merge` has it: one pass, in which each step rescales the result of the step before."""
    num_pieces, rows, head_dim = outs.shape

    def body(outs_gmem, lses_gmem, out_gmem, lse_gmem):
        row = lax.axis_index("row")

        def one(piece, state):
            acc, m, total = state
            lse = lses_gmem[piece, row]
            m_new = jnp.maximum(m, lse)
            shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            alpha, share = jnp.exp(m - shift), jnp.exp(lse - shift)
            return acc * alpha + outs_gmem[piece, row] * share, m_new, total * alpha + share

        nothing = jnp.zeros((head_dim,), jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0.0)
        acc, m, total = lax.fori_loop(0, num_pieces, one, nothing)
        out_gmem[row] = acc * jnp.where(total > 0, 1 / total, 0.0)
        lse_gmem[row] = jnp.where(total > 0, m + jnp.log(total), -jnp.inf)

    shapes = (rows, head_dim), (rows,)
    return plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        grid=(rows,),
        grid_names=("row",),
    )(outs, lses)


def test_merge_solution():
    accepted(ex13b.check_merge(merge_by_one))


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("jnp.exp(lses_gmem[piece, row] - shift)", "jnp.exp(lses_gmem[piece, row])", "Subtract the largest"),
        ("jnp.exp(lses_gmem[piece, row] - shift)", "jnp.float32(1.0)", "lse"),
        ("acc * jnp.where(total > 0, 1 / total, 0.0)", "acc", "lse is right, out is not"),
        ("acc * jnp.where(total > 0, 1 / total, 0.0)", "acc / total", "all pieces are empty"),
        ("shift + jnp.log(total)", "top", "the largest lse is not all"),
        ("shift + jnp.log(total)", "jnp.log(total)", "the natural logarithm"),
        ("    )(outs, lses)", "    )(outs + 0, lses)", "outside of the kernel"),
        ("    num_pieces, rows", "    while True: pass\n    num_pieces, rows", "has not ended"),
    ],
)
def test_merge_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("13b_equal_parts", "exercise-merge", right, wrong), said)


# Exercise 3


def last_block(p, v, seen):
    """Differs from the solution: writes only if there is something to clear, and through a view."""

    def body(p_gmem, v_gmem, seen_gmem, o_gmem, p_smem, v_smem, filled):
        for source, target in ((p_gmem, p_smem), (v_gmem, v_smem)):
            plgpu.copy_gmem_to_smem(source, target, filled)
        plgpu.barrier_wait(filled)
        seen = seen_gmem[0]

        @pl.when(seen < 64)
        def _():
            part = v_smem.at[:, pl.ds(0, 64)]
            row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(row >= seen, jnp.zeros((), part.dtype), part[...])
            plgpu.commit_smem()

        def multiply(acc):
            plgpu.wgmma(acc, p_smem, v_smem)
            return acc[...]

        o_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[*[plgpu.SMEM((64, 64), p.dtype)] * 2, plgpu.Barrier(num_arrivals=2)],
    )(p, v, seen)


def test_last_block_solution():
    accepted(ex13b.check_last_block(last_block))


def last_block_by_xla(p, v, seen):
    return p.astype(jnp.float32) @ jnp.where(jnp.arange(64)[:, None] < seen, v, 0).astype(jnp.float32)


def test_last_block_by_xla():
    rejected(ex13b.check_last_block(last_block_by_xla), "must be a kernel")


CLEAR = "jnp.where(row < seen, values, jnp.zeros_like(values))"


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (CLEAR, "values * (row < seen).astype(values.dtype)", "0 times NaN is NaN"),
        (CLEAR, "values", "where no token is, has reached the result"),
        (CLEAR, CLEAR.replace("row < seen", "row <= seen"), "NaN from row"),
        (CLEAR, CLEAR.replace("row < seen", "row < seen - 1"), "must stay as they are"),
        (CLEAR, CLEAR.replace("row < seen", "row >= seen"), "the result is wrong"),
        (CLEAR, CLEAR.replace("row < seen", "values == values"), "gone from the result"),
        ("        plgpu.commit_smem()\n", "", "commit what you have stored (plgpu.commit_smem)"),
        ("        plgpu.barrier_wait(filled)\n", "", "reads the slot before its tiles have arrived"),
        ("num_arrivals=2", "num_arrivals=3", "never end"),
        ("    )(p, v, seen)", "    )(p, jnp.nan_to_num(v), seen)", "outside of the kernel"),
        ("    def body(", "    while True: pass\n    def body(", "has not ended"),
    ],
)
def test_last_block_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("13b_equal_parts", "exercise-last-block", right, wrong), said)


# Exercise 4


def tokens_of(pages, ids):
    """Differs from the solution: a block of threads for each column, and one unsigned comparison."""
    num_pages, page_size, head_dim = pages.shape

    def body(pages_gmem, ids_gmem, o_gmem, smem, filled):
        column = lax.axis_index("column")
        page = ids_gmem[column]
        page = jnp.where(page.astype(jnp.uint32) < num_pages, page, num_pages)
        plgpu.copy_gmem_to_smem(pages_gmem.at[page], smem, filled)
        plgpu.barrier_wait(filled)
        plgpu.copy_smem_to_gmem(smem, o_gmem.at[pl.ds(column * page_size, page_size)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(ids) * page_size, head_dim), pages.dtype),
        grid=(len(ids),),
        grid_names=("column",),
        scratch_types=[plgpu.SMEM((page_size, head_dim), pages.dtype), plgpu.Barrier()],
    )(pages, ids)


def test_ids_solution():
    accepted(ex13b.check_ids(tokens_of))


def tokens_by_xla(pages, ids):
    is_page = (ids >= 0) & (ids < len(pages))
    return jnp.where(is_page[:, None, None], pages[ids], 0).reshape(-1, pages.shape[2])


def test_ids_by_xla():
    rejected(ex13b.check_ids(tokens_by_xla), "must be a kernel")


GUARD = "jnp.where((page >= 0) & (page < num_pages), page, num_pages)"
COPY = "plgpu.copy_gmem_to_smem(pages_gmem.at[page], smem.at[rows], filled)"


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (GUARD, "jnp.clip(page, 0, num_pages - 1)", "6 is no page, and the result has page 5"),
        (GUARD, "lax.rem(page, jnp.int32(num_pages))", "6 is no page, and the result has page 0"),
        (GUARD, "page", "-1 is no page, and the result has page 5"),
        (GUARD, "jnp.where(page < num_pages, page, num_pages)", "-1 is no page"),
        (GUARD, GUARD.replace("page >= 0", "page > 0"), "page 0 is in the cache"),
        (GUARD, "num_pages", "page 4 is in the cache"),
        (COPY, f"pl.when((page >= 0) & (page < num_pages))(lambda: {COPY})", "a copy that was never started"),
        ("        plgpu.barrier_wait(filled)\n", "", "reads the slot before its tiles have arrived"),
        ("    )(pages, ids)", "    )(pages, jnp.maximum(ids, 0))", "outside of the kernel"),
        ("    def body(", "    while True: pass\n    def body(", "has not ended"),
    ],
)
def test_ids_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("13b_equal_parts", "exercise-ids", right, wrong), said)
