"""The sum of a row across a warpgroup: a butterfly of shuffles inside each warp, then four words of shared memory."""

from figures._draw import save
from lab import plot

LANES = 8  # Drawn; a warp has 32.
WARPS = 4


def draw():
    with plot.figure(7.5, 4.3, ncols=2, width_ratios=(1.15, 1)) as (fig, (left, right)):
        _butterfly(left)
        _exchange(right)
    return fig


def _butterfly(ax):
    """`LANES` threads; after step s each knows the sum of the 2 ** s lanes of its group, coloured alike."""
    steps = LANES.bit_length() - 1
    for step in range(steps):
        for lane in range(LANES):
            other = lane ^ (1 << step)
            ax.plot((lane, lane), (step, step + 1), color=plot.INK, linewidth=1)
            ax.plot((other, lane), (step, step + 1), color=plot.OURS, linewidth=1)
        ax.text(LANES - 0.4, step + 0.5, f"xor {1 << step}", color=plot.OURS, va="center")
    for step in range(steps + 1):
        for lane in range(LANES):
            first = lane >> step << step
            held = f"{first}" if step == 0 else f"{first}–{first + (1 << step) - 1}"
            colour = plot.COLOURS[lane >> step] if step else plot.INK
            ax.text(lane, step, held, ha="center", va="center", fontsize=8, bbox=_box(colour))
    ax.set(xlim=(-0.6, LANES + 0.7), ylim=(steps + 0.4, -0.75))
    ax.text((LANES - 1) / 2, -0.55, "lane (a thread of the warp)", ha="center")
    ax.set_title("Inside a warp: shuffles")
    ax.axis("off")


def _exchange(ax):
    """Each warp's total goes to shared memory; every thread reads all four."""
    for warp in range(WARPS):
        colour = plot.COLOURS[warp]
        ax.text(warp, 0, f"warp {warp}\ntotal", ha="center", va="center", fontsize=8, bbox=_box(colour))
        ax.text(warp, 1.5, f"s[{warp}]", ha="center", va="center", fontsize=8, bbox=_box(colour))
        ax.text(warp, 3, "row\ntotal", ha="center", va="center", fontsize=8, bbox=_box(plot.INK))
        ax.annotate("", (warp, 1.25), (warp, 0.35), arrowprops=dict(arrowstyle="->", color=colour))
        for reader in range(WARPS):
            arrow = dict(arrowstyle="->", color=colour, linewidth=0.8)
            ax.annotate("", (reader, 2.68), (warp, 1.72), arrowprops=arrow)
    ax.plot((-0.5, WARPS - 0.5), (0.86, 0.86), color=plot.BOUND, linestyle="--", linewidth=1)
    ax.text(WARPS - 0.45, 0.86, "barrier\n(before it\nis reused)", color=plot.BOUND, va="center", fontsize=7)
    ax.plot((-0.5, WARPS - 0.5), (2.05, 2.05), color=plot.BOUND, linestyle="--", linewidth=1)
    ax.text(WARPS - 0.45, 2.05, "barrier", color=plot.BOUND, va="center", fontsize=7)
    ax.set(xlim=(-0.6, WARPS + 0.3), ylim=(3.5, -0.75))
    ax.set_title("Between four warps: shared memory")
    ax.axis("off")


def _box(colour):
    return dict(boxstyle="round,pad=0.3", facecolor=plot.CARD, edgecolor=colour, linewidth=1.5)


if __name__ == "__main__":
    save(__file__, draw())
