"""Which thread holds which columns: a row spread over a warpgroup, and rows that lie within a warp."""

from figures._draw import save
from lab import plot

WARPS, LANES, VEC = 4, 32, 8


def draw():
    with plot.figure(7.5, 4.6, nrows=2, height_ratios=(1, 1.35)) as (fig, (top, bottom)):
        _spread(top)
        _within(bottom)
    return fig


def _spread(ax):
    """One row of 2048 columns in WG_STRIDED((2048,), 8): thread t holds 8 neighbours in each strip of 1024."""
    strip = WARPS * LANES * VEC
    for i in range(2):
        for warp in range(WARPS):
            start = i * strip + warp * LANES * VEC
            _cell(ax, start, 0, LANES * VEC, f"warp {warp}", plot.COLOURS[warp], 0.8)
        _cell(ax, i * strip, 0, 2 * VEC, "", plot.INK, 0.8, filled=True)
        ax.text(i * strip, 1.1, f"thread 0: columns {i * strip} to {i * strip + VEC - 1}", fontsize=8)
    ax.set(xlim=(-20, 2 * strip + 20), ylim=(1.6, -0.15), yticks=[], xticks=range(0, 2 * strip + 1, 256))
    ax.set_title("One row of 2048 columns over a warpgroup: WG_STRIDED((2048,), 8)")
    _plain(ax)


def _within(ax):
    """A tile of 8 rows of 128 columns: two rows a warp, 16 lanes a row, 8 columns a lane."""
    lanes = 16
    for row in range(8):
        for lane in range(lanes):
            number = row % 2 * lanes + lane
            _cell(ax, lane * VEC, row, VEC, str(number), plot.COLOURS[row // 2], 0.86)
        ax.text(-1, row + 0.43, f"row {row}", ha="right", va="center", fontsize=8)
    for warp in range(WARPS):
        ax.text(lanes * VEC + 1, 2 * warp + 0.93, f"warp {warp}", va="center", color=plot.COLOURS[warp], fontsize=8)
    ax.set(xlim=(-9, lanes * VEC + 9), ylim=(8.1, -0.1), yticks=[], xticks=range(0, 129, 16))
    ax.set_title("Eight rows of 128 columns, each within a warp: TILED (the number is the lane)")
    ax.set_xlabel("column")
    _plain(ax)


def _cell(ax, x, y, width, text, colour, height, filled=False):
    face = colour if filled else plot.CARD
    ax.broken_barh([(x, width)], (y, height), facecolor=face, edgecolor=colour, linewidth=1.3)
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=7.5)


def _plain(ax):
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)


if __name__ == "__main__":
    save(__file__, draw())
