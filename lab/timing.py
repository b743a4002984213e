"""How long a kernel takes: CUPTI's time on a GPU, the recorded figure elsewhere."""

import dataclasses
import math
import time

import jax
import numpy as np

from . import program, results
from .turns import alone

_OUTPUT_BYTES_MAX = 2e9  # Outputs alive at once while measuring: other processes may share the GPU.


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The time of one implementation on one problem, measured here or recorded.

    Times are GPU kernel time in milliseconds (launch overhead excluded), NaN where there is no figure; `spread` is the
    interquartile range over the median.
    """

    problem: str | None
    impl: str
    median_ms: float
    min_ms: float = math.nan
    spread: float = math.nan
    flops: float | None = None
    nbytes: float | None = None
    recorded: bool = False
    stale: bool = False
    provenance: dict = dataclasses.field(default_factory=dict)

    @property
    def tflops(self) -> float:
        """TFLOP/s at the median; NaN where `flops` was not given."""
        return (self.flops or math.nan) / self.median_ms / 1e9

    @property
    def tbps(self) -> float:
        """TB/s at the median; NaN where `nbytes` was not given."""
        return (self.nbytes or math.nan) / self.median_ms / 1e9

    def __repr__(self) -> str:
        name = f"{self.problem or 'unnamed'}, {self.impl}"
        if math.isnan(self.median_ms):
            return f"{name}: no recorded figure, and none measured here"
        rates = f", {self.tflops:.0f} TFLOP/s" if self.flops else ""
        rates += f", {self.tbps:.2f} TB/s" if self.nbytes else ""
        where = results.where(self.provenance) if self.recorded else f"measured on {self.provenance.get('gpu', '?')}"
        where += "; STALE: the code has changed since" if self.stale else ""
        times = f"{self.median_ms:.4g} ms (least {self.min_ms:.4g}, spread {self.spread:.1%})"
        return f"{name}: {times}{rates} [{where}]"


def measure(
    fn,
    *args,
    problem: str | None = None,
    impl: str = "cookbook",
    iterations: int = 20,
    flops: float | None = None,
    nbytes: float | None = None,
    inputs: str = "random normal",
    of=None,
    devices: int = 1,
    gpu: str = "h200",
) -> Measurement:
    """Kernel time of `fn(*args)`: median, least and spread of `iterations` warm calls.

    On a GPU: the sum of CUPTI's times of the kernels of a call, and under COOKBOOK_RECORD=1 the figure is written to
    `results/` for `problem`. Without one, or under COOKBOOK_MEASURE=0, nothing is run: the figure recorded for
    `problem` and `impl` is returned, marked `recorded`, and `stale` if its program has changed since; NaN if there is
    none.

    On a GPU not after `jax.profiler.trace` in the same process: JAX's own use of CUPTI then ends the process ("activity
    records were dropped"). Measure first, or trace in another process.

    Args:
      fn: a function of JAX arrays; None for a peer that JAX cannot run, whose recorded figure is wanted.
      problem: the problem's name in `results/`, such as "softmax/16384x8192/bf16".
      impl: whose implementation this is.
      flops, nbytes: floating-point operations and bytes of HBM traffic of one call, for the rates.
      inputs: what `args` hold, for the record.
      of: a function and its arguments, whose program identifies the figure in place of that of `fn`, where `fn` holds a
        Ref; False where `fn` is other people's.
      devices: GPUs of this host that run `fn` together. The time is that of one of them (`least_over_devices`), the
        record's folder that of such hosts, and its provenance has `wall_ms`, the time from call to call. A host with
        fewer GPUs shows the recorded figure.
      gpu: whose recorded figure is wanted, where nothing is run: also on a GPU that is older.
    """
    if iterations < 1:
        raise ValueError(f"iterations = {iterations} must be at least 1")
    timed, given = (fn, args) if of is None else of or (None, ())
    # A mesh of several GPUs is not to be had elsewhere, and what is compiled can no longer be traced.
    has_program = timed is not None and devices == 1 and not isinstance(timed, jax.stages.Compiled)
    if fn is None or not results.measuring(gpu, devices):
        if has_program:
            program.note(problem, impl, timed, given, gpu)
        return _recorded(problem, impl, flops, nbytes, results.host(gpu, devices))
    times = np.array(_kernel_ms(fn, args, iterations, devices))
    low, median, high = (float(x) for x in np.percentile(times, (25, 50, 75)))
    figures = dict(min_ms=float(times.min()), spread=(high - low) / median, flops=flops, nbytes=nbytes)
    how = dict(gpus=devices, wall_ms=wall_ms(fn, args)) if devices > 1 else {}
    if problem and results.recording():
        stamp = program.digest(timed, *given, gpu=results.this_gpu()) if has_program else None
        results.write(problem, impl, ms=median, program=stamp, inputs=inputs, devices=devices, **figures, **how)
    return Measurement(problem, impl, median, **figures, provenance=results.machine() | how)


def first_call_seconds(fn, *args) -> float:
    """Wall time of the first call of `fn(*args)`, tracing and compiling included. NaN where no figures are taken.

    JAX's caches are emptied first. JAX 0.12 keeps Mosaic kernels compiled all the same: there, call it in a process
    that has not run `fn`.
    """
    if not results.measuring():
        return math.nan
    jax.clear_caches()
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(lambda *args: fn(*args))(*args))
    return time.perf_counter() - start


def median_ms(fn, args, iterations: int, devices: int = 1) -> float:
    """Median kernel time of `fn(*args)`, on a GPU or on several together; `fn` may be compiled."""
    return float(np.median(_kernel_ms(fn, args, iterations, devices)))


def wall_ms(fn, args, calls: int = 10) -> float:
    """Wall time from one call of `fn(*args)` to the next, launches and waiting included."""
    jitted = fn if hasattr(fn, "lower") or isinstance(fn, jax.stages.Compiled) else jax.jit(fn)
    jax.block_until_ready(jitted(*args))
    start = time.perf_counter()
    for _ in range(calls):
        out = jitted(*args)
    jax.block_until_ready(out)
    return 1e3 * (time.perf_counter() - start) / calls


def least_over_devices(kernels: list[tuple[str, float]], devices: int) -> float:
    """The time of one call that `devices` GPUs run together: `kernels` has (name, time) of each kernel on each of them.

    A kernel that communicates begins when its own GPU is ready, and waits for the slowest one. That is no work of its
    own. So a kernel's time is the least of those on the devices. Nobody says which launch a time is of where a name
    comes several times a device: sorted, each `devices` of them are taken for one launch's. Libraries' kernels wait in
    the same way, and are timed by the same rule.
    """
    by_name: dict[str, list[float]] = {}
    for name, ms in kernels:
        by_name.setdefault(name, []).append(ms)
    return sum(sum(sorted(times)[::devices]) for times in by_name.values())


def _kernel_ms(fn, args, iterations: int, devices: int = 1) -> list[float]:
    from jax.experimental.mosaic.gpu import profiler

    is_compiled = isinstance(fn, jax.stages.Compiled)
    jitted = fn if is_compiled or hasattr(fn, "lower") else jax.jit(fn)
    outputs = jax.tree.leaves(fn.out_info if is_compiled else jax.eval_shape(jitted, *args))
    at_once = int(_OUTPUT_BYTES_MAX // max(1, sum(out.size * out.dtype.itemsize for out in outputs)))
    at_once = min(max(at_once, 1), iterations)
    jax.block_until_ready(jitted(*args))  # Compiled while other processes measure.
    with alone():
        for _ in range(3):  # Clocks and caches settle.
            jax.block_until_ready(jitted(*args))
        times: list[float] = []
        while len(times) < iterations:
            if devices > 1:  # The order of several devices' kernels differs from call to call.
                _, kernels = profiler.measure(jitted, aggregate=False)(*args)
                ms = kernels and least_over_devices(kernels, devices)
            else:
                _, ms = profiler.measure(jitted, iterations=at_once)(*args)
            if ms is None:
                raise RuntimeError(f"{getattr(fn, '__name__', fn)} launches no GPU kernel: there is nothing to time.")
            times += ms if isinstance(ms, list) else [ms]
    return times[:iterations]


def _recorded(problem: str | None, impl: str, flops, nbytes, gpu: str) -> Measurement:
    row = results.read(problem, impl, gpu) if problem else None
    if row is None:
        return Measurement(problem, impl, math.nan, flops=flops, nbytes=nbytes)
    return Measurement(
        problem,
        impl,
        row["ms"],
        row["min_ms"],
        row["spread"],
        row["flops"] if flops is None else flops,
        row["nbytes"] if nbytes is None else nbytes,
        recorded=True,
        stale=row["provenance"].get("stale", False),
        provenance=row["provenance"],
    )
