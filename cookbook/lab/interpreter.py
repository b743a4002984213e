"""Where a kernel runs: on this machine's GPU, or in Pallas's GPU interpreter on the CPU.

Every private JAX name that this project needs is used here and nowhere else.
"""

import contextlib

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu

NUM_SMS = 4  # A persistent grid has this many blocks when interpreted: enough for waves and tails, quick to run.


class _FirstRace(gpu_callbacks.GPURaceDetectionState):
    """Reports a kernel's first race and stops looking: JAX's own class reports every racing access, thousands of them."""

    def check_read(self, *args, **kwargs):
        if not self.races_found:
            super().check_read(*args, **kwargs)

    def check_write(self, *args, **kwargs):
        if not self.races_found:
            super().check_write(*args, **kwargs)


class Interpreted:
    """What `interpret()` yields."""

    def __init__(self):
        self._kernels: list[_FirstRace] = []

    def _new_kernel(self, **kwargs) -> _FirstRace:
        self._kernels.append(_FirstRace(**kwargs))
        return self._kernels[-1]

    @property
    def races_found(self) -> bool:
        """Whether any kernel run inside raced; waits for those still running. Readable inside and after the context."""
        jax.effects_barrier()
        return any(kernel.races_found for kernel in self._kernels)


@contextlib.contextmanager
def interpret(*, detect_races: bool = True):
    """Kernels traced inside run in Pallas's GPU interpreter, on the CPU, races detected.

    Yields an `Interpreted`, whose `races_found` covers every kernel run inside. The first race of each kernel is
    reported as it happens (printed by JAX 0.11, logged as a warning by 0.12). After an exception the interpreter is
    ready for the next kernel.

    Seen: races of barriers, TMA copies and warpgroups inside a block or a cluster. Not seen: the lifetime of WGMMA
    operands (the interpreter multiplies at once), races between the blocks of a grid, wrong multicasts. A kernel that
    deadlocks hangs for ever, and nothing in this process can end it: give cells and tests a timeout.
    """
    params = dict(detect_races=detect_races)
    if "on_race" in plgpu.InterpretGPUParams.__dataclass_fields__:  # JAX 0.12, which raises unless told otherwise.
        params["on_race"] = "warn"
    seen = Interpreted()
    state_class = gpu_callbacks.GPURaceDetectionState
    gpu_callbacks.GPURaceDetectionState = seen._new_kernel
    on_cpu = jax.default_device(jax.devices("cpu")[0]) if jax.default_backend() != "cpu" else contextlib.nullcontext()
    try:
        with (
            on_cpu,
            _mgpu.building_for(_mgpu.Target("the GPU interpreter", NUM_SMS)),
            plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**params)),
        ):
            yield seen
            jax.effects_barrier()
    except BaseException:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        raise
    finally:
        gpu_callbacks.GPURaceDetectionState = state_class


def on_gpu() -> bool:
    """Whether JAX's default device is a Hopper or newer GPU, where kernels run as they are."""
    return jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) >= 9.0


def run(fn, *args):
    """`fn(*args)`: on the GPU where there is one, in the interpreter otherwise.

    Raises:
      RuntimeError: a kernel raced (interpreter only; a GPU does not tell).
    """
    if on_gpu():
        return fn(*args)
    with interpret() as seen:
        out = jax.block_until_ready(fn(*args))
    if seen.races_found:
        raise RuntimeError(
            f"{getattr(fn, '__name__', fn)} has a race (JAX's message above names the two accesses): its result may "
            "differ from run to run on a GPU. A barrier_wait, a commit_smem or a wait_smem_to_gmem is missing."
        )
    return out
