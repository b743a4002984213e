# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the collectives: how a shard is cut into pieces, and a protocol's actions carried out by a block."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .protocol import Flush, Load, Read, Send, Signal, Wait

MAX_DEVICES = 8  # GPUs of one NVLink host.
WIDTH = 256  # Columns of the matrix that a flat shard becomes: the most that TMA copies along one axis.
ROW_MULTIPLE = 4  # So many rows give each thread of a warpgroup loads of 16 bytes, in every dtype.


@dataclasses.dataclass(frozen=True)
class Config:
    """How a collective is spread over the GPU."""

    num_blocks: int = 16  # SMs that it uses. NVLink is full with few, and the others are free for other kernels.
    stage_bytes: int = 65_536  # Shared memory that one round of a block fills. Small ones pay more signals per byte.
    num_stages: int = 3  # Rounds in shared memory: of copies, two whose stores are in flight, and one that loads.

    def __post_init__(self):
        if not 1 <= self.num_blocks <= 132:
            raise ValueError(f"{self.num_blocks=}: must be from 1 to 132, the SMs of an H200")
        if self.num_stages < 3:
            raise ValueError(f"{self.num_stages=}: must be 3 or more, since the stores of two rounds are in flight")
        if self.stage_bytes < 1 or self.num_stages * self.stage_bytes > _device.SMEM_BYTES_MAX - 1024:
            raise ValueError(
                f"{self.stage_bytes=}, {self.num_stages=}: their product must be at most "
                f"{_device.SMEM_BYTES_MAX - 1024} bytes, the shared memory of a block: lower one"
            )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of a collective over shards of `rows` rows of WIDTH values.

    A piece is `piece_rows` rows. The last one is shifted back to end with the shard. The rows that it shares with the
    piece before are sent twice, with the same values both times. Piece `block + i * num_blocks` is round i of a block.
    """

    n: int  # Devices.
    rows: int
    piece_rows: int
    num_blocks: int

    @property
    def num_pieces(self) -> int:
        return pl.cdiv(self.rows, self.piece_rows)

    def num_rounds(self, block):
        return _device.div(self.num_pieces - block + self.num_blocks - 1, self.num_blocks)

    def piece(self, block, i):
        """The rows of this block's round `i`."""
        start = jnp.minimum((block + i * self.num_blocks) * self.piece_rows, self.rows - self.piece_rows)
        return pl.ds(start, self.piece_rows)


def plan(n: int, rows: int, dtype, config: Config, pieces_a_stage: int) -> Plan:
    """The plan for shards of `rows` rows. Small shards are cut finer, so that every block has a piece."""
    row_bytes = WIDTH * dtype.itemsize
    fits = config.stage_bytes // (pieces_a_stage * row_bytes) // ROW_MULTIPLE * ROW_MULTIPLE
    if fits < ROW_MULTIPLE:
        raise ValueError(
            f"{config.stage_bytes=}: must be at least {ROW_MULTIPLE * row_bytes * pieces_a_stage} for {n} devices and "
            f"{dtype}: {ROW_MULTIPLE} rows of {WIDTH} values a piece"
        )
    share = _host.padded_shape((pl.cdiv(rows, config.num_blocks),), (ROW_MULTIPLE,))[0]
    piece_rows = min(fits, share, 256)
    return Plan(n, rows, piece_rows, min(config.num_blocks, pl.cdiv(rows, piece_rows)))


def require_shards(op: str, x, axis_name):
    """`x` as a JAX array, and the number of devices on `axis_name`. Raises ValueError for what is not supported."""
    x = _host.as_array(op, "x", x)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{_host.PACKAGE}.{op}: {x.dtype=}; must be float32, bfloat16 or float16: cast it")
    if x.ndim == 0:
        raise ValueError(f"{_host.PACKAGE}.{op}: x is a scalar; it must have an axis to join: x[None]")
    n = num_devices(op, axis_name)
    return vary(x, axis_name), n


def num_devices(op: str, axis_name) -> int:
    """The number of devices on `axis_name`. Raises ValueError unless it names an axis of a mesh of one host."""
    try:
        n = lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {axis_name=} is no axis of a mesh here ({error}): call it inside jax.shard_map "
            "over a mesh with that axis"
        ) from error
    if n > MAX_DEVICES:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {axis_name=} has {n} devices; at most {MAX_DEVICES}, the GPUs of one host: gather "
            "over a smaller axis first, and use jax.lax between hosts"
        )
    return n


def vary(x, axis_name):
    """`x`, which may be replicated over `axis_name`, in the type of an array of which each device has its own."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    missing = tuple(name for name in names if name not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def require_gpus(op: str, n: int, *operands) -> None:
    """Raises RuntimeError where the kernel cannot run: without a GPU, and interpreted, unless nothing is to be sent."""
    if any(x.size == 0 for x in operands):
        return
    try:
        if not _host.require_target(op).interpreted or n == 1:
            return
        reason = f"{_host.PACKAGE}.{op}: JAX's GPU interpreter has no semaphores"
    except RuntimeError as error:
        if n == 1:
            raise
        reason = str(error).partition(". ")[0]  # The rest is about the interpreter.
    raise RuntimeError(
        f"{reason}. Run it on {n} GPUs of a host. To compile it without any, say `import lab` and "
        f'`lab.compile_for("h200", fn, ..., devices={n})`, where fn calls it inside jax.shard_map'
    )


def as_matrices(x, count: int):
    """`x` as `count` flat shards: (count, rows, WIDTH), padded with zeros to whole groups of rows."""
    flat = x.reshape(count, -1)
    return _host.pad_to_tiles(flat, (1, ROW_MULTIPLE * WIDTH)).reshape(count, -1, WIDTH)


def from_matrices(x, shape: tuple[int, ...]):
    """The shards of `x`, joined along the leading axis of an array of `shape`, without the padding."""
    count, size = x.shape[0], math.prod(shape) // x.shape[0]
    return x.reshape(count, -1)[:, :size].reshape(shape)


def load_bytes(source, to, barrier) -> None:
    """Starts to load contiguous values, all of which exist: a copy without a descriptor, as `protocol.py` asks for."""
    plgpu.copy_gmem_to_smem(source, to, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def perform(actions, axis_name, semaphores: dict, copy=None) -> None:
    """Carries out a protocol's actions in order. `copy(action, device_id)` starts the copy of a `Send` or `Load`."""
    device = lambda peer: {axis_name: jnp.int32(peer)}

    def do(action):
        match action:
            case Send() | Load():
                copy(action, device(action.peer))
            case Flush():
                plgpu.wait_smem_to_gmem(action.pending)
            case Signal():
                semaphore = _at(semaphores[action.semaphore], action.index)
                pl.semaphore_signal(semaphore, device_id=device(action.peer))
            case Wait():
                semaphore = _at(semaphores[action.semaphore], action.index)
                pl.semaphore_wait(semaphore, action.count, decrement=not action.keeps)

    for action in actions:
        if isinstance(action, Read) or action.when is False:  # The kernel reads where its sum needs the value.
            continue
        if action.when is True:
            do(action)
        else:
            pl.when(action.when)(lambda action=action: do(action))


def _at(semaphore, index):
    return semaphore.at[index] if semaphore.shape else semaphore


def cost_bytes(shard, n: int) -> int:
    """Bytes of one device's NVLink, in each direction, that a gather or a scatter of such shards moves."""
    return (n - 1) * math.prod(shard.shape) * jnp.dtype(shard.dtype).itemsize
