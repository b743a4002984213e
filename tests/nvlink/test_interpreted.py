"""The kernels, interpreted, on one device that stands for two: numbers that no compile and no simulator see.

The interpreter has neither semaphores nor peers. Here a copy to or from the peer goes to the device's own buffer, and
signals and waits are calls of Python. The operands are such that the peer would send the same.
"""

import collections
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

from cookbook import _mgpu, lab
from cookbook.gemm import core as gemm
from cookbook.nvlink import (
    all_gather,
    all_gather_matmul,
    copies,
    core,
    matmul_core,
    matmul_reduce_scatter,
    reduce_scatter,
)
from cookbook.nvlink.core import Config
from tests.arrays import array
from tests.starting import started_again

N = 2
THIS, PEER = range(N)


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
    for module in (core, copies, all_gather, reduce_scatter, matmul_core, all_gather_matmul, matmul_reduce_scatter):
        monkeypatch.setattr(module, "lax", Instead(module=lax, axis_index=in_kernel, axis_size=size))
        fake = dict(get_global=lambda what: what, semaphore_signal=signal, semaphore_wait=wait)
        monkeypatch.setattr(module, "pl", Instead(module=pl, **fake), raising=False)
        unused = types.SimpleNamespace(REGULAR=plgpu.SMEM((1,), jnp.int32))
        unused = {} if module in (all_gather_matmul, matmul_reduce_scatter) else dict(SemaphoreType=unused)
        fake = dict(remote_ref=lambda ref, device_id: ref, **unused)
        monkeypatch.setattr(module, "plgpu", Instead(module=plgpu, **fake), raising=False)
    monkeypatch.setattr(core, "_at", lambda semaphore, index: index)
    plan_of, views = gemm.plan_of, gemm.Operand.views
    monkeypatch.setattr(gemm, "plan_of", lambda *args: plan_of(*args, interpreted=True))
    monkeypatch.setattr(gemm.Operand, "views", lambda operand, smem, _: views(operand, smem, True))
    return device


FEW = Config(num_blocks=3, stage_bytes=16_384, num_stages=3)


@pytest.mark.parametrize("config", [FEW, all_gather.default_config()], ids=["few", "default"])
@pytest.mark.parametrize("rows", [4, 20, 164])
def test_all_gather(one_for_two, rows, config):
    """Rows that it sends to the peer land where its own rows do."""
    x = array(np.random.default_rng(rows).normal(size=(rows, core.WIDTH)), jnp.bfloat16)
    one_for_two.index = PEER
    with _mgpu.interpreting():
        out = started_again(lambda: all_gather.gather(x, N, "x", config))()
    np.testing.assert_array_equal(out[PEER], x)


@pytest.mark.parametrize("config", [FEW, reduce_scatter.default_config()], ids=["few", "default"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("rows", [4, 20, 164])
def test_reduce_scatter(one_for_two, rows, dtype, config):
    x = array(np.random.default_rng(rows).normal(size=(N, rows, core.WIDTH)), dtype)
    one_for_two.index = PEER
    with _mgpu.interpreting():
        out = started_again(lambda: reduce_scatter.scatter(x, "x", config))()
    np.testing.assert_array_equal(out, x[PEER] + x[PEER])


def test_the_ring_of_reduce_scatter_has_no_races(one_for_two):
    """Where no pieces overlap: those are written twice, by two blocks, with the same values."""
    x = jnp.ones((N, 192, core.WIDTH), jnp.bfloat16)
    with lab.interpret() as seen:
        jax.block_until_ready(reduce_scatter.scatter(x, "x", FEW))
    assert not seen.races_found


def operands(m, k, n, transpose_rhs=False):
    rng = np.random.default_rng(m + n)
    lhs, rhs = (array(rng.normal(size=shape), jnp.bfloat16) for shape in ((m, k), (k, n)))
    exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)
    return lhs, rhs.T if transpose_rhs else rhs, exact


def close(got, wanted):
    got = np.asarray(got, np.float64)
    assert np.linalg.norm(got - wanted) <= 4e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "count, m, k, n, fields, transpose_rhs",
    [
        (2, 128, 128, 128, dict(tile_m=128, tile_n=128), False),
        (2, 200, 72, 264, dict(tile_m=128, tile_n=128), False),
        (3, 100, 136, 128, dict(tile_m=128, tile_n=64), True),
    ],
    ids=str,
)
def test_matmul_reduce_scatter(one_for_two, count, m, k, n, fields, transpose_rhs):
    """This device's part for each peer lands where a part of that peer would."""
    one_for_two.count = count
    lhs, rhs, exact = operands(count * m, k, n, transpose_rhs)
    config = matmul_reduce_scatter.Config(**fields)
    with _mgpu.interpreting(num_sms=2):
        run = lambda: matmul_reduce_scatter.scatter_product(lhs, rhs, "x", config, transpose_rhs=transpose_rhs)
        close(started_again(run)(), exact.reshape(count, m, n).sum(0))


@pytest.mark.parametrize(
    "m, k, n, fields, piece, transpose_rhs",
    [
        (200, 1032, 128, dict(tile_m=128, tile_n=128, num_senders=1), 16_384, False),
        (200, 72, 264, dict(tile_m=128, tile_n=128, num_senders=2), 16_384, False),
        (300, 600, 128, dict(tile_m=128, tile_n=64, num_senders=3), 16_384, True),
        (130, 264, 64, dict(tile_m=128, tile_n=64, num_senders=2, cluster_m=2), 16_384, False),
        (130, 264, 64, dict(tile_m=128, tile_n=64, num_senders=2), 200, False),  # A row is two pieces.
    ],
    ids=str,
)
def test_all_gather_matmul(one_for_two, monkeypatch, m, k, n, fields, piece, transpose_rhs):
    """The senders are the peer's, which has the same rows."""
    monkeypatch.setattr(all_gather_matmul, "PIECE", piece)
    send, kernel = all_gather_matmul._send, all_gather_matmul._kernel

    def send_of_the_peer(*args):
        one_for_two.index = PEER
        send(*args)
        one_for_two.index = THIS

    def kernel_with_one_view(*args, smem, **scratch):  # The interpreter takes two views for two memories.
        _, as_tma, stages = smem
        kernel(*args, smem=(as_tma, as_tma, stages), **scratch)

    entries, waits = [], []
    look_up, multiply = all_gather_matmul.GatherPlan.look_up, all_gather_matmul.protocol.GatherMatmul.multiply

    def look_up_and_note(plan, tile):
        entries.append((found := look_up(plan, tile)).entry)
        return found

    def multiply_and_note(gather, d, step, block):
        io_callback(lambda *wait: waits.append(tuple(map(int, wait))), None, entries[-1].row, block, ordered=True)
        return multiply(gather, d, step, block)

    monkeypatch.setattr(all_gather_matmul.GatherPlan, "look_up", look_up_and_note)
    monkeypatch.setattr(all_gather_matmul.protocol.GatherMatmul, "multiply", multiply_and_note)
    monkeypatch.setattr(all_gather_matmul, "_send", send_of_the_peer)
    monkeypatch.setattr(all_gather_matmul, "_kernel", kernel_with_one_view)
    lhs, rhs, exact = operands(m, k, n, transpose_rhs)
    config = all_gather_matmul.Config(**fields)
    with _mgpu.interpreting(num_sms=config.num_senders + 2):
        run = lambda: all_gather_matmul.gather_product(lhs, rhs, "x", config, transpose_rhs=transpose_rhs)
        out, gathered = started_again(run)()
    close(out, np.concatenate([exact, exact]))
    # All rows are here before the first tile: only a GPU would notice a wait for another block.
    rows = config.tile_m * config.cluster_m
    assert {row for row, _ in waits} >= set(range(0, m, rows)) and all(block == row // rows for row, block in waits)
    np.testing.assert_array_equal(np.asarray(gathered[m:]), np.asarray(lhs))
