"""Figures of chapter 23: the loss."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, words

TOKENS, HIDDEN, VOCABULARY = 8192, 2048, 131072  # As timed.


@drawing(7.8, 1.75)
def largest_array(ax):
    """The product of the last layer, with its arrays drawn to scale: the logits are its largest."""
    scale = 6.3 / VOCABULARY  # Inches per row or column.
    wide, deep, tall = VOCABULARY * scale, HIDDEN * scale, TOKENS * scale
    left, bottom = 1.32, 0.42
    box(ax, left, bottom, wide, tall, f"logits: {TOKENS:,} × {VOCABULARY:,}", ORANGE, fill=0.35)
    box(ax, left, bottom + tall + 0.12, wide, deep, colour=BLUE, fill=0.5)
    box(ax, left - 0.12 - deep, bottom, deep, tall, colour=GREEN, fill=0.5)
    words(ax, left, bottom + tall + 0.4, f"weight$^T$: {HIDDEN:,} × {VOCABULARY:,}", 9, ha="left", colour=BLUE)
    words(ax, left - 0.3 - deep, bottom + tall / 2, f"hidden:\n{TOKENS:,} × {HIDDEN:,}", 8.5, ha="right", colour=GREEN)
    words(ax, left, 0.2, "drawn to scale: rows and columns of all three arrays", 8, ha="left", colour=SOFT)


@drawing(7.8, 2.9)
def one_row(ax):
    """The statistics of a row: each thread keeps a maximum and a sum per place, and exchanges them once, at the end."""
    left, width, height, top = 0.15, 1.14, 0.3, 2.2
    for i in range(6):
        name = "…" if i == 4 else "last piece" if i == 5 else f"piece {i}"
        box(ax, left + i * (width + 0.06), top, width, height, name, SKY, fill=0.3, size=8)
    words(ax, left, 2.76, "a row of logits, 1,024 columns to a piece", 8.5, ha="left")
    label = left + 1.2 + 0.8
    box(ax, label, top, 0.07, height, colour=RED, fill=0.9)
    for i in range(6):
        x = left + i * (width + 0.06) + width / 2
        arrow(ax, (x, top - 0.02), (x, 1.75), SOFT, width=1)
    box(ax, left, 1.28, 7.14, 0.44, "each thread, for each of its 8 places in a piece:  m = the largest so far,   "
        "l = the sum of $e^{z - m}$", BLUE, fill=0.16, size=8.5)  # fmt: skip
    arrow(ax, (2.0, 1.26), (2.0, 0.86), BLUE)
    words(ax, 2.12, 1.06, "once per row: exchange", 8, ha="left", colour=BLUE)
    box(ax, 0.75, 0.42, 2.5, 0.42, "m, l of the row:  lse = m + log l", BLUE, fill=0.16, size=8.5)
    around = [(label + 0.035, top + height), (label + 0.035, 2.6), (7.55, 2.6), (7.55, 0.63)]
    ax.plot(*zip(*around, strict=True), color=RED, linewidth=1.2)
    arrow(ax, around[-1], (7.31, 0.63), RED, width=1.2)
    words(ax, 6.3, 1.06, "one more load: the label's logit", 8, colour=RED)
    box(ax, 5.05, 0.42, 2.24, 0.42, "$z_{label}$", RED, fill=0.12, size=9)
    words(ax, 4.15, 0.63, "loss  =  lse  −  $z_{label}$", 10)
    words(
        ax,
        left,
        0.14,
        "8,192 rows, 8,192 blocks of one warpgroup: no block waits for another",
        8,
        ha="left",
        colour=SOFT,
    )


@drawing(7.8, 2.1)
def in_place(ax):
    """The gradient of a row in an array of its own, and in the place of the logits."""
    for x, title, own in ((0.2, "an array of its own", True), (4.2, "in place", False)):
        words(ax, x, 1.93, title, 9.5, ha="left", weight="bold")
        box(ax, x, 1.2, 2.6, 0.34, "logits z" if own else "", SKY, fill=0.3)
        if own:
            box(ax, x, 0.38, 2.6, 0.34, "gradient g", ORANGE, fill=0.3)
            arrow(ax, (x + 1.3, 1.18), (x + 1.3, 0.74), INK)
            words(ax, x + 1.42, 0.96, "one read, one write", 8, ha="left")
            words(ax, x, 0.16, "two arrays of N × V are in memory", 8, ha="left", colour=SOFT)
        else:
            box(ax, x, 1.2, 1.1, 0.34, "g", ORANGE, fill=0.75)
            words(ax, x + 1.85, 1.37, "logits z")
            arrow(ax, (x + 1.6, 1.18), (x + 0.6, 1.18), INK, connectionstyle="arc3,rad=-0.6")
            words(ax, x + 1.1, 0.66, "the block that loads a piece stores\nits gradient there; nobody else reads it", 8)
            words(ax, x, 0.16, "one array; as many bytes are moved", 8, ha="left", colour=SOFT)


@drawing(7.8, 1.95)
def three_products(ax):
    """The three products of a step: logits, and from their gradient those of the weight and of the hidden values."""
    parts = (
        (0.15, "1: logits", "hidden", GREEN, "weight$^T$", BLUE, "z", SKY, "N × V"),
        (2.72, "2: weight's gradient", "g$^T$", ORANGE, "hidden", GREEN, "d_weight", PINK, "V × H"),
        (5.29, "3: hidden's gradient", "g", ORANGE, "weight", BLUE, "d_hidden", PINK, "N × H"),
    )
    for x, title, a, a_colour, b, b_colour, out, out_colour, shape in parts:
        words(ax, x, 1.78, title, 9.5, ha="left", weight="bold")
        box(ax, x, 0.9, 0.62, 0.6, a, a_colour, fill=0.3, size=8.5)
        words(ax, x + 0.72, 1.2, "·", 14)
        box(ax, x + 0.82, 0.9, 0.72, 0.6, b, b_colour, fill=0.3, size=8)
        words(ax, x + 1.65, 1.2, "=", 12)
        box(ax, x + 1.76, 0.9, 0.62, 0.6, out, out_colour, fill=0.3, size=7.6)
        words(ax, x + 2.07, 0.77, shape, 8, colour=SOFT)
    words(ax, 0.15, 0.43, "z becomes g in place, between products 1 and 2. Product 2 adds over the N tokens, "
          "product 3 over the vocabulary.", 8.5, ha="left")  # fmt: skip
    words(
        ax,
        0.15,
        0.17,
        "Each has 2 N H V operations, so forward and backward have 6 N H V.",
        8.5,
        ha="left",
        colour=SOFT,
    )


@drawing(3.9, 2.6)
def blocks_of_rows(ax):
    """Blocks of rows, over which the gradient of the weight is a sum."""
    _rows(ax)


@drawing(7.8, 2.6)
def blocks_of_logits(ax):
    """Blocks of rows, over which the gradient of the weight is a sum, and blocks of columns, which have their own."""
    _rows(ax)
    words(ax, 4.2, 2.42, "and, for d_weight, blocks of columns", 9.5, ha="left", weight="bold")
    box(ax, 4.2, 1.1, 3.2, 1.05, colour=SOFT, fill=0.03, linestyle="--")
    for i in range(8):
        box(ax, 4.2 + 0.4 * i, 1.1, 0.4, 1.05, colour=ORANGE if i == 2 else SOFT, fill=0.4 if i == 2 else 0.02,
            linewidth=0.6)  # fmt: skip
        box(ax, 4.2 + 0.4 * i, 0.48, 0.4, 0.32, colour=PINK, fill=0.5 if i == 2 else 0.1, linewidth=0.6)
    arrow(ax, (5.2, 1.08), (5.2, 0.82), PINK)
    words(ax, 4.2, 0.22, "no sum, but the logits are computed a second time", 8, ha="left", colour=SOFT)


def _rows(ax):
    words(ax, 0.2, 2.42, "blocks of rows", 9.5, ha="left", weight="bold")
    box(ax, 0.2, 1.1, 3.2, 1.05, colour=SOFT, fill=0.03, linestyle="--")
    for i in range(4):
        y = 1.1 + 0.2625 * (3 - i)
        box(ax, 0.2, y, 3.2, 0.2625, "logits of block 1, then g" if i == 1 else "", ORANGE if i == 1 else SOFT,
            fill=0.4 if i == 1 else 0.02, size=8, linewidth=0.6)  # fmt: skip
    arrow(ax, (1.8, 1.08), (1.8, 0.82), PINK)
    box(ax, 0.2, 0.48, 3.2, 0.32, "d_weight, all of it: a sum over blocks", PINK, fill=0.25, size=8)
    words(ax, 0.2, 0.22, "three products, and the sum is read and written per block", 8, ha="left", colour=SOFT)


@drawing(7.8, 2.75)
def shards(ax):
    """The vocabulary split across four GPUs: three numbers per row are combined, and one gradient is summed."""
    width = 1.62
    for i in range(4):
        x = 0.2 + i * 1.88
        words(ax, x + width / 2, 2.6, f"GPU {i}", 9, weight="bold")
        box(ax, x, 2.1, width, 0.34, "hidden (all rows)", GREEN, fill=0.25, size=8)
        box(ax, x, 1.68, width, 0.34, "weight: V/4 rows", BLUE, fill=0.25, size=8)
        box(ax, x, 1.26, width, 0.34, "logits: V/4 columns", SKY, fill=0.3, size=8)
        arrow(ax, (x + width / 2, 1.24), (x + width / 2, 1.02), INK)
    box(ax, 0.2, 0.66, 3 * 1.88 + width, 0.34, "three numbers per row are combined across the GPUs:  m,  l,  the "
        "label's logit", RED, fill=0.12, size=8.5)  # fmt: skip
    words(ax, 0.2, 0.42, "then each GPU has lse, and makes g of its own columns in place", 8.5, ha="left")
    words(ax, 0.2, 0.17, "d_weight stays where its rows are;  d_hidden is a sum over V, so it is all-reduced: N × H "
          "numbers", 8.5, ha="left", colour=SOFT)  # fmt: skip
