# SPDX-License-Identifier: Apache-2.0
"""A barrier of all blocks of a grid, which are all on the GPU at the same time: counters in global memory.

After its wait a block may load, by TMA too, whatever a block stored before it arrived. PTX counts TMA's accesses to
another proxy than those of threads, so both sides fence the two against each other.

JAX's interpreter has no semaphores: there all blocks are one cluster, and meet at its barriers.
"""

import dataclasses

from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device

APART = 32  # Counters, of 4 bytes, lie in cache lines of their own.


def num_counters(num_barriers: int) -> int:
    """Zeros that `num_barriers` barriers count in. The last one counts who has left."""
    return APART * (num_barriers + 1)


@dataclasses.dataclass(frozen=True)
class GridBarriers:
    """Barriers that are used once each, in order. `arrivals` warpgroups arrive at each, of all blocks."""

    counters: _device.Ref  # (num_counters,) int32 in global memory; interpreted, barriers of the cluster.
    num_barriers: int
    arrivals: int
    interpreted: bool

    def arrive(self, i: int):
        """This warpgroup has stored all that others load after barrier `i`."""
        if self.interpreted:
            plgpu.barrier_arrive(self.counters.at[i])
            return
        _emit(self.counters.at[pl.ds(APART * i, 1)], _arrive)

    def wait(self, i: int):
        """Waits until all have arrived at barrier `i`."""
        if self.interpreted:
            plgpu.barrier_wait(self.counters.at[i])
            return
        _emit(self.counters.at[pl.ds(APART * i, 1)], lambda counter: _wait(counter, self.arrivals))

    def leave(self):
        """The last of `arrivals` calls, each after a wait for the last barrier, leaves all counters at zero."""
        if not self.interpreted:
            _emit(self.counters, lambda counters: _reset(counters, self.num_barriers, self.arrivals))


def _emit(ref, code):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, counters):
        code(mgpu.utils.memref_ptr(counters))

    run(ref)


def _ptx(text: str, *args):
    mgpu.utils.inline_ptx(text, *args, has_side_effects=True)


def _arrive(counter):
    _ptx("fence.proxy.async;")
    mgpu.utils.warpgroup_barrier()
    mgpu.utils.SemaphoreRef(counter).signal(1, memory_scope="gpu")  # It elects its thread, with the whole warp.


def _wait(counter, count: int):
    mgpu.utils.SemaphoreRef(counter).wait(count, decrement=False, memory_scope="gpu")
    _ptx("fence.proxy.async;")


def _reset(counters, num_barriers: int, arrivals: int):
    """`atom.inc` counts from `arrivals` - 1 to 0 again, so the counter of those who left needs no other reset."""
    left = f"[$0 + {4 * APART * num_barriers}]"
    clear = "".join(f"@last st.relaxed.gpu.global.u32 [$0 + {4 * APART * i}], 0;\n" for i in range(num_barriers))
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
        _ptx(
            "{\n.reg .u32 before;\n.reg .pred last;\n"
            f"atom.acq_rel.gpu.global.inc.u32 before, {left}, {arrivals - 1};\n"
            f"setp.eq.u32 last, before, {arrivals - 1};\n{clear}}}",
            counters,
        )
