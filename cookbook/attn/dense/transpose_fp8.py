# SPDX-License-Identifier: Apache-2.0
"""Values of 8 bits, transposed for `kernel_fp8.py`: (batch, positions, heads, head_dim) to (batch, heads, head_dim,
positions), with positions padded by zeros to a multiple of 128 and, within 16, in the order in which
`as_operand` leaves weights.

One warpgroup per block takes 128 positions of a head, and 128 of its columns. TMA copies them to shared memory; a
thread reads two neighbouring columns at a time; pairs of rows and columns are transposed as 16 bits between two
threads, since there is no such exchange for 8; `as_operand` renames registers as it does for weights, and so the order
is the same.

Bound by: memory, values read and written once; beside attention of 16,384 positions that is about a hundredth.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..core import E4M3

TILE = 128  # Positions of a block, and its columns at most.


def as_operand(p, interpreted: bool):
    """Weights as the first operand of an 8-bit product, in e4m3, every 16 columns in an order of their own: column
    (half, pair, which), numbers of 2, 4 and 2, becomes (pair, half, which). No number leaves its thread."""
    if interpreted:
        return p.reshape(p.shape[0], -1, 2, 4, 2).swapaxes(2, 3).reshape(p.shape).astype(E4M3)
    layout = plgpu.Layout.WGMMA_8BIT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,), return_type=plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=layout)
    )
    def rename(_, p):
        wide = layout.to_mgpu()
        # (64 rows and 16 columns, which 8 of the columns, which 8 of the rows): two neighbouring columns each.
        pairs = p.registers.reshape(-1, 2, 2)
        quads = np.empty((len(pairs), 2), dtype=object)
        for i, row in np.ndindex(quads.shape):
            quads[i, row] = mgpu.utils.vector_concat([pairs[i, 0, row], pairs[i, 1, row]])
        return mgpu.FragmentedArray(
            _registers=quads.reshape(wide.registers_shape(p.shape)), _layout=wide, _is_signed=None
        )

    return rename(p).astype(E4M3)


def _kernel(v_gmem, out_gmem, v_smem, out_smem, filled, *, interpreted: bool):
    batch, head = lax.axis_index("batch_index"), lax.axis_index("head_index")
    rows = pl.ds(lax.axis_index("block") * TILE, TILE)
    columns = pl.ds(lax.axis_index("part") * out_smem.shape[0], out_smem.shape[0])
    v_tiles = _device.Tiles.views(v_smem, interpreted)
    plgpu.copy_gmem_to_smem(v_gmem.at[batch, rows, head, columns], v_tiles.rows, filled)
    plgpu.barrier_wait(filled)
    values = plgpu.load(v_tiles.tiled.T, layout=plgpu.Layout.WGMMA_TRANSPOSED).astype(jnp.float16)
    out_smem[...] = as_operand(plgpu.layout_cast(values, plgpu.Layout.WGMMA), interpreted)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[batch, head, columns, rows])
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("interpreted", "params"))
def transposed(value, *, interpreted: bool, params):
    """`value`, transposed as the module says."""
    batch, positions, heads, head_dim = value.shape
    columns, blocks = min(TILE, head_dim), pl.cdiv(positions, TILE)
    return _host.kernel(
        functools.partial(_kernel, interpreted=interpreted),
        out_type=jax.ShapeDtypeStruct((batch, heads, head_dim, blocks * TILE), E4M3),
        grid=(batch, heads, blocks, head_dim // columns),
        grid_names=("batch_index", "head_index", "block", "part"),
        scratch_types=dict(
            v_smem=_device.row_tiles((TILE, columns), E4M3, interpreted),
            out_smem=plgpu.SMEM((columns, TILE), E4M3, **_device.swizzled(TILE, E4M3)),
            filled=plgpu.Barrier(),
        ),
        compiler_params=params,
    )(value)
