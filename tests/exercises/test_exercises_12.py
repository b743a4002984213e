"""The exercises of chapter 12: solutions are accepted; wrong answers and untouched skeletons are not."""

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

from exercises import ex12  # noqa: E402

# delta


def delta(q, k, v, out, do, lse, d_lse):
    return np.einsum("btnh,btnh->bnt", out, do) - d_lse


def delta_by_sum(q, k, v, out, do, lse, d_lse):
    return (out * do).sum(axis=-1).swapaxes(1, 2) - d_lse


def delta_in_float32(*args):
    return delta(*(arg.astype(np.float32) for arg in args))


def delta_by_jax(q, k, v, out, do, lse, d_lse):
    return jnp.einsum("btnh,btnh->bnt", jnp.asarray(out), jnp.asarray(do)) - d_lse


@pytest.mark.parametrize("right", [delta, delta_by_sum, delta_in_float32, delta_by_jax])
def test_delta_solutions(right):
    accepted(ex12.check_delta(right))


def of(a, b):
    """delta of two other tensors, by their places among the arguments."""
    return lambda *args: np.einsum("btnh,btnh->bnt", args[a], args[b]) - args[6]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda *args: delta(*args) + args[6], "d_lse"),
        (lambda *args: delta(*args) + 2 * args[6], "which sign"),
        (lambda *args: -delta(*args), "the sign is the other one"),
        (of(3, 3), "out with itself"),
        (of(4, 4), "do with itself"),
        (of(2, 4), "v is a key's"),
        (of(0, 4), "q is the wrong tensor"),
        (of(1, 4), "the sum of p_ij v_j"),
        (lambda *args: delta(*args) * args[5], "NaN or infinite"),
        (lambda *args: (args[3] * args[4]).sum(axis=-1), "heads come first"),
        (lambda *args: None, "write its body"),
        (lambda q: None, "raised TypeError"),
    ],
)
def test_delta_wrong(wrong, said):
    rejected(ex12.check_delta(wrong), said)


# Which layout?


def load(ref, dim):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(dim), optimized=False)


def tile(s_ref):
    return plgpu.load(s_ref, layout=plgpu.Layout.WGMMA, optimized=False)


def spread(numbers, shape, dim):
    return lax.broadcast_in_dim(numbers, shape, [dim])


def weights(s_ref, lse_ref, bias_ref, *, exp=jnp.exp2, sign=1.0):
    lse, bias = spread(load(lse_ref, 0), s_ref.shape, 1), spread(load(bias_ref, 1), s_ref.shape, 0)
    return exp(tile(s_ref) + sign * bias - lse)


def weights_with_indices(s_ref, lse_ref, bias_ref):
    return jnp.exp2(tile(s_ref) - load(lse_ref, 0)[None, :] + load(bias_ref, 1)[:, None])


def weights_in_two_steps(s_ref, lse_ref, bias_ref):
    p = jnp.exp2(tile(s_ref) - spread(load(lse_ref, 0), s_ref.shape, 1))
    return p * spread(jnp.exp2(load(bias_ref, 1)), s_ref.shape, 0)


@pytest.mark.parametrize("right", [weights, weights_with_indices, weights_in_two_steps])
def test_weights_solutions(right):
    accepted(ex12.check_weights(right))


def weights_exchanged(s_ref, lse_ref, bias_ref):
    """The two numbers in each other's layout: with 64 queries the shapes fit."""
    lse, bias = spread(load(lse_ref, 1), s_ref.shape, 0), spread(load(bias_ref, 0), s_ref.shape, 1)
    return jnp.exp2(tile(s_ref) + bias - lse)


def weights_all_rows(s_ref, lse_ref, bias_ref):
    lse, bias = (spread(load(ref, 1), s_ref.shape, 0) for ref in (lse_ref, bias_ref))
    return jnp.exp2(tile(s_ref) + bias - lse)


def weights_all_columns(s_ref, lse_ref, bias_ref):
    lse, bias = (spread(load(ref, 0), s_ref.shape, 1) for ref in (lse_ref, bias_ref))
    return jnp.exp2(tile(s_ref) + bias - lse)


def weights_layout_of_rows(s_ref, lse_ref, bias_ref):
    """A layout for rows, spread along the columns: nothing a GPU could do."""
    lse, bias = spread(load(lse_ref, 1), s_ref.shape, 1), spread(load(bias_ref, 1), s_ref.shape, 0)
    return jnp.exp2(tile(s_ref) + bias - lse)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (weights_exchanged, "queries are the columns here, not the rows"),
        (weights_all_rows, "queries are the columns here"),
        (weights_all_columns, "keys are the rows here"),
        (weights_layout_of_rows, "no layout serves"),
        (lambda *refs: weights(*refs, exp=jnp.exp), "base 2"),
        (lambda *refs: weights(*refs, sign=-1.0), "is added"),
        (lambda *refs: weights(*refs, sign=0.0), "bias is missing"),
        (lambda s, lse, bias: jnp.exp2(tile(s) + spread(load(bias, 1), s.shape, 0)), "lse is missing"),
        (lambda s, lse, bias: load(bias, 1), "shape"),
        (lambda *refs: None, "write its body"),
    ],
)
def test_weights_wrong(wrong, said):
    rejected(ex12.check_weights(wrong), said)


# A window


def query_blocks(first_k, block, num_q, left, right, *, xp=jnp, last=63, clip=True, bound=True, from_zero=True):
    first = first_k - right
    first = (xp.maximum(first, 0) if from_zero else first) // block
    end = first_k + last + left + 1
    end = ((xp.minimum(end, num_q) if bound else end) + block - 1) // block
    return first, (xp.maximum(first, end) if clip else end)


class Python:
    maximum, minimum = staticmethod(max), staticmethod(min)


def query_blocks_clipped_first(first_k, block, num_q, left, right):
    """Empty ranges elsewhere: at the end."""
    end = (jnp.clip(first_k + 64 + left, 0, num_q) + block - 1) // block
    return jnp.minimum(jnp.maximum(first_k - right, 0) // block, end), end


@pytest.mark.parametrize("right", [query_blocks, query_blocks_clipped_first])
def test_query_blocks_solutions(right):
    accepted(ex12.check_query_blocks(right))


def with_knobs(**wrong):
    return lambda *args: query_blocks(*args, **wrong)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (with_knobs(xp=Python), "jnp.maximum"),
        (with_knobs(last=0), "is left out"),
        (with_knobs(last=128), "is computed"),
        (with_knobs(clip=False), "lies before the first"),
        (with_knobs(bound=False), "blocks 8 to 8 are computed"),
        (with_knobs(from_zero=False), "nothing before block 0"),
        (lambda k, b, n, left, right: query_blocks(k, b, n, right, left), "block"),
        (lambda k, b, n, left, right: (0, -(-n // b)), "none of its queries"),
        (lambda k, b, n, left, right: (0, 1), "is left out"),
        (lambda k, b, n, left, right: 3, "it must be (first, end)"),
        (lambda k, b, n, left, right: None, "write its body"),
    ],
)
def test_query_blocks_wrong(wrong, said):
    rejected(ex12.check_query_blocks(wrong), said)


# delta, in a kernel


def delta_kernel(out, do, *, dtype=jnp.float32, first=False):
    def body(out_gmem, do_gmem, delta_gmem):
        rows = pl.ds(lax.axis_index("tile") * 64, 64)
        load = lambda ref: plgpu.load(ref.at[rows], layout=plgpu.Layout.WGMMA, optimized=False).astype(dtype)
        delta = (load(out_gmem) * load(do_gmem)).sum(axis=1).astype(jnp.float32)
        delta_gmem[pl.ds(0, 64) if first else rows] = delta

    out_type = jax.ShapeDtypeStruct(out.shape[:1], jnp.float32)
    return plgpu.kernel(body, out_type=out_type, grid=(len(out) // 64,), grid_names=("tile",))(out, do)


@pytest.mark.parametrize(
    "wrong, said", [(dict(dtype=jnp.bfloat16), "multiply and add in float32"), (dict(first=True), "race")]
)
def test_delta_kernel_wrong(wrong, said):
    rejected(ex12.check_delta_kernel(lambda *args: delta_kernel(*args, **wrong)), said)
