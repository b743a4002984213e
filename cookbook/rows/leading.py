"""Sums over the leading axis of a matrix: reduce_sum's, and the second stage of rms_norm's gradient.

Role table: a block of some warpgroups takes a tile of columns and every so many rows. Each warpgroup adds up its rows
in registers, and warpgroup 0 adds up the warpgroups. Then the first block of a cluster adds up the others:

    barrier    arrivals                                  who waits
    summed     each warpgroup: its sums are in SMEM      warpgroup 0
    received   each other block of the cluster: it has   warpgroup 0 of the first block
               stored its sums in the first block's SMEM

Both add in a fixed order, so runs are equal to the bit; atomic additions would not be. A matrix too narrow for that to
fill the GPU takes two kernels. The first views several rows side by side as one, and sums stretches of these; the
second adds up its sums and the few rows that are left over.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from . import core

WARPGROUPS = 8  # Warpgroups of a block.
CLUSTERS = 1, 2, 4, 8  # Blocks of a cluster; every Hopper GPU can put 8 into one.
BYTES_IN_FLIGHT = 64  # Bytes of x that a thread loads before it adds, in at most 16 loads.
COLS_MIN = 8  # A tile's threads share a row by halves. Fewer columns are padded, of sums or of a few rows.
FOLDED_COLS_MAX = 4096  # Columns of a matrix of rows side by side.
# Costs of a block, a cluster and a second kernel beside their loads, in bytes that an SM could load in that time.
BLOCK_COST, CLUSTER_COST, LAUNCH_COST = 20_000, 30_000, 100_000


@dataclasses.dataclass(frozen=True)
class LeadingPlan:
    """Statics of one pass over the leading axis of (rows, cols): tiles of columns by blocks that share the rows.

    In a tile, `lanes` threads share a row and `rows_at_once` rows are side by side in a warpgroup."""

    rows: int
    cols: int
    itemsize: int  # Bytes of a value in memory.
    lanes: int = core.LANES
    cluster: int = 1  # Blocks that add their sums up in the first one's shared memory.
    stretches: int = 1  # Rows of sums that this pass leaves.
    warpgroups: int = WARPGROUPS
    interpreted: bool = False

    @property
    def vec(self) -> int:
        return min(math.gcd(self.cols, 16 // self.itemsize), core.floor_power_of_2(self.cols // 2))

    @property
    def rows_at_once(self) -> int:
        return core.WARPGROUP // self.lanes

    @property
    def width(self) -> int:
        return self.lanes * self.vec

    @property
    def num_tiles(self) -> int:
        return pl.cdiv(self.cols, self.width)

    def columns(self, tile):
        """The columns of a tile. The last tile is shifted back to end with the row."""
        return pl.ds(jnp.minimum(tile * self.width, self.cols - self.width), self.width)

    @property
    def loads(self) -> int:
        """Loads of a thread that are in flight at once."""
        return min(16, BYTES_IN_FLIGHT // (self.vec * self.itemsize))

    @property
    def stride(self) -> int:
        """Rows from one load of a warpgroup to its next: all warpgroups that share a tile take turns."""
        return self.rows_at_once * self.warpgroups * self.cluster * self.stretches

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows_at_once, self.width

    @property
    def layout(self):
        return core.lanes_layout(self.lanes, self.width, self.vec)

    @property
    def stacked(self) -> int:
        """Warpgroups whose sums are stacked into one matrix: stores to other blocks need 8 rows."""
        return max(1, 8 // self.rows_at_once)

    @property
    def sums_shape(self) -> tuple[int, int]:
        return self.stacked * self.rows_at_once, self.width

    @property
    def sums_layout(self):
        """Layout of sums that are added up: stores to other blocks have at most 8 bytes."""
        lanes = min(core.LANES, self.width)
        vec = min(2, self.width // lanes)
        return core.lanes_layout(lanes, lanes * vec, vec)

    @property
    def scratch(self) -> dict:
        sums = functools.partial(plgpu.SMEM, dtype=jnp.float32)
        scratch = dict(
            sums_smem=sums((self.warpgroups, *self.shape)),
            summed=plgpu.Barrier(num_arrivals=self.warpgroups),
        )
        if self.cluster > 1 and self.interpreted:  # It has no stores to other blocks: they meet in global memory.
            scratch["received"] = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=1)
        elif self.cluster > 1:
            scratch["received_smem"] = sums((self.cluster, *self.sums_shape))
            scratch["received"] = plgpu.Barrier(num_arrivals=self.cluster - 1)
        return scratch

    def cost(self, num_sms: int) -> float:
        """Bytes that the busiest SM loads, or could load in the time that the plan costs beside its loads."""
        busiest = pl.cdiv(self.num_tiles * self.cluster * self.stretches, num_sms)
        loads = pl.cdiv(self.rows, self.cluster * self.stretches) * self.width * self.itemsize
        short = 1 + 16 / (self.width * self.itemsize)  # Runs of few bytes touch more 32-byte sectors than they fill.
        return busiest * (loads * short + BLOCK_COST) + CLUSTER_COST * (self.cluster > 1)


def _sum_rows(refs, low: int, part, columns, plan: LeadingPlan, total):
    """`total` plus this warpgroup's part of the product of `refs`, from row `low` on."""
    (rows, *_), at_once, stride, loads = refs[0].shape, plan.rows_at_once, plan.stride, plan.loads
    first = low + part * at_once

    def factor(x_gmem, row):
        rows = pl.ds(row, at_once)
        if x_gmem.ndim == 1:
            each = plgpu.load(x_gmem.at[rows], layout=plan.layout.reduce(1), optimized=False)
            return lax.broadcast_in_dim(each, plan.shape, [0])
        return plgpu.load(x_gmem.at[rows, columns], layout=plan.layout, optimized=False).astype(jnp.float32)

    product = lambda row: math.prod(factor(x_gmem, row) for x_gmem in refs)

    def add_turn(turn, total):
        values = [product(first + (turn * loads + i) * stride) for i in range(loads)]
        return functools.reduce(jnp.add, values, total)

    def add_last(turn, total):
        """A turn in which the matrix may end: its loads are shifted back to stay inside, and only new rows count."""
        index = plgpu.broadcasted_iota(jnp.int32, plan.shape, 0, layout=plan.layout)
        wanted = [first + (turn * loads + i) * stride for i in range(loads)]
        shifted = [jnp.minimum(row, rows - at_once) for row in wanted]
        values = [product(row) for row in shifted]
        fresh = [jnp.where(index >= w - s, v, 0.0) for w, s, v in zip(wanted, shifted, values, strict=True)]
        return functools.reduce(jnp.add, fresh, total)

    whole = _mgpu.div(jnp.maximum(rows - at_once - first + stride, 0), stride)  # Loads that end inside the matrix.
    turns = _mgpu.div(whole, loads)
    total = lax.fori_loop(0, turns, add_turn, total)
    return lax.fori_loop(turns, turns + jnp.where(first + turns * loads * stride < rows, 1, 0), add_last, total)


def _kernel(sources, o_gmem, sums_gmem=None, *, lows, plan: LeadingPlan, sums_smem, summed, received_smem=None,
            received=None):  # fmt: skip
    tile, stretch, block = (lax.axis_index(name) for name in ("tile", "stretch", "block"))
    warpgroup = lax.axis_index("warpgroup")
    part = (stretch * plan.cluster + block) * plan.warpgroups + warpgroup
    columns = plan.columns(tile)
    total = plgpu.layout_cast(jnp.zeros(plan.shape, jnp.float32), plan.layout)
    for refs, low in zip(sources, lows, strict=True):
        total = _sum_rows(refs, low, part, columns, plan, total)

    load = lambda ref: plgpu.load(ref, layout=plan.sums_layout, optimized=False)
    # A whole matrix for each warpgroup: Mosaic swizzles 8 rows of 128 bytes, and gets a part of 8 rows wrong.
    _mgpu.store(sums_smem.at[warpgroup], total)
    plgpu.barrier_arrive(summed)

    def finish(total):
        """Stores the sums. Columns that the last tile shares with the one before are stored by both, the same to the
        bit; which the interpreter takes for a race, so that there the last tile stores the others alone."""
        sums, others = jnp.sum(total, axis=0).astype(o_gmem.dtype), plan.num_tiles * plan.width - plan.cols
        if not plan.interpreted or others == 0:
            return _mgpu.store(o_gmem.at[stretch, columns], sums)
        is_last = tile == plan.num_tiles - 1
        pl.when(~is_last)(lambda: _mgpu.store(o_gmem.at[stretch, columns], sums))
        rest = pl.ds(plan.cols - plan.width + others, plan.width - others)
        pl.when(is_last)(lambda: _mgpu.store(o_gmem.at[stretch, rest], sums[others:]))

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(summed)
        sums = [load(sums_smem.at[i]) for i in range(plan.warpgroups)]
        mine = jnp.concatenate([functools.reduce(jnp.add, sums[i :: plan.stacked]) for i in range(plan.stacked)])
        if plan.cluster == 1:
            return finish(mine)
        if plan.interpreted:
            sums_gmem[tile, block] = mine
            plgpu.barrier_arrive(received)
            plgpu.barrier_wait(received)
        else:
            send = functools.partial(plgpu.async_store_smem, mine, received_smem.at[block], received, optimized=False)
            pl.when(block > 0)(functools.partial(send, cluster_idx=jnp.int32(0), cluster_dim="block"))

        @pl.when(block == 0)
        def _():
            if not plan.interpreted:
                plgpu.barrier_wait(received)
            others = sums_gmem.at[tile] if plan.interpreted else received_smem
            finish(functools.reduce(jnp.add, [load(others.at[b]) for b in range(1, plan.cluster)], mine))


def _plan(rows: int, cols: int, itemsize: int, target: _mgpu.Target, stretches: bool) -> LeadingPlan:
    """The cheapest plan of one pass; with `stretches`, of the first of two."""
    whole = LeadingPlan(rows, cols, itemsize, interpreted=target.interpreted)
    if target.interpreted:  # Its threads are few, and a cluster of large blocks would take all of them to wait.
        whole = dataclasses.replace(whole, warpgroups=2)
    lanes = [n for n in (2, 4, 8, 16, 32) if n * whole.vec <= cols]
    plans = []
    for n in [n for n in lanes if n * whole.vec * itemsize >= 32] or lanes[-1:]:
        plan = dataclasses.replace(whole, lanes=n)
        if stretches:
            waves = {max(1, wave * target.num_sms // plan.num_tiles) for wave in (1, 2, 3)}
            plans += [dataclasses.replace(plan, stretches=s) for s in waves]
        else:
            plans += [dataclasses.replace(plan, cluster=c) for c in CLUSTERS]
    return min(plans, key=lambda plan: plan.cost(target.num_sms))


def _fold(rows: int, cols: int, itemsize: int) -> int:
    """Rows to put side by side: loads of 16 bytes, in tiles of a warp's width that cover the folded row best."""
    vec = 16 // itemsize
    least, width = vec // math.gcd(cols, vec), core.LANES * vec
    most = max(1, FOLDED_COLS_MAX // (least * cols))
    folds = [least * n for n in range(1, most + 1) if least * n <= rows // 4]
    return min(folds, key=lambda fold: pl.cdiv(fold * cols, width) * width / (fold * cols), default=1)


def choose(rows: int, cols: int, itemsize: int, target: _mgpu.Target, foldable: bool) -> tuple[int, LeadingPlan]:
    """Rows to put side by side, and the plan of the only or of the first kernel: whatever costs less."""
    cost = lambda plan: plan.cost(target.num_sms)
    fold = _fold(rows, cols, itemsize) if foldable else 1
    once = _plan(rows, max(cols, COLS_MIN), itemsize, target, stretches=False)
    twice = _plan(rows // fold, max(fold * cols, COLS_MIN), itemsize, target, stretches=True)
    if twice.stretches * fold == 1 or (cost(once) <= cost(twice) + LAUNCH_COST and cols >= COLS_MIN):
        return 1, once
    return fold, twice


def sum_leading(target: _mgpu.Target, params, dtype, *factors):
    """Sums over the leading axis of the product of `factors`, (rows, cols) each, or (rows,) in float32, as `dtype`."""
    rows, cols = factors[0].shape
    fold, plan = choose(rows, cols, factors[0].dtype.itemsize, target, len(factors) == 1)
    if fold * plan.stretches == 1:
        return _launch(plan, params, dtype, ([*factors], 0))[0, :cols]
    folded, left, whole = factors, [], rows // fold * fold
    if fold > 1:
        (x,) = factors
        folded = [x.reshape(-1)[: whole * cols].reshape(-1, fold * cols)]
    if whole < rows:
        left = [([x], whole)] if cols >= COLS_MIN else [([x[whole:]], 0)]
    sums = _launch(plan, params, jnp.float32, ([*folded], 0))[:, : fold * cols].reshape(-1, cols)
    last = _plan(len(sums), max(cols, COLS_MIN), 4, target, stretches=False)
    return _launch(last, params, dtype, ([sums], 0), *left)[0, :cols]


def _launch(plan: LeadingPlan, params, dtype, *sources):
    """Sums of the rows of `sources`, each of them factors and the row that its sum begins at."""
    least = plan.rows_at_once, plan.cols
    pad = lambda x: jnp.pad(x, [(0, max(0, size - n)) for n, size in zip(x.shape, least[: x.ndim], strict=True)])
    factors, lows = [[pad(x) for x in source] for source, _ in sources], [low for _, low in sources]
    out_type = [jax.ShapeDtypeStruct((plan.stretches, plan.cols), dtype)]
    if plan.interpreted and plan.cluster > 1:
        out_type.append(jax.ShapeDtypeStruct((plan.num_tiles, plan.cluster, *plan.sums_shape), jnp.float32))
    out, *_ = _mgpu.kernel(
        functools.partial(_kernel, lows=lows, plan=plan),
        out_type=out_type,
        grid=(plan.stretches, plan.num_tiles),  # CUDA allows 65535 but for the last.
        grid_names=("stretch", "tile"),
        cluster=(plan.cluster,),
        cluster_names=("block",),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=plan.scratch,
        compiler_params=dataclasses.replace(params, reduction_scratch_bytes=8 * core.WARPGROUP * plan.vec),
    )(factors)
    return out
