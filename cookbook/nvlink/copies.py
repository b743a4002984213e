# SPDX-License-Identifier: Apache-2.0
"""The copies of all_gather and all_to_all: segments of x go, in pieces, to where they belong in the devices' results.

| warpgroup | does |
|---|---|
| 0, sends | copies the peers' segments into their results over NVLink |
| 1, keeps | copies the device's own segments |

| barrier | arrives | count | waits |
|---|---|---|---|
| filled[wg, stage] | TMA: a piece is in shared memory | 1 | the warpgroup, before it stores the piece |
| arrived (semaphore) | each peer's block of this number: its rows have arrived | n - 1 | the end of warpgroup 0 |

The own rows have a warpgroup to themselves: HBM takes them at another rate than NVLink takes the others, and neither
waits for the other.
"""

import functools
import math

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from . import core, segments

SENDS, KEEPS = range(2)  # Warpgroups.


def scratch(plan: segments.Plan, num_stages: int, dtype) -> dict:
    """The scratch of a kernel that calls `push`."""
    aligned = 128 // math.gcd(128, plan.width * dtype.itemsize)  # TMA's alignment of stages.
    stage_units = _host.padded_shape(plan.pieces[:1], (aligned,))
    return dict(
        stages=plgpu.SMEM((2, num_stages, *stage_units, plan.width), dtype),
        filled=plgpu.Barrier(num_barriers=2 * num_stages),
        arrived=plgpu.SemaphoreType.REGULAR,
    )


def push(plan: segments.Plan, roles, axis_name, routes, x_gmem, o_gmem, stages, filled, arrived) -> None:
    """Copies `routes`, the segments for the peers and the own ones, and returns when all have arrived, the peers' too.

    `roles` is the protocol. Both warpgroups call this.
    """
    d, block, wg = lax.axis_index(axis_name), lax.axis_index("block"), lax.axis_index("wg")
    copy = functools.partial(_copy, plan, axis_name, x_gmem, o_gmem)
    to_peers, own = routes

    @pl.when(wg == SENDS)
    def _():
        copy(plan.shares(to_peers, block), roles, d, stages.at[SENDS], filled, 0)
        core.perform(roles.end(d), axis_name, dict(arrived=arrived))

    @pl.when(wg == KEEPS)
    def _():
        copy(plan.shares(own, block), roles, d, stages.at[KEEPS], filled, stages.shape[1])
        core.perform(roles.end_own(), axis_name, {})


def _copy(plan, axis_name, x_gmem, o_gmem, shares, roles, d, stages, filled, first_barrier):
    num_stages, num_rounds = stages.shape[0], shares.num_rounds

    def each_size(size, do):
        """`do(units)`, compiled for each size of a piece."""
        for units in plan.pieces:
            pl.when(size == units)(functools.partial(do, units))

    def load(t):
        stage, (_, source, _, size, _) = _device.rem(t, num_stages), shares.piece(t)

        def do(units):
            to = stages.at[stage, pl.ds(0, units)]
            plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(source, units)], to, filled.at[first_barrier + stage])

        each_size(size, do)

    def store(t):
        stage, (peer, _, target, size, number) = _device.rem(t, num_stages), shares.piece(t)
        plgpu.barrier_wait(filled.at[first_barrier + stage])

        def send(action, device_id):
            out = plgpu.remote_ref(o_gmem, device_id)

            def do(units):
                plgpu.copy_smem_to_gmem(stages.at[stage, pl.ds(0, units)], out.at[pl.ds(target, units)])

            each_size(size, do)

        core.perform(roles.send(d, peer, number), axis_name, {}, send)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # The stage of the round before is free.

    @pl.loop(0, num_rounds + num_stages - 1)
    def _(t):
        pl.when(t >= num_stages - 1)(lambda: store(t - (num_stages - 1)))
        pl.when(t < num_rounds)(lambda: load(t))
