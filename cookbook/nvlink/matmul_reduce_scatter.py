# SPDX-License-Identifier: Apache-2.0
"""The sum over GPUs of products, shared out by rows: tiles go to their owner as soon as they are computed.

    matmul_reduce_scatter(lhs, rhs, axis_name)    lhs: (n M, K), rhs: (K, N), bfloat16 or float16    ->    (M, N)

It returns `jax.lax.psum_scatter(lhs @ rhs, axis_name, tiled=True)`, inside `jax.shard_map`, on 2 to 8 GPUs of one host,
on a mesh of one axis or several. Rows of lhs and rhs must be multiples of 16 bytes.

Each device computes its part of the sums of all owners, its own tiles last. It rounds the parts of others to the
operands' dtype, as `jax.lax.psum_scatter` gets them, and stores them into the owner's buffer. The owner adds them in
float32 to its own, which is not rounded before: first the part of the next device, then of the one after it, and so on.
The sum is rounded at the end. So each run gives the same bits. But the order depends on the owner, and all parts but
its own are rounded twice: `reduce_scatter` of the products gives other bits.

| warpgroup | does |
|---|---|
| memory | loads the steps of all tiles into the ring of slots (`gemm/roles.py`); stores the tile before to its owner; |
| | loads the next device's part of an own tile |
| compute, two | multiply; add the others' parts to an own tile, loading the further ones; |
| | leave the tile in shared memory |

| barrier | arrives | count | waits |
|---|---|---|---|
| arrived[tile] (semaphore) | each other device: its part of the tile is here | n - 1 | memory, and compute if n > 2 |
| fetched[wg] | each copy of a piece of a part | pieces | the compute warpgroup, of an own tile |
| staged | each compute warpgroup: its share of a tile is in shared memory | 2 | memory, before it stores the tile |
| emptied | memory: TMA has read the tile | 1 | compute, before it leaves the next one there |
| filled[slot], freed[slot] | as in `gemm/roles.py` | | |

When all SMs end their tiles at once, NVLink is busy for most of the next tile. So shared memory holds a whole tile, and
the tensor cores wait neither for its stores nor for their arrival, which the memory warpgroup announces: it has time.

Bound by: the tensor cores, or by NVLink, which carries n - 1 shards each way. The derivative with respect to lhs is
`all_gather_matmul`, and what it gathers serves the one with respect to rhs.

Not supported: several hosts; batches; results of another dtype.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from ..gemm import kernel as roles
from ..gemm.dense.matmul import matmul
from ..gemm.plan import COMPUTE, COMPUTE_REGISTERS, MEMORY, MEMORY_REGISTERS
from . import all_gather_matmul as transposed
from . import core, matmul_core, protocol
from .matmul_core import Config


@dataclasses.dataclass(frozen=True)
class ScatterPlan(matmul_core.ShardPlan):
    """The plan of the kernel: a tile's rows are of one owner, who gets it."""

    axis_name: Any = None
    device: Any = None
    parts: Any = None  # The buffer for the others' parts.

    @property
    def protocol(self) -> protocol.MatmulScatter:
        return protocol.MatmulScatter(self.tiles.num_shards)

    @property
    def parts_shape(self) -> tuple[int, ...]:
        """For each other device and tile, the pieces as they lie in shared memory, swizzled."""
        pieces = (COMPUTE, len(self.store_pieces), *self.store_piece)
        return (self.tiles.num_shards - 1, math.prod(self.semaphores), *pieces)

    @property
    def semaphores(self) -> tuple[int, ...]:
        c = self.config
        return self.tiles.per_shard, c.cluster_m * c.cluster_n

    @property
    def tile(self) -> tuple:
        """Index of the semaphore of this block's tile, and of the tile's slots in the protocol."""
        block_m, block_n = self.block_of_cluster
        return self.entry.number, block_m * self.config.cluster_n + block_n

    def _scratch(self, num_stages: int) -> dict:
        scratch = super()._scratch(num_stages) | dict(
            staged=plgpu.Barrier(num_arrivals=COMPUTE),
            emptied=plgpu.Barrier(),
            fetched=plgpu.Barrier(num_arrivals=len(self.store_pieces), num_barriers=COMPUTE),
        )
        if not self.interpreted:  # The third view is of the bytes as they are.
            views = scratch["o_smem"].refs
            scratch["o_smem"] = plgpu.RefUnion(*views, plgpu.SMEM(views[0].shape, self.out_dtype))
        return scratch

    @property
    def num_pieces(self) -> int:
        """Pieces of a tile that wait in shared memory, of both warpgroups."""
        return COMPUTE * len(self.store_pieces)

    @property
    def is_own(self):
        """Whether this device is the tile's owner."""
        return self.entry.step == self.tiles.num_shards - 1

    @property
    def number(self):
        """The number of this block's tile among those of a shard."""
        number, block = self.tile
        return number * self.semaphores[1] + block

    def piece(self, i) -> tuple:
        """The place of piece `i` of a tile in shared memory."""
        return _device.rem(i, COMPUTE), _device.div(i, COMPUTE), 0, 0

    def target(self, tile, i) -> tuple:
        """Rows and columns of piece `i` of `tile`."""
        (height, width), (rows, cols), dim = self.store_piece, self.compute_tile, self.config.split_dim
        (row, col), across = self.place(tile), cols // width  # Pieces of a warpgroup's share along N.
        role, slot, *_ = self.piece(i)
        row += (role * rows if dim == 0 else 0) + _device.div(slot, across) * height
        col += (role * cols if dim == 1 else 0) + _device.rem(slot, across) * width
        return pl.ds(row, height), pl.ds(col, width)

    @property
    def owner(self):
        """The device whose rows the tile has."""
        return self.protocol.owner(self.device, self.entry.step)


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
    return Config(**dataclasses.asdict(found))


def matmul_reduce_scatter(lhs, rhs, axis_name, *, config: Config | None = None):
    """This device's rows of the sum of all devices' products.

    Args:
      lhs: (M, K). Rows of the result are shared out, in the order of the devices.
      rhs: (K, N).
      axis_name: a name of a mesh axis of `jax.shard_map`, or a tuple of names.
      config: tiles of the product. Its `store_slots` are not read: a whole tile waits for NVLink.

    Raises:
      ValueError: a dtype, a shape or an axis that is not supported; the message says what to do.
      RuntimeError: there is no GPU and none to compile for.
    """
    lhs, rhs, n = matmul_core.require_operands("matmul_reduce_scatter", lhs, rhs, axis_name)
    if lhs.shape[0] % n:
        raise ValueError(
            f"{_host.PACKAGE}.matmul_reduce_scatter: {lhs.shape=}; its rows must be a multiple of the {n} devices on "
            f"{axis_name=}: pad them to {-(-lhs.shape[0] // n) * n} (jnp.pad)"
        )
    _host.require_config("matmul_reduce_scatter", config, Config)
    core.require_gpus("matmul_reduce_scatter", n, lhs, rhs)
    if n == 1:
        return matmul(lhs, rhs)
    return _product(*_host.reverse_only("matmul_reduce_scatter", lhs, rhs), axis_name, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(lhs, rhs, axis_name, config):
    return scatter_product(lhs, rhs, axis_name, config)


def _product_fwd(lhs, rhs, axis_name, config):
    return _product(lhs, rhs, axis_name, config), (lhs, rhs)


def _product_bwd(axis_name, config, operands, d_out):
    return _host.without_derivative("matmul_reduce_scatter", functools.partial(_gradients, axis_name))(*operands, d_out)


def _gradients(axis_name, lhs, rhs, d_out):
    d_lhs, d_out = transposed.gather_product(d_out, rhs, axis_name, transpose_rhs=True, keeps_own=True)
    return d_lhs, matmul(lhs, d_out, transpose_a=True)


_product.defvjp(_product_fwd, _product_bwd)


def scatter_product(lhs, rhs, axis_name, config: Config | None = None, *, transpose_rhs=False):
    """This device's rows of the sum. With `transpose_rhs` rhs is (N, K)."""
    (m, k), n, num_devices = lhs.shape, rhs.shape[0 if transpose_rhs else 1], lax.axis_size(axis_name)
    if 0 in (m, n, k):
        return _host.alike(jnp.zeros((m // num_devices, n), lhs.dtype), lhs, rhs)[0]
    num_sms = _host.require_tensor_cores("matmul_reduce_scatter").num_sms
    c = config or default_config(m, n, k, num_devices, lhs.dtype, transpose_rhs, num_sms)
    plan = matmul_core.plan_of(
        ScatterPlan, m // num_devices, n, k, num_devices, lhs.dtype, transpose_rhs, c, num_sms, axis_name=axis_name
    )
    whole = dataclasses.replace(c, store_slots=len(plan.store_pieces))
    plan = dataclasses.replace(plan, tiles=dataclasses.replace(plan.tiles, config=whole))
    kernel = _host.kernel(
        functools.partial(_kernel, plan),
        out_type=[jax.ShapeDtypeStruct(shape, lhs.dtype) for shape in ((m // num_devices, n), plan.parts_shape)],
        grid=plan.grid,
        grid_names=("cluster",),
        cluster=tuple(plan.cluster.values()),
        cluster_names=tuple(plan.cluster),
        num_threads=COMPUTE + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=_host.compiler_params(),
    )
    return kernel(lhs.reshape(num_devices, -1, k), plan.b.pad(rhs))[0]


def _kernel(
    plan, lhs_gmem, rhs_gmem, o_gmem, parts_gmem, *, a_smem, b_smem, filled, freed, o_smem, staged, emptied, fetched
):
    plan = dataclasses.replace(plan, device=lax.axis_index(plan.axis_name), parts=parts_gmem)
    (a_smem, a_tma), (b_smem, b_tma) = plan.a.views(a_smem, False), plan.b.views(b_smem, False)
    o_smem, o_tma, o_bytes = [o_smem] * 3 if plan.interpreted else o_smem
    ring = _device.Ring(filled, freed, plan.num_stages)
    semaphores = dict(arrived=pl.get_global(plgpu.SemaphoreType.REGULAR(plan.semaphores)))

    @pl.when(lax.axis_index("role") == MEMORY)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        send = functools.partial(_send, plan, o_tma, o_bytes, o_gmem, staged)
        announce = functools.partial(_announce, plan, semaphores, emptied)
        fetch = functools.partial(_fetch_first, semaphores, o_bytes, fetched)
        _load(plan, ring, lhs_gmem, rhs_gmem, a_tma, b_tma, send, announce, fetch)

    @pl.when(lax.axis_index("role") < COMPUTE)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        def multiply(plan, before, acc):
            return roles.multiply(plan, ring, a_smem, b_smem, before, acc)

        def store(plan, place, stored, values):
            pl.when(stored > 0)(lambda: plgpu.barrier_wait(emptied))
            core.perform(_received(plan) if plan.tiles.num_shards > 2 else [], plan.axis_name, semaphores)
            (height, width), mine = plan.store_piece, o_smem.at[lax.axis_index("role")]
            pieces = [values[i : i + height, j : j + width] for i, j in plan.store_pieces]
            add = functools.partial(_add_parts, plan, mine, o_bytes, fetched)
            for slot, piece in enumerate(lax.cond(plan.is_own, add, list, pieces)):
                mine.at[slot, 0, 0][...] = piece.astype(plan.out_dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(staged)

        roles.compute(plan, multiply, store)
        plgpu.barrier_wait(emptied)


def _load(plan, ring, lhs_gmem, rhs_gmem, a_smem, b_smem, send, announce, fetch):
    """The memory warpgroup: all steps of all tiles, as fast as slots are given back.

    During a tile the one before it is sent, a few pieces a step, and announced, once all have arrived. Then the others'
    parts are waited for, since those who wait must have announced all that others wait for.
    """
    num_steps = pl.cdiv(plan.tiles.k, plan.tiles.tile_k)
    first = min(plan.num_stages, num_steps - 1)  # By then the tile before is there: its last slots were given back.
    each = pl.cdiv(plan.num_pieces, num_steps - first)

    def load_tile(plan, tile, before):
        row, col = plan.place(tile)

        @pl.loop(0, num_steps)
        def _(step):
            slot, k, sent = ring.fill(before + step), plan.k(step), (step - first) * each
            a, b, filled = plan.a, plan.b, ring.filled.at[slot]
            a.copy(lhs_gmem.at[plan.owner], a.at(row, k), a_smem.at[slot], filled, shared=plan.axis_n)
            b.copy(rhs_gmem, b.at(col, k), b_smem.at[slot], filled, shared=plan.axis_m)
            end = jnp.minimum(sent + each, plan.num_pieces)
            pl.when((tile > 0) & (step >= first))(lambda: send(tile - 1, sent, end))
            pl.when((tile > 0) & (step == num_steps - 1))(lambda: announce(tile - 1))

        pl.when(plan.is_own)(lambda: fetch(plan))

    ring.drain(roles.each_tile(plan, 0, load_tile))
    send(plan.num_tiles() - 1, 0, plan.num_pieces)
    announce(plan.num_tiles() - 1)


def _send(plan, o_smem, bytes_smem, o_gmem, staged, tile, first, end):
    """The memory warpgroup: starts the stores of pieces `first` to `end` of `tile`."""
    plan = plan.look_up(tile)
    pl.when(first == 0)(lambda: plgpu.barrier_wait(staged))

    def store(target):
        @pl.loop(first, end)
        def _(i):
            plgpu.copy_smem_to_gmem(*target(i))

    def store_to_peer(action, device_id):
        theirs = plgpu.remote_ref(plan.parts, device_id).at[action.slot[0], plan.number]
        store(lambda i: (bytes_smem.at[plan.piece(i)], theirs.at[plan.piece(i)[:2]]))

    pl.when(plan.is_own)(lambda: store(lambda i: (o_smem.at[plan.piece(i)], o_gmem.at[plan.target(tile, i)])))
    core.perform(plan.protocol.send(plan.device, plan.entry.step, plan.tile), plan.axis_name, {}, store_to_peer)


def _announce(plan, semaphores, emptied, tile):
    """The memory warpgroup: once `tile` has arrived, makes room for the next one and tells the owner."""
    plan = plan.look_up(tile)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(emptied)
    actions = plan.protocol.sent(plan.device, plan.entry.step, plan.tile)
    core.perform(actions, plan.axis_name, semaphores)


def _received(plan) -> list:
    """Waits, if the tile is an own one, for the others' parts."""
    return plan.protocol.receive(plan.device, plan.entry.step, plan.tile)


def _fetch_first(semaphores, bytes_smem, fetched, plan):
    """The memory warpgroup: loads the next device's part of an own tile to where the tile's sum will be left."""
    core.perform(_received(plan), plan.axis_name, semaphores)
    for role in range(COMPUTE):
        _fetch(plan, bytes_smem, fetched, role, 0)


def _fetch(plan, bytes_smem, fetched, role, part):
    """Loads what warpgroup `role` adds of a part."""

    @pl.loop(0, len(plan.store_pieces))
    def _(i):
        piece = plan.parts.at[part, plan.number, role, i]
        core.load_bytes(piece, bytes_smem.at[role, i, 0, 0], fetched.at[role])


def _add_parts(plan, smem, bytes_smem, fetched, pieces) -> list:
    """A warpgroup's `pieces` of an own tile and those of the other devices, added one part after the other."""
    role = lax.axis_index("role")

    def add(pieces):
        plgpu.barrier_wait(fetched.at[role])
        return [piece + smem.at[slot, 0, 0][...].astype(jnp.float32) for slot, piece in enumerate(pieces)]

    def add_and_fetch(part, pieces):
        pieces = add(pieces)
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
        _fetch(plan, bytes_smem, fetched, role, part + 1)
        return pieces

    return add(lax.fori_loop(0, plan.tiles.num_shards - 2, add_and_fetch, pieces))


def flops(m: int, n: int, k: int) -> int:
    """Floating-point operations of one device."""
    return 2 * m * n * k


def bytes_moved(m: int, n: int, num_devices: int, itemsize: int = 2) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return (num_devices - 1) * m * n * itemsize // num_devices


matmul_reduce_scatter.Config = Config
