# SPDX-License-Identifier: Apache-2.0
"""The parts of a chunk of Kimi Delta Attention that no state changes, for all chunks at once.

With gc[t, c] the sum of channel c's gates up to token t of the chunk, and j < t,

    m[t, j] = sum over c of k[t, c] k[j, c] exp(gc[t, c] - gc[j, c])
    w[t, j] = the same with q[t, c] in place of k[t, c], and w[t, t] = q[t] . k[t]
    inverse = (1 + m diag(beta))^-1,    weights = scale w diag(beta)
    keys_read = exp(gc) k,    queries = scale exp(gc) q
    keys_written = beta exp(gc[-1] - gc) k,    decay = exp(gc[-1])

Shapes: q and k (rows, key heads, N), g (rows, heads, N) float32, beta (heads, chunks, 64) float32; the results are
those that `plan.KdaPlan.prepared` names. Rows and columns of tokens that a cut chunk does not have are zero.

Each channel has a decay of its own, so the decays do not leave the sum over the channels; and neither exp(gc) k nor
exp(-gc) k can be multiplied as they are, since the second overflows. Between a token t and an earlier one j there is
exactly one power of two b at which they part: t lies in the second half and j in the first half of the same 2 b tokens.
With x[r, c] the sum of the gates between token r and the boundary of those halves,

    gc[t] - gc[j] = x[t] + x[j]

and both are at most 0. So for each b of 32, 16, ..., 1 one product has the pairs that part at b. Its left operand is
exp(x) k; its right one has exp(x) k in the first halves, which gives m below the diagonal, and exp(x) q in the second
halves, which gives w transposed above it. No exponential of a positive number is taken, however strong the gates are,
and x is a sum of gates, never a difference of sums: a strong gate costs no bits of weak ones. The sums are products on
tensor cores too (`gates`).

Role table: one warpgroup per block, with one chunk of one value head; two blocks of an SM hide each other's latencies.

Barrier table:

    barrier   arrivals             who waits
    filled    copies of operands   the warpgroup, before anything

Bound by: the exponentials, 8 for each value of a key, and the latency of the products of six powers of two in a row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Tiles, load, product, row_tiles, spread, swizzled
from ..delta.kernel_inverse import STRIP, K, Q, _inverse, _masks
from ..tiles import Operand, normalize
from .gates import HALF, NUM_BLOCKS, indices, ones, split, sums, to_boundary
from .plan import CHUNK, INVERSE, KEYS_READ, SQUARE, WEIGHTS, KdaPlan


def _scratch(plan: KdaPlan, masks) -> dict:
    gates = row_tiles((1, 2 * plan.pieces, CHUNK, HALF), jnp.float32, plan.interpreted, by_eights=True)
    parts = plgpu.SMEM((plan.pieces, 2, *SQUARE), jnp.float16, **swizzled())
    of_inverse = plgpu.SMEM((2, *SQUARE), jnp.float16, **swizzled(STRIP))
    views = (gates,) if plan.interpreted else gates.refs
    return dict(
        q_smem=plan.rows(1, plan.pieces),
        k_smem=plan.rows(1, plan.pieces),
        gates_smem=(gates, parts, of_inverse) if plan.interpreted else plgpu.RefUnion(*views, parts, of_inverse),
        queries_smem=plan.squares(plan.pieces),  # Decayed ones; q stays where it is to save registers.
        diagonal_smem=plgpu.SMEM((CHUNK,), jnp.float32),
        masks_smem=plgpu.SMEM(masks.shape, masks.dtype, **swizzled(STRIP)),
        rows_smem=plgpu.SMEM((CHUNK,), jnp.float32),
        columns_smem=plgpu.SMEM((CHUNK,), jnp.float32),
        filled=_device.barriers(1, 4 * plan.pieces + 3),
    )


def _kernel(first_rows, num_rows, gmem, masks_gmem, beta_gmem, squares_gmem, decay_gmem, factors_gmem=None, *,
            plan: KdaPlan, q_smem, k_smem, gates_smem, queries_smem, diagonal_smem, masks_smem, rows_smem,
            columns_smem, filled):  # fmt: skip
    chunk, head = lax.axis_index("tile"), lax.axis_index("unit")
    pieces, rows, key_head = range(plan.pieces), num_rows[chunk], plan.key_head(head)
    *gates, parts_smem, inverse_smem = gates_smem
    gates = Tiles.views(gates[0] if plan.interpreted else gates, plan.interpreted)
    q_smem, k_smem = (Tiles.views(smem, plan.interpreted) for smem in (q_smem, k_smem))
    operands = (
        Operand(gmem["q"], q_smem, key_head, plan.pieces),
        Operand(gmem["k"], k_smem, key_head, plan.pieces),
        Operand(gmem["g"], gates, head, 2 * plan.pieces),
    )
    for operand in operands:
        operand.copy(first_rows[chunk], CHUNK, 0, filled)
    plgpu.copy_gmem_to_smem(masks_gmem, masks_smem, filled)
    for smem, of in ((rows_smem, beta_gmem[0]), (columns_smem, beta_gmem[1])):
        plgpu.copy_gmem_to_smem(of.at[head, chunk], smem, filled)
    plgpu.barrier_wait(filled)

    @pl.when(rows < CHUNK)
    def _():
        for operand in operands:
            operand.clear(0, rows, plan.interpreted)
        plgpu.commit_smem()

    if plan.use_qk_l2norm:

        @pl.when(rows > 0)  # In a branch the compiler computes nothing else ahead, for which registers are too few.
        def _():
            for which, smem in ((Q, q_smem), (K, k_smem)):
                factors = normalize(smem.tiled.at[0], plan.pieces)
                _device.store(factors_gmem.at[which, head, chunk], factors)

    q, k = ([load(smem.tiled.at[0, p]) for p in pieces] for smem in (q_smem, k_smem))
    dots = [(a.astype(jnp.float32) * b.astype(jnp.float32)).sum(axis=1) for a, b in zip(q, k, strict=True)]
    diagonal_smem[...] = functools.reduce(jnp.add, dots)
    for p in pieces:
        decay = jnp.exp2(split(gates, parts_smem.at[p], p).sum(axis=0))
        _device.store(decay_gmem.at[head, chunk, pl.ds(p * PIECE, PIECE)], decay)
    plgpu.commit_smem()

    def decays(matrix, p):
        """Rounded before it multiplies: in 32 bits the compiler would keep q and k converted through all of the kernel,
        and spill them."""
        return jnp.exp2(sums(matrix, parts_smem.at[p], plan.interpreted))

    def put(smem, square, value):
        """Stores a square of the results, by way of a tile of shared memory that nothing reads."""
        smem[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, squares_gmem.at[head, chunk, square])

    # The compiler does not know it: else it would keep addresses over the whole kernel, and spill them; and ptxas
    # before 13.3 overwrites registers of constants while a product still reads them.
    zero = jnp.minimum(rows, 0)

    # Rows decayed from the chunk's start.
    row, column = indices(zero, zero)
    from_start = ones(0 * row, row, column)
    for p in pieces:
        decay = decays(from_start, p)
        put(queries_smem.at[p], plan.queries + p, load(q_smem.tiled.at[0, p]) * (decay * plan.scale).astype(plan.dtype))
        put(k_smem.tiled.at[0, p], KEYS_READ + p, k[p] * decay.astype(plan.dtype))

    # m below the diagonal, and w transposed above it.
    def add_block(i, carry):
        pairs, block = carry
        stage = jnp.minimum(i, zero)
        mixed, keys = queries_smem, k_smem.tiled.at[stage]
        matrix, is_second = to_boundary(row, column, block), (row & block) != 0
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()  # All warps have multiplied what the tiles hold.
        for p in pieces:
            decay = decays(matrix, p).astype(plan.dtype)
            mixed[p] = jnp.where(spread(is_second, 0), load(q_smem.tiled.at[stage, p]), k[p]) * decay
            keys[p] = k[p] * decay
        plgpu.commit_smem()
        of_block = product([(keys.at[p], mixed.at[p].T) for p in pieces], plan.interpreted)
        is_nearer = spread(row & -2 * block, 0) == spread(column & -2 * block, 1)
        return jnp.where(is_nearer, of_block, pairs), _device.div(block, 2)

    zeros = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), plgpu.Layout.WGMMA)
    # The compiler would unroll a loop whose length it knows, and spill.
    pairs, _ = lax.fori_loop(0, jnp.where(rows > 0, NUM_BLOCKS, 1), add_block, (zeros, zero + CHUNK // 2))
    beta = spread(load(rows_smem, ROWS), 0)
    distance = spread(row, 0) - spread(column, 1)
    w = jnp.where(distance < 0, pairs, jnp.where(distance == 0, spread(load(diagonal_smem, ROWS), 0), 0.0))
    w = (w * (beta * plan.scale)).astype(plan.dtype)
    minus_lower = (pairs * spread(-load(columns_smem, COLUMNS), 1)).astype(jnp.float16)

    # The inverse, in the place of the gates, once all warps have multiplied what the tiles hold.
    plgpu.commit_smem()
    put(queries_smem.at[0], WEIGHTS, w)
    to_end = to_boundary(row, column, CHUNK + zero)
    for p in pieces:
        decay = decays(to_end, p) * spread(load(rows_smem, ROWS), 0)
        put(k_smem.tiled.at[0, p], plan.keys_written + p, k[p] * decay.astype(plan.dtype))
    inverse = _inverse(minus_lower, masks_smem, inverse_smem.at[0], inverse_smem.at[1], plan.interpreted)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    put(k_smem.tiled.at[0, 0], INVERSE, inverse.astype(plan.dtype))
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def prepare(first_rows, num_rows, q, k, g, beta, *, plan: KdaPlan, params):
    """[squares, decays, and factors if there are norms] of the chunks that begin at `first_rows` and have `num_rows`,
    as `plan.prepared` names them."""
    masks = _masks()
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=plan.prepared,
        grid=(plan.sequences.num_chunks, plan.heads),
        grid_names=("tile", "unit"),
        scratch_types=_scratch(plan, masks),
        compiler_params=params,
        # beta twice: JAX finds no layout for one reference loaded in two.
    )(first_rows, num_rows, dict(q=q, k=k, g=g), jnp.asarray(masks), (beta, beta))
