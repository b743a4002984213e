"""FlashAttention-3, forward: softmax(scale q kᵀ) v without its matrix of weights ever in memory.

    out = softmax(mask(cap(scale q kᵀ))) v,    lse = log sum exp of the same logits

Shapes: query (B, T, N, H), key and value (B, S, K, H), out (B, T, N, H), lse (B, N, T). N is a multiple of K: query
head n reads key head n // (N // K). All are bfloat16 or all float16; logits, sums and lse are float32. H is a multiple
of 8, up to 256. Positions count from the start of both sequences: with `is_causal` query i sees keys 0 to i.

Role table: one block a SM, which computes tile after tile of out, each some queries of one head; the warpgroups are

    memory     one, with few registers: copies queries, and block after block of keys and values into the slots of two
               rings, of the next tile too while this one is computed
    compute    two or three, with the others' registers, each with 64 of the queries. In each step s = q kᵀ of a block
               and acc + p v of the block before are started together, so that nothing lies between them on the tensor
               cores; then the CUDA cores make the next p of s: its row's maximum, exponentials, their sum. (ptxas puts
               the wait for p v before the exponentials; to keep it after them was slower: another warpgroup's products
               fill that time)

Barrier table:

    barrier          arrivals               who waits
    q_filled[wg]     copies of its queries  compute warpgroup, before the first product of a tile
    k_filled[slot]   copies of a block      all compute warpgroups, before s
    v_filled[slot]   copy of a block        all compute warpgroups, before p v
    q_freed[wg]      compute warpgroup      memory, before it copies the queries of the next tile
    k_freed[slot]    compute warpgroups     memory, before it refills the slot
    v_freed[slot]    compute warpgroups     memory, before it refills the slot
    turn[wg]         the warpgroup before   with `in_turns` a compute warpgroup, before its products: while one is at
                                            the tensor cores, the others are at their exponentials

Blocks of keys that a mask excludes for all queries of a tile are neither loaded nor computed, those that it excludes
for a warpgroup's are not computed; only those that it cuts are masked, element by element. Tiles are dealt out
beforehand, the long ones of a causal mask first, so that all SMs end at about the same time, and so that those computed
at the same time share keys in the L2 cache.

Bound by: the tensor cores with heads of 128 and 256, and with heads of 64 the CUDA cores, which have as many
exponentials for half of the products.

Not supported: masks as arrays, biases, dropout. A value with rows of no multiple of 64, or a number of them that is no
multiple of 8, is padded by a copy (TMA). Source: Shah et al., "FlashAttention-3" (2024).
"""

import dataclasses
import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from . import attention_bwd
from .core import (
    COLUMNS,
    LOG2E,
    PIECE,
    ROWS,
    Blocks,
    check_numbers,
    div,
    rem,
    row_tiles,
    segment_masks,
    slot_of,
    views,
    window,
)  # fmt: skip

WG_ROWS = 64  # Queries of a compute warpgroup: the rows of a WGMMA.
REGISTERS = {2: (24, 240), 3: (32, 160)}  # A thread of the memory and of the compute warpgroups, by how many these are.


def attention_reference(
    query, key, value, *, scale=None, is_causal=False, local_window_size=None, logits_soft_cap=None, segment_ids=None,
    kv_segment_ids=None,
):  # fmt: skip
    """(out, lse) in at least float32."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    q, k, v = (x.astype(dtype) for x in (query, key, value))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * (scale or q.shape[-1] ** -0.5)
    s = s if logits_soft_cap is None else logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    left, right = window(is_causal, local_window_size)
    seen = Blocks(k.shape[1], 1, left, right).mask(jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None])
    if segment_ids is not None:
        kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        seen = seen & (segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :])
    sees_any = seen.any(axis=-1, keepdims=True)
    s = jnp.where(seen, s, jnp.where(sees_any, -jnp.inf, 0.0))  # Gradients are finite where nothing is seen, too.
    lse = jnp.where(sees_any[..., 0], jax.nn.logsumexp(s, axis=-1), -jnp.inf)
    p = jnp.where(sees_any, jax.nn.softmax(s, axis=-1), 0.0)
    return jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest"), lse


@dataclasses.dataclass(frozen=True)
class Config:
    block_kv: int = 128  # Keys and values of a step.
    num_stages: int = 2  # Slots of each of the two rings; a power of two costs the least arithmetic.
    compute_wgs: int = 2  # Compute warpgroups, with 64 queries each.
    in_turns: bool = True  # Whether compute warpgroups start their products in turns.

    def __post_init__(self):
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(f"{self.block_kv=} must be a multiple of 64 up to 256 (TMA)")
        if self.num_stages < 2 or self.compute_wgs not in REGISTERS:
            raise ValueError(
                f"{self.num_stages=} must be at least 2 (a block is loaded while another is used), "
                f"{self.compute_wgs=} one of {list(REGISTERS)}"
            )

    @property
    def block_q(self) -> int:
        """Queries of a tile."""
        return WG_ROWS * self.compute_wgs

    def smem_bytes(self, head_dim: int) -> int:
        """The queries, out, both rings, and the barriers."""
        row, barriers = 2 * pl.cdiv(head_dim, PIECE) * PIECE, 4 * self.num_stages + 3 * self.compute_wgs
        queries = self.block_q * (1 if self.out_over_query(head_dim) else 2)
        return (queries + 2 * self.num_stages * self.block_kv) * row + 8 * barriers

    def out_over_query(self, head_dim: int) -> bool:
        """Whether out takes the place of the queries on its way out: where shared memory has no room for both."""
        return head_dim > 128


def default_config(head_dim: int, is_cut: bool = True) -> Config:
    """The configuration for heads of this size, with a causal mask or a window if it `is_cut`."""
    if head_dim <= 64:
        return Config(num_stages=4, compute_wgs=3)
    if head_dim <= 128:
        return Config(in_turns=is_cut)
    return Config(block_kv=64, in_turns=False)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel."""

    batch: int
    num_q: int
    num_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    left: int | None
    right: int | None
    has_segments: bool
    config: Config
    interpreted: bool

    @property
    def pieces(self) -> int:
        """Pieces of a row of a head, 128 bytes each."""
        return pl.cdiv(self.head_dim, PIECE)

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.num_kv, self.config.block_kv, self.left, self.right)

    @property
    def num_q_blocks(self) -> int:
        return pl.cdiv(self.num_q, self.config.block_q)

    @property
    def cuts_last_blocks(self) -> bool:
        """Whether a mask cuts more than one block at the end of those that the rows of a warpgroup see."""
        return self.right not in (None, 0)

    @property
    def cuts_first_blocks(self) -> bool:
        """Whether a mask cuts blocks at the start of those that the rows of a warpgroup see."""
        return self.left is not None or self.has_segments

    @property
    def cuts_blocks(self) -> bool:
        """Whether there is a mask that cuts blocks."""
        return (self.left, self.right) != (None, None) or self.has_segments or self.num_kv % self.config.block_kv != 0

    def tiles(self, lead: int, rows: int = WG_ROWS):
        return row_tiles((lead, self.pieces, rows, PIECE), self.dtype, self.interpreted)

    @property
    def scratch(self) -> dict:
        c = self.config
        barriers = lambda num, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=num)
        transforms = plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(128)
        scratch = dict(
            q_smem=self.tiles(c.compute_wgs),
            k_smem=self.tiles(c.num_stages, rows=c.block_kv),
            v_smem=plgpu.SMEM((c.num_stages, c.block_kv, self.pieces * PIECE), self.dtype, transforms=transforms),
            q_filled=barriers(c.compute_wgs, self.pieces),
            k_filled=barriers(c.num_stages, self.pieces),
            v_filled=barriers(c.num_stages),
            q_freed=barriers(c.compute_wgs),
            k_freed=barriers(c.num_stages, c.compute_wgs),
            v_freed=barriers(c.num_stages, c.compute_wgs),
            turn=barriers(c.compute_wgs),
        )
        return scratch if c.out_over_query(self.head_dim) else scratch | dict(o_smem=self.tiles(c.compute_wgs))

    def schedule(self, num_sms: int) -> np.ndarray:
        """Table of `dealt_out`: blocks work on few heads at a time, so that the L2 cache keeps the heads' keys."""
        first_q = np.arange(self.num_q_blocks) * self.config.block_q
        first, end = self.blocks.seen(first_q, self.config.block_q)
        heads_together = max(1, round(num_sms / self.num_q_blocks))
        steps = tuple(map(int, end - first))
        deals = [
            dealt_out(steps, self.batch * self.num_heads, heads_together * times, num_sms)
            for times in ((1, 2, 4) if len(set(steps)) > 1 else (1,))
        ]
        # Fewer heads at a time stay in the L2 cache better: twice as many have to gain half a percent.
        return min((time * (1 + 0.005 * i), i, table) for i, (time, table) in enumerate(deals))[-1]


@functools.lru_cache
def dealt_out(steps: tuple[int, ...], num_heads: int, heads_together: int, num_blocks: int) -> tuple[float, np.ndarray]:
    """(time, table): when the last block is done, in steps; and for each block an int32 row: how many tiles it has,
    their numbers, and zeros after them.

    Tile `head * len(steps) + i` takes `steps[i]`. Among every `heads_together` heads the longest tiles come first; each
    tile goes to the block that is done with its tiles first.
    """
    heads, i = np.divmod(np.arange(num_heads * len(steps)), len(steps))
    order = np.lexsort((heads, -np.array(steps)[i], heads // heads_together))
    tiles: list[list[int]] = [[] for _ in range(min(num_blocks, len(order)))]
    done = [(0.0, block) for block in range(len(tiles))]
    for tile in order:
        time, block = heapq.heappop(done)
        tiles[block].append(tile)
        heapq.heappush(done, (time + steps[i[tile]] + 1.5, block))  # A tile costs something beside its steps.
    table = np.zeros((len(tiles), 2 + max(map(len, tiles))), np.int32)
    for row, mine in zip(table, tiles, strict=True):
        row[: 1 + len(mine)] = len(mine), *mine
    return max(done)[0], table


class Tile:
    """Where a tile lies: which queries of which head, and which blocks of keys they see."""

    def __init__(self, plan: Plan, number, masks: dict):
        head, q_block = div(number, plan.num_q_blocks), rem(number, plan.num_q_blocks)
        self.batch, self.head = div(head, plan.num_heads), rem(head, plan.num_heads)
        self.kv_head = div(self.head, plan.num_heads // plan.num_kv_heads)
        self.first_q, self.blocks = q_block * plan.config.block_q, plan.blocks
        first, end = self.blocks.seen(self.first_q, plan.config.block_q)
        if plan.has_segments:
            first = jnp.maximum(first, masks["first"][self.batch, q_block])
            end = jnp.minimum(end, masks["end"][self.batch, q_block])
        self.end = jnp.maximum(end, 1)
        self.first = jnp.minimum(first, self.end - 1)  # At least one, if only to find that no key is seen.
        self.steps = self.end - self.first


def _kernel(
    table, q_gmem, k_gmem, v_gmem, masks, out_gmem, lse_gmem, *, plan: Plan, q_smem, k_smem, v_smem, q_filled, k_filled,
    v_filled, q_freed, k_freed, v_freed, turn, o_smem=None,
):  # fmt: skip
    c, role = plan.config, lax.axis_index("role")
    (q_smem, q_tma), (k_smem, k_tma) = (views(smem, plan.interpreted) for smem in (q_smem, k_smem))
    o_smem, o_tma = (q_smem, q_tma) if o_smem is None else views(o_smem, plan.interpreted)
    memory_registers, compute_registers = REGISTERS[c.compute_wgs]

    def for_each_tile(body):
        """Call `body(i, tile, count)` for each tile of this block, after `count` steps. Return the steps of all."""
        block = lax.axis_index("block")

        def one(i, carry):
            number, count = carry
            tile = Tile(plan, number, masks)
            number = table[block, i + 2]  # In flight meanwhile.
            body(i, tile, count)
            return number, count + tile.steps

        return lax.fori_loop(0, table[block, 0], one, (table[block, 1], jnp.int32(0)))[1]

    @pl.when(role == c.compute_wgs)
    def _():
        plgpu.set_max_registers(memory_registers, action="decrease")
        rings = (k_gmem, k_tma, k_filled, k_freed), (v_gmem, v_smem, v_filled, v_freed)
        count = for_each_tile(functools.partial(_load, plan, q_gmem, q_tma, q_filled, q_freed, rings))
        # The last slots are given back too.
        for freed in (k_freed, v_freed):
            wait = lambda step, freed=freed: plgpu.barrier_wait(freed.at[slot_of(plan, step)])
            pl.loop(jnp.maximum(count - c.num_stages, 0), count)(wait)
        for wg in range(c.compute_wgs):
            plgpu.barrier_wait(q_freed.at[wg])

    @pl.when(role < c.compute_wgs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        turns = _mgpu.Turns(turn if c.in_turns else None, c.compute_wgs)
        turns.start(role)

        def one(i, tile, count):
            first_q = tile.first_q + role * WG_ROWS
            plgpu.barrier_wait(q_filled.at[role])
            ring = k_smem, v_smem, k_filled, v_filled, k_freed, v_freed
            free_query = lambda: plgpu.barrier_arrive(q_freed.at[role])
            early = (lambda: None) if c.out_over_query(plan.head_dim) else free_query
            out, lse = compute(plan, tile, first_q, count, q_smem.at[role], ring, turns, masks, early)
            out = out.astype(plan.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The previous tile's out has left o_smem.
            for p in range(plan.pieces):
                o_smem[role, p] = out[:, p * PIECE : (p + 1) * PIECE]
            plgpu.commit_smem()
            for p in range(plan.pieces):
                target = out_gmem.at[tile.batch, pl.ds(first_q, WG_ROWS), tile.head, _lane(plan, p)]
                plgpu.copy_smem_to_gmem(o_tma.at[role, p], target)
            _mgpu.store(lse_gmem.at[tile.batch, tile.head, pl.ds(first_q, WG_ROWS)], lse)
            if c.out_over_query(plan.head_dim):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                free_query()

        for_each_tile(one)
        turns.drain(role)
        plgpu.wait_smem_to_gmem(0)


def _per_row(values, shape):
    return lax.broadcast_in_dim(values, shape, [0])


def _lane(plan: Plan, piece: int):
    """Values of a head that a piece holds. Pallas lets only a traced start go beyond the edge."""
    start = piece * PIECE
    return pl.ds(start if start + PIECE <= plan.head_dim else start + 0 * lax.axis_index("block"), PIECE)


def _load(plan: Plan, q_gmem, q_smem, q_filled, q_freed, rings, i, tile: Tile, count):
    """Memory warpgroup: copy a tile's queries, and its blocks of keys and values, the last block first, into slots as
    they are freed."""
    c = plan.config

    def load_queries():
        for wg in range(c.compute_wgs):
            pl.when(i > 0)(lambda wg=wg: plgpu.barrier_wait(q_freed.at[wg]))
            rows = pl.ds(tile.first_q + wg * WG_ROWS, WG_ROWS)
            for p in range(plan.pieces):
                source = q_gmem.at[tile.batch, rows, tile.head, _lane(plan, p)]
                plgpu.copy_gmem_to_smem(source, q_smem.at[wg, p], q_filled.at[wg])

    @pl.loop(0, tile.steps)
    def _(step):
        slot, rows = slot_of(plan, count + step), pl.ds((tile.end - 1 - step) * c.block_kv, c.block_kv)
        for name, (gmem, smem, filled, freed) in zip("kv", rings, strict=True):
            pl.when(count + step >= c.num_stages)(lambda freed=freed: plgpu.barrier_wait(freed.at[slot]))
            if name == "k":
                for p in range(plan.pieces):
                    source = gmem.at[tile.batch, rows, tile.kv_head, _lane(plan, p)]
                    plgpu.copy_gmem_to_smem(source, smem.at[slot, p], filled.at[slot])
                pl.when(step == 0)(load_queries)
            else:
                plgpu.copy_gmem_to_smem(gmem.at[tile.batch, rows, tile.kv_head], smem.at[slot], filled.at[slot])


def compute(plan: Plan, tile: Tile, first_row, count, q_smem, ring, turns, masks, free_query):
    """(out, lse) of a compute warpgroup's queries in float32; 0 and -inf for a query that sees no key.
    `varlen_attention` calls it too, with its own plan and tiles."""
    role, shape = lax.axis_index("role"), (WG_ROWS, plan.config.block_kv)
    k_smem, v_smem, k_filled, v_filled, k_freed, v_freed = ring
    slot = lambda step: slot_of(plan, count + step)

    # This warpgroup's steps among the tile's, and those of them in which all of its queries see all keys.
    first, end = tile.blocks.seen(first_row, WG_ROWS)
    first = jnp.clip(first, tile.first, tile.end - 1)
    end = jnp.clip(end, first + 1, tile.end)
    whole_first, whole_end = (end, end) if plan.has_segments else tile.blocks.whole(first_row, WG_ROWS, first, end)
    start, stop = tile.end - end, tile.end - first
    whole_start = jnp.maximum(tile.end - whole_end, start + 1)
    whole_stop = jnp.maximum(tile.end - whole_first, whole_start)

    def pass_by(step):
        """A step in which none of the queries sees a key."""
        turns.take(role)
        turns.pass_on(role)
        for filled, freed in ((k_filled, k_freed), (v_filled, v_freed)):
            plgpu.barrier_wait(filled.at[slot(step)])
            plgpu.barrier_arrive(freed.at[slot(step)])

    def add_logits(s_ref, step):
        for p in range(plan.pieces):
            plgpu.wgmma(s_ref, q_smem.at[p], k_smem.at[slot(step), p].T)

    def interpreted_values(acc, p, step):
        """`acc` + p v for the interpreter, whose WGMMA wants both operands in shared memory."""
        acc = acc + jnp.dot(p, v_smem[slot(step)], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # TMA may now overwrite the values that were read here.
        return acc

    # Scale from a stored score to its base-2 logit. It must be positive: the maximum is taken before scaling.
    unit = LOG2E * (plan.scale if plan.soft_cap is None else plan.soft_cap)

    def softmax(s, m, total, step, masked: bool):
        """(exponentials, factor that brings earlier sums to the new maximum, new m, new total)."""
        s = s if plan.soft_cap is None else jnp.tanh(s * (plan.scale / plan.soft_cap))
        if masked:
            s = jnp.where(_mask(plan, tile, first_row, tile.end - 1 - step, shape, masks), s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=1) * unit)
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
        p = jnp.exp2(s * unit - _per_row(shift, shape))  # One multiply-add and one exponential each.
        alpha = jnp.exp2(m - shift)
        return p, alpha, m_new, total * alpha + p.sum(axis=1)

    def first_logits(s_ref):
        plgpu.barrier_wait(k_filled.at[slot(start)])
        turns.take(role)
        add_logits(s_ref, start)
        turns.pass_on(role)
        return s_ref[...]

    def step(step, carry, masked: bool):
        acc, m, total, p = carry
        plgpu.barrier_wait(k_filled.at[slot(step)])
        plgpu.barrier_wait(v_filled.at[slot(step - 1)])
        turns.take(role)

        def products(s_ref, acc_ref):
            with jax.named_scope("wgmma"):
                add_logits(s_ref, step)
                if not plan.interpreted:
                    acc_ref[...] = acc
                    plgpu.wgmma(acc_ref, p, v_smem.at[slot(step - 1)])
            turns.pass_on(role)
            s = s_ref[...] if plan.interpreted else plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
            plgpu.barrier_arrive(k_freed.at[slot(step)])
            with jax.named_scope("softmax"):
                p_new, alpha, m_new, total_new = softmax(s, m, total, step, masked)
            values = interpreted_values(acc, p, step - 1) if plan.interpreted else acc_ref[...]  # Waits for p v.
            plgpu.barrier_arrive(v_freed.at[slot(step - 1)])
            # Nothing may write the registers of p before the product has ended.
            values, alpha, p_new = lax.optimization_barrier((values, alpha, p_new))
            return values * _per_row(alpha, values.shape), m_new, total_new, p_new.astype(plan.dtype)

        return pl.run_scoped(products, plgpu.ACC(shape, jnp.float32), plgpu.ACC(acc.shape, jnp.float32))

    cuts_sides = (plan.left, plan.right) != (None, None)
    if cuts_sides:
        pl.loop(0, start)(pass_by)
    s = pl.run_scoped(first_logits, plgpu.ACC(shape, jnp.float32))
    plgpu.barrier_arrive(k_freed.at[slot(start)])
    m = plgpu.layout_cast(jnp.full((WG_ROWS,), -jnp.inf, jnp.float32), ROWS)
    total = plgpu.layout_cast(jnp.zeros((WG_ROWS,), jnp.float32), ROWS)
    p, _, m, total = softmax(s, m, total, start, masked=plan.cuts_blocks)
    acc = plgpu.layout_cast(jnp.zeros((WG_ROWS, plan.pieces * PIECE), jnp.float32), plgpu.Layout.WGMMA)
    carry = acc, m, total, p.astype(plan.dtype)
    if plan.cuts_last_blocks:
        carry = lax.fori_loop(start + 1, whole_start, functools.partial(step, masked=True), carry)
    if not plan.has_segments:
        carry = lax.fori_loop(whole_start, whole_stop, functools.partial(step, masked=False), carry)
    if plan.cuts_first_blocks:
        carry = lax.fori_loop(whole_stop, stop, functools.partial(step, masked=True), carry)
    free_query()

    acc, m, total, p = carry
    plgpu.barrier_wait(v_filled.at[slot(stop - 1)])
    turns.take(role)

    def last(acc_ref):
        plgpu.wgmma(acc_ref, p, v_smem.at[slot(stop - 1)])
        turns.pass_on(role)

    if plan.interpreted:
        acc = interpreted_values(acc, p, stop - 1)
        turns.pass_on(role)
    else:
        acc = pl.run_state(last)(plgpu.ACC.init(acc))
    plgpu.barrier_arrive(v_freed.at[slot(stop - 1)])
    if cuts_sides:
        pl.loop(stop, tile.steps)(pass_by)
    sees_any = total > 0
    out = acc * _per_row(jnp.where(sees_any, 1 / total, 0.0), acc.shape)
    return out, jnp.where(sees_any, (m + jnp.log2(jnp.where(sees_any, total, 1.0))) / LOG2E, -jnp.inf)


def _mask(plan: Plan, tile: Tile, first_row, block, shape, masks):
    """Which keys of a block the queries of the rows from `first_row` on see."""
    first_kv = block * plan.config.block_kv
    rows, kv_ids = (plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1))
    seen = tile.blocks.mask(rows + first_row, kv_ids + first_kv)
    if not plan.has_segments:
        return seen
    load = lambda ids, start, size, layout: plgpu.load(
        ids.at[tile.batch, pl.ds(start, size)], layout=layout, optimized=False
    )
    q_segments = load(masks["rows"], first_row, shape[0], ROWS)
    kv_segments = load(masks["columns"], first_kv, shape[1], COLUMNS)
    return seen & (_per_row(q_segments, shape) == lax.broadcast_in_dim(kv_segments, shape, [1]))


@functools.partial(jax.jit, static_argnames=("plan", "num_sms", "params"))
def _forward(query, key, value, segments, *, plan: Plan, num_sms: int, params):
    """(out, lse)."""
    c, table = plan.config, plan.schedule(num_sms)
    value = jnp.pad(value, [(0, -size % unit) for size, unit in zip(value.shape, (1, 8, 1, PIECE), strict=True)])
    masks = segment_masks(*segments, c.block_q, c.block_kv) if segments else {}
    lse_shape = (plan.batch, plan.num_heads, plan.num_q_blocks * c.block_q)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ],
        grid=(table.shape[0],),
        grid_names=("block",),
        num_threads=c.compute_wgs + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(jnp.asarray(table), query, key, value, masks)  # fmt: skip
    return out, lse[:, :, : plan.num_q]


def _check(query, key, value, scale, local_window_size, logits_soft_cap, segment_ids, kv_segment_ids) -> None:
    op = "cookbook.attention"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{op}: {name}.shape = {x.shape}; must be (batch, positions, heads, head_dim)")
        if x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != query.dtype:
            raise ValueError(f"{op}: {name}.dtype = {x.dtype}; all must be bfloat16 or all float16: cast them")
    if key.shape != value.shape or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"{op}: {query.shape=}, {key.shape=}, {value.shape=}; key and value must have the same shape, and batch "
            "and head_dim of query"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{op}: {query.shape[2]} query heads are no multiple of {key.shape[2]} key heads")
    if query.shape[3] % 8 or not 8 <= query.shape[3] <= 256:
        raise ValueError(
            f"{op}: head_dim = {query.shape[3]} must be a multiple of 8 up to 256 (TMA's 16 bytes): pad it"
        )
    if 0 in query.shape or 0 in key.shape:
        raise ValueError(f"{op}: {query.shape=}, {key.shape=}; no size may be 0")
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError(f"{op}: kv_segment_ids without segment_ids, which say of each query what it may see")
    for name, ids, x in (("segment_ids", segment_ids, query), ("kv_segment_ids", kv_segment_ids, key)):
        if ids is not None and (ids.shape != x.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer)):
            raise ValueError(f"{op}: {name} = {ids.shape}, {ids.dtype}; must be {x.shape[:2]}, an integer each")
    if segment_ids is not None and kv_segment_ids is None and query.shape[1] != key.shape[1]:
        raise ValueError(f"{op}: {query.shape=}, {key.shape=} differ in length: give kv_segment_ids too")
    check_numbers(op, scale, logits_soft_cap, local_window_size)


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of `attention` that are not arrays."""

    scale: float
    soft_cap: float | None
    left: int | None
    right: int | None
    config: Config | None


def _run(query, key, value, segments, options: Options):
    """(out, lse)."""
    target = _mgpu.require_tensor_cores("attention")
    (batch, num_q, num_heads, head_dim), (_, num_kv, num_kv_heads, _) = query.shape, key.shape
    config = options.config or default_config(head_dim, (options.left, options.right) != (None, None))
    plan = Plan(
        batch, num_q, num_kv, num_heads, num_kv_heads, head_dim, query.dtype, options.scale, options.soft_cap,
        options.left, options.right, bool(segments), config, interpreted=target.interpreted,
    )  # fmt: skip
    if (need := config.smem_bytes(head_dim)) > _mgpu.SMEM_BYTES_MAX:
        raise ValueError(
            f"cookbook.attention: {config} needs {need} bytes of shared memory for head_dim = {head_dim}, and a "
            f"block has {_mgpu.SMEM_BYTES_MAX}: fewer stages or smaller blocks"
        )
    params = _mgpu.compiler_params(approx_math=True)
    return _forward(query, key, value, segments, plan=plan, num_sms=target.num_sms, params=params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(query, key, value, segments, options: Options):
    return _run(query, key, value, segments, options)


def _attention_fwd(query, key, value, segments, options: Options):
    out, lse = _run(query, key, value, segments, options)
    return (out, lse), (query, key, value, segments, out, lse)


def _attention_bwd(options: Options, residuals, gradients):
    target = _mgpu.require_tensor_cores("attention")
    dq, dk, dv = attention_bwd.gradients(
        *residuals, *gradients, scale=options.scale, soft_cap=options.soft_cap, left=options.left, right=options.right,
        interpreted=target.interpreted, params=_mgpu.compiler_params(approx_math=True),
    )  # fmt: skip
    return dq, dk, dv, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def attention(
    query, key, value, *, scale=None, is_causal=False, local_window_size=None, logits_soft_cap=None, segment_ids=None,
    kv_segment_ids=None, return_lse=False, config: Config | None = None,
):  # fmt: skip
    """Scaled dot-product attention, as `jax.nn.dot_product_attention`; the same to the bit in every run.

    Differentiable in query, key and value, also through lse; these, out and lse are kept for the backward pass.

    Args:
      query: (B, T, N, H); bfloat16 or float16.
      key, value: (B, S, K, H), of the dtype of `query`; K divides N.
      scale: what logits are multiplied by; None for 1 / sqrt(H).
      is_causal: query i sees keys up to i.
      local_window_size: (left, right): query i sees keys i - left to i + right; None for a side without bound, one
        number for both.
      logits_soft_cap: c, so that logits become c tanh(logits / c).
      segment_ids: (B, T) integers: a query sees only keys with its own id. A block of keys is skipped if no query's id
        lies between the block's least and largest: sequences packed one after the other cost what they do apart. A
        value that is NaN or infinite may reach queries of other segments, whose weight for it is 0; `varlen_attention`
        keeps sequences apart.
      kv_segment_ids: (B, S) integers, of the keys; None for `segment_ids`.
      return_lse: also return the logarithms of the sums of exponentials.
      config: blocks, stages and warpgroups; None chooses by H.

    Returns:
      (B, T, N, H), of the dtype of `query`; with `return_lse` also (B, N, T), float32, natural logarithms. A query that
      sees no key gives zeros, and -inf.

    Raises:
      ValueError: a shape, dtype or window is not supported; RuntimeError: no GPU.
    """
    _check(query, key, value, scale, local_window_size, logits_soft_cap, segment_ids, kv_segment_ids)
    left, right = window(is_causal, local_window_size)
    options = Options(scale or query.shape[3] ** -0.5, logits_soft_cap, left, right, config)
    segments = () if segment_ids is None else (segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids)
    out, lse = _attention(query, key, value, segments, options)
    return (out, lse) if return_lse else out


attention.Config = Config  # `cookbook.attention` is this function, not its module.


def flops(batch: int, num_q: int, num_kv: int, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
    """Floating-point operations of the two products; half as many with a causal mask."""
    return 4 * batch * num_heads * num_q * num_kv * head_dim // (2 if is_causal else 1)


def bytes_moved(batch: int, num_q: int, num_kv: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """query and out, key and value, of 16 bits, each once."""
    return 4 * batch * head_dim * (num_q * num_heads + num_kv * num_kv_heads)
