# SPDX-License-Identifier: Apache-2.0
"""The inverse that each chunk of the gated delta rule needs, for all chunks at once: no chunk waits for another.

    lower[t, j] = exp(cum[t] - cum[j]) k[t] . k[j] beta[j]  for j < t, else 0
    inverse     = (1 + lower)^-1

The kernel inverts a unit lower triangular matrix of 64 x 64 for each chunk of each value head. The paper calls this the
UT transform, fla `solve_tril`.

Shapes: k (rows, key heads, N), cum and beta (heads, chunks, 64) float32, inverse (heads, chunks, 64, 64) of the dtype
of k. Tokens that a cut chunk does not have have rows and columns of the unit matrix.

With `use_qk_l2norm` the kernel first divides the rows of q and k by their norms. It stores them for the kernels that
follow, like k in shape and dtype, and the factors of the rows (2, key heads, chunks, 64) in float32 for their
gradients.

Role table: one warpgroup per block, which makes the inverses of one chunk for up to four value heads of a key head, one
after the other. There is no memory warpgroup: three blocks on an SM hide each other's copies. The products of keys with
keys and the masks are the same for these heads and stay in shared memory.

Barrier table:

    barrier   arrivals                                      who waits
    filled    copies of the keys, of the masks, and of cum  the warpgroup, once
              (in two layouts) and beta of the heads
    q_filled  copies of the queries, for norms              the warpgroup of the first block of a key head, once

The algorithm doubles inverted blocks. Cut 1 + lower into blocks of b tokens. Two neighbours on the diagonal, whose
inverses d1 and d2 are known, and the block e of `lower` between them make a block of 2 b tokens, whose inverse is

    (1 + lower1      0     )^-1   (    d1       0 )
    (    e       1 + lower2)    = (-d2 e d1     d2)

A step does this for all pairs of neighbours. d (64, 64) has all inverses on its diagonal, e (64, 64) all blocks between
neighbours, and zeros elsewhere. Then x = -e d, and d + d x is the next d. Blocks of 2 need no product: d = 1 - e, with
the e of b = 1. Five steps of two products lead from there to 64. They multiply strips of 16 columns, the least depth of
a WGMMA:

    b          x = -e d                                   d + d x
    2, 4, 8    strip i of e by strip i of d, each i       strip i of d by strip i of x, each i
    16         strips 0, 2 of lower by those of d (d1)    strips 1, 3 of d (d2) by x, into strips 0, 2
    32         strips 0, 1 of lower by those of d (d1)    strips 2, 3 of d (d2) by x, into strips 0, 1

The left operand of a product is in registers, (64, 16). The right one is a view of d or x in shared memory, (16, 16),
and the sum an accumulator (64, 64) in float32, which for the second product begins as d. Up to b = 8 the entries of e
lie in squares of 16 x 16 on the diagonal. Masks of ones and zeros cut them out: one multiplication for a pair, where a
selection takes five instructions. From b = 16 on no mask is needed, because other rows of x are not read, and those of
d are zero. So `lower` may have any finite values above its diagonal.

Entries of the inverse are at most about 1 for keys of norm 1 and beta up to 1, so operands are float16, which rounds 8
times as finely as bfloat16. Powers of `lower` (its Neumann series) are as many products, but reach binomial
coefficients of 63.

Bound by: instructions that convert operands, and the latency of ten products in a row, with three blocks on
an SM.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Ref, Tiles, load, product, row_tiles, spread, swizzled
from ..sequences import Part
from ..tiles import Operand, normalize, store_rows
from .plan import CHUNK, SQUARE

HEADS = 4  # Value heads that a block goes through at most.
BLOCKS = 400  # Blocks that fill a GPU. With fewer a block has fewer heads.
STRIP = 16  # Columns of a strip: the least depth of a WGMMA.
STRIPS = range(CHUNK // STRIP)
Q, K = range(2)  # Places among the factors of the norms.
LOG2_E = math.log2(math.e)


def _masks() -> np.ndarray:
    """(5, rows, 16): ones on the diagonal of a square, and at the entries of e for b = 1, 2, 4 and 8. Zeros above and
    below, so that the mask of each strip is a view of `CHUNK` rows."""
    row, column = np.indices((STRIP, STRIP))
    level = np.where(row >= column, np.frexp(row ^ column)[1], -1)
    square = level == np.arange(5)[:, None, None]
    return np.pad(square, ((0, 0), (CHUNK - STRIP, CHUNK), (0, 0))).astype(np.float16)


def heads_of_block(key_heads: int, heads: int, chunks: int) -> int:
    """How many value heads a block goes through: a divisor of those that share a key head."""
    group = heads // key_heads
    return max(n for n in range(1, HEADS + 1) if group % n == 0 and (n == 1 or heads // n * chunks >= BLOCKS))


def _of_strip(i: int):
    """Columns, or rows, of strip `i`."""
    return pl.ds(i * STRIP, STRIP)


def _strips(x) -> list:
    return [x[:, i * STRIP : (i + 1) * STRIP] for i in STRIPS]


def _depths(block: int) -> tuple[dict, dict]:
    """For each strip of a product that a step needs, the strips summed over: d1's in the first product, d2's in the
    second."""
    if block < STRIP:
        return ({i: [i] for i in STRIPS},) * 2
    num = block // STRIP
    of_d1 = {i: [i // num * num + j for j in range(num)] for i in STRIPS if i // num % 2 == 0}
    return of_d1, {i: [j + num for j in js] for i, js in of_d1.items()}


def _add_products(left: list, right_smem: Ref, depths: dict, interpreted: bool, acc=None):
    """`acc`, zeros for None, with products added to the strips that `depths` names. To strip i go, for all j in
    `depths[i]`, strip j of `left`, (64, 16) in registers, by rows j and columns i of `right_smem`, (16, 16)."""
    pairs = [(i, left[j], right_smem.at[_of_strip(j), _of_strip(i)]) for i, js in depths.items() for j in js]
    if interpreted:
        acc = jnp.zeros(SQUARE, jnp.float32) if acc is None else acc
        for i, x, ref in pairs:
            added = jnp.dot(x, ref[...], preferred_element_type=jnp.float32)
            acc = acc.at[:, i * STRIP : (i + 1) * STRIP].add(added)
        return plgpu.layout_cast(acc, plgpu.Layout.WGMMA)

    def multiply(acc_ref):
        if acc is not None:
            acc_ref[...] = acc
        for i, x, ref in pairs:
            plgpu.wgmma(acc_ref.at[:, _of_strip(i)], x, ref)
        return plgpu.layout_cast(acc_ref[...], plgpu.Layout.WGMMA)

    return pl.run_scoped(multiply, plgpu.ACC(SQUARE, jnp.float32))


def _inverse(minus_lower, masks_smem: Ref, d_smem: Ref, x_smem: Ref, interpreted: bool):
    """(1 + lower)^-1 in float32, from the negative of `lower` in float16, both (64, 64) in registers."""
    minus_lower = _strips(minus_lower)
    mask = lambda level, i: load(masks_smem.at[level, pl.ds((len(STRIPS) - 1 - i) * STRIP, CHUNK)])
    # Blocks of 2: d = 1 - e
    d = [x * mask(1, i) + mask(0, i) for i, x in enumerate(minus_lower)]
    inverse = jnp.concatenate(d, axis=1).astype(jnp.float32)
    for level, block in enumerate((2, 4, 8, 16, 32), start=2):
        d = inverse.astype(jnp.float16)
        d_smem[...] = d
        plgpu.commit_smem()
        d = _strips(d)
        of_d1, of_d2 = _depths(block)
        minus_e = [x * mask(level, i) for i, x in enumerate(minus_lower)] if block < STRIP else minus_lower
        # x = -e d
        x_smem[...] = _add_products(minus_e, d_smem, of_d1, interpreted).astype(jnp.float16)
        plgpu.commit_smem()
        # d + d x
        inverse = _add_products(d, x_smem, of_d2, interpreted, inverse)
    return inverse


def _kernel(first_rows, num_rows, k_gmem, q_gmem, vectors, masks_gmem, o_gmem, *normed_gmem, group: int,
            is_ragged: bool, interpreted: bool, k_smem, keys_smem, row_cum_smem, col_cum_smem, beta_smem, masks_smem,
            d_smem, xo_smem, filled, q_filled=None):  # fmt: skip
    """`group` value heads share a key head."""
    chunk, unit, num_heads = lax.axis_index("tile"), lax.axis_index("unit"), beta_smem.shape[0]
    first_head, rows = unit * num_heads, num_rows[chunk]
    x_smem, o_smem = xo_smem
    key_head, num_pieces = _device.div(first_head, group), k_gmem.shape[2] // PIECE
    keys = Operand(k_gmem, Tiles.views(k_smem, interpreted), key_head, num_pieces)
    if normed_gmem:
        keys_smem, *q_smem = keys_smem
        queries = Operand(q_gmem, Tiles.views(q_smem[0] if interpreted else q_smem, interpreted), key_head, num_pieces)
        is_first = _device.rem(first_head, group) == 0  # This block is the first one of its key head.
        pl.when(is_first)(lambda: queries.copy(first_rows[chunk], CHUNK, 0, q_filled))

    keys.copy(first_rows[chunk], CHUNK, 0, filled)
    plgpu.copy_gmem_to_smem(masks_gmem, masks_smem, filled)
    for vector, smem in zip(vectors, (row_cum_smem, col_cum_smem, beta_smem), strict=True):
        plgpu.copy_gmem_to_smem(vector.at[pl.ds(first_head, num_heads), chunk], smem, filled)
    plgpu.barrier_wait(filled)

    @pl.when(rows < CHUNK)
    def _():
        keys.clear(0, rows, interpreted)
        plgpu.commit_smem()

    if normed_gmem:
        _normalize(first_rows[chunk], rows, keys, queries, is_first, q_filled, normed_gmem, is_ragged, interpreted)

    # k kᵀ, of all heads
    pieces = [keys.smem.tiled.at[0, p] for p in range(keys.pieces)]
    products = product([(piece, piece.T) for piece in pieces], interpreted)
    if normed_gmem:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # Queries have left the place of the products.
    keys_smem[...] = products

    @pl.loop(0, num_heads)
    def _(head):
        cum_rows = load(row_cum_smem.at[head], ROWS)
        cum_columns, beta_columns = (load(smem.at[head], COLUMNS) for smem in (col_cum_smem, beta_smem))
        # -lower = -exp(cum[t] - cum[j]) k[t] . k[j] beta[j]
        decay = jnp.exp2(jnp.minimum(spread(cum_rows * LOG2_E, 0) - spread(cum_columns * LOG2_E, 1), 0.0))
        minus_lower = load(keys_smem) * decay * spread(-beta_columns, 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The inverse of the head before has left the place of x.
        inverse = _inverse(minus_lower.astype(jnp.float16), masks_smem, d_smem, x_smem, interpreted)
        o_smem[...] = inverse.astype(o_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[first_head + head, chunk])

    plgpu.wait_smem_to_gmem(0)


def _normalize(first, rows, keys: Operand, queries: Operand, is_first, q_filled, out, is_ragged, interpreted):
    """Normalises the keys, and in the first block of a key head the queries; that block stores both, and the factors of
    their rows."""
    normed, factors_gmem = out[:2], out[2]
    chunk, key_head = lax.axis_index("tile"), keys.head
    part = Part(first, first + rows, first + rows, chunk, chunk, CHUNK, is_ragged, interpreted)

    def store(which: int, operand: Operand, factors):
        _device.store(factors_gmem.at[which, key_head, chunk], factors)
        for p in range(operand.pieces):
            store_rows(part, Tiles(None, operand.smem.rows.at[0]), p, normed[which], key_head, p, first)

    of_keys = normalize(keys.smem.tiled.at[0], keys.pieces)

    @pl.when(is_first)
    def _():
        store(K, keys, of_keys)
        plgpu.barrier_wait(q_filled)

        @pl.when(rows < CHUNK)
        def _():
            queries.clear(0, rows, interpreted)
            plgpu.commit_smem()

        store(Q, queries, normalize(queries.smem.tiled.at[0], queries.pieces))


@functools.partial(jax.jit, static_argnames=("interpreted", "params"))
def inverses(first_rows, num_rows, k, cum, beta, *, interpreted: bool, params):
    """`inverse` of the chunks that begin at `first_rows` and have `num_rows`."""
    (inverse,) = _launch(first_rows, num_rows, k, None, cum, beta, False, interpreted, params)
    return inverse


@functools.partial(jax.jit, static_argnames=("is_ragged", "interpreted", "params"))
def norms_and_inverses(first_rows, num_rows, q, k, cum, beta, *, is_ragged: bool, interpreted: bool, params):
    """[inverse, q and k normalised, factors]: the factors (2, key heads, chunks, 64), float32, are by what the rows of
    q and k were multiplied. Rows of no sequence are not written."""
    return _launch(first_rows, num_rows, k, q, cum, beta, is_ragged, interpreted, params)


def _launch(first_rows, num_rows, k, q, cum, beta, is_ragged: bool, interpreted: bool, params):
    heads, chunks, _ = cum.shape
    key_heads, pieces, masks = k.shape[1], k.shape[2] // PIECE, _masks()
    num_heads = heads_of_block(key_heads, heads, chunks)
    narrow = swizzled(STRIP)
    either = (lambda *refs: refs) if interpreted else plgpu.RefUnion
    vectors = plgpu.SMEM((num_heads, CHUNK), jnp.float32)
    rows = row_tiles((1, pieces, CHUNK, PIECE), k.dtype, interpreted, by_eights=True)
    keys = plgpu.SMEM(SQUARE, jnp.float32, **swizzled(PIECE // 2, jnp.float32))
    out_type, of_queries = [jax.ShapeDtypeStruct((heads, chunks, *SQUARE), k.dtype)], {}
    if q is not None:
        keys = either(keys, *((rows,) if interpreted else rows.refs))  # Queries leave before the products come.
        of_queries = dict(q_filled=_device.barriers(1, pieces))
        out_type += [jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2
        out_type.append(jax.ShapeDtypeStruct((2, key_heads, chunks, CHUNK), jnp.float32))
    return _host.kernel(
        functools.partial(_kernel, group=heads // key_heads, is_ragged=is_ragged, interpreted=interpreted),
        out_type=out_type,
        grid=(chunks, heads // num_heads),
        grid_names=("tile", "unit"),
        scratch_types=dict(
            k_smem=rows,
            keys_smem=keys,
            row_cum_smem=vectors,
            col_cum_smem=vectors,
            beta_smem=vectors,
            masks_smem=plgpu.SMEM(masks.shape, masks.dtype, **narrow),
            d_smem=plgpu.SMEM(SQUARE, jnp.float16, **narrow),
            xo_smem=either(plgpu.SMEM(SQUARE, jnp.float16, **narrow), plgpu.SMEM(SQUARE, k.dtype, **swizzled())),
            filled=_device.barriers(1, pieces + 4),
            **of_queries,
        ),
        compiler_params=params,
        # cum twice: JAX finds no layout for one reference loaded in two.
    )(first_rows, num_rows, k, q, (cum, cum, beta), jnp.asarray(masks))
