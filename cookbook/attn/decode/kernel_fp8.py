# SPDX-License-Identifier: Apache-2.0
"""The kernel of `paged_attention` over pages of 8 bits: `kernel.py` with two warpgroups more.

Keys go to the tensor cores as they are. The other operand of an 8-bit product has 8 bits, too, and a bfloat16 query has
8 significant ones where e4m3 has 4; so the query is the sum of two terms in e4m3, each times the same power of two, by
which its row's largest number comes near the end of e4m3. Both products go to the same sums.

Values would have to lie transposed for 8-bit products. They become float16, which holds every e4m3 exactly. The weights
are float16, too: one below 2**-25 of the largest so far is zero.

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

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from .. import core
from ..cache.pages_fp8 import widen
from ..core import E4M3, PIECE, ROWS, TILED, WG_ROWS, div, per_row
from . import kernel as decode
from . import plan as decode_parts
from .kernel import COMPUTE, MEMORY

CONVERT, HELP = 2, 3
TERMS, WIDE_SLOTS = 2, 2
WIDE = jnp.float16
# Registers of a thread, with so many compute warpgroups.
REGISTERS = {2: {COMPUTE: 168, HELP: 168, MEMORY: 72, CONVERT: 96}, 1: {COMPUTE: 240, MEMORY: 80, CONVERT: 104}}
NEAR_END = 8  # A row's largest number lies within half an octave of 2 ** NEAR_END; e4m3 ends at 448.


@dataclasses.dataclass(frozen=True)
class Plan(decode_parts.Plan):
    @property
    def compute_wgs(self) -> int:
        return 2 if self.config.block_kv == 128 else 1

    @property
    def piece(self) -> int:
        """Keys' or values' 8-bit numbers that are swizzled together."""
        return min(128, self.problem.head_dim)

    @property
    def scratch(self) -> dict:
        p, c, copies = self.problem, self.config, 2 * self.pages.copies
        narrow = dict(transforms=core.tiling(self.piece, E4M3))
        ring = plgpu.SMEM((c.num_stages, c.block_kv, p.head_dim), E4M3, **narrow)
        return self.pair_scratch | dict(
            k_smem=ring,
            v_smem=ring,
            terms_smem=plgpu.SMEM((TERMS, p.head_dim // self.piece, WG_ROWS, self.piece), E4M3, **narrow),
            wide_smem=plgpu.SMEM((WIDE_SLOTS, c.block_kv, p.head_dim), WIDE, **TILED),
            filled=plgpu.Barrier(num_arrivals=copies, num_barriers=c.num_stages),
            freed=plgpu.Barrier(num_arrivals=1 + self.compute_wgs, num_barriers=c.num_stages),
            wide_filled=plgpu.Barrier(num_barriers=WIDE_SLOTS),
            wide_freed=plgpu.Barrier(num_arrivals=self.compute_wgs, num_barriers=WIDE_SLOTS),
            terms_filled=plgpu.Barrier(num_arrivals=self.compute_wgs),
            handed=plgpu.Barrier(),
        )


@dataclasses.dataclass(frozen=True)
class Smem(decode.Smem):
    terms: object  # (TERMS, pieces, 64, piece): the query in e4m3.
    wide: object  # (WIDE_SLOTS, block_kv, head_dim): values in 16 bits.
    wide_ring: _device.Ring
    terms_filled: object
    handed: object
    compute_wgs: int
    which: int = 0  # Which part of the keys is this warpgroup's, and, if there are two, which of the terms it writes.
    page_scales: tuple = ()  # The numbers that a 1 in pages of keys, and of values, stands for.

    @property
    def mine(self) -> tuple[int, int]:
        num = self.k.shape[1] // self.compute_wgs
        return self.which * num, num

    def hand_over(self, out, lse_log2, lse_gmem):
        """Leaves results where those of all keys will be."""
        _device.store(self.out, out)
        _device.store(lse_gmem, lse_log2)
        plgpu.barrier_arrive(self.handed)

    def merged(self, out, lse_log2, lse_gmem):
        if self.compute_wgs == 1:
            return out, lse_log2
        plgpu.barrier_wait(self.handed)
        others = plgpu.load(self.out, layout=plgpu.Layout.WGMMA), plgpu.load(lse_gmem, layout=ROWS, optimized=False)
        top = jnp.maximum(lse_log2, others[1])
        sees_any = top > -jnp.inf
        shares = [jnp.exp2(x - jnp.where(sees_any, top, 0.0)) for x in (lse_log2, others[1])]
        total = jnp.where(sees_any, shares[0] + shares[1], 1.0)
        out = out * per_row(shares[0] / total, out.shape) + others[0] * per_row(shares[1] / total, out.shape)
        return out, top + jnp.log2(total)

    def scales(self):
        """Splits a query that has arrived into its terms, of which both warpgroups need both."""
        k_scale, v_scale = self.page_scales
        pieces = [plgpu.load(self.q.at[p], layout=plgpu.Layout.WGMMA) for p in range(self.q.shape[0])]
        pieces = [piece.astype(jnp.float32) for piece in pieces]
        top = functools.reduce(jnp.maximum, [jnp.abs(piece).max(axis=1) for piece in pieces])
        octave = jnp.round(jnp.log2(jnp.maximum(top, 2.0**-100)))
        together = self.terms.shape[3] // PIECE
        for i in range(self.terms.shape[1]):
            left = jnp.concatenate(pieces[i * together : (i + 1) * together], axis=1)
            left = left * per_row(jnp.exp2(NEAR_END - octave), left.shape)
            for term in range(TERMS):
                rounded = left.astype(E4M3)
                if term % self.compute_wgs == self.which:
                    self.terms[term, i] = rounded
                left = left - rounded.astype(jnp.float32)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.terms_filled)
        plgpu.barrier_wait(self.terms_filled)
        return k_scale * jnp.exp2(octave - NEAR_END), v_scale

    def queue_logits(self, s_ref, slot):
        _, pieces, _, piece = self.terms.shape
        for i in range(pieces):
            keys = self.k.at[slot, pl.ds(*self.mine), pl.ds(i * piece, piece)].T
            for term in range(TERMS):
                plgpu.wgmma(s_ref, self.terms.at[term, i], keys)

    def free_keys(self, count):
        self.ring.free(count)

    def values(self, problem, count, seen):
        return self.wide.at[self.wide_ring.wait(count), pl.ds(*self.mine)]

    def free_values(self, count):
        self.wide_ring.free(count)


def _kernel(
    ends, seqs, kv_lens, block_tables, q_gmem, k_gmem, v_gmem, k_scale, v_scale, out_gmem, lse_gmem, *, plan: Plan,
    q_and_out, k_smem, v_smem, terms_smem, wide_smem, q_filled, q_freed, filled, freed, wide_filled,
    wide_freed, terms_filled, handed,
):  # fmt: skip
    role, part = lax.axis_index("role"), lax.axis_index("part")
    query = q_and_out if not plan.problem.interpreted else (q_and_out[0], *q_and_out)
    ring, wide_ring = (
        _device.Ring(filled, freed, plan.config.num_stages),
        _device.Ring(wide_filled, wide_freed, WIDE_SLOTS),
    )
    kv_head = div(lax.axis_index("unit"), plan.chunks)
    smem = functools.partial(
        Smem, *query, *[k_smem] * 2, *[v_smem] * 3, q_filled, q_freed, ring, terms_smem, wide_smem, wide_ring,
        terms_filled, handed, plan.compute_wgs,
    )  # fmt: skip
    registers = REGISTERS[plan.compute_wgs]
    scales = lambda: (k_scale[kv_head], v_scale[kv_head])
    each_piece = functools.partial(
        decode._each_piece, plan, kv_lens, lambda: decode_parts.Part(plan, ends, seqs, kv_lens, part)
    )

    @pl.when(role == COMPUTE)
    def _():
        plgpu.set_max_registers(registers[COMPUTE], action="increase")
        decode._compute(plan, part, each_piece, smem(0, scales()), out_gmem, lse_gmem)

    if plan.compute_wgs == 2:

        @pl.when(role == HELP)
        def _():
            plgpu.set_max_registers(registers[HELP], action="increase")
            _help(plan, each_piece, smem(1, scales()), lse_gmem)

    @pl.when(role == MEMORY)
    def _():
        plgpu.set_max_registers(registers[MEMORY], action="decrease")
        decode._load(plan, each_piece, smem(), block_tables, q_gmem, k_gmem, v_gmem)

    @pl.when(role == CONVERT)
    def _():
        plgpu.set_max_registers(registers[CONVERT], action="decrease")
        _convert(plan, each_piece, smem())


def pieces(*args, plan: Plan, params):
    """As `decode.pieces`."""
    return decode.pieces(*args, plan=plan, params=params, kernel=_kernel, roles=2 + plan.compute_wgs)


def _help(plan: Plan, each_piece, smem: Smem, lse_gmem):
    """The compute warpgroup that hands its results over."""
    part, unit = lax.axis_index("part"), lax.axis_index("unit")

    def help_with_piece(i, piece, before):
        plgpu.barrier_wait(smem.q_filled)
        results = decode._attend(plan, smem, piece, before, *smem.scales())
        smem.hand_over(*results, lse_gmem.at[piece.seq + part, unit])

    each_piece(help_with_piece)


def _convert(plan: Plan, each_piece, smem: Smem):
    """The converting warpgroup."""
    block_kv = plan.config.block_kv

    def convert_piece(i, piece, before):
        low = 0 if plan.problem.left is None else jnp.maximum(piece.kv_len - 1 - plan.problem.left, 0)

        @pl.loop(0, piece.steps)
        def _(step):
            slot, to = smem.ring.wait(before + step), smem.wide_ring.fill(before + step)
            first = (piece.first + step) * block_kv
            seen, whole = (low - first, piece.kv_len - first), (first >= low) & (first + block_kv <= piece.kv_len)
            pl.when(whole)(lambda: widen(smem.v.at[slot], smem.wide.at[to]))
            pl.when(~whole)(lambda: widen(smem.v.at[slot], smem.wide.at[to], seen))
            plgpu.commit_smem()
            smem.ring.free(before + step)
            plgpu.barrier_arrive(smem.wide_ring.filled.at[to])

    count, _ = each_piece(convert_piece)
    smem.wide_ring.drain(count)
