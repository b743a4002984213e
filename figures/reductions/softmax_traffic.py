"""Memory traffic of each softmax of chapter 3: an arrow for each pass over the row."""

from figures._draw import save
from lab import plot

# Name, then for each pass: does it read, does it write, what it is for.
KERNELS = {
    "three passes": [(True, False, "max"), (True, False, "sum"), (True, True, "write")],
    "row in registers": [(True, True, "max, sum, write")],
    "online": [(True, False, "max and sum"), (True, True, "write")],
    "row shared by 4\nwarpgroups": [(True, True, "max, sum, write")],
}
SPLIT = {"row shared by 4\nwarpgroups": 4}


def draw():
    with plot.figure(7.5, 3.4, ncols=len(KERNELS), sharey=True) as (fig, axes):
        for ax, (name, passes) in zip(axes, KERNELS.items(), strict=True):
            _kernel(ax, passes, SPLIT.get(name, 1))
            ax.set_title(name, fontsize=10)
            moved = sum(read + write for read, write, _ in passes)
            ax.text(0.5, 2.62, f"{moved} × the matrix", ha="center", va="top", fontsize=9, color=plot.BOUND)
        axes[0].text(-0.12, 0.13, "HBM", ha="right", va="center", fontsize=8)
        axes[0].text(-0.12, 1.55, "regis-\nters", ha="right", va="center", fontsize=8)
    return fig


def _kernel(ax, passes, split):
    ax.broken_barh([(0, 1)], (0, 0.26), facecolor=plot.FAINT, edgecolor=plot.INK)
    ax.text(0.5, 0.13, "a row", ha="center", va="center", fontsize=8)
    width = 1 / len(passes)
    for i, (_, write, purpose) in enumerate(passes):
        left, room = i * width, width / split
        for part in range(split):
            x = left + part * room
            box = (x + 0.05 * room, 0.9 * room)
            ax.broken_barh([box], (1.2, 0.7), facecolor=plot.CARD, edgecolor=plot.OURS, linewidth=1.3)
            ax.annotate("", (x + 0.3 * room, 1.18), (x + 0.3 * room, 0.28), arrowprops=_arrow(plot.OURS))
            if write:
                ax.annotate("", (x + 0.7 * room, 0.28), (x + 0.7 * room, 1.18), arrowprops=_arrow(plot.COLOURS[1]))
        ax.text(
            left + width / 2,
            2.0,
            purpose.replace(", ", ",\n").replace(" and ", "\nand "),
            ha="center",
            va="top",
            fontsize=8,
        )
    ax.set(xlim=(-0.03, 1.03), ylim=(2.85, -0.1))
    ax.axis("off")


def _arrow(colour):
    return dict(arrowstyle="->", color=colour, linewidth=1.5)


if __name__ == "__main__":
    save(__file__, draw())
