# SPDX-License-Identifier: Apache-2.0
"""The compute warpgroup of a forward kernel, in the steps that chapters 11 and 11b build.

    p = exp2(s scale_log2 - m_i),   acc = acc alpha + p v,   l_i = l_i alpha + sum p,   alpha = exp2(m_old - m_i)

A warpgroup keeps 64 rows of queries, and goes through the blocks of keys and values that its tile sees, the last block
first. `m_i` is the largest base-2 logit of each row so far, `l_i` the sum of its exponentials, `acc` the sum of its
weighted values, not yet divided; `p` has the weights of the last block, still to be multiplied by its values. With
`Config.sums_by_thread` no thread needs another's weights before `finish` adds them up.

To add a bias to the logits: in `Work.softmax`, which says how. It needs a field of `Work`, as `sinks` is one, for where
the bias of the tile lies. For gradients add b LOG2E to the exponent where `backward/` computes p, not to s: with a soft
cap s is the tanh, which its derivative reads again. For dk and dv s is transposed, and so must the bias be.

To add a second accumulator, if registers hold it: everywhere that `acc` stands. These are `nothing_seen`, the carry of
all steps, its product and its rescaling in `overlapped_step`, where `wait_n` counts the products that may still run,
`last_step` and `finish`; then, for its result, `Shared.round_out` and the kernel's `out_type`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._device import PIECE, ROWS, Index
from .core import WG_ROWS, BlockConfig, Problem, Shared, Span, per_row

SUMS = 8  # Columns of the smallest product: of each such eight a thread has two neighbours.


def softmax_step(s, m_i, l_i, scale_log2, masked: bool, octaves: float = 0.0):
    """A block's weights, in float32, and what becomes of the rest: (p, alpha, m_i, l_i). `scale_log2` is a
    number, or one for each row. `octaves` is log2 of the scale of p, and with it of the sums. `l_i` is one sum for each
    row, or, (rows, SUMS), `SUMS` of them."""
    m_new = jnp.maximum(m_i, s.max(axis=1) * scale_log2)
    shift = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
    # One multiply-add and one exponential each.
    p = jnp.exp2(s * per_row(scale_log2, s.shape) - per_row(shift - octaves, s.shape))
    alpha = jnp.exp2(m_i - shift)
    if l_i.ndim == 1:
        return p, alpha, m_new, l_i * alpha + p.sum(axis=1)
    slices = [p[:, i : i + SUMS] for i in range(0, p.shape[1], SUMS)]
    return p, alpha, m_new, l_i * per_row(alpha, l_i.shape) + functools.reduce(jnp.add, slices)


def add_product(acc, p, v_smem, interpreted: bool):
    """acc + p v, with p from registers. `_device.product` computes the same with one more WARPGROUP.ARRIVE per step."""
    if interpreted:  # It wants both operands of WGMMA in shared memory.
        acc = acc + jnp.dot(p, v_smem[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # TMA may now overwrite the values that were read here.
        return acc
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_smem))(plgpu.ACC.init(acc))


def nothing_seen(columns: int, sinks=None, by_thread: bool = False):
    """(acc, m_i, l_i) before the first block, laid out as the products are. A sink, a base-2 logit for each row, counts
    as a key whose value is zero. `by_thread`: a row of `l_i` has `SUMS` sums, each of every eighth weight."""
    full = lambda shape, x, layout: plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)
    m_i = full((WG_ROWS,), -jnp.inf, ROWS) if sinks is None else sinks
    weight = 0.0 if sinks is None else 1.0
    if by_thread:
        l_i = full((WG_ROWS, SUMS), weight / SUMS, plgpu.Layout.WGMMA)
    else:
        l_i = full((WG_ROWS,), weight, ROWS)
    return full((WG_ROWS, columns), 0.0, plgpu.Layout.WGMMA), m_i, l_i


def finish(acc, m_i, l_i, value_scale=1.0):
    """(out, lse_log2), float32; 0 and -inf for a row that sees no key."""
    l_i = l_i if l_i.ndim == 1 else l_i.sum(axis=1)
    sees_any = l_i != 0  # NaN stays NaN.
    out = acc * per_row(jnp.where(sees_any, value_scale / l_i, 0.0), acc.shape)
    return out, jnp.where(sees_any, m_i + jnp.log2(jnp.where(sees_any, l_i, 1.0)), -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Work:
    """A warpgroup's rows of a tile, and what it has at hand. Step i takes block `span.end - 1 - i`."""

    problem: Problem
    config: BlockConfig
    span: Span
    shared: Shared
    wg: Index  # Its number.
    first_row: Index  # The first of its rows, as `span.blocks` counts them.
    steps_done: Index  # Steps of earlier tiles.
    sinks: jax.Array | None = None  # Base-2 logits, one for each row.
    logit_scale: jax.Array | float = 1.0  # Dequantisation scale of q kᵀ, above 0.
    value_scale: jax.Array | float = 1.0  # Dequantisation scale of the values.

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the products with a block of keys."""
        return WG_ROWS, self.config.block_kv

    def values(self, step):
        """The slot of v that has the values of a step."""
        return self.shared.v.at[self.shared.values.slot(self.steps_done + step)]

    def queue_logits(self, s_ref, slot):
        """Starts q kᵀ."""
        for p in range(self.problem.panels):
            plgpu.wgmma(s_ref, self.shared.q.at[self.wg, p], self.shared.key_panel(slot, p).T)

    def nothing_seen(self, columns: int):
        return nothing_seen(columns, self.sinks, self.config.sums_by_thread)

    def softmax(self, s, m_i, l_i, step, masked: bool, octaves: float = 0.0):
        """`softmax_step` of the products s of a step.

        A bias b of the logits is added before the mask: s + b * LOG2E / per_row(scale_log2, s.shape). If all of a row
        may be -inf, `softmax_step` must be told that the block is masked, or the row becomes NaN.
        """
        s, scale_log2 = self.problem.scored(s, self.logit_scale)
        if masked:
            s = jnp.where(self.span.mask(self.first_row, self.span.end - 1 - step), s, -jnp.inf)
        return softmax_step(s, m_i, l_i, scale_log2, masked, octaves)


def pass_by(work: Work, step):
    """A step in which none of the rows sees a key: the turn and the slots are passed on."""
    work.shared.turns.take(work.wg)
    work.shared.turns.pass_on(work.wg)
    for ring in (work.shared.keys, work.shared.values):
        ring.wait(work.steps_done + step)
        ring.release(work.steps_done + step)


def first_step(work: Work, step):
    """(acc, m_i, l_i, p) after the first block that the rows see."""
    keys, turns = work.shared.keys, work.shared.turns

    def logits(s_ref):
        slot = keys.wait(work.steps_done + step)
        turns.take(work.wg)
        work.queue_logits(s_ref, slot)
        turns.pass_on(work.wg)
        return s_ref[...]

    s = pl.run_scoped(logits, plgpu.ACC(work.shape, jnp.float32))
    keys.release(work.steps_done + step)
    acc, m_i, l_i = work.nothing_seen(work.problem.panels * PIECE)
    p, _, m_i, l_i = work.softmax(s, m_i, l_i, step, work.span.cuts.any)
    return acc, m_i, l_i, p.astype(work.problem.dtype)


def overlapped_step(work: Work, masked: bool, step, carry):
    """q kᵀ of this block and p v of the block before are started together: the tensor cores do not wait in between.

    ptxas puts the wait for p v before the exponentials (`dense/kernel.py`): they overlap with products of other
    warpgroups.
    """
    acc, m_i, l_i, p = carry
    count, interpreted, turns = work.steps_done + step, work.problem.interpreted, work.shared.turns
    slot = work.shared.keys.wait(count)
    work.shared.values.wait(count - 1)
    turns.take(work.wg)

    def products(s_ref, acc_ref):
        with jax.named_scope("wgmma"):
            work.queue_logits(s_ref, slot)
            if not interpreted:
                acc_ref[...] = acc
                plgpu.wgmma(acc_ref, p, work.values(step - 1))
        turns.pass_on(work.wg)
        s = s_ref[...] if interpreted else plgpu.wgmma_accumulator_load(s_ref, wait_n=1)  # p v may still run.
        work.shared.keys.release(count)
        with jax.named_scope("softmax"):
            p_new, alpha, m_new, l_new = work.softmax(s, m_i, l_i, step, masked)
        sums = add_product(acc, p, work.values(step - 1), True) if interpreted else acc_ref[...]  # Waits for p v.
        work.shared.values.release(count - 1)
        # Nothing may write the registers of p before the product has ended.
        sums, alpha, p_new = lax.optimization_barrier((sums, alpha, p_new))
        return sums * per_row(alpha, sums.shape), m_new, l_new, p_new.astype(p.dtype)

    return pl.run_scoped(products, plgpu.ACC(work.shape, jnp.float32), plgpu.ACC(acc.shape, jnp.float32))


def last_step(work: Work, step, carry):
    """(acc, m_i, l_i) with the values of the last block, whose weights `carry` has."""
    acc, m_i, l_i, p = carry
    turns, values = work.shared.turns, work.shared.values
    values.wait(work.steps_done + step)
    turns.take(work.wg)

    def product(acc_ref):
        plgpu.wgmma(acc_ref, p, work.values(step))
        turns.pass_on(work.wg)

    if work.problem.interpreted:
        acc = add_product(acc, p, work.values(step), True)
        turns.pass_on(work.wg)
    else:
        acc = pl.run_state(product)(plgpu.ACC.init(acc))
    values.release(work.steps_done + step)
    return acc, m_i, l_i


def middle_steps(work: Work, one_step, carry, start, whole_start, whole_stop, stop):
    """The steps after the first, each `one_step(work, masked, step, carry)`: masked blocks from `start` on, whole ones,
    and masked ones up to `stop`. The masked blocks of both ends share one loop, which is compiled once."""
    cuts = work.span.cuts
    loop = lambda first, end, carry, masked: lax.fori_loop(first, end, functools.partial(one_step, work, masked), carry)
    if cuts.all:
        return loop(start, stop, carry, True)
    if not cuts.first:
        carry = loop(start, whole_start, carry, True) if cuts.last else carry
        return loop(whole_start, whole_stop, carry, False)

    def masked_then_whole(i, carry):
        """Round 0: the masked blocks at the end, and all whole ones. Round 1: the masked blocks at the start."""
        in_round = lambda zero, one: jnp.where(i == 0, zero, one)
        middle = in_round(whole_start, stop)
        carry = loop(in_round(start, whole_stop), middle, carry, True)
        return loop(middle, in_round(whole_stop, stop), carry, False)

    return lax.fori_loop(0, 2, masked_then_whole, carry)


def attend(work: Work):
    """(out, lse_log2) of a compute warpgroup's rows, in float32; 0 and -inf for a row that sees no key."""
    start, whole_start, whole_stop, stop = work.span.phases(work.first_row)
    if work.problem.has_window:
        pl.loop(0, start)(functools.partial(pass_by, work))
    carry = first_step(work, start)
    carry = middle_steps(work, overlapped_step, carry, start + 1, whole_start, whole_stop, stop)
    if work.shared.frees_early:
        work.shared.free_query(work.wg)
    sums = last_step(work, stop - 1, carry)
    if work.problem.has_window:
        pl.loop(stop, work.span.steps)(functools.partial(pass_by, work))
    return finish(*sums, work.value_scale)
