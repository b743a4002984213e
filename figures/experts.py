"""Figures of chapter 16b: experts."""

from figures._chart import chart, numbered, tile, tracks
from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, words
from lab import plot

START, END, STEP = 70, 330, 64  # The rows of the group in the middle.


@drawing(7.8, 3.7)
def experts_sums(ax):
    """Sums along the rows of a group: steps of 64 rows from a multiple of 8 on; the first and the last are masked."""
    shown = 0, 420
    left, scale = 0.95, 0.0158
    x_of = lambda row: left + scale * row
    for y, name in ((2.75, "rows of lhs"), (2.2, "rows of rhs")):
        words(ax, left - 0.1, y + 0.17, name, 8.5, ha="right")
        for start, end, colour, text in (
            (shown[0], START, GREEN, "the group before"),
            (START, END, BLUE, f"this group: rows {START} to {END}"),
            (END, shown[1], ORANGE, "the next group"),
        ):
            box(ax, x_of(start), y, scale * (end - start) - 0.02, 0.36, text, colour, 0.25, size=8)
    first = START & ~7
    words(ax, left - 0.1, 1.52, "steps", 8.5, ha="right")
    for number, row in enumerate(range(first, END, STEP)):
        foreign = ((row, min(START, row + STEP)), (max(END, row), row + STEP))
        foreign = [(a, b) for a, b in foreign if b > a]
        box(ax, x_of(row), 1.36, scale * STEP - 0.02, 0.34, f"step {number}", RED if foreign else SOFT, 0.12, size=8)
        for a, b in foreign:
            box(ax, x_of(a), 1.36, scale * (b - a) - 0.01, 0.34, colour=RED, fill=0.55, linewidth=0.5)
    for at in (START, END):
        ax.plot([x_of(at)] * 2, [1.3, 3.2], color=BLUE, linewidth=0.9, linestyle=":")
        words(ax, x_of(at), 3.28, f"{at}", 8, colour=BLUE)
    arrow(ax, (x_of(first), 0.95), (x_of(first), 1.33), RED, width=1.1)
    text = f"row {first}, the multiple of 8 before {START}:\nMosaic's tiled view begins at one"
    words(ax, x_of(first), 0.78, text, 8, colour=RED)
    text = "orange-red rows are overwritten with zeros in shared\nmemory, in lhs and in rhs, before they are multiplied"
    words(ax, x_of(END) + 0.1, 0.78, text, 8, colour=RED)
    text = "o[group] += lhs[step].T @ rhs[step]: in all steps between, every row is this group's"
    words(ax, 4.1, 0.25, text, 8.5)


BLOCKS, TILE, COLUMNS = 6, 64, 2  # Rows of a tile, and of a step of a sum; tiles side by side, in both.
SIZES = {  # Rows of nine groups, 1728 together.
    "equal": (192,) * 9,
    "uneven": (60, 400, 120, 50, 380, 250, 130, 250, 88),
    "one has all": (0, 1728, 0, 0, 0, 0, 0, 0, 0),
}


def products(sizes):
    """(block, start, length, its useful part, group) of each tile: all take as long as another."""
    tiles = [
        (group, min(TILE, size - first) / TILE)
        for group, size in enumerate(sizes)
        for first in range(0, size, TILE)
        for _ in range(COLUMNS)
    ]
    return [(i % BLOCKS, i // BLOCKS, 1, useful, group) for i, (group, useful) in enumerate(tiles)]


def sums(sizes, largest_first: bool):
    """The same of tiles that take a step for each 64 rows of their group, in turn or back and forth."""
    order = sorted(range(len(sizes)), key=lambda group: -sizes[group] if largest_first else group)
    done, placed = [0] * BLOCKS, []
    for i, group in enumerate(group for group in order for _ in range(COLUMNS)):
        turn, block = divmod(i, BLOCKS)
        block = BLOCKS - 1 - block if largest_first and turn % 2 else block
        length = -(-sizes[group] // TILE)
        placed.append((block, done[block], length, sizes[group] / TILE, group))
        done[block] += length
    return placed


@chart(7.8, 5.6, nrows=3, ncols=3, sharey=True)
def experts_waiting(axes):
    """Blocks that wait: products and sums of equal, uneven and one-sided groups on six blocks, dealt in two ways."""
    rows = (
        ("product; time in tiles", products),
        ("sums, in the order of the groups; time in steps of 64 rows", lambda sizes: sums(sizes, False)),
        ("sums, the largest first, back and forth; time in steps of 64 rows", lambda sizes: sums(sizes, True)),
    )
    for row, (name, place) in zip(axes, rows, strict=True):
        placed_of = {kind: place(sizes) for kind, sizes in SIZES.items()}
        ends = {kind: max(start + length for _, start, length, *_ in placed) for kind, placed in placed_of.items()}
        for ax, (kind, placed) in zip(row, placed_of.items(), strict=True):
            for block, start, length, useful, group in placed:
                colour, y = plot.COLOURS[group % 6], block - 0.42
                tile(ax, start, y, length, 0.84, colour, alpha=0.2)
                tile(ax, start, y, useful, 0.84, colour, alpha=0.6)
                text = str(group) if length else ""
                tile(ax, start, y, length, 0.84, "none", text, 6.5, edgecolor=plot.CARD, linewidth=0.8)
            share = sum(useful for *_, useful, _ in placed) / ends[kind] / BLOCKS
            ax.axvline(ends[kind], color=RED, linewidth=1.3)
            tracks(ax, numbered("block", BLOCKS), f"{kind}: {share:.0%} useful", 8, grid=False)
            ax.set_xlim(0, 1.03 * max(ends.values()))
            ax.tick_params(labelsize=7)
        row[1].set_xlabel(name, fontsize=8)


@drawing(7.8, 3.9)
def experts_scales(ax):
    """Scales of blocks: one for each row and 128 values of K of lhs, one for each square of 128 of a matrix; sums."""
    colours = BLUE, ORANGE, GREEN, PINK
    _heading(ax, 1.35, "lhs: 1 x 128", "a scale for each row and step of K")
    for step, colour in enumerate(colours):
        for row in range(6):
            fill = (0.5, 0.2, 0.35, 0.12, 0.42, 0.27)[(row + 2 * step) % 6]
            box(ax, 0.25 + 0.56 * step, 2.95 - 0.25 * row, 0.52, 0.21, colour=colour, fill=fill, linewidth=0.7)
        words(ax, 0.51 + 0.56 * step, 3.27, f"step {step}", 7, colour=colour)
    words(ax, 1.35, 1.5, "K", 8, colour=SOFT)
    arrow(ax, (1.5, 1.5), (2.3, 1.5), SOFT, width=0.8)
    _heading(ax, 4.05, "a matrix: 128 x 128", "a scale for each square")
    for step, colour in enumerate(colours):
        y = 2.72 - 0.44 * step
        for square in range(2):
            fill = (0.45, 0.2)[(square + step) % 2]
            box(ax, 3.2 + 0.86 * square, y, 0.82, 0.4, colour=colour, fill=fill, linewidth=0.7)
        words(ax, 3.1, y + 0.2, f"step {step}", 7, ha="right", colour=colour)
    words(ax, 4.05, 1.2, "columns", 8, colour=SOFT)
    _heading(ax, 6.4, "sums of a tile", "in the registers of a warpgroup")
    box(ax, 5.45, 2.5, 0.85, 0.62, "products\nof step 1", ORANGE, 0.25, size=8)
    box(ax, 6.65, 2.5, 0.95, 0.62, "float32\nsums", SKY, 0.25, size=8)
    arrow(ax, (6.32, 2.81), (6.63, 2.81), RED)
    words(ax, 6.4, 2.22, "times both scales, then added:\nby the CUDA cores", 8, colour=RED)
    words(ax, 6.4, 1.72, "each step begins\nwith an empty accumulator", 8, colour=SOFT)
    wide, add, left = 0.68, 0.26, 1.3
    for wg, y in enumerate((0.75, 0.38)):
        words(ax, left - 0.1, y + 0.14, f"warpgroup {wg}", 8, ha="right")
        for step, colour in enumerate(colours):
            x = left + (2 * step + wg) * wide
            box(ax, x, y, wide - 0.03, 0.28, f"step {step}", colour, 0.3, size=7.5)
            box(ax, x + wide, y, add - 0.03, 0.28, "+", RED, 0.15, size=8)
    text = "the plan: one warpgroup adds while the other's products keep the tensor cores busy"
    words(ax, left + 1.3, 0.18, text, 7.5, ha="left", colour=SOFT)
    words(ax, left, 0.18, "time", 7.5, ha="left", colour=SOFT)
    arrow(ax, (left + 0.3, 0.18), (left + 1.1, 0.18), SOFT, width=0.8)


def _heading(ax, x, title, what):
    words(ax, x, 3.7, title, weight="bold")
    words(ax, x, 3.47, what, 8, colour=SOFT)


CHOSEN = ((2, 0), (1, 2), (2, 3), (0, 2))  # The two experts of each of four tokens.


@drawing(7.8, 4.0)
def experts_layer(ax):
    """A layer of experts: tokens are routed, rows are sorted by expert, multiplied in groups, and summed back."""
    colours = BLUE, GREEN, ORANGE, PINK
    high, xs = 0.3, (0.15, 1.2, 2.55, 3.95, 5.35, 6.75)
    names = ("tokens", "route", "permute", "gate and up,\nSwiGLU", "down", "combine")
    for x, name in zip(xs, names, strict=True):
        words(ax, x + 0.42, 3.72, name, 8.5, weight="bold")
    for token, chosen in enumerate(CHOSEN):
        y = 2.6 - 0.55 * token
        box(ax, xs[0], y, 0.8, high, f"token {token}", SOFT, 0.12, size=7.5)
        for slot, expert in enumerate(chosen):
            box(ax, xs[1] + 0.42 * slot, y, 0.38, high, str(expert), colours[expert], 0.35, size=8)
        box(ax, xs[5] + 0.05, y, 0.85, high, f"token {token}", SOFT, 0.12, size=7.5)
        arrow(ax, (xs[0] + 0.82, y + high / 2), (xs[1] - 0.02, y + high / 2), SOFT, width=0.9)
    pairs = sorted((expert, token, slot) for token, chosen in enumerate(CHOSEN) for slot, expert in enumerate(chosen))
    for place, (expert, token, slot) in enumerate(pairs):
        y, token_y, colour = 3.1 - 0.36 * place, 2.6 - 0.55 * token, colours[expert]
        middle = y + high / 2
        for x, text in zip(xs[2:5], (f"of token {token}", "", ""), strict=True):
            box(ax, x, y, 0.9, high, text, colour, 0.35, size=7)
        start = xs[1] + 0.82, token_y + high * (0.7 - 0.4 * slot)
        arrow(ax, start, (xs[2] - 0.02, middle), colour, width=0.8)
        for a, b in ((xs[2], xs[3]), (xs[3], xs[4])):
            arrow(ax, (a + 0.92, middle), (b - 0.02, middle), colour, width=0.8)
        arrow(ax, (xs[4] + 0.92, middle), (xs[5] + 0.03, token_y + high / 2), colour, width=0.8)
    words(ax, xs[1] + 0.4, 0.6, "the experts of\neach token", 7.5, colour=SOFT)
    words(ax, xs[2] + 0.45, 0.2, "rows sorted by expert:\ngroups", 7.5, colour=SOFT)
    words(ax, xs[3] + 1.15, 0.2, "two grouped products,\na matrix for each colour", 7.5, colour=SOFT)
    words(ax, xs[5] + 0.42, 0.45, "each token's rows,\nweighted and\nsummed", 7.5, colour=SOFT)
