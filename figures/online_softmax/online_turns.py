"""The tensor cores under one warpgroup, and under two that take turns."""

from figures._draw import save
from figures.pipelining.pipeline_schedule import MULTIPLY, bar
from lab import plot

SOFTMAX, OTHER = plot.COLOURS[1], plot.COLOURS[4]


def draw():
    with plot.figure(height=3.7, nrows=2, sharex=True, height_ratios=(2, 3)) as (fig, (one, two)):
        for step in range(3):
            start = 3.05 * step
            bar(one, 0, start, start + 1, "q k", MULTIPLY)
            bar(one, 1, start + 1, start + 2.05, "softmax", SOFTMAX)
            bar(one, 0, start + 2.05, start + 3.05, "p v", MULTIPLY)
        one.set_yticks(range(2), ["tensor cores", "warpgroup 0"])
        one.set_title("one warpgroup: tensor cores and softmax alternate", fontsize=9)
        for step in range(5):
            for wg, colour in ((0, MULTIPLY), (1, OTHER)):
                start = 4 * step + 2 * wg - 1  # p v of one block and q k of the next, together.
                names = f"p v, q k ({wg})" if start >= 0 else "q k (0)"
                bar(two, 0, max(start, 0), start + 2, names, colour)
                bar(two, 1 + wg, start + 2, start + 3.05, "softmax", SOFTMAX)
        two.set_yticks(range(3), ["tensor cores", "warpgroup 0", "warpgroup 1"])
        two.set_title("two that take turns: one's softmax during the other's products", fontsize=9)
        for ax in (one, two):
            ax.set_ylim(len(ax.get_yticks()) - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
        two.set_xlim(0, 9.15)
        two.set_xlabel("time, in units of one product of 64 queries, 128 keys, head_dim 128")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
