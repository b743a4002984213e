# SPDX-License-Identifier: Apache-2.0
"""The compute warpgroup of `dense/kernel_fp8.py`: the steps of `steps.py` on the tensor cores' 8-bit instructions."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import steps
from .core import E4M3, per_row

OCTAVES = 8  # Weights are rounded at up to 256.
PART = 128  # Columns of values that are added at once: their product has to fit into registers beside acc.


def as_operand(p, interpreted: bool):
    """Weights as the first operand of an 8-bit product, in e4m3, every 16 columns in an order of their own: as numbers
    (half, pair, which) of 2, 4 and 2, those of columns become (pair, half, which). No number leaves its thread."""
    if interpreted:
        return p.reshape(p.shape[0], -1, 2, 4, 2).swapaxes(2, 3).reshape(p.shape).astype(E4M3)
    layout = plgpu.Layout.WGMMA_8BIT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,), return_type=plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=layout)
    )
    def rename(_, p):
        wide = layout.to_mgpu()
        # (64 rows and 16 columns, which 8 of the columns, which 8 of the rows): two neighbouring columns each.
        pairs = p.registers.reshape(-1, 2, 2)
        quads = np.empty((len(pairs), 2), dtype=object)
        for i, row in np.ndindex(quads.shape):
            quads[i, row] = mgpu.utils.vector_concat([pairs[i, 0, row], pairs[i, 1, row]])
        return mgpu.FragmentedArray(
            _registers=quads.reshape(wide.registers_shape(p.shape)), _layout=wide, _is_signed=None
        )

    return rename(p).astype(E4M3)


class Work(steps.Work):
    def logits(self, step):
        """q kᵀ of a block that has arrived, in this warpgroup's turn, which ends with it."""
        keys, count = self.shared.keys, self.before + step

        def product(s_ref):
            self.queue_logits(s_ref, keys.slot(count))
            self.shared.turns.pass_on(self.wg)
            return s_ref[...]

        s = pl.run_scoped(product, plgpu.ACC(self.shape, jnp.float32))
        keys.free(count)
        return s

    def values_of(self, part: int, step):
        """Columns of the values of a step that are added at once, transposed, a piece of the keys after the other."""
        return self.values(step).at[:, pl.ds(part * PART, min(PART, self.plan.problem.head_dim))]

    def queue_product(self, pv_ref, p, part: int, step):
        """Starts p v of a part of the columns."""
        v = self.values_of(part, step)
        for i in range(v.shape[0]):
            plgpu.wgmma(pv_ref, p[:, i * v.shape[2] : (i + 1) * v.shape[2]], v.at[i].T)

    def product(self, p, part: int, step):
        """p v, in the interpreter, which wants both operands of WGMMA in shared memory."""
        v = self.values_of(part, step)[...].swapaxes(0, 1)
        pv = jnp.dot(p.astype(jnp.float32), v.reshape(len(v), -1).astype(jnp.float32).T)
        plgpu.commit_smem()  # TMA may now overwrite the values that were read here.
        return pv

    def add_product(self, acc, alpha, p, part: int, step, queued=lambda: None):
        """acc alpha + p v of a part of the columns; calls `queued` when the product has been started."""

        def product(pv_ref):
            self.queue_product(pv_ref, p, part, step)
            queued()
            return pv_ref[...]

        if self.plan.problem.interpreted:
            queued()
            pv = self.product(p, part, step)
        else:
            pv = pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))
        return acc * per_row(alpha, acc.shape) + pv


def first_step(work: Work, step):
    """(acc, alpha, m_i, l_i, p) after the first block that the rows see. acc, in parts, and its `alpha` lag behind p by
    a block."""
    head_dim = work.plan.problem.head_dim
    work.shared.keys.wait(work.before + step)
    work.shared.turns.take(work.wg)
    s = work.logits(step)
    acc, m_i, l_i = work.nothing_seen(min(PART, head_dim))
    p, alpha, m_i, l_i = work.softmax(s, m_i, l_i, step, work.plan.cuts.any, OCTAVES)
    return (acc,) * pl.cdiv(head_dim, PART), alpha, m_i, l_i, as_operand(p, work.plan.problem.interpreted)


def overlapped_step(work: Work, masked: bool, step, carry):
    """q kᵀ of this block and p v of the block before are started together."""
    (acc,), alpha, m_i, l_i, p = carry
    count, interpreted, turns = work.before + step, work.plan.problem.interpreted, work.shared.turns
    slot = work.shared.keys.wait(count)
    work.shared.values.wait(count - 1)
    turns.take(work.wg)

    def products(s_ref, pv_ref):
        with jax.named_scope("wgmma"):
            work.queue_logits(s_ref, slot)
            if not interpreted:
                work.queue_product(pv_ref, p, 0, step - 1)
        turns.pass_on(work.wg)
        s = s_ref[...] if interpreted else plgpu.wgmma_accumulator_load(s_ref, wait_n=1)  # p v may still run.
        work.shared.keys.free(count)
        with jax.named_scope("softmax"):
            p_new, *new = work.softmax(s, m_i, l_i, step, masked, OCTAVES)
        pv = work.product(p, 0, step - 1) if interpreted else pv_ref[...]  # Waits for p v.
        work.shared.values.free(count - 1)
        # Nothing may write the registers of p before the product has ended.
        pv, p_new = lax.optimization_barrier((pv, p_new))
        return (acc * per_row(alpha, acc.shape) + pv,), *new, as_operand(p_new, interpreted)

    return pl.run_scoped(products, plgpu.ACC(work.shape, jnp.float32), plgpu.ACC(acc.shape, jnp.float32))


def separate_step(work: Work, masked: bool, step, carry):
    """p v of the block before, part after part, and then q kᵀ of this one."""
    acc, alpha, m_i, l_i, p = carry
    count, shared = work.before + step, work.shared
    shared.values.wait(count - 1)
    shared.turns.take(work.wg)
    acc = tuple(work.add_product(part, alpha, p, i, step - 1) for i, part in enumerate(acc))
    shared.values.free(count - 1)
    shared.keys.wait(count)
    p, *new = work.softmax(work.logits(step), m_i, l_i, step, masked, OCTAVES)
    return acc, *new, as_operand(p, work.plan.problem.interpreted)


def last_step(work: Work, step, carry):
    """(acc, m_i, l_i) with the values of the last block, whose weights `carry` has. As weights and sums are too large,
    m_i becomes smaller."""
    acc, alpha, m_i, l_i, p = carry
    turns, values = work.shared.turns, work.shared.values
    values.wait(work.before + step)
    turns.take(work.wg)
    passed_on = [lambda: None] * (len(acc) - 1) + [lambda: turns.pass_on(work.wg)]
    acc = [work.add_product(part, alpha, p, i, step, passed_on[i]) for i, part in enumerate(acc)]
    values.free(work.before + step)
    return jnp.concatenate(acc, axis=1), m_i - OCTAVES, l_i
