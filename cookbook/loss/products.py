# SPDX-License-Identifier: Apache-2.0
"""The three products of linear_cross_entropy, by the kernel of gemm, of operands as they lie.

    logits = hidden @ weight^T          (rows, H), (V, H)  ->  (rows, pitch)
    d_hidden = g @ weight               (rows, pitch), (V, H)  ->  (rows, H)
    d_weight = g^T @ hidden             (rows, pitch), (rows, H)  ->  (V, H), or added to float32 sums of this shape

The logits have `pitch` columns, at least V, so that TMA can read rows of any vocabulary; what is beyond V holds nothing
that counts before the gradient writes zeros there. With `transposed` the weight, and its gradient, is (H, V).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from ..gemm import cost
from ..gemm.kernel import kernel, slot_of_piece, target_of_piece
from ..gemm.launch import fused_product, launch
from ..gemm.plan import Plan, identity, plan_of

PITCH_MIN = 128  # The kernels along rows have a column for each thread.


def pitch_of(vocabulary: int, transposed: bool) -> int:
    """Columns of the logits. Tiles of g^T need no copy if these are a multiple of 64."""
    unit = 8 if transposed else 64
    return max(PITCH_MIN, -(-vocabulary // unit) * unit)


@functools.lru_cache(4096)
def _config(problem: cost.Problem, whole_tiles: bool = False) -> cost.Config:
    """The configuration of the least predicted time, of those that keep no float32 sums of parts of K in memory; with
    `whole_tiles` of those whose blocks have all sums of a tile, all of one size, as they lie in the result."""
    is_whole = lambda config: config.split_k == config.tail_split == 1 and not config.swapped
    fits = is_whole if whole_tiles else lambda config: not config.second_kernel
    return min(filter(fits, cost.candidates(problem)), key=lambda config: cost.predict(config, problem))


def seconds(sizes: tuple[int, int, int], transposed: tuple[bool, bool], num_sms: int) -> float:
    """The predicted time of a product of 16-bit operands, of sizes (M, N, K)."""
    problem = cost.Problem(*sizes, transposed, (2, 2, 2), num_sms)
    return cost.predict(_config(problem), problem) / 1e6


def plan(target: _host.Target, a, b, sizes, transposed, out_dtype, whole_tiles: bool = False) -> Plan:
    """The plan of a product of these operands, (M, K) and (N, K) of `sizes`, `transposed` if they lie as (K, ...)."""
    problem = cost.Problem(*sizes, transposed, (2, 2, out_dtype.itemsize), target.num_sms)
    config = _config(problem, whole_tiles)
    dtypes, num_sms, interpreted = (a.dtype, b.dtype), target.num_sms, target.interpreted
    return plan_of(*sizes, dtypes, transposed, identity, out_dtype, config, num_sms, interpreted)


def _product(target: _host.Target, a, b, sizes, transposed, out_dtype, scale=None, varies=True):
    vectors = {} if scale is None else dict(scale=scale.reshape(1))
    # float32 from registers, as a transposed tile is stored, would need an array of whole tiles, and then a copy.
    of_product = plan(target, a, b, sizes, transposed, out_dtype, whole_tiles=out_dtype.itemsize == 4)
    return fused_product(kernel, a, b, vectors, plan=of_product, params=params(), varies=varies)


def params():
    return _host.compiler_params(approx_math=True)


def _add(plan: Plan, out, place, stored, values):
    """A compute warpgroup: as `store` of `gemm/kernel.py`, but TMA adds the pieces to o. The interpreter reads it."""
    vectors, o_gmem, o_smem = out
    (row, col), (height, width), role = place, plan.store_piece, jax.lax.axis_index("role")
    for number, (i, j) in enumerate(plan.store_pieces):
        target = target_of_piece(plan, o_gmem, row + i, col + j)
        piece_smem, piece_tma = slot_of_piece(plan, o_smem, role, stored + number)
        piece = values[i : i + height, j : j + width] * vectors["scale"][0]
        piece_smem[...] = piece + _device.load(target, plgpu.Layout.WGMMA) if plan.interpreted else piece
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(piece_tma, target, reduction_op=None if plan.interpreted else "add")


@functools.partial(jax.jit, static_argnames="plan")
def _launch_sum(sums, a, b, scale, plan: Plan):
    body = functools.partial(kernel, plan=plan, store_tile=_add)
    run = launch(body, plan, (), dict(cluster=plan.tiles.clusters), plan.scratch, params(), varies=False)
    shape = sums.shape
    if plan.interpreted:  # It reads whole tiles.
        sums = _host.pad_to_tiles(sums, plan.tiles.cluster_tile)

    @pl.run_state
    def add_to(ref):
        run(plan.a.pad(a), plan.b.pad(b), dict(scale=scale.reshape(1)), ref)

    return _host.apart(add_to(_host.apart(sums)))[: shape[0], : shape[1]]


def logits(target: _host.Target, hidden, weight, pitch: int, transposed: bool):
    """The logits of these rows; to JAX they never vary over an axis of a mesh, so that the gradient may take their
    place."""
    sizes = hidden.shape[0], pitch, hidden.shape[1]
    return _product(target, hidden, weight, sizes, (False, transposed), hidden.dtype, varies=False)


def d_hidden(target: _host.Target, g, weight, transposed: bool, scale):
    """(rows, H), times `scale`."""
    h, v = weight.shape if transposed else weight.shape[::-1]
    return _product(target, g, weight, (g.shape[0], h, v), (False, not transposed), g.dtype, scale)


def d_weight(target: _host.Target, g, hidden, transposed: bool, scale, out_dtype=None):
    """(pitch, H), or `transposed` (H, pitch), times `scale`. float32 sums, which `add_d_weight` goes on with, never
    vary over an axis of a mesh to JAX, which takes no Ref that does."""
    out_dtype = jnp.dtype(out_dtype or g.dtype)
    a, b, sizes = _of_d_weight(g, hidden, transposed)
    return _product(target, a, b, sizes, (True, True), out_dtype, scale, varies=out_dtype == g.dtype)


def add_d_weight(target: _host.Target, sums, g, hidden, transposed: bool, scale):
    """float32 `sums` of `d_weight`, in their place, with those of other rows."""
    a, b, sizes = _of_d_weight(g, hidden, transposed)
    of_sum = plan(target, a, b, sizes, (True, True), jnp.dtype(jnp.float32), whole_tiles=True)
    return _launch_sum(sums, a, b, scale, of_sum)


def _of_d_weight(g, hidden, transposed: bool):
    a, b = (hidden, g) if transposed else (g, hidden)
    return a, b, (a.shape[1], b.shape[1], len(a))
