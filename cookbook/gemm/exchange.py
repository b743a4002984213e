# SPDX-License-Identifier: Apache-2.0
"""Sums on their way to another block of a cluster, and the barrier at which they arrive.

`plgpu.async_store_smem` announces its bytes at the other block's barrier, which takes a fence of all memory before each
send. Here a warpgroup announces at its own barrier, at its start, all bytes that it is going to receive. Pallas has no
such call, so these are a few lines of MLIR. JAX's interpreter runs none of them.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

INLET = (2,)  # An inlet is a barrier of 8 bytes: shared memory of this shape, int32.


def _barrier(inlet):
    return mgpu.utils.BarrierRef(mgpu.utils.memref_ptr(inlet), _constant(0, 32), None, 1)


def _constant(value: int, bits: int):
    return arith.constant(ir.IntegerType.get_signless(bits), value)


def open_inlet(inlet, nbytes: int):
    """Makes a barrier of `inlet`, which `nbytes` that arrive complete. Other blocks know it after a barrier of theirs."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, inlet):
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            pointer = _barrier(inlet).get_ptr()
            mgpu.utils.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", pointer, has_side_effects=True)
            mgpu.utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
            _barrier(inlet).arrive_expect_tx(nbytes)
        mgpu.utils.warpgroup_barrier()

    run(inlet)


def send(values, smem, inlet, block: int, transforms):
    """Starts to store `values` to `smem`, laid out by `transforms`, of a block of the cluster, and to fill its `inlet`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms), plgpu.RefType()))
    def run(_, values, smem, inlet):
        to = arith.constant(ir.IndexType.get(), block)
        swizzle = transforms[1].swizzle
        values.store_tiled_async(smem, _barrier(inlet), mgpu.utils.gpu.Dimension.x, to, swizzle, tiling_rank=2)

    run(values, smem, inlet)


def receive(inlet):
    """Waits until all bytes have arrived."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, inlet):
        _barrier(inlet).wait_parity(_constant(0, 1))

    run(inlet)
