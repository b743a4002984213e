"""The sum over GPUs of products, shared out by rows: tiles go to their owner as soon as they are computed.

    matmul_reduce_scatter(lhs, rhs, axis_name)    lhs: (n M, K), rhs: (K, N), bfloat16 or float16    ->    (M, N)

It returns `jax.lax.psum_scatter(lhs @ rhs, axis_name, tiled=True)`, inside `jax.shard_map`, on 2 to 8 GPUs of one host,
on a mesh of one axis or several. Rows of lhs and rhs must be multiples of 16 bytes.

Each device computes its part of the sums of all owners, its own tiles last. It rounds the parts of others to the
operands' dtype, as `jax.lax.psum_scatter` gets them, and stores them into the owner's buffer. The owner adds them in
float32 to its own, which is not rounded before: first the part of the next device, then of the one after it, and so on.
So runs are equal to the bit.

| warpgroup | does |
|---|---|
| memory | loads the steps of all tiles into the ring of slots (`gemm/roles.py`) |
| compute, two | multiply; store the tile to its owner, or, of an own tile, add the others' parts and store the sum |

| barrier | arrives | count | waits |
|---|---|---|---|
| arrived[tile] (semaphore) | this warpgroup of each other device: its part of the tile is here | n - 1 | compute |
| filled[slot], freed[slot] | as in `gemm/roles.py` | | |

A warpgroup announces a tile late in its next one, when the stores have ended: nobody waits for a store. The two do so
at different steps, so that one multiplies while the other waits for its signal to leave. The pieces of a whole tile fit
into shared memory, so that NVLink carries them during the next tile's products.

Bound by: the tensor cores, or by NVLink, which carries n - 1 shards each way. The derivative with respect to lhs is
`all_gather_matmul`, and what it gathers serves the one with respect to rhs.

Not supported: several hosts; batches; results of another dtype.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from ..gemm import roles
from ..gemm.core import COMPUTE, COMPUTE_REGISTERS, MEMORY, MEMORY_REGISTERS
from ..gemm.matmul import matmul
from . import all_gather_matmul as transposed
from . import core, matmul_core, protocol
from .matmul_core import Config

STAGES_MIN = 3  # Slots that the ring keeps beside the pieces of a whole tile.


@dataclasses.dataclass(frozen=True)
class ScatterPlan(matmul_core.ShardPlan):
    """The plan of the kernel: a tile's rows are of one owner, who gets it."""

    axis_name: Any = None
    device: Any = None
    parts: Any = None  # The buffer for the others' parts: (n - 1, rows, columns), in whole tiles.

    @property
    def protocol(self) -> protocol.MatmulScatter:
        return protocol.MatmulScatter(self.tiles.num_shards)

    @property
    def parts_shape(self) -> tuple[int, ...]:
        t = self.tiles
        return (t.num_shards - 1, *_mgpu.padded_shape((t.m, t.n), t.cluster_tile))

    @property
    def semaphores(self) -> tuple[int, ...]:
        c = self.config
        return self.tiles.per_shard, c.cluster_m * c.cluster_n, COMPUTE

    def tile(self, number):
        """Index of the semaphore of this warpgroup's share of tile `number` of a shard."""
        block_m, block_n = self.block_of_cluster
        return number, block_m * self.config.cluster_n + block_n, lax.axis_index("role")

    def matrix(self, operand, gmem):
        return gmem.at[self.protocol.owner(self.device, self.entry.step)] if operand.stacked else gmem

    def send(self, piece_smem, o_gmem, row, col):
        """An own piece goes to `o_gmem`, and others to a slot of their owner."""
        step, n = self.entry.step, self.tiles.num_shards
        rows, cols = (pl.ds(start, size) for start, size in zip((row, col), piece_smem.shape, strict=True))

        def store(action, _):
            def copy(device_id):
                to = plgpu.remote_ref(self.parts, device_id).at[action.slot[0], rows, cols]
                plgpu.copy_smem_to_gmem(piece_smem, to)

            matmul_core.to_peer(self.device, n, self.axis_name, action.peer, copy)

        pl.when(step == n - 1)(lambda: plgpu.copy_smem_to_gmem(piece_smem, o_gmem))
        core.perform(self.protocol.send(self.device, step, self.entry.number), self.axis_name, {}, store)


def matmul_reduce_scatter_reference(lhs, rhs, axis_name):
    part = jnp.matmul(lhs, rhs, precision="highest", preferred_element_type=jnp.float32)
    return lax.psum_scatter(part, axis_name, tiled=True).astype(lhs.dtype)


@functools.lru_cache(4096)
def default_config(
    m: int, n: int, k: int, num_devices: int, dtype=jnp.bfloat16, transpose_rhs=False, num_sms=132
) -> Config:
    """The configuration of the least predicted time for (M, K) by (K, N) matrices on each device."""
    shard = m // num_devices, n, k, num_devices
    found, _ = matmul_core.best(*shard, jnp.dtype(dtype).itemsize, transpose_rhs, num_sms)
    config = Config(**dataclasses.asdict(found))
    plan = matmul_core.plan_of(ScatterPlan, *shard, jnp.dtype(dtype), transpose_rhs, config, num_sms)
    whole = dataclasses.replace(config, store_slots=len(plan.store_pieces))
    plan = matmul_core.plan_of(ScatterPlan, *shard, jnp.dtype(dtype), transpose_rhs, whole, num_sms)
    return whole if plan.smem_bytes(STAGES_MIN) <= _mgpu.SMEM_BYTES_MAX else config


def matmul_reduce_scatter(lhs, rhs, axis_name, *, config: Config | None = None):
    """This device's rows of the sum of all devices' products.

    Args:
      lhs: (M, K). Rows of the result are shared out, in the order of the devices.
      rhs: (K, N).
      axis_name: a name of a mesh axis of `jax.shard_map`, or a tuple of names.
      config: tiles of the product.

    Raises:
      ValueError: a dtype, a shape or an axis that is not supported; the message says what to do.
      RuntimeError: there is no GPU and none to compile for.
    """
    lhs, rhs, n = matmul_core.require_operands("matmul_reduce_scatter", lhs, rhs, axis_name)
    if lhs.shape[0] % n:
        raise ValueError(
            f"cookbook.matmul_reduce_scatter: {lhs.shape=}; its rows must be a multiple of the {n} devices on "
            f"{axis_name=}: pad them to {-(-lhs.shape[0] // n) * n} (jnp.pad)"
        )
    core.require_gpus("matmul_reduce_scatter", n)
    if n == 1:
        return matmul(lhs, rhs)
    return _product(lhs, rhs, axis_name, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(lhs, rhs, axis_name, config):
    return scatter_product(lhs, rhs, axis_name, config)


def _product_fwd(lhs, rhs, axis_name, config):
    return _product(lhs, rhs, axis_name, config), (lhs, rhs)


def _product_bwd(axis_name, config, operands, d_out):
    lhs, rhs = operands
    d_lhs, d_out = transposed.gather_product(d_out, rhs, axis_name, transpose_rhs=True, keeps_own=True)
    return d_lhs, matmul(lhs, d_out, transpose_a=True)


_product.defvjp(_product_fwd, _product_bwd)


def scatter_product(lhs, rhs, axis_name, config: Config | None = None, *, transpose_rhs=False):
    """This device's rows of the sum. With `transpose_rhs` rhs is (N, K)."""
    (m, k), n, num_devices = lhs.shape, rhs.shape[0 if transpose_rhs else 1], lax.axis_size(axis_name)
    if 0 in (m, n, k):
        return _mgpu.alike(jnp.zeros((m // num_devices, n), lhs.dtype), lhs, rhs)[0]
    num_sms = _mgpu.require_target("matmul_reduce_scatter").num_sms
    c = config or default_config(m, n, k, num_devices, lhs.dtype, transpose_rhs, num_sms)
    plan = matmul_core.plan_of(
        ScatterPlan, m // num_devices, n, k, num_devices, lhs.dtype, transpose_rhs, c, num_sms, axis_name=axis_name
    )
    plan = dataclasses.replace(plan, a=dataclasses.replace(plan.a, stacked=True))
    kernel = _mgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=[jax.ShapeDtypeStruct(shape, lhs.dtype) for shape in ((m // num_devices, n), plan.parts_shape)],
        grid=plan.grid,
        grid_names=("cluster",),
        cluster=tuple(plan.cluster.values()),
        cluster_names=tuple(plan.cluster),
        num_threads=COMPUTE + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=_mgpu.compiler_params(),
    )
    return kernel(lhs.reshape(num_devices, -1, k), plan.b.pad(rhs))[0]


def _kernel(plan, lhs_gmem, rhs_gmem, o_gmem, parts_gmem, *, a_smem, b_smem, filled, freed, o_smem):
    plan = dataclasses.replace(plan, device=lax.axis_index(plan.axis_name), parts=parts_gmem)
    (a_smem, a_tma), (b_smem, b_tma) = plan.a.views(a_smem, False), plan.b.views(b_smem, False)
    ring = _mgpu.Ring(filled, freed, plan.num_stages)
    semaphores = dict(arrived=pl.get_global(plgpu.SemaphoreType.REGULAR(plan.semaphores)))

    @pl.when(lax.axis_index("role") == MEMORY)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        roles.load(plan, ring, lhs_gmem, rhs_gmem, a_tma, b_tma)

    @pl.when(lax.axis_index("role") < COMPUTE)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        def multiply(plan, before, acc):
            last = plan.entry.step * plan.tiles.per_shard + plan.entry.number - plan.tiles.clusters

            def prepare(step, a, b):
                pl.when(step == _announce_step(plan))(lambda: _announce(plan, semaphores, last))

            return roles.multiply(plan, ring, a_smem, b_smem, before, acc, prepare)

        def store(plan, place, stored, values):
            values = _add_parts(plan, semaphores, place, values)
            roles.store({}, o_gmem, o_smem, plan, place, stored, values)

        roles.compute(plan, multiply, store)
        _announce(plan, semaphores, plan.index(plan.num_tiles() - 1))


def _announce_step(plan):
    """The step of a tile at which this warpgroup announces the tile before."""
    return _mgpu.div((3 + lax.axis_index("role")) * plan.tiles.num_steps, 5)


def _announce(plan, semaphores, index):
    """Tells the owner of tile `index`, if there is one, that this warpgroup's share of it has arrived."""
    step, number = _mgpu.div(index, plan.tiles.per_shard), _mgpu.rem(index, plan.tiles.per_shard)
    actions = plan.protocol.sent(plan.device, step, plan.tile(number))
    pl.when(index >= 0)(lambda: core.perform(actions, plan.axis_name, semaphores))


def _add_parts(plan, semaphores, place, values):
    """`values`, to which an owner has added the parts of the other devices."""
    entry, n = plan.entry, plan.tiles.num_shards
    core.perform(plan.protocol.receive(plan.device, entry.step, plan.tile(entry.number)), plan.axis_name, semaphores)
    rows, cols = (pl.ds(start, size) for start, size in zip(place, values.shape, strict=True))

    # Loads of 8 bytes a thread fill whole sectors of the L2 cache, which the accumulator's own layout does not.
    layout = plgpu.Layout.WGMMA if values.shape[1] % 16 else plgpu.Layout.WGMMA_UPCAST_2X

    def add(slot, values):
        part = plgpu.load(plan.parts.at[slot, rows, cols], layout=layout, optimized=False)
        return values + plgpu.layout_cast(part, plgpu.Layout.WGMMA).astype(jnp.float32)

    return lax.fori_loop(0, jnp.where(entry.step == n - 1, n - 1, 0), add, values)


def flops(m: int, n: int, k: int) -> int:
    """Floating-point operations of one device."""
    return 2 * m * n * k


def bytes_moved(m: int, n: int, num_devices: int, itemsize: int = 2) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return (num_devices - 1) * m * n * itemsize // num_devices


matmul_reduce_scatter.Config = Config
