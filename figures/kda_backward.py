"""Figures of chapter 17c: the backward pass of a recurrence, and gates per channel."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, RED, SKY, SOFT, arrow, box, drawing, words


@drawing(7.8, 4.0)
def backward_flow(ax):
    """The backward pass over chunks: states from the first to the last, their gradients back, and the rest at once."""
    wide, gap, left = 1.35, 0.58, 1.75
    places = [left + i * (wide + gap) for i in range(3)]
    top, middle, bottom = 3.1, 1.85, 0.35
    for y, name, what in (
        (top, "forward, again", "in order"),
        (middle, "backward", "in order,\nfrom the end"),
        (bottom, "the rest", "all chunks\nat once"),
    ):
        words(ax, 0.1, y + 0.42, name, 9.5, ha="left", weight="bold")
        words(ax, 0.1, y + 0.1, what, 8.5, ha="left", colour=SOFT)
    for i, x in enumerate(places):
        words(ax, x + wide / 2, 3.85, f"chunk {i + 1}", 9, colour=SOFT)
        box(ax, x, top, wide, 0.5, "E, then S", BLUE, fill=0.3, size=9)
        box(ax, x, middle, wide, 0.5, "dE, dR, then dS", ORANGE, fill=0.3, size=9)
        box(ax, x, bottom, wide, 0.62, "dq, dk, dw, dg\nof 64 tokens", GREEN, fill=0.25, size=9)
        arrow(ax, (x - gap + 0.04, top + 0.25), (x - 0.04, top + 0.25), BLUE)
        words(ax, x - gap / 2, top + 0.4, f"$S_{i}$" if i else "0", 9, colour=BLUE)
        arrow(ax, (x + wide + gap - 0.04, middle + 0.25), (x + wide + 0.04, middle + 0.25), ORANGE)
        text = f"$dS_{i + 1}$" if i < 2 else "0"
        words(ax, x + wide + gap / 2, middle + 0.4, text, 9, colour=ORANGE)
        # States pass the backward chain on the left; its own results leave on the right.
        arrow(ax, (x + 0.25, top - 0.03), (x + 0.25, middle + 0.53), SKY, style="-")
        arrow(ax, (x + 0.25, middle - 0.03), (x + 0.25, bottom + 0.65), SKY)
        words(ax, x + 0.33, middle + 0.78, f"$S_{i}$, $E$: kept", 8.5, ha="left", colour=INK)
        arrow(ax, (x + 1.1, middle - 0.03), (x + 1.1, bottom + 0.65), ORANGE)
        words(ax, x + 1.03, middle - 0.42, f"$dS_{i + 1}$, $dR$", 8.5, ha="right", colour=INK)
    words(ax, left, 0.12, "dR is the gradient of the values", 8.5, ha="left", colour=SOFT)


@drawing(7.8, 2.75)
def parted_pairs(ax):
    """The pairs of 16 tokens, by the power of two at which they part; one square with its reference row."""
    size, cell, left, bottom = 16, 0.145, 0.55, 0.2
    colours = {8: BLUE, 4: GREEN, 2: ORANGE, 1: RED}
    for t in range(size):
        for s in range(size):
            x, y = left + s * cell, bottom + (size - 1 - t) * cell
            block = 1 << ((t ^ s).bit_length() - 1) if t != s else 0
            colour, fill = (colours[block], 0.4) if t > s else (PALE, 0.9 if t == s else 0.25)
            box(ax, x, y, cell - 0.015, cell - 0.015, colour=colour, fill=fill, linewidth=0.4)
    words(ax, left - 0.08, bottom + size * cell / 2, "token t, which reads", 8.5, ha="right", rotation=90)
    words(ax, left + size * cell / 2, 2.64, "token j, which writes", 8.5)
    for i, (block, colour) in enumerate(colours.items()):
        y = 2.2 - 0.24 * i
        box(ax, 3.15, y, 0.17, 0.15, colour=colour, fill=0.4)
        words(ax, 3.4, y + 0.07, f"part at {block}", 8.5, ha="left")
    row, width, start = 0.42, 0.2, 3.45
    words(ax, start, 1.3, "tokens 0 to 15, and the pairs that part at 8:", 8.5, ha="left", colour=SOFT)
    for i in range(size):
        colour = BLUE if i < 8 else SKY
        box(ax, start + i * width, row + 0.1, width - 0.02, 0.2, colour=colour, fill=0.3, linewidth=0.5)
    middle = start + 8 * width - 0.01
    ax.plot([middle, middle], [row, row + 0.48], color=INK, linewidth=1.6)
    words(ax, middle, row + 0.56, "the middle", 8.5)
    arrow(ax, (middle - 0.04, row - 0.07), (start + 2.5 * width, row - 0.07), BLUE)
    arrow(ax, (middle + 0.04, row - 0.07), (start + 12.5 * width, row - 0.07), SKY)
    words(ax, start + 3.5 * width, row - 0.22, "z[j]: gates after j", 8.5, colour=SOFT)
    words(ax, start + 12.2 * width, row - 0.22, "z[t]: gates up to t", 8.5, colour=SOFT)
    text = "exp(z[t] + z[j]) is the pair's decay:\nboth sums are at most 0, and each\nbelongs to one token"
    words(ax, 4.55, 2.0, text, 8.5, ha="left")
