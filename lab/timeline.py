"""Timeline of each warpgroup: the trace that a kernel writes of its own named scopes, as a figure."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import tempfile
from typing import TYPE_CHECKING

import jax
import numpy as np

from cookbook import _host

from . import interpreter, plot, program, results
from .compiling import name_of
from .toolchain import CHIPS
from .turns import alone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_traced_into = jax.make_user_context(None)  # Part of JAX's cache keys: a kernel traced elsewhere writes elsewhere.


def timeline(
    fn, *args, problem: str, events: int = 512, blocks: int = 1, roles: tuple[str, ...] = (), ax: Axes | None = None
) -> Figure:
    """Draws a run of `fn(*args)`: one lane a warpgroup, each `jax.named_scope` of the kernel in its colour.

    On a GPU it is run with Mosaic's in-kernel profiler on, and under COOKBOOK_RECORD=1 the trace is stored for
    `problem`. Without one the stored trace is drawn, and the title says so; if there is none, the title says that.

    Times are right within a lane. Each lane starts at the first scope that its warpgroup entered, placed where the
    block started: wrap a warpgroup's whole role in a scope to see its waits in place. Cycles are shown as microseconds
    at the GPU's highest clock; under load it is lower. Each end of a scope costs some ten cycles. Mosaic
    subtracts these, also where the warpgroup would have waited anyway (chapter 7).

    Args:
      fn: its kernels are built with `compiler_params=lab.compiler_params()`, as the package's are.
      problem: the trace's name in `results/`, such as "06_pipelining/two_stages".
      events: scopes recorded a warpgroup, at 16 bytes of shared memory each; later ones are dropped.
      blocks: how many blocks to keep and draw, from the first.
      roles: what the warpgroups do, to name their lanes.
      ax: where to draw; by default a figure of its own.

    Raises:
      ValueError: `fn` wrote no trace, because its kernel was built without `lab.compiler_params()`.
    """
    name = problem.partition("/")[2].replace("_", " ")
    if interpreter.on_gpu():
        trace, title = _record(fn, args, events, blocks), f"{name}, {jax.devices()[0].device_kind}"
        if results.recording():
            results.write_timeline(problem, trace, program.digest(fn, *args, gpu=results.this_gpu()))
    elif (trace := results.read_timeline(problem)) is not None:
        title = f"{name}, {results.where(trace['provenance'])}"
        program.note(problem, "timeline", fn, args, "h200")
        if trace["provenance"].get("stale"):
            title += "; STALE: the code has changed since"
    else:
        trace, title = (
            {"lanes": [], "clock_ghz": CHIPS["h200"]["clock_ghz"]},
            f"{name}: no recorded timeline, and no GPU to record one",
        )
    lanes, clock_ghz = [lane for lane in trace["lanes"] if lane["block"] < blocks], trace["clock_ghz"]
    if ax is not None:
        _draw(ax, lanes, roles, title, clock_ghz)
        return ax.figure
    with plot.figure(height=1.2 + 0.55 * len(lanes)) as (fig, ax):
        _draw(ax, lanes, roles, title, clock_ghz)
    return fig


def step_clocks(problem: str, scope: str, gpu: str = "h200") -> float:
    """Median SM clocks from one `scope` to the next in the first lane that has it; NaN without a stored trace."""
    trace = results.read_timeline(problem, gpu) or {"lanes": []}
    for lane in trace["lanes"]:
        starts = [start for name, start, *_ in lane["spans"] if name == scope]
        if len(starts) > 1:
            return float(np.median(np.diff(starts))) * 1e3 * trace["clock_ghz"]
    return math.nan


def chrome_trace(problem: str, gpu: str = "h200") -> dict | None:
    """The trace stored for `problem` as a Chrome trace, for chrome://tracing or Perfetto; None if there is none.

    A block is a process, a warpgroup a thread; times are microseconds.
    """
    trace = results.read_timeline(problem, gpu)
    if trace is None:
        return None
    events = []
    for lane in trace["lanes"]:
        place = dict(pid=lane["block"], tid=lane["warpgroup"])
        events.append(place | dict(ph="M", name="thread_name", args=dict(name=f"warpgroup {lane['warpgroup']}")))
        events.append(place | dict(ph="M", name="process_name", args=dict(name=f"block {lane['block']}")))
        for name, start, duration, _ in lane["spans"]:
            events.append(place | dict(ph="X", name=name, ts=start, dur=duration))
    return dict(traceEvents=events, otherData=trace["provenance"] | dict(problem=problem))


def lanes_of(chrome_trace: dict, clock_ghz: float, blocks: int) -> list[dict]:
    """The lanes of JAX's Chrome trace: {"block", "warpgroup", "spans": [[name, start, duration, depth], ...]} in µs.

    JAX numbers the trace's threads through blocks and warpgroups, from 1, gives each block its SM as process, and adds
    SM cycles to a start in nanoseconds. Neighbouring blocks may share an SM, but not all of them do.
    """
    threads: dict[int, list[dict]] = {}
    for event in chrome_trace["traceEvents"]:
        threads.setdefault(event["tid"], []).append(event)
    if not threads:
        return []
    sms = [threads[tid][0]["pid"] for tid in sorted(threads)]
    warpgroups = math.gcd(*(len(list(same)) for _, same in itertools.groupby(sms)))
    kept = {tid: events for tid, events in sorted(threads.items()) if (tid - 1) // warpgroups < blocks}
    zero = min(events[0]["ts"] for events in kept.values())
    lanes = []
    for tid, events in kept.items():
        start, spans, open_spans = events[0]["ts"], [], []
        for event in events:
            at = start - zero + (event["ts"] - start) / clock_ghz
            if event["ph"] == "B":
                open_spans.append(len(spans))
                spans.append([event["name"], round(at, 4), 0.0, len(open_spans) - 1])
            else:
                span = spans[open_spans.pop()]
                span[2] = round(at - span[1], 4)
        lanes.append({"block": (tid - 1) // warpgroups, "warpgroup": (tid - 1) % warpgroups, "spans": spans})
    return lanes


def _record(fn, args, events: int, blocks: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        with alone(), _host.profiling(directory, events), _traced_into(directory):
            jax.block_until_ready(jax.jit(lambda *args: fn(*args))(*args))
            jax.effects_barrier()  # The trace is written by a callback.
        files = sorted(pathlib.Path(directory).glob("*-trace.json"), key=lambda path: path.stat().st_mtime_ns)
        if not files:
            raise ValueError(
                f"{name_of(fn)} wrote no trace: build its kernel with `compiler_params=lab.compiler_params()`, "
                "and name its parts with `jax.named_scope`."
            )
        chrome_trace = json.loads(files[0].read_text())
    clock_ghz = CHIPS.get(results.this_gpu(), CHIPS["h200"])["clock_ghz"]
    return {"lanes": lanes_of(chrome_trace, clock_ghz, blocks), "clock_ghz": clock_ghz}


_SCOPES = ("wgmma", "load", "store", "convert", "wait", "softmax", "turn")  # They have the same colour in every trace.


def _draw(ax: Axes, lanes: list[dict], roles: tuple[str, ...], title: str, clock_ghz: float) -> None:
    names = list(dict.fromkeys(name for lane in lanes for name, *_ in lane["spans"] if name != "Init"))  # Mosaic's own.
    colours = {name: colour for name, colour in zip(_SCOPES, plot.COLOURS, strict=False) if name in names}
    free = [colour for colour in plot.COLOURS if colour not in colours.values()] or plot.COLOURS
    others = [name for name in names if name not in _SCOPES]
    colours |= {name: free[i % len(free)] for i, name in enumerate(others)}
    for y, lane in enumerate(lanes):
        for name in names:
            for depth in {span[3] for span in lane["spans"] if span[0] == name}:
                height = 0.8 * 0.72**depth  # A scope inside another is drawn inside it.
                bars = [(start, duration) for span, start, duration, d in lane["spans"] if (span, d) == (name, depth)]
                look = dict(facecolor=colours[name], edgecolor=plot.CARD, linewidth=0.4, zorder=2 + 0.1 * depth)
                ax.broken_barh(bars, (y - height / 2, height), **look)
    for name in names:
        ax.plot([], [], "s", color=colours[name], label=name)
    several = any(lane["block"] for lane in lanes)
    role = lambda wg: f", {roles[wg]}" if wg < len(roles) else ""
    labels = [
        f"block {lane['block']}, " * several + f"warpgroup {lane['warpgroup']}" + role(lane["warpgroup"])
        for lane in lanes
    ]
    ax.set_yticks(range(len(lanes)), labels)
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_title(title)
    ax.set_xlabel(f"µs, at {clock_ghz} GHz")
    if names:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), handletextpad=0.2)
