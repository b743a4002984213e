"""Figures of chapter 11: FlashAttention-3."""

import heapq

from figures._chart import MULTIPLY, SOFTMAX, bar, chart, numbered, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, SKY, SOFT, arrow, box, drawing, words
from figures._stepper import stepper


@drawing(7.6, 3.6)
def flash_roles(ax):
    """One block of the kernel: a memory warpgroup, two rings, two compute warpgroups with 64 queries each."""
    box(ax, 0.15, 1.35, 1.5, 1.1, colour=ORANGE)
    words(ax, 0.9, 2.05, "memory\nwarpgroup", weight="bold")
    words(ax, 0.9, 1.58, "starts copies", 8, colour=SOFT)
    for y, name, start, full in ((2.25, "k", 2.1, (0.6, 0.25)), (0.95, "v", 1.7, (0.6, 0.6))):
        for slot, fill in enumerate(full):
            box(ax, 2.6 + 0.95 * slot, y, 0.85, 0.6, f"{name}, slot {slot}", colour=SKY, fill=fill, size=8)
        arrow(ax, (1.65, start), (2.55, y + 0.3), ORANGE, width=2)
        for wg_y in (2.55, 1.25):
            arrow(ax, (4.45, y + 0.3), (5.4, wg_y), BLUE, width=1.4)
    for wg, y in ((0, 2.1), (1, 0.8)):
        box(ax, 5.45, y, 2.0, 0.9, colour=BLUE)
        words(ax, 6.45, y + 0.64, f"compute warpgroup {wg}", 8.5, weight="bold")
        words(ax, 6.45, y + 0.3, f"q, acc: queries {64 * wg} to {64 * wg + 63}", 8, colour=SOFT)
    arrow(ax, (6.2, 2.06), (6.2, 1.74), INK)
    arrow(ax, (6.7, 1.74), (6.7, 2.06), INK, "turn[wg]", at=(7.1, 1.9))
    arrow(ax, (1.0, 2.49), (6.3, 3.04), GREEN, connectionstyle="arc3,rad=-0.14")
    text = "k_filled[slot], v_filled[slot]: a copy arrives, both compute warpgroups wait"
    words(ax, 3.7, 3.45, text, 8.5, colour=GREEN)
    arrow(ax, (6.3, 0.76), (1.0, 1.31), INK, connectionstyle="arc3,rad=-0.14")
    text = "k_freed[slot], v_freed[slot]: both arrive, the memory warpgroup waits before it refills"
    words(ax, 3.7, 0.2, text, 8.5)


EXP = 1.3  # Softmax of a step, in units of one product: somewhat more than its exponentials alone.


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


def busy(bars) -> float:
    """The share of the time in which the tensor cores work, over whole steps of the first warpgroup."""
    starts = [start for wg, name, start, _ in bars if wg == 0 and name == "q k"]
    start, end = starts[3], starts[6]  # The first steps are not like the later ones.
    return sum(max(0.0, min(e, end) - max(s, start)) for _, name, s, e in bars if name != "softmax") / (end - start)


CASES = (
    (dict(num_wgs=1), "one warpgroup, without overlap"),
    (dict(num_wgs=2, in_turns=True), "two, in turns: one's softmax during the other's products"),
    (dict(num_wgs=1, overlap=True), "one warpgroup that overlaps: its softmax during its own p v"),
    (dict(num_wgs=2, in_turns=True, overlap=True), "two, in turns, that also overlap: room to spare"),
)


@chart(height=6.4, nrows=len(CASES), sharex=True, height_ratios=[1 + case["num_wgs"] for case, _ in CASES])
def flash_schedule(axes):
    """Use of the tensor cores in time: two warpgroups that start together, that take turns, and that overlap too."""
    for ax, (case, title) in zip(axes, CASES, strict=True):
        bars = schedule(**case, steps=9)
        for wg, name, start, end in bars:
            lane, colour = (1 + wg, SOFTMAX) if name == "softmax" else (0, (MULTIPLY, SKY)[wg])
            bar(ax, lane, start, end, name, colour)
        names = ["tensor cores", *numbered("warpgroup", case["num_wgs"])]
        tracks(ax, names, f"{title}: tensor cores busy {busy(bars):.0%}")
    axes[-1].set(xlim=(0, 14), xlabel=f"time, in units of one product; a softmax taken as {EXP} of them (simulated)")


TURNS = (  # What a frame shows: bars that start before this time, the owner of the turn, and what happens.
    (0.5, 0, "Warpgroup 0 has the first turn. It starts q k of its first block. Warpgroup 1 waits for the turn."),
    (1.5, 1, "The turn has passed to warpgroup 1: its q k runs while warpgroup 0 computes a softmax."),
    (2.35, 0, "Warpgroup 0 gets the turn back when its softmax has ended, and starts p v, then q k of the next block."),
    (
        3.5,
        1,
        "Meanwhile warpgroup 1 has finished its softmax. It waits for the turn, so its products cannot come between.",
    ),
    (5.0, 0, "Now the products of warpgroup 1 run, and warpgroup 0 computes its next softmax beside them."),
    (8.4, 1, "From here on the tensor cores always have a product, while the other warpgroup is at its softmax."),
)


@stepper(7.8, 2.5)
def turns_in_steps(ax):
    """Two compute warpgroups that take turns at the tensor cores, in time."""
    left, unit = 1.35, 0.72
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
