"""Where a kernel runs: on this machine's GPU, or in Pallas's GPU interpreter on the CPU.

Every private JAX name that this project needs is used here and in `at_home.py`, and nowhere else.
"""

import collections
import contextlib
import functools
import io
import linecache
import logging
import math
import pathlib
import re
import threading

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory

from cookbook import _host

from . import at_home
from .toolchain import gpu_facts

_host.allow_waiting_threads()  # Now: a notebook makes arrays, which starts the backend, before it interprets.
NUM_SMS = 4  # A persistent grid has this many blocks when interpreted: enough for waves and tails, quick to run.


class Deadlock(RuntimeError):
    """Every warpgroup of an interpreted kernel waits or has ended: who waits, where, at which barrier."""


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

    Seen: races of barriers, TMA copies and warpgroups inside a block or a cluster; a block that leaves a multicast out,
    since a block waits there until all that share it have come.
    Not seen: the lifetime of WGMMA operands (the interpreter multiplies at once), races between the blocks of a grid,
    other wrong multicasts.

    Raises:
      Deadlock: all warpgroups of a kernel wait at barriers, or have ended. A loop that never ends is not found: give
        cells and tests a timeout.
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
    if (
        _host._target.get() is None
    ):  # Not inside another: memory is that of a kernel that never ended, and was given up.
        gpu_callbacks.reset_gpu_interpret_mode_state()
    seen = Interpreted()
    state_class, calls_back = gpu_callbacks.GPURaceDetectionState, callbacks.io_callback_impl
    summarize = source_info_util.summarize
    source_info_util.summarize = functools.cache(summarize)  # Asked for at each access, and a loop repeats its lines.
    gpu_callbacks.GPURaceDetectionState = seen._new_kernel  # JAX makes one for each kernel and keeps only the latest.
    callbacks.io_callback_impl = functools.partial(_call_back, calls_back)
    watch = _Watch()
    try:
        on = _host.interpreting(num_sms=NUM_SMS, detect_races=detect_races, several_devices=True)
        with at_home.at_home(), watch, on:
            yield seen
            jax.effects_barrier()
    except BaseException:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        at_home.forget_failure()
        if watch.report:
            raise Deadlock(watch.report) from None
        raise
    finally:
        gpu_callbacks.GPURaceDetectionState, callbacks.io_callback_impl = state_class, calls_back
        source_info_util.summarize = summarize


def _call_back(original, *args, callback, result_avals, **kwargs):
    """Calls the interpreter back, at each of a kernel's operations, with numbers and NumPy's arrays. JAX would make all
    of them JAX's first, which takes as long as the rest."""

    def call():
        # XLA takes the arrays' memory back afterwards.
        arrays = list(map(np.asarray, args))
        plain = [x.item() if x.ndim == 0 and x.dtype.kind in "iu" else np.array(x) for x in arrays]
        if fn is gpu_callbacks._swap:  # Its last argument is stored: a number keeps its dtype, which is the array's.
            plain[-1] = np.array(arrays[-1])
        found = zip(callback(*plain), result_avals, strict=True)
        return [np.asarray(x, aval.dtype) if isinstance(x, int) else x for x, aval in found]

    fn = getattr(callback.callback_func, "func", callback.callback_func)
    module = str(fn.__module__)  # None of a list's append.
    with jax.transfer_guard("allow"):  # The interpreter's arrays are no business of the program's.
        if module == __name__ or module.startswith(gpu_callbacks.__package__):
            return original(callback=call, result_avals=result_avals, **kwargs)
        return original(*args, callback=callback, result_avals=result_avals, **kwargs)


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
    accesses = re.findall(r"^ *(read|write) of .*[, ]([^ ,]+:\d+:\d+ \()", message, re.M)
    accesses = [f"{access} at {_place(place)}" for access, place in accesses]
    return " and ".join(accesses) + " are unordered" if len(accesses) == 2 else message.strip()


def _place(summary: str) -> str:
    """JAX's "path:line:column (function)" as a line and its text."""
    if not (found := re.match(r"(.+?):(\d+):\d+ \(", summary)):
        return "an unknown line"
    path, line = found[1], int(found[2])
    at = f"line {line}" if "ipykernel" in path else f"{pathlib.Path(path).name}:{line}"
    return f"{at} `{linecache.getline(path, line).strip()}`"


class _Meeting:
    """Where warpgroups of several blocks wait until all have come to a multicast that they share.

    The interpreter gives each block a copy of its own. On a GPU a block's data comes from all of them, so that none of
    them can run ahead of another by more than the ring. There the data is waited for, here the start already. To
    `_Watch` this is a barrier; no clock of races passes it.
    """

    def __init__(self, memory, size: int, is_aborted: bool):
        self.shared_memory, self.num_arrivals, self.is_aborted = memory, size, is_aborted
        self.cv, self.phase, self.arrivals_count = threading.Condition(), 0, 0
        self.last_observed_phase_by_thread = {}

    def arrive(self):
        with self.cv:
            self.arrivals_count += 1
            if self.arrivals_count == self.num_arrivals:
                self.phase, self.arrivals_count = self.phase + 1, 0
                self.cv.notify_all()

    def wait(self, thread, _logging_info):
        with self.cv:
            phase = self.last_observed_phase_by_thread.get(thread, 0)
            self.cv.wait_for(lambda: self.phase > phase or self.is_aborted)
            self.last_observed_phase_by_thread[thread] = phase + 1
        self.shared_memory.check_failed()

    def abort(self):
        with self.cv:
            self.is_aborted = True
            self.cv.notify_all()


class _Watch:
    """Ends a kernel whose warpgroups all wait at barriers or have ended; `report` says who waits, where, for whom.

    A copy arrives at its barrier in the call that starts it, so nobody but a warpgroup could still come.
    """

    latest: "_Watch"
    _LOOK = 0.1  # Seconds between two looks.
    _WARPS = 100  # Looks without a change where warps wait: nothing tells how many of them are still at work.

    def __init__(self):
        self.report = ""
        self._lock, self._over = threading.Lock(), threading.Event()
        self._waiting, self._ended = {}, {}  # By thread of the cluster that runs, as are the arrivals.
        self._arrivals = collections.defaultdict(collections.Counter)  # By barrier: (who, at which line).
        self._meetings = {}  # By who meets: the multicast's axes, a block's place along the others, its warpgroup.
        self._failed = None  # The memory of a kernel that failed.
        self._log = logging.getLogger("jax._src.callback")  # Shows a stack for each thread of a kernel that fails.

    def __enter__(self):
        _Watch.latest = self
        barrier, memory = shared_memory.Barrier, shared_memory.GPUSharedMemory
        self._originals = [
            (owner, name, getattr(owner, name))
            for owner, name in (
                (barrier, "wait"),
                (barrier, "arrive"),
                (memory, "kernel_thread_finished"),
                (memory, "reset_per_cluster_state"),
                (memory, "_abort_waiters"),
                (jaxpr_interpret.JaxprInterpreter, "_interpret_copy_gmem_to_smem_p"),
            )
        ]
        for owner, name, original in self._originals:
            setattr(owner, name, _around(original, getattr(self, name)))
        self._log.addFilter(_none)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self._log.removeFilter(_none)
        self._waiting, self._ended, self._meetings, self._failed = (
            {},
            {},
            {},
            None,
        )  # `latest` keeps no kernel's memory.
        for owner, name, original in self._originals:
            setattr(owner, name, original)

    # Called in place of the interpreter's methods of the same names.

    def wait(self, original, barrier, thread, logging_info=None):
        with self._lock:
            self._waiting[thread] = barrier, logging_info, _observed(barrier, thread)
        try:
            return original(barrier, thread, logging_info)
        finally:
            with self._lock:
                self._waiting.pop(thread, None)

    def arrive(self, original, barrier, thread, clock=None, logging_info=None):
        if logging_info:
            with self._lock:
                self._arrivals[id(barrier)][_name(logging_info), logging_info.get_source_info_str()] += 1
        return original(barrier, thread, clock, logging_info)

    def kernel_thread_finished(self, original, memory, thread):
        with self._lock:
            self._ended[thread] = memory
        return original(memory, thread)

    def reset_per_cluster_state(self, original, memory):
        with self._lock:
            self._ended.clear()
            self._arrivals.clear()
            self._meetings.clear()
        return original(memory)

    def _abort_waiters(self, original, memory):
        with self._lock:
            self._failed = memory
            for meeting in self._meetings.values():
                meeting.abort()
        return original(memory)

    def _interpret_copy_gmem_to_smem_p(self, original, interpreter, eqn, token, get_invals):
        if eqn.params["collective_axes"] and eqn.params["leader_tracked"] is None:
            shared = interpreter.are_thread_cluster_axes_collective(eqn.params["collective_axes"])[:-1]
            size = math.prod(dim for dim, together in zip(interpreter.cluster_dims, shared, strict=True) if together)
            token = callbacks.io_callback(
                functools.partial(_meet, shared=shared, size=size, source_info=eqn.source_info),
                gpu_callbacks.TOKEN_SHAPE_DTYPE,
                token=token,
                mesh_location=interpreter.mesh_location,
                thread=interpreter.thread,
            )
        return original(interpreter, eqn, token, get_invals)

    def meet(self, mesh_location, thread, shared, size, source_info):
        info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
        rest = (int(at) for at, together in zip(mesh_location.block_coords, shared, strict=True) if not together)
        key = shared, *rest, thread.device_id, thread.warpgroup_id, getattr(thread, "warp_id", None)
        with self._lock:
            memory = gpu_callbacks._get_shared_memory()
            meeting = self._meetings.setdefault(key, _Meeting(memory, size, is_aborted=memory is self._failed))
            self._arrivals[id(meeting)][_name(info), info.get_source_info_str()] += 1
            meeting.arrive()
        self.wait(_Meeting.wait, meeting, thread, info)

    def _look(self):
        before, alike = None, 0
        while not self._over.wait(self._LOOK):
            with self._lock:
                now = dict(self._waiting), dict(self._ended)
            alike = alike + 1 if now == before else 0
            before = now
            warps = any(isinstance(thread, shared_memory.Warp) for thread in now[0])
            is_over = now[0] and alike >= (self._WARPS if warps else 1) and _nobody_is_left(*now)
            with self._lock:
                is_over = is_over and _all_are_blocked(now[0]) and self._waiting == now[0]
            if is_over:
                self.report = self.report or self._describe(*now)
                # Wakes those that wait: they raise. The kernel of another device may come next, and wait as well.
                _memory(now[0]).set_failed(Deadlock(self.report), top_level=False)
                before, alike = None, 0

    def _describe(self, waiting, ended) -> str:
        lines = ["every warpgroup waits, or has ended."]
        for _, (barrier, info, _) in sorted(waiting.items(), key=lambda item: str(item[0])):
            arrivals = self._arrivals[id(barrier)].items()
            came = [f"{who} at {_place(line)}" + f" ({n} times)" * (n > 1) for (who, line), n in arrivals]
            lines.append(
                f"{_name(info)} waits at {_place(info.get_source_info_str())} for phase {barrier.phase} of "
                f"{_which(barrier)}, which has {barrier.arrivals_count} of {barrier.num_arrivals} arrivals. "
                + (f"Arrived so far: {'; '.join(came)}." if came else "Nobody has ever arrived there.")
            )
        lines += [f"warpgroup {thread.warpgroup_id} has ended." for thread in sorted(ended, key=str)]
        return "\n  ".join(lines)


def _meet(*, token, **multicast):
    _Watch.latest.meet(**multicast)  # A kernel may have been traced under another.
    return token


def _none(record) -> bool:
    return False


def _around(original, method):
    """A method that hands the original one to `method`."""
    return lambda self, *args, **kwargs: method(original, self, *args, **kwargs)


def _memory(waiting) -> shared_memory.GPUSharedMemory:
    return next(iter(waiting.values()))[0].shared_memory


def _nobody_is_left(waiting, ended) -> bool:
    warpgroup = lambda thread: thread.warpgroup() if isinstance(thread, shared_memory.Warp) else thread
    every = {warpgroup(thread) for thread in _memory(waiting).all_concurrent_threads}
    return every <= {warpgroup(thread) for thread in (*waiting, *ended)}


def _observed(barrier, thread) -> int:
    """How many phases of the barrier the thread has seen. A warp has seen those of its warpgroup."""
    seen = barrier.last_observed_phase_by_thread
    return seen.get(thread, seen.get(thread.warpgroup(), 0) if isinstance(thread, shared_memory.Warp) else 0)


def _all_are_blocked(waiting) -> bool:
    """Whether each waits for a phase that is not complete. Others may only be slow to go on, on a busy machine."""
    for thread, (barrier, _, observed) in waiting.items():
        with barrier.cv:
            if not observed == _observed(barrier, thread) == barrier.phase:
                return False
    return True


def _name(info) -> str:
    """A warpgroup, with the place of its block in the grid."""
    place = (*info.mesh_location.cluster_coords, *info.mesh_location.block_coords)
    warp = f"warp {info.thread.warp_id} of " if isinstance(info.thread, shared_memory.Warp) else ""
    block = f" of block {', '.join(map(str, place))}" if place else ""
    return f"{warp}warpgroup {info.thread.warpgroup_id}{block}"


def _which(barrier) -> str:
    """A barrier's place among those of its block."""
    if isinstance(barrier, _Meeting):
        return "a multicast that it shares with other blocks"
    allocated = sorted(barrier.shared_memory.mem.items(), key=lambda item: (item[0].block_id, item[0].buffer_id))
    block = [key.block_id for key, allocation in allocated if allocation is barrier]
    ours = [a for key, a in allocated if isinstance(a, shared_memory.Barrier) and [key.block_id] == block]
    places = [i for i, allocation in enumerate(ours) if allocation is barrier]
    return (
        f"barrier {places[0]} of {len(ours)} (in the order of scratch_types)" if places else "a barrier of the cluster"
    )
