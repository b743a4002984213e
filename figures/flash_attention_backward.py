"""Figures of chapter 12: gradients of attention."""

import itertools

from figures._chart import bar, chart, lanes, tile
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, PINK, RED, SOFT, arrow, box, drawing, places, words


@drawing(7.8, 4.0)
def backward_products(ax):
    """The products of the backward pass: what each needs, and what it gives."""
    for text, x, colour in (("k, q", 0.75, BLUE), ("lse", 2.35, INK), ("do, v", 4.25, PINK), ("delta", 6.3, INK)):
        box(ax, x - 0.45, 3.45, 0.9, 0.38, text, colour, size=9)
    for text, x, colour in (("s", 0.75, BLUE), ("p", 2.35, ORANGE), ("dp", 4.25, PINK), ("ds", 6.3, RED)):
        box(ax, x - 0.45, 1.95, 0.9, 0.72, text, colour, fill=0.25, size=11)
    for x, colour, text in ((0.75, BLUE, "1: q kᵀ"), (4.25, PINK, "2: do vᵀ"), (2.35, SOFT, ""), (6.3, SOFT, "")):
        arrow(ax, (x, 3.43), (x, 2.7), colour, text, at=(x + 0.08, 3.07), ha="left")
    arrow(ax, (1.22, 2.31), (1.88, 2.31), ORANGE, "exp(s - lse)", size=6.5, offset=(0.0, 0.13))
    arrow(ax, (4.72, 2.31), (5.83, 2.31), RED, "p (dp - delta)", size=7.5, offset=(0.0, 0.14))
    style = dict(arrowstyle="-|>", color=RED, connectionstyle="arc3,rad=0.28", linewidth=1.4)
    ax.annotate("", (5.86, 2.05), (2.8, 2.05), arrowprops=style)
    for text, x, start, colour, product, side in (
        ("dv", 2.35, 2.35, ORANGE, "3: pᵀ do", "left"),
        ("dk", 5.6, 6.12, RED, "4: dsᵀ q", "right"),
        ("dq", 7.0, 6.48, RED, "5: ds k", "left"),
    ):
        box(ax, x - 0.42, 0.5, 0.84, 0.42, text, GREEN, fill=0.25, size=10)
        arrow(ax, (start, 1.93), (x, 0.95), colour)
        words(ax, (start + x) / 2 + (-0.12 if side == "right" else 0.12), 1.4, product, 8, ha=side, colour=colour)
    words(ax, 0.1, 0.71, "sums: head_dim wide", 8, ha="left", colour=SOFT)
    words(ax, 0.1, 1.72, "T x S, never in memory", 8, ha="left", colour=SOFT)
    words(ax, 3.9, 0.15, "p, dp and ds are computed block by block; lse and delta are one number per query", 8)


SIDE, NUM = 0.31, 8  # Inches of a block of 64; blocks each way.


def _grid(ax, left, top, side, count, face_of, edge):
    """`count` x `count` squares; `face_of(row, column)` is the colour of each."""
    for row, column in places(count, count):
        x, y = left + column * side, top - (row + 1) * side
        tile(ax, x, y, side, side, face_of(row, column), edgecolor=edge, linewidth=0.6)


def _blocks(ax, left, bottom, chosen, title, legend):
    """`chosen(row, column)`: whether the tile that is shown goes through this block."""
    top, middle = bottom + NUM * SIDE, left + NUM * SIDE / 2

    def face(row, column):
        if column > row:
            return "white"
        return PALE if not chosen(row, column) else ORANGE if column == row else BLUE

    _grid(ax, left, top, SIDE, NUM, face, SOFT)
    words(ax, middle, top + 0.42, title, 9.5, weight="bold")
    words(ax, middle, top + 0.14, "keys", 8, colour=SOFT)
    words(ax, left - 0.16, bottom + NUM * SIDE / 2, "queries", 8, colour=SOFT, rotation=90)
    words(ax, middle, bottom - 0.6, legend, 8)
    return top


@drawing(7.8, 4.25)
def backward_tiles(ax):
    """Two ways through the matrix of weights: along the rows for dq, along the columns for dk and dv."""
    bottom, row, column = 1.0, 5, 2
    left, text = 0.55, "a block keeps 64 queries and do,\ngoes through k and v"
    top = _blocks(ax, left, bottom, lambda r, c: r == row, "one owns dq", text)
    y, right = top - (row + 0.5) * SIDE, left + NUM * SIDE
    arrow(ax, (left + 0.05, y), (left + (row + 1) * SIDE - 0.03, y), "white", width=1.8)
    arrow(ax, (right + 0.02, y), (right + 0.3, y), GREEN, "dq of\n64 queries", at=(right + 0.33, y), ha="left")
    left, text = 4.45, "a block keeps 64 keys and values,\ngoes through q and do"
    top = _blocks(ax, left, bottom, lambda r, c: c == column, "one owns dk and dv", text)
    x = left + (column + 0.5) * SIDE
    arrow(ax, (x, top - column * SIDE - 0.05), (x, bottom + 0.03), "white", width=1.8)
    arrow(ax, (x, bottom - 0.03), (x, bottom - 0.3), GREEN)
    words(ax, x + 0.12, bottom - 0.17, "dk, dv of 64 keys", 8, ha="left", colour=GREEN)
    for i, (colour, text) in enumerate(((BLUE, "whole"), (ORANGE, "cut: masked"), (PALE, "other blocks'"))):
        tile(ax, 3.36, 2.98 - 0.24 * i, 0.14, 0.14, colour, edgecolor=SOFT, linewidth=0.6)
        words(ax, 3.56, 3.05 - 0.24 * i, text, 7, ha="left")


def has(row: int, column: int) -> bool:
    """Whether lane 6 of warp 0 holds an element."""
    return row % 8 * 4 + column % 8 // 2 == 6


def _elements(ax, left, title, rows, columns, per_row):
    """16 x 16 elements of 64 x 64, and the numbers of the queries, which lie along the rows or along the columns."""
    top, side = 3.35, 0.17
    _grid(ax, left, top, side, 16, lambda row, column: BLUE if has(row, column) else PALE, "white")
    for n in range(16):
        needed = any(has(n, c) if per_row else has(c, n) for c in range(16))
        x, y = (left - 0.42, top - (n + 1) * side) if per_row else (left + n * side, top + 0.22)
        tile(ax, x, y, side, side, ORANGE if needed else "white", edgecolor=SOFT, linewidth=0.6)
    words(ax, left + 8 * side, 4.12, title, 9.5, weight="bold")
    words(ax, left + 8 * side, top - 16 * side - 0.15, columns + " ...", 8, colour=SOFT)
    words(ax, left - (0.58 if per_row else 0.11), top - 8 * side, rows + " ...", 8, colour=SOFT, rotation=90)
    if per_row:
        words(ax, left - 0.34, top + 0.13, "lse", 8, colour=ORANGE)
    else:
        words(ax, left - 0.08, top + 0.3, "lse", 8, ha="right", colour=ORANGE)


@drawing(7.8, 4.3)
def backward_layouts(ax):
    """Numbers for each query that a thread needs: queries along the rows of a tile, and along its columns."""
    _elements(ax, 0.95, "queries are rows: one number per row", "queries", "keys", per_row=True)
    _elements(ax, 4.7, "queries are columns: one per column", "keys", "queries", per_row=False)
    for y, colour, text in ((2.05, BLUE, "of thread 6"), (1.75, ORANGE, "it needs")):
        box(ax, 3.72, y, 0.13, 0.13, "", colour, fill=0.9)
        words(ax, 3.93, y + 0.08, text, 7, ha="left")
    words(ax, 0.4, 0.1, "2 numbers per thread, the same in all steps", 7.5, ha="left")
    words(ax, 4.2, 0.1, "16 of 64 numbers per thread, others in each step", 7.5, ha="left")


@chart(7.8, 4.6, nrows=3, sharex=True)
def backward_schedule(axes):
    """A warpgroup's products in time: each waited for, in flight, and with dq of the step before; made-up times."""
    one_by_one = [("s", 0, 2), ("dv", 4, 2), ("dp", 6, 2), ("dk", 9, 2), ("dq", 12, 2)], [("p", 2, 2), ("ds", 8, 1)]
    in_flight = [("s", 0, 2), ("dp", 2, 2), ("dv", 4, 2), ("dk", 6, 2), ("dq", 8, 2)], [("p", 2, 2), ("ds", 4, 1)]
    ways = (  # (tensor cores, CUDA cores), each (what, start, length) of a step; and from one step to the next.
        ("rung 3: each product is waited for", _with_exchange(one_by_one, 11), 15),
        ("rung 4: s and dp together, dv and dk in flight", _with_exchange(in_flight, 5), 11),
        ("to come: dq of the step before, queued with dk", _late(in_flight), 10),
    )
    colours = {"s": BLUE, "dp": PINK, "dv": GREEN, "dk": RED, "dq": RED, "p": ORANGE, "ds": ORANGE, "x": SOFT, "+": INK}
    for ax, (title, units, period) in zip(axes, ways, strict=True):
        for step, (lane, jobs) in itertools.product(range(3), enumerate(units)):
            look = dict(alpha=0.35 if step % 2 else 0.75, edgecolor="white", linewidth=None)
            for what, start, length in jobs:
                at = step * period + start
                bar(ax, lane, at, at + length, what, colours[what], 0.72, ink=INK, clip=False, **look)
        lanes(ax, ("tensor cores", "CUDA cores"), title)
        ax.set_xlim(0, 45)
    axes[-1].set_xlabel("time of one warpgroup, three steps; x: exchange of ds, +: dq to memory", fontsize=8)


def _with_exchange(units, at: int):
    """The same with the exchange of ds, and with dq's way to memory after its product."""
    tensor, cuda = units
    return tensor, [*cuda, ("x", at, 1), ("+", tensor[-1][1] + 2, 1)]


def _late(units):
    """The same with dq queued before dk."""
    (s, dp, dv, *_), cuda = units
    return [s, dp, dv, ("dq", 6, 2), ("dk", 8, 2)], [*cuda, ("+", 8, 1)]
