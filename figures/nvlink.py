"""Figures of chapter 18: NVLink."""

from cookbook.nvlink.protocol import Flush, Read, Send, Signal, Wait
from figures._chart import chart, label, lanes, tile
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, PINK, RED, SOFT, Picture, arrow, box, drawing, words
from figures._stepper import stepper
from lab import plot
from lab.nvlink_simulator import PushedScatter, find_fault, programs_of


@drawing(7.8, 3.9)
def nvlink_host(ax):
    """One store to a peer's memory and one signal: through which memories they go, and in which order."""
    for x, name in ((0.2, "GPU 0"), (4.7, "GPU 1")):
        box(ax, x, 0.55, 2.9, 3.1, colour=SOFT, fill=0.04)
        words(ax, x + 0.12, 3.47, name, 10, ha="left", weight="bold")
    for sm, memory, smem, warpgroup in ((0.4, 0.4, 2.2, 2.68), (6.15, 4.9, 2.54, 2.2)):
        box(ax, sm, 2.1, 1.25, 1.15, colour=BLUE, fill=0.08)
        words(ax, sm + 0.62, 3.1, "an SM", 8, colour=BLUE)
        box(ax, sm + 0.1, smem, 1.05, 0.42, "shared memory", BLUE, size=7.5)
        box(ax, sm + 0.1, warpgroup, 1.05, 0.28, "warpgroup", INK, fill=0.06, size=7.5)
        box(ax, memory, 0.75, 2.5, 0.62, colour=ORANGE, fill=0.08)
        words(ax, memory + 2.4, 0.87 if sm < 1 else 1.22, "HBM and L2", 7.5, ha="right", colour=ORANGE)
        box(ax, memory + 0.1, 0.82, 0.62, 0.26, "x" if sm < 1 else "o", ORANGE, size=8)
    box(ax, 5.75, 0.82, 0.72, 0.26, "arrived", GREEN, size=7.5)
    box(ax, 3.25, 0.55, 1.3, 3.1, colour=PALE, fill=0.9, linewidth=0)
    words(ax, 3.9, 3.47, "NVLink", colour=SOFT)
    arrow(ax, (0.75, 1.1), (0.75, 2.18), ORANGE, "1 TMA\nloads", 7.5, at=(0.7, 1.68), ha="right")
    arrow(ax, (1.57, 2.35), (5.2, 1.1), BLUE, "2 store: TMA", at=(3.9, 1.98), width=1.8, shrinkA=2)
    arrow(ax, (1.57, 2.76), (5.95, 1.1), GREEN, width=1.4, connectionstyle="arc3,rad=-0.28")
    words(ax, 3.9, 2.95, "4 signal: + 1", 8, colour=GREEN)
    arrow(ax, (4.88, 0.9), (1.3, 2.18), SOFT, width=1.0, linestyle=":", connectionstyle="arc3,rad=-0.25")
    words(ax, 3.9, 0.72, "3 “it is written”", 8, colour=SOFT)
    arrow(ax, (6.3, 1.1), (6.75, 2.18), GREEN, "5 wait", at=(6.68, 1.62), ha="left", width=1.2, linestyle="--")
    text = "Dotted: what the flush waits for. Without it 4 may reach GPU 1 before 2 does."
    words(ax, 0.2, 0.27, text, 8, ha="left")


STORE, FLIGHT, SIGNAL = 1.0, 2.2, 1.2  # Time to hand a piece to TMA, until it is written, until a signal is seen.
ROUNDS = 4


def schedule(kind: str) -> list[tuple[int, float, float, float, float]]:
    """(round, start of the store, arrival of the data, the signal is sent, the signal is seen) of each round."""
    now, found, pending = 0.0, [], []
    for i in range(ROUNDS):
        start = now
        now += STORE
        arrival = now + FLIGHT * (1.35 if kind == "no flush" and i == 1 else 1)
        pending.append((i, start, arrival))
        if kind == "no flush":
            found.append((*pending.pop(), now, now + SIGNAL))
        while len(pending) > (kind == "a round late"):
            now = max(now, pending[0][2])
            found.append((*pending.pop(0), now, now + SIGNAL))
    for late in pending:
        now = max(now, late[2])
        found.append((*late, now, now + SIGNAL))
    return found


@chart(7.8, 4.9, nrows=3, sharex=True)
def nvlink_signal(axes):
    """A store and its signal over time: without a flush, with one after each store, and with one a round late."""
    kinds = {
        "no flush": "no flush: signals overtake the data, and somebody reads too early",
        "at once": "flush after each store: right, and one piece in flight",
        "a round late": "flush and signal follow the next store: right, and two pieces in flight",
    }
    for ax, (kind, title) in zip(axes, kinds.items(), strict=True):
        for i, start, arrival, sent, seen in schedule(kind):
            colour, early = plot.COLOURS[i], seen < arrival
            ink = RED if early else INK
            ax.barh(0, STORE, left=start, height=0.6, color=colour, alpha=0.85, edgecolor=plot.CARD)
            label(ax, start + STORE / 2, 0, f"{i}", 7.5, colour=plot.CARD)
            ax.barh(0, 0.1, left=sent, height=0.75, color=INK)
            low = 0.82 if i % 2 else 1.18
            ax.barh(low, arrival - start - STORE, left=start + STORE, height=0.32, color=colour, alpha=0.6)
            ax.plot([sent + 0.05, seen], [0.1, 2], color=ink, linewidth=0.9, alpha=0.7)
            ax.plot(seen, 2, "X" if early else "o", color=RED if early else colour, markersize=7)
            if early and i == ROUNDS - 1:
                label(ax, seen + 0.25, 2, "too early", 7, ha="left", colour=RED)
        lanes(ax, ("GPU 0, its warpgroup", "on NVLink", "GPU 1 sees the signal"), title)
    axes[-1].set(xlabel="time; bars: stores, and their data in flight; black: the signal is sent", xlim=(-0.2, 15.2))


LOOKS = {  # Marker, colour and name of each kind of event.
    Send: ("o", BLUE, "send"),
    Flush: ("|", INK, "flush"),
    Signal: ("^", ORANGE, "signal"),
    Wait: ("v", GREEN, "wait"),
    Read: ("s", PINK, "read"),
}


@Picture
def nvlink_run(run=None, last: int = 26):
    """A run of the simulator as a chart: what each role does in turn, what is in flight meanwhile, and where it ends.

    The `last` events of `run`; by default of a pushed reduce-scatter without flushes.
    """
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
            ax.plot(x, y, "o", markersize=19, markerfacecolor="none", markeredgecolor=RED, markeredgewidth=1.8)
        kind = f"ends in a fault: {str(run.fault).partition(':')[0]}" if run.fault else "a right run"
        ax.set_title(kind, fontsize=9, color=RED if run.fault else INK)
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
    programs = [programs_of(PushedScatter(2, 2), d, 2) for d in range(2)]
    return [{role: [a for a in acts if not isinstance(a, Flush)] for role, acts in p.items()} for p in programs]


DEVICES = 4
COLOURS = (BLUE, ORANGE, GREEN, PINK)
SLOTS, OWNER = 2, 2


GATHER = (  # Rounds that have begun; whether the stores are flushed, signals sent, and waited for; the caption.
    (0, False, False, False, "Each GPU copies its own shard into its own result. That needs no signal."),
    (1, False, False, False, "Block 0 of each GPU stores its pieces of the shard in the next one's result."),
    (
        2,
        False,
        False,
        False,
        "Then in that of the GPU after it. Other blocks begin with other GPUs, so all links work.",
    ),
    (3, False, False, False, "The last one. Nobody waited for a store: light parts may not be there yet."),
    (3, True, False, False, "The flush: the block waits until its stores are written in the memory of the others."),
    (3, True, True, False, "Then it signals the three others. A signal adds 1 to arrived and releases the data."),
    (3, True, True, True, "It waits for 3 signals, which acquires the data. All blocks do so, and the kernel ends."),
)


@stepper(7.8, 3.2)
def nvlink_gather(ax):
    """All-gather by push on four GPUs, by block 0 of each: stores into one result after the other, then signals."""
    width, gap = 1.45, 0.42
    left, part = [0.35 + d * (width + gap) for d in range(DEVICES)], width / DEVICES
    for d, x in enumerate(left):
        words(ax, x + width / 2, 3.02, f"GPU {d}", 9.5, weight="bold")
        tile(ax, x + 0.3, 2.4, width - 0.6, 0.4, COLOURS[d], f"shard {d}", 8.5, alpha=0.6)
        tile(ax, x, 0.72, width, 0.5, plot.CARD, edgecolor=INK, linewidth=0.8)
        words(ax, x, 0.58, "result", 8, ha="left", va="top", colour=SOFT)
    yield
    for rounds, flushed, signals, waited, caption in GATHER:
        for d, x in enumerate(left):
            for k in range(rounds + 1):
                owner = (d - k) % DEVICES  # It serves this GPU in round k.
                here, alpha = x + owner * part, 0.7 if flushed or k == 0 else 0.25
                tile(ax, here + 0.02, 0.75, part - 0.04, 0.44, COLOURS[owner], str(owner), 9, alpha=alpha)
                if k == rounds and not flushed:
                    arrow(ax, (left[owner] + width / 2, 2.38), (here + part / 2, 1.22), COLOURS[owner], width=1.8)
            arrived = DEVICES - 1 if signals and not waited else 0
            look = dict(ha="right", va="top", colour=GREEN if signals else SOFT)
            words(ax, x + width, 0.58, f"arrived: {arrived}", 8, **look)
            for k in range(1, DEVICES if signals and not waited else 1):
                end = left[(d + k) % DEVICES] + width - 0.2, 1.24
                arrow(ax, (x + width / 2, 2.38), end, GREEN, width=1.1, linestyle=":")
            if flushed and not signals:
                words(ax, x + width / 2, 1.8, "flush:\nall is written", 9)
            if waited:
                words(ax, x + width / 2, 1.8, f"wait:\n{DEVICES - 1} signals", 9, colour=GREEN)
        if not flushed:
            words(ax, 0.1, 0.14, f"block 0, round {rounds}" if rounds else "own shard", 9, ha="left", weight="bold")
        yield caption


@drawing(7.8, 3.7)
def nvlink_scatter(ax):
    """Reduce-scatter: the slots of each sender in the owner's buffer, who fills and frees them, the order of sums."""
    words(ax, 0.95, 3.5, "what each GPU adds to", 8.5)
    words(ax, 0.95, 3.3, f"the shard of GPU {OWNER}", 8.5)
    words(ax, 4.0, 3.5, f"buffer of GPU {OWNER}", 8.5, weight="bold")
    words(ax, 4.0, 3.28, f"{SLOTS} slots for each sender", 8, colour=SOFT)
    for d in range(DEVICES):
        y = 2.55 - 0.62 * d
        words(ax, 0.1, y + 0.2, f"GPU {d}", 8.5, ha="left", weight="bold")
        for i in range(3):
            box(ax, 0.65 + 0.4 * i, y, 0.36, 0.4, f"{i}", COLOURS[d], fill=0.35 if i < 2 else 0.12, size=8)
        for slot in range(SLOTS):
            box(ax, 3.35 + 0.68 * slot, y, 0.62, 0.4, f"piece {slot}", COLOURS[d], fill=0.35, size=7.5)
        arrow(ax, (1.9, y + 0.26), (3.3, y + 0.26), COLOURS[d], width=1.5)
        arrow(ax, (3.3, y + 0.09), (1.9, y + 0.09), SOFT, width=0.9, linestyle=":")
        arrow(ax, (4.75, y + 0.2), (5.55, 1.75 - 0.08 * d), COLOURS[d], width=1.1)
    words(ax, 2.6, 2.97, "stores, then arrived[d]", 7.5)
    words(ax, 2.6, 0.5, f"freed[{OWNER}]: the slot is read", 7.5, colour=SOFT)
    box(ax, 5.6, 1.2, 1.95, 0.85, colour=RED, fill=0.08)
    words(ax, 6.57, 1.82, f"GPU {OWNER}, warpgroup “add”", 7.5, colour=RED)
    words(ax, 6.57, 1.45, "((0 + 1) + 2) + 3\nin float32, rounded once", 8)
    arrow(ax, (6.57, 1.18), (6.57, 0.78), RED)
    box(ax, 5.95, 0.38, 1.25, 0.36, f"shard {OWNER} of the sum", RED, fill=0.2, size=7.5)
    note = "Pieces arrive in any order, and are added in this one. A slot is filled again after its signal “freed”."
    words(ax, 0.1, 0.14, note, 8, ha="left")


@drawing(7.8, 3.4)
def nvlink_pull(ax):
    """Reduce-scatter by pull: a block of the owner loads one piece from each GPU's memory into a stage, and adds."""
    words(ax, 1.15, 3.22, "memory: what each GPU", 8.5)
    words(ax, 1.15, 3.02, f"adds to the shard of GPU {OWNER}", 8.5)
    box(ax, 3.1, 0.62, 4.5, 2.55, colour=SOFT, fill=0.04)
    words(ax, 3.2, 3.02, f"GPU {OWNER}, one SM", 8.5, ha="left", weight="bold")
    for stage in range(3):
        x = 3.3 + 0.62 * stage
        words(ax, x + 0.25, 2.77, f"stage {stage}", 7, colour=SOFT)
    for d in range(DEVICES):
        y = 2.3 - 0.44 * d
        words(ax, 0.1, y + 0.16, f"GPU {d}", 8.5, ha="left", weight="bold")
        for i in range(4):
            box(ax, 0.7 + 0.36 * i, y, 0.33, 0.32, f"{i}", COLOURS[d], fill=0.35, size=8)
        for stage in range(3):
            box(ax, 3.3 + 0.62 * stage, y, 0.5, 0.32, f"{stage}", COLOURS[d], fill=0.35, size=7.5)
        arrow(ax, (2.16, y + 0.16), (3.27, y + 0.16), COLOURS[d], width=1.5)
    box(ax, 3.26, 0.92, 0.58, 1.75, colour=RED, fill=0.0)
    words(ax, 2.65, 2.72, "TMA loads", 7.5)
    arrow(ax, (5.1, 1.8), (5.62, 1.8), RED, width=1.4)
    box(ax, 5.65, 1.4, 1.8, 0.85, colour=RED, fill=0.08)
    words(ax, 6.55, 2.02, "the warpgroup that adds", 7.5, colour=RED)
    words(ax, 6.55, 1.66, "((0 + 1) + 2) + 3\nin float32, rounded once", 8)
    arrow(ax, (6.55, 1.38), (6.55, 1.06), RED)
    box(ax, 5.95, 0.72, 1.2, 0.32, f"shard {OWNER} of the sum", RED, fill=0.2, size=7.5)
    arrow(ax, (3.1, 0.76), (1.4, 0.76), GREEN, width=1.1, linestyle=":")
    words(ax, 1.35, 0.76, "read: + 1, at the end", 7.5, ha="right", colour=GREEN)
    note = "No buffer between GPUs and no signal for a piece. The red frame is what one sum needs."
    words(ax, 0.1, 0.3, note, 8, ha="left")


SIZES = ((3, 1, 2), (0, 4, 2), (2, 2, 2))  # Rows that each device (line) sends to each (column).


@drawing(7.8, 3.7)
def nvlink_experts(ax):
    """The ragged all-to-all of experts' tokens: rows of each device in parts of any size, and where they land."""
    row = 0.33
    received = [sum(sizes[p] for sizes in SIZES) for p in range(len(SIZES))]
    top = [0.7 + 2.55 * d for d in range(len(SIZES))]
    for d, sizes in enumerate(SIZES):
        words(ax, top[d] + 3 * row, 3.5, f"GPU {d}: x, sorted by target", 8.5, weight="bold")
        words(ax, top[d] + 3 * row, 0.32, f"GPU {d}: result", 8.5, weight="bold")
        targets = [p for p, size in enumerate(sizes) for _ in range(size)]
        for i, p in enumerate(targets):
            box(ax, top[d] + row * i, 2.85, row - 0.03, 0.34, f"{p}", COLOURS[d], fill=0.35, size=8)
        sources = [q for q, sizes in enumerate(SIZES) for _ in range(sizes[d])]
        for i, q in enumerate(sources):
            box(ax, top[d] + row * i, 0.62, row - 0.03, 0.34, colour=COLOURS[q], fill=0.35)
    for q, sizes in enumerate(SIZES):
        for p, size in enumerate(sizes):
            if size:
                start = top[q] + row * (sum(sizes[:p]) + size / 2)
                end = top[p] + row * (sum(SIZES[r][p] for r in range(q)) + size / 2)
                arrow(ax, (start, 2.83), (end, 0.99), COLOURS[q], width=0.6 + 0.5 * size, alpha=0.75)
                t = 0.3 if q != p else 0.5
                words(ax, start + t * (end - start), 2.83 - t * 1.84, str(size), 7.5, weight="bold")
    words(ax, 0.1, 3.02, "rows", 8, ha="left", colour=SOFT)
    text = f"Rows received: {', '.join(map(str, received))}. Rows of a lower GPU come first, so where mine begin"
    words(ax, 0.1, 0.06, f"{text} depends on everybody's sizes.", 7.8, ha="left")
