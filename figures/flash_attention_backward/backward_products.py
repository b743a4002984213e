"""The products of the backward pass: what each needs, and what it gives."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 4.0)
    inputs = (("k, q", 0.75, BLUE), ("lse", 2.35, INK), ("do, v", 4.25, PINK), ("delta", 6.3, INK))
    for text, x, colour in inputs:
        box(ax, x - 0.45, 3.45, 0.9, 0.38, text, colour, size=9)
    tiles = (("s", 0.75, BLUE), ("p", 2.35, ORANGE), ("dp", 4.25, PINK), ("ds", 6.3, RED))
    for text, x, colour in tiles:
        box(ax, x - 0.45, 1.95, 0.9, 0.72, text, colour, fill=0.25, size=11)
    arrow(ax, (0.75, 3.43), (0.75, 2.7), BLUE)
    words(ax, 0.83, 3.07, "1: q kᵀ", size=8, ha="left", colour=BLUE)
    arrow(ax, (4.25, 3.43), (4.25, 2.7), PINK)
    words(ax, 4.33, 3.07, "2: do vᵀ", size=8, ha="left", colour=PINK)
    arrow(ax, (2.35, 3.43), (2.35, 2.7), SOFT)
    arrow(ax, (6.3, 3.43), (6.3, 2.7), SOFT)
    arrow(ax, (1.22, 2.31), (1.88, 2.31), ORANGE, "exp(s - lse)", size=6.5, offset=(0.0, 0.13))
    arrow(ax, (4.72, 2.31), (5.83, 2.31), RED, "p (dp - delta)", size=7.5, offset=(0.0, 0.14))
    ax.annotate(
        "", (5.86, 2.05), (2.8, 2.05),
        arrowprops=dict(arrowstyle="-|>", color=RED, connectionstyle="arc3,rad=0.28", linewidth=1.4),
    )  # fmt: skip
    sums = (("dv", 2.35, ORANGE, "3: pᵀ do"), ("dk", 5.6, RED, "4: dsᵀ q"), ("dq", 7.0, RED, "5: ds k"))
    for text, x, colour, product in sums:
        box(ax, x - 0.42, 0.5, 0.84, 0.42, text, GREEN, fill=0.25, size=10)
        start = 2.35 if text == "dv" else 6.3 + (0.18 if text == "dq" else -0.18)
        arrow(ax, (start, 1.93), (x, 0.95), colour)
        side = "right" if text == "dk" else "left"
        words(ax, (start + x) / 2 + (-0.12 if side == "right" else 0.12), 1.4, product, size=8, ha=side, colour=colour)
    words(ax, 0.1, 0.71, "sums: head_dim wide", size=8, ha="left", colour=SOFT)
    words(ax, 0.1, 1.72, "T x S, never in memory", size=8, ha="left", colour=SOFT)
    words(ax, 3.9, 0.15, "kernel 1 takes products 1, 2 and 5; kernel 2 takes 1, 2, 3 and 4", size=8)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
