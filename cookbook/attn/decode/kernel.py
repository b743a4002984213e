# SPDX-License-Identifier: Apache-2.0
"""The kernels of `paged_attention`: one query token of each sequence, whose keys and values lie in pages.

`plan.py` says what a unit, a part and a piece are; `merge_attention.py` has the kernel that merges pieces.

Role table: one block a SM, for a unit of a part, which it computes piece after piece, or of two parts side by side;
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
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..core import PIECE, WG_ROWS, div, per_row, rem
from ..steps import add_product, finish, nothing_seen, softmax_step
from ..tiles import clear, copy_tiles, lane
from .plan import Part, Piece, Plan, ends_and_seqs

COMPUTE, MEMORY = 0, 1  # Warpgroups by their role, of each pair.
REGISTERS = 208, 40  # A thread's, by role, if a block has two pairs.


@dataclasses.dataclass(frozen=True)
class Smem:
    """Shared memory of a block, and its barriers."""

    q: object  # (pieces, 64, 64), as tensor cores see it.
    q_tma: object
    out: object  # (64, width), float32, in the place of the query.
    k: object  # (slots, block_kv, head_dim), or (slots, pieces, block_kv, 64), as tensor cores see it.
    k_tma: object
    v: object  # (slots, block_kv, width)
    v_tma: object  # (slots, block_kv / 8, pieces, 8, 64)
    v_rows: object  # (slots, block_kv / 8, 8 width), for `clear`.
    q_filled: object
    q_freed: object
    ring: _device.Ring

    @property
    def mine(self) -> tuple[int, int]:
        """(first, number) of the keys of a block that a compute warpgroup takes."""
        return 0, self.k.shape[-2]

    def merged(self, out, lse_log2, lse_gmem):
        """Results over all keys of a piece, from those over this warpgroup's; another's are where all's will be."""
        return out, lse_log2

    def scales(self):
        """(from products of a query that has arrived, and of keys, to those of what they stand for; of values)."""
        return 1.0, 1.0

    def queue_logits(self, s_ref, slot):
        """Starts q kᵀ."""
        for p in range(self.q.shape[0]):
            whole = len(self.k.shape) == 3
            k_piece = self.k.at[slot, :, pl.ds(p * PIECE, PIECE)] if whole else self.k.at[slot, p]
            plgpu.wgmma(s_ref, self.q.at[p], k_piece.T)

    def free_keys(self, count):
        """Keys and values are given back together."""

    def values(self, problem, count, seen):
        """The values of a block, zero in rows that nobody sees where the block is cut: outside of `seen`."""
        slot = self.ring.slot(count)
        if seen is not None:
            clear(problem, self.v_rows.at[slot], *seen)
        return self.v.at[slot]

    def free_values(self, count):
        self.ring.free(count)


def _kernel(
    ends, seqs, kv_lens, block_tables, q_gmem, k_gmem, v_gmem, out_gmem, lse_gmem, *, plan: Plan, pairs: list[dict]
):  # fmt: skip
    for i, scratch in enumerate(pairs):
        part = lax.axis_index("part") * len(pairs) + i
        smem = _smem(plan, **scratch)
        each_piece = functools.partial(
            _each_piece, plan, kv_lens, functools.partial(Part, plan, ends, seqs, kv_lens, part)
        )
        compute = functools.partial(_compute, plan, part, each_piece, smem, out_gmem, lse_gmem)
        load = functools.partial(_load, plan, each_piece, smem, block_tables, q_gmem, k_gmem, v_gmem)
        for role, action, work in (COMPUTE, "increase", compute), (MEMORY, "decrease", load):
            mine = lax.axis_index("role") == 2 * i + role
            pl.when(mine)(functools.partial(_with_registers, len(pairs) > 1, role, action, work))


def _with_registers(several: bool, role: int, action: str, work):
    """`work()`, with the registers of its role: by itself, each thread of a block of two pairs has 128."""
    if several:
        plgpu.set_max_registers(REGISTERS[role], action=action)
    work()


def _smem(plan: Plan, q_and_out, k_smem, v_smem, q_filled, q_freed, filled, freed) -> Smem:
    query = q_and_out if not plan.problem.interpreted else (q_and_out[0], *q_and_out)
    # A RefUnion is a row of bytes until it is unpacked.
    keys = tuple(k_smem) if len(k_smem.shape) == 1 else (k_smem,) * 2
    values = (v_smem,) * 3 if plan.problem.interpreted else tuple(v_smem)
    ring = _device.Ring(filled, freed, plan.config.num_stages)
    return Smem(*query, *keys, *values, q_filled, q_freed, ring)


def _each_piece(plan: Plan, kv_lens, part, body):
    """Calls `body(i, piece, before)` for each piece of this part, after `before` steps. Returns (steps, pieces)."""
    mine = part()

    def one(i, before):
        begin = jnp.where(i == 0, mine.begin, 0)
        piece = Piece(plan, kv_lens, mine.first_seq + i, begin, mine.steps - before)
        body(i, piece, before)
        return before + piece.steps

    return lax.fori_loop(0, mine.pieces, one, jnp.int32(0)), mine.pieces


def _load(plan: Plan, each_piece, smem: Smem, block_tables, q_gmem, k_gmem, v_gmem):
    """The memory warpgroup: the query heads of a unit, and block after block of its keys and values."""
    unit, pages = lax.axis_index("unit"), plan.pages
    kv_head = div(unit, plan.chunks)
    head = kv_head * plan.problem.group + rem(unit, plan.chunks) * plan.rows

    def load_query(i, piece: Piece):
        pl.when(i > 0)(lambda: plgpu.barrier_wait(smem.q_freed))
        for p in range(plan.problem.pieces):
            # Heads after the unit's are copied too, as far as there are any; their results are discarded.
            source = q_gmem.at[piece.seq, pl.ds(head, WG_ROWS), lane(plan.problem, p)]
            plgpu.copy_gmem_to_smem(source, smem.q_tma.at[p], smem.q_filled)

    def load_page(j: int, slot, keys, values):
        """Copies of a block's part that lies in its `j`-th page."""
        rows, filled = pl.ds(j * pages.tokens, pages.tokens), smem.ring.filled.at[slot]
        if plan.problem.whole_pieces:
            plgpu.copy_gmem_to_smem(keys, smem.k.at[slot, rows], filled)
            plgpu.copy_gmem_to_smem(values, smem.v.at[slot, rows], filled)
            return
        for p in range(plan.problem.pieces):
            plgpu.copy_gmem_to_smem(keys.at[:, lane(plan.problem, p)], smem.k_tma.at[slot, p, rows], filled)
        source = lambda row, num, p: values.at[pl.ds(row, num), lane(plan.problem, p)]
        copy_tiles(plan.problem, source, smem.v.at[slot], smem.v_tma.at[slot], rows.start, rows.size, filled)

    def load_piece(i, piece: Piece, before):
        find = lambda step: pages.of_block(block_tables, piece.seq, piece.first + step)
        # The query comes after as many blocks as there are slots: the ring is full while the previous piece is stored.
        blocks_before_query = jnp.where(i == 0, 1, jnp.minimum(piece.steps, plan.config.num_stages))

        def one(step, found):
            found_next = find(step + 1)  # In flight while this one waits.
            slot = smem.ring.fill(before + step)
            first = pages.first_token(piece.first + step)
            for j, page in enumerate(found):
                load_page(j, slot, *(gmem.at[page, pl.ds(first, pages.tokens), kv_head] for gmem in (k_gmem, v_gmem)))
            pl.when(step + 1 == blocks_before_query)(lambda: load_query(i, piece))
            return found_next

        lax.fori_loop(0, piece.steps, one, find(0))

    count, num_pieces = each_piece(load_piece)
    smem.ring.drain(count)
    pl.when(num_pieces > 0)(lambda: plgpu.barrier_wait(smem.q_freed))


def _compute(plan: Plan, part, each_piece, smem: Smem, out_gmem, lse_gmem):
    """The compute warpgroup: out and lse of every piece, in float32; base-2 logarithms."""
    unit = lax.axis_index("unit")

    def compute_piece(i, piece: Piece, before):
        plgpu.barrier_wait(smem.q_filled)
        # Pieces are in order of sequences and of parts, so that no two have the same sum.
        where = piece.seq + part, unit
        results = _attend(plan, smem, piece, before, *smem.scales())
        out, lse_log2 = smem.merged(*results, lse_gmem.at[where])
        _device.store(smem.out, out)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.out.at[pl.ds(0, plan.stored_rows)], out_gmem.at[where])
        _device.store(lse_gmem.at[where], lse_log2)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(smem.q_freed)

    each_piece(compute_piece)
    plgpu.wait_smem_to_gmem(0)


def _attend(plan: Plan, smem: Smem, piece: Piece, before, logit_scale, value_scale):
    """(out, lse_log2) of a piece: block after block, each of them waited for."""
    problem, block_kv, (first_key, num_keys) = plan.problem, plan.config.block_kv, smem.mine
    shape = WG_ROWS, num_keys
    low = 0 if problem.left is None else jnp.maximum(piece.kv_len - 1 - problem.left, 0)  # The first that is seen.

    def step(step, carry, masked: bool):
        acc, m_i, l_i = carry
        first = (piece.first + step) * block_kv
        slot = smem.ring.wait(before + step)

        def logits(s_ref):
            smem.queue_logits(s_ref, slot)
            return s_ref[...]

        s, unit = problem.scored(pl.run_scoped(logits, plgpu.ACC(shape, jnp.float32)), logit_scale)
        smem.free_keys(before + step)
        if masked:
            token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first + first_key
            s = jnp.where((token >= low) & (token < piece.kv_len), s, -jnp.inf)
        values = smem.values(problem, before + step, (low - first, piece.kv_len - first) if masked else None)
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, unit, masked)
        acc = add_product(acc * per_row(alpha, acc.shape), p.astype(values.dtype), values, problem.interpreted)
        smem.free_values(before + step)
        return acc, m_i, l_i

    # Steps whose tokens are all seen lie between `start` and `end`.
    end = jnp.clip(div(piece.kv_len, block_kv) - piece.first, 0, piece.steps)
    start = jnp.int32(0)
    if problem.left is not None:
        start = jnp.clip(div(low + block_kv - 1, block_kv) - piece.first, 0, end)
    carry = nothing_seen(problem.width)
    if problem.left is not None:
        carry = lax.fori_loop(0, start, functools.partial(step, masked=True), carry)
    carry = lax.fori_loop(start, end, functools.partial(step, masked=False), carry)
    return finish(*lax.fori_loop(end, piece.steps, functools.partial(step, masked=True), carry), value_scale)


@functools.partial(jax.jit, static_argnames=("plan", "params", "kernel", "roles"))
def pieces(q, k_pages, v_pages, block_tables, kv_lens, *scales, plan: Plan, params, kernel=_kernel, roles: int = 2):
    """(ends, out, lse_log2): where the blocks of each sequence end; and of every piece, unit and row, in float32."""
    ends, seqs = ends_and_seqs(plan, kv_lens)
    out, lse_log2 = _host.kernel(
        functools.partial(kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((plan.num_pieces, plan.num_units, plan.stored_rows, plan.problem.width), jnp.float32),
            jax.ShapeDtypeStruct((plan.num_pieces, plan.num_units, WG_ROWS), jnp.float32),
        ],
        grid=(plan.num_parts // plan.config.num_pairs, plan.num_units),
        grid_names=("part", "unit"),
        num_threads=roles * plan.config.num_pairs,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(ends, seqs, kv_lens, block_tables, q, k_pages, v_pages, *scales)
    return ends, out, lse_log2
