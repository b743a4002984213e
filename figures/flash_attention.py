"""Figures of chapter 11: FlashAttention-3."""

import heapq

from figures._chart import MULTIPLY, SOFTMAX, bar, chart, label, numbered, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, SKY, SOFT, arrow, box, drawing, words
from figures._stepper import stepper


@drawing(7.6, 2.5)
def flash_roles(ax):
    """Rung 1: a memory warpgroup, two rings, and the warpgroup that computes."""
    box(ax, 0.15, 0.8, 1.5, 0.9, colour=ORANGE)
    words(ax, 0.9, 1.38, "memory\nwarpgroup", weight="bold")
    words(ax, 0.9, 0.98, "starts copies", 8, colour=SOFT)
    for y, name, start, full in ((1.4, "k", 1.45, (0.6, 0.25)), (0.5, "v", 1.05, (0.6, 0.6))):
        for stage, fill in enumerate(full):
            box(ax, 2.5 + 0.95 * stage, y, 0.85, 0.55, f"{name}, stage {stage}", colour=SKY, fill=fill, size=8)
        arrow(ax, (1.65, start), (2.45, y + 0.28), ORANGE, width=2)
        arrow(ax, (4.35, y + 0.28), (5.3, start), BLUE, width=1.4)
    box(ax, 5.35, 0.8, 2.1, 0.9, colour=BLUE)
    words(ax, 6.4, 1.4, "compute warpgroup", 8.5, weight="bold")
    words(ax, 6.4, 1.05, "q, acc: 64 queries", 8, colour=SOFT)
    arrow(ax, (1.0, 1.74), (6.3, 1.74), GREEN, connectionstyle="arc3,rad=-0.15")
    words(ax, 3.7, 2.4, "k_full, v_full: a copy arrives, the compute warpgroup waits", 8.5, colour=GREEN)
    arrow(ax, (6.3, 0.76), (1.0, 0.76), INK, connectionstyle="arc3,rad=-0.15")
    words(ax, 3.7, 0.1, "k_free, v_free: the compute warpgroup releases, the memory warpgroup waits", 8.5)


@chart(height=1.7)
def flash_step(ax):
    """Two steps of one warpgroup: the tensor cores wait for the softmax, and the softmax for the tensor cores."""
    for start in (0, 3):
        bar(ax, 0, start, start + 1, "q kᵀ", MULTIPLY)
        bar(ax, 1, start + 1, start + 2, "softmax", SOFTMAX)
        bar(ax, 0, start + 2, start + 3, "p v", MULTIPLY)
        label(ax, start + 1.5, 0, "idle", colour=SOFT)
    tracks(ax, ["tensor cores", "CUDA cores"], grid=False)
    ax.set(xlim=(0, 6), xticks=range(7), xticklabels=[512 * i for i in range(7)], xlabel="cycles, at best")


EXP = 3.1  # The rest of a step, in units of one product, as chapter 11 measures it; exponentials alone take 1.0.


def schedule(num_wgs: int, *, in_turns=False, overlap=False, steps=6, softmax=EXP):
    """Simulates compute warpgroups of one block: [(warpgroup, "q k" | "p v" | "softmax", start, end), ...].

    The tensor cores are one queue, served in the order in which products are started. With `in_turns` the warpgroups
    start theirs in turns; with `overlap` q k and p v are started together, and the softmax begins when q k has ended.
    """
    bars, tensor, ready = [], 0.0, [(0.0, wg, 0) for wg in range(num_wgs)]
    turn_free, next_turn, waiting = 0.0, 0, {}
    heapq.heapify(ready)

    def product(wg, name, at):
        nonlocal tensor
        start = max(at, tensor)
        tensor = start + 1
        bars.append((wg, name, start, tensor))
        return tensor

    while ready or waiting:
        if in_turns and next_turn in waiting:
            at, step = waiting.pop(next_turn)
            wg, at = next_turn, max(at, turn_free)
        elif ready:
            at, wg, step = heapq.heappop(ready)
            if in_turns and wg != next_turn:
                waiting[wg] = at, step
                continue
        else:
            break
        if overlap:
            seen = product(wg, "q k", at)
            values = product(wg, "p v", at) if step else seen
        else:
            values = product(wg, "p v", at) if step else at
            seen = product(wg, "q k", values)
        bars.append((wg, "softmax", seen, seen + softmax))
        turn_free, next_turn = at, (wg + 1) % num_wgs
        if step + 1 < steps:
            heapq.heappush(ready, (max(seen + softmax, values), wg, step + 1))
    return bars


@chart(height=4.2, nrows=2, sharex=True)
def flash_overlap(axes):
    """Use of the tensor cores in time: in turns without and with overlap inside a warpgroup."""
    _draw_schedule(axes[0], schedule(2, in_turns=True), "in turns")
    _draw_schedule(axes[1], schedule(2, in_turns=True, overlap=True), "in turns, each softmax beside its own p v")
    _name_time(axes[1])


def _draw_schedule(ax, bars, title):
    for wg, name, start, end in bars:
        lane, colour = (1 + wg, SOFTMAX) if name == "softmax" else (0, (MULTIPLY, SKY)[wg])
        bar(ax, lane, start, end, name, colour)
    tracks(ax, ["tensor cores", *numbered("warpgroup", 2)], title)


def _name_time(ax):
    ax.set(xlim=(0, 14), xlabel=f"time, in units of one product; simulated, with a softmax of {EXP} products")


TURNS = (  # A frame shows bars that start before this time, the owner of the turn, and a caption.
    (0.5, 0, "Warpgroup 0 has the first turn and starts q k of its first block. Warpgroup 1 waits for the turn."),
    (1.5, 1, "The turn has passed to warpgroup 1. Its q k runs while warpgroup 0 computes a softmax."),
    (4.5, 0, "Warpgroup 0 has finished its softmax. It takes the turn and starts p v, then q k of its next block."),
    (5.5, 0, "Warpgroup 1 is ready too, but waits: nothing comes between the two products of warpgroup 0."),
    (7.5, 1, "Now the products of warpgroup 1 run, and warpgroup 0 computes its next softmax beside them."),
    (
        11.5,
        0,
        "From here on, one multiplies during the other's softmax. While both are at it, the tensor cores are idle.",
    ),
)


@stepper(7.8, 2.5)
def turns_in_steps(ax):
    """Two compute warpgroups that take turns at the tensor cores, in time."""
    left, unit = 1.35, 0.55
    lanes = (1.75, 1.15, 0.55)
    for y, name in zip(lanes, ("tensor cores", "warpgroup 0", "warpgroup 1"), strict=True):
        words(ax, left - 0.1, y + 0.22, name, 9, ha="right")
    arrow(ax, (left, 0.33), (7.6, 0.33), SOFT, width=1)
    words(ax, left, 0.14, f"time; a softmax is drawn as {EXP} products", 8, ha="left", colour=SOFT)
    yield
    bars = schedule(2, in_turns=True, steps=5)
    for until, owner, caption in TURNS:
        for wg, name, start, end in bars:
            if start < until and left + unit * end < 7.7:
                y, colour = (lanes[1 + wg], ORANGE) if name == "softmax" else (lanes[0], (BLUE, GREEN)[wg])
                box(ax, left + unit * start, y, unit * (end - start) - 0.03, 0.44, name, colour, 0.3, size=8)
        words(
            ax, left + 0.02, 2.36, f"turn: warpgroup {owner}", 9, ha="left", weight="bold", colour=(BLUE, GREEN)[owner]
        )
        yield caption
