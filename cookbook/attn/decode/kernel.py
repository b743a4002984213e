# SPDX-License-Identifier: Apache-2.0
"""The kernel of `paged_attention`: one query token of each sequence, whose keys and values lie in pages.

`plan.py` says what a unit, a part and a piece are; `merge_pieces.py` has the kernel that merges pieces.

Role table: one block per SM, for a unit of a part, which it computes piece after piece, or of two parts side by side;
the warpgroups are, for each part,

    memory     one: copies the query of a piece, and the pages of block after block, which it finds through the block
               table, into the slots of a ring
    compute    one: s = q kᵀ, softmax and p v of block after block; then out and lse of the piece

Barrier table, of each part:

    barrier        arrivals                    who waits
    q_filled       copies of a piece's query   compute, before its first product
    q_freed        compute                     memory, before it copies the query of the next piece, which takes the
                                               place of out of this one; its first blocks are in flight by then
    filled[slot]   copies of the pages of a    compute, before s
                   block, keys and values
    freed[slot]    compute                     memory, before it refills the slot

Keys after the length of a sequence in its last page are masked, and values there are overwritten with zeros: not even
NaN gets out. `cache/pages.py` says what becomes of ids and lengths that are out of range.

To add a bias to the logits: in `_attend`, here and in `kernel_fp8.py`, before the mask, as `Work.softmax` in `steps.py`
says. To add a format of pages: its dtype beside `core.E4M3`, and in `checks.check_cache`; its scales, and how it is
rounded and widened, in `cache/pages_fp8.py`; then wherever E4M3 stands in the ops that read or write pages, in their
kernels and in `references.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import PIECE, Barrier, Ref, div, rem
from ..core import WG_ROWS, per_row
from ..steps import add_product, finish, nothing_seen, softmax_step
from ..tiles import clear, copies_of_tiles, copy_tiles, value_tiles
from .plan import Piece, Plan, each_piece, ends_and_seqs

COMPUTE, MEMORY = 0, 1  # Warpgroups by their role, of each pair.
COMPUTE_REGISTERS, MEMORY_REGISTERS = 208, 40  # Per thread, of a block of two pairs. By themselves all have 128.


def scratch(plan: Plan) -> dict:
    """Shared memory of a pair of warpgroups, and its barriers."""
    p, c = plan.problem, plan.config
    keys = plgpu.SMEM((c.num_stages, c.block_kv, p.width), p.dtype, **_device.swizzled())
    copies = 2 * plan.pages.copies
    if not p.whole_panels:
        keys = _device.row_tiles((c.num_stages, p.panels, c.block_kv, PIECE), p.dtype, p.interpreted)
        copies = plan.pages.copies * (p.panels + copies_of_tiles(p, plan.pages.tokens))
    query = _device.row_tiles((p.panels, WG_ROWS, PIECE), p.dtype, p.interpreted)
    out = plgpu.SMEM((WG_ROWS, p.width), jnp.float32)
    return dict(
        q_and_out=[query, out] if p.interpreted else plgpu.RefUnion(*query.refs, out),
        k_smem=keys,
        v_smem=value_tiles(c.num_stages, c.block_kv, p),
        q_filled=_device.barriers(1, p.panels),
        q_freed=_device.barriers(1),
        filled=_device.barriers(c.num_stages, copies),
        freed=_device.barriers(c.num_stages),
    )


@dataclasses.dataclass(frozen=True)
class Smem:
    """The scratch of a pair, as the roles use it. `q`, `k` and `v` are as tensor cores see them, `_tma` as TMA does."""

    q: Ref  # (panels, 64, 64)
    q_tma: Ref
    out: Ref  # (64, width), float32, in the place of the query.
    k: Ref  # (slots, block_kv, head_dim), or (slots, panels, block_kv, 64).
    k_tma: Ref
    v: Ref  # (slots, block_kv, width)
    v_tma: Ref  # (slots, block_kv / 8, panels, 8, 64)
    v_rows: Ref  # (slots, block_kv / 8, 8 width), for `clear`.
    q_filled: Barrier
    q_freed: Barrier
    ring: _device.Ring

    @classmethod
    def of(cls, plan: Plan, q_and_out, k_smem, v_smem, q_filled, q_freed, filled, freed):
        query = q_and_out if not plan.problem.interpreted else (q_and_out[0], *q_and_out)
        # A RefUnion is a row of bytes until it is unpacked.
        views = lambda smem, num: tuple(smem) if len(smem.shape) == 1 else (smem,) * num
        ring = _device.Ring(filled, freed, plan.config.num_stages)
        return cls(*query, *views(k_smem, 2), *views(v_smem, 3), q_filled, q_freed, ring)


def _kernel(
    ends, seqs, kv_lens, block_tables, q_gmem, k_gmem, v_gmem, out_gmem, lse_log2_gmem, *, plan: Plan, pairs: list[dict]
):  # fmt: skip
    registers = (COMPUTE_REGISTERS, MEMORY_REGISTERS) if len(pairs) > 1 else (None, None)
    for i, smem_of_pair in enumerate(pairs):
        part = lax.axis_index("part") * len(pairs) + i
        smem = Smem.of(plan, **smem_of_pair)
        for_each_piece = functools.partial(each_piece, plan, ends, seqs, kv_lens, part)

        @_device.role(lax.axis_index("role") == 2 * i + COMPUTE, increase_to=registers[COMPUTE])
        def _(part=part, smem=smem, for_each_piece=for_each_piece):
            _compute(plan, part, for_each_piece, smem, out_gmem, lse_log2_gmem)

        @_device.role(lax.axis_index("role") == 2 * i + MEMORY, decrease_to=registers[MEMORY])
        def _(smem=smem, for_each_piece=for_each_piece):
            load(plan, for_each_piece, smem, block_tables, q_gmem, k_gmem, v_gmem)


def load(plan: Plan, for_each_piece, smem: Smem, block_tables, q_gmem, k_gmem, v_gmem):
    """The memory warpgroup: the query heads of a unit, and block after block of its keys and values."""
    problem, pages, unit = plan.problem, plan.pages, lax.axis_index("unit")
    kv_head = div(unit, plan.chunks)
    head = kv_head * problem.group + rem(unit, plan.chunks) * plan.rows

    def load_query(i, piece: Piece):
        pl.when(i > 0)(lambda: plgpu.barrier_wait(smem.q_freed))
        for p in range(problem.panels):
            # Heads after the unit's are copied too, as far as there are any; their results are discarded.
            source = q_gmem.at[piece.seq, pl.ds(head, WG_ROWS), problem.columns(p)]
            plgpu.copy_gmem_to_smem(source, smem.q_tma.at[p], smem.q_filled)

    def load_page(j: int, slot, keys, values):
        """Copies the tokens of a block that lie in its `j`-th page."""
        rows, filled = pl.ds(j * pages.tokens, pages.tokens), smem.ring.filled.at[slot]
        if problem.whole_panels:
            plgpu.copy_gmem_to_smem(keys, smem.k.at[slot, rows], filled)
            plgpu.copy_gmem_to_smem(values, smem.v.at[slot, rows], filled)
            return
        for p in range(problem.panels):
            plgpu.copy_gmem_to_smem(keys.at[:, problem.columns(p)], smem.k_tma.at[slot, p, rows], filled)
        source = lambda row, num, p: values.at[pl.ds(row, num), problem.columns(p)]
        copy_tiles(problem, source, smem.v.at[slot], smem.v_tma.at[slot], rows.start, rows.size, filled)

    def load_piece(i, piece: Piece, steps_done):
        find = lambda step: pages.of_block(block_tables, piece.seq, piece.first + step)
        # The query comes after as many blocks as there are slots: the ring is full while the previous piece is stored.
        blocks_before_query = jnp.where(i == 0, 1, jnp.minimum(piece.steps, plan.config.num_stages))

        def one(step, found):
            found_next = find(step + 1)  # In flight while this one waits.
            slot = smem.ring.acquire(steps_done + step)
            first = pages.first_token(piece.first + step)
            for j, page in enumerate(found):
                load_page(j, slot, *(gmem.at[page, pl.ds(first, pages.tokens), kv_head] for gmem in (k_gmem, v_gmem)))
            pl.when(step + 1 == blocks_before_query)(lambda: load_query(i, piece))
            return found_next

        lax.fori_loop(0, piece.steps, one, find(0))

    count, num_pieces = for_each_piece(load_piece)
    smem.ring.drain(count)
    pl.when(num_pieces > 0)(lambda: plgpu.barrier_wait(smem.q_freed))


def _compute(plan: Plan, part, for_each_piece, smem: Smem, out_gmem, lse_log2_gmem):
    """The compute warpgroup: out and lse of every piece, in float32; base-2 logarithms."""
    unit = lax.axis_index("unit")

    def compute_piece(i, piece: Piece, steps_done):
        plgpu.barrier_wait(smem.q_filled)
        # Pieces are in order of sequences and of parts, so that no two have the same sum.
        where = piece.seq + part, unit
        out, lse_log2 = _attend(plan, smem, piece, steps_done)
        store_piece(plan, smem, out, lse_log2, out_gmem.at[where], lse_log2_gmem.at[where])

    for_each_piece(compute_piece)
    plgpu.wait_smem_to_gmem(0)


def store_piece(plan: Plan, smem: Smem, out, lse_log2, out_gmem, lse_log2_gmem):
    """Stores the results of a piece; then the query of the next one may take the place of `out`."""
    _device.store(smem.out, out)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.out.at[pl.ds(0, plan.stored_rows)], out_gmem)
    _device.store(lse_log2_gmem, lse_log2)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(smem.q_freed)


def _attend(plan: Plan, smem: Smem, piece: Piece, steps_done):
    """(out, lse_log2) of a piece: block after block, each of them waited for."""
    problem, block_kv = plan.problem, plan.config.block_kv
    shape, low = (WG_ROWS, block_kv), plan.first_seen(piece.kv_len)

    def step(step, carry, masked: bool):
        acc, m_i, l_i = carry
        first = (piece.first + step) * block_kv
        slot = smem.ring.wait(steps_done + step)

        def logits(s_ref):
            for p in range(problem.panels):
                keys = smem.k.at[slot, :, pl.ds(p * PIECE, PIECE)] if problem.whole_panels else smem.k.at[slot, p]
                plgpu.wgmma(s_ref, smem.q.at[p], keys.T)
            return s_ref[...]

        s, scale_log2 = problem.scored(pl.run_scoped(logits, plgpu.ACC(shape, jnp.float32)))
        if masked:
            token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first
            s = jnp.where((token >= low) & (token < piece.kv_len), s, -jnp.inf)
            clear(problem, smem.v_rows.at[slot], low - first, piece.kv_len - first)
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2, masked)
        values = smem.v.at[slot]
        acc = add_product(acc * per_row(alpha, acc.shape), p.astype(values.dtype), values, problem.interpreted)
        smem.ring.release(steps_done + step)
        return acc, m_i, l_i

    return finish(*over_blocks(plan, piece, low, step))


def over_blocks(plan: Plan, piece: Piece, low, step):
    """(acc, m_i, l_i) after `carry = step(i, carry, masked)` for each block of a piece. Only blocks with tokens that
    the query does not see are masked: before `low` with a window, and at the end of the sequence."""
    block_kv, has_window = plan.config.block_kv, plan.problem.left is not None
    # Steps whose tokens are all seen lie between `start` and `end`.
    end = jnp.clip(div(piece.kv_len, block_kv) - piece.first, 0, piece.steps)
    start = jnp.int32(0)
    if has_window:
        start = jnp.clip(div(low + block_kv - 1, block_kv) - piece.first, 0, end)
    carry = nothing_seen(plan.problem.width)
    if has_window:
        carry = lax.fori_loop(0, start, functools.partial(step, masked=True), carry)
    carry = lax.fori_loop(start, end, functools.partial(step, masked=False), carry)
    return lax.fori_loop(end, piece.steps, functools.partial(step, masked=True), carry)


def launch(kernel, num_warpgroups: int, scratch_types: dict, plan: Plan, params, ends, seqs, *operands):
    """(out, lse_log2) of every piece, unit and row, in float32, which `kernel` computes."""
    return _host.kernel(
        functools.partial(kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((plan.num_pieces, plan.num_units, plan.stored_rows, plan.problem.width), jnp.float32),
            jax.ShapeDtypeStruct((plan.num_pieces, plan.num_units, WG_ROWS), jnp.float32),
        ],
        grid=(plan.num_parts // plan.config.num_pairs, plan.num_units),
        grid_names=("part", "unit"),
        num_threads=num_warpgroups,
        thread_name="role",
        scratch_types=scratch_types,
        compiler_params=params,
    )(ends, seqs, *operands)


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def pieces(q, k_pages, v_pages, block_tables, kv_lens, *, plan: Plan, params):
    """(ends, out, lse_log2): where the blocks of each sequence end; and of every piece, unit and row, in float32."""
    ends, seqs = ends_and_seqs(plan, kv_lens)
    pairs = plan.config.num_pairs
    operands = kv_lens, block_tables, q, k_pages, v_pages
    out, lse_log2 = launch(_kernel, 2 * pairs, dict(pairs=[scratch(plan)] * pairs), plan, params, ends, seqs, *operands)
    return ends, out, lse_log2
