# SPDX-License-Identifier: Apache-2.0
"""The gradients of a chunk's operands, for all chunks at once: the parallel half of the gated delta rule's backward.

From e and the state s before a chunk, which `kernel` made, and from dr and the gradient ds' of the state after it,
which `kernel_backward` made, it computes the rest of the derivation in `gradients.py`, in its names.

Shapes: as in `kernel` and `kernel_backward`; e is transposed, (chunks, slices, 64, 64). dq and dk as q and k: value
heads that share a key head are added in registers. Two arrays (heads, chunks, warpgroups, 2 or 4, 64) in float32
are the shares that the warpgroup of pairs and those of columns have in the `SUMS`. With `use_qk_l2norm` q and k are the
normalised ones, and dq and dk the gradients of those before.

Role table: a block goes through tiles, each a chunk of a key head, and in a tile through its value heads and their
slices; its warpgroups are

    pairs      makes dqk and dkk, and the sums of their rows and columns
    columns    one for each piece of 64 columns of keys: adds up a piece of dq and dk over the tile's value heads
    memory     copies rows of tiles, and all of slices, ahead, past the ends of tiles

Barrier table, of three rings: `rows` with q and k of tiles, `slices`, and `pairs` with dqk and dkk of value heads:

    barrier               arrivals                     who waits
    rows.filled[stage]    copies of q and k            pairs and columns
    rows.freed[stage]     pairs, and columns, whose    memory, before it refills the stage
                          dq and dk have left it
    slices.filled[stage]  copies of a slice            pairs and columns
    slices.freed[stage]   pairs and columns            memory, before it refills the stage
    landed                copies of q and k, or of a   memory, before it zeroes the rows of other sequences, and
    (one of each ring)    slice, of a chunk that is    arrives at `filled` in place of the copies
                          cut
    pairs.filled[stage]   pairs                        columns, which after a tile's last head put dq and dk in the
                                                       places of q and k: nobody reads these any more
    pairs.freed[stage]    columns                      pairs, before it stores the next matrices
    exchanged             columns, each having stored  columns, before they add what the others stored: a row of a norm
                          sums of rows of its piece    has all pieces

Bound by: memory; and the products of a head, each of which waits for the one before.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Barrier, Index, Ref, Ring, Tiles, load, product, spread
from ..sequences import Part
from ..tiles import Operand, fill_stage, store_rows
from .kernel_inverse import K, Q
from .plan import CHUNK, SQUARE, BackwardPlan

# Sums along rows that the kernel returns, a number per token or value: dbeta and dcum; and two terms of the gradient of
# cum[-1], k . (exp(cum[-1] - cum) beta e ds') per token and s . ds' per value. To return another sum: name it here,
# store it by `_store_sums`, and use it in `gradients.py`.
# The warpgroup of pairs has a share of the first two.
SUMS = DBETA, DCUM, LAST_BY_TOKEN, LAST_BY_VALUE = range(4)
# Registers per thread of pairs, columns and memory, by the pieces of a key and the slices of a head.
REGISTERS = {(1, 1): (232, 232, 40), (1, 2): (232, 232, 40), (2, 1): (152, 168, 24), (2, 2): (136, 176, 24)}
NUM_STAGES = 2  # Tiles, slices, and pairs of matrices in shared memory.
# Slots for cum and beta of slices: `pairs`, which lacks registers for them, reads them again after it released a slice.
VECTOR_SLOTS = 2 * NUM_STAGES


def _copies(plan: BackwardPlan) -> tuple[int, int]:
    """Copies of q and k and their factors, and of a slice: s and ds'; e, do, dr, and cum and beta in two layouts."""
    return 2 * plan.pieces + 2 * plan.use_qk_l2norm, 2 * plan.pieces + 7


def _scratch(plan: BackwardPlan) -> dict:
    vector, (of_rows, of_slice) = plgpu.SMEM((VECTOR_SLOTS, CHUNK), jnp.float32), _copies(plan)
    of_norms = dict(factors_smem=plgpu.SMEM((NUM_STAGES, 2, CHUNK), jnp.float32)) if plan.use_qk_l2norm else {}
    if plan.use_qk_l2norm and plan.pieces > 1:
        of_norms |= dict(
            dots_smem=plgpu.SMEM((2, plan.pieces, 2, CHUNK), jnp.float32), exchanged=_device.barriers(1, plan.pieces)
        )
    return of_norms | dict(
        q_smem=plan.rows(NUM_STAGES, plan.pieces),
        k_smem=plan.rows(NUM_STAGES, plan.pieces),
        do_smem=plan.rows(NUM_STAGES, 1),
        dr_smem=plan.rows(NUM_STAGES, 1),
        e_smem=plan.squares(NUM_STAGES),
        s_smem=plan.squares(NUM_STAGES, plan.pieces),
        ds_smem=plan.squares(NUM_STAGES, plan.pieces),
        row_cum_smem=vector,
        col_cum_smem=vector,
        row_beta_smem=vector,
        col_beta_smem=vector,
        dqk_smem=plan.squares(NUM_STAGES),
        dkk_smem=plan.squares(NUM_STAGES),
        by_pair_smem=plan.squares(),
        rows_filled=_device.barriers(NUM_STAGES, of_rows),
        rows_freed=_device.barriers(NUM_STAGES, 1 + plan.pieces),
        rows_landed=_device.barriers(1, of_rows),
        slices_filled=_device.barriers(NUM_STAGES, of_slice),
        slices_freed=_device.barriers(NUM_STAGES, 1 + plan.pieces),
        slices_landed=_device.barriers(1, of_slice),
        pairs_filled=_device.barriers(NUM_STAGES),
        pairs_freed=_device.barriers(NUM_STAGES, plan.pieces),
    )


@dataclasses.dataclass(frozen=True)
class Shared:
    """Scratch and indices that the roles of a block share."""

    plan: BackwardPlan
    places: tuple[Ref, Ref]  # The first row, and the number of rows, of each chunk.
    block: Index
    num_blocks: int
    rows: Ring  # Its stages hold q and k of a tile.
    slices: Ring  # Its stages hold a slice's do, dr, e, s, ds', and its head's cum and beta.
    pairs: Ring  # Its stages hold dqk and dkk of a value head.
    q: Tiles
    k: Tiles
    do: Tiles
    dr: Tiles
    e: Ref  # Transposed: a row per value.
    s: Ref
    ds: Ref  # ds', the gradient of the state after the chunk.
    row_cum: Ref  # One number per row of a product, and one per column.
    col_cum: Ref
    row_beta: Ref
    col_beta: Ref
    dqk: Ref
    dkk: Ref
    by_pair: Ref  # Scratch of the `pairs` warpgroup.
    factors: Ref = None  # By what rows of q and k were multiplied.
    dots: Ref = None  # For tiles in turn, the sums along a row of a piece of q and k by its gradient.
    exchanged: Barrier = None

    @property
    def num_tiles(self):
        """How many tiles the block has."""
        tiles = self.plan.sequences.num_chunks * self.plan.key_heads
        return _device.div(tiles - 1 - self.block, self.num_blocks) + 1

    @property
    def heads_per_tile(self) -> int:
        return self.plan.heads // self.plan.key_heads

    def tile(self, i: Index):
        """(chunk, key head, its rows as a part) of the block's tile `i`."""
        plan, tile = self.plan, self.block + i * self.num_blocks
        chunk, key_head = _device.div(tile, plan.key_heads), _device.rem(tile, plan.key_heads)
        first, num = (place[chunk] for place in self.places)
        part = Part(first, first + num, first + num, chunk, chunk, CHUNK, plan.sequences.is_ragged, plan.interpreted)
        return chunk, key_head, part

    def first_slice(self, i: Index, h: Index):
        """How many slices come before those of value head `h` of tile `i`."""
        return (i * self.heads_per_tile + h) * self.plan.slices_per_head


def _kernel(
    first_rows, num_rows, gmem, dq_gmem, dk_gmem, pair_sums_gmem, sums_gmem, *, plan: BackwardPlan, num_blocks: int,
    rows_landed, slices_landed, **smem,
):  # fmt: skip
    role, block = lax.axis_index("role"), lax.axis_index("block")
    rings = {name: Ring(*(smem.pop(f"{name}_{end}") for end in ("filled", "freed")), NUM_STAGES)
             for name in ("rows", "slices", "pairs")}  # fmt: skip
    smem = {name.removesuffix("_smem"): ref for name, ref in smem.items()}
    smem |= {name: Tiles.views(smem[name], plan.interpreted) for name in ("q", "k", "do", "dr")}
    shared = Shared(plan, (first_rows, num_rows), block, num_blocks, **rings, **smem)
    pairs_registers, columns_registers, memory_registers = REGISTERS[plan.pieces, plan.slices_per_head]

    @_device.role(role == 0, increase_to=pairs_registers)
    def _():
        _make_pairs(shared, pair_sums_gmem)

    @_device.role((role >= 1) & (role <= plan.pieces), increase_to=columns_registers)
    def _():
        _add_columns(shared, role - 1, dq_gmem, dk_gmem, sums_gmem)

    @_device.role(role == plan.pieces + 1, decrease_to=memory_registers)
    def _():
        _load(shared, rows_landed, slices_landed, gmem)


def _load(shared: Shared, rows_landed: Barrier, slices_landed: Barrier, gmem: dict):
    """The memory warpgroup."""
    plan, slices_per_tile = shared.plan, shared.heads_per_tile * shared.plan.slices_per_head
    of_rows, of_slice = _copies(plan)

    def load_slice(i, j):
        chunk, key_head, part = shared.tile(i)
        count, value_slice = i * slices_per_tile + j, key_head * slices_per_tile + j
        stage, head = shared.slices.acquire(count), plan.head(value_slice)
        operands = [Operand(gmem[name], getattr(shared, name), value_slice, 1) for name in ("do", "dr")]

        def copy(barrier):
            for operand in operands:
                operand.copy(part.first_row, CHUNK, stage, barrier)
            plgpu.copy_gmem_to_smem(gmem["e"].at[chunk, value_slice], shared.e.at[stage], barrier)
            for name, target in dict(s=shared.s, ds=shared.ds).items():
                for p in range(plan.pieces):
                    source = gmem[name].at[chunk, value_slice, :, pl.ds(p * PIECE, PIECE)]
                    plgpu.copy_gmem_to_smem(source, target.at[stage, p], barrier)
            for name in ("row_cum", "col_cum", "row_beta", "col_beta"):
                target = getattr(shared, name).at[_device.rem(count, VECTOR_SLOTS)]
                plgpu.copy_gmem_to_smem(gmem[name].at[head, chunk], target, barrier)

        fill_stage(part, 0, copy, operands, stage, shared.slices.filled.at[stage], slices_landed, of_slice)

    @pl.loop(0, shared.num_tiles)
    def _(i):
        chunk, key_head, part = shared.tile(i)
        stage = shared.rows.acquire(i)
        operands = [Operand(gmem[name], getattr(shared, name), key_head, plan.pieces) for name in ("q", "k")]

        def copy(barrier):
            for operand in operands:
                operand.copy(part.first_row, CHUNK, stage, barrier)
            for which in (Q, K) if plan.use_qk_l2norm else ():
                factors = gmem["factors"].at[which, key_head, chunk]
                plgpu.copy_gmem_to_smem(factors, shared.factors.at[stage, which], barrier)

        fill_stage(part, 0, copy, operands, stage, shared.rows.filled.at[stage], rows_landed, of_rows)
        pl.loop(0, slices_per_tile)(functools.partial(load_slice, i))

    shared.slices.drain(shared.num_tiles * slices_per_tile)
    shared.rows.drain(shared.num_tiles)


def _hidden(count: Index):
    """Zero, which the compiler does not know. Added to the number of a stage it keeps the compiler from computing all
    addresses before a loop, and spilling them."""
    return count & 2**30


def _zeros():
    return plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), plgpu.Layout.WGMMA)


def _repeat(count: int, hidden: Index, body, carry=None):
    """`carry` after `body(j, carry)` for all j below `count`, in a loop that is not unrolled: for two heads or slices
    at a time there are too few registers."""
    return body(0, carry) if count == 1 else lax.fori_loop(0, count - hidden, body, carry)


def _store_sums(shared: Shared, sums_gmem: Ref, share: Index, i: Index, h: Index, sums: dict):
    """Stores the share of a warpgroup of `SUMS` of value head `h` of tile `i`."""
    chunk, key_head, _ = shared.tile(i)
    for which, values in sums.items():
        target = sums_gmem.at[key_head * shared.heads_per_tile + h, chunk, share, which]
        _device.store(target, values)


def _make_pairs(shared: Shared, sums_gmem: Ref):
    """The pairs warpgroup."""
    plan = shared.plan
    multiply = lambda *pairs, onto=None: product(list(pairs), plan.interpreted, onto)

    def matrix(weights, row_stage, left: Tiles, slot: Index, target: Ref):
        """Stores `weights` with a factor beta[j]; the sums of its rows with it, and of its columns without, times
        `left` kᵀ."""
        left, k = left.tiled.at[row_stage], shared.k.tiled.at[row_stage]
        # Both are sums of the same rounded numbers: their difference is what counts.
        by_pair = weights * multiply(*((left.at[p], k.at[p].T) for p in range(plan.pieces)))
        by_pair = by_pair.astype(plan.dtype)
        shared.by_pair[...] = by_pair
        beta = spread(load(shared.col_beta.at[slot], COLUMNS), 1)
        target[...] = (weights * beta).astype(plan.dtype)
        plgpu.commit_smem()
        by_row = (by_pair.astype(jnp.float32) * beta).sum(axis=1)
        by_column = load(shared.by_pair.T).astype(jnp.float32).sum(axis=1)
        plgpu.commit_smem()
        return by_row, by_column

    def head(i, row_stage, h, _):
        first = shared.first_slice(i, h)
        hidden = _hidden(first)
        row_stage += hidden

        def add_slice(j, carry):
            dqk, dkk = carry
            stage = shared.slices.wait(first + j) + hidden
            e = shared.e.at[stage]
            dqk = multiply((shared.do.tiled.at[stage, 0], e), onto=dqk)
            dkk = multiply((shared.dr.tiled.at[stage, 0], e), onto=dkk)
            plgpu.commit_smem()
            shared.slices.release(first + j)
            return dqk, dkk

        dqk, dkk = _repeat(plan.slices_per_head, hidden, add_slice, (_zeros(), _zeros()))
        row, col = _device.indices()
        row += hidden
        slot = _device.rem(first, VECTOR_SLOTS)
        cum = spread(load(shared.row_cum.at[slot], ROWS), 0) - spread(load(shared.col_cum.at[slot], COLUMNS), 1)
        decay = jnp.exp(jnp.minimum(cum, 0.0))
        number = i * shared.heads_per_tile + h
        # dqk = tril(d scale do uᵀ), dkk = -strict(d dr uᵀ)
        dqk = jnp.where(row >= col, dqk * decay * plan.scale, 0.0)
        dkk = jnp.where(row > col, dkk * -decay, 0.0)
        stage = shared.pairs.acquire(number)
        row_q, col_q = matrix(dqk, row_stage, shared.q, slot, shared.dqk.at[stage])
        row_k, col_k = matrix(dkk, row_stage, shared.k, slot, shared.dkk.at[stage])
        plgpu.barrier_arrive(shared.pairs.filled.at[stage])
        dbeta, row_beta = col_q + col_k, load(shared.row_beta.at[slot], ROWS)
        plgpu.commit_smem()
        _store_sums(shared, sums_gmem, 0, i, h, {DBETA: dbeta, DCUM: row_q + row_k - row_beta * dbeta})

    @pl.loop(0, shared.num_tiles)
    def _(i):
        row_stage = shared.rows.wait(i)
        _repeat(shared.heads_per_tile, _hidden(i), functools.partial(head, i, row_stage))
        shared.rows.release(i)

    shared.pairs.drain(shared.num_tiles * shared.heads_per_tile)


def _add_columns(shared: Shared, p: Index, dq_gmem: Ref, dk_gmem: Ref, sums_gmem: Ref):
    """The columns warpgroup of piece `p`."""
    plan = shared.plan

    def release(i):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shared.rows.release(i)

    @pl.loop(0, shared.num_tiles)
    def _(i):
        (_, key_head, part), stage = shared.tile(i), shared.rows.wait(i)
        q, k = (tiles.tiled.at[stage, p] for tiles in (shared.q, shared.k))

        def head(h, grads):
            hidden = _hidden(shared.first_slice(i, h))
            q, k = (tiles.tiled.at[stage + hidden, p] for tiles in (shared.q, shared.k))
            dq, dk = _add_states(shared, p, i, h, (q, k), sums_gmem, *grads)
            number = i * shared.heads_per_tile + h
            pairs_stage = shared.pairs.wait(number) + hidden
            dqk, dkk = shared.dqk.at[pairs_stage], shared.dkk.at[pairs_stage]
            # dqk k, and dqkᵀ q + dkkᵀ k + dkk k
            dq = product([(dqk, k)], plan.interpreted, dq)
            dk = product([(dqk.T, q), (dkk.T, k), (dkk, k)], plan.interpreted, dk)
            shared.pairs.release(number)
            return dq, dk

        dq, dk = _repeat(shared.heads_per_tile, _hidden(i), head, (_zeros(), _zeros()))
        if plan.use_qk_l2norm:
            dq, dk = _before_norms(shared, p, i, stage, (q, k), (dq, dk))
        pl.when(i > 0)(lambda: release(i - 1))
        q[...], k[...] = dq.astype(plan.dtype), dk.astype(plan.dtype)
        plgpu.commit_smem()
        for tiles, out in ((shared.q, dq_gmem), (shared.k, dk_gmem)):
            store_rows(part, Tiles(None, tiles.rows.at[stage]), p, out, key_head, p, part.first_row)

    release(shared.num_tiles - 1)
    plgpu.wait_smem_to_gmem(0)


def _add_states(shared: Shared, p: Index, i: Index, h: Index, rows, sums_gmem: Ref, dq, dk):
    """(dq, dk) with the shares of the states of value head `h` of tile `i` added. Stores their sums.

    `rows` are the warpgroup's pieces of q and k.
    """
    plan, (q, k), first = shared.plan, rows, shared.first_slice(i, h)
    multiply = lambda a, b: product([(a, b)], plan.interpreted)

    def add_slice(j, carry):
        dq, dk, sums = carry
        stage, slot = shared.slices.wait(first + j) + _hidden(first), _device.rem(first + j, VECTOR_SLOTS)
        do, dr, e = shared.do.tiled.at[stage, 0], shared.dr.tiled.at[stage, 0], shared.e.at[stage]
        s, ds, cum = shared.s.at[stage, p], shared.ds.at[stage, p], load(shared.row_cum.at[slot], ROWS)
        from_start, to_end = jnp.exp(cum), jnp.exp(shared.row_cum[slot, CHUNK - 1] - cum)
        # scale exp(cum) do s
        term = multiply(do, s) * spread(from_start * plan.scale, 0)
        dcum = _row_dots(q, term)
        dq += term
        # -exp(cum) dr s
        term = multiply(dr, s) * spread(-from_start, 0)
        dcum += _row_dots(k, term)
        dk += term
        # exp(cum[-1] - cum) beta e ds'
        beta, term = load(shared.row_beta.at[slot], ROWS), multiply(e.T, ds) * spread(to_end, 0)
        dbeta = _row_dots(k, term)
        dk += term * spread(beta, 0)
        by_value = _row_dots(s, load(ds).astype(jnp.float32))
        plgpu.commit_smem()
        shared.slices.release(first + j)
        slice_sums = {DBETA: dbeta, DCUM: dcum - beta * dbeta, LAST_BY_TOKEN: beta * dbeta, LAST_BY_VALUE: by_value}
        return dq, dk, {which: sums[which] + value for which, value in slice_sums.items()}

    zero = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), ROWS)
    dq, dk, sums = _repeat(plan.slices_per_head, _hidden(first), add_slice, (dq, dk, dict.fromkeys(SUMS, zero)))
    _store_sums(shared, sums_gmem, p, i, h, sums)
    return dq, dk


def _before_norms(shared: Shared, p: Index, i: Index, stage: Index, rows, grads):
    """The gradients of a piece of rows of q and k before they were normalised: f (du - u (u . du))"""
    dots = [_row_dots(u, du) for u, du in zip(rows, grads, strict=True)]
    if shared.dots is not None:
        # Two places are enough: a warpgroup waits for the next tile's dots of all before it stores here again.
        of_pieces = shared.dots.at[_device.rem(i, 2)]
        for which, dot in enumerate(dots):
            _device.store(of_pieces.at[p, which], dot)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.exchanged)
        plgpu.barrier_wait(shared.exchanged)
        pieces = range(shared.plan.pieces)
        dots = [sum(load(of_pieces.at[piece, which], ROWS) for piece in pieces) for which in (Q, K)]
    factors = [load(shared.factors.at[stage, which], ROWS) for which in (Q, K)]
    through = lambda u, du, dot, f: (du - load(u).astype(jnp.float32) * spread(dot, 0)) * spread(f, 0)
    return [through(*parts) for parts in zip(rows, grads, dots, factors, strict=True)]


def _row_dots(x_smem: Ref, y):
    """x . y"""
    return (load(x_smem).astype(jnp.float32) * y).sum(axis=1)


def launch(
    plan: BackwardPlan, first_rows, num_rows, q, k, do, dr, errors, states, d_states, cum, beta, factors, params
):
    """[dq, dk, sums of pairs, sums of columns]. Rows of no sequence are not written. The `factors` of norms may be
    None."""
    num_chunks = plan.sequences.num_chunks
    gmem = dict(q=q, k=k, do=do, dr=dr, e=errors, s=states, ds=d_states)
    # cum and beta are passed twice: one ref cannot have two layouts.
    gmem |= dict(row_cum=cum, col_cum=cum, row_beta=beta, col_beta=beta)
    if plan.use_qk_l2norm:
        gmem |= dict(factors=factors)
    num_blocks = min(num_chunks * plan.key_heads, plan.num_sms)
    return _host.kernel(
        functools.partial(_kernel, plan=plan, num_blocks=num_blocks),
        out_type=[
            *[jax.ShapeDtypeStruct(q.shape, plan.dtype)] * 2,
            jax.ShapeDtypeStruct((plan.heads, num_chunks, 1, 2, CHUNK), jnp.float32),
            jax.ShapeDtypeStruct((plan.heads, num_chunks, plan.pieces, len(SUMS), CHUNK), jnp.float32),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=plan.pieces + 2,
        thread_name="role",
        scratch_types=_scratch(plan),
        compiler_params=params,
    )(first_rows, num_rows, gmem)
