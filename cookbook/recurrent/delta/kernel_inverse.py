# SPDX-License-Identifier: Apache-2.0
"""The inverse that each chunk of the gated delta rule needs, for all chunks at once: no chunk waits for another.

    lower[t, s] = beta[t] exp(cum[t] - cum[s]) k[t] . k[s]  for s < t,    inverse = (1 + lower)^-1 diag(beta)

Shapes: k (rows, key heads, N), cum and beta (heads, chunks, 64) float32, inverse (heads, chunks, 64, 64) of the dtype
of k. Rows and columns of tokens that a cut chunk does not have are zero.

Role table: one warpgroup per block, which makes the inverses of one chunk for up to four value heads of a key head, one
after the other. The products of keys with keys and the masks are the same for these heads and stay in shared memory.

Barrier table:

    barrier   arrivals                                      who waits
    filled    copies of the keys, of the masks, and of cum  the warpgroup, once
              and beta of the heads, in two layouts

Block doubling: let d be the inverse of the blocks of b tokens on the diagonal, and e the part of `lower` between two
neighbours of them. Then d - d e d is the inverse of the blocks of 2 b tokens, exactly. So five steps of two products on
the tensor cores lead from blocks of 2, whose inverse is 1 - lower, to all 64. The entries of the inverse are at most
about 1 for keys of norm 1 and beta up to 1, so the products' operands are float16, which rounds 8 times as finely as
bfloat16. Powers of `lower` (its Neumann series) are as many products, but reach binomial coefficients of 63.

Products are made for 16 columns at a time, the least depth of a WGMMA, so that blocks of 16 and 32 are views of the
operands. Smaller ones are cut out by masks of ones and zeros: one multiplication of a pair, where a selection takes
five instructions. Above its diagonal `lower` has any finite values.

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
from ..._device import COLUMNS, PIECE, ROWS, Tiles, load, product, row_tiles, spread, swizzled
from ..tiles import Operand
from .plan import CHUNK, SQUARE

HEADS = 4  # Value heads that a block goes through at most.
BLOCKS = 400  # Blocks that fill a GPU. With fewer a block has fewer heads.
WIDTH = 16  # Columns that are multiplied apart from others: the least depth of a WGMMA.
NUMBERS = range(CHUNK // WIDTH)  # Blocks of that many columns.
LOG2_E = math.log2(math.e)


def _masks() -> np.ndarray:
    """Ones at the entries, in a block of `WIDTH` on the diagonal, of single tokens, between two of them, and between
    blocks of 2, 4 and 8. Zeros above and below, so that a view of `CHUNK` rows has the block at any place."""
    row, column = np.indices((WIDTH, WIDTH))
    level = np.where(row >= column, np.frexp(row ^ column)[1], -1)
    block = level == np.arange(5)[:, None, None]
    return np.pad(block, ((0, 0), (CHUNK - WIDTH, CHUNK), (0, 0))).astype(np.float16)


def heads_of_block(key_heads: int, heads: int, chunks: int) -> int:
    """How many value heads a block goes through: a divisor of those that share a key head."""
    group = heads // key_heads
    return max(n for n in range(1, HEADS + 1) if group % n == 0 and (n == 1 or heads // n * chunks >= BLOCKS))


def block_of(i: int):
    """Columns, or rows, of number `i`."""
    return pl.ds(i * WIDTH, WIDTH)


def columns_of(x) -> list:
    return [x[:, i * WIDTH : (i + 1) * WIDTH] for i in NUMBERS]


def add_products(a, b_smem, depths: dict, interpreted: bool, acc=None):
    """`acc`, zeros for None, with the product of columns `depths[i]` of `a` and as many rows of `b_smem` added to its
    columns `i`. `a` is a list of columns, in registers."""
    pairs = [(i, a[j], b_smem.at[block_of(j), block_of(i)]) for i, js in depths.items() for j in js]
    if interpreted:
        acc = jnp.zeros(SQUARE, jnp.float32) if acc is None else acc
        for i, x, ref in pairs:
            product = jnp.dot(x, ref[...], preferred_element_type=jnp.float32)
            acc = acc.at[:, i * WIDTH : (i + 1) * WIDTH].add(product)
        return plgpu.layout_cast(acc, plgpu.Layout.WGMMA)

    def multiply(acc_ref):
        if acc is not None:
            acc_ref[...] = acc
        for i, x, ref in pairs:
            plgpu.wgmma(acc_ref.at[:, block_of(i)], x, ref)
        return plgpu.layout_cast(acc_ref[...], plgpu.Layout.WGMMA)

    return pl.run_scoped(multiply, plgpu.ACC(SQUARE, jnp.float32))


def inverse_of(minus_lower, masks_smem, d_smem, x_smem, interpreted: bool):
    """The inverse of 1 + lower, from the negative of `lower` in float16, in registers. `minus_lower` is finite above
    its diagonal too."""
    lower = columns_of(minus_lower)
    at = lambda level, i: load(masks_smem.at[level, pl.ds((len(NUMBERS) - 1 - i) * WIDTH, CHUNK)])
    d = [x * at(1, i) + at(0, i) for i, x in enumerate(lower)]
    inverse = jnp.concatenate(d, axis=1).astype(jnp.float32)
    for level, block in enumerate((2, 4, 8, 16, 32), start=2):
        d = inverse.astype(jnp.float16)
        d_smem[...] = d
        plgpu.commit_smem()
        d, left, firsts = columns_of(d), lower, {i: [i] for i in NUMBERS}
        seconds = firsts
        if block < WIDTH:
            left = [x * at(level, i) for i, x in enumerate(lower)]
        else:  # Rows of other blocks need no mask: nothing reads them, or d has zeros there.
            num = block // WIDTH
            firsts = {i: [i // num * num + j for j in range(num)] for i in NUMBERS if i // num % 2 == 0}
            seconds = {i: [j + num for j in js] for i, js in firsts.items()}
        x_smem[...] = add_products(left, d_smem, firsts, interpreted).astype(jnp.float16)
        plgpu.commit_smem()
        inverse = add_products(d, x_smem, seconds, interpreted, inverse)
    return inverse


def _kernel(first_rows, num_rows, k_gmem, of_rows, of_columns, masks_gmem, o_gmem, *, group: int, interpreted: bool,
            k_smem, keys_smem, rows_smem, columns_smem, masks_smem, d_smem, xo_smem, filled):  # fmt: skip
    """`group` value heads share a key head."""
    chunk, unit, num_heads = lax.axis_index("tile"), lax.axis_index("unit"), rows_smem.shape[1]
    first_head, rows = unit * num_heads, num_rows[chunk]
    x_smem, o_smem = xo_smem
    keys = Operand(k_gmem, Tiles.views(k_smem, interpreted), _device.div(first_head, group), k_gmem.shape[2] // PIECE)

    keys.copy(first_rows[chunk], CHUNK, 0, filled)
    plgpu.copy_gmem_to_smem(masks_gmem, masks_smem, filled)
    for smem, vectors in ((rows_smem, of_rows), (columns_smem, of_columns)):
        for i, vector in enumerate(vectors):
            plgpu.copy_gmem_to_smem(vector.at[pl.ds(first_head, num_heads), chunk], smem.at[i], filled)
    plgpu.barrier_wait(filled)

    @pl.when(rows < CHUNK)
    def _():
        keys.clear(0, rows, interpreted)
        plgpu.commit_smem()

    pieces = [keys.smem.tiled.at[0, p] for p in range(keys.pieces)]
    keys_smem[...] = product([(piece, piece.T) for piece in pieces], interpreted)

    @pl.loop(0, num_heads)
    def _(head):
        (cum_rows, beta_rows), (cum_columns, beta_columns) = (
            [load(smem.at[i, head], layout) for i in (0, 1)]
            for smem, layout in ((rows_smem, ROWS), (columns_smem, COLUMNS))
        )
        decay = jnp.exp2(jnp.minimum(spread(cum_rows * LOG2_E, 0) - spread(cum_columns * LOG2_E, 1), 0.0))
        minus_lower = load(keys_smem) * decay * spread(-beta_rows, 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        inverse = inverse_of(minus_lower.astype(jnp.float16), masks_smem, d_smem, x_smem, interpreted)
        o_smem[...] = (inverse * spread(beta_columns, 1)).astype(o_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[first_head + head, chunk])

    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("interpreted", "params"))
def inverses(first_rows, num_rows, k, cum, beta, *, interpreted: bool, params):
    """`inverse` as the module's docstring says, of the chunks that begin at `first_rows` and have `num_rows`."""
    heads, chunks, _ = cum.shape
    key_heads, pieces, masks = k.shape[1], k.shape[2] // PIECE, _masks()
    num_heads = heads_of_block(key_heads, heads, chunks)
    narrow = swizzled(WIDTH)
    either = (lambda *refs: refs) if interpreted else plgpu.RefUnion
    vectors = plgpu.SMEM((2, num_heads, CHUNK), jnp.float32)
    return _host.kernel(
        functools.partial(_kernel, group=heads // key_heads, interpreted=interpreted),
        out_type=jax.ShapeDtypeStruct((heads, chunks, *SQUARE), k.dtype),
        grid=(chunks, heads // num_heads),
        grid_names=("tile", "unit"),
        scratch_types=dict(
            k_smem=row_tiles((1, pieces, CHUNK, PIECE), k.dtype, interpreted, by_eights=True),
            keys_smem=plgpu.SMEM(SQUARE, jnp.float32, **swizzled(PIECE // 2, jnp.float32)),
            rows_smem=vectors,
            columns_smem=vectors,
            masks_smem=plgpu.SMEM(masks.shape, masks.dtype, **narrow),
            d_smem=plgpu.SMEM(SQUARE, jnp.float16, **narrow),
            xo_smem=either(plgpu.SMEM(SQUARE, jnp.float16, **narrow), plgpu.SMEM(SQUARE, k.dtype, **swizzled())),
            filled=_device.barriers(1, pieces + 5),
        ),
        compiler_params=params,
        # Twice: JAX finds no layout for one reference loaded in two.
    )(first_rows, num_rows, k, (cum, beta), (cum, beta), jnp.asarray(masks))
