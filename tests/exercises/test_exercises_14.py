"""The exercises of chapter 14: other right answers are accepted, and each wrong one is told its mistake."""

import itertools
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

from exercises import ex14, judge  # noqa: E402
from exercises.ex14 import SEES  # noqa: E402

# Exercise 2


def tiles(cu_q, queries, side="right"):
    lengths = np.diff(cu_q)
    num = -(-lengths // queries)
    ends = np.cumsum(num)
    number = np.arange(ends[-1])
    seq = np.searchsorted(ends, number, side=side)
    first = (number - (ends - num)[seq]) * queries
    return cu_q[seq] + first, np.minimum(lengths[seq] - first, queries)


def tiles_in_a_loop(cu_q, queries):
    found = [
        (row, min(queries, end - row))
        for start, end in itertools.pairwise(cu_q.tolist())
        for row in range(start, end, queries)
    ]
    return [row for row, _ in found], [num for _, num in found]


@pytest.mark.parametrize("right", [tiles, tiles_in_a_loop])
def test_tiles_solutions(right):
    accepted(ex14.check_tiles(right))


def tiles_of_rows(cu_q, queries):
    """Tiles of the array, without regard to sequences."""
    first = np.arange(0, cu_q[-1], queries)
    return first, np.minimum(cu_q[-1] - first, queries)


def tiles_left(cu_q, queries):
    """searchsorted on the other side."""
    return tiles(cu_q, queries, side="left")


def tiles_rounded_down(cu_q, queries):
    found = [
        (row, queries)
        for start, end in itertools.pairwise(cu_q.tolist())
        for row in range(start, end - queries + 1, queries)
    ]
    return [row for row, _ in found], [num for _, num in found]


def at_least_one(cu_q, queries):
    found = [
        (row, min(queries, end - row))
        for start, end in itertools.pairwise(cu_q.tolist())
        for row in range(start, max(end, start + 1), queries)
    ]
    return [row for row, _ in found], [num for _, num in found]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (tiles_of_rows, "over the border"),
        (tiles_left, "tile"),
        (tiles_rounded_down, "it must be"),
        (at_least_one, "an empty sequence has no tile"),
        (lambda cu, n: (tiles(cu, n)[0], np.full_like(tiles(cu, n)[0], n)), "over the border"),
        (lambda cu, n: tiles(cu, 2 * n), "queries"),
        (lambda cu, n: tuple(x[::-1] for x in tiles(cu, n)), "their order"),
        (lambda cu, n: (tiles(cu, n)[0] - cu[0] + 1, tiles(cu, n)[1]), "row"),
        (lambda cu, n: tiles(cu, n)[0], "two arrays"),
        (lambda cu, n: (tiles(cu, n)[0], tiles(cu, n)[1][:-1]), "two arrays"),
        (lambda cu, n: None, "write its body"),
        (lambda cu: None, "raised TypeError"),
    ],
)
def test_tiles_wrong(wrong, said):
    rejected(ex14.check_tiles(wrong), said)


# Exercise 1


def keys(t, i, cu_q, cu_kv, left, *, at_end=True, clip=True, rows=True, bound=True):
    num_q, num_kv = cu_q[i + 1] - cu_q[i], cu_kv[i + 1] - cu_kv[i]
    position = num_kv - num_q + t if at_end else t
    end = max(position + 1, 0) if clip else position + 1
    first = max(position - left, 0) if bound else position - left
    first = min(first, end) if clip else first
    start = cu_kv[i] if rows else 0
    return start + first, start + end


def keys_by_mask(t, i, cu_q, cu_kv, left):
    j = np.arange(cu_kv[i], cu_kv[i + 1])
    position = cu_kv[i + 1] - cu_q[i + 1] + cu_q[i] + t
    seen = j[(j <= position) & (j >= position - left)]
    return (seen[0], seen[-1] + 1) if len(seen) else (0, 0)


@pytest.mark.parametrize("right", [keys, keys_by_mask])
def test_keys_solutions(right):
    accepted(ex14.check_keys(right))


def keys_one_after(t, i, cu_q, cu_kv, left):
    """One more, for the last query alone."""
    first, end = keys(t, i, cu_q, cu_kv, left)
    return first, end + (t == cu_q[i + 1] - cu_q[i] - 1)


def keys_one_before(t, i, cu_q, cu_kv, left):
    """One more, where the first key is seen."""
    first, end = keys(t, i, cu_q, cu_kv, left)
    return first - (0 < cu_kv[i] == first < end), end


def with_knobs(**wrong):
    return lambda *args: keys(*args, **wrong)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (with_knobs(at_end=False), "aligned at the starts"),
        (with_knobs(clip=False), "lies before the first"),
        (with_knobs(rows=False), "rows of k are asked for"),
        (with_knobs(bound=False), "it sees nothing"),
        (lambda t, i, q, kv, left: keys(t + 1, i, q, kv, left), "it sees rows 0 to 0, not 1 to 1"),
        (keys_one_after, "belongs to the sequence after it"),
        (keys_one_before, "belongs to the sequence before"),
        (lambda t, i, q, kv, left: keys(t, i, q, kv, left + 1), "it sees rows"),
        (lambda t, i, q, kv, left: (kv[i], kv[i + 1]), "rows"),
        (lambda t, i, q, kv, left: keys(t, i, q, kv, left)[0], "it must be (first, end)"),
        (lambda *args: None, "write its body"),
    ],
)
def test_keys_wrong(wrong, said):
    rejected(ex14.check_keys(wrong), said)


# Exercise 3


def seen_sums(v, listed, *, sees=SEES, late=0):
    """Differs from the solution: the mask is chosen by `jnp.where`, the values are multiplied where a tile has any, and
    blocks are counted from the block of the first key on."""

    def body(v_gmem, listed_gmem, out_gmem, v_smem, p_smem, loaded):
        n = lax.axis_index("tile")
        tile = ex14.Tile(*(listed_gmem[n, i] for i in range(6)))
        row, column = (
            plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (64, 64), dim), plgpu.Layout.WGMMA) for dim in (0, 1)
        )

        def add(acc):
            @pl.loop(lax.div(tile.first_kv, jnp.int32(64)) + late, pl.cdiv(tile.num_kv, 64))
            def _(block):
                begin = pl.multiple_of(tile.source + block * 64, 8)
                plgpu.copy_gmem_to_smem(v_gmem.at[pl.ds(begin, 64)], v_smem, loaded)
                plgpu.barrier_wait(loaded)
                one = jnp.ones((64, 64), v.dtype)
                one = plgpu.layout_cast(one, plgpu.Layout.WGMMA)
                p_smem[...] = jnp.where(sees(row, block * 64 + column, tile), one, jnp.zeros_like(one))
                plgpu.commit_smem()
                plgpu.wgmma(acc, p_smem, v_smem)
                plgpu.wgmma_wait(0)

            return acc[...]

        out_gmem[n] = pl.run_scoped(add, plgpu.ACC((64, 64), jnp.float32))

    smem = plgpu.SMEM((64, 64), v.dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(listed), 64, 64), jnp.float32),
        grid=(len(listed),),
        grid_names=("tile",),
        scratch_types=[smem, smem, plgpu.Barrier()],
    )(v, listed)


def test_mask_solution():
    accepted(ex14.check_mask(seen_sums))


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("(key >= first_kv) & (key < num_kv) & (key <= first_q + row)", "key <= row", "has no past"),
        ("(key <= first_q + row)", "(key <= first_kv + row)", "position is first_q + row"),
        ("(key >= first_kv) & ", "", "belong to the sequence before"),
        ("(key < num_kv) & ", "", "belong to the sequence after it"),
        ("first_q + row", "first_kv + first_q + row", "do not add the two"),
        ("key <= first_q", "key < first_q", "at its own position, too"),
        (" & (key <= first_q + row)", "", "must not see keys after its own"),
        (" & (key < num_kv) & ", " | ", "element"),
        ("block * 64 + column", "column", "element"),
        ("    )(v, listed)", "    )(v * 1, listed)", "outside of the kernel"),
        ("    def body", "    while True: pass\n    def body", "has not ended"),
    ],
)
def test_mask_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("14_ragged_prefill", "exercise-mask", right, wrong), said)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda v, listed: seen_sums(v, listed, late=1), "element"),
        (lambda v, listed: seen_sums(v, listed)[1:], "the result has shape"),
        (lambda v, listed: jnp.zeros((len(listed), 64, 64)), "must be a kernel"),
        (lambda v, listed: None, ""),
    ],
)
def test_mask_otherwise_wrong(wrong, said):
    rejected(ex14.check_mask(wrong), said)


# Exercise 4


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (
            "jnp.where(is_mine, weight * value, jnp.zeros_like(value))",
            "jnp.where(is_mine, jnp.full(value.shape, weight), jnp.zeros_like(value)) * value",
            "row 4 holds NaN",
        ),
        ("weight * value, jnp.zeros_like(value))", "weight, jnp.zeros_like(value)) * value", "row 4 holds NaN"),
        ("jnp.where(is_mine, weight * value, jnp.zeros_like(value))", "weight * value", "element"),
        ("where(is_mine, w", "where(is_mine & (value == value), w", "sequence 0, to which it belongs, has none"),
        ("(row >= first) & (row < end)", "row >= first", "element"),
        ("    )(cu_kv, v, weights)", "    )(cu_kv, v * 1, weights)", "outside of the kernel"),
        ("    def body", "    while True: pass\n    def body", "has not ended"),
    ],
)
def test_sums_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("14_ragged_prefill", "exercise-nan", right, wrong), said)
