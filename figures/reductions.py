"""Figures of chapter 3: reductions."""

from figures._chart import chart, label
from figures._draw import places
from lab import plot

# Name, then for each pass: does it read, does it write, what it is for.
KERNELS = {
    "three passes": [(True, False, "max"), (True, False, "sum"), (True, True, "write")],
    "row in registers": [(True, True, "max, sum, write")],
    "online": [(True, False, "max and sum"), (True, True, "write")],
    "row shared by 4\nwarpgroups": [(True, True, "max, sum, write")],
}
SPLIT = {"row shared by 4\nwarpgroups": 4}


@chart(7.5, 3.4, ncols=len(KERNELS), sharey=True)
def softmax_traffic(axes):
    """Memory traffic of each softmax of chapter 3: an arrow for each pass over the row."""
    for ax, (name, passes) in zip(axes, KERNELS.items(), strict=True):
        _kernel(ax, passes, SPLIT.get(name, 1))
        ax.set_title(name, fontsize=10)
        moved = sum(read + write for read, write, _ in passes)
        ax.text(0.5, 2.62, f"{moved} × the matrix", ha="center", va="top", fontsize=9, color=plot.BOUND)
    axes[0].text(-0.12, 0.13, "HBM", ha="right", va="center", fontsize=8)
    axes[0].text(-0.12, 1.55, "regis-\nters", ha="right", va="center", fontsize=8)


def _kernel(ax, passes, split):
    ax.broken_barh([(0, 1)], (0, 0.26), facecolor=plot.FAINT, edgecolor=plot.INK)
    label(ax, 0.5, 0.13, "a row", 8)
    width = 1 / len(passes)
    for i, (_, write, purpose) in enumerate(passes):
        left, room = i * width, width / split
        for part in range(split):
            x = left + part * room
            box = (x + 0.05 * room, 0.9 * room)
            ax.broken_barh([box], (1.2, 0.7), facecolor=plot.CARD, edgecolor=plot.OURS, linewidth=1.3)
            ax.annotate("", (x + 0.3 * room, 1.18), (x + 0.3 * room, 0.28), arrowprops=_arrow(plot.OURS))
            if write:
                ax.annotate("", (x + 0.7 * room, 0.28), (x + 0.7 * room, 1.18), arrowprops=_arrow(plot.COLOURS[1]))
        ax.text(left + width / 2, 2.0, purpose.replace(", ", ",\n").replace(" and ", "\nand "), ha="center", va="top",
                fontsize=8)  # fmt: skip
    ax.set(xlim=(-0.03, 1.03), ylim=(2.85, -0.1))
    ax.axis("off")


def _arrow(colour):
    return dict(arrowstyle="->", color=colour, linewidth=1.5)


LANES = 8  # Drawn; a warp has 32.
WARPS = 4


@chart(7.5, 4.3, ncols=2, width_ratios=(1.15, 1))
def butterfly(axes):
    """The sum of a row across a warpgroup: a butterfly of shuffles in each warp, then four words of shared memory."""
    left, right = axes
    _butterfly(left)
    _exchange(right)


def _butterfly(ax):
    """`LANES` threads; after step s each knows the sum of the 2 ** s lanes of its group, coloured alike."""
    steps = LANES.bit_length() - 1
    for step in range(steps):
        for lane in range(LANES):
            other = lane ^ (1 << step)
            ax.plot((lane, lane), (step, step + 1), color=plot.INK, linewidth=1)
            ax.plot((other, lane), (step, step + 1), color=plot.OURS, linewidth=1)
        ax.text(LANES - 0.4, step + 0.5, f"xor {1 << step}", color=plot.OURS, va="center")
    for step, lane in places(steps + 1, LANES):
        first = lane >> step << step
        held = f"{first}" if step == 0 else f"{first}–{first + (1 << step) - 1}"
        colour = plot.COLOURS[lane >> step] if step else plot.INK
        ax.text(lane, step, held, ha="center", va="center", fontsize=8, bbox=_box(colour))
    ax.set(xlim=(-0.6, LANES + 0.7), ylim=(steps + 0.4, -0.75))
    ax.text((LANES - 1) / 2, -0.55, "lane (a thread of the warp)", ha="center")
    ax.set_title("Inside a warp: shuffles")
    ax.axis("off")


def _exchange(ax):
    """Each warp's total goes to shared memory; every thread reads all four."""
    for warp in range(WARPS):
        colour = plot.COLOURS[warp]
        ax.text(warp, 0, f"warp {warp}\ntotal", ha="center", va="center", fontsize=8, bbox=_box(colour))
        ax.text(warp, 1.5, f"s[{warp}]", ha="center", va="center", fontsize=8, bbox=_box(colour))
        ax.text(warp, 3, "row\ntotal", ha="center", va="center", fontsize=8, bbox=_box(plot.INK))
        ax.annotate("", (warp, 1.25), (warp, 0.35), arrowprops=dict(arrowstyle="->", color=colour))
        for reader in range(WARPS):
            arrow = dict(arrowstyle="->", color=colour, linewidth=0.8)
            ax.annotate("", (reader, 2.68), (warp, 1.72), arrowprops=arrow)
    ax.plot((-0.5, WARPS - 0.5), (0.86, 0.86), color=plot.BOUND, linestyle="--", linewidth=1)
    label(ax, WARPS - 0.45, 0.86, "barrier\n(before it\nis reused)", 7, ha="left", colour=plot.BOUND)
    ax.plot((-0.5, WARPS - 0.5), (2.05, 2.05), color=plot.BOUND, linestyle="--", linewidth=1)
    label(ax, WARPS - 0.45, 2.05, "barrier", 7, ha="left", colour=plot.BOUND)
    ax.set(xlim=(-0.6, WARPS + 0.3), ylim=(3.5, -0.75))
    ax.set_title("Between four warps: shared memory")
    ax.axis("off")


def _box(colour):
    return dict(boxstyle="round,pad=0.3", facecolor=plot.CARD, edgecolor=colour, linewidth=1.5)


STAGES = 4


@chart(7.5, 3.3, ncols=2, width_ratios=(1, 2))
def ring_or_registers(axes):
    """The way of a row: straight to registers, or through a ring of shared memory that TMA fills."""
    left, right = axes
    _direct(left)
    _ring(right)


def _direct(ax):
    _or_registers_box(ax, 0, 0, 1, "HBM", plot.INK)
    _or_registers_box(ax, 0, 2, 1, "registers", plot.OURS)
    _or_registers_arrow(ax, (0.3, 0.55), (0.3, 2), "load")
    _or_registers_arrow(ax, (0.7, 2), (0.7, 0.55), "store")
    _frame(ax, 1.05, "Row in registers")


def _ring(ax):
    _or_registers_box(ax, 0, 0, 3, "HBM", plot.INK)
    for slot in range(STAGES):
        _or_registers_box(ax, 0.05 + slot * 0.42, 1, 0.4, f"slot {slot}", plot.COLOURS[1])
    _or_registers_box(ax, 2.1, 1, 0.85, "output buffer", plot.COLOURS[1])
    _or_registers_box(ax, 0, 2, 3, "registers", plot.OURS)
    _or_registers_arrow(ax, (0.85, 0.55), (0.85, 1), "TMA, ahead of time")
    _or_registers_arrow(ax, (0.85, 1.55), (0.85, 2), "wait, then load")
    _or_registers_arrow(ax, (2.52, 2), (2.52, 1.55), "store, fence")
    _or_registers_arrow(ax, (2.52, 1), (2.52, 0.55), "TMA")
    _frame(ax, 3.05, f"A ring of {STAGES} slots in shared memory")


def _or_registers_box(ax, x, y, width, text, colour):
    ax.broken_barh([(x, width)], (y, 0.52), facecolor=plot.CARD, edgecolor=colour, linewidth=1.5)
    label(ax, x + width / 2, y + 0.26, text, 8)


def _or_registers_arrow(ax, start, end, text):
    ax.annotate("", end, start, arrowprops=dict(arrowstyle="->", color=plot.INK, linewidth=1.5))
    label(ax, start[0] + 0.04, (start[1] + end[1]) / 2, text, 8, ha="left")


def _frame(ax, right, title):
    ax.set(xlim=(-0.05, right), ylim=(2.6, -0.1))
    ax.set_title(title)
    ax.axis("off")


LAYOUTS_WARPS, LAYOUTS_LANES, VEC = 4, 32, 8


@chart(7.5, 4.6, nrows=2, height_ratios=(1, 1.35))
def row_layouts(axes):
    """Which thread holds which columns: a row spread over a warpgroup, and rows that lie within a warp."""
    top, bottom = axes
    _spread(top)
    _within(bottom)


def _spread(ax):
    """One row of 2048 columns in WG_STRIDED((2048,), 8): thread t holds 8 neighbours in each strip of 1024."""
    strip = LAYOUTS_WARPS * LAYOUTS_LANES * VEC
    for i in range(2):
        for warp in range(LAYOUTS_WARPS):
            start = i * strip + warp * LAYOUTS_LANES * VEC
            _cell(ax, start, 0, LAYOUTS_LANES * VEC, f"warp {warp}", plot.COLOURS[warp], 0.8)
        _cell(ax, i * strip, 0, 2 * VEC, "", plot.INK, 0.8, filled=True)
        ax.text(i * strip, 1.1, f"thread 0: columns {i * strip} to {i * strip + VEC - 1}", fontsize=8)
    ax.set(xlim=(-20, 2 * strip + 20), ylim=(1.6, -0.15), yticks=[], xticks=range(0, 2 * strip + 1, 256))
    ax.set_title("One row of 2048 columns over a warpgroup: WG_STRIDED((2048,), 8)")
    _plain(ax)


def _within(ax):
    """A tile of 8 rows of 128 columns: two rows a warp, 16 lanes a row, 8 columns a lane."""
    lanes = 16
    for row in range(8):
        for lane in range(lanes):
            number = row % 2 * lanes + lane
            _cell(ax, lane * VEC, row, VEC, str(number), plot.COLOURS[row // 2], 0.86)
        label(ax, -1, row + 0.43, f"row {row}", 8, ha="right")
    for warp in range(LAYOUTS_WARPS):
        label(ax, lanes * VEC + 1, 2 * warp + 0.93, f"warp {warp}", 8, ha="left", colour=plot.COLOURS[warp])
    ax.set(xlim=(-9, lanes * VEC + 9), ylim=(8.1, -0.1), yticks=[], xticks=range(0, 129, 16))
    ax.set_title("Eight rows of 128 columns, each within a warp: TILED (the number is the lane)")
    ax.set_xlabel("column")
    _plain(ax)


def _cell(ax, x, y, width, text, colour, height, filled=False):
    face = colour if filled else plot.CARD
    ax.broken_barh([(x, width)], (y, height), facecolor=face, edgecolor=colour, linewidth=1.3)
    label(ax, x + width / 2, y + height / 2, text, 7.5)


def _plain(ax):
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)


COLS, WIDTH = 1000, 512


@chart(7.5, 2.5)
def row_pieces(ax):
    """A row whose length is no multiple of the piece: the last piece is shifted back to end with the row."""
    starts = [min(start, COLS - WIDTH) for start in range(0, COLS, WIDTH)]
    shared = starts[-2] + WIDTH - starts[-1]
    ax.broken_barh([(0, COLS)], (0, 0.7), facecolor=plot.FAINT, edgecolor=plot.INK)
    ax.text(COLS / 2, 0.35, f"the row: {COLS} columns", ha="center", va="center")
    for i, start in enumerate(starts):
        y, colour = 1 + i, plot.COLOURS[i]
        ax.broken_barh([(start, WIDTH)], (y, 0.7), facecolor=plot.CARD, edgecolor=colour, linewidth=1.5)
        note = f"piece {i}: columns {start} to {start + WIDTH - 1}"
        ax.text(start + WIDTH / 2, y + 0.35, note, ha="center", va="center")
    ax.broken_barh([(starts[-1], shared)], (2, 0.7), facecolor="none", edgecolor=plot.BOUND, hatch="////", linewidth=0)
    text = f"{shared} columns that piece 0 holds too:\nstored twice, counted once"
    ax.annotate(text, (starts[-1], 2.5), (starts[-1] - 20, 2.5), ha="right", va="center", color=plot.BOUND, fontsize=8)
    ax.axvline(COLS, color=plot.INK, linewidth=1, linestyle=":")
    label(ax, COLS + 5, 0.35, "next row:\nnot ours", 8, ha="left")
    ax.set(xlim=(-10, COLS + 110), ylim=(2.95, -0.15), yticks=[], xticks=[0, WIDTH, COLS])
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)


SPLITS, COLUMNS = 4, 3


@chart(7.5, 3.2, ncols=3, width_ratios=(2, 2, 2))
def split_sum(axes):
    """A sum over the leading axis in two launches: every block sums a strip, then one more pass sums the strips."""
    left, middle, right = axes
    _strips(left, SPLITS, "x: every block sums a strip", lambda s, c: f"block\n({s}, {c})")
    left.set(xlabel="columns", ylabel="rows")
    _strips(middle, SPLITS, "partial sums, float32", lambda s, c: f"row {s}", height=0.45)
    _strips(right, 1, "second launch: the total", lambda s, c: f"block\n(0, {c})")
    middle.annotate("", (-0.05, 1.5), (-0.5, 1.5), arrowprops=dict(arrowstyle="->"), annotation_clip=False)
    right.annotate("", (-0.05, 1.5), (-0.5, 1.5), arrowprops=dict(arrowstyle="->"), annotation_clip=False)


def _strips(ax, splits, title, name, height=0.9):
    top = (SPLITS - splits) / 2
    for split, column in places(splits, COLUMNS):
        colour = plot.COLOURS[split] if splits > 1 else plot.INK
        y = top + split
        ax.broken_barh([(column, 0.92)], (y, height), facecolor=plot.CARD, edgecolor=colour, linewidth=1.5)
        label(ax, column + 0.46, y + height / 2, name(split, column), 8)
    ax.set(xlim=(-0.6, COLUMNS), ylim=(SPLITS, -0.1), xticks=[], yticks=[])
    ax.set_title(title, fontsize=9.5)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)
