"""Where a kernel runs: on this machine's GPU, or in Pallas's GPU interpreter on the CPU.

Every private JAX name that this project needs is used here and nowhere else.
"""

import contextlib
import io
import linecache
import pathlib
import re
import threading

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from .. import _mgpu
from .toolchain import gpu_facts

_mgpu.allow_waiting_threads()  # Now: a notebook makes arrays, which starts the backend, before it interprets.
NUM_SMS = 4  # A persistent grid has this many blocks when interpreted: enough for waves and tails, quick to run.


class Interpreted:
    """Races of every kernel that ran inside `interpret()`. Both properties wait for kernels that still run."""

    def __init__(self):
        self._kernels: list[_Races] = []

    def _new_kernel(self, **kwargs) -> "_Races":
        self._kernels.append(_Races(**kwargs))
        return self._kernels[-1]

    @property
    def races(self) -> tuple[str, ...]:
        """The first race of each kernel that has one: the two accesses, with their source lines."""
        jax.effects_barrier()
        return tuple(kernel.first for kernel in self._kernels if kernel.races_found)

    @property
    def races_found(self) -> bool:
        return bool(self.races)


@contextlib.contextmanager
def interpret(*, detect_races: bool = True):
    """Kernels traced inside run in Pallas's GPU interpreter, on the CPU, races detected.

    Yields an `Interpreted`: its `races_found` and `races` are readable inside and afterwards. Races are also printed,
    a line each, when the context ends. After an exception the interpreter is ready for the next kernel.

    Seen: races of barriers, TMA copies and warpgroups inside a block or a cluster. Not seen: the lifetime of WGMMA
    operands (the interpreter multiplies at once), races between the blocks of a grid, wrong multicasts. A kernel that
    deadlocks hangs for ever, and nothing in this process can end it: give cells and tests a timeout.
    """
    with _interpret(detect_races) as seen:
        yield seen
    for race in seen.races:
        print(f"race: {race}")


def on_gpu(gpu: str = "h200") -> bool:
    """Whether JAX's default device is a GPU as new as `gpu`, or newer: by default, where kernels run as they are."""
    major = gpu_facts(gpu)["major"]
    return jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) >= major


def run(fn, *args):
    """`fn(*args)`: on the GPU where there is one, in the interpreter otherwise.

    Raises:
      RuntimeError: a kernel raced (interpreter only; a GPU does not tell).
    """
    if on_gpu():
        return fn(*args)
    with _interpret() as seen:
        out = jax.block_until_ready(fn(*args))
    if seen.races_found:
        raise RuntimeError(
            f"{getattr(fn, '__name__', fn)} has a race: {'; '.join(seen.races)}. On a GPU its result may differ from "
            "run to run. Look for a missing barrier_wait, commit_smem or wait_smem_to_gmem between the two."
        )
    return out


@contextlib.contextmanager
def _interpret(detect_races: bool = True):
    seen = Interpreted()
    state_class = gpu_callbacks.GPURaceDetectionState
    gpu_callbacks.GPURaceDetectionState = seen._new_kernel  # JAX makes one for each kernel and keeps only the latest.
    try:
        with _mgpu.interpreting(num_sms=NUM_SMS, detect_races=detect_races):
            yield seen
            jax.effects_barrier()
    except BaseException:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        raise
    finally:
        gpu_callbacks.GPURaceDetectionState = state_class


class _Races(gpu_callbacks.GPURaceDetectionState):
    """Keeps a kernel's first race and looks no further.

    JAX 0.11 prints every racing access, by the thousand; 0.12 raises at the first, which ends the kernel."""

    first: str = ""
    _printing = threading.Lock()

    def check_read(self, *args, **kwargs):
        self._check(super().check_read, *args, **kwargs)

    def check_write(self, *args, **kwargs):
        self._check(super().check_write, *args, **kwargs)

    def _check(self, check, *args, **kwargs):
        if self.races_found:
            return
        with self._printing, contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                check(*args, **kwargs)
            except RuntimeError as error:
                if "RACE DETECTED" not in str(error):
                    raise
                said.write(str(error))
        if text := said.getvalue():
            self.first = _describe(text)
            self.races_found = True


def _describe(message: str) -> str:
    """JAX's message on a race, without addresses and clocks but with the source lines."""
    accesses = []
    for access, path, line in re.findall(r"^ *(read|write) of .*[, ]([^ ,]+):(\d+):\d+ \(", message, re.M):
        place = f"line {line}" if "ipykernel" in path else f"{pathlib.Path(path).name}:{line}"
        accesses.append(f"{access} at {place} `{linecache.getline(path, int(line)).strip()}`")
    return " and ".join(accesses) + " are unordered" if len(accesses) == 2 else message.strip()
