"""Units of unequal lengths on eight SMs: too few, many of mixed lengths, and equal parts of all blocks."""

import heapq

from matplotlib.patches import Rectangle

from figures._draw import save
from lab import plot

SMS = 8
FEW, MIXED = (10, 10, 10), (2, 1, 4, 1, 2, 3, 1, 1, 2, 1, 12, 1, 5, 2, 1, 1)  # Blocks of each unit.


def one_after_the_other(units):
    """(SM, start, blocks, unit): each unit goes whole to the SM that is free first."""
    free = [(0, sm) for sm in range(SMS)]
    placed = []
    for unit, blocks in enumerate(units):
        start, sm = heapq.heappop(free)
        placed.append((sm, start, blocks, unit))
        heapq.heappush(free, (start + blocks, sm))
    return placed


def equal_parts(units):
    """The same, all blocks in a row cut into equal parts."""
    cuts = [part * sum(units) // SMS for part in range(SMS + 1)]
    placed, first = [], 0
    for unit, blocks in enumerate(units):
        for part in range(SMS):
            begin, end = max(first, cuts[part]), min(first + blocks, cuts[part + 1])
            if end > begin:
                placed.append((part, begin - cuts[part], end - begin, unit))
        first += blocks
    return placed


def draw():
    cases = (
        (f"{len(FEW)} long units: {SMS - len(FEW)} SMs have nothing to do", one_after_the_other(FEW)),
        (f"{len(MIXED)} units of mixed lengths: all wait for the longest", one_after_the_other(MIXED)),
        ("the same units, all blocks cut into 8 equal parts", equal_parts(MIXED)),
    )
    end = max(start + blocks for _, placed in cases for _, start, blocks, _ in placed)
    with plot.figure(7.8, 5.2, nrows=3, sharex=True) as (fig, axes):
        for ax, (title, placed) in zip(axes, cases, strict=True):
            for sm, start, blocks, unit in placed:
                colour = plot.COLOURS[unit % 6]
                ax.add_patch(
                    Rectangle((start, sm - 0.4), blocks, 0.8, facecolor=colour, alpha=0.6, edgecolor=plot.CARD)
                )
                ax.text(start + blocks / 2, sm, str(unit), ha="center", va="center", fontsize=7)
            last = max(start + blocks for _, start, blocks, _ in placed)
            ax.axvline(last, color=plot.BOUND, linewidth=1.5)
            busy = sum(blocks for _, _, blocks, _ in placed) / last / SMS
            ax.text(last + 0.1, 3.5, f"{busy:.0%}\nbusy", fontsize=8, color=plot.BOUND, va="center")
            ax.set_yticks(range(0, SMS, 2), [f"SM {sm}" for sm in range(0, SMS, 2)])
            ax.set(xlim=(0, end + 1), ylim=(SMS - 0.4, -0.6))
            ax.grid(visible=False)
            ax.set_title(title, fontsize=9)
        axes[-1].set_xlabel("time, in steps of a block of keys; the numbers are units")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
