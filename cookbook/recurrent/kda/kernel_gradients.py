# SPDX-License-Identifier: Apache-2.0
"""The gradients of a chunk's operands, for all chunks at once: the parallel half of the backward pass of Kimi Delta
Attention.

From e and the state s before a chunk, which `kernel` made, and from dr and the gradient ds' of the state after it,
which `kernel_backward` made, it computes the rest of the derivation in `gradients.py`, in its names.

Shapes: q, k and g as in `kernel_prepare`; do and dr as v; e transposed, (chunks, slices, 64, 64); s and ds' (chunks,
slices, 64, N). A channel of the keys needs no other, so each piece of 64 channels is a head of its own here, a *unit*.
dq and dk are (rows, units, 64), also where value heads share q and k, and dg is (rows, units, 64) in float32. dbeta
(units, chunks, 64) in float32 are the shares of the units.

Two tokens part at a power of two b, as in `kernel_prepare`: t in the second and j in the first half of 2 b tokens. With
the decays x[r, c] = exp(gates between token r and the boundary of those halves), the pairs that part at b give

    dq[t]       = x[t] sum over j of beta[j] dw[t, j] (x k)[j]
    dk_plus[t]  = x[t] sum over j of beta[j] dm[t, j] (x k)[j]
    dk_minus[j] = x[j] sum over t of dm[t, j] (x k)[t] + dw[t, j] (x q)[t]

Two products have all of it, because the matrices' columns are those of first halves for a row t, and of second halves
for a row j. The right operand of one is x k. That of the other is x k in the first halves and x q in the second. Below
the diagonal the left operands have beta[j] dm[t, j] and beta[j] dw[t, j]; above it, at row j and column t, they have
dm[t, j] and dw[t, j]. A mask selects the pairs that part at b.

A pair adds to the gradients of all gates between j and t. The share of token t goes to the gates from the boundary to
t, that of token j to those after j and before the boundary. So dg is a matrix of zeros and ones by the shares (64, 64),
and no difference of sums is taken.

Role table: one warpgroup per block, with one unit of one chunk; two blocks of an SM hide each other's latencies.

Barrier table:

    barrier   arrivals             who waits
    filled    copies of operands   the warpgroup, before anything

Bound by: instructions: for each of six powers of two an exponential and five products of 64 x 64 x 64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Index, Ref, Tiles, load, product, row_tiles, spread
from ..sequences import Part
from ..tiles import Operand, store_rows
from .gates import HALF, LEAST_LOG2, NUM_BLOCKS, from_boundary, indices, ones, parted, split, sums, to_boundary
from .plan import CHUNK, SQUARE, KdaPlan

Q, K = DO, DR = S, DS = range(2)  # Places in shared memory.
OF_K, OF_Q, SHARES = range(3)  # Squares in the place of the states: matrices of pairs, and shares in the gates.


def _scratch(plan: KdaPlan) -> dict:
    either = (lambda *refs: refs) if plan.interpreted else plgpu.RefUnion
    views = lambda tiles: (tiles,) if plan.interpreted else tiles.refs
    gates = row_tiles((1, 2, CHUNK, HALF), jnp.float32, plan.interpreted, by_eights=True)
    dq = plgpu.SMEM(SQUARE, jnp.float32, **_device.swizzled(HALF, jnp.float32))
    return dict(
        keys_smem=plan.rows(2, 1),  # q and k, then dq and dk.
        gates_smem=either(*views(gates), plgpu.SMEM((2, *SQUARE), jnp.float16, **_device.swizzled())),
        values_smem=either(*views(plan.rows(2, plan.slices_per_head)), [plan.squares(2), dq]),
        e_smem=plan.squares(plan.slices_per_head),
        states_smem=either(plan.squares(2, plan.slices_per_head), [plan.squares(3), plgpu.SMEM((CHUNK,), jnp.float32)]),
        filled=_device.barriers(1, 4 + 5 * plan.slices_per_head),
    )


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory and indices of a block."""

    plan: KdaPlan
    part: Part  # The chunk.
    unit: Index
    rows: Index  # How many the chunk has.
    keys: Tiles
    gates: Tiles
    parts: Ref  # In the place of `gates`: their two parts.
    values: Tiles
    faded: Ref  # In the place of `values`: keys that fade, and queries or keys that do,
    dq: Ref  # and dq in float32, for which registers are too few.
    e: Ref
    fade: Ref  # In the place of `e`: decays.
    states: Ref
    squares: Ref  # In the place of `states`,
    beta: Ref  # and beta.

    @property
    def zero(self):
        """Zero, which the compiler does not know: else it would keep addresses over the whole kernel, and spill them;
        and ptxas before 13.3 overwrites registers of constants while a product still reads them."""
        return self.rows & 2**30

    def turns(self, count: int):
        """`count`, which the compiler does not know: else it would unroll the loop. It uses another bit than `zero`, so
        that a loop that has turns does not tell the compiler that `zero` is 0."""
        return count - (self.rows & 2**29)

    @property
    def head(self) -> Index:
        return _device.div(self.unit, self.plan.pieces)

    def multiply(self, pairs, onto=None):
        return product(list(pairs), self.plan.interpreted, onto)

    def multiply_slices(self, left, right):
        """The sum of the products of `left(j)` and `right(j)` for all slices j."""
        return self.multiply((left(j), right(j)) for j in range(self.plan.slices_per_head))

    def sums(self, matrix):
        return sums(matrix, self.parts, self.plan.interpreted)

    def key(self, place):
        """q or k in float32."""
        return _as_float(self.keys.tiled.at[place, 0])


def _as_float(ref):
    return load(ref).astype(jnp.float32)


def _kernel(
    first_rows, num_rows, gmem, vectors, dq_gmem, dk_gmem, dg_gmem, dbeta_gmem, *, plan: KdaPlan, keys_smem,
    gates_smem, values_smem, e_smem, states_smem, filled,
):  # fmt: skip
    chunk, unit = lax.axis_index("tile"), lax.axis_index("unit")
    rows = num_rows[chunk]

    def part(first):
        end = first + rows
        return Part(first, end, end, chunk, chunk, CHUNK, plan.sequences.is_ragged, plan.interpreted)

    views = lambda refs: Tiles.views(refs[0] if plan.interpreted else refs, plan.interpreted)
    (*gates, parts), (*values, (faded, dq)), (states, (squares, late_beta)) = gates_smem, values_smem, states_smem
    keys, gates, values = Tiles.views(keys_smem, plan.interpreted), views(gates), views(values)
    shared = Shared(
        plan, part(first_rows[chunk]), unit, rows, keys, gates, parts, values, faded, dq, e=e_smem, fade=e_smem,
        states=states, squares=squares, beta=late_beta,
    )  # fmt: skip

    @pl.when(rows > 0)
    def _():
        _load(shared, gmem, vectors.get("factors"), filled)
        split(gates, parts, 0)
        plgpu.commit_smem()
        beta, decay = vectors["row_beta"].at[shared.head, chunk], vectors["decay"].at[unit, chunk]
        grads = _by_states(shared, load(beta, ROWS), decay)
        grads = _by_pairs(shared, vectors["col_beta"].at[shared.head, chunk], *grads)
        dk, dg, dbeta = _by_blocks(shared, *grads)
        dq = load(shared.dq)
        _device.store(dbeta_gmem.at[unit, chunk], dbeta)
        # A gate that counts as `states.LEAST_DECAY` has none.
        is_least = _as_float(parts.at[0]) + _as_float(parts.at[1]) <= LEAST_LOG2
        dg = jnp.where(is_least, 0.0, dg)
        plgpu.commit_smem()  # All warps have read the parts.
        for place, grad in ((Q, dq), (K, dk)):
            keys.tiled[place, 0] = grad.astype(plan.dtype)
        for half in range(2):
            gates.tiled[0, half] = dg[:, half * HALF : (half + 1) * HALF]
        plgpu.commit_smem()
        first = first_rows[chunk]  # Again: all through the kernel it would take a register that there is not.
        for place, out in ((Q, dq_gmem), (K, dk_gmem)):
            store_rows(part(first), Tiles(None, keys.rows.at[place]), 0, out, unit, 0, first)
        for half in range(2):
            store_rows(part(first), Tiles(None, gates.rows.at[0]), half, dg_gmem, unit, half, first)
        plgpu.wait_smem_to_gmem(0)


def _load(shared: Shared, gmem: dict, factors_gmem: Ref | None, filled):
    """Loads the operands of a unit. Rows of other sequences are zeros, and those of q and k normalised by factors."""
    plan, unit, head = shared.plan, shared.unit, shared.head
    p, num_slices = _device.rem(unit, plan.pieces), plan.slices_per_head
    of_keys = plan.key_head(head) * plan.pieces + p
    operands = [
        (Operand(gmem["q"], shared.keys, of_keys, 1), Q),
        (Operand(gmem["k"], shared.keys, of_keys, 1), K),
        (Operand(gmem["g"], shared.gates, unit, 2), 0),
        (Operand(gmem["do"], shared.values, head, num_slices), DO),
        (Operand(gmem["dr"], shared.values, head, num_slices), DR),
    ]
    for operand, place in operands:
        operand.copy(shared.part.first_row, CHUNK, place, filled)
    for j in range(num_slices):
        index = shared.part.first_chunk, head * num_slices + j
        plgpu.copy_gmem_to_smem(gmem["e"].at[index], shared.e.at[j], filled)
        for place, name in ((S, "s"), (DS, "ds")):
            source = gmem[name].at[(*index, slice(None), pl.ds(p * PIECE, PIECE))]
            plgpu.copy_gmem_to_smem(source, shared.states.at[place, j], filled)
    if plan.use_qk_l2norm:
        factors = [load(factors_gmem.at[place, head, shared.part.first_chunk], ROWS) for place in (Q, K)]
    plgpu.barrier_wait(filled)

    @pl.when(shared.rows < CHUNK)
    def _():
        for operand, place in operands:
            operand.clear(place, shared.rows, plan.interpreted)
        plgpu.commit_smem()

    if plan.use_qk_l2norm:
        for place in (Q, K):
            shared.keys.tiled[place, 0] = (shared.key(place) * spread(factors[place], 0)).astype(plan.dtype)
        plgpu.commit_smem()


def _apart(shared: Shared, body, shapes):
    """`body()`, arrays of these shapes and dtypes. It runs in a loop of one turn whose length the compiler does not
    know, so the compiler computes nothing else meanwhile: registers are too few for that."""
    zeros = [_zeros(*shape) for shape in shapes]
    return lax.fori_loop(0, shared.turns(1), lambda *_: list(body()), zeros)


def _zeros(shape, dtype=jnp.float32):
    return plgpu.layout_cast(jnp.zeros(shape, dtype), plgpu.Layout.WGMMA if len(shape) == 2 else ROWS)


def _not_yet(row, numbers):
    """`row`, for which the compiler must wait until it has the `numbers`: it would make a matrix of it when registers
    are scarcest."""
    return row + (numbers * 0).astype(jnp.int32)


def _by_states(shared: Shared, beta, decay_gmem: Ref):
    """(dq, dk, dg, dbeta) by way of the states. Leaves their place to `squares`."""
    plan, (row, column) = shared.plan, indices(shared.zero, shared.zero)
    do, dr = (lambda j, place=place: shared.values.tiled.at[place, j] for place in (DO, DR))
    s, ds = (lambda j, place=place: shared.states.at[place, j] for place in (S, DS))

    def by_reads():
        from_start = jnp.exp2(shared.sums(ones(0 * row, row, column)))
        dq = shared.multiply_slices(do, s) * (from_start * plan.scale)
        minus_dk = shared.multiply_slices(dr, s) * from_start
        share = shared.key(Q) * dq - shared.key(K) * minus_dk
        return dq, minus_dk, share.astype(plan.dtype)

    def by_writes():
        to_end = jnp.exp2(shared.sums(to_boundary(row, column, CHUNK + shared.zero)))
        dk = shared.multiply_slices(lambda j: shared.e.at[j].T, ds) * to_end
        share = shared.key(K) * dk
        return dk * spread(beta, 0) - minus_dk, (share * spread(beta, 0)).astype(plan.dtype), share.sum(axis=1)

    dq, minus_dk, of_reads = _apart(shared, by_reads, [(SQUARE,), (SQUARE,), (SQUARE, plan.dtype)])
    dk, of_writes, dbeta = _apart(shared, by_writes, [(SQUARE,), (SQUARE, plan.dtype), ((CHUNK,),)])
    of_states = [_as_float(s(j)) * _as_float(ds(j)) for j in range(plan.slices_per_head)]
    of_states = functools.reduce(jnp.add, of_states) * spread(load(decay_gmem, COLUMNS), 1)
    plgpu.commit_smem()  # All warps have read the states.
    for j, share in enumerate((of_reads, of_writes, of_states)):
        shared.squares[j] = share.astype(plan.dtype)
    shared.beta[...] = beta
    plgpu.commit_smem()
    # A gate is in the sums of later tokens from the start, in those of earlier ones to the end, and in the decay.
    first, last = 0 * row, 0 * row + CHUNK - 1
    matrices = [ones(*columns, column, plan.dtype) for columns in ((row, last), (first, row - 1), (first, last))]
    dg = shared.multiply((matrix, shared.squares.at[j]) for j, matrix in enumerate(matrices))
    plgpu.commit_smem()  # All warps have multiplied the shares.
    return dq, dk, dg, dbeta


def _by_pairs(shared: Shared, col_beta_gmem: Ref, dq, dk, dg, dbeta):
    """(dk, dg, dbeta) and, in shared memory, dq, with what each token gives by itself. Stores the matrices of pairs."""
    plan, zero = shared.plan, shared.zero

    def store_matrix(square, _):
        row, column = (spread(x, dim) for dim, x in enumerate(indices(*[jnp.minimum(square, zero)] * 2)))
        x, e = shared.values.tiled.at[1 - square], shared.e
        by_row = shared.multiply_slices(lambda j: x.at[j], lambda j: e.at[j])
        by_column = shared.multiply_slices(lambda j: e.at[j].T, lambda j: x.at[j].T)
        factor = jnp.where(square == OF_Q, plan.scale, -1.0)
        col_beta = spread(load(col_beta_gmem, COLUMNS), 1)
        pairs = jnp.where(row > column, by_row * col_beta, by_column) * factor
        shared.squares[square] = pairs.astype(plan.dtype)
        return jnp.where(row == column, pairs, 0.0).sum(axis=1)

    diagonal = lax.fori_loop(OF_K, shared.turns(OF_Q + 1), store_matrix, _zeros((CHUNK,)))
    dbeta += diagonal * (shared.key(Q) * shared.key(K)).sum(axis=1)
    diagonal = spread(diagonal * load(shared.beta, ROWS), 0)
    plgpu.commit_smem()
    shared.dq[...] = dq + diagonal * shared.key(K)
    return dk + diagonal * shared.key(Q), dg, dbeta


def _by_blocks(shared: Shared, *grads):
    """(dk, dg, dbeta), and dq where it is, with the pairs added that part at each power of two."""
    zero, dtype = shared.zero, shared.plan.dtype

    def add_block(i, carry):
        dk, dg, dbeta, block = carry
        hidden = jnp.minimum(i, zero)
        row, column = indices(hidden, hidden)
        is_second = (row & block) != 0
        fade = jnp.exp2(shared.sums(to_boundary(row, column, block))).astype(dtype)
        q, k = (load(shared.keys.tiled.at[place + hidden, 0]) for place in (Q, K))
        shared.faded[0] = k * fade
        shared.faded[1] = jnp.where(spread(is_second, 0), q, k) * fade
        shared.fade[0] = fade
        plgpu.commit_smem()
        beta = load(shared.beta, ROWS)
        mask = parted(_not_yet(row, beta), column, block, dtype)
        by_keys, by_mixed = (
            shared.multiply([(load(shared.squares.at[square + hidden]) * mask, shared.faded.at[j])])
            for j, square in enumerate((OF_K, OF_Q))
        )
        share = _as_float(shared.faded.at[0 + hidden]) * by_keys + _as_float(shared.faded.at[1 + hidden]) * by_mixed
        of_reads = jnp.where(is_second, 1.0, 0.0)
        of_writes = 1.0 - of_reads
        sums_of_rows = share.sum(axis=1) * of_writes
        of_both = spread(of_reads + of_writes * beta, 0)
        shared.squares[SHARES] = (share * of_both).astype(dtype)
        plgpu.commit_smem()  # Before dq is loaded: here it is not loaded earlier.
        fade = _as_float(shared.fade.at[0 + hidden])
        by_mixed *= fade
        shared.dq[...] = load(shared.dq) + by_mixed * spread(of_reads, 0)
        dk += by_keys * fade * of_both + by_mixed * spread(of_writes * beta, 0)
        matrix = from_boundary(_not_yet(row, sums_of_rows), column, block, dtype)
        dg = shared.multiply([(matrix, shared.squares.at[SHARES])], dg)
        dbeta += sums_of_rows
        return dk, dg, dbeta, _device.div(block, 2)

    return lax.fori_loop(0, shared.turns(NUM_BLOCKS), add_block, (*grads, zero + CHUNK // 2))[:-1]


def launch(
    plan: KdaPlan, first_rows, num_rows, q, k, g, beta, do, dr, errors, states, d_states, decay, factors=None, *, params
):
    """[dq, dk, dg, dbeta]. Rows of no sequence are not written. With norms q and k are not normalised yet, but dq and
    dk are of normalised ones."""
    units, chunks = plan.heads * plan.pieces, plan.sequences.num_chunks
    of_units = lambda x: x.reshape(len(x), -1, PIECE)
    of_heads = lambda x: x.reshape(len(x), plan.heads, -1)
    gmem = dict(
        q=of_units(q), k=of_units(k), g=of_units(g), do=of_heads(do), dr=of_heads(dr), e=errors, s=states, ds=d_states
    )
    decay = decay.reshape(plan.heads, chunks, plan.pieces, PIECE).swapaxes(1, 2).reshape(units, chunks, PIECE)
    vectors = dict(decay=decay, row_beta=beta, col_beta=beta)
    vectors |= {} if factors is None else dict(factors=factors)
    out = (len(g), units, PIECE)
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            *[jax.ShapeDtypeStruct(out, plan.dtype)] * 2,
            jax.ShapeDtypeStruct(out, jnp.float32),
            jax.ShapeDtypeStruct((units, chunks, CHUNK), jnp.float32),
        ],
        grid=(chunks, units),
        grid_names=("tile", "unit"),
        scratch_types=_scratch(plan),
        compiler_params=dataclasses.replace(params, reduction_scratch_bytes=0),  # All sums are within warps.
        # beta twice: JAX finds no layout for one reference loaded in two.
    )(first_rows, num_rows, gmem, vectors)
