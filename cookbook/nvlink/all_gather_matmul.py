# SPDX-License-Identifier: Apache-2.0
"""The product of rows that are shared out over GPUs with a matrix: the all-gather runs during the product.

    all_gather_matmul(lhs, rhs, axis_name)    lhs: (M, K), rhs: (K, N), both bfloat16 or both float16    ->    (n M, N)

It returns `jax.lax.all_gather(lhs, axis_name, tiled=True) @ rhs`, inside `jax.shard_map`, on 2 to 8 GPUs of one host,
on a mesh of one axis or several. Sums are float32. Rows of lhs and rhs must be multiples of 16 bytes.

Each device multiplies its own shard first, then the next device's, and so on, tile after tile in one pipeline. A few
SMs do no products: they send this device's shard to all others, in the order in which those need it.

| block | warpgroup | does |
|---|---|---|
| senders | 0 | loads pieces of the shard into shared memory, stores each into a peer's buffer |
| the others | memory | waits for a block of lhs, then loads its steps into the ring of slots |
| | compute, two | multiply, and store the result (`gemm/roles.py`) |

| barrier | arrives | count | waits |
|---|---|---|---|
| loaded[stage] | TMA: a piece is in shared memory | 1 | the sender, before it stores the piece |
| arrived[step - 1, block] (semaphore) | each sender of the owner: its share of a block is here | 1 | memory |
| filled[slot], freed[slot] | as in `gemm/roles.py` | | |

A block of lhs is the rows of a cluster's tiles. Whole rows are contiguous, so a piece of them is one copy without a
descriptor, as `protocol.py` asks for.

Senders wait for nobody, and the grid has no more blocks than the GPU has SMs: all run at once, in whatever order they
start, and what a product waits for comes.

Bound by: the tensor cores of the SMs that multiply, or by NVLink, which carries n - 1 shards each way. Where the tiles
of all rows of a shard begin at once, they wait for its last block: a few senders may be too slow. The derivative
with respect to lhs is `matmul_reduce_scatter`; the one with respect to rhs gathers lhs again, so that no device keeps
the shards of all until then.

Not supported: several hosts; batches; results of another dtype. Source: Wang et al., "Overlap Communication with
Dependent Computation in Large Deep Learning Models via Decomposition" (2023), for multiplying shard by shard. Theirs
pass round a ring; here they are pushed, so that none waits for another device's product.
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
from ..gemm import kernel as roles
from ..gemm.dense.matmul import matmul
from ..gemm.plan import COMPUTE, COMPUTE_REGISTERS, MEMORY, MEMORY_REGISTERS
from . import core, matmul_core, protocol
from . import matmul_reduce_scatter as transposed
from .all_gather import all_gather

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


@dataclasses.dataclass(frozen=True)
class GatherPlan(matmul_core.ShardPlan):
    """The plan of the kernel: products of shards that arrive meanwhile."""

    keeps_own: bool = False  # Whether the buffer of shards gets this device's own too.

    @property
    def rows(self) -> int:
        """Rows of a block, which are announced together: those of a cluster's tiles."""
        return self.tiles.cluster_tile[0]

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a block that a sender copies at once: whole rows, or a part of one that is too long."""
        k = self.tiles.k
        fits = [count for count in range(1, self.rows + 1) if self.rows % count == 0 and count * k <= PIECE]
        return min(max(fits, default=1), self.tiles.m), min(k, PIECE)

    @property
    def num_senders(self) -> int:
        return self.first_cluster * self.config.cluster_m * self.config.cluster_n

    @property
    def protocol(self) -> protocol.GatherMatmul:
        height, width = self.piece
        rounds = pl.cdiv(pl.cdiv(self.rows, height) * pl.cdiv(self.tiles.k, width), self.num_senders)
        num_blocks = self.tiles.shard_grid[0]
        return protocol.GatherMatmul(self.tiles.num_shards, self.num_senders, num_blocks, rounds, LAG, self.keeps_own)

    def source(self, sender, i) -> tuple:
        """(whether there is one, its place in the shard) of the piece that `sender` sends in round `i`.

        The last piece of a shard is shifted back to end with it, and the last one of a long row to end with the row.
        Values that it shares with the one before are sent twice, the same both times.
        """
        (height, width), (m, k) = self.piece, (self.tiles.m, self.tiles.k)
        _, block, piece = self.protocol.place(sender, i)
        across = pl.cdiv(k, width)
        offset = _device.div(piece, across) * height
        row, col = block * self.rows + offset, _device.rem(piece, across) * width
        exists = (offset < self.rows) & (row < m)
        place = pl.ds(jnp.minimum(row, m - height), height), pl.ds(jnp.minimum(col, k - width), width)
        return exists, place

    def _scratch(self, num_stages: int) -> dict:
        return super()._scratch(num_stages) | dict(loaded=plgpu.Barrier(num_barriers=STAGES_MAX))

    @property
    def scratch(self) -> dict:
        """One memory, seen as the ring by tensor cores and by TMA, and as the stages of a sender."""
        scratch = super().scratch
        slots = [scratch.pop("a_smem"), scratch.pop("b_smem")]
        views = zip(*(ref.refs if isinstance(ref, plgpu.RefUnion) else (ref, ref) for ref in slots), strict=True)
        ring_bytes = self.num_stages * (self.smem_bytes(1) - self.smem_bytes(0))
        piece_bytes = math.prod(self.piece) * self.a.dtype.itemsize
        count = min(STAGES_MAX, ring_bytes // piece_bytes)
        if count < 2:  # A piece that is loaded while the one before is stored.
            raise ValueError(
                f"{_host.PACKAGE}.all_gather_matmul: {self.num_stages} stages of {self.config.tile_m=}, "
                f"{self.config.tile_n=} "
                f"are {ring_bytes} bytes, in which a sender has no room for two pieces of {piece_bytes}: more stages "
                "or larger tiles"
            )
        stages = plgpu.SMEM((count, *self.piece), self.a.dtype)
        return scratch | dict(smem=plgpu.RefUnion(*map(list, views), stages))


def all_gather_matmul_reference(lhs, rhs, axis_name):
    lhs = lax.all_gather(lhs, axis_name, tiled=True)
    return jnp.matmul(lhs, rhs, precision="highest", preferred_element_type=jnp.float32).astype(lhs.dtype)


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


def all_gather_matmul(lhs, rhs, axis_name, *, config: Config | None = None):
    """The product of all devices' rows with this device's matrix.

    Args:
      lhs: this device's rows, (M, K). The result has those of all devices, in their order.
      rhs: this device's matrix, (K, N).
      axis_name: a name of a mesh axis of `jax.shard_map`, or a tuple of names.
      config: tiles of the product, and how many SMs send.

    Raises:
      ValueError: a dtype, a shape or an axis that is not supported; the message says what to do.
      RuntimeError: there is no GPU and none to compile for.
    """
    lhs, rhs, n = matmul_core.require_operands("all_gather_matmul", lhs, rhs, axis_name)
    _host.require_config("all_gather_matmul", config, Config)
    core.require_gpus("all_gather_matmul", n, lhs, rhs)
    if n == 1:
        return matmul(lhs, rhs)
    return _product(*_host.reverse_only("all_gather_matmul", lhs, rhs), axis_name, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(lhs, rhs, axis_name, config):
    return gather_product(lhs, rhs, axis_name, config)[0]


def _product_fwd(lhs, rhs, axis_name, config):
    return _product(lhs, rhs, axis_name, config), (lhs, rhs)


def _product_bwd(axis_name, config, operands, d_out):
    return _host.without_derivative("all_gather_matmul", functools.partial(_gradients, axis_name))(*operands, d_out)


def _gradients(axis_name, lhs, rhs, d_out):
    d_lhs = transposed.scatter_product(d_out, rhs, axis_name, transpose_rhs=True)
    return d_lhs, matmul(all_gather(lhs, axis_name), d_out, transpose_a=True)


_product.defvjp(_product_fwd, _product_bwd)


def gather_product(lhs, rhs, axis_name, config: Config | None = None, *, transpose_rhs=False, keeps_own=False):
    """(the product, lhs of all devices): the latter lacks this device's own rows unless `keeps_own`.

    With `transpose_rhs` rhs is (N, K).
    """
    (m, k), n, num_devices = lhs.shape, rhs.shape[0 if transpose_rhs else 1], lax.axis_size(axis_name)
    if 0 in (m, n, k):
        shape, gathered = (num_devices * m, n), all_gather(lhs, axis_name)
        return _host.alike(jnp.zeros(shape, lhs.dtype), gathered, rhs)[0], gathered
    num_sms = _host.require_tensor_cores("all_gather_matmul").num_sms
    c = config or default_config(m, n, k, num_devices, lhs.dtype, transpose_rhs, num_sms)
    first = pl.cdiv(c.num_senders, c.cluster_m * c.cluster_n)
    left = num_sms - first * c.cluster_m * c.cluster_n
    plan = matmul_core.plan_of(
        GatherPlan, m, n, k, num_devices, lhs.dtype, transpose_rhs, c, left, first_cluster=first, keeps_own=keeps_own
    )
    kernel = _host.kernel(
        functools.partial(_kernel, plan, axis_name),
        out_type=[jax.ShapeDtypeStruct((num_devices, m, size), lhs.dtype) for size in (n, k)],
        grid=plan.grid,
        grid_names=("cluster",),
        cluster=tuple(plan.cluster.values()),
        cluster_names=tuple(plan.cluster),
        num_threads=COMPUTE + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=_host.compiler_params(),
    )
    out, gathered = kernel(lhs, plan.b.pad(rhs))
    return out.reshape(-1, n), gathered.reshape(-1, k)


def _kernel(plan, axis_name, lhs_gmem, rhs_gmem, o_gmem, gathered_gmem, *, smem, filled, freed, loaded, o_smem):
    (a_smem, b_smem), (a_tma, b_tma), stages = smem
    ring = _device.Ring(filled, freed, plan.num_stages)
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.tiles.num_shards - 1, plan.protocol.num_blocks)))
    role, multiplies = lax.axis_index("role"), lax.axis_index("cluster") >= plan.first_cluster

    @pl.when(~multiplies & (role == 0))
    def _():
        _send(plan, axis_name, lhs_gmem, gathered_gmem, stages, loaded, arrived)

    @pl.when(multiplies & (role == MEMORY))
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        _load(plan, ring, axis_name, lhs_gmem, gathered_gmem, rhs_gmem, a_tma, b_tma, arrived)

    @pl.when(multiplies & (role < COMPUTE))
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        d = lax.axis_index(axis_name)

        def multiply(plan, before, acc):
            return roles.multiply(plan, ring, a_smem, b_smem, before, acc)

        def store(plan, place, stored, values):
            owner = plan.protocol.owner(d, plan.entry.step)
            roles.store({}, o_gmem.at[owner], o_smem, plan, place, stored, values)

        roles.compute(plan, multiply, store)


def _send(plan, axis_name, lhs_gmem, gathered_gmem, stages, loaded, arrived):
    """A sender: its share of each block of rows, to one peer after the other."""
    d, gather, num_stages = lax.axis_index(axis_name), plan.protocol, stages.shape[0]
    block_m, block_n = plan.block_of_cluster
    sender = (lax.axis_index("cluster") * plan.config.cluster_m + block_m) * plan.config.cluster_n + block_n

    def load(i):
        stage, (_, place) = _device.rem(i, num_stages), plan.source(sender, i)
        core.load_bytes(lhs_gmem.at[place], stages.at[stage], loaded.at[stage])

    def store(i, _, device_id):
        stage, (exists, place) = _device.rem(i, num_stages), plan.source(sender, i)
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


def _load(plan, ring, axis_name, lhs_gmem, gathered_gmem, rhs_gmem, a_smem, b_smem, arrived):
    """The memory warpgroup: all steps of its tiles, once their rows of lhs are here, each when a slot is free."""
    d, gather = lax.axis_index(axis_name), plan.protocol

    def load_tile(plan, tile, before):
        step, _, row, col = plan.entry
        others, block = gathered_gmem.at[gather.owner(d, step)], _device.div(row, plan.rows)
        core.perform(gather.multiply(d, step, block), axis_name, dict(arrived=arrived))

        @pl.loop(0, plan.tiles.num_steps)
        def _(i):
            slot, k = ring.fill(before + i), plan.k(i)
            copy_a = lambda gmem: plan.a.copy(gmem, (row, k), a_smem.at[slot], ring.filled.at[slot], plan.axis_n)
            pl.when(step == 0)(lambda: copy_a(lhs_gmem))
            pl.when(step > 0)(lambda: copy_a(others))
            plan.b.copy(rhs_gmem, plan.b.at(col, k), b_smem.at[slot], ring.filled.at[slot], plan.axis_m)

    ring.drain(roles.each_tile(plan, 0, load_tile))


def flops(m: int, n: int, k: int, num_devices: int) -> int:
    """Floating-point operations of one device."""
    return 2 * num_devices * m * n * k


def bytes_moved(m: int, k: int, num_devices: int, itemsize: int = 2) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return (num_devices - 1) * m * k * itemsize


all_gather_matmul.Config = Config
