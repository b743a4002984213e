"""One layer of the model: which kernel does what, which chapter built it, and where the cache comes in."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, SOFT, arrow, box, canvas, save, words

ATTENTION = (  # Text, chapter, colour.
    ("rms_norm", "3", ORANGE),
    ("matmul\nq, k, v", "8", BLUE),
    ("rotate", "XLA", SOFT),
    ("write_kv", "k, v", GREEN),
    ("attention\nover pages", "13, 14", PINK),
    ("matmul\no", "8", BLUE),
)
MLP = (
    ("rms_norm", "3", ORANGE),
    ("matmul\ngate, up", "8", BLUE),
    ("swiglu,\nfused", "1", ORANGE),
    ("matmul\ndown", "8", BLUE),
)


def row(ax, boxes, xs, y):
    for (text, chapter, colour), x in zip(boxes, xs, strict=True):
        box(ax, x, y, 0.92, 0.58, text, colour, fill=0.2, size=8)
        note = chapter if chapter in ("XLA", "k, v") else f"chapter {chapter}"
        words(ax, x + 0.46, y + 0.7, note if chapter != "k, v" else "rows to slots", size=7, colour=SOFT)
    for x, following in zip(xs, xs[1:], strict=False):
        arrow(ax, (x + 0.93, y + 0.29), (following - 0.01, y + 0.29), INK, width=1.0)


def residual(ax, y, x_end):
    """The residual stream: in at the left, the sum at the right."""
    ax.plot([0.42, 0.42, x_end], [y + 0.29, y + 1.0, y + 1.0], color=INK, linewidth=1.0)
    arrow(ax, (0.42, y + 0.29), (0.84, y + 0.29), INK, width=1.0)
    arrow(ax, (x_end, y + 1.0), (x_end, y + 0.43), INK, width=1.0)
    words(ax, x_end, y + 0.29, "+", size=13)


def draw():
    fig, ax = canvas(7.8, 3.9)
    wide = [0.85 + 1.1 * i for i in range(6)]
    y = 2.45
    row(ax, ATTENTION, wide, y)
    residual(ax, y, 7.55)
    arrow(ax, (wide[-1] + 0.93, y + 0.29), (7.45, y + 0.29), INK, width=1.0)
    words(ax, 0.2, y + 0.29, "x", size=11)
    box(ax, wide[3] - 0.35, 1.6, 2.75, 0.38, "cache: pages of keys and values", GREEN, fill=0.12, size=8)
    arrow(ax, (wide[3] + 0.46, y - 0.01), (wide[3] + 0.46, 1.99), GREEN, width=1.1)
    arrow(ax, (wide[4] + 0.46, 1.99), (wide[4] + 0.46, y - 0.01), PINK, width=1.1)
    y = 0.25
    row(ax, MLP, wide[:4], y)
    residual(ax, y, wide[4] + 0.25)
    arrow(ax, (wide[3] + 0.93, y + 0.29), (wide[4] + 0.15, y + 0.29), INK, width=1.0)
    words(ax, 0.2, y + 0.29, "x", size=11)
    arrow(ax, (wide[4] + 0.36, y + 0.29), (wide[4] + 0.75, y + 0.29), INK, width=1.0)
    words(ax, wide[4] + 0.85, y + 0.29, "to the next layer", size=8, ha="left")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
