"""The kernels, interpreted, on one device that stands for two: numbers that no compile and no simulator see.

The interpreter has neither semaphores nor peers. Here a copy to or from the peer goes to the device's own buffer, and
signals and waits are calls of Python. The operands are such that the peer would send the same.

Races are detected in shared memory. In memory they are not where one buffer stands for those of two devices: the
detector does not see what orders them, signals; and pieces that overlap are written twice, with the same values.
"""

import collections
import contextlib
import functools
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import _device, _host
from cookbook.gemm.plan import Operand, plan_of
from cookbook.nvlink import (
    copies,
    core,
    kernel_gather,
    kernel_gather_matmul,
    kernel_scatter,
    kernel_scatter_matmul,
    matmul_core,
    transposes,
)
from cookbook.nvlink.core import Config
from lab import interpreter
from tests.arrays import array
from tests.starting import started_again

PRODUCTS = kernel_gather_matmul, kernel_scatter_matmul
N = 2
THIS, PEER = range(N)
GMEM = 0  # The interpreter's number for memory that is not shared memory.


class Instead(types.SimpleNamespace):
    """A module of which some names are replaced."""

    def __getattr__(self, name):
        return getattr(self.module, name)


@pytest.fixture
def one_for_two(monkeypatch):
    """Sets which device the code that is traced next runs on, and how many there are."""
    counts, device = collections.Counter(), types.SimpleNamespace(index=THIS, count=N)

    def signal(index, device_id):
        io_callback(lambda *index: counts.update([tuple(map(int, index))]), None, *jax.tree.leaves(index), ordered=True)

    def wait(index, count, decrement):
        def until(*index):
            deadline = time.monotonic() + 60
            while counts[tuple(map(int, index))] < count:
                assert time.monotonic() < deadline, f"nobody signals {index}"
                time.sleep(0.001)

        io_callback(until, None, *jax.tree.leaves(index), ordered=True)

    in_kernel = lambda axis: jnp.int32(device.index) if axis == "x" else lax.axis_index(axis)
    size = lambda axis: device.count
    for module in (core, copies, kernel_gather, kernel_scatter, matmul_core, *PRODUCTS):
        monkeypatch.setattr(module, "lax", Instead(module=lax, axis_index=in_kernel, axis_size=size))
        fake = dict(get_global=lambda what: what, semaphore_signal=signal, semaphore_wait=wait)
        monkeypatch.setattr(module, "pl", Instead(module=pl, **fake), raising=False)
        unused = types.SimpleNamespace(REGULAR=plgpu.SMEM((1,), jnp.int32))
        unused = {} if module in PRODUCTS else dict(SemaphoreType=unused)
        fake = dict(remote_ref=lambda ref, device_id: ref, **unused)
        monkeypatch.setattr(module, "plgpu", Instead(module=plgpu, **fake), raising=False)
    monkeypatch.setattr(core, "_at", lambda semaphore, index: index)
    views = Operand.views
    monkeypatch.setattr(matmul_core, "plain_plan_of", lambda *args: plan_of(*args, interpreted=True))
    monkeypatch.setattr(Operand, "views", lambda operand, smem, _: views(operand, smem, True))
    return device


@pytest.fixture
def interpreted(one_for_two, monkeypatch):
    """`with interpreted(num_sms):` kernels inside are interpreted on so many SMs, and have no races in shared memory,
    `in_memory` nor there."""
    check = interpreter._Races._check
    in_memory = False

    def check_some(races, how, thread, clock, key, *args, **kwargs):
        if in_memory or key.memory_space_id != GMEM:
            check(races, how, thread, clock, key, *args, **kwargs)

    @contextlib.contextmanager
    def interpret(num_sms: int = 4, **where):
        nonlocal in_memory
        in_memory = where.get("in_memory", False)
        with lab.interpret() as seen, _host.building_for(_host.Target("the GPU interpreter", num_sms, True)):
            yield
            assert not seen.races, seen.races

    monkeypatch.setattr(interpreter._Races, "_check", check_some)
    return interpret


FEW = Config(num_blocks=3, stage_bytes=16_384, num_stages=3)


@pytest.mark.parametrize("config", [FEW, kernel_gather.default_config()], ids=["few", "default"])
@pytest.mark.parametrize("rows", [4, 20, 164])
def test_all_gather(one_for_two, interpreted, rows, config):
    """Rows that it sends to the peer land where its own rows do."""
    x = array(np.random.default_rng(rows).normal(size=(rows, core.WIDTH)), jnp.bfloat16)
    one_for_two.index = PEER
    with interpreted():
        out = started_again(lambda: transposes.gather(x, N, "x", config))()
    np.testing.assert_array_equal(out[PEER], x)


@pytest.mark.parametrize("config", [FEW, kernel_scatter.default_config()], ids=["few", "default"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("rows", [4, 20, 192])
def test_reduce_scatter(one_for_two, interpreted, rows, dtype, config):
    """Peers' arrays are only read: where no pieces overlap there are no races in memory either."""
    x = array(np.random.default_rng(rows).normal(size=(N, rows, core.WIDTH)), dtype)
    one_for_two.index = PEER
    plan = core.plan(N, rows, x.dtype, config, N)
    with interpreted(in_memory=rows % plan.piece_rows == 0):
        out = started_again(lambda: transposes.scatter(x, "x", config))()
    np.testing.assert_array_equal(out, x[PEER] + x[PEER])


class OfDevice(types.SimpleNamespace):
    """The (n, rows, WIDTH) array of a device: what it adds to shard q is what this one adds to shard q + device."""

    @property
    def at(self):
        return self

    def __getitem__(self, where):
        owner, piece = where
        return self.ref.at[_device.rem(owner + self.device, self.ref.shape[0]), piece]


@pytest.mark.parametrize("changes", [{}, dict(reduce=lambda add, pieces: functools.reduce(add, pieces[::-1]))])
def test_reduce_scatter_adds_three_devices_in_their_order(one_for_two, interpreted, mutant, changes):
    """The sums depend on the order. Also for an owner that is not the first. A mutant adds backwards."""
    n = one_for_two.count = 3
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(n, 12, core.WIDTH)) * 2.0 ** rng.integers(-12, 12, (n, 12, core.WIDTH)))
    of = lambda ref, device_id: OfDevice(ref=ref, device=device_id["x"])
    mutant(kernel_scatter, "plgpu", remote_ref=of)
    mutant(kernel_scatter, "functools", **changes)
    for owner in (0, 2):
        one_for_two.index = owner
        with interpreted():
            out = started_again(lambda: transposes.scatter(array(x, jnp.float32), "x", FEW))()
        first, second, third = (x[(owner + device) % n] for device in range(n))
        assert (out == (first + second) + third).all() == (not changes)


def operands(m, k, n, transpose_rhs=False):
    rng = np.random.default_rng(m + n)
    lhs, rhs = (array(rng.normal(size=shape), jnp.bfloat16) for shape in ((m, k), (k, n)))
    exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)
    return lhs, rhs.T if transpose_rhs else rhs, exact


def close(got, wanted):
    got = np.asarray(got, np.float64)
    assert np.linalg.norm(got - wanted) <= 4e-3 * np.linalg.norm(wanted)


SCATTERS = [
    (128, 128, 128, dict(tile_m=128, tile_n=128), False),
    (200, 72, 264, dict(tile_m=128, tile_n=128), False),
]


@pytest.mark.parametrize("m, k, n, fields, transpose_rhs", SCATTERS, ids=str)
def test_matmul_reduce_scatter(one_for_two, interpreted, m, k, n, fields, transpose_rhs):
    """This device's part for the peer lands where a part of that peer would."""
    lhs, rhs, exact = operands(N * m, k, n, transpose_rhs)
    config = matmul_core.Config(**fields)
    with interpreted(2):
        run = lambda: kernel_scatter_matmul.scatter_product(lhs, rhs, "x", config, transpose_rhs=transpose_rhs)
        close(started_again(run)(), exact.reshape(N, m, n).sum(0))


@pytest.mark.parametrize("is_mutant", [False, True])
def test_matmul_reduce_scatter_adds_own_tiles_and_then_those_of_the_next_devices(
    one_for_two, interpreted, monkeypatch, is_mutant
):
    """The sum of three depends on the order: own tiles, the next device's, which cancel them, and small ones. The
    mutant adds the small ones first, and loses them.

    This device's parts stand for those of its peers: that for the last owner lies where the next device's would.
    """
    count, m, k, n = 3, 100, 136, 128
    one_for_two.count = count
    rng = np.random.default_rng(0)
    large, small = (rng.integers(-1, 2, size=(m, k)) * (np.arange(k) % 17 == 3) for _ in range(2))
    rhs = array(rng.integers(-1, 2, size=(n, k)), jnp.bfloat16)
    large = np.where(np.arange(k) == 3, 1, large)  # No sum of few of these is 0.
    rhs = rhs.at[:, 3].set(100)
    lhs = array(np.concatenate([-large * 2.0**24, small / 8, large * 2.0**24]), jnp.bfloat16)
    if is_mutant:
        fetch = kernel_scatter_matmul.fetch
        monkeypatch.setattr(kernel_scatter_matmul, "fetch", lambda *args: fetch(*args[:-1], count - 2 - args[-1]))
    with interpreted(2):
        config = matmul_core.Config(tile_m=128, tile_n=64)
        run = lambda: kernel_scatter_matmul.scatter_product(lhs, rhs, "x", config, transpose_rhs=True)
        out = np.float32(started_again(run)())
    assert (out == small / 8 @ np.float32(rhs).T).all() == (not is_mutant)


GATHERS = [
    (200, 1032, 128, dict(tile_m=128, tile_n=128, num_senders=1), 16_384, False),
    (200, 72, 264, dict(tile_m=128, tile_n=128, num_senders=2), 16_384, False),
    (300, 600, 128, dict(tile_m=128, tile_n=64, num_senders=3), 16_384, True),
    (130, 264, 64, dict(tile_m=128, tile_n=64, num_senders=2, cluster_m=2), 16_384, False),
    # A row is two pieces. Each sender has one in each round: the interpreter knows no group of no copies.
    (128, 264, 64, dict(tile_m=128, tile_n=64, num_senders=2), 200, False),
]


@pytest.mark.parametrize("m, k, n, fields, piece, transpose_rhs", GATHERS, ids=str)
def test_all_gather_matmul(one_for_two, interpreted, monkeypatch, m, k, n, fields, piece, transpose_rhs):
    """The senders are the peer's, which has the same rows."""
    monkeypatch.setattr(kernel_gather_matmul, "PIECE", piece)
    send, kernel = kernel_gather_matmul.send, kernel_gather_matmul.kernel

    def send_of_the_peer(*args):
        one_for_two.index = PEER
        send(*args)
        one_for_two.index = THIS

    def kernel_with_one_view(*args, smem, **scratch):  # The interpreter takes two views for two memories.
        _, as_tma, stages = smem
        kernel(*args, smem=(as_tma, as_tma, stages), **scratch)

    entries, waits = [], []
    look_up, multiply = kernel_gather_matmul.tile_of_block, kernel_gather_matmul.protocol.GatherMatmul.multiply

    def look_up_and_note(plan, number):
        entries.append(look_up(plan, number))
        return entries[-1]

    def multiply_and_note(gather, d, step, block):
        io_callback(lambda *wait: waits.append(tuple(map(int, wait))), None, entries[-1].row, block, ordered=True)
        return multiply(gather, d, step, block)

    monkeypatch.setattr(kernel_gather_matmul, "tile_of_block", look_up_and_note)
    monkeypatch.setattr(kernel_gather_matmul.protocol.GatherMatmul, "multiply", multiply_and_note)
    monkeypatch.setattr(kernel_gather_matmul, "send", send_of_the_peer)
    monkeypatch.setattr(kernel_gather_matmul, "kernel", kernel_with_one_view)
    lhs, rhs, exact = operands(m, k, n, transpose_rhs)
    config = kernel_gather_matmul.Config(**fields)
    with interpreted(config.num_senders + 2):
        run = lambda: kernel_gather_matmul.gather_product(lhs, rhs, "x", config, transpose_rhs=transpose_rhs)
        out, gathered = started_again(run)()
    close(out, np.concatenate([exact, exact]))
    # All rows are here before the first tile: only a GPU would notice a wait for another block.
    rows = config.tile_m * config.cluster_m
    assert {row for row, _ in waits} >= set(range(0, m, rows)) and all(block == row // rows for row, block in waits)
    np.testing.assert_array_equal(np.asarray(gathered[m:]), np.asarray(lhs))


def arrive_and_wait(barrier):
    """The room is given back before the stores from it have been waited for."""
    plgpu.barrier_arrive(barrier)
    plgpu.wait_smem_to_gmem(0)


def wait_for_writes_alone(left, wait_read_only=False, wait=plgpu.wait_smem_to_gmem):
    """Nothing waits for TMA to have read what it sends."""
    if not wait_read_only:
        wait(left)


FORGOTTEN = dict(wait_smem_to_gmem=lambda *args, **how: None)
EARLY = {
    "all_gather": (copies, FORGOTTEN, "test_all_gather", (164, FEW)),
    "matmul_reduce_scatter": (
        kernel_scatter_matmul, FORGOTTEN | dict(barrier_arrive=arrive_and_wait), "test_matmul_reduce_scatter",
        SCATTERS[1],
    ),
    "all_gather_matmul": (
        kernel_gather_matmul, dict(wait_smem_to_gmem=wait_for_writes_alone), "test_all_gather_matmul", GATHERS[4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", EARLY)
def test_mutants_that_fill_again_what_is_sent_are_caught(one_for_two, interpreted, monkeypatch, mutant, op):
    """A stage is loaded again while TMA sends it; a tile is overwritten while TMA stores it."""
    module, changes, name, case = EARLY[op]
    mutant(module, "plgpu", **changes)
    fixtures = [monkeypatch] if op == "all_gather_matmul" else []
    with pytest.raises(AssertionError, match="unordered"):
        globals()[name](one_for_two, interpreted, *fixtures, *case)
