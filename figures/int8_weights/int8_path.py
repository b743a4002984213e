"""The path of weights to the tensor core through registers: 8 bits to the registers, 16 from there, o transposed."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, RED, SOFT, arrow, box, canvas, save, words

COLUMNS = (("HBM", 0.6), ("shared memory", 2.35), ("registers", 4.4), ("tensor core", 6.45))
WEIGHTS, ROWS = 2.35, 0.7  # Where the two operands lie, above each other.


def draw():
    fig, ax = canvas(7.5, 4.0)
    for name, x in COLUMNS:
        words(ax, x, 3.8, name, size=9, weight="bold")
    for x in (1.3, 3.4, 5.45):
        ax.axvline(x, 0.13, 0.97, color=PALE, zorder=0)
    box(ax, 0.15, WEIGHTS, 0.9, 0.9, "weights\n(N, K)\n8 bits", colour=BLUE, fill=0.2, size=8)
    box(ax, 0.15, ROWS, 0.9, 0.55, "a (M, K)\n16 bits", colour=GREEN, fill=0.2, size=8)
    _slots(ax, WEIGHTS, 0.9, BLUE, "8 bits")
    _slots(ax, ROWS, 0.55, GREEN, "16 bits")
    arrow(ax, (1.08, WEIGHTS + 0.45), (1.62, WEIGHTS + 0.45), colour=BLUE, text="TMA: 1", size=8)
    arrow(ax, (1.08, ROWS + 0.27), (1.62, ROWS + 0.27), colour=GREEN, text="TMA", size=8)
    box(ax, 3.62, WEIGHTS, 0.5, 0.9, "8 bits", colour=BLUE, fill=0.2, size=8)
    box(ax, 4.5, WEIGHTS, 0.8, 0.9, "16 bits", colour=ORANGE, fill=0.35, size=8)
    arrow(ax, (3.02, WEIGHTS + 0.45), (3.6, WEIGHTS + 0.45), colour=BLUE, text="load: 1", size=8)
    arrow(ax, (4.14, WEIGHTS + 0.45), (4.48, WEIGHTS + 0.45), colour=ORANGE)
    words(ax, 4.42, WEIGHTS + 1.08, "convert, exchange", size=8, colour=ORANGE)
    box(ax, 5.95, ROWS, 1.0, 2.55, colour=RED, fill=0.08)
    words(ax, 6.45, 1.95, "WGMMA", size=9, weight="bold")
    words(ax, 6.45, 1.65, "sums of oᵀ,\nfloat32", size=8)
    arrow(ax, (5.33, WEIGHTS + 0.45), (5.93, WEIGHTS + 0.45), colour=ORANGE, text="A", size=9)
    arrow(ax, (3.02, ROWS + 0.27), (5.93, ROWS + 0.27), colour=GREEN, text="B: a, read transposed", size=8)
    words(ax, 6.45, 0.48, "transposed back\non its way out", size=8, colour=SOFT)
    words(ax, 2.95, 0.25, "1: bytes of a weight; no others of it cross shared memory", size=8, colour=SOFT)
    words(ax, 2.35, WEIGHTS - 0.2, "a ring of slots", size=8, colour=SOFT)
    words(ax, 4.42, WEIGHTS - 0.2, "of one compute warpgroup", size=8, colour=SOFT)
    words(ax, 4.42, 1.75, "nothing is written back", size=8, colour=INK)
    return fig


def _slots(ax, y, height, colour, text):
    """A ring of four slots, of which one is full."""
    for i in range(4):
        box(ax, 1.65 + 0.34 * i, y, 0.31, height, colour=colour, fill=0.25 if i == 3 else 0.08)
    words(ax, 1.65 + 0.34 * 3 + 0.155, y + height / 2, text, size=7, rotation=90)


if __name__ == "__main__":
    save(__file__, draw())
