"""Reduce-scatter: the slots of each sender in the owner's buffer, who fills and frees them, the order of the sum."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SOFT, arrow, box, canvas, save, words

DEVICES, SLOTS = 4, 2
COLOURS = (BLUE, ORANGE, GREEN, PINK)
OWNER = 2


def draw():
    fig, ax = canvas(7.8, 3.7)
    words(ax, 0.95, 3.5, "what each GPU adds to", size=8.5)
    words(ax, 0.95, 3.3, f"the shard of GPU {OWNER}", size=8.5)
    words(ax, 4.0, 3.5, f"buffer of GPU {OWNER}", size=8.5, weight="bold")
    words(ax, 4.0, 3.28, f"{SLOTS} slots for each sender", size=8, colour=SOFT)
    for d in range(DEVICES):
        y = 2.55 - 0.62 * d
        words(ax, 0.1, y + 0.2, f"GPU {d}", size=8.5, ha="left", weight="bold")
        for i in range(3):
            box(ax, 0.65 + 0.4 * i, y, 0.36, 0.4, f"{i}", COLOURS[d], fill=0.35 if i < 2 else 0.12, size=8)
        for slot in range(SLOTS):
            box(ax, 3.35 + 0.68 * slot, y, 0.62, 0.4, f"piece {slot}", COLOURS[d], fill=0.35, size=7.5)
        arrow(ax, (1.9, y + 0.26), (3.3, y + 0.26), COLOURS[d], width=1.5)
        arrow(ax, (3.3, y + 0.09), (1.9, y + 0.09), SOFT, width=0.9, linestyle=":")
        arrow(ax, (4.75, y + 0.2), (5.55, 1.75 - 0.08 * d), COLOURS[d], width=1.1)
    words(ax, 2.6, 2.97, "stores, then arrived[d]", size=7.5)
    words(ax, 2.6, 0.5, f"freed[{OWNER}]: the slot is read", size=7.5, colour=SOFT)
    box(ax, 5.6, 1.2, 1.95, 0.85, colour=RED, fill=0.08)
    words(ax, 6.57, 1.82, f"GPU {OWNER}, warpgroup “add”", size=7.5, colour=RED)
    words(ax, 6.57, 1.45, "((0 + 1) + 2) + 3\nin float32, rounded once", size=8)
    arrow(ax, (6.57, 1.18), (6.57, 0.78), RED)
    box(ax, 5.95, 0.38, 1.25, 0.36, f"shard {OWNER} of the sum", RED, fill=0.2, size=7.5)
    note = "Pieces arrive in any order, and are added in this one. A slot is filled again after its signal “freed”."
    words(ax, 0.1, 0.14, note, size=8, ha="left")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
