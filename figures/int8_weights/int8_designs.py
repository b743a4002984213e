"""Three places where 8-bit weights can become 16-bit ones, and the bytes that each weight moves on the way."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, RED, SOFT, arrow, box, canvas, save, words

COLUMNS = {"HBM": 1.75, "shared memory": 3.6, "registers": 5.3, "tensor core": 6.75}
ROWS = {"in HBM first": 2.75, "in shared\nmemory": 1.6, "in registers": 0.4}
WIDTH, HEIGHT = 0.62, 0.42


def draw():
    fig, ax = canvas(7.5, 3.95)
    for name, x in COLUMNS.items():
        words(ax, x, 3.75, name, size=9, weight="bold")
        ax.axvline(x, 0.03, 0.9, color=PALE, linewidth=26, zorder=0)
    for name, y in ROWS.items():
        words(ax, 0.1, y + HEIGHT / 2, name, size=9, ha="left", weight="bold")
    y = ROWS["in HBM first"]
    _int8(ax, "HBM", y + 0.3)
    _wide(ax, "HBM", y - 0.25)
    _wide(ax, "shared memory", y - 0.25)
    _go(ax, "HBM", "shared memory", y - 0.25, "2", GREEN)
    _go(ax, "shared memory", "tensor core", y - 0.25, "2", RED)
    ax.annotate("", (1.43, y - 0.1), (1.43, y + 0.55), arrowprops=dict(
        arrowstyle="-|>", color=ORANGE, connectionstyle="arc3,rad=0.6", linewidth=1.4))  # fmt: skip
    words(ax, 2.2, y + 0.52, "a kernel of its own: 1 + 2", size=7.5, colour=ORANGE, ha="left")
    y = ROWS["in registers"]
    _int8(ax, "HBM", y)
    _int8(ax, "shared memory", y)
    _wide(ax, "registers", y)
    _go(ax, "HBM", "shared memory", y, "1", GREEN)
    _go(ax, "shared memory", "registers", y, "1", ORANGE)
    _go(ax, "registers", "tensor core", y, "", RED)
    y = ROWS["in shared\nmemory"]
    _int8(ax, "HBM", y + 0.25)
    _int8(ax, "shared memory", y + 0.25)
    _wide(ax, "shared memory", y - 0.25)
    _go(ax, "HBM", "shared memory", y + 0.25, "1", GREEN)
    _go(ax, "shared memory", "tensor core", y - 0.25, "2", RED)
    edge = COLUMNS["shared memory"] + WIDTH / 2
    ax.annotate("", (edge, y + 0.04), (edge, y + 0.5), arrowprops=dict(
        arrowstyle="-|>", color=ORANGE, connectionstyle="arc3,rad=-1.3", linewidth=1.4))  # fmt: skip
    words(ax, 4.4, y + 0.42, "1 + 2, supply warpgroup", size=7.5, colour=ORANGE, ha="left")
    return fig


def _int8(ax, column, y):
    box(ax, COLUMNS[column] - WIDTH / 2, y, WIDTH, HEIGHT, "int8", colour=BLUE, fill=0.25, size=8)


def _wide(ax, column, y):
    box(ax, COLUMNS[column] - WIDTH / 2, y, WIDTH, HEIGHT, "bf16", colour=INK, fill=0.25, size=8)


def _go(ax, start, end, y, text, colour):
    """An arrow from one column to another; `text` is the bytes of a weight that go along it."""
    left = COLUMNS[start] + WIDTH / 2 + 0.04
    right = COLUMNS[end] - (0.35 if end == "tensor core" else WIDTH / 2 + 0.04)
    arrow(ax, (left, y + HEIGHT / 2), (right, y + HEIGHT / 2), colour=colour, text=text, size=7.5)
    if end == "tensor core":
        box(ax, COLUMNS[end] - 0.33, y, 0.66, HEIGHT, "WGMMA", colour=SOFT, fill=0.25, size=8)


if __name__ == "__main__":
    save(__file__, draw())
