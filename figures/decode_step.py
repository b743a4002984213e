"""Figures of chapter 22: decode step."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, SOFT, arrow, box, drawing, words

LAYER = (  # The launches, the kernel in their place, colour.
    (("add", "rms_norm", "convert"), "norm", ORANGE),
    (("q", "k", "v"), "product\nq, k, v", BLUE),
    (("rotate q", "rotate k", "write_kv"), "rotate,\nwrite", GREEN),
    (("attention",), "attention", PINK),
    (("merge",), "merge", PINK),
    (("o",), "product\no", BLUE),
    (("add", "rms_norm", "convert"), "norm", ORANGE),
    (("gate", "up", "swiglu"), "gate, up,\nSwiGLU", BLUE),
    (("down",), "product\ndown", BLUE),
)


@drawing(7.8, 2.75)
def decode_step_layer(ax):
    """One layer of a step that decodes: the launches of a layer as it is written, and the kernels in their place."""
    of_xla = {"add", "convert", "rotate q", "rotate k"}
    left, step, width, height = 0.72, 0.785, 0.7, 0.27
    top, bottom = 2.35, 0.35
    for i, (launches, kernel, colour) in enumerate(LAYER):
        x = left + step * i
        for j, name in enumerate(launches):
            y = top - 0.33 * j
            edge = "--" if name in of_xla else "-"
            box(ax, x, y, width, height, name, SOFT if name in of_xla else colour, fill=0.18, size=7.3, linestyle=edge)
        arrow(ax, (x + width / 2, top - 0.33 * len(launches) + 0.2), (x + width / 2, bottom + 0.6), SOFT, width=0.9)
        box(ax, x, bottom, width, 0.56, kernel, colour, fill=0.22, size=7.3)
    words(ax, 0.12, top + height / 2, "rung 1", 8.5, ha="left", weight="bold")
    words(ax, 0.12, bottom + 0.28, "rung 3", 8.5, ha="left", weight="bold")
    count = sum(len(launches) for launches, _, _ in LAYER)
    text = f"one layer: {count} launches become {len(LAYER)}; dashed: XLA's own, solid: kernels of this course"
    words(ax, left, 0.14, text, 7.8, ha="left", colour=SOFT)
