"""Roofline: the best that a GPU can do, and how near a kernel came."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from typing import TYPE_CHECKING

import jax
import numpy as np

from . import plot, results
from .timing import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Peak:
    """`value` in FLOP/s, or in byte/s for "hbm" and "nvlink"; and who says so."""

    value: float
    source: str


_B200 = "NVIDIA HGX B200 datasheet, dense"  # It gives the rates of sparse products, of which dense ones are half.
# Dense products in TFLOP/s, half of the datasheets' sparse rates; then f32, and f64 on the tensor cores.
_SXM = dict(fp8=1979, bf16=989, tf32=494, f32=67, f64=67)
_NVL = dict(fp8=1670.5, bf16=835.5, tf32=417.5, f32=60, f64=60)
_PCIE = dict(fp8=1513, bf16=756.5, tf32=378, f32=51, f64=51)


def _hopper(name: str, rates: dict, hbm: float, nvlink: float = 450e9) -> dict[str, Peak]:
    """The peaks of a Hopper: `rates` in TFLOP/s, `hbm` and `nvlink` in byte/s."""
    source = f"NVIDIA {name}, dense"
    peak = lambda kind, of=source: Peak(rates[kind] * 1e12, of)
    return {
        "fp8": peak("fp8"),
        "int8": peak("fp8"),
        "bf16": peak("bf16"),
        "f16": peak("bf16"),
        "tf32": peak("tf32"),
        "f32": peak("f32", f"{source}; the CUDA cores"),
        "f64": peak("f64", f"{source}; the tensor cores"),
        "hbm": Peak(hbm, source),
        "nvlink": Peak(nvlink, f"{source}; each way, with all links of a GPU"),
    }


# By `results.gpu_of` of the name that JAX gives a GPU: `jax.devices()[0].device_kind`.
PEAKS: dict[str, dict[str, Peak]] = {
    "h200": _hopper("H200 datasheet (SXM)", _SXM, 4.8e12),
    "h200-nvl": _hopper("H200 datasheet (NVL)", _NVL, 4.8e12),
    "h100": _hopper("H100 datasheet (SXM)", _SXM, 3.35e12),
    "h100-pcie": _hopper("H100 datasheet (PCIe)", _PCIE, 2.0e12, 300e9),
    "h100-nvl": _hopper("H100 datasheet (NVL)", _NVL, 3.9e12, 300e9),  # One card; an older datasheet adds up two.
    "gh200": _hopper("GH200 datasheet (96 GB of HBM3)", _SXM, 4.0e12),
    "gh200-144g": _hopper("GH200 datasheet (144G HBM3e)", _SXM, 4.9e12),
    "b200": {
        "fp8": Peak(4500e12, _B200),  # MXFP8 too: scales cost no products.
        "int8": Peak(4500e12, _B200),
        "bf16": Peak(2250e12, _B200),
        "f16": Peak(2250e12, _B200),
        "tf32": Peak(1100e12, _B200),
        "f32": Peak(75e12, f"{_B200}; the CUDA cores"),
        "f64": Peak(37e12, _B200),
        # The HGX B200 datasheet says 62 TB/s of 8 GPUs, that of the DGX B200 64: the higher one is the bound.
        "hbm": Peak(8.0e12, "NVIDIA DGX B200 datasheet, an eighth of 64 TB/s"),
        "nvlink": Peak(900e9, f"{_B200}; each way, with all links of a GPU"),
    },
}
# For each measured roof: the problem whose recorded rate it is, and the amount that the rate counts.
_CEILINGS = {"hbm": ("ceiling/stream", "nbytes"), "bf16": ("ceiling/matmul/bf16", "flops")}
_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "float8": "fp8"}


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least time that `flops` and `nbytes` take on a GPU, if neither waits for the other."""

    seconds: float
    limited_by: str  # "compute" or "memory".
    compute_seconds: float
    memory_seconds: float
    intensity: float  # FLOP per byte.
    gpu: str

    @property
    def ms(self) -> float:
        return self.seconds * 1e3

    def __repr__(self) -> str:
        return (
            f"at least {self.ms:.3g} ms on {self.gpu}, bound by {self.limited_by} "
            f"(compute {self.compute_seconds * 1e3:.3g} ms, memory {self.memory_seconds * 1e3:.3g} ms, "
            f"{self.intensity:.3g} FLOP per byte)"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A measurement beside its bound; `fraction` is bound over measured time, 1 at best."""

    measurement: Measurement
    bound: Bound

    @property
    def fraction(self) -> float:
        return self.bound.ms / self.measurement.median_ms

    def __repr__(self) -> str:
        if math.isnan(self.measurement.median_ms):
            return f"predicted {self.bound.ms:.3g} ms ({self.bound.limited_by}); {self.measurement!r}"
        took = f"{self.measurement.median_ms:.3g} ms"
        if self.measurement.recorded:
            took += f" ({results.where(self.measurement.provenance)}{', STALE' if self.measurement.stale else ''})"
        return (
            f"predicted {self.bound.ms:.3g} ms ({self.bound.limited_by}), took {took}: {self.fraction:.0%} of the bound"
        )


def _known(gpu: str | None) -> str:
    """`gpu`, or for None that of COOKBOOK_GPU, or this machine's; the H200 where that is none of `PEAKS`.

    Warns of a GPU that is none of them.
    """
    if gpu := gpu or os.environ.get("COOKBOOK_GPU"):
        return gpu
    here = results.this_gpu()
    if here not in PEAKS and jax.default_backend() == "gpu":
        warnings.warn(f"{jax.devices()[0].device_kind} has no peaks here: bounds are those of an H200.", stacklevel=3)
    return here if here in PEAKS else "h200"


def peak(kind, gpu: str | None = None) -> Peak:
    """The datasheet's peak of a dtype ("bf16", `jnp.bfloat16`), of "hbm" or of "nvlink".

    Raises ValueError naming what is known.
    """
    gpu = _known(gpu)
    if gpu not in PEAKS:
        raise ValueError(
            f"gpu = {gpu!r} has no peaks here; it, or COOKBOOK_GPU, must be one of {', '.join(map(repr, PEAKS))}."
        )
    name = kind if isinstance(kind, str) else np.dtype(kind).name
    name = _NAMES.get(name, "fp8" if name.startswith("float8") else name)
    if name not in PEAKS[gpu]:
        known = ", ".join(map(repr, PEAKS[gpu]))
        raise ValueError(f"{kind!r} has no peak on {gpu}; it must be one of {known}, or such a dtype.")
    return PEAKS[gpu][name]


def ceiling(kind: str, gpu: str | None = None) -> Peak | None:
    """Measured peak of "hbm" (a stream of two reads and a write) or "bf16" (the library's product), or None."""
    problem, rate = _CEILINGS.get(kind, ("", ""))
    best = max(
        (row[rate] / row["ms"] * 1e3 for row in results.rows("ceiling", _known(gpu)).get(problem, {}).values()),
        default=0,
    )
    return Peak(best, f"measured, {problem}") if best else None


def bound(flops: float, nbytes: float, dtype="bf16", gpu: str | None = None) -> Bound:
    """The roofline bound by the datasheet's peaks.

    Args:
      flops: floating-point operations, at the rate of `dtype` ("bf16": the tensor cores, "f32": the CUDA cores).
      nbytes: bytes that must cross HBM: each input read once, each output written once.
      gpu: of `PEAKS`; None: that of the environment's COOKBOOK_GPU ("h100"), or this machine's, or the H200 where
        there is none of them. A warning names a GPU of this machine that is not in `PEAKS`.
    """
    if flops < 0 or nbytes < 0 or flops + nbytes == 0:
        raise ValueError(f"flops = {flops} and nbytes = {nbytes} must not be negative, nor both zero.")
    compute, memory = flops / peak(dtype, gpu).value, nbytes / peak("hbm", gpu).value
    limit = "compute" if compute > memory else "memory"
    return Bound(max(compute, memory), limit, compute, memory, flops / nbytes if nbytes else math.inf, _known(gpu))


def compare(measurement: Measurement, dtype=None, gpu: str | None = None) -> Comparison:
    """Predicted against measured, on the GPU where it was measured if none is named.

    The dtype is the last part of the problem's name ("softmax/16384x8192/bf16").
    """
    if measurement.flops is None and measurement.nbytes is None:
        raise ValueError(f"measurement = {measurement!r} has neither flops nor nbytes: give them to lab.measure.")
    dtype = dtype or (measurement.problem or "").split("/")[-1]
    if gpu is None and measurement.recorded:
        gpu = results.gpu_of(measurement.provenance["gpu"])
    return Comparison(measurement, bound(measurement.flops or 0, measurement.nbytes or 0, dtype, gpu))


def figure(points=(), dtype="bf16", gpu: str | None = None, reached: tuple[float, float] | None = None) -> Figure:
    """The roofline with measurements on it.

    Args:
      points: `Measurement`s with flops and nbytes, or (label, flops, nbytes, milliseconds); NaN times are left out.
      dtype: whose compute roof to draw.
      reached: the byte/s and FLOP/s of the measured roof; None: the recorded `ceiling`s, taken in a run of their own.
    """
    points = [
        (f"{p.problem}, {p.impl}", p.flops, p.nbytes, p.median_ms) if isinstance(p, Measurement) else p for p in points
    ]
    points = [point for point in points if not math.isnan(point[3])]
    roof, slope = peak(dtype, gpu).value, peak("hbm", gpu).value
    intensities = [flops / nbytes for _, flops, nbytes, _ in points] + [roof / slope]
    x = np.geomspace(min(intensities) / 8, max(intensities) * 8, 200)
    with plot.figure(height=4.0) as (fig, ax):
        ax.plot(x, np.minimum(roof, slope * x) / 1e12, color=plot.INK, label="datasheet")
        stream, product = ceiling("hbm", gpu), ceiling("bf16", gpu) if roof == peak("bf16", gpu).value else None
        if reached:
            stream, product = (Peak(value, "measured by the caller") for value in reached)
        if stream or product:
            line = np.minimum(product.value if product else math.inf, stream.value * x if stream else math.inf)
            of = "s" if stream and product else " of HBM" if stream else " of arithmetic"
            line = np.where(line <= roof, line, math.nan) / 1e12  # Only what was measured.
            ax.plot(x, line, color=plot.BOUND, linestyle="--", label=f"measured ceiling{of}")
        for i, (label, flops, nbytes, ms) in enumerate(points):
            colour = plot.COLOURS[i % len(plot.COLOURS)]
            ax.plot(flops / nbytes, flops / ms / 1e9, "o", color=colour, markersize=7, label=label)
        ax.set(xscale="log", yscale="log", xlabel="FLOP per byte of HBM traffic", ylabel="TFLOP/s")
        ax.set_title(f"Roofline of {_known(gpu).upper()}, {dtype if isinstance(dtype, str) else np.dtype(dtype).name}")
        ax.legend(loc="lower right")
    return fig
