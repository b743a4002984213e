# SPDX-License-Identifier: Apache-2.0
"""Sums that a block sends to another of its cluster, and the barrier at which they arrive.

`plgpu.async_store_smem` announces its bytes at the other block's barrier, with a fence of all memory before each send.
Here a warpgroup announces at its own barrier, when it starts, all bytes that it will receive, and a send has no fence.
Pallas has no call for this, so these are a few lines of MLIR. JAX's interpreter runs none of them.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

WORDS = 2  # A barrier takes 8 bytes of shared memory: two words of int32.


def expect(barrier, nbytes: int):
    """Makes a barrier in the words `barrier`, for `nbytes` that arrive once. A warpgroup's own barrier.

    Other blocks may send when they have met this one at a barrier of the cluster.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, barrier):
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            pointer = _barrier(barrier).get_ptr()
            mgpu.utils.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", pointer, has_side_effects=True)
            mgpu.utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
            _barrier(barrier).arrive_expect_tx(nbytes)
        mgpu.utils.warpgroup_barrier()

    run(barrier)


def send(values, smem, barrier, block: int, transforms):
    """Starts to store `values` to `smem` of another block of the cluster, at whose `barrier` their bytes arrive.

    Args:
      values: float32, in the layout of WGMMA.
      smem: as this block names it; `transforms` are its own.
      block: the other block, by its place in the cluster.
    """
    _, swizzle = transforms

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms), plgpu.RefType()))
    def run(_, values, smem, barrier):
        to, along = arith.constant(ir.IndexType.get(), block), mgpu.utils.gpu.Dimension.x
        values.store_tiled_async(smem, _barrier(barrier), along, to, swizzle.swizzle, tiling_rank=2)

    run(values, smem, barrier)


def wait(barrier):
    """Waits until all bytes that `barrier` expects have arrived."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, barrier):
        _barrier(barrier).wait_parity(_constant(0, bits=1))

    run(barrier)


def _barrier(words):
    return mgpu.utils.BarrierRef(mgpu.utils.memref_ptr(words), _constant(0, bits=32), None, 1)


def _constant(value: int, bits: int):
    return arith.constant(ir.IntegerType.get_signless(bits), value)
