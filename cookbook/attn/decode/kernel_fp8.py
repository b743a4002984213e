# SPDX-License-Identifier: Apache-2.0
"""The kernel of `paged_attention` over pages of 8 bits: that of `kernel.py` with two warpgroups more.

Keys go to the tensor cores as they are. The other operand of an 8-bit product has 8 bits, too, and a bfloat16 query has
8 significant ones where e4m3 has 4; so the query is the sum of two terms in e4m3, each times the same power of two, by
which its row's largest number comes near the end of e4m3. Both products go to the same sums.

Values would have to lie transposed for 8-bit products. They become float16, which holds every e4m3 exactly. The weights
are float16, too: one below 2**-25 of the largest so far is zero.

Role table: memory as in `kernel.py`, and

    convert    one: values of block after block, from the ring into one of two slots of 16 bits; rows that nobody sees,
               which may be NaN, become zeros
    compute    two, with half of the keys of each block: pages of 8 bits arrive in half the time, in which one hardly
               gets through product, softmax and product. `help` hands its results of a piece over to the other.
               Half of 64 keys, as with heads of 256, is too few for a product; there is no `help` then

Barrier table: that of `kernel.py`, where `freed` has three arrivals, of both compute for the keys and of convert for
the values; and

    barrier             arrivals       who waits
    wide_filled[slot]   convert        both compute, before p v
    wide_freed[slot]    both compute   convert, before it refills the slot
    terms_filled        both compute   both, before they read what both have written of the query
    handed              help           compute, before it merges the results of a piece

Shared memory moves 4 bytes for each byte of keys and values: TMA writes it, a key is read twice by products, a value is
read, written as two bytes, and read as two.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..._device import PIECE, ROWS, Barrier, Ref, div
from ..cache.pages_fp8 import widen
from ..core import E4M3, WG_ROWS, per_row
from ..steps import add_product, finish, softmax_step
from . import kernel
from .kernel import Smem, launch, load, over_blocks, store_piece
from .plan import Piece, Plan, each_piece, ends_and_seqs

COMPUTE, MEMORY, CONVERT, HELP = range(4)  # Warpgroups by their role.
TERMS, WIDE_SLOTS = 2, 2
WIDE = jnp.float16
# Registers per thread, with so many compute warpgroups.
REGISTERS = {2: {COMPUTE: 168, HELP: 168, MEMORY: 72, CONVERT: 96}, 1: {COMPUTE: 240, MEMORY: 80, CONVERT: 104}}
NEAR_END = 8  # A row's largest number lies within half an octave of 2 ** NEAR_END; e4m3 ends at 448.


def scratch(plan: Plan) -> dict:
    """Shared memory of a block, and its barriers."""
    p, c, wgs = plan.problem, plan.config, plan.fp8_compute_wgs
    panel = min(128, p.head_dim)  # 8-bit numbers that are swizzled together.
    narrow = _device.swizzled(panel, E4M3)
    ring = plgpu.SMEM((c.num_stages, c.block_kv, p.head_dim), E4M3, **narrow)
    return kernel.scratch(plan) | dict(
        k_smem=ring,
        v_smem=ring,
        terms_smem=plgpu.SMEM((TERMS, p.head_dim // panel, WG_ROWS, panel), E4M3, **narrow),
        wide_smem=plgpu.SMEM((WIDE_SLOTS, c.block_kv, p.head_dim), WIDE, **_device.swizzled()),
        filled=_device.barriers(c.num_stages, 2 * plan.pages.copies),
        freed=_device.barriers(c.num_stages, 1 + wgs),
        wide_filled=_device.barriers(WIDE_SLOTS),
        wide_freed=_device.barriers(WIDE_SLOTS, wgs),
        terms_filled=_device.barriers(1, wgs),
        handed=_device.barriers(1),
    )


@dataclasses.dataclass(frozen=True)
class Half:
    """A compute warpgroup's half of the keys, and what it has at hand beside `Smem`."""

    smem: Smem  # `v_tma` and `v_rows` are not used.
    terms: Ref  # (TERMS, panels, 64, panel): the query in e4m3.
    wide: Ref  # (WIDE_SLOTS, block_kv, head_dim): values in 16 bits.
    wide_ring: _device.Ring
    terms_filled: Barrier
    handed: Barrier
    which: int  # Which half of the keys is its, and, if there are two, which of the terms it writes.
    num_keys: int
    num_wgs: int
    k_scale: jax.Array  # Dequantisation scale of the keys, or of the values, of the pages.
    v_scale: jax.Array

    @property
    def keys(self):
        """Its keys of a block."""
        return pl.ds(self.which * self.num_keys, self.num_keys)


def _kernel(
    ends, seqs, kv_lens, block_tables, q_gmem, k_gmem, v_gmem, k_scale, v_scale, out_gmem, lse_log2_gmem, *, plan: Plan,
    terms_smem, wide_smem, wide_filled, wide_freed, terms_filled, handed, **smem_of_kernel,
):  # fmt: skip
    role, part = lax.axis_index("role"), lax.axis_index("part")
    smem, wide_ring = Smem.of(plan, **smem_of_kernel), _device.Ring(wide_filled, wide_freed, WIDE_SLOTS)
    kv_head = div(lax.axis_index("unit"), plan.chunks)
    registers, wgs = REGISTERS[plan.fp8_compute_wgs], plan.fp8_compute_wgs
    for_each_piece = functools.partial(each_piece, plan, ends, seqs, kv_lens, part)
    half = lambda which: Half(
        smem, terms_smem, wide_smem, wide_ring, terms_filled, handed, which, plan.config.block_kv // wgs, wgs,
        k_scale[kv_head], v_scale[kv_head],
    )  # fmt: skip

    @_device.role(role == COMPUTE, increase_to=registers[COMPUTE])
    def _():
        _compute(plan, part, for_each_piece, half(0), out_gmem, lse_log2_gmem)

    if wgs == 2:

        @_device.role(role == HELP, increase_to=registers[HELP])
        def _():
            _help(plan, for_each_piece, half(1), lse_log2_gmem)

    @_device.role(role == MEMORY, decrease_to=registers[MEMORY])
    def _():
        load(plan, for_each_piece, smem, block_tables, q_gmem, k_gmem, v_gmem)

    @_device.role(role == CONVERT, decrease_to=registers[CONVERT])
    def _():
        _convert(plan, for_each_piece, smem, wide_smem, wide_ring)


def _convert(plan: Plan, for_each_piece, smem: Smem, wide_smem, wide_ring: _device.Ring):
    """The converting warpgroup: values of block after block become 16 bits wide."""
    block_kv = plan.config.block_kv

    def convert_piece(i, piece: Piece, steps_done):
        low = plan.first_seen(piece.kv_len)

        @pl.loop(0, piece.steps)
        def _(step):
            slot, to = smem.ring.wait(steps_done + step), wide_ring.acquire(steps_done + step)
            first = (piece.first + step) * block_kv
            seen, whole = (low - first, piece.kv_len - first), (first >= low) & (first + block_kv <= piece.kv_len)
            pl.when(whole)(lambda: widen(smem.v.at[slot], wide_smem.at[to]))
            pl.when(~whole)(lambda: widen(smem.v.at[slot], wide_smem.at[to], seen))
            plgpu.commit_smem()
            smem.ring.release(steps_done + step)
            plgpu.barrier_arrive(wide_ring.filled.at[to])

    count, _ = for_each_piece(convert_piece)
    wide_ring.drain(count)


def _compute(plan: Plan, part, for_each_piece, half: Half, out_gmem, lse_log2_gmem):
    """The compute warpgroup that stores out and lse of every piece, in float32; base-2 logarithms."""
    unit = lax.axis_index("unit")

    def compute_piece(i, piece: Piece, steps_done):
        plgpu.barrier_wait(half.smem.q_filled)
        # Pieces are in order of sequences and of parts, so that no two have the same sum.
        where = piece.seq + part, unit
        out, lse_log2 = _attend(plan, half, piece, steps_done)
        if half.num_wgs == 2:
            out, lse_log2 = _merged(half, out, lse_log2, lse_log2_gmem.at[where])
        store_piece(plan, half.smem, out, lse_log2, out_gmem.at[where], lse_log2_gmem.at[where])

    for_each_piece(compute_piece)
    plgpu.wait_smem_to_gmem(0)


def _help(plan: Plan, for_each_piece, half: Half, lse_log2_gmem):
    """The compute warpgroup that hands its results over, by leaving them where the results over all keys will be."""
    part, unit = lax.axis_index("part"), lax.axis_index("unit")

    def help_with_piece(i, piece: Piece, steps_done):
        plgpu.barrier_wait(half.smem.q_filled)
        out, lse_log2 = _attend(plan, half, piece, steps_done)
        where = piece.seq + part, unit
        _device.store(half.smem.out, out)
        _device.store(lse_log2_gmem.at[where], lse_log2)
        plgpu.barrier_arrive(half.handed)

    for_each_piece(help_with_piece)


def _merged(half: Half, out, lse_log2, lse_log2_gmem):
    """(out, lse_log2) over all keys of a piece, from these over half of them and what `_help` hands over."""
    plgpu.barrier_wait(half.handed)
    others = plgpu.load(half.smem.out, layout=plgpu.Layout.WGMMA), _device.load(lse_log2_gmem, ROWS)
    top = jnp.maximum(lse_log2, others[1])
    sees_any = top > -jnp.inf
    shares = [jnp.exp2(x - jnp.where(sees_any, top, 0.0)) for x in (lse_log2, others[1])]
    total = jnp.where(sees_any, shares[0] + shares[1], 1.0)
    out = out * per_row(shares[0] / total, out.shape) + others[0] * per_row(shares[1] / total, out.shape)
    return out, top + jnp.log2(total)


def _split_query(half: Half):
    """Splits a query that has arrived into its terms, of which both warpgroups need both. Returns the
    number that a 1 in products of these terms and of stored keys stands for."""
    q, terms = half.smem.q, half.terms
    panels = [plgpu.load(q.at[p], layout=plgpu.Layout.WGMMA) for p in range(q.shape[0])]
    panels = [panel.astype(jnp.float32) for panel in panels]
    top = functools.reduce(jnp.maximum, [jnp.abs(panel).max(axis=1) for panel in panels])
    octave = jnp.round(jnp.log2(jnp.maximum(top, 2.0**-100)))
    together = terms.shape[3] // PIECE
    for i in range(terms.shape[1]):
        left = jnp.concatenate(panels[i * together : (i + 1) * together], axis=1)
        left = left * per_row(jnp.exp2(NEAR_END - octave), left.shape)
        for term in range(TERMS):
            rounded = left.astype(E4M3)
            if term % half.num_wgs == half.which:
                terms[term, i] = rounded
            left = left - rounded.astype(jnp.float32)
    plgpu.commit_smem()
    plgpu.barrier_arrive(half.terms_filled)
    plgpu.barrier_wait(half.terms_filled)
    return half.k_scale * jnp.exp2(octave - NEAR_END)


def _attend(plan: Plan, half: Half, piece: Piece, steps_done):
    """(out, lse_log2) of a piece over this warpgroup's keys: block after block, each of them waited for."""
    problem, block_kv, smem = plan.problem, plan.config.block_kv, half.smem
    logit_scale = _split_query(half)
    shape, low = (WG_ROWS, half.num_keys), plan.first_seen(piece.kv_len)

    def step(step, carry, masked: bool):
        acc, m_i, l_i = carry
        first = (piece.first + step) * block_kv
        slot = smem.ring.wait(steps_done + step)

        def logits(s_ref):
            _, panels, _, size = half.terms.shape
            for i in range(panels):
                keys = smem.k.at[slot, half.keys, pl.ds(i * size, size)].T
                for term in range(TERMS):
                    plgpu.wgmma(s_ref, half.terms.at[term, i], keys)
            return s_ref[...]

        s, scale_log2 = problem.scored(pl.run_scoped(logits, plgpu.ACC(shape, jnp.float32)), logit_scale)
        smem.ring.release(steps_done + step)
        if masked:
            token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first + half.keys.start
            s = jnp.where((token >= low) & (token < piece.kv_len), s, -jnp.inf)
        values = half.wide.at[half.wide_ring.wait(steps_done + step), half.keys]
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2, masked)
        acc = add_product(acc * per_row(alpha, acc.shape), p.astype(values.dtype), values, problem.interpreted)
        half.wide_ring.release(steps_done + step)
        return acc, m_i, l_i

    return finish(*over_blocks(plan, piece, low, step), half.v_scale)


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def pieces(q, k_pages, v_pages, block_tables, kv_lens, k_scale, v_scale, *, plan: Plan, params):
    """As `kernel.pieces`. The scales are float32 (kv_heads,)."""
    ends, seqs = ends_and_seqs(plan, kv_lens)
    operands = kv_lens, block_tables, q, k_pages, v_pages, k_scale, v_scale
    out, lse_log2 = launch(_kernel, 2 + plan.fp8_compute_wgs, scratch(plan), plan, params, ends, seqs, *operands)
    return ends, out, lse_log2
