"""Two blocks of a cluster need the same tile of B: each loads half of it and sends it to both."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 4.0)
    ax.set_ylim(-0.15, 3.95)
    words(ax, 3.9, 3.82, "L2", size=9, weight="bold")
    box(ax, 0.55, 3.2, 1.5, 0.42, "A, rows of block 0", colour=BLUE, size=8)
    box(ax, 3.0, 3.2, 0.88, 0.42, "B, half 0", colour=ORANGE, size=8)
    box(ax, 3.92, 3.2, 0.88, 0.42, "B, half 1", colour=GREEN, size=8)
    box(ax, 5.75, 3.2, 1.5, 0.42, "A, rows of block 1", colour=BLUE, size=8)
    for block, left in enumerate((0.3, 4.3)):
        of_a, of_b = (left + 0.15, left + 1.35) if block == 0 else (left + 2.05, left + 0.2)  # The second is mirrored.
        box(ax, left, 0.55, 3.2, 1.85, colour=SOFT, fill=0.05)
        words(ax, (0.3, 7.5)[block], 2.55, f"block {block}", size=8.5, weight="bold", ha=("left", "right")[block])
        box(ax, of_a, 1.35, 1.0, 0.8, "A\n128 x 64", colour=BLUE, size=8)
        box(ax, of_b, 1.35, 0.8, 0.8, "B\nhalf 0", colour=ORANGE, size=8)
        box(ax, of_b + 0.85, 1.35, 0.8, 0.8, "B\nhalf 1", colour=GREEN, size=8)
        box(ax, of_a, 0.7, 1.0, 0.42, "memory", colour=INK, size=8)
        box(ax, of_b, 0.7, 1.65, 0.42, "2 compute warpgroups", colour=PINK, size=8)
        arrow(ax, (of_a + 0.5, 3.2), (of_a + 0.5, 2.15), BLUE)
        arrow(ax, (3.44, 3.2), (of_b + 0.4, 2.15), ORANGE)
        arrow(ax, (4.36, 3.2), (of_b + 1.25, 2.15), GREEN)
    words(ax, 3.9, 1.75, "one read\neach,\ndelivered\ntwice", size=7.5)
    # Freed: each compute warpgroup arrives in both blocks.
    for start, end, bend in ((1.9, 1.1, -0.4), (5.9, 6.7, 0.4), (2.3, 6.9, 0.22), (5.5, 0.8, -0.22)):
        arrow(ax, (start, 0.7), (end, 0.7), PINK, connectionstyle=f"arc3,rad={bend}")
    text = "freed: the compute warpgroups of both blocks arrive at the barrier of both: 4 arrivals"
    words(ax, 3.9, -0.02, text, size=8, colour=PINK)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
