# SPDX-License-Identifier: Apache-2.0
"""The kernel of `matmul_reduce_scatter`: tiles go to their owner, who adds up the parts of their sums.

| warpgroup | does |
|---|---|
| memory | loads the steps of all tiles into the ring of slots (`gemm/kernel.py`); stores the tile before to its |
| | owner; loads the next device's part of an own tile |
| compute, two | multiply; add the others' parts to an own tile, loading the further ones; |
| | leave the tile in shared memory |

| barrier | arrives | count | waits |
|---|---|---|---|
| arrived[tile] (semaphore) | each other device: its part of the tile is here | n - 1 | memory, and compute if n > 2 |
| fetched[wg] | each copy of a piece of a part | pieces | the compute warpgroup, of an own tile |
| staged | each compute warpgroup: its share of a tile is in shared memory | 2 | memory, before it stores the tile |
| emptied | memory: TMA has read the tile | 1 | compute, before it leaves the next one there |
| filled[slot], freed[slot] | as in `gemm/kernel.py` | | |

When all SMs end their tiles at once, NVLink is busy for most of the next tile. So shared memory holds a whole tile, and
the tensor cores wait neither for its stores nor for their arrival, which the memory warpgroup announces: it has time.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import Index, Ref
from ..gemm.kernel import compute_role, copy_step, memory_role, multiply
from ..gemm.launch import launch
from ..gemm.operand import Ring
from ..gemm.plan import COMPUTE, Plan
from . import core, matmul_core, protocol
from .matmul_core import Config, Tile, block_of_cluster, num_tiles, tile_of_block


@functools.lru_cache(4096)
def default_config(
    m: int, n: int, k: int, num_devices: int, dtype=jnp.bfloat16, transpose_rhs=False, num_sms=132
) -> Config:
    """The configuration of the least predicted time for (M, K) by (K, N) matrices on each device."""
    shard = m // num_devices, n, k, num_devices
    found, _ = matmul_core.best(*shard, jnp.dtype(dtype).itemsize, transpose_rhs, num_sms)
    return Config(**dataclasses.asdict(found))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The parts of sums that devices exchange, as one block of one device sees them."""

    plan: Plan
    axis_name: _host.AxisName
    device: Index  # This device's index.
    parts_gmem: Ref  # The buffer for the others' parts, of `parts_shape`.
    arrived: Ref  # The semaphore.

    @property
    def protocol(self) -> protocol.MatmulScatter:
        return protocol.MatmulScatter(self.plan.tiles.num_shards)

    def perform(self, actions, copy=None) -> None:
        """Carries out the protocol's actions."""
        core.perform(actions, self.axis_name, dict(arrived=self.arrived), copy)

    def number(self, tile: Tile) -> tuple:
        """The index of the semaphore of this block's tile, and of the tile's slots in the protocol."""
        block_m, block_n = block_of_cluster(self.plan)
        return tile.number, block_m * self.plan.config.cluster_n + block_n

    def parts_of(self, tile: Tile):
        """Where the parts of this block's tile lie among the parts of a shard."""
        number, block = self.number(tile)
        return number * tiles_of_shard(self.plan)[1] + block

    def is_own(self, tile: Tile):
        """Whether this device is the tile's owner."""
        return tile.step == self.plan.tiles.num_shards - 1

    def owner(self, tile: Tile):
        """The device whose rows the tile has."""
        return self.protocol.owner(self.device, tile.step)

    def receive(self, tile: Tile) -> list:
        """Waits, if the tile is an own one, for the others' parts."""
        return self.protocol.receive(self.device, tile.step, self.number(tile))


def tiles_of_shard(plan: Plan) -> tuple[int, int]:
    """Tiles of clusters of a shard, and of blocks of a cluster."""
    return plan.tiles.per_shard, plan.config.cluster_m * plan.config.cluster_n


def parts_shape(plan: Plan) -> tuple[int, ...]:
    """For each other device and tile, the pieces as they lie in shared memory, swizzled."""
    pieces = (COMPUTE, len(plan.store_pieces), *plan.store_piece)
    return (plan.tiles.num_shards - 1, math.prod(tiles_of_shard(plan)), *pieces)


def scratch_of(plan: Plan) -> dict:
    """The plan's scratch and barriers; a tile's pieces have a third view, of the bytes as they are."""
    scratch = plan.scratch | dict(
        staged=plgpu.Barrier(num_arrivals=COMPUTE),
        emptied=plgpu.Barrier(),
        fetched=plgpu.Barrier(num_arrivals=len(plan.store_pieces), num_barriers=COMPUTE),
    )
    if not plan.interpreted:
        views = scratch["o_smem"].refs
        scratch["o_smem"] = plgpu.RefUnion(*views, plgpu.SMEM(views[0].shape, plan.out_dtype))
    return scratch


def piece_of_tile(i) -> tuple:
    """The place of piece `i` of a tile in shared memory: the warpgroups' pieces take turns."""
    return _device.rem(i, COMPUTE), _device.div(i, COMPUTE), 0, 0


def target(plan: Plan, tile: Tile, i) -> tuple:
    """Rows and columns of piece `i` of `tile`."""
    (height, width), (rows, cols), dim = plan.store_piece, plan.compute_tile, plan.config.split_dim
    row, col, across = tile.row, tile.col, cols // width  # Pieces of a warpgroup's share along N.
    role, slot, *_ = piece_of_tile(i)
    row += (role * rows if dim == 0 else 0) + _device.div(slot, across) * height
    col += (role * cols if dim == 1 else 0) + _device.rem(slot, across) * width
    return pl.ds(row, height), pl.ds(col, width)


def load(ex: Exchange, ring: Ring, lhs_gmem, rhs_gmem, send_pieces, bytes_smem, emptied, fetched):
    """The memory warpgroup: all steps of all tiles, as fast as slots are given back.

    During a tile the one before it is sent, a few pieces a step, and announced, once all have arrived. Then the others'
    parts are waited for, since those who wait must have announced all that others wait for.
    """
    plan, num_steps = ex.plan, pl.cdiv(ex.plan.tiles.k, ex.plan.tiles.tile_k)
    num_pieces = COMPUTE * len(plan.store_pieces)
    first = min(plan.num_stages, num_steps - 1)  # By then the tile before is there: its last slots were given back.
    each = pl.cdiv(num_pieces, num_steps - first)

    def load_tile(number, before):
        tile = tile_of_block(plan, number)

        @pl.loop(0, num_steps)
        def _(step):
            slot, k, sent = ring.acquire(before + step), plan.k_start(step), (step - first) * each
            copy_step(plan, ring, slot, lhs_gmem.at[ex.owner(tile)], rhs_gmem, tile.row, tile.col, k)
            end = jnp.minimum(sent + each, num_pieces)
            pl.when((number > 0) & (step >= first))(lambda: send_pieces(number - 1, sent, end))
            pl.when((number > 0) & (step == num_steps - 1))(lambda: announce(ex, emptied, number - 1))

        pl.when(ex.is_own(tile))(lambda: fetch_first(ex, tile, bytes_smem, fetched))
        return before + num_steps

    ring.drain(lax.fori_loop(0, num_tiles(plan), load_tile, 0))
    send_pieces(num_tiles(plan) - 1, 0, num_pieces)
    announce(ex, emptied, num_tiles(plan) - 1)


def send(ex: Exchange, o_smem, bytes_smem, o_gmem, staged, number, first, end):
    """The memory warpgroup: starts the stores of pieces `first` to `end` of tile `number`."""
    tile = tile_of_block(ex.plan, number)
    pl.when(first == 0)(lambda: plgpu.barrier_wait(staged))

    def store(copy_of):
        @pl.loop(first, end)
        def _(i):
            plgpu.copy_smem_to_gmem(*copy_of(i))

    def store_to_peer(action, device_id):
        theirs = plgpu.remote_ref(ex.parts_gmem, device_id).at[action.slot[0], ex.parts_of(tile)]
        store(lambda i: (bytes_smem.at[piece_of_tile(i)], theirs.at[piece_of_tile(i)[:2]]))

    @pl.when(ex.is_own(tile))
    def _():
        store(lambda i: (o_smem.at[piece_of_tile(i)], o_gmem.at[target(ex.plan, tile, i)]))

    ex.perform(ex.protocol.send(ex.device, tile.step, ex.number(tile)), store_to_peer)


def announce(ex: Exchange, emptied, number):
    """The memory warpgroup: once tile `number` has arrived, makes room for the next one and tells the owner."""
    tile = tile_of_block(ex.plan, number)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(emptied)
    ex.perform(ex.protocol.sent(ex.device, tile.step, ex.number(tile)))


def fetch_first(ex: Exchange, tile: Tile, bytes_smem, fetched):
    """The memory warpgroup: loads the next device's part of an own tile to where the tile's sum will be left."""
    ex.perform(ex.receive(tile))
    for role in range(COMPUTE):
        fetch(ex, tile, bytes_smem, fetched, role, 0)


def fetch(ex: Exchange, tile: Tile, bytes_smem, fetched, role, part):
    """Loads what warpgroup `role` adds of a part."""

    @pl.loop(0, len(ex.plan.store_pieces))
    def _(i):
        piece = ex.parts_gmem.at[part, ex.parts_of(tile), role, i]
        core.load_bytes(piece, bytes_smem.at[role, i, 0, 0], fetched.at[role])


def compute(ex: Exchange, ring: Ring, o_smem, bytes_smem, staged, emptied, fetched):
    """A compute warpgroup: multiplies its share of all tiles, adds the others' parts, leaves it in shared memory."""
    plan = ex.plan

    def compute_tile(number, before):
        tile = tile_of_block(plan, number)
        values = multiply(plan, ring, before, plan.tiles.num_steps)
        stored = number * len(plan.store_pieces)
        pl.when(stored > 0)(lambda: plgpu.barrier_wait(emptied))
        ex.perform(ex.receive(tile) if plan.tiles.num_shards > 2 else [])
        (height, width), mine = plan.store_piece, o_smem.at[lax.axis_index("role")]
        pieces = [values[i : i + height, j : j + width] for i, j in plan.store_pieces]
        add = functools.partial(add_parts, ex, tile, mine, bytes_smem, fetched)
        for slot, piece in enumerate(lax.cond(ex.is_own(tile), add, list, pieces)):
            mine.at[slot, 0, 0][...] = piece.astype(plan.out_dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(staged)
        return before + plan.tiles.num_steps

    lax.fori_loop(0, num_tiles(plan), compute_tile, 0)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_wait(emptied)


def add_parts(ex: Exchange, tile: Tile, smem, bytes_smem, fetched, pieces) -> list:
    """A warpgroup's `pieces` of an own tile plus the other devices' parts, added one after the other."""
    role = lax.axis_index("role")

    def add(pieces):
        plgpu.barrier_wait(fetched.at[role])
        return [piece + smem.at[slot, 0, 0][...].astype(jnp.float32) for slot, piece in enumerate(pieces)]

    def add_and_fetch(part, pieces):
        pieces = add(pieces)
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
        fetch(ex, tile, bytes_smem, fetched, role, part + 1)
        return pieces

    return add(lax.fori_loop(0, ex.plan.tiles.num_shards - 2, add_and_fetch, pieces))


def kernel(plan: Plan, axis_name, lhs_gmem, rhs_gmem, o_gmem, parts_gmem, *, a_smem, b_smem, filled, freed, o_smem,
           staged, emptied, fetched):  # fmt: skip
    """The kernel of `scatter_product`."""
    device = lax.axis_index(axis_name)
    o_smem, o_tma, o_bytes = [o_smem] * 3 if plan.interpreted else o_smem
    ring = plan.ring(a_smem, b_smem, filled, freed)
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR(tiles_of_shard(plan)))
    ex = Exchange(plan, axis_name, device, parts_gmem, arrived)

    @memory_role
    def _():
        send_pieces = functools.partial(send, ex, o_tma, o_bytes, o_gmem, staged)
        load(ex, ring, lhs_gmem, rhs_gmem, send_pieces, o_bytes, emptied, fetched)

    @compute_role
    def _():
        compute(ex, ring, o_smem, o_bytes, staged, emptied, fetched)


def scatter_product(lhs, rhs, axis_name, config: Config | None = None, *, transpose_rhs=False):
    """This device's rows of the sum. With `transpose_rhs` rhs is (N, K)."""
    (m, k), n, num_devices = lhs.shape, rhs.shape[0 if transpose_rhs else 1], lax.axis_size(axis_name)
    if 0 in (m, n, k):
        return _host.alike(jnp.zeros((m // num_devices, n), lhs.dtype), lhs, rhs)[0]
    num_sms = _host.require_tensor_cores("matmul_reduce_scatter").num_sms
    c = config or default_config(m, n, k, num_devices, lhs.dtype, transpose_rhs, num_sms)
    plan = matmul_core.plan_of(m // num_devices, n, k, num_devices, lhs.dtype, transpose_rhs, c, num_sms)
    whole = dataclasses.replace(c, store_slots=len(plan.store_pieces))
    plan = dataclasses.replace(plan, tiles=dataclasses.replace(plan.tiles, config=whole))
    run = launch(
        functools.partial(kernel, plan, axis_name),
        plan,
        [jax.ShapeDtypeStruct(shape, lhs.dtype) for shape in ((m // num_devices, n), parts_shape(plan))],
        dict(cluster=plan.tiles.clusters),
        scratch_of(plan),
        _host.compiler_params(),
    )
    return run(lhs.reshape(num_devices, -1, k), plan.b.pad(rhs))[0]
