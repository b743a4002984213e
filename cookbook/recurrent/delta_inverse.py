"""The inverse that each chunk of the gated delta rule needs, for all chunks at once: no chunk waits for another.

    lower[t, s] = beta[t] exp(cum[t] - cum[s]) k[t] . k[s]  for s < t,    inverse = (1 + lower)^-1 diag(beta)

Shapes: k (rows, key heads, N), cum and beta (heads, chunks, 64) float32, inverse (heads, chunks, 64, 64) of the dtype
of k. Rows and columns of tokens that a cut chunk does not have are zero.

Role table: one warpgroup a block, which makes the inverse of one chunk for one value head.

Barrier table:

    barrier   arrivals            who waits
    filled    copies of the keys  the warpgroup, before their product

Block doubling: let d be the inverse of the blocks of b tokens on the diagonal, and e the part of `lower` between two
neighbours of them. Then d - d e d is the inverse of the blocks of 2 b tokens, exactly. So five steps of two products on
the tensor cores lead from blocks of 2, whose inverse is 1 - lower, to all 64. The entries of the inverse are at most
about 1 for keys of norm 1 and beta up to 1, so the products' operands are float16, whose 11 bits are 8 times as exact
as bfloat16's. Powers of `lower` (its Neumann series) are as many products, but reach binomial coefficients of 63.

Bound by: the tensor cores and the latency of ten products in a row, several blocks of an SM side by side.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from .core import COLUMNS, PIECE, ROWS, Operand, Tiles, row_tiles
from .delta_core import CHUNK, SQUARE, TILED, apart_in_square, load, multiply, product, spread


def inverse_of(minus_lower, d_smem, x_smem, interpreted: bool):
    """The inverse of 1 + lower, a strict triangle, from its negative in float16, in registers."""
    zero = jnp.zeros((), jnp.float16)
    # Row xor column: b up to 2 b for two tokens of neighbouring blocks of b, in one block of 2 b.
    distance = apart_in_square(jnp.bitwise_xor, anew=True)
    d = jnp.where(distance == 0, jnp.ones((), jnp.float16), jnp.where(distance == 1, minus_lower, zero))
    for block in (2, 4, 8, 16, 32):
        d_smem[...] = d
        plgpu.commit_smem()
        distance = apart_in_square(jnp.bitwise_xor, anew=True)
        between = jnp.where((distance >= block) & (distance < 2 * block), minus_lower, zero)
        x_smem[...] = product([(between, d_smem)], interpreted).astype(jnp.float16)
        plgpu.commit_smem()
        d = product([(d, x_smem)], interpreted, acc=d.astype(jnp.float32)).astype(jnp.float16)
    return d.astype(jnp.float32)


def _kernel(first_rows, num_rows, k_gmem, of_rows, of_columns, o_gmem, *, interpreted, k_smem, filled, **scratch):
    chunk, head = lax.axis_index("tile"), lax.axis_index("head_index")
    key_head = _mgpu.div(head, lax.axis_size("head_index") // k_gmem.shape[1])
    keys = Operand(k_gmem, Tiles.views(k_smem, interpreted), key_head, k_gmem.shape[2] // PIECE)

    keys.copy(first_rows[chunk], CHUNK, 0, filled)
    vectors_of_rows = [load(vector.at[head, chunk], ROWS) for vector in of_rows]
    for i, vector in enumerate(of_columns):
        plgpu.copy_gmem_to_smem(vector.at[head, chunk], scratch["columns_smem"].at[i], filled)
    plgpu.barrier_wait(filled)
    _invert(keys.smem.tiled.at[0], vectors_of_rows, num_rows[chunk], interpreted, **scratch)
    plgpu.copy_smem_to_gmem(scratch["o_smem"], o_gmem.at[head, chunk])
    plgpu.wait_smem_to_gmem(0)


def _invert(k_smem, of_rows, num_rows, interpreted: bool, columns_smem, d_smem, x_smem, o_smem):
    """A chunk's inverse, from its keys, and from `cum` and `beta` in registers and in shared memory, to `o_smem`."""
    cum_rows, beta_rows = of_rows
    row, col = (plgpu.broadcasted_iota(jnp.int32, SQUARE, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1))

    keys = multiply([(k_smem.at[p], k_smem.at[p].T) for p in range(k_smem.shape[0])])
    decay = jnp.exp(jnp.minimum(spread(cum_rows, 0) - spread(load(columns_smem.at[0], COLUMNS), 1), 0.0))
    minus_lower = jnp.where((row > col) & (row < num_rows), spread(-beta_rows, 0) * decay * keys, 0.0)
    minus_lower = minus_lower.astype(jnp.float16)
    inverse = inverse_of(minus_lower, d_smem, x_smem, interpreted)
    o_smem[...] = (inverse * spread(load(columns_smem.at[1], COLUMNS), 1)).astype(o_smem.dtype)
    plgpu.commit_smem()


@functools.partial(jax.jit, static_argnames=("interpreted", "params"))
def inverses(first_rows, num_rows, k, cum, beta, *, interpreted: bool, params):
    """`inverse` as the module's docstring says, of the chunks that begin at `first_rows` and have `num_rows`."""
    heads, chunks, _ = cum.shape
    pieces = k.shape[2] // PIECE
    square = lambda dtype: plgpu.SMEM(SQUARE, dtype, **TILED)
    return _mgpu.kernel(
        functools.partial(_kernel, interpreted=interpreted),
        out_type=jax.ShapeDtypeStruct((heads, chunks, *SQUARE), k.dtype),
        grid=(chunks, heads),
        grid_names=("tile", "head_index"),
        scratch_types=dict(
            k_smem=row_tiles((1, pieces, CHUNK, PIECE), k.dtype, interpreted),
            columns_smem=plgpu.SMEM((2, CHUNK), jnp.float32),
            d_smem=square(jnp.float16),
            x_smem=square(jnp.float16),
            o_smem=square(k.dtype),
            filled=plgpu.Barrier(num_arrivals=pieces + 2),
        ),
        compiler_params=params,
    )(first_rows, num_rows, k, (cum, beta), (cum, beta))  # Twice: JAX finds no layout for one reference loaded in two.
