# SPDX-License-Identifier: Apache-2.0
"""The gradients of queries and keys of Kimi Delta Attention before they were divided by their norms.

With f = rsqrt(x . x + epsilon) and u = x f for a row x, and du the sum of its gradients over the value heads that share
it,

    dx = f (du - u (u . du))

Shapes: x (rows, N), a row for each token and key head; du (rows, value heads of a key head, N); dx as x.

A row has all channels, while `kernel_gradients` has 64 of them in a block, and all its registers are in use. So this is
a kernel of its own, which also adds the value heads of a key head.

Role table: one warpgroup per block, in which 8 or 16 threads share a row. The last block has the rows that are left.
There are no barriers.

Bound by: memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ... import _device, _host
from ..._device import WARPGROUP
from ..tiles import NORM_EPSILON

VEC = 8  # Values of 16 bits that a thread loads at once.
ROWS_OF_THREAD = 2  # Rows of q, and as many of k.


def _kernel(*refs):
    """`refs`: (x, du) of q and of k, then dx of each."""
    *inputs, dq_gmem, dk_gmem = refs
    num_rows, group, size = inputs[1].shape
    lanes = size // VEC
    block_rows, layout = ROWS_OF_THREAD * WARPGROUP // lanes, _device.lanes_layout(lanes, size, VEC)
    block, blocks = lax.axis_index("block"), lax.axis_size("block")

    def load(ref):
        return _device.load(ref, layout).astype(jnp.float32)

    def sum_of_group(du_gmem, rows):
        add = lambda head, du: du + load(du_gmem.at[rows, head])
        return lax.fori_loop(1, group, add, load(du_gmem.at[rows, 0]))

    def sum_of_row(x):
        return lax.broadcast_in_dim(x.sum(axis=1), x.shape, [0])

    def visit(turn):
        rows = pl.ds(jnp.minimum((block + turn) * block_rows, num_rows - block_rows), block_rows)
        pairs = [(load(x_gmem.at[rows]), sum_of_group(du_gmem, rows)) for x_gmem, du_gmem in (inputs[:2], inputs[2:])]
        for (x, du), out in zip(pairs, (dq_gmem, dk_gmem), strict=True):
            factor = lax.rsqrt(sum_of_row(x * x) + NORM_EPSILON)
            u = x * factor
            dx = factor * (du - u * sum_of_row(u * du))
            _device.store(out.at[rows], dx.astype(out.dtype))

    if num_rows % block_rows == 0:
        visit(0)
        return
    # The last rows overlap with the block's own, which it stores twice with the same bits.
    pl.loop(0, 1 + (block == blocks - 1).astype(jnp.int32))(visit)


@functools.partial(jax.jit, static_argnames=("params",))
def before_norms(q, k, dq, dk, *, params):
    """[dq, dk], of the shape of q and k, (tokens, key heads, N), from gradients of the normalised ones, in which each
    value head has its own."""
    shape, block_rows = q.shape, ROWS_OF_THREAD * WARPGROUP * VEC // q.shape[-1]
    flat = lambda x, *heads: x.reshape(shape[0] * shape[1], *heads, shape[2])
    operands = [flat(q), flat(dq, -1), flat(k), flat(dk, -1)]
    num_rows = len(operands[0])
    if (missing := block_rows - num_rows) > 0:
        operands = [jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in operands]
    out = jax.ShapeDtypeStruct(operands[0].shape, q.dtype)
    results = _host.kernel(
        _kernel,
        out_type=[out, out],
        grid=(len(operands[0]) // block_rows,),
        grid_names=("block",),
        # No thread reads what it or another has stored.
        compiler_params=dataclasses.replace(params, unsafe_no_auto_barriers=True),
    )(*operands)
    return [dx[:num_rows].reshape(shape) for dx in results]
