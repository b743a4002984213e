"""FlashAttention, backward: gradients of `attention` by two kernels, that compute the weights anew from lse.

    p  = exp(s - lse),  s = mask(cap(scale q kᵀ))        dv = pᵀ do
    ds = p (do vᵀ - delta),  delta = sum(out do)         dk = scale dsᵀ q,  dq = scale ds k

Shapes: those of `attention`; lse and delta (B, N, T), float32. With a soft cap ds is also multiplied by the derivative
of tanh. A query that sees no key has lse = inf here, so that all its p are zero; so have those after the last one.

Role table of both kernels: a block for each tile.

    memory     one, with few registers: copies what a tile keeps, then step by step what it goes through
    compute    two, or three for dq of heads of 64. For dk and dv each keeps 64 keys and values, and goes through blocks
               of queries of all heads of its group, with pᵀ and dsᵀ in registers: keys along rows, queries along
               columns, so that lse and delta are one number for each column. For dq each keeps 64 queries and do, and
               goes through blocks of keys and values, with p and ds in registers, and lse and delta one number for each
               row. With heads over 128 both have the same 64 rows, and each half of the columns of the sums

Barrier table:

    barrier        arrivals               who waits
    kept           copies of what a tile  compute warpgroups, before the first product
                   keeps
    filled[slot]   copies of a step       compute warpgroups, before its products
    freed[slot]    compute warpgroups     memory, before it refills the slot
    done           compute warpgroups     each other where they have the same rows: before their sums take the place of
                                          what the tile kept, and before these are copied out

The sums of dq are still under way when the products of the next step start: a slot is given back one step later.

Bound by: the tensor cores, with seven products for the five that a single kernel needs; that would have to add up dq in
memory, in an order that differs from run to run. These are the same to the bit in every run. With heads over 128 it is
eleven products, because both warpgroups compute all of s and dp: splitting these is where to go on. Sizes of tiles,
blocks and rings are properties of `Plan`; what limits them are the registers, which dk and dv fill.

Not supported: what `attention` does not support. Operands with rows of no multiple of 64, or lengths of no multiple of
8, are padded by copies (TMA). Source: Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from .core import COLUMNS, LOG2E, PIECE, ROWS, Blocks, div, rem, segment_masks

WG_ROWS = 64  # Rows of a compute warpgroup, which are those of a WGMMA.
REGISTERS = {2: (24, 240), 3: (32, 160)}  # A thread of the memory and of the compute warpgroups, by how many these are.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of both kernels: dq's if `for_query`, else dk's and dv's. A tile keeps 64 rows for each warpgroup of its
    own two operands (queries and do, or keys and values), and goes through blocks of the other two."""

    batch: int
    num_q: int
    num_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # A multiple of 64.
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    left: int | None
    right: int | None
    has_segments: bool
    for_query: bool
    interpreted: bool

    @property
    def splits_heads(self) -> bool:
        """Whether both compute warpgroups have the same rows, and each half of the columns of the sums."""
        return self.head_dim > 128

    @property
    def compute_wgs(self) -> int:
        return 3 if self.for_query and self.head_dim <= 64 else 2

    @property
    def rows(self) -> int:
        """Rows that a tile keeps."""
        return WG_ROWS * (1 if self.splits_heads else self.compute_wgs)

    @property
    def block(self) -> int:
        """Queries or keys of a step."""
        return 128 if not self.for_query and self.head_dim <= 64 else 64

    @property
    def num_stages(self) -> int:
        """Slots of the ring."""
        step = 4 * self.block * self.head_dim
        return min(4, (_mgpu.SMEM_BYTES_MAX - 4096 - 4 * self.rows * self.head_dim) // step)

    @property
    def blocks(self) -> Blocks:
        """Which blocks the rows of a tile go with."""
        if self.for_query:
            return Blocks(self.num_kv, self.block, self.left, self.right)
        # Queries after the last one need no mask: their p are zero.
        return Blocks(pl.cdiv(self.num_q, self.block) * self.block, self.block, self.right, self.left)

    @property
    def left_cut(self) -> bool:
        """Whether there are blocks that a mask cuts before those that all rows of a warpgroup see whole."""
        return self.blocks.left is not None

    @property
    def right_cut(self) -> bool:
        return self.blocks.right is not None or self.blocks.num_kv % self.block != 0

    @property
    def num_tiles(self) -> int:
        """Tiles of a head."""
        return pl.cdiv(self.num_q if self.for_query else self.num_kv, self.rows)

    @property
    def group(self) -> int:
        """Query heads that share keys."""
        return self.num_heads // self.num_kv_heads

    @property
    def sum_columns(self) -> int:
        """Columns of the sums of a compute warpgroup."""
        return self.head_dim // 2 if self.splits_heads else self.head_dim

    @property
    def num_sums(self) -> int:
        return 1 if self.for_query else 2

    @property
    def runs_ahead(self) -> bool:
        """Whether the products of a step start while the sums of the one before are under way: registers have to hold
        the weights of both, and those of dk and dv have no room for them."""
        return self.for_query

    @property
    def scratch(self) -> dict:
        tiled = dict(transforms=(plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(128)))
        scratch = dict(
            kept_smem=plgpu.SMEM((2, self.rows, self.head_dim), self.dtype, **tiled),
            ring_smem=plgpu.SMEM((2, self.num_stages, self.block, self.head_dim), self.dtype, **tiled),
            kept=plgpu.Barrier(num_arrivals=2),
            filled=plgpu.Barrier(num_arrivals=2 if self.for_query else 4, num_barriers=self.num_stages),
            freed=plgpu.Barrier(num_arrivals=self.compute_wgs, num_barriers=self.num_stages),
        )
        if not self.for_query:
            scratch["vectors_smem"] = plgpu.SMEM((2, self.num_stages, self.block), jnp.float32)
        if self.splits_heads:
            scratch["done"] = plgpu.Barrier(num_arrivals=self.compute_wgs)
        return scratch


class Tile:
    """Where a tile lies: its rows, of which head, and the blocks that it goes through."""

    def __init__(self, plan: Plan, masks: dict):
        tile = lax.axis_index("tile")
        if plan.for_query:
            # With a causal mask the last queries, and the first keys, have most to do.
            tile = plan.num_tiles - 1 - tile
        self.batch, self.head, self.row = lax.axis_index("batch_index"), lax.axis_index("head_index"), tile * plan.rows
        first, end = plan.blocks.seen(self.row, plan.rows)
        if plan.has_segments:
            first = jnp.maximum(first, masks["first"][self.batch, tile])
            end = jnp.minimum(end, masks["end"][self.batch, tile])
        self.first, self.end = first, jnp.maximum(first, end)
        self.blocks = self.end - self.first  # Blocks of each head.
        self.heads = 1 if plan.for_query else plan.group
        self.steps = self.blocks * self.heads

    def other_head(self, plan: Plan, i):
        """The head of the blocks of the `i`-th of `heads`."""
        return div(self.head, plan.group) if plan.for_query else self.head * plan.group + i


def _kernel(
    kept_gmem, ring_gmem, vectors_gmem, masks, *outs, plan: Plan, kept_smem, ring_smem, kept, filled, freed,
    vectors_smem=None, done=None,
):  # fmt: skip
    role, tile = lax.axis_index("role"), Tile(plan, masks)
    slot = lambda count: rem(count, plan.num_stages)

    @pl.when(role == plan.compute_wgs)
    def _():
        plgpu.set_max_registers(REGISTERS[plan.compute_wgs][0], action="decrease")
        for i, gmem in enumerate(kept_gmem):
            plgpu.copy_gmem_to_smem(gmem.at[tile.batch, pl.ds(tile.row, plan.rows), tile.head], kept_smem.at[i], kept)

        @pl.loop(0, tile.steps)
        def _(count):
            head = tile.other_head(plan, lax.div(count, tile.blocks))
            block = pl.ds((tile.first + lax.rem(count, tile.blocks)) * plan.block, plan.block)
            pl.when(count >= plan.num_stages)(lambda: plgpu.barrier_wait(freed.at[slot(count)]))
            into = lambda smem, i: (smem.at[i, slot(count)], filled.at[slot(count)])
            for i, gmem in enumerate(ring_gmem):
                plgpu.copy_gmem_to_smem(gmem.at[tile.batch, block, head], *into(ring_smem, i))
            if not plan.for_query:
                for i, gmem in enumerate(vectors_gmem):
                    plgpu.copy_gmem_to_smem(gmem.at[tile.batch, head, block], *into(vectors_smem, i))

        # The last slots are given back too.
        last = jnp.maximum(tile.steps - plan.num_stages, 0)
        pl.loop(last, tile.steps)(lambda count: plgpu.barrier_wait(freed.at[slot(count)]))

    @pl.when(role < plan.compute_wgs)
    def _():
        plgpu.set_max_registers(REGISTERS[plan.compute_wgs][1], action="increase")
        rows = pl.ds(0 if plan.splits_heads else role * WG_ROWS, WG_ROWS)
        columns = pl.ds(role * plan.sum_columns if plan.splits_heads else 0, plan.sum_columns)
        plgpu.barrier_wait(kept)
        sums = _compute(
            plan, tile, [kept_smem.at[i, rows] for i in range(2)], ring_smem, vectors_gmem, vectors_smem, masks, filled,
            freed, slot, columns,
        )  # fmt: skip
        if plan.splits_heads:  # The other warpgroup may still read.
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
        for i, total in enumerate(sums):
            kept_smem[i, rows, columns] = (total * (plan.scale if i == 0 else 1.0)).astype(plan.dtype)
        plgpu.commit_smem()
        if plan.splits_heads:  # Both halves of the columns are there.
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)

        @pl.when((role == 0) | (not plan.splits_heads))
        def _():
            for i, out in enumerate(outs):
                row = tile.row + (0 if plan.splits_heads else role * WG_ROWS)
                target = out.at[tile.batch, pl.ds(row, WG_ROWS), tile.head]
                plgpu.copy_smem_to_gmem(kept_smem.at[i, rows], target)

        plgpu.wait_smem_to_gmem(0)


def _compute(
    plan: Plan, tile: Tile, kept, ring_smem, vectors_gmem, vectors_smem, masks, filled, freed, slot, columns
):  # fmt: skip
    """A compute warpgroup: the sums of its rows, dq or (dk, dv), not yet scaled."""
    shape, role = (WG_ROWS, plan.block), lax.axis_index("role")
    first_row = tile.row + (0 if plan.splits_heads else role * WG_ROWS)
    load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)
    spread = lambda values: lax.broadcast_in_dim(values, shape, [0 if plan.for_query else 1])
    unit = LOG2E * (plan.scale if plan.soft_cap is None else plan.soft_cap)
    if plan.for_query:
        of_rows = [load(v.at[tile.batch, tile.head, pl.ds(first_row, WG_ROWS)], ROWS) for v in vectors_gmem]

    def vector(i, count):
        """lse or delta."""
        return of_rows[i] if plan.for_query else load(vectors_smem.at[i, slot(count)], COLUMNS)

    def mask(block):
        first_column = block * plan.block
        ids = [plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1)]
        seen = plan.blocks.mask(ids[0] + first_row, ids[1] + first_column)
        if plan.has_segments:
            of_row = load(masks["rows"].at[tile.batch, pl.ds(first_row, shape[0])], ROWS)
            of_column = load(masks["columns"].at[tile.batch, pl.ds(first_column, shape[1])], COLUMNS)
            seen &= lax.broadcast_in_dim(of_row, shape, [0]) == lax.broadcast_in_dim(of_column, shape, [1])
        return seen

    def add(sums, i, weights, operand, count):
        """`sums[i] += weights @ operand`, which goes on while the next products start."""
        values = ring_smem.at[operand, slot(count), :, columns]
        if not plan.interpreted:
            plgpu.wgmma(sums[i], weights, values)
            return sums
        # The interpreter wants both operands of WGMMA in shared memory.
        total = sums[i] + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # TMA may now overwrite the values that were read here.
        return [total if i == j else other for j, other in enumerate(sums)]

    def step(count, block, sums, masked: bool):
        plgpu.barrier_wait(filled.at[slot(count)])

        def products(s_ref, dp_ref):
            wait = lambda ref, n: ref[...] if plan.interpreted else plgpu.wgmma_accumulator_load(ref, wait_n=n)
            now = sums
            plgpu.wgmma(s_ref, kept[0], ring_smem.at[0, slot(count)].T)
            plgpu.wgmma(dp_ref, kept[1], ring_smem.at[1, slot(count)].T)
            s = wait(s_ref, 1)  # This also waits for the sums of the step before.
            if plan.runs_ahead and not plan.interpreted:
                pl.when(count > 0)(lambda: plgpu.barrier_arrive(freed.at[slot(count - 1)]))
            s = s if plan.soft_cap is None else jnp.tanh(s * (plan.scale / plan.soft_cap))
            p = jnp.exp2(s * unit - spread(vector(0, count)))
            p = jnp.where(mask(block), p, 0.0) if masked else p
            if not plan.for_query:
                now = add(now, 1, p.astype(plan.dtype), 1, count)
            dp = wait(dp_ref, 0 if plan.for_query else 1)
            ds = p * (dp - spread(vector(1, count)))
            ds = ds if plan.soft_cap is None else ds * (1.0 - s * s)
            now = add(now, 0, ds.astype(plan.dtype), 0, count)
            if plan.interpreted or not plan.runs_ahead:
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(freed.at[slot(count)])
            return now if plan.interpreted else []

        return pl.run_scoped(products, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))

    start, stop = plan.blocks.whole(first_row, WG_ROWS, tile.first, tile.end)
    if plan.has_segments:
        start, stop = tile.end, tile.end
    phases = [(start, stop, False)]
    if plan.left_cut or plan.has_segments:
        phases.insert(0, (tile.first, start, True))
    if plan.right_cut:
        phases.append((stop, tile.end, True))

    def go_through(sums, carry):
        """All steps; `carry` are sums that are no references."""

        def head(i, carry):
            for first, end, masked in phases:

                def body(block, carry, masked=masked):
                    count = i * tile.blocks + block - tile.first
                    return step(count, block, carry if plan.interpreted else sums, masked)

                carry = lax.fori_loop(first, end, body, carry)
            return carry

        return lax.fori_loop(0, tile.heads, head, carry) if tile.heads > 1 else head(0, carry)

    sum_shape = WG_ROWS, plan.sum_columns
    if plan.interpreted:
        zero = plgpu.layout_cast(jnp.zeros(sum_shape, jnp.float32), plgpu.Layout.WGMMA)
        return go_through(None, [zero] * plan.num_sums)

    def on_tensor_cores(*sums):
        go_through(sums, [])
        totals = [ref[...] for ref in sums]  # Waits for the last ones.
        if plan.runs_ahead:
            pl.when(tile.steps > 0)(lambda: plgpu.barrier_arrive(freed.at[slot(tile.steps - 1)]))
        return totals

    return pl.run_scoped(on_tensor_cores, *[plgpu.ACC(sum_shape, jnp.float32)] * plan.num_sums)


def _gradients(plan: Plan, kept, ring, vectors, segments, params):
    """dq, or (dk, dv), with as many rows and columns as the operands that are kept."""
    masks = segment_masks(*segments, plan.rows, plan.block) if segments else {}
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[jax.ShapeDtypeStruct(kept[0].shape, plan.dtype)] * plan.num_sums,
        grid=(plan.batch, plan.num_heads if plan.for_query else plan.num_kv_heads, plan.num_tiles),
        grid_names=("batch_index", "head_index", "tile"),
        num_threads=plan.compute_wgs + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(kept, ring, vectors, masks)


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "left", "right", "interpreted", "params"))
def gradients(
    query, key, value, segments, out, lse, d_out, d_lse, *, scale, soft_cap, left, right, interpreted, params
):  # fmt: skip
    """(dq, dk, dv) of `attention`, whose results were `out` and `lse`, for the gradients of both.

    `segments` is () or (segment_ids, kv_segment_ids); `scale` to `right` as of its `Options`.
    """
    (batch, num_q, num_heads, head_dim), (_, num_kv, num_kv_heads, _) = query.shape, key.shape
    width = next(width for width in (64, 128, 256) if head_dim <= width)
    sizes = batch, num_q, num_kv, num_heads, num_kv_heads, width, query.dtype, scale, soft_cap, left, right
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, width - head_dim)))
    q, k, v, do = (pad(x) for x in (query, key, value, d_out.astype(query.dtype)))
    delta = jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32) - d_lse
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2E)
    rows = ((0, 0), (0, 0), (0, -num_q % 384))
    vectors = jnp.pad(lse, rows, constant_values=jnp.inf), jnp.pad(delta, rows)
    plan = functools.partial(Plan, *sizes, bool(segments), interpreted=interpreted)
    (dq,) = _gradients(plan(for_query=True), (q, do), (k, v), vectors, segments, params)
    dk, dv = _gradients(plan(for_query=False), (k, v), (q, do), vectors, segments[::-1], params)
    return tuple(dx[:, : x.shape[1], :, :head_dim] for dx, x in zip((dq, dk, dv), (query, key, value), strict=True))
