"""Use of the tensor cores in time: two warpgroups that start together, that take turns, and that overlap as well."""

import heapq

from figures._draw import save
from figures.pipelining.pipeline_schedule import MULTIPLY, bar
from lab import plot

SOFTMAX, OTHER = plot.COLOURS[1], plot.COLOURS[4]
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


def draw():
    heights = [1 + case["num_wgs"] for case, _ in CASES]
    with plot.figure(height=6.4, nrows=len(CASES), sharex=True, height_ratios=heights) as (fig, axes):
        for ax, (case, title) in zip(axes, CASES, strict=True):
            bars = schedule(**case, steps=9)
            for wg, name, start, end in bars:
                colour = SOFTMAX if name == "softmax" else (MULTIPLY, OTHER)[wg]
                bar(ax, 1 + wg if name == "softmax" else 0, start, end, name, colour)
            ax.set_yticks(
                range(1 + case["num_wgs"]), ["tensor cores", *(f"warpgroup {wg}" for wg in range(case["num_wgs"]))]
            )
            ax.set_ylim(case["num_wgs"] + 0.6, -0.6)
            ax.grid(axis="y", visible=False)
            ax.set_title(f"{title}: tensor cores busy {busy(bars):.0%}", fontsize=9)
        axes[-1].set_xlim(0, 14)
        axes[-1].set_xlabel(f"time, in units of one product; a softmax taken as {EXP} of them (simulated)")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
