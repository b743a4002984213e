"""Threads that take part in a product: 128 threads that wait for it, or one that only starts it."""

from figures._draw import lanes, save
from figures.pipelining.pipeline_schedule import MULTIPLY, bar
from lab import plot

STEPS, ISSUE = 5, 0.16  # Products that are shown, and the time to start one; a product takes 1.
START, FREE = plot.COLOURS[1], plot.COLOURS[2]


def mark(ax, x, lane, text):
    """An arrival at a barrier, from a lane to that of barriers between the two."""
    arrow = dict(arrowstyle="-|>", color=FREE, linewidth=1.2, shrinkA=0, shrinkB=0)
    ax.annotate("", (x, 1), (x, lane), arrowprops=arrow)
    ax.text(x + 0.06, 1, text, fontsize=7.5, color=FREE, va="center")


def draw():
    with plot.figure(height=4.3, nrows=2, sharex=True) as (fig, axes):
        hopper, blackwell = axes
        for step in range(STEPS):
            bar(hopper, 2, step + ISSUE, step + 1 + ISSUE, f"{step}", MULTIPLY)
            bar(hopper, 0, step, step + ISSUE, "", START)
            if step:
                bar(hopper, 0, step + ISSUE, step + 0.97, f"wait for {step - 1}", plot.FAINT)
                mark(hopper, step + ISSUE, 0.4, f"freed[{step - 1}]")
            bar(blackwell, 0, 1.6 * ISSUE * step, 1.6 * ISSUE * step + ISSUE, "", START)
            bar(blackwell, 2, step + ISSUE, step + 1 + ISSUE, f"{step}", MULTIPLY)
            mark(blackwell, step + 1 + ISSUE, 1.6, f"freed[{step}]")
        bar(hopper, 0, ISSUE, 0.97, "", plot.FAINT)
        bar(blackwell, 0, 1.6 * ISSUE * STEPS, 3.1, "next tile", START)
        names = "128 threads", "barriers", "tensor core"
        lanes(hopper, names, "Hopper: a warpgroup starts each product together, waits, and gives the slot back")
        names = "1 thread", "barriers", "tensor core"
        lanes(blackwell, names, "Blackwell: one thread starts it, and the tensor core itself gives the slot back")
        for ax in axes:
            ax.set_ylim(2.6, -0.6)
        blackwell.set_xlim(-0.1, STEPS + 1.1)
        blackwell.set_xlabel("time (schematic); slots are full")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
