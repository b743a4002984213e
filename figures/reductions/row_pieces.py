"""A row whose length is no multiple of the piece: the last piece is shifted back to end with the row."""

from figures._draw import save
from lab import plot

COLS, WIDTH = 1000, 512


def draw():
    starts = [min(start, COLS - WIDTH) for start in range(0, COLS, WIDTH)]
    shared = starts[-2] + WIDTH - starts[-1]
    with plot.figure(7.5, 2.5) as (fig, ax):
        ax.broken_barh([(0, COLS)], (0, 0.7), facecolor=plot.FAINT, edgecolor=plot.INK)
        ax.text(COLS / 2, 0.35, f"the row: {COLS} columns", ha="center", va="center")
        for i, start in enumerate(starts):
            y, colour = 1 + i, plot.COLOURS[i]
            ax.broken_barh([(start, WIDTH)], (y, 0.7), facecolor=plot.CARD, edgecolor=colour, linewidth=1.5)
            ax.text(
                start + WIDTH / 2,
                y + 0.35,
                f"piece {i}: columns {start} to {start + WIDTH - 1}",
                ha="center",
                va="center",
            )
        ax.broken_barh(
            [(starts[-1], shared)], (2, 0.7), facecolor="none", edgecolor=plot.BOUND, hatch="////", linewidth=0
        )
        text = f"{shared} columns that piece 0 holds too:\nstored twice, counted once"
        ax.annotate(
            text, (starts[-1], 2.5), (starts[-1] - 20, 2.5), ha="right", va="center", color=plot.BOUND, fontsize=8
        )
        ax.axvline(COLS, color=plot.INK, linewidth=1, linestyle=":")
        ax.text(COLS + 5, 0.35, "next row:\nnot ours", va="center", fontsize=8)
        ax.set(xlim=(-10, COLS + 110), ylim=(2.95, -0.15), yticks=[], xticks=[0, WIDTH, COLS])
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
