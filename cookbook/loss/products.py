# SPDX-License-Identifier: Apache-2.0
"""The three products of linear_cross_entropy, by the kernel of gemm, of operands as they lie.

    logits = hidden @ weight^T          (rows, H), (V, H)  ->  (rows, pitch)
    d_hidden = g @ weight               (rows, pitch), (V, H)  ->  (rows, H)
    d_weight = g^T @ hidden             (rows, pitch), (rows, H)  ->  (V, H), or added to sums of this shape

The logits have `pitch` columns, at least V, so that TMA can read rows of any vocabulary; what is beyond V holds nothing
that counts before the gradient writes zeros there. With `transposed` the weight, and its gradient, is (H, V).

`gradient_of_part`, `add_d_weight_of_part` and `add_d_hidden_of_part` do the same for a part of the rows and of the
vocabulary's columns, and find it where it lies in hidden, in the weight and in the weight's gradient. XLA would copy a
slice.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from ..gemm import cost
from ..gemm.kernel import kernel, slot_of_piece, target_of_piece
from ..gemm.launch import fused_product, launch
from ..gemm.plan import Plan, identity, plan_of
from .kernel_gradient import store_gradient

PITCH_MIN = 128  # The kernels along rows have a column for each thread.
COLUMNS, ROWS = 128, 8  # Parts begin at multiples of these: TMA copies whole tiles of the swizzle.
BEGIN = dict(column=COLUMNS, row=ROWS)  # The vectors that say where parts begin.


def pitch_of(vocabulary: int, transposed: bool) -> int:
    """Columns of the logits. Tiles of g^T need no copy if these are a multiple of 64."""
    unit = 8 if transposed else 64
    return max(PITCH_MIN, -(-vocabulary // unit) * unit)


@functools.lru_cache(4096)
def _config(problem: cost.Problem, whole_tiles: bool = False, room: int = 0) -> cost.Config:
    """The configuration of the least predicted time, of those whose float32 sums of parts of K take `room` bytes at
    most; with `whole_tiles` of those whose blocks have all sums of a tile, all of one size, as they lie in the
    result."""
    is_whole = lambda config: config.split_k == config.tail_split == 1 and not config.swapped
    parts = lambda config: config.split_k * config.second_kernel
    fits = is_whole if whole_tiles else lambda config: 4 * parts(config) * problem.m * problem.n <= room
    return min(filter(fits, cost.candidates(problem)), key=lambda config: cost.predict(config, problem))


def seconds(sizes: tuple[int, int, int], transposed: tuple[bool, bool], num_sms: int, out_bytes: int = 2) -> float:
    """The predicted time of a product of 16-bit operands, of sizes (M, N, K), in whole tiles."""
    problem = cost.Problem(*sizes, transposed, (2, 2, out_bytes), num_sms)
    return cost.predict(_config(problem, whole_tiles=True), problem) / 1e6


def plan(target: _host.Target, a, b, sizes, transposed, out_dtype, whole_tiles: bool = False, room: int = 0) -> Plan:
    """The plan of a product of these operands, (M, K) and (N, K) of `sizes`, `transposed` if they lie as (K, ...)."""
    problem = cost.Problem(*sizes, transposed, (2, 2, out_dtype.itemsize), target.num_sms)
    config = _config(problem, whole_tiles, room)
    dtypes, num_sms, interpreted = (a.dtype, b.dtype), target.num_sms, target.interpreted
    return plan_of(*sizes, dtypes, transposed, identity, out_dtype, config, num_sms, interpreted)


def _product(target: _host.Target, a, b, sizes, transposed, out_dtype, scale=None, varies=True, room=0):
    vectors = {} if scale is None else dict(scale=scale.reshape(1))
    # float32 from registers, as a transposed tile is stored, would need an array of whole tiles, and then a copy.
    of_product = plan(target, a, b, sizes, transposed, out_dtype, whole_tiles=out_dtype.itemsize == 4, room=room)
    return fused_product(kernel, a, b, vectors, plan=of_product, params=params(), varies=varies)


def params():
    return _host.compiler_params(approx_math=True)


def _add(plan: Plan, out, place, stored, values):
    """A compute warpgroup: as `store` of `gemm/kernel.py`, but TMA adds the pieces to o, unless "adds" is 0: then o
    holds nothing yet. The interpreter reads it."""
    vectors, o_gmem, o_smem = out
    (row, col), (height, width), role = place, plan.store_piece, jax.lax.axis_index("role")
    adds = vectors["adds"][0] > 0
    for number, (i, j) in enumerate(plan.store_pieces):
        target = target_of_piece(plan, o_gmem, row + i, col + j)
        piece_smem, piece_tma = slot_of_piece(plan, o_smem, role, stored + number)
        piece = (values[i : i + height, j : j + width] * vectors["scale"][0]).astype(plan.out_dtype)
        if plan.interpreted:
            piece = piece + jnp.where(adds, _device.load(target, plgpu.Layout.WGMMA), jnp.zeros((), plan.out_dtype))
        piece_smem[...] = piece
        plgpu.commit_smem()
        send = functools.partial(plgpu.copy_smem_to_gmem, piece_tma, target)
        pl.when(adds & (not plan.interpreted))(functools.partial(send, reduction_op="add"))
        pl.when(~adds | plan.interpreted)(send)


def _of_part(a_gmem, b_gmem, vectors, o_gmem, *, plan: Plan, parts, store_tile=None, **scratch):
    """The kernel of gemm with parts of a, b and o: `parts` has an axis, a size, and which of `vectors` says where the
    part begins; or None, for all.

    A part may end beyond its array: TMA reads zeros there, and writes nothing.
    """

    def part_of(ref, part):
        if part is None:
            return ref
        axis, size, begin = part
        cut = pl.ds(pl.multiple_of(vectors[begin][0], BEGIN[begin]), size)
        return ref.at[:, cut] if axis else ref.at[cut]

    a_gmem, b_gmem, o_gmem = map(part_of, (a_gmem, b_gmem, o_gmem), parts)
    fused = {name: vector for name, vector in vectors.items() if name not in BEGIN} if store_tile is None else vectors
    kernel(a_gmem, b_gmem, fused, o_gmem, plan=plan, store_tile=store_tile, **scratch)


@functools.partial(jax.jit, static_argnames=("plan", "parts", "adds"))
def _launch_into(o, a, b, vectors, plan: Plan, parts=(None, None, None), adds: bool = True):
    """Array `o`, in its place, with a product of (parts of) `a` and `b` added to (a part of) it, or stored there."""
    body = functools.partial(_of_part, plan=plan, parts=parts, store_tile=_add if adds else None)
    run = launch(body, plan, (), dict(cluster=plan.tiles.clusters), plan.scratch, params(), varies=False)
    shape, (dim, size, _) = o.shape, parts[2] or (None, 0, None)
    if plan.interpreted:  # It reads whole tiles.
        o = _host.pad_to_tiles(jnp.pad(o, [(0, size * (dim == i)) for i in (0, 1)]), plan.tiles.cluster_tile)

    @pl.run_state
    def change(ref):
        run(plan.a.pad(a), plan.b.pad(b), vectors, ref)

    return _host.apart(change(_host.apart(o)))[: shape[0], : shape[1]]


def logits(target: _host.Target, hidden, weight, pitch: int, transposed: bool):
    """The logits of these rows; to JAX they never vary over an axis of a mesh, so that the gradient may take their
    place."""
    sizes = hidden.shape[0], pitch, hidden.shape[1]
    return _product(target, hidden, weight, sizes, (False, transposed), hidden.dtype, varies=False)


def d_hidden(target: _host.Target, g, weight, transposed: bool, scale, room: int):
    """(rows, H), times `scale`. Few rows have few tiles: parts of K, in `room` bytes, fill the GPU."""
    h, v = weight.shape if transposed else weight.shape[::-1]
    return _product(target, g, weight, (g.shape[0], h, v), (False, not transposed), g.dtype, scale, room=room)


def d_weight(target: _host.Target, g, hidden, vocabulary: int, transposed: bool, scale, out_dtype):
    """(V, H), or (pitch, H) in float32, or `transposed` (H, pitch), times `scale`. `add_d_weight` may go on with it: it
    never varies over an axis of a mesh to JAX, which takes no Ref that does."""
    out_dtype = jnp.dtype(out_dtype)
    a, b, sizes = _of_d_weight(g, hidden, transposed)
    if out_dtype == g.dtype and vocabulary < g.shape[1] and not transposed:  # XLA would copy the rows that count.
        empty = lax.empty((vocabulary, hidden.shape[1]), out_dtype)
        of_rows = plan(target, a, b, sizes, (True, True), out_dtype, whole_tiles=True)
        return _launch_into(empty, a, b, dict(scale=scale.reshape(1)), of_rows, adds=False)
    return _product(target, a, b, sizes, (True, True), out_dtype, scale, varies=False)


def add_d_weight(target: _host.Target, sums, g, hidden, transposed: bool, scale):
    """`sums`, what `d_weight` returned, in their place, with those of other rows."""
    a, b, sizes = _of_d_weight(g, hidden, transposed)
    of_sum = plan(target, a, b, sizes, (True, True), sums.dtype, whole_tiles=True)
    return _launch_into(sums, a, b, dict(scale=scale.reshape(1), adds=_flag(True)), of_sum)


def _of_d_weight(g, hidden, transposed: bool):
    a, b = (hidden, g) if transposed else (g, hidden)
    return a, b, (a.shape[1], b.shape[1], len(a))


def _flag(value):
    return jnp.full(1, value, jnp.int32)


def _begin(**begin):
    return {name: jnp.reshape(x, 1) for name, x in begin.items()}


def _nominal(size: int, of: int, unit: int) -> int:
    """A number of columns that takes as many tiles as `size`, and is a multiple of `unit` only if `of` is. The array
    has `of` columns, and a plan tells by this number whether TMA has to cut tiles at its edge."""
    return size - unit + of % unit if of % unit else size


def gradient_of_part(target: _host.Target, hidden, row, weight, column, sizes, transposed: bool, vectors: dict, **how):
    """The gradient of the logits of a part of the rows and columns, of these `sizes`, from `row` and `column` on.
    `vectors` and `how` are what `kernel_gradient.store_gradient` takes."""
    rows, cols = sizes
    n = _nominal(cols, weight.shape[1], 64) if transposed else cols
    product = rows, n, hidden.shape[1]
    of_part = plan(target, hidden, weight, product, (False, transposed), hidden.dtype, whole_tiles=True)
    vectors = {name: _host.pad_to_tiles(x, of_part.tiles.cluster_tile[:1]) for name, x in vectors.items()}
    vectors |= _begin(row=row, column=column)
    return _launch_gradient(hidden, weight, vectors, of_part, sizes, transposed, tuple(sorted(how.items())))


@functools.partial(jax.jit, static_argnames=("plan", "sizes", "transposed", "how"))
def _launch_gradient(hidden, weight, vectors, plan: Plan, sizes, transposed: bool, how):
    parts = (0, sizes[0], "row"), (int(transposed), sizes[1], "column"), None
    store_tile = functools.partial(store_gradient, **dict(how))
    body = functools.partial(_of_part, plan=plan, parts=parts, store_tile=store_tile)
    g = jax.ShapeDtypeStruct(sizes, plan.out_dtype)
    # The same tanh.approx as in the loss alone, whose lse belongs to these logits.
    run = launch(body, plan, [g], dict(cluster=plan.tiles.clusters), plan.scratch, params())
    return run(plan.a.pad(hidden), plan.b.pad(weight), vectors)[0]


def add_d_weight_of_part(target: _host.Target, d_weight, g, hidden, row, column, transposed: bool, scale, adds):
    """`d_weight`, in its place, with the product of `g` and the hidden rows from `row` on stored from `column` on; or
    added, each sum being rounded, if `adds`, which may be traced."""
    (rows, cols), axis, h = g.shape, int(transposed), hidden.shape[1]
    a, b, sizes = (hidden, g, (h, cols, rows)) if transposed else (g, hidden, (cols, h, rows))
    of_part = plan(target, a, b, sizes, (True, True), d_weight.dtype, whole_tiles=True)
    of_hidden = [None, (0, rows, "row")]
    parts = *of_hidden[:: -1 if transposed else 1], (axis, cols, "column")
    vectors = dict(scale=scale.reshape(1), adds=_flag(adds)) | _begin(row=row, column=column)
    return _launch_into(d_weight, a, b, vectors, of_part, parts)


def add_d_hidden_of_part(target: _host.Target, sums, g, weight, column, transposed: bool, scale):
    """float32 `sums` of `d_hidden`, in their place, with those of these columns of the vocabulary. The first ones are
    stored."""
    k = g.shape[1] if transposed else _nominal(g.shape[1], len(weight), 8)
    sizes, float32 = (*sums.shape, k), jnp.dtype(jnp.float32)
    of_part = plan(target, g, weight, sizes, (False, not transposed), float32, whole_tiles=True)
    parts = None, (int(transposed), g.shape[1], "column"), None
    vectors = dict(scale=scale.reshape(1), adds=_flag(column > 0)) | _begin(column=column)
    return _launch_into(sums, g, weight, vectors, of_part, parts)
