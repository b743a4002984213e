"""Two paths of the operands: each warp loads what it multiplies, or TMA copies it once for all of them."""

from figures._draw import BLUE, GREEN, ORANGE, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 3.5)
    _path(ax, 0.2, "from global memory, by the warps", through_smem=False)
    _path(ax, 4.1, "through shared memory, by TMA", through_smem=True)
    return fig


def _path(ax, x, title, through_smem):
    words(ax, x, 3.33, title, size=10, ha="left", weight="bold")
    box(ax, x, 2.35, 3.5, 0.7, colour=SOFT, fill=0.07)
    words(ax, x + 0.1, 2.92, "global memory (L2, HBM)", size=8, ha="left", colour=SOFT)
    a = [x + 0.3 + 0.32 * i for i in range(4)]
    warps = [x + 0.4 + 0.9 * i for i in range(4)]
    b = x + 2.05
    _operands(ax, a, b, 2.42)
    bottom = 2.38
    if through_smem:
        box(ax, x, 1.2, 3.5, 0.62, colour=BLUE, fill=0.06)
        words(ax, x + 0.1, 1.69, "shared memory", size=8, ha="left", colour=BLUE)
        _operands(ax, a, b, 1.25)
        arrow(ax, (a[1] + 0.3, bottom), (a[1] + 0.3, 1.85), ORANGE, width=3)
        arrow(ax, (b + 0.6, bottom), (b + 0.6, 1.85), GREEN, width=3)
        words(ax, x + 1.75, 2.1, "TMA: once,\nfor all warps", size=8)
        bottom = 1.22
    for i, warp in enumerate(warps):
        arrow(ax, (a[i] + 0.13, bottom), (warp - 0.08, 0.72), ORANGE, width=1)
        arrow(ax, (b + 0.3 + 0.2 * i, bottom), (warp + 0.1, 0.72), GREEN, width=1)
        box(ax, warp - 0.32, 0.38, 0.66, 0.34, f"warp {i}", BLUE, fill=0.3, size=8)
    last = "the warp that wants a value waits for its load" if not through_smem else "one copy; then short loads"
    words(ax, x + 1.75, 0.15, last, size=8, colour=SOFT)


def _operands(ax, a, b, y):
    for i, left in enumerate(a):
        box(ax, left, y, 0.28, 0.3, f"a{i}", ORANGE, fill=0.5, size=7.5, linewidth=0.6)
    box(ax, b, y, 1.25, 0.3, "b", GREEN, fill=0.5, size=8, linewidth=0.6)


if __name__ == "__main__":
    save(__file__, draw())
