"""A run of the simulator as a chart: what each role does in turn, what is in flight meanwhile, and where it ends."""

from cookbook.nvlink import protocol
from cookbook.nvlink.protocol import Flush, PushedScatter, Read, Send, Signal, Wait
from figures._draw import save
from lab import plot
from lab.nvlink_simulator import find_fault

LOOKS = {  # Marker, colour and name of each kind of event.
    Send: ("o", plot.COLOURS[0], "send"),
    Flush: ("|", plot.INK, "flush"),
    Signal: ("^", plot.COLOURS[1], "signal"),
    Wait: ("v", plot.COLOURS[2], "wait"),
    Read: ("s", plot.COLOURS[3], "read"),
}


def draw(run=None, last: int = 26):
    """The `last` events of `run`; by default of a pushed reduce-scatter without flushes."""
    run = run or find_fault(_without_flushes())
    events = run.history[-last:]
    devices = sorted({p.device for p in run.processes})
    roles = {d: [p.role for p in run.processes if p.device == d] for d in devices}
    rows = {row: y for y, row in enumerate((d, role) for d in devices for role in (*roles[d], "memory"))}
    with plot.figure(7.8, 1.2 + 0.4 * len(rows)) as (fig, ax):
        for d in devices:
            ax.axhspan(rows[d, "memory"] - 0.4, rows[d, "memory"] + 0.4, color=plot.FAINT, alpha=0.45, linewidth=0)
        started, seen = {}, set()
        for x, event in enumerate(events):
            kind, y = type(event.action), rows[event.device, event.role]
            marker, colour, name = LOOKS[kind]
            if kind is Send and event.arrives:
                at, start = started.pop((event.device, event.role, event.copy), (-0.6, y))
                target = rows[event.action.peer, "memory"]
                ax.annotate("", (x, target), (at, start), arrowprops=dict(arrowstyle="-|>", color=colour, lw=1.0))
                continue
            if kind is Send:
                started[event.device, event.role, event.copy] = x, y
            if kind is Signal:
                target = rows[event.action.peer, "memory"]
                style = dict(arrowstyle="-|>", color=colour, lw=0.9, linestyle=":")
                ax.annotate("", (x + 0.35, target), (x, y), arrowprops=style)
            label = None if kind in seen else name
            seen.add(kind)
            ax.plot(x, y, marker, color=colour, markersize=7, label=label, linestyle="")
            ax.text(x, y - 0.24, _about(event.action), ha="left", va="bottom", fontsize=6, rotation=32)
        for at, start in started.values():
            ax.plot([at, len(events)], [start, start], color=LOOKS[Send][1], linewidth=0.9, linestyle="--", alpha=0.5)
        if run.fault:
            x, event = len(events) - 1, events[-1]
            y = rows[event.action.peer, "memory"] if event.arrives else rows[event.device, event.role]
            ax.plot(x, y, "o", markersize=19, markerfacecolor="none", markeredgecolor=plot.BOUND, markeredgewidth=1.8)
        kind = f"ends in a fault: {str(run.fault).partition(':')[0]}" if run.fault else "a right run"
        ax.set_title(kind, fontsize=9, color=plot.BOUND if run.fault else plot.INK)
        ax.set_yticks(range(len(rows)), [f"GPU {d}, {role}" for d, role in rows])
        ax.set(xlim=(-0.8, len(events) + 0.2), ylim=(len(rows) - 0.4, -0.75), xticks=[])
        ax.set_xlabel("events, in the order of this run")
        ax.grid(visible=False)
        ax.legend(ncols=5, fontsize=7.5, loc="lower right", bbox_to_anchor=(1, 1), handletextpad=0.1, columnspacing=1)
    return fig


def _about(action) -> str:
    """Data of a send or a read, the semaphore of a signal or a wait."""
    match action:
        case Send() | Read():
            return ",".join(map(str, action.data))
        case Signal() | Wait():
            index = action.index if isinstance(action.index, tuple) else (action.index,)
            return f"{action.semaphore} {','.join(map(str, index))}"
    return ""


def _without_flushes():
    programs = [protocol.programs(PushedScatter(2, 2), d, 2) for d in range(2)]
    return [{role: [a for a in acts if not isinstance(a, Flush)] for role, acts in p.items()} for p in programs]


if __name__ == "__main__":
    save(__file__, draw())
