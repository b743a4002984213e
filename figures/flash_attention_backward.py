"""Figures of chapter 12: gradients of attention."""

import matplotlib.patches as patches

from figures._chart import chart, label, lanes
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, PINK, RED, SOFT, arrow, box, drawing, places, words


@drawing(7.8, 4.0)
def backward_products(ax):
    """The products of the backward pass: what each needs, and what it gives."""
    inputs = (("k, q", 0.75, BLUE), ("lse", 2.35, INK), ("do, v", 4.25, PINK), ("delta", 6.3, INK))
    for text, x, colour in inputs:
        box(ax, x - 0.45, 3.45, 0.9, 0.38, text, colour, size=9)
    tiles = (("s", 0.75, BLUE), ("p", 2.35, ORANGE), ("dp", 4.25, PINK), ("ds", 6.3, RED))
    for text, x, colour in tiles:
        box(ax, x - 0.45, 1.95, 0.9, 0.72, text, colour, fill=0.25, size=11)
    arrow(ax, (0.75, 3.43), (0.75, 2.7), BLUE)
    words(ax, 0.83, 3.07, "1: q kᵀ", 8, ha="left", colour=BLUE)
    arrow(ax, (4.25, 3.43), (4.25, 2.7), PINK)
    words(ax, 4.33, 3.07, "2: do vᵀ", 8, ha="left", colour=PINK)
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
        words(ax, (start + x) / 2 + (-0.12 if side == "right" else 0.12), 1.4, product, 8, ha=side, colour=colour)
    words(ax, 0.1, 0.71, "sums: head_dim wide", 8, ha="left", colour=SOFT)
    words(ax, 0.1, 1.72, "T x S, never in memory", 8, ha="left", colour=SOFT)
    words(ax, 3.9, 0.15, "kernel 1 takes products 1, 2 and 5; kernel 2 takes 1, 2, 3 and 4", 8)


SIDE, NUM = 0.31, 8  # Inches of a block of 64; blocks each way.


def panel(ax, left, bottom, chosen, title, legend):
    """`chosen(row, column)`: whether the tile that is shown goes through this block."""
    top = bottom + NUM * SIDE
    for row, column in places(NUM, NUM):
        seen, cut = column <= row, column == row
        here = chosen(row, column)
        face = (ORANGE if cut else BLUE) if here and seen else PALE if seen else "white"
        place = (left + column * SIDE, top - (row + 1) * SIDE)
        ax.add_patch(patches.Rectangle(place, SIDE, SIDE, facecolor=face, edgecolor=SOFT, linewidth=0.6))
    words(ax, left + NUM * SIDE / 2, top + 0.42, title, 9.5, weight="bold")
    words(ax, left + NUM * SIDE / 2, top + 0.14, "keys", 8, colour=SOFT)
    words(ax, left - 0.16, bottom + NUM * SIDE / 2, "queries", 8, rotation=90, colour=SOFT)
    words(ax, left + NUM * SIDE / 2, bottom - 0.6, legend, 8)
    return top


@drawing(7.8, 4.25)
def backward_tiles(ax):
    """Two ways through the matrix of weights: along the rows for dq, along the columns for dk and dv."""
    bottom, row, column = 1.0, 5, 2
    left = 0.55
    top = panel(
        ax, left, bottom, lambda r, c: r == row, "kernel 1: dq", "a tile keeps 64 queries and do,\ngoes through k and v"
    )
    y = top - (row + 0.5) * SIDE
    arrow(ax, (left + 0.05, y), (left + (row + 1) * SIDE - 0.03, y), "white", width=1.8)
    arrow(ax, (left + NUM * SIDE + 0.02, y), (left + NUM * SIDE + 0.3, y), GREEN)
    words(ax, left + NUM * SIDE + 0.33, y, "dq of\n64 queries", 8, ha="left", colour=GREEN)
    left = 4.45
    top = panel(
        ax, left, bottom, lambda r, c: c == column, "kernel 2: dk and dv",
        "a tile keeps 64 keys and values,\ngoes through q and do",
    )  # fmt: skip
    x = left + (column + 0.5) * SIDE
    arrow(ax, (x, top - column * SIDE - 0.05), (x, bottom + 0.03), "white", width=1.8)
    arrow(ax, (x, bottom - 0.03), (x, bottom - 0.3), GREEN)
    words(ax, x + 0.12, bottom - 0.17, "dk, dv of 64 keys", 8, ha="left", colour=GREEN)
    for i, (colour, text) in enumerate(((BLUE, "whole"), (ORANGE, "cut: masked"), (PALE, "other tiles'"))):
        ax.add_patch(patches.Rectangle((3.36, 2.98 - 0.24 * i), 0.14, 0.14, facecolor=colour, edgecolor=SOFT, lw=0.6))
        words(ax, 3.56, 3.05 - 0.24 * i, text, 7, ha="left")


LAYOUTS_SIDE = 0.17  # Inches, of a cell.
ROWS, COLUMNS = 16, 16  # Rows and columns that are shown, of 64 each.
LANE = 6  # The lane whose elements are shown.


def has(row: int, column: int) -> bool:
    """Whether lane 6 of warp 0 holds an element."""
    return row % 8 * 4 + column % 8 // 2 == LANE


def layouts_panel(ax, left, title, rows, columns, per_row):
    top = 3.35
    for row, column in places(ROWS, COLUMNS):
        place = (left + column * LAYOUTS_SIDE, top - (row + 1) * LAYOUTS_SIDE)
        face = BLUE if has(row, column) else PALE
        ax.add_patch(
            patches.Rectangle(place, LAYOUTS_SIDE, LAYOUTS_SIDE, facecolor=face, edgecolor="white", linewidth=0.6)
        )
    for n in range(16):
        needed = any(has(n, c) if per_row else has(c, n) for c in range(16))
        place = (left - 0.42, top - (n + 1) * LAYOUTS_SIDE) if per_row else (left + n * LAYOUTS_SIDE, top + 0.22)
        face = ORANGE if needed else "white"
        ax.add_patch(
            patches.Rectangle(place, LAYOUTS_SIDE, LAYOUTS_SIDE, facecolor=face, edgecolor=SOFT, linewidth=0.6)
        )
    words(ax, left + 8 * LAYOUTS_SIDE, 4.12, title, 9.5, weight="bold")
    words(ax, left + 8 * LAYOUTS_SIDE, top - 16 * LAYOUTS_SIDE - 0.15, columns + " ...", 8, colour=SOFT)
    words(ax, left - (0.58 if per_row else 0.18), top - 8 * LAYOUTS_SIDE, rows + " ...", size=8, rotation=90,
          colour=SOFT)  # fmt: skip
    if per_row:
        words(ax, left - 0.34, top + 0.13, "lse", 8, colour=ORANGE)
    else:
        words(ax, left - 0.08, top + 0.3, "lse", 8, ha="right", colour=ORANGE)


@drawing(7.8, 4.3)
def backward_layouts(ax):
    """Numbers for each query that a thread needs: queries along the rows of a tile, and along its columns."""
    layouts_panel(ax, 0.95, "kernel 1: a number a row", "queries", "keys", per_row=True)
    layouts_panel(ax, 4.7, "kernel 2: a number a column", "keys", "queries", per_row=False)
    box(ax, 3.72, 2.05, 0.13, 0.13, "", BLUE, fill=0.9)
    words(ax, 3.93, 2.13, "of thread 6", 7, ha="left")
    box(ax, 3.72, 1.75, 0.13, 0.13, "", ORANGE, fill=0.9)
    words(ax, 3.93, 1.83, "it needs", 7, ha="left")
    words(ax, 0.4, 0.1, "Layout.WGMMA.reduce(1): 2 numbers a thread, the same in all steps", 7.5, ha="left")
    words(ax, 4.2, 0.1, "Layout.WGMMA.reduce(0): 16 of 64, others in each step", 7.5, ha="left")


COLOURS = {"s": BLUE, "dp": PINK, "dv": GREEN, "dk": RED, "p": ORANGE, "ds": ORANGE}
WAYS = (  # (tensor cores, CUDA cores), each (what, start, length) of a step; and from one step to the next.
    (
        "this chapter: each product is waited for",
        [("s", 0, 2), ("dv", 4, 2), ("dp", 6, 2), ("dk", 9, 2)],
        [("p", 2, 2), ("ds", 8, 1)],
        11,
    ),
    (
        "heads of 128: s and dp together, a wait at the end of a step",
        [("s", 0, 2), ("dp", 2, 2), ("dv", 4, 2), ("dk", 6, 2)],
        [("p", 2, 2), ("ds", 4, 1)],
        8.8,
    ),
    (
        "had registers room: the next step's s starts behind dk",
        [("s", 0, 2), ("dp", 2, 2), ("dv", 4, 2), ("dk", 6, 2)],
        [("p", 2, 2), ("ds", 4, 1)],
        8,
    ),
)


@chart(7.8, 4.6, nrows=3, sharex=True)
def backward_schedule(axes):
    """Kernel 2 in time: every product waited for, waiting at the end of a step, and running ahead; made-up times."""
    for ax, (title, tensor, cuda, period) in zip(axes, WAYS, strict=True):
        for step in range(3):
            for lane, jobs in enumerate((tensor, cuda)):
                for what, start, length in jobs:
                    at = step * period + start
                    look = dict(color=COLOURS[what], alpha=0.35 if step % 2 else 0.75, edgecolor="white")
                    ax.barh(lane, length, left=at, height=0.72, **look)
                    label(ax, at + length / 2, lane, what, 8)
        lanes(ax, ("tensor cores", "CUDA cores"), title)
        ax.set_xlim(0, 33)
    axes[-1].set_xlabel("time of one warpgroup, three steps", fontsize=8)
