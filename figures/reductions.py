"""Figures of chapter 3: reductions."""

from figures._chart import chart, label
from figures._draw import BLUE, INK, ORANGE, RED, places
from lab import plot


def slab(ax, x, y, width, height, text, colour=INK, size=8, fill=plot.CARD, line=1.5):
    """A box with its first corner at (x, y) and `text` in its middle."""
    ax.broken_barh([(x, width)], (y, height), facecolor=fill, edgecolor=colour, linewidth=line)
    label(ax, x + width / 2, y + height / 2, text, size)


def go(ax, start, end, colour=INK, text="", line=1.5):
    """An arrow, and `text` right of its middle."""
    ax.annotate("", end, start, arrowprops=dict(arrowstyle="->", color=colour, linewidth=line))
    if text:
        label(ax, start[0] + 0.04, (start[1] + end[1]) / 2, text, ha="left")


# Name, the warpgroups that share a row, then for each pass: does it read, does it write, what it is for.
KERNELS = (
    ("three passes", 1, [(True, False, "max"), (True, False, "sum"), (True, True, "write")]),
    ("row in registers", 1, [(True, True, "max,\nsum,\nwrite")]),
    ("online", 1, [(True, False, "max\nand sum"), (True, True, "write")]),
    ("row shared by 4\nwarpgroups", 4, [(True, True, "max,\nsum,\nwrite")]),
)


@chart(7.5, 3.4, ncols=len(KERNELS), sharey=True)
def softmax_traffic(axes):
    """Memory traffic of each softmax of chapter 3: an arrow for each pass over the row."""
    for ax, (name, split, passes) in zip(axes, KERNELS, strict=True):
        _kernel(ax, passes, split)
        ax.set_title(name, fontsize=10)
        moved = sum(read + write for read, write, _ in passes)
        label(ax, 0.5, 2.62, f"{moved} × the matrix", 9, va="top", colour=RED)
    label(axes[0], -0.12, 0.13, "HBM", ha="right")
    label(axes[0], -0.12, 1.55, "regis-\nters", ha="right")


def _kernel(ax, passes, split):
    slab(ax, 0, 0, 1, 0.26, "a row", fill=plot.FAINT, line=1.0)
    width = 1 / len(passes)
    for i, (_, write, purpose) in enumerate(passes):
        room = width / split
        for part in range(split):
            x = i * width + part * room
            slab(ax, x + 0.05 * room, 1.2, 0.9 * room, 0.7, "" if split == 1 else f"1/{split}", BLUE, line=1.3)
            go(ax, (x + 0.3 * room, 0.28), (x + 0.3 * room, 1.18), BLUE)
            if write:
                go(ax, (x + 0.7 * room, 1.18), (x + 0.7 * room, 0.28), ORANGE)
        label(ax, i * width + width / 2, 2.0, purpose, va="top")
    ax.set(xlim=(-0.03, 1.03), ylim=(2.85, -0.1))
    ax.axis("off")


LANES, WARPS = 8, 4  # Lanes are those drawn; a warp has 32.


@chart(7.5, 4.3, ncols=2, width_ratios=(1.15, 1))
def butterfly(axes):
    """The sum of a row across a warpgroup: a butterfly of shuffles in each warp, then four words of shared memory."""
    left, right = axes
    _butterfly(left)
    _exchange(right)


def _in_box(ax, x, y, text, colour):
    ground = dict(boxstyle="round,pad=0.3", facecolor=plot.CARD, edgecolor=colour, linewidth=1.5)
    label(ax, x, y, text, bbox=ground)


def _butterfly(ax):
    """`LANES` threads; after step s each knows the sum of the 2 ** s lanes of its group, coloured alike."""
    steps = LANES.bit_length() - 1
    for step in range(steps):
        for lane in range(LANES):
            other = lane ^ (1 << step)
            ax.plot((lane, lane), (step, step + 1), color=INK, linewidth=1)
            ax.plot((other, lane), (step, step + 1), color=BLUE, linewidth=1)
        label(ax, LANES - 0.4, step + 0.5, f"xor {1 << step}", 9, ha="left", colour=BLUE)
    for step, lane in places(steps + 1, LANES):
        first = lane >> step << step
        held = f"{first}" if step == 0 else f"{first}–{first + (1 << step) - 1}"
        _in_box(ax, lane, step, held, plot.COLOURS[lane >> step] if step else INK)
    ax.set(xlim=(-0.6, LANES + 0.7), ylim=(steps + 0.4, -0.75))
    ax.text((LANES - 1) / 2, -0.55, f"lane ({LANES} of the warp's 32)", ha="center")
    ax.set_title("Inside a warp: shuffles")
    ax.axis("off")


def _exchange(ax):
    """Each warp's total goes to shared memory; every thread reads all four."""
    for warp in range(WARPS):
        colour = plot.COLOURS[warp]
        _in_box(ax, warp, 0, f"warp {warp}\ntotal", colour)
        _in_box(ax, warp, 1.5, f"s[{warp}]", colour)
        _in_box(ax, warp, 3, "row\ntotal", INK)
        ax.annotate("", (warp, 1.25), (warp, 0.35), arrowprops=dict(arrowstyle="->", color=colour))
        for reader in range(WARPS):
            go(ax, (warp, 1.72), (reader, 2.68), colour, line=0.8)
    for y, text in ((2.05, "barrier"), (3.5, "barrier\n(before s\nis reused)")):
        ax.plot((-0.5, WARPS - 0.5), (y, y), color=RED, linestyle="--", linewidth=1)
        label(ax, WARPS - 0.45, y, text, 7, ha="left", colour=RED)
    ax.set(xlim=(-0.6, WARPS + 0.3), ylim=(3.9, -0.75), title="Between four warps: shared memory")
    ax.axis("off")


@chart(7.5, 4.6, nrows=2, height_ratios=(1, 1.35))
def row_layouts(axes):
    """Which thread holds which columns: a row spread over a warpgroup, and rows that lie within a warp."""
    top, bottom = axes
    _spread(top)
    _within(bottom)


WARP_LANES, VEC = 32, 8


def _spread(ax):
    """One row of 2048 columns in WG_STRIDED((2048,), 8): thread t holds 8 neighbours in each strip of 1024."""
    of_warp = WARP_LANES * VEC
    strip = WARPS * of_warp
    for i in range(2):
        for warp in range(WARPS):
            start = i * strip + warp * of_warp
            slab(ax, start, 0, of_warp, 0.8, f"warp {warp}", plot.COLOURS[warp], 7.5, line=1.3)
        slab(ax, i * strip, 0, 2 * VEC, 0.8, "", fill=INK, line=1.3)
        ax.text(i * strip, 1.1, f"thread 0: columns {i * strip} to {i * strip + VEC - 1}", fontsize=8)
    ax.set(xlim=(-20, 2 * strip + 20), ylim=(1.6, -0.15), yticks=[], xticks=range(0, 2 * strip + 1, 256))
    ax.set_title("One row of 2048 columns over a warpgroup: WG_STRIDED((2048,), 8)")
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)


def _within(ax):
    """A tile of 8 rows of 128 columns: two rows a warp, 16 lanes a row, 8 columns a lane."""
    lanes = 16
    for row in range(8):
        for lane in range(lanes):
            number = str(row % 2 * lanes + lane)
            slab(ax, lane * VEC, row, VEC, 0.86, number, plot.COLOURS[row // 2], 7.5, line=1.3)
        label(ax, -1, row + 0.43, f"row {row}", ha="right")
    for warp in range(WARPS):
        label(ax, lanes * VEC + 1, 2 * warp + 0.93, f"warp {warp}", ha="left", colour=plot.COLOURS[warp])
    ax.set(xlim=(-9, lanes * VEC + 9), ylim=(8.1, -0.1), yticks=[], xticks=range(0, 129, 16), xlabel="column")
    ax.set_title("Eight rows of 128 columns, each within a warp: TILED (the number is the lane)")
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)


@chart(7.5, 2.5)
def row_pieces(ax):
    """A row whose length is not a multiple of the piece: the last piece is shifted back to end with the row."""
    cols, width = 1000, 512
    starts = [min(start, cols - width) for start in range(0, cols, width)]
    shared = starts[-2] + width - starts[-1]
    slab(ax, 0, 0, cols, 0.7, f"the row: {cols} columns", size=9, fill=plot.FAINT, line=1.0)
    for i, start in enumerate(starts):
        text = f"piece {i}: columns {start} to {start + width - 1}"
        slab(ax, start, 1 + i, width, 0.7, text, plot.COLOURS[i], 9)
    ax.broken_barh([(starts[-1], shared)], (2, 0.7), facecolor="none", edgecolor=RED, hatch="////", linewidth=0)
    text = f"{shared} columns that piece 0 holds too:\nstored twice, counted once"
    label(ax, starts[-1] - 20, 2.5, text, ha="right", colour=RED)
    ax.axvline(cols, color=INK, linewidth=1, linestyle=":")
    label(ax, cols + 5, 0.35, "next row:\nnot ours", ha="left")
    ax.set(xlim=(-10, cols + 110), ylim=(2.95, -0.15), yticks=[], xticks=[0, width, cols])
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
