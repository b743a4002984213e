"""The exercises of chapter 16: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
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

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex16  # noqa: E402

# Room for the table


def most_entries(m, num_groups, tile):
    return min(m, (m + num_groups * (tile - 1)) // tile)


def in_steps(m, num_groups, tile):
    if m <= num_groups:
        return m
    return num_groups + (m - num_groups) // tile


@pytest.mark.parametrize("right", [most_entries, in_steps, lambda *case: np.int64(in_steps(*case))])
def test_entries_solution(right):
    accepted(ex16.check_entries(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda m, g, tile: -(-m // tile), "Groups share no tile"),
        (lambda m, g, tile: m // tile + g, "can every group have one more"),
        (lambda m, g, tile: -(-m // tile) + g, "more than any sizes need"),
        (lambda m, g, tile: -(-m // tile) + g - 1, "an entry more"),
        (lambda m, g, tile: (m + g * (tile - 1)) // tile, "at least one row"),
        (lambda m, g, tile: m, "Give each group one row"),
        (lambda m, g, tile: "many", "must be a number"),
        (lambda m, g, tile: m / 0, "raised ZeroDivisionError"),
    ],
)
def test_entries_wrong(wrong, said):
    rejected(ex16.check_entries(wrong), said)


@pytest.mark.parametrize("m, num_groups, tile", [(7, 3, 2), (6, 2, 4), (2, 3, 4), (9, 3, 3), (0, 2, 4)])
def test_entries_are_the_most_of_all_sizes(m, num_groups, tile):
    sizes = (s for s in itertools.product(range(m + 1), repeat=num_groups) if sum(s) <= m)
    assert max(sum(-(-size // tile) for size in s) for s in sizes) == ex16._most_entries(m, num_groups, tile)


# Copies


def copies(sizes, piece):
    return sum(size // piece + bin(size % piece).count("1") for size in sizes)


def one_by_one(sizes, piece):
    total = 0
    for left in sizes:
        while left:
            left -= max(size for size in (2**i for i in range(piece.bit_length())) if size <= left)
            total += 1
    return total


@pytest.mark.parametrize("right", [copies, one_by_one])
def test_copies_solution(right):
    accepted(ex16.check_copies(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda sizes, piece: sum(-(-size // piece) for size in sizes), "is several copies"),
        (lambda sizes, piece: sum(sizes), "more than one row"),
        (lambda sizes, piece: copies([sum(sizes)], piece), "begin anew"),
        (lambda sizes, piece: sum(size.bit_count() for size in sizes), "larger than a piece"),
        (lambda sizes, piece: sum(size // piece for size in sizes), "not whole"),
        (lambda sizes, piece: copies(sizes, piece) + 1, "the rest in binary"),
        (lambda sizes, piece: True, "must be a number"),
        (lambda sizes, piece: sizes[99], "raised IndexError"),
    ],
)
def test_copies_wrong(wrong, said):
    rejected(ex16.check_copies(wrong), said)


# The store of a boundary tile


def store_rows(
    piece_smem, o_gmem, left, sizes=(32, 16, 8, 4, 2, 1), first_of=lambda left, size: left & ~(2 * size - 1)
):
    pl.when(left >= 64)(lambda: plgpu.copy_smem_to_gmem(piece_smem, o_gmem))

    @pl.when((left > 0) & (left < 64))
    def _():
        for size in sizes:

            @pl.when(left & size != 0)
            def _(size=size):
                rows = pl.ds(first_of(left, size), size)
                plgpu.copy_smem_to_gmem(piece_smem.at[rows], o_gmem.at[rows])


def smallest_first(piece_smem, o_gmem, left):
    return store_rows(piece_smem, o_gmem, left, first_of=lambda left, size: left & (size - 1))


def of_negative_numbers_too(piece_smem, o_gmem, left):
    """Without the question whether any row is left: a negative number has ones in binary."""
    pl.when(left >= 64)(lambda: plgpu.copy_smem_to_gmem(piece_smem, o_gmem))

    @pl.when(left < 64)
    def _():
        for size in (32, 16, 8, 4, 2, 1):

            @pl.when(left & size != 0)
            def _(size=size):
                rows = pl.ds(left & 63 & ~(2 * size - 1), size)
                plgpu.copy_smem_to_gmem(piece_smem.at[rows], o_gmem.at[rows])


def swapped_places(piece_smem, o_gmem, left):
    pl.when(left >= 64)(lambda: plgpu.copy_smem_to_gmem(piece_smem, o_gmem))

    @pl.when((left > 0) & (left < 64))
    def _():
        for size in (32, 16, 8, 4, 2, 1):

            @pl.when(left & size != 0)
            def _(size=size):
                rows = pl.ds(left & ~(2 * size - 1), size)
                plgpu.copy_smem_to_gmem(piece_smem.at[pl.ds(0, size)], o_gmem.at[rows])


def row_by_row(piece_smem, o_gmem, left):
    pl.when(left >= 64)(lambda: plgpu.copy_smem_to_gmem(piece_smem, o_gmem))

    @pl.loop(0, jnp.where(left < 64, left, 0))
    def _(row):
        plgpu.copy_smem_to_gmem(piece_smem.at[pl.ds(row, 1)], o_gmem.at[pl.ds(row, 1)])


def of_traced_size(piece_smem, o_gmem, left):
    rows = pl.ds(0, left)
    plgpu.copy_smem_to_gmem(piece_smem.at[rows], o_gmem.at[rows])


@pytest.mark.parametrize("right", [store_rows, smallest_first])
def test_store_solution(right):
    accepted(ex16.check_store(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda piece, o, left: plgpu.copy_smem_to_gmem(piece, o), "left = 63: row 63 was written"),
        (lambda piece, o, left: pl.when(left >= 64)(lambda: plgpu.copy_smem_to_gmem(piece, o)), "left = 63: row 0 was"),
        (functools.partial(store_rows, sizes=(32, 16, 8, 4, 2)), "left = 63: row 62 was never"),
        (of_negative_numbers_too, "left = -27: row 0 was written"),
        (row_by_row, "a block starts 63 copies to GMEM, and 6 would do"),
        (swapped_places, "another row's place"),
        (of_traced_size, "cannot be compiled"),
        (lambda piece, o, left: 1 / 0, "cannot be compiled for a GPU: ZeroDivisionError"),
    ],
)
def test_store_wrong(wrong, said):
    rejected(ex16.check_store(wrong), said)


# A tile with two groups


def add_bias(x, bias, ends, *, late=False, first_alone=False):
    def body(x_gmem, bias_gmem, ends_gmem, o_gmem):
        first = lax.axis_index("block") * 64
        values = plgpu.load(x_gmem.at[pl.ds(first, 64)], layout=plgpu.Layout.WGMMA, optimized=False)
        row = first + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)

        def add(g, total):
            vector = plgpu.load(bias_gmem.at[g], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            start = jnp.where(g > 0, ends_gmem[jnp.maximum(g - 1, 0)], 0)
            where = first + jnp.zeros_like(row) if first_alone else row + late
            mine = (where >= start) & (where < ends_gmem[g])
            return total + jnp.where(mine, lax.broadcast_in_dim(vector, values.shape, [1]), 0)

        o_gmem[pl.ds(first, 64)] = lax.fori_loop(0, len(ends), add, values)

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out_type, grid=(len(x) // 64,), grid_names=("block",))(x, bias, ends)


@pytest.mark.parametrize(
    "wrong, said",
    [(dict(late=True), "row 63, of group 0"), (dict(first_alone=True), "(70, 0, 58) rows: row 70, of group 2")],
)
def test_bias_wrong(wrong, said):
    rejected(ex16.check_bias(lambda *args: add_bias(*args, **wrong)), said)
