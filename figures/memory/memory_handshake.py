"""One tile through shared memory: what the warpgroup and the TMA unit do, and the four places of waiting."""

from figures._draw import BLUE, GREEN, INK, ORANGE, RED, SKY, SOFT, arrow, box, canvas, save, words
from lab import plot

THREADS, TMA = 2.2, 1.1  # Heights of the two lanes.
SEND = 0.26  # Width of the box of a call that only hands work over.


def draw():
    fig, ax = canvas(7.8, 3.6)
    for y, name, who in ((THREADS, "warpgroup", "128 threads"), (TMA, "TMA unit", "copies by itself")):
        words(ax, 0.1, y + 0.06, name, size=9.5, ha="left", va="bottom", weight="bold")
        words(ax, 0.1, y + 0.02, who, size=7.5, ha="left", va="top", colour=SOFT)
        ax.plot((1.1, 7.7), (y, y), color=SOFT, linewidth=0.8, zorder=0)

    _bar(ax, 1.2, SEND, THREADS, INK, "")
    _bar(ax, 1.46, 1.42, THREADS, SOFT, "waits", idle=True)
    _bar(ax, 2.88, 1.25, THREADS, BLUE, "SMEM to registers,\nnegate, to SMEM")
    _bar(ax, 4.13, 0.3, THREADS, RED, "")
    _bar(ax, 4.43, SEND, THREADS, INK, "")
    _bar(ax, 4.69, 2.25, THREADS, SOFT, "waits", idle=True)
    _bar(ax, 1.46, 1.35, TMA, SKY, "GMEM to SMEM")
    _bar(ax, 4.69, 0.85, TMA, ORANGE, "reads SMEM")
    _bar(ax, 5.54, 1.35, TMA, GREEN, "writes GMEM")

    arrow(ax, (1.46, THREADS - 0.2), (1.5, TMA + 0.2), INK)
    arrow(ax, (2.81, TMA + 0.2), (2.88, THREADS - 0.2), SKY)
    words(ax, 2.95, 1.65, "all bytes arrived:\nthe barrier flips", size=7.5, ha="left")
    arrow(ax, (4.69, THREADS - 0.2), (4.73, TMA + 0.2), INK)
    arrow(ax, (5.54, TMA + 0.2), (5.54, THREADS - 0.2), ORANGE, width=1.0, linestyle=":")
    arrow(ax, (6.89, TMA + 0.2), (6.94, THREADS - 0.2), GREEN)

    for x, y, text, colour in (
        (1.2, 3.1, "copy_gmem_to_smem", INK),
        (2.2, 2.72, "barrier_wait", SOFT),
        (4.25, 3.1, "commit_smem", RED),
        (4.55, 2.72, "copy_smem_to_gmem", INK),
        (5.85, 3.1, "wait_smem_to_gmem(0)", SOFT),
    ):
        anchor = {"commit_smem": 4.28, "copy_smem_to_gmem": 4.56}.get(text, x + 0.12)
        ax.plot((anchor, anchor), (THREADS + 0.2, y - 0.1), color=colour, linewidth=0.8)
        words(
            ax, x, y, text, size=8, ha="right" if text == "commit_smem" else "left", colour=colour, family="monospace"
        )
    words(ax, 5.6, 1.65, "wait_read_only=True\nwould continue here", size=7.5, ha="left", colour=SOFT)
    arrow(ax, (1.1, 0.42), (7.7, 0.42), INK, width=1.0)
    words(ax, 7.7, 0.22, "time", size=8, ha="right")
    return fig


def _bar(ax, x, width, y, colour, text, idle=False):
    box(ax, x, y - 0.2, width, 0.4, colour=plot.CARD, fill=1.0)  # Hides the line of the lane.
    box(ax, x, y - 0.2, width, 0.4, text, colour, fill=0.08 if idle else 0.35, size=7.5)


if __name__ == "__main__":
    save(__file__, draw())
