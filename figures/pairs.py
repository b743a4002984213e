"""Figures of chapter 19b: pairs."""

from figures._chart import LOAD, MULTIPLY, bar, chart, lanes, numbered
from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SOFT, arrow, box, drawing, words


@drawing(7.8, 4.3)
def pairs_halves(ax):
    """A pair of blocks: each holds its rows of A and half of B's columns, and one thread multiplies for both."""
    for block, left in enumerate((0.25, 4.1)):
        box(ax, left, 0.3, 3.45, 3.45, colour=SOFT, fill=0.04)
        words(ax, left + 0.05, 3.95, f"block {block} of the pair, on an SM of its own", 8.5, weight="bold", ha="left")
        words(ax, left + 0.15, 3.57, "shared memory", 7.5, colour=SOFT, ha="left")
        box(ax, left + 0.2, 2.65, 1.4, 0.75, f"A: rows of block {block}\n128 x 64", colour=BLUE, size=7.5)
        half = (ORANGE, GREEN)[block]
        box(ax, left + 1.85, 2.65, 1.4, 0.75, f"B: half {block}\n64 x 128", colour=half, size=7.5)
        box(ax, left + 0.2, 1.6, 3.05, 0.45, "tensor cores", colour=INK, size=8.5)
        box(ax, left + 0.2, 0.6, 1.52, 0.5, "columns of half 0", colour=ORANGE, fill=0.22, size=7.5)
        box(ax, left + 1.72, 0.6, 1.53, 0.5, "columns of half 1", colour=GREEN, fill=0.22, size=7.5)
        arrow(ax, (left + 0.55, 2.65), (left + 0.55, 2.05), BLUE)
        arrow(ax, (left + 1.72, 1.6), (left + 1.72, 1.1), PINK, style="<|-|>")
        words(ax, left + 0.2, 0.44, f"tensor memory: sums of block {block}'s rows", 7.5, colour=SOFT, ha="left")
    arrow(ax, (2.65, 2.65), (2.65, 2.05), ORANGE)
    arrow(ax, (3.3, 2.65), (5.2, 2.05), ORANGE)
    arrow(ax, (6.95, 2.65), (6.95, 2.05), GREEN)
    arrow(ax, (6.1, 2.65), (3.2, 2.05), GREEN)
    text = "one thread of block 0 starts a product of 256 x 256; each half of B lies in one shared memory only"
    words(ax, 3.9, 0.12, text, 7.8)


SMS, TILES = 4, 16
TIMES = (1.0, 1.0, 1.6, 1.0)  # Time of a tile on each SM: the third one is slower.


def schedule(dynamic: bool, tiles: int = TILES, times=TIMES):
    """(tile, SM, start, end) of each tile. Blocks that are free at the same time take tiles in the order of SMs."""
    free, run = [0.0] * len(times), []
    for tile in range(tiles):
        sm = free.index(min(free)) if dynamic else tile % len(times)
        run.append((tile, sm, free[sm], free[sm] + times[sm]))
        free[sm] += times[sm]
    return run


@chart(height=4.3, nrows=2, sharex=True)
def pairs_launch(axes):
    """Tiles shared out from the start, or handed out by hardware to whichever block is free; one SM is slower."""
    cases = (
        (False, "from the start: block b has the tiles b, b + 4, b + 8 ...; the slow SM decides"),
        (True, "launch control: a block that has done a tile cancels the launch of the next one, and does its tile"),
    )
    for ax, (dynamic, title) in zip(axes, cases, strict=True):
        run = schedule(dynamic)
        for tile, sm, start, end in run:
            bar(ax, sm, start, end, f"{tile}", LOAD if tile < SMS else MULTIPLY)
        ax.axvline(max(end for *_, end in run), color=RED, linewidth=1.2)
        lanes(ax, numbered("SM", SMS), title)
    axes[-1].set(xlim=(0, 6.7), xlabel="time (schematic); pale: tiles of blocks that were really launched")


@drawing(7.8, 3.5)
def pairs_scales(ax):
    """MXFP8: 32 values of a row share a power of two; and the way of values and scales to the tensor cores."""
    words(ax, 0.25, 3.28, "a row of an operand", 8.5, weight="bold", ha="left")
    for block in range(4):
        left = 0.25 + 1.85 * block
        for i in range(8):
            box(ax, left + 0.2 * i, 2.62, 0.2, 0.3, colour=BLUE, fill=0.22, linewidth=0.7)
        words(ax, left + 0.8, 3.05, "32 values, e4m3", 7.5, colour=BLUE)
        box(ax, left + 0.5, 2.14, 0.6, 0.28, "scale", colour=ORANGE, fill=0.25, size=7.5)
        arrow(ax, (left + 0.8, 2.42), (left + 0.8, 2.62), ORANGE, width=1.0)
    text = "a scale is 8 bits, e8m0: a power of two and nothing else; a step of K has 128 values and 4 scales a row"
    words(ax, 3.85, 1.93, text, 7.8, colour=SOFT)
    for x, name in ((0.25, "global memory"), (2.25, "shared memory"), (4.2, "tensor memory"), (6.2, "tensor cores")):
        words(ax, x + 0.65, 1.55, name, 8, weight="bold")
    for x in (0.25, 2.25):
        box(ax, x, 0.95, 1.3, 0.4, "values", colour=BLUE, size=8)
        box(ax, x, 0.35, 1.3, 0.4, "scales", colour=ORANGE, size=8)
    box(ax, 4.2, 0.35, 1.3, 0.4, "scales", colour=ORANGE, size=8)
    box(ax, 6.2, 0.35, 1.35, 1.0, "value x value\nx scale x scale\nadded in f32", colour=INK, size=7.8)
    arrow(ax, (1.55, 1.15), (2.25, 1.15), BLUE, "TMA", size=7.5)
    arrow(ax, (1.55, 0.55), (2.25, 0.55), ORANGE, "TMA", size=7.5)
    arrow(ax, (3.55, 1.15), (6.2, 1.15), BLUE)
    arrow(ax, (3.55, 0.55), (4.2, 0.55), ORANGE, "copy", size=7.5)
    arrow(ax, (5.5, 0.55), (6.2, 0.55), PINK)
    words(ax, 3.87, 0.12, "tcgen05.cp, in the order of the products", 7.5, colour=SOFT)
    words(ax, 6.87, 0.12, "sums go to tensor memory", 7.5, colour=GREEN)
