"""Chapter 3's exercises: right answers pass, and wrong ones are turned down with what is wrong."""

import functools
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex03, judge  # noqa: E402


def _turned_down(verdict, said: str = ""):
    assert not verdict, verdict
    assert said in verdict.text, verdict
    assert "Traceback" not in verdict.text


@pytest.fixture(scope="module")
def notebook() -> dict:
    """The names that the notebook's own cells define, as far as the exercises use them."""
    cells = json.loads((NOTEBOOKS / "03_reductions.ipynb").read_text())["cells"]
    sources = {cell["id"]: "".join(cell["source"]) for cell in cells}
    names: dict = {}
    for cell in ("parameters", "imports", "bound", "helpers"):
        exec(sources[cell], names)
    return names


@pytest.fixture(scope="module")
def row_kernel(notebook):
    """`row_kernel(f)` is the kernel that stores `f(x)` for each row x, a 1-D float32 value."""

    def make(f):
        def answer(x):
            def kernel(x_gmem, o_gmem):
                row = lax.axis_index("block")
                o_gmem[row] = f(notebook["load"](x_gmem.at[row])).astype(o_gmem.dtype)

            return notebook["per_row"](kernel, x, approx_math=False)

        return answer

    return make


def merged(a, b, *, of_l=True, of_acc=True, swapped=False, m=jnp.maximum, divide=False):
    (m_a, l_a, acc_a), (m_b, l_b, acc_b) = a, b
    m_i = m(m_a, m_b)
    scale_a, scale_b = jnp.exp(m_a - m_i), jnp.exp(m_b - m_i)
    if swapped:
        scale_a, scale_b = scale_b, scale_a
    l_i = l_a * scale_a + l_b * scale_b if of_l else l_a + l_b
    acc = acc_a * scale_a + acc_b * scale_b if of_acc else acc_a + acc_b
    return m_i, l_i, acc / l_i if divide else acc


def test_right_merge_passes():
    assert ex03.check_merge(merged)


@pytest.mark.parametrize(
    "how, said",
    [
        (dict(of_l=False), "relative"),
        (dict(of_acc=False), "acc is not"),
        (dict(swapped=True), "l is"),
        (dict(m=jnp.minimum), "largest"),
        (dict(m=lambda a, b: a), "largest"),
        (dict(m=lambda a, b: b), "largest"),
        (dict(divide=True), "acc is not"),
    ],
)
def test_wrong_merges_are_turned_down(how, said):
    _turned_down(ex03.check_merge(lambda a, b: merged(a, b, **how)), said)


@pytest.mark.parametrize(
    "answer, said",
    [
        (lambda a, b: None, "tuple"),
        (lambda a, b: a, ""),
        (lambda a, b: (*merged(a, b)[:2], jnp.sum(merged(a, b)[2])), "shape"),
        (lambda a: a, "raised TypeError"),
        (lambda a, b: (*merged(a, b)[:2], merged(a, b)[2] * jnp.nan), "NaN"),
    ],
)
def test_merges_of_the_wrong_kind_are_turned_down(answer, said):
    _turned_down(ex03.check_merge(answer), said)


def test_a_merge_that_takes_infinity_from_infinity_is_turned_down():
    def answer(a, b):
        lowered = [(jnp.where(part[1] == 0, -jnp.inf, part[0]), *part[1:]) for part in (a, b)]
        return merged(*lowered)

    _turned_down(ex03.check_merge(answer), "NaN")


def test_right_log_softmaxes_pass(row_kernel):
    def of_difference(x):
        x = x - jnp.max(x)
        return x - jnp.log(jnp.sum(jnp.exp(x)))

    assert ex03.check_log_softmax(row_kernel(of_difference))
    assert ex03.check_log_softmax(row_kernel(lambda x: x - (jnp.max(x) + jnp.log(jnp.sum(jnp.exp(x - jnp.max(x)))))))


@pytest.mark.parametrize(
    "f, said",
    [
        (lambda x: jnp.log(jnp.exp(x - jnp.max(x)) / jnp.sum(jnp.exp(x - jnp.max(x)))), "infinities"),
        (lambda x: x - jnp.log(jnp.sum(jnp.exp(x))), "several hundred"),  # No maximum: overflows.
        (lambda x: x - jnp.max(x), "element"),
        (lambda x: x - jnp.max(x) - jnp.sum(jnp.exp(x - jnp.max(x))), "element"),
        (lambda x: x - jnp.max(x) + jnp.log(jnp.sum(jnp.exp(x - jnp.max(x)))), "element"),
        (lambda x: (x - jnp.max(x) - jnp.log(jnp.sum(jnp.exp(x - jnp.max(x))))) * math.log2(math.e), "element"),
        (lambda x: jnp.exp(x - jnp.max(x)) / jnp.sum(jnp.exp(x - jnp.max(x))), "softmax still"),
    ],
)
def test_wrong_log_softmaxes_are_turned_down(row_kernel, f, said):
    _turned_down(ex03.check_log_softmax(row_kernel(f)), said)


def test_a_log_softmax_that_is_no_kernel_is_turned_down():
    _turned_down(ex03.check_log_softmax(jax.nn.log_softmax), "kernel")
    _turned_down(ex03.check_log_softmax(lambda x: None))


def any_length(notebook, fresh_of, stored=lambda p, fresh: p, logits=lambda pieces, skip, at: pieces):
    """A softmax that shifts its last piece; `fresh_of(position, skip)` says which of its columns it counts."""

    def answer(x):
        num_cols = x.shape[1]
        vec = math.gcd(num_cols, 8)
        while 128 * vec > num_cols:
            vec //= 2
        width = 128 * vec
        starts = [min(start, num_cols - width) for start in range(0, num_cols, width)]
        skip = (len(starts) - 1) * width - starts[-1]

        def kernel(x_gmem, o_gmem):
            row = lax.axis_index("block")
            at = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=plgpu.Layout.WG_STRIDED((width,), vec))
            pieces = [notebook["load"](x_gmem.at[row, pl.ds(start, width)], vec) for start in starts]
            m = jnp.max(functools.reduce(jnp.maximum, pieces))
            p = [jnp.exp(piece - m) for piece in logits(pieces, skip, at)]
            fresh = [*p[:-1], jnp.where(fresh_of(at, skip), p[-1], 0.0)]
            total = jnp.sum(functools.reduce(jnp.add, fresh))
            for start, piece in zip(starts, stored(p, fresh), strict=True):
                o_gmem[row, pl.ds(start, width)] = (piece / total).astype(o_gmem.dtype)

        return notebook["per_row"](kernel, x)

    return answer


def test_right_softmax_of_any_length_passes(notebook):
    assert ex03.check_any_length(any_length(notebook, lambda at, skip: at >= skip))


@pytest.mark.parametrize(
    "how, said",
    [
        (dict(fresh_of=lambda at, skip: at > skip), "element"),
        (dict(fresh_of=lambda at, skip: at < skip), "l is wrong"),
        (dict(fresh_of=lambda at, skip: at >= skip, stored=lambda p, fresh: fresh), "element"),
        (
            dict(
                fresh_of=lambda at, skip: at >= 0,
                logits=lambda pieces, skip, at: [*pieces[:-1], jnp.where(at >= skip, pieces[-1], 0.0)],
            ),
            "element",
        ),
    ],
    ids=("one column too few", "the others", "stores what it counts", "logits of 0"),
)
def test_wrong_softmaxes_of_any_length_are_turned_down(notebook, how, said):
    _turned_down(ex03.check_any_length(any_length(notebook, **how)), said)


@pytest.mark.parametrize("check", [ex03.check_log_softmax, ex03.check_any_length, ex03.check_layer_norm])
def test_an_answer_computed_outside_of_the_kernel_is_turned_down(notebook, check):
    softmax = any_length(notebook, lambda at, skip: at >= skip)
    _turned_down(check(lambda x: jnp.log(softmax(x))), "outside of the kernel")


def forever(*args):
    while True:
        pass


@pytest.mark.parametrize("check", [ex03.check_merge, ex03.check_log_softmax, ex03.check_any_length])
def test_an_answer_that_never_ends_is_turned_down(monkeypatch, check):
    monkeypatch.setattr(judge, "SECONDS", 0.5)
    _turned_down(check(forever), "has not ended")


def normalized(x, *, eps=1e-6, ddof=0, one_pass=False, centred=True, root=True):
    mean = jnp.sum(x) * (1 / x.size)
    if one_pass:
        variance = jnp.sum(x * x) * (1 / x.size) - mean * mean
        variance = jnp.maximum(variance, 0.0) if one_pass == "clamped" else variance
    else:
        variance = jnp.sum((x - mean) * (x - mean)) * (1 / (x.size - ddof))
    scale = lax.rsqrt(variance + eps) if root else 1 / (variance + eps)
    return (x - mean if centred else x) * scale


def test_right_layer_norms_pass(row_kernel):
    assert ex03.check_layer_norm(row_kernel(normalized))

    def shifted(x):  # One pass is fine, if what is squared is small.
        return normalized(x - jnp.max(x), one_pass=True)

    assert ex03.check_layer_norm(row_kernel(shifted))


@pytest.mark.parametrize(
    "how, said",
    [
        (dict(one_pass=True), "around 4096"),
        (dict(one_pass="clamped"), "around 4096"),
        (dict(eps=0.0), "eps"),
        (dict(ddof=1), "around 0.5"),
        (dict(centred=False), "around 0.5"),
        (dict(root=False), "around 0.5"),
        (dict(eps=1e-2), "around 0.5"),
    ],
    ids=str,
)
def test_wrong_layer_norms_are_turned_down(row_kernel, how, said):
    _turned_down(ex03.check_layer_norm(row_kernel(lambda x: normalized(x, **how))), said)
