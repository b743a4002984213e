# SPDX-License-Identifier: Apache-2.0
"""Rows copied to several places each: out[places[t, j]] = x[t].

Shapes: x (T, C), 16-bit; places (T, J) int32, a permutation of the T J rows of out (T J, C).

A block takes some neighbouring rows. TMA brings them to shared memory, and takes each from there to its places: the
threads only read where those are. XLA's gather copies an element a thread, and reads a row from L2 for each copy.

Bound by: memory: x is read once, out written once. Chapter: 16b, the permutation of a layer of experts.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _host

BOX = 256  # Values along each axis that TMA copies at once.
SMEM_BYTES = 16_384  # Rows of a block; small, so that many blocks fit on an SM.
BLOCKS = 128  # Few rows are shared out to so many blocks, about one per SM.


def lane_of(cols: int) -> int:
    """Values that lie along the last axis of a row of `cols`, a multiple of 8; the rest lies along one more axis."""
    return next(size for size in (256, 128, 64, 32, 16, 8) if cols % size == 0)


def _kernel(x_gmem, places_gmem, out_gmem, x_smem, filled):
    (tokens, *_), (num, piece, _) = x_gmem.shape, x_smem.shape
    first, columns = lax.axis_index("block") * num, pl.ds(lax.axis_index("part") * piece, piece)
    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(first, num), columns], x_smem, filled)

    @pl.loop(0, jnp.minimum(num, tokens - first))
    def _(i):
        places = [places_gmem[first + i, j] for j in range(places_gmem.shape[1])]  # All are in flight together.
        pl.when(i == 0)(lambda: plgpu.barrier_wait(filled))  # The first row's places are in flight meanwhile.
        for place in places:
            plgpu.copy_smem_to_gmem(x_smem.at[i], out_gmem.at[place, columns])

    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames="params")
def copy_rows(x, places, *, params):
    """`x` with a row for each of its `places`. C is a multiple of 8."""
    (tokens, cols), copies = x.shape, places.shape[1]
    lane = lane_of(cols)
    count = cols // lane
    piece = next(size for size in range(min(BOX, count), 0, -1) if count % size == 0)
    num = max(1, min(BOX, pl.cdiv(tokens, BLOCKS), SMEM_BYTES // (piece * lane * x.dtype.itemsize)))
    out = _host.kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct((tokens * copies, count, lane), x.dtype),
        grid=(pl.cdiv(tokens, num), count // piece),
        grid_names=("block", "part"),
        scratch_types=dict(x_smem=plgpu.SMEM((num, piece, lane), x.dtype), filled=plgpu.Barrier()),
        compiler_params=params,
    )(x.reshape(tokens, count, lane), places)
    return out.reshape(tokens * copies, cols)
