"""A sum over the leading axis in two launches: every block sums a strip, then one more pass sums the strips."""

from figures._draw import save
from lab import plot

SPLITS, COLUMNS = 4, 3


def draw():
    with plot.figure(7.5, 3.2, ncols=3, width_ratios=(2, 2, 2)) as (fig, (left, middle, right)):
        _strips(left, SPLITS, "x: every block sums a strip", lambda s, c: f"block\n({s}, {c})")
        left.set(xlabel="columns", ylabel="rows")
        _strips(middle, SPLITS, "partial sums, float32", lambda s, c: f"row {s}", height=0.45)
        _strips(right, 1, "second launch: the total", lambda s, c: f"block\n(0, {c})")
        middle.annotate("", (-0.05, 1.5), (-0.5, 1.5), arrowprops=dict(arrowstyle="->"), annotation_clip=False)
        right.annotate("", (-0.05, 1.5), (-0.5, 1.5), arrowprops=dict(arrowstyle="->"), annotation_clip=False)
    return fig


def _strips(ax, splits, title, label, height=0.9):
    top = (SPLITS - splits) / 2
    for split in range(splits):
        for column in range(COLUMNS):
            colour = plot.COLOURS[split] if splits > 1 else plot.INK
            y = top + split
            ax.broken_barh([(column, 0.92)], (y, height), facecolor=plot.CARD, edgecolor=colour, linewidth=1.5)
            ax.text(column + 0.46, y + height / 2, label(split, column), ha="center", va="center", fontsize=8)
    ax.set(xlim=(-0.6, COLUMNS), ylim=(SPLITS, -0.1), xticks=[], yticks=[])
    ax.set_title(title, fontsize=9.5)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    save(__file__, draw())
