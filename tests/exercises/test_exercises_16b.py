"""The exercises of chapter 16b: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
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

from exercises import ex16b  # noqa: E402


def smem_tile(rows, columns):
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM((rows, columns), jnp.bfloat16, transforms=transforms)


# Masked steps


def steps_of_group(start, end, *, align=8):
    if start == end:
        return 0, 0
    begin = start - start % align
    steps = list(range(begin, end, 64))
    return len(steps), sum(first < start or first + 64 > end for first in steps)


def in_numpy(start, end):
    return tuple(np.asarray(steps_of_group(start, end)))


@pytest.mark.parametrize("right", [steps_of_group, in_numpy])
def test_steps_solution(right):
    accepted(ex16b.check_steps(right))


def counted_twice(start, end):
    if start == end:
        return 0, 0
    begin, steps = start // 8 * 8, steps_of_group(start, end)[0]
    return steps, (begin < start) + (begin + 64 * steps > end)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(steps_of_group, align=1), "at a multiple of 8"),
        (functools.partial(steps_of_group, align=64), "not of 64"),
        (counted_twice, "counts once"),
        (lambda *case: (steps_of_group(*case)[0], min(2, steps_of_group(*case)[0])), "needs no mask"),
        (lambda start, end: (-(-(end - start // 8 * 8) // 64), steps_of_group(start, end)[1]), "without a row"),
        (lambda start, end: (9, 9), "where does the last one end"),
        (lambda start, end: 3, "must be a pair"),
        (lambda start, end: (1, 2, 3), "must be a pair"),
        (lambda start, end: start / 0, "raised ZeroDivisionError"),
    ],
)
def test_steps_wrong(wrong, said):
    rejected(ex16b.check_steps(wrong), said)


# Zeros in shared memory


def zeros_over(values, inside):
    return jnp.where(inside, values, jnp.zeros_like(values))


def group_sums(lhs, rhs, ends, *, clean=zeros_over, both=True, commit=True, ends_alone=False, late=0, empty_too=False):
    """Differs from the solution: masks only the first and the last step, and counts the steps otherwise."""

    def body(lhs_gmem, rhs_gmem, ends_gmem, o_gmem, lhs_smem, rhs_smem, filled):
        group = lax.axis_index("group")
        start = jnp.where(group > 0, ends_gmem[jnp.maximum(group - 1, 0)], 0)
        end = ends_gmem[group]
        first = pl.multiple_of(start & ~7, 8)
        count = (end - first + 63) // 64
        count = count if empty_too else jnp.where(start == end, 0, count)

        def multiply(acc):
            @pl.loop(0, count)
            def _(step):
                begin = pl.multiple_of(first + 64 * step, 8)
                for source, target in ((lhs_gmem, lhs_smem), (rhs_gmem, rhs_smem)):
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(begin, 64)], target, filled)
                plgpu.barrier_wait(filled)

                @pl.when((begin + 64 > end) | (False if ends_alone else begin < start))
                def _():
                    row = begin + plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (64, 64), 0), plgpu.Layout.WGMMA)
                    inside = (row >= start + late) & (row < end)
                    for smem in (lhs_smem, rhs_smem) if both else (lhs_smem,):
                        smem[...] = clean(plgpu.load(smem, layout=plgpu.Layout.WGMMA), inside)
                    if commit:
                        plgpu.commit_smem()

                plgpu.wgmma(acc, lhs_smem.T, rhs_smem)
                plgpu.wgmma_wait(0)

            return acc[...]

        o_gmem[group] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((ends.size, 64, 64), jnp.float32),
        grid=(ends.size,),
        grid_names=("group",),
        scratch_types=[smem_tile(64, 64), smem_tile(64, 64), plgpu.Barrier(num_arrivals=2)],
    )(lhs, rhs, ends)


def test_zeros_solution():
    accepted(ex16b.check_zeros(group_sums))


def no_nan_at_all(values, inside):
    return jnp.where(inside & (values == values), values, jnp.zeros_like(values))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(clean=lambda values, inside: values), "all values finite: the sum of group 0"),
        (dict(clean=lambda values, inside: values * inside.astype(values.dtype)), "0 times NaN is NaN"),
        (dict(both=False), "NaN in row 66 of rhs, which belongs to group 0, has reached the sum of group 2"),
        (dict(commit=False), "commit what you have stored (plgpu.commit_smem)"),
        (dict(ends_alone=True), "the sum of group 2"),
        (dict(late=1), "all values finite: the sum of group 2"),
        (dict(clean=no_nan_at_all), "is gone from the sum of group 2"),
    ],
)
def test_zeros_wrong(wrong, said):
    rejected(ex16b.check_zeros(functools.partial(group_sums, **wrong)), said)


def test_zeros_by_xla():
    def by_xla(lhs, rhs, ends):
        row = jnp.arange(len(lhs))[:, None]
        starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
        return jnp.stack([jnp.where((row >= a) & (row < b), lhs, 0).T @ rhs for a, b in zip(starts, ends, strict=True)])

    rejected(ex16b.check_zeros(by_xla), "must be a kernel")


# Exchanged operands


def few_rows(x, w, *, exchanged=True, turned=True, half=False):
    """Differs from the solution: all of K is copied at once."""
    num_groups, rows, k = x.shape
    shape = (128, rows) if exchanged else (rows, 128)

    def body(x_gmem, w_gmem, o_gmem, x_smem, w_smem, filled):
        group = lax.axis_index("group")
        plgpu.copy_gmem_to_smem(x_gmem.at[group], x_smem, filled)
        plgpu.copy_gmem_to_smem(w_gmem.at[group], w_smem, filled)
        plgpu.barrier_wait(filled)

        def multiply(acc):
            @pl.loop(0, k // 128 if half else k // 64)
            def _(step):
                ks = pl.ds(step * 64, 64)
                pair = w_smem.at[ks].T, x_smem.at[:, ks].T
                plgpu.wgmma(acc, *(pair if exchanged else (x_smem.at[:, ks], w_smem.at[ks])))
                plgpu.wgmma_wait(0)

            return acc[...]

        o_gmem[group] = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_groups, *shape), jnp.float32),
        grid=(num_groups,),
        grid_names=("group",),
        scratch_types=[smem_tile(rows, k), smem_tile(k, 128), plgpu.Barrier(num_arrivals=2)],
    )(x, w)
    return out.swapaxes(1, 2) if exchanged and turned else out


def padded(x, w):
    """64 rows a group, of which XLA drops 56."""
    more = jnp.broadcast_to(x[:, None], (len(x), 8, *x.shape[1:])).reshape(len(x), 64, -1)
    return few_rows(more, w, exchanged=False)[:, :8]


def test_exchange_solution():
    accepted(ex16b.check_exchange(few_rows))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(few_rows, exchanged=False), "64 rows or more of its first operand"),
        (functools.partial(few_rows, turned=False), "which is transposed"),
        (functools.partial(few_rows, half=True), "K = 128: element"),
        (padded, "do not pad"),
        (lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32), "must be a kernel"),
    ],
)
def test_exchange_wrong(wrong, said):
    rejected(ex16b.check_exchange(wrong), said)


# Combine


def combined(y, weights, rows, *, weighted=True, permuted=True, first_alone=False, dtype=jnp.float32, swap=False):
    """Differs from the solution: a loop of the kernel, not one of Python."""
    (tokens, top_k), cols = rows.shape, y.shape[1]

    def body(y_gmem, weights_gmem, rows_gmem, o_gmem):
        token = lax.axis_index("token")

        def add(j, total):
            row = rows_gmem[token, j] if permuted else token * top_k + j
            value = plgpu.load(y_gmem.at[row], layout=plgpu.Layout.WG_STRIDED((cols,), 2), optimized=False)
            weight = weights_gmem[token, 0 if swap else j] if weighted else jnp.float32(1)
            return (total + (weight * value.astype(jnp.float32)).astype(dtype)).astype(dtype)

        zeros = plgpu.layout_cast(jnp.zeros((cols,), dtype), plgpu.Layout.WG_STRIDED((cols,), 2))
        total = lax.fori_loop(0, 1 if first_alone else top_k, add, zeros)
        o_gmem[token] = total.astype(o_gmem.dtype)

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((tokens, cols), y.dtype), grid=(tokens,), grid_names=("token",)
    )(y, weights, rows)


def by_scattering(y, weights, rows):
    """XLA's additions, row by row."""
    token = jnp.zeros(rows.size, jnp.int32).at[rows.ravel()].set(jnp.arange(rows.size) // rows.shape[1])
    weight = jnp.zeros(rows.size).at[rows.ravel()].set(weights.ravel())
    return jnp.zeros((len(rows), y.shape[1])).at[token].add(weight[:, None] * y).astype(y.dtype)


def test_combine_solution():
    accepted(ex16b.check_combine(combined))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(combined, weighted=False), "without their weights"),
        (functools.partial(combined, permuted=False), "rows[t, j] says where"),
        (functools.partial(combined, first_alone=True), "only each token's first row counts"),
        (functools.partial(combined, swap=True), "one weight, its first"),
        (functools.partial(combined, dtype=jnp.bfloat16), "sums in float32, one rounding"),
        (by_scattering, "must be a kernel"),
    ],
)
def test_combine_wrong(wrong, said):
    rejected(ex16b.check_combine(wrong), said)
