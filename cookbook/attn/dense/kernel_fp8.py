# SPDX-License-Identifier: Apache-2.0
"""The kernel of `attention_fp8`: the roles and barriers of `kernel.py` on the tensor cores' 8-bit instructions.

The steps of a compute warpgroup differ from `steps.py` in four things:

    v           Both operands of an 8-bit product have the summed index along their rows, so v comes transposed,
                (batch, heads, head_dim, positions): `transpose_fp8.py` has the kernel, which runs first.
    p           goes to the product in registers. A thread holds other columns of s than an 8-bit operand wants there:
                of 16 keys 2 and 2, eight apart, where the operand wants 4 neighbours. Instead of moving weights between
                threads, the transposition moves keys: p stays where it is, and its columns meet the right values.
    2 ** OCTAVES   times its size is what p is rounded at: e4m3 ends at 448 and at 2 ** -9, and weights go up to 1.
    acc         Tensor cores add 8-bit products with about 14 bits. Each block's p v is therefore a sum of its own, and
                the CUDA cores add it to acc in float32. That is the multiply-add that rescaling acc is elsewhere.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from .. import core
from ..core import LOG2E, PIECE, REGISTERS, WG_ROWS, Shared, per_row
from ..steps import Work, finish, middle_steps, pass_by
from .kernel import launch, load_keys, load_queries
from .plan import Plan, Tile, each_tile
from .transpose_fp8 import as_operand, transposed

OCTAVES = 8  # Weights are rounded at up to 256.
STRIP = 128  # Columns of values that are added at once: their product has to fit into registers beside acc.


@dataclasses.dataclass(frozen=True)
class Config(core.BlockConfig):
    overlap: bool = True  # Whether q kᵀ and p v of the block before run together, which takes registers for both.

    block_multiple: ClassVar[int] = 32

    @property
    def value_panel(self) -> int:
        """Keys of a row of transposed values that are swizzled together."""
        return next(size for size in (128, 64, 32) if self.block_kv % size == 0)


def scratch(plan: Plan, out_dtype) -> dict:
    """Shared memory of a block, and its barriers."""
    p, c = plan.problem, plan.config
    tiles = lambda shape, dtype: _device.row_tiles(shape, dtype, p.interpreted)
    key_tiles = c.num_stages, p.panels, c.block_kv, p.panel
    value_tiles = c.num_stages, c.block_kv // c.value_panel, p.head_dim, c.value_panel
    smem = dict(k_smem=tiles(key_tiles, p.dtype), v_smem=tiles(value_tiles, p.dtype))
    out = tiles((c.compute_wgs, p.head_dim // PIECE, WG_ROWS, PIECE), out_dtype)
    return core.scratch(p, c, smem, p.panels, p.panels, v_copies=value_tiles[1]) | dict(o_smem=out)


def _kernel(
    table, q_gmem, k_gmem, v_gmem, q_descale, k_descale, v_descale, out_gmem, lse_gmem, *, plan: Plan, **smem
):  # fmt: skip
    role, wgs = lax.axis_index("role"), plan.config.compute_wgs
    shared = Shared.of(plan.config, **smem)
    memory_registers, compute_registers = REGISTERS[wgs]

    @_device.role(role == wgs, decrease_to=memory_registers)
    def _():
        _load(plan, table, shared, q_gmem, k_gmem, v_gmem)

    @_device.role(role < wgs, increase_to=compute_registers)
    def _():
        _compute(plan, table, shared, q_descale, k_descale, v_descale, out_gmem, lse_gmem)


def _load(plan: Plan, table, shared: Shared, q_gmem, k_gmem, v_gmem):
    """The memory warpgroup: a tile's queries, and its blocks of keys and transposed values, the last block first."""
    c = plan.config

    def load_tile(i, tile: Tile, steps_done):
        @pl.loop(0, tile.span.steps)
        def _(step):
            first = (tile.span.end - 1 - step) * c.block_kv
            load_keys(plan, shared, tile, first, shared.keys.acquire(steps_done + step), k_gmem)
            pl.when(step == 0)(lambda: load_queries(plan, shared, tile, i, q_gmem))
            slot = shared.values.acquire(steps_done + step)
            for j in range(c.block_kv // c.value_panel):
                keys = pl.ds(first + j * c.value_panel, c.value_panel)
                source = v_gmem.at[tile.batch, tile.kv_head, :, keys]
                plgpu.copy_gmem_to_smem(source, shared.v_tma.at[slot, j], shared.values.filled.at[slot])

    shared.drain(each_tile(plan, table, {}, load_tile))
    for wg in range(c.compute_wgs):
        plgpu.barrier_wait(shared.q_freed.at[wg])


def _compute(plan: Plan, table, shared: Shared, q_descale, k_descale, v_descale, out_gmem, lse_gmem):
    """A compute warpgroup: its queries of each tile."""
    problem, wg = plan.problem, lax.axis_index("role")
    shared.turns.start(wg)

    def compute_tile(i, tile: Tile, steps_done):
        first_q = tile.first_q + wg * WG_ROWS
        plgpu.barrier_wait(shared.q_filled.at[wg])
        head = tile.batch, tile.kv_head
        scales = q_descale[head] * k_descale[head], v_descale[head]
        out, lse_log2 = _attend(Work(problem, plan.config, tile.span, shared, wg, first_q, steps_done, None, *scales))
        shared.round_out(wg, out)
        for p in range(problem.head_dim // PIECE):
            target = out_gmem.at[tile.batch, pl.ds(first_q, WG_ROWS), tile.head, problem.columns(p, PIECE)]
            plgpu.copy_smem_to_gmem(shared.o_tma.at[wg].at[p], target)
        _device.store(lse_gmem.at[tile.batch, tile.head, pl.ds(first_q, WG_ROWS)], lse_log2 / LOG2E)

    each_tile(plan, table, {}, compute_tile)
    shared.turns.drain(wg)
    plgpu.wait_smem_to_gmem(0)


# The steps of a compute warpgroup. They carry (acc, alpha, m_i, l_i, p): acc, in strips of columns, and its `alpha`
# lag behind p by a block.


def _attend(work: Work):
    """(out, lse_log2) of a compute warpgroup's rows, in float32; 0 and -inf for a row that sees no key."""
    start, whole_start, whole_stop, stop = work.span.phases(work.first_row)
    if work.problem.has_window:
        pl.loop(0, start)(functools.partial(pass_by, work))
    carry = _first_step(work, start)
    one_step = _overlapped_step if work.config.overlap else _separate_step
    carry = middle_steps(work, one_step, carry, start + 1, whole_start, whole_stop, stop)
    work.shared.free_query(work.wg)
    sums = _last_step(work, stop - 1, carry)
    if work.problem.has_window:
        pl.loop(stop, work.span.steps)(functools.partial(pass_by, work))
    return finish(*sums, work.value_scale)


def _first_step(work: Work, step):
    """The carry after the first block that the rows see."""
    head_dim = work.problem.head_dim
    work.shared.keys.wait(work.steps_done + step)
    work.shared.turns.take(work.wg)
    s = _logits(work, step)
    acc, m_i, l_i = work.nothing_seen(min(STRIP, head_dim))
    p, alpha, m_i, l_i = work.softmax(s, m_i, l_i, step, work.span.cuts.any, OCTAVES)
    return (acc,) * pl.cdiv(head_dim, STRIP), alpha, m_i, l_i, as_operand(p, work.problem.interpreted)


def _overlapped_step(work: Work, masked: bool, step, carry):
    """q kᵀ of this block and p v of the block before are started together."""
    (acc,), alpha, m_i, l_i, p = carry
    count, interpreted, turns = work.steps_done + step, work.problem.interpreted, work.shared.turns
    slot = work.shared.keys.wait(count)
    work.shared.values.wait(count - 1)
    turns.take(work.wg)

    def products(s_ref, pv_ref):
        with jax.named_scope("wgmma"):
            work.queue_logits(s_ref, slot)
            if not interpreted:
                _queue_values(work, pv_ref, p, 0, step - 1)
        turns.pass_on(work.wg)
        s = s_ref[...] if interpreted else plgpu.wgmma_accumulator_load(s_ref, wait_n=1)  # p v may still run.
        work.shared.keys.release(count)
        with jax.named_scope("softmax"):
            p_new, *new = work.softmax(s, m_i, l_i, step, masked, OCTAVES)
        pv = _interpreted_product(work, p, 0, step - 1) if interpreted else pv_ref[...]  # Waits for p v.
        work.shared.values.release(count - 1)
        # Nothing may write the registers of p before the product has ended.
        pv, p_new = lax.optimization_barrier((pv, p_new))
        return (acc * per_row(alpha, acc.shape) + pv,), *new, as_operand(p_new, interpreted)

    return pl.run_scoped(products, plgpu.ACC(work.shape, jnp.float32), plgpu.ACC(acc.shape, jnp.float32))


def _separate_step(work: Work, masked: bool, step, carry):
    """p v of the block before, strip after strip, and then q kᵀ of this one."""
    acc, alpha, m_i, l_i, p = carry
    count, shared = work.steps_done + step, work.shared
    shared.values.wait(count - 1)
    shared.turns.take(work.wg)
    acc = tuple(_rescale_and_add(work, strip, alpha, p, i, step - 1) for i, strip in enumerate(acc))
    shared.values.release(count - 1)
    shared.keys.wait(count)
    p, *new = work.softmax(_logits(work, step), m_i, l_i, step, masked, OCTAVES)
    return acc, *new, as_operand(p, work.problem.interpreted)


def _last_step(work: Work, step, carry):
    """(acc, m_i, l_i) with the values of the last block, whose weights `carry` has. As weights and sums are too large,
    m_i becomes smaller."""
    acc, alpha, m_i, l_i, p = carry
    work.shared.values.wait(work.steps_done + step)
    work.shared.turns.take(work.wg)
    is_last = [False] * (len(acc) - 1) + [True]
    acc = [_rescale_and_add(work, strip, alpha, p, i, step, is_last[i]) for i, strip in enumerate(acc)]
    work.shared.values.release(work.steps_done + step)
    return jnp.concatenate(acc, axis=1), m_i - OCTAVES, l_i


def _logits(work: Work, step):
    """q kᵀ of a block that has arrived, in this warpgroup's turn, which ends with it."""
    keys, count = work.shared.keys, work.steps_done + step

    def product(s_ref):
        work.queue_logits(s_ref, keys.slot(count))
        work.shared.turns.pass_on(work.wg)
        return s_ref[...]

    s = pl.run_scoped(product, plgpu.ACC(work.shape, jnp.float32))
    keys.release(count)
    return s


def _values(work: Work, strip: int, step):
    """Columns of the values of a step that are added at once, transposed, one panel of the keys after the other."""
    return work.values(step).at[:, pl.ds(strip * STRIP, min(STRIP, work.problem.head_dim))]


def _queue_values(work: Work, pv_ref, p, strip: int, step):
    """Starts p v of a strip of columns."""
    v = _values(work, strip, step)
    for i in range(v.shape[0]):
        plgpu.wgmma(pv_ref, p[:, i * v.shape[2] : (i + 1) * v.shape[2]], v.at[i].T)


def _interpreted_product(work: Work, p, strip: int, step):
    """p v, in the interpreter, which wants both operands of WGMMA in shared memory."""
    v = _values(work, strip, step)[...].swapaxes(0, 1)
    pv = jnp.dot(p.astype(jnp.float32), v.reshape(len(v), -1).astype(jnp.float32).T)
    plgpu.commit_smem()  # TMA may now overwrite the values that were read here.
    return pv


def _rescale_and_add(work: Work, acc, alpha, p, strip: int, step, ends_turn: bool = False):
    """acc alpha + p v of a strip of columns. With `ends_turn` the turn is passed on once the product has been
    started."""

    def product(pv_ref):
        _queue_values(work, pv_ref, p, strip, step)
        if ends_turn:
            work.shared.turns.pass_on(work.wg)
        return pv_ref[...]

    if work.problem.interpreted:
        pv = _interpreted_product(work, p, strip, step)
        if ends_turn:
            work.shared.turns.pass_on(work.wg)
    else:
        pv = pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))
    return acc * per_row(alpha, acc.shape) + pv


@functools.partial(jax.jit, static_argnames=("plan", "num_sms", "params", "return_lse", "out_dtype"))
def forward(
    q, k, v, q_descale, k_descale, v_descale, *, plan: Plan, num_sms: int, params, return_lse: bool, out_dtype
):  # fmt: skip
    """As `kernel.forward`. Each descale is float32 (batch, kv_heads)."""
    v = transposed(v, interpreted=plan.problem.interpreted, params=params)
    operands = q, k, v, q_descale, k_descale, v_descale
    out, lse = launch(_kernel, scratch(plan, out_dtype), plan, num_sms, params, out_dtype, *operands)
    return out, lse[:, :, : plan.num_q] if return_lse else None
