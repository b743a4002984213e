"""Figures of chapter 20: debugging."""

import numpy as np

from figures._chart import chart
from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SOFT, arrow, box, drawing, words
from lab import plot

ROWS = (  # (what one sees, its colour, [(a finding, what to do first, what to do then), ...])
    ("it is refused", SOFT, [
        ("", "read: the stage,\nwhat is yours, our line", "the index of messages,\nlab.explain()"),
    ]),
    ("it crashes", PINK, [
        ("", "its own process: the\nfirst error counts", "interpret it with\nthe same shapes"),
    ]),
    ("the result\nis wrong", BLUE, [
        ("a race", "read its two lines", "what is missing\nbetween them?"),
        ("no race", "which tile?\nlab.plot.error_map", "what is the wrong tile\nmade of?"),
    ]),
    ("it hangs", ORANGE, [
        ("interpreted", "who waits, and where", "who has passed by\nwithout arriving?"),
        ("on a GPU alone", "a process, a time limit", "waits that give up,\nand print"),
    ]),
    ("it differs from\nrun to run", RED, [
        ("no race seen", "count runs on a GPU", "change one thing: is\nit then never wrong?"),
    ]),
    ("it is slow", GREEN, [
        ("the compiler knows", "remarks, spills, DEPBAR", "smaller tile,\nfewer registers"),
        ("it does not", "the timeline", "ncu: what is busy?"),
    ]),
)  # fmt: skip
HEIGHT, GAP = 0.56, 0.14
TOP = sum(len(branches) for *_, branches in ROWS) * (HEIGHT + GAP) + 1.0


@drawing(7.8, TOP + 0.4)
def debugging_tree(ax):
    """Six symptoms of a kernel that fails, and what to do first and then for each."""
    for x, text in ((0.9, "what you see"), (4.1, "first"), (6.55, "then")):
        words(ax, x, TOP + 0.18, text, 9.5, weight="bold")
    y = TOP
    for symptom, colour, branches in ROWS:
        height = len(branches) * (HEIGHT + GAP)
        middle = y - height / 2
        box(ax, 0.2, middle - HEIGHT / 2, 1.4, HEIGHT, symptom, colour, fill=0.25, weight="bold")
        for finding, first, then in branches:
            y -= HEIGHT + GAP
            at = y + GAP / 2 + HEIGHT / 2
            arrow(ax, (1.6, middle), (3.08, at), colour)
            if finding:
                words(ax, 2.38, at + (0.14 if at > middle - 0.01 else -0.12), finding, 8)
            box(ax, 3.1, at - HEIGHT / 2, 2.0, HEIGHT, first, colour, size=8.5)
            arrow(ax, (5.1, at), (5.58, at), colour)
            box(ax, 5.6, at - HEIGHT / 2, 1.95, HEIGHT, then, colour, fill=0.06, size=8.5)
    box(ax, 0.2, 0.2, 7.35, 0.5, "", PINK, fill=0.1)
    note = "always: make the failing case smaller (one block, one tile, one step), then print little"
    words(ax, 3.87, 0.45, note)


TILES, SIDE = 4, 16  # Tiles along each side of the matrix, elements along each side of a tile.


def _whole(is_wrong, size=1.0):
    """Errors of a matrix, random in the tiles (row, column) of which `is_wrong` holds."""
    noise = np.abs(np.random.default_rng(0).standard_normal((TILES * SIDE, TILES * SIDE)))
    row, column = (index // SIDE for index in np.indices(noise.shape))
    return np.where(is_wrong(row, column), size * noise, 0.0)


def _swizzled():
    """One tile of 64 columns whose rows' pieces of 8 values are read in an order that the writer did not use."""
    row, column = np.indices((64, 64))
    piece = column // 8
    return np.abs((piece ^ (row % 8)) - piece) / 3.0  # Errors where values grow along a row.


def patterns():
    """(title, what it is a sign of, errors) of each."""
    turn = lambda i, j: (i * TILES + j) // 2  # Two blocks take tiles in turn.
    last = lambda i, j: (i == TILES - 1) & (j == TILES - 1)
    return (
        ("one tile, never written", "the number of turns", _whole(last, np.nan)),
        ("the last row of tiles", "the tail", _whole(lambda i, j: i == TILES - 1)),
        ("every tile, a little", "a step of K", _whole(lambda i, j: i >= 0, 0.3)),
        ("every second turn", "slot or phase", _whole(lambda i, j: turn(i, j) % 2 == 1)),
        ("right on the diagonal", "two indices exchanged", _whole(lambda i, j: i != j)),
        ("inside a tile: 8 rows", "the swizzle", _swizzled()),
    )


@chart(7.8, 5.4, nrows=2, ncols=3)
def debugging_patterns(axes):
    """Six pictures of an error over a matrix of 4 x 4 tiles, and what each is a sign of; drawn by NumPy, not run."""
    for ax, (title, sign, errors) in zip(axes.flat, patterns(), strict=True):
        plot.error_image(ax, errors, 2.5, title)
        ax.set_title(title, fontsize=9, fontweight="bold")
        ax.set_xlabel(sign)
        step = 8 if "inside" in title else SIDE
        for axis, size in ((ax.yaxis, errors.shape[0]), (ax.xaxis, errors.shape[1])):
            axis.set_ticks(np.arange(0, size, step) - 0.5, [])
        ax.grid(visible=True, linewidth=0.5)
        ax.set_axisbelow(False)
        ax.tick_params(length=0)


@drawing(7.8, 2.9)
def debugging_cycle(ax):
    """A deadlock as a circle: two warpgroups, each at a barrier at which the other should arrive."""
    box(ax, 0.25, 1.15, 1.75, 0.75, "warpgroup 1\nloads", ORANGE, fill=0.3)
    box(ax, 5.8, 1.15, 1.75, 0.75, "warpgroup 0\nmultiplies", BLUE, fill=0.3)
    box(ax, 3.0, 2.1, 1.8, 0.55, "barrier freed[1]\n0 of 1 arrivals", INK, fill=0.06, size=8.5)
    box(ax, 3.0, 0.4, 1.8, 0.55, "barrier filled[1]\n0 of 2 arrivals", INK, fill=0.06, size=8.5)
    arrow(ax, (1.15, 1.92), (2.98, 2.4), ORANGE, "waits", offset=(-0.15, 0.14))
    arrow(ax, (6.65, 1.13), (4.82, 0.62), BLUE, "waits", offset=(0.2, -0.14))
    arrow(ax, (6.65, 1.92), (4.82, 2.4), RED, linestyle="--")
    words(ax, 6.42, 2.5, "should arrive, and has\npassed the line without", 8, colour=RED)
    arrow(ax, (1.15, 1.13), (2.98, 0.62), SOFT, linestyle="--")
    words(ax, 1.35, 0.55, "would start the copies\nthat arrive, once it is free", 8, colour=SOFT)
    words(ax, 3.9, 1.52, "begin at any wait, follow the arrows:\nthe red one is the mistake", 8.5)
