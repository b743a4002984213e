"""Kernel 2 in time: every product waited for, waiting at the end of a step, and running ahead. Times are made up."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, lanes, save
from lab import plot

COLOURS = {"s": BLUE, "dp": PINK, "dv": GREEN, "dk": RED, "p": ORANGE, "ds": ORANGE}
WAYS = (  # (tensor cores, CUDA cores), each (what, start, length) of a step; and from one step to the next.
    (
        "this chapter: each product is waited for",
        [("s", 0, 2), ("dv", 4, 2), ("dp", 6, 2), ("dk", 9, 2)],
        [("p", 2, 2), ("ds", 8, 1)],
        11,
    ),
    (
        "heads of 128: s and dp together, a wait at the end of a step",
        [("s", 0, 2), ("dp", 2, 2), ("dv", 4, 2), ("dk", 6, 2)],
        [("p", 2, 2), ("ds", 4, 1)],
        8.8,
    ),
    (
        "had registers room: the next step's s starts behind dk",
        [("s", 0, 2), ("dp", 2, 2), ("dv", 4, 2), ("dk", 6, 2)],
        [("p", 2, 2), ("ds", 4, 1)],
        8,
    ),
)


def draw():
    with plot.figure(7.8, 4.6, nrows=3, sharex=True) as (fig, axes):
        for ax, (title, tensor, cuda, period) in zip(axes, WAYS, strict=True):
            for step in range(3):
                for lane, jobs in enumerate((tensor, cuda)):
                    for what, start, length in jobs:
                        at = step * period + start
                        look = dict(color=COLOURS[what], alpha=0.35 if step % 2 else 0.75, edgecolor="white")
                        ax.barh(lane, length, left=at, height=0.72, **look)
                        ax.text(at + length / 2, lane, what, ha="center", va="center", fontsize=8)
            lanes(ax, ("tensor cores", "CUDA cores"), title)
            ax.set_xlim(0, 33)
        axes[-1].set_xlabel("time of one warpgroup, three steps", fontsize=8)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
