# SPDX-License-Identifier: Apache-2.0
"""The kernel of `all_gather_matmul`: some blocks send this device's shard, the others multiply what has come.

| block | warpgroup | does |
|---|---|---|
| senders | 0 | loads pieces of the shard into shared memory, stores each into a peer's buffer |
| the others | memory | waits for a block of lhs, then loads its steps into the ring of slots |
| | compute, two | multiply, and store the result (`gemm/kernel.py`) |

| barrier | arrives | count | waits |
|---|---|---|---|
| loaded[stage] | TMA: a piece is in shared memory | 1 | the sender, before it stores the piece |
| arrived[step - 1, block] (semaphore) | each sender of the owner: its share of a block is here | 1 | memory |
| filled[slot], freed[slot] | as in `gemm/kernel.py` | | |

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
from ..gemm.kernel import multiply, store
from ..gemm.launch import launch
from ..gemm.operand import Ring
from ..gemm.plan import COMPUTE, COMPUTE_REGISTERS, MEMORY, MEMORY_REGISTERS, Plan
from . import core, matmul_core, protocol
from .matmul_core import block_of_cluster, num_tiles, tile_of_block

PIECE = 16_384  # The most values of the shard that a sender copies at once.
LAG = 2  # Pieces that a sender has stored since those that it announces: their stores have ended by then.
STAGES_MAX = 8
SENDERS = 2, 4, 8, 16  # Numbers of senders that a default configuration chooses from.
# Bytes that one sender stores to a peer in a us beside products (15 to 40 were measured), and that NVLink carries.
SENDER_RATE, NVLINK_RATE = 30e3, 350e3


@dataclasses.dataclass(frozen=True)
class Config(matmul_core.Config):
    """How the product is cut up, and how many SMs send."""

    num_senders: int = 4  # SMs that send the shard, whole clusters of them. The others multiply.

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.num_senders <= 64:
            raise ValueError(f"{self.num_senders=}: must be from 1 to 64; the SMs that are left multiply")


@functools.lru_cache(4096)
def default_config(
    m: int, n: int, k: int, num_devices: int, dtype=jnp.bfloat16, transpose_rhs=False, num_sms=132
) -> Config:
    """The configuration of the least predicted time for shards of (M, K) and a (K, N) matrix on each device."""
    dtype = jnp.dtype(dtype)

    def predicted(num_senders: int):
        config, time = matmul_core.best(m, n, k, num_devices, dtype.itemsize, transpose_rhs, num_sms - num_senders)
        sent = (num_devices - 1) * m * k * dtype.itemsize / min(num_senders * SENDER_RATE, NVLINK_RATE)
        # The last block of the last shard is multiplied after it has come.
        blocks = num_devices * pl.cdiv(m, config.tile_m * config.cluster_m)
        return max(time, sent + time / blocks), num_senders, config

    _, num_senders, config = min((predicted(count) for count in SENDERS), key=lambda found: found[:2])
    return Config(**dataclasses.asdict(config), num_senders=num_senders)


@dataclasses.dataclass(frozen=True)
class Shard:
    """How senders cut this device's shard, (m, k), into blocks of `rows`, and these into pieces."""

    m: int
    k: int
    rows: int  # Rows of a block, which are announced together: a cluster's tiles have as many.
    num_blocks: int
    num_devices: int
    num_senders: int
    keeps_own: bool  # Whether the buffer of shards gets this device's own too.

    @classmethod
    def of(cls, plan: Plan, keeps_own: bool) -> "Shard":
        c, t = plan.config, plan.tiles
        num_senders = t.first_cluster * c.cluster_m * c.cluster_n
        return cls(t.m, t.k, t.cluster_tile[0], t.shard_grid[0], t.num_shards, num_senders, keeps_own)

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a block that a sender copies at once: whole rows, or a part of one that is too long."""
        k = self.k
        fits = [count for count in range(1, self.rows + 1) if self.rows % count == 0 and count * k <= PIECE]
        return min(max(fits, default=1), self.m), min(k, PIECE)

    @property
    def protocol(self) -> protocol.GatherMatmul:
        height, width = self.piece
        rounds = pl.cdiv(pl.cdiv(self.rows, height) * pl.cdiv(self.k, width), self.num_senders)
        return protocol.GatherMatmul(self.num_devices, self.num_senders, self.num_blocks, rounds, LAG, self.keeps_own)

    def source(self, sender, i) -> tuple:
        """(whether there is one, its place in the shard) of the piece that `sender` sends in round `i`.

        The last piece of a shard is shifted back to end with it, and the last one of a long row to end with the row.
        Values that it shares with the one before are sent twice, the same both times.
        """
        (height, width), (m, k) = self.piece, (self.m, self.k)
        _, block, piece = self.protocol.place(sender, i)
        across = pl.cdiv(k, width)
        offset = _device.div(piece, across) * height
        row, col = block * self.rows + offset, _device.rem(piece, across) * width
        exists = (offset < self.rows) & (row < m)
        place = pl.ds(jnp.minimum(row, m - height), height), pl.ds(jnp.minimum(col, k - width), width)
        return exists, place


def scratch_of(plan: Plan, shard: Shard) -> dict:
    """One memory, seen as the ring by tensor cores and by TMA, and as the stages of a sender."""
    c, scratch = plan.config, plan.scratch
    slots = [scratch.pop("a_smem"), scratch.pop("b_smem")]
    views = zip(*(ref.refs if isinstance(ref, plgpu.RefUnion) else (ref, ref) for ref in slots), strict=True)
    ring_bytes = plan.num_stages * (plan.smem_bytes(1) - plan.smem_bytes(0))
    piece_bytes = math.prod(shard.piece) * plan.a.dtype.itemsize
    count = min(STAGES_MAX, ring_bytes // piece_bytes)
    if count < 2:  # A piece that is loaded while the one before is stored.
        raise ValueError(
            f"{_host.PACKAGE}.all_gather_matmul: {plan.num_stages} stages of {c.tile_m=}, {c.tile_n=} are {ring_bytes} "
            f"bytes, in which a sender has no room for two pieces of {piece_bytes}: more stages or larger tiles"
        )
    stages = plgpu.SMEM((count, *shard.piece), plan.a.dtype)
    loaded = plgpu.Barrier(num_barriers=STAGES_MAX)
    return scratch | dict(loaded=loaded, smem=plgpu.RefUnion(*map(list, views), stages))


def send(plan: Plan, shard: Shard, axis_name, lhs_gmem, gathered_gmem, stages, loaded, arrived):
    """A sender: its share of each block of rows, to one peer after the other."""
    d, gather, num_stages = lax.axis_index(axis_name), shard.protocol, stages.shape[0]
    block_m, block_n = block_of_cluster(plan)
    sender = (lax.axis_index("cluster") * plan.config.cluster_m + block_m) * plan.config.cluster_n + block_n

    def load(i):
        stage, (_, place) = _device.rem(i, num_stages), shard.source(sender, i)
        core.load_bytes(lhs_gmem.at[place], stages.at[stage], loaded.at[stage])

    def store(i, _, device_id):
        stage, (exists, place) = _device.rem(i, num_stages), shard.source(sender, i)
        theirs = plgpu.remote_ref(gathered_gmem, device_id).at[d, *place]
        pl.when(exists)(lambda: plgpu.copy_smem_to_gmem(stages.at[stage], theirs, commit_group=False))
        plgpu.commit_smem_to_gmem_group()

    @pl.loop(0, num_stages - 1)
    def _(i):
        pl.when(i < gather.num_rounds)(lambda: load(i))

    @pl.loop(0, gather.num_rounds)
    def _(i):
        plgpu.barrier_wait(loaded.at[_device.rem(i, num_stages)])
        core.perform(gather.send(d, sender, i), axis_name, dict(arrived=arrived), functools.partial(store, i))
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # The stage of the round before is free.
        pl.when(i + num_stages - 1 < gather.num_rounds)(lambda: load(i + num_stages - 1))

    core.perform(gather.end_send(d), axis_name, dict(arrived=arrived))


def load(plan: Plan, shard: Shard, ring: Ring, axis_name, lhs_gmem, gathered_gmem, rhs_gmem, arrived):
    """The memory warpgroup: all steps of its tiles, once their rows of lhs are here, each when a slot is free."""
    d, gather = lax.axis_index(axis_name), shard.protocol

    def load_tile(number, before):
        step, _, row, col = tile_of_block(plan, number)
        others, block = gathered_gmem.at[gather.owner(d, step)], _device.div(row, shard.rows)
        core.perform(gather.multiply(d, step, block), axis_name, dict(arrived=arrived))

        @pl.loop(0, plan.tiles.num_steps)
        def _(i):
            slot, k = ring.acquire(before + i), plan.k_start(i)
            copy_a = lambda gmem: plan.a.copy(gmem, (row, k), ring.a_tma.at[slot], ring.filled.at[slot], plan.axis_n)
            pl.when(step == 0)(lambda: copy_a(lhs_gmem))
            pl.when(step > 0)(lambda: copy_a(others))
            plan.b.copy(rhs_gmem, plan.b.at(col, k), ring.b_tma.at[slot], ring.filled.at[slot], plan.axis_m)

        return before + plan.tiles.num_steps

    ring.drain(lax.fori_loop(0, num_tiles(plan), load_tile, 0))


def kernel(
    plan: Plan, shard: Shard, axis_name, lhs_gmem, rhs_gmem, o_gmem, gathered_gmem, *, smem, filled, freed, loaded,
    o_smem,
):  # fmt: skip
    """The kernel of `gather_product`."""
    (a_smem, b_smem), (a_tma, b_tma), stages = smem
    ring = Ring(filled, freed, plan.num_stages, a_smem, b_smem, a_tma, b_tma)
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((shard.num_devices - 1, shard.num_blocks)))
    role, multiplies = lax.axis_index("role"), lax.axis_index("cluster") >= plan.tiles.first_cluster

    @_device.role(~multiplies & (role == 0))
    def _():
        send(plan, shard, axis_name, lhs_gmem, gathered_gmem, stages, loaded, arrived)

    @_device.role(multiplies & (role == MEMORY), decrease_to=MEMORY_REGISTERS)
    def _():
        load(plan, shard, ring, axis_name, lhs_gmem, gathered_gmem, rhs_gmem, arrived)

    @_device.role(multiplies & (role < COMPUTE), increase_to=COMPUTE_REGISTERS)
    def _():
        d = lax.axis_index(axis_name)

        def compute_tile(number, before):
            tile = tile_of_block(plan, number)
            values = multiply(plan, ring, before, plan.tiles.num_steps)
            place, stored = plan.share((tile.row, tile.col)), number * len(plan.store_pieces)
            store(plan, ({}, o_gmem.at[shard.protocol.owner(d, tile.step)], o_smem), place, stored, values)
            return before + plan.tiles.num_steps

        lax.fori_loop(0, num_tiles(plan), compute_tile, 0)
        plgpu.wait_smem_to_gmem(0)


def gather_product(lhs, rhs, axis_name, config: Config | None = None, *, transpose_rhs=False, keeps_own=False):
    """(the product, lhs of all devices): the latter lacks this device's own rows unless `keeps_own`.

    With `transpose_rhs` rhs is (N, K).
    """
    (m, k), n, num_devices = lhs.shape, rhs.shape[0 if transpose_rhs else 1], lax.axis_size(axis_name)
    if 0 in (m, n, k):
        gathered = lax.all_gather(lhs, axis_name, tiled=True)
        return _host.alike(jnp.zeros((num_devices * m, n), lhs.dtype), gathered, rhs)[0], gathered
    num_sms = _host.require_tensor_cores("all_gather_matmul").num_sms
    c = config or default_config(m, n, k, num_devices, lhs.dtype, transpose_rhs, num_sms)
    first = pl.cdiv(c.num_senders, c.cluster_m * c.cluster_n)
    left = num_sms - first * c.cluster_m * c.cluster_n
    plan = matmul_core.plan_of(m, n, k, num_devices, lhs.dtype, transpose_rhs, c, left, first)
    shard = Shard.of(plan, keeps_own)
    run = launch(
        functools.partial(kernel, plan, shard, axis_name),
        plan,
        [jax.ShapeDtypeStruct((num_devices, m, size), lhs.dtype) for size in (n, k)],
        dict(cluster=first + plan.tiles.clusters),
        scratch_of(plan, shard),
        _host.compiler_params(),
    )
    out, gathered = run(lhs, plan.b.pad(rhs))
    return out.reshape(-1, n), gathered.reshape(-1, k)
