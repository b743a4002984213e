# SPDX-License-Identifier: Apache-2.0
"""The kernels along rows of logits z: what the loss of a row needs, and the gradient, which takes the place of the row.

    m[r] = max_c z[r, c],   l[r] = sum_c exp(z[r, c] - m[r]),   the logit of the row's label,   sum_c z[r, c]
    g[r, c] = (a[r] exp(z[r, c] - lse[r]) - b[r] q[r, c]) dz/dx[r, c],    z = cap tanh(x / cap) with a soft cap, else x

where q is 1 - label_smoothing at the label, and label_smoothing / V everywhere besides.

Shapes: logits x (rows, pitch), of which `cols` columns count; label (rows,) int32, where it lies among these columns,
`ELSEWHERE` or `IGNORED`; m, l, lse, a, b and the rest (rows,) float32. g has the shape and dtype of x, with zeros
beyond `cols` and in ignored rows, which are not read. bfloat16, float16 or float32; the arithmetic is float32.

Role table: one warpgroup per block has a row, of any length, and several blocks on an SM hide each other's latency. It
loads the row in pieces, `vec` neighbouring values per thread, `GROUP` of them in flight. Each thread keeps the maximum
and the sum of the columns that it sees; the threads' are put together once, at the end (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018).

The last piece is shifted back to end with the row, so no length needs padding. The columns that it shares with the
piece before are computed twice. Where rows are not a multiple of 16 bytes, each begins elsewhere within a vector. There
the pieces begin with the row's first whole vector, and two loads of one value per thread take the row's ends, at most
15 columns each: `plan.Ends`. The gradient is written over what the other computation reads, so the last piece is loaded
before anything is stored, and stored after everything has been loaded. A warp may be pieces ahead of another:

    barrier   arrivals                                      who waits
    loaded    1. threads that have loaded the last piece    the warpgroup, before it stores the first piece
              2. threads that have loaded all others        the warpgroup, before it stores the last piece
              3. threads that have stored the last piece    the warpgroup, before it stores a row's ends, if it has any

Bound by: memory (one read; for the gradient one read, one write).
Not supported: rows of fewer than 128 columns (pad them), second derivatives.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import WARPGROUP
from .plan import Ends, Plan

IGNORED, ELSEWHERE = -2, -1  # Labels of rows that have no loss, and of rows whose label is another part's.
LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2_E = math.log2(math.e)  # The GPU has an instruction for 2**x, none for e**x.


def capped(x, soft_cap: float | None):
    return x if soft_cap is None else soft_cap * jnp.tanh(x * (1 / soft_cap))


def exp(x):
    return jnp.exp2(x * LOG2_E)


def _add_pieces(state, pieces, with_sum: bool):
    """The threads' maxima, sums of exponentials, and sums, with those of `pieces`."""
    m_i, l_i, total = state
    top = functools.reduce(jnp.maximum, pieces, m_i)
    l_i = functools.reduce(jnp.add, [exp(z - top) for z in pieces], l_i * exp(m_i - top))
    return top, l_i, functools.reduce(jnp.add, pieces, total) if with_sum else total


def _statistics(x_gmem, label_gmem, m_gmem, l_gmem, at_label_gmem, *sums_gmem, plan: Plan):
    row = lax.axis_index("block")
    label = label_gmem[row]

    @pl.when(label == IGNORED)
    def _():
        for out, value in zip((m_gmem, l_gmem, at_label_gmem, *sums_gmem), (0.0, 1.0, 0.0, 0.0), strict=False):
            out[row] = jnp.float32(value)

    @pl.when(label != IGNORED)
    def _():
        load = lambda start: capped(plan.load(x_gmem, row, start), plan.soft_cap)
        ends = Ends(plan, row) if plan.has_ends else None
        of_ends = [capped(x, plan.soft_cap) for x in ends.load(x_gmem)] if ends else []
        step = lambda starts, state: _add_pieces(state, [load(start) for start in starts], bool(sums_gmem))
        state = plan.for_each_group(step, (plan.full(LOWEST), plan.full(0.0), plan.full(0.0)))
        column, last = plan.columns(), load(plan.last)
        is_new = (column >= plan.shared) & (column < min(plan.cols, plan.in_pieces) - plan.last)
        m_i, l_i, total = _add_pieces(state, [jnp.where(is_new, last, -jnp.inf)], False)
        top = jnp.max(m_i)
        if ends:
            first_end, last_end = ends.alone(of_ends, -jnp.inf)
            top = jnp.maximum(top, jnp.max(jnp.maximum(first_end, last_end)))
        m_gmem[row] = top
        total_l = jnp.sum(l_i * exp(m_i - top))
        l_gmem[row] = total_l + jnp.sum(exp(first_end - top) + exp(last_end - top)) if ends else total_l
        for sum_gmem in sums_gmem:
            total = jnp.sum(total + jnp.where(is_new, last, 0.0))
            sum_gmem[row] = total + jnp.sum(sum(ends.alone(of_ends, 0.0))) if ends else total
        at_label = capped(plan.value(x_gmem, row, jnp.maximum(label, 0)).astype(jnp.float32), plan.soft_cap)
        at_label_gmem[row] = jnp.where(label >= 0, at_label, 0.0)


def _gradient(label_gmem, lse_gmem, a_gmem, b_gmem, x_gmem, g_gmem=None, *, plan: Plan, on: float, off: float, loaded):
    """`g_gmem`: where the gradient goes, if it does not take the place of x."""
    g_gmem, row = x_gmem if g_gmem is None else g_gmem, lax.axis_index("block")
    label = label_gmem[row]
    ends = Ends(plan, row) if plan.has_ends else None
    store = lambda start, g: _device.store(plan.piece(g_gmem, row, start), g.astype(g_gmem.dtype))

    def store_ends(values):
        for ref, g in zip(ends.refs(g_gmem), values, strict=True):
            _device.store(ref, g.astype(g_gmem.dtype))

    @pl.when(label == IGNORED)
    def _():
        def zeros(starts, carry):
            for start in starts:
                store(start, plan.full(0.0))
            return carry

        plan.for_each_group(zeros, 0)
        store(plan.last, plan.full(0.0))
        if ends:
            store_ends([plgpu.layout_cast(jnp.zeros(WARPGROUP, jnp.float32), ends.layout)] * 2)

    @pl.when(label != IGNORED)
    def _():
        lse, a, b, column = lse_gmem[row], a_gmem[row], b_gmem[row], plan.columns()

        def gradient(x, column, start):
            z = capped(x, plan.soft_cap)
            g = a * exp(z - lse) - b * jnp.where(column == label - start, on + off, off)
            if plan.soft_cap is None:
                return g
            ratio = z * (1 / plan.soft_cap)
            return g * (1.0 - ratio * ratio)

        last = plan.load(x_gmem, row, plan.last)
        of_ends = ends.load(x_gmem) if ends else []

        def wait_for_all_threads():
            if plan.shared or ends:
                plgpu.barrier_arrive(loaded)
                plgpu.barrier_wait(loaded)

        def step(starts, carry):
            for start, x in [(start, plan.load(x_gmem, row, start)) for start in starts]:
                store(start, gradient(x, column, plan.column(row, start)))
            return carry

        wait_for_all_threads()  # They have loaded the last piece, and the ends.
        plan.for_each_group(step, 0)
        wait_for_all_threads()  # They have loaded, and stored, all others.
        last = gradient(last, column, plan.column(row, plan.last))
        store(plan.last, jnp.where(column < min(plan.cols, plan.in_pieces) - plan.last, last, 0.0))
        if ends:
            wait_for_all_threads()  # They have stored the last piece. The ends overlap pieces, with the same values.
            store_ends([gradient(x, column, 0) for x, column in zip(of_ends, ends.columns(), strict=True)])


def plan_of(logits, cols: int, soft_cap: float | None) -> Plan:
    return Plan(logits.shape[0], cols, logits.shape[1], logits.dtype.itemsize, soft_cap)


def _params(logits, soft_cap: float | None):
    # ex2.approx is good to 2**-22: far below the rounding of 16-bit logits. tanh.approx is not: it is good to 2**-11.
    approx_math = logits.dtype.itemsize == 2 and soft_cap is None
    # JAX puts a barrier before each store, in case another warp has yet to read what it overwrites. These have one.
    return _host.compiler_params(approx_math=approx_math, unsafe_no_auto_barriers=True)


@functools.partial(jax.jit, static_argnames=("cols", "soft_cap", "with_sum"))
def statistics(logits, label, cols: int, soft_cap: float | None, with_sum: bool):
    """m, l, the logit of the label (0 where it is `ELSEWHERE`), and the sum of the logits, or None."""
    plan = plan_of(logits, cols, soft_cap)
    out = jax.ShapeDtypeStruct((plan.rows,), jnp.float32)
    results = _host.kernel(
        functools.partial(_statistics, plan=plan),
        out_type=[out] * (4 if with_sum else 3),
        grid=(plan.rows,),
        grid_names=("block",),
        compiler_params=_params(logits, soft_cap),
    )(plan.flat(logits), label)
    return (*results, None)[:4]


@functools.partial(jax.jit, static_argnames=("plan", "on", "off", "in_place"))
def _launch_gradient(logits, label, lse, a, b, plan: Plan, on: float, off: float, in_place: bool):
    run = _host.kernel(
        functools.partial(_gradient, plan=plan, on=on, off=off),
        out_type=() if in_place else [jax.eval_shape(plan.flat, logits)],
        grid=(plan.rows,),
        grid_names=("block",),
        scratch_types=dict(loaded=_device.barriers(1)),
        compiler_params=_params(logits, plan.soft_cap),
    )
    if not in_place:
        return run(label, lse, a, b, plan.flat(logits))[0].reshape(logits.shape)

    @pl.run_state
    def write_over(ref):
        run(label, lse, a, b, ref)

    return _host.apart(write_over(_host.apart(plan.flat(logits)))).reshape(logits.shape)


def gradient(logits, label, lse, a, b, cols: int, soft_cap: float | None, label_smoothing: float, vocabulary: int):
    """g, in the place of `logits` if XLA needs these no more.

    JAX's kernels take no Ref that varies over an axis of a mesh, inside a `jax.shard_map` that checks that: there
    `logits` are to come from `products.logits`, or g takes an array of its own.
    """
    how = dict(on=1 - label_smoothing, off=label_smoothing / vocabulary, in_place=not _host.varying(logits))

    @jax.custom_batching.custom_vmap
    def run(logits, *vectors):
        return _launch_gradient(logits, *vectors, plan=plan_of(logits, cols, soft_cap), **how)

    @run.def_vmap
    def _(size, is_mapped, *arrays):  # JAX cannot map what has Refs. A batch of rows is more rows.
        spread = lambda x, mapped: x if mapped else jnp.broadcast_to(x, (size, *x.shape))
        join = lambda x, mapped: (x := spread(x, mapped)).reshape(-1, *x.shape[2:])
        g = run(*map(join, arrays, is_mapped))
        return g.reshape(size, -1, g.shape[1]), True

    return run(logits, label, lse, a, b)
