"""Figures of chapter 16: grouped matmul."""

import itertools

from matplotlib.patches import Rectangle

from figures._chart import chart, label
from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, places, words
from lab import plot

SIZES, TILE, COLUMNS, SMS = (70, 0, 130, 1, 63), 64, 2, 4  # Rows of each group; rows of a tile; columns of tiles; SMs.
COLOURS = BLUE, GREEN, ORANGE, PINK, SKY  # Colours of the groups.


def tiles_of(size: int) -> int:
    return -(-size // TILE) * COLUMNS


def in_waves(tiles, first=0):
    """(wave, SM, group, whether it has rows of a group) of each tile, in waves from `first` on."""
    return [(first + i // SMS, i % SMS, *tile) for i, tile in enumerate(tiles)]


def a_launch_each():
    placed, wave = [], 0
    for group, size in enumerate(SIZES):
        placed += in_waves([(group, True)] * tiles_of(size), wave)
        wave += -(-tiles_of(size) // SMS)
    return placed


def padded():
    most = max(map(tiles_of, SIZES))
    return in_waves([(group, i < tiles_of(size)) for group, size in enumerate(SIZES) for i in range(most)])


def together():
    return in_waves([(group, True) for group, size in enumerate(SIZES) for _ in range(tiles_of(size))])


@chart(7.8, 4.9, nrows=3, sharex=True)
def groups_waste(axes):
    """Groups of rows on four SMs: a launch for each group, a batch padded to the largest, and one launch for all."""
    launches = sum(size > 0 for size in SIZES)
    rows = sum(SIZES)
    cases = (
        (f"a launch for each group: {launches} launches", a_launch_each()),
        (f"padded to the largest: {len(SIZES) * max(SIZES)} rows in place of {rows}", padded()),
        ("one launch, tiles from a table", together()),
    )
    end = max(placed[-1][0] for _, placed in cases) + 1
    for ax, (title, placed) in zip(axes, cases, strict=True):
        waves = placed[-1][0] + 1
        busy = {(wave, sm) for wave, sm, _, _ in placed}
        for wave, sm, group, useful in placed:
            look = dict(facecolor=COLOURS[group], alpha=0.6) if useful else dict(facecolor=plot.FAINT, hatch="xx")
            ax.add_patch(Rectangle((wave + 0.02, sm - 0.42), 0.96, 0.84, edgecolor=plot.CARD, **look))
            ground = dict(facecolor=plot.CARD, edgecolor="none", pad=1)
            text = f"group {group}" if useful else "padding"
            ax.text(wave + 0.5, sm, text, ha="center", va="center", fontsize=6.5, bbox=None if useful else ground)
        for wave, sm in places(waves, SMS):
            if (wave, sm) not in busy:
                label(ax, wave + 0.5, sm, "idle", 6.5, colour="#767676")
        ax.axvline(waves, color=plot.BOUND, linewidth=1.5)
        share = sum(useful for *_, useful in placed) / waves / SMS
        ax.text(waves + 0.08, SMS / 2 - 0.5, f"{share:.0%} of the time\nuseful", fontsize=8, color=plot.BOUND,
                va="center")  # fmt: skip
        ax.set_yticks(range(SMS), [f"SM {sm}" for sm in range(SMS)])
        ax.set(xlim=(0, end + 1.1), ylim=(SMS - 0.4, -0.6))
        ax.grid(visible=False)
        ax.set_title(title, fontsize=9)
    axes[-1].set_xticks(range(end + 1))
    axes[-1].set_xlabel("time, in tiles")


ALIGNED_SIZES, ALIGNED_TILE = (100, 60, 130, 30), 64
ALIGNED_COLOURS = BLUE, ORANGE, PINK, SKY


def bounds():
    ends = list(itertools.accumulate(ALIGNED_SIZES))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def on_the_grid():
    """(group, first row, end) of each tile that is computed: a tile counts once for each group that it has rows of."""
    return [
        (group, first, first + ALIGNED_TILE)
        for group, (start, end) in enumerate(bounds())
        for first in range(start // ALIGNED_TILE * ALIGNED_TILE, end, ALIGNED_TILE)
    ]


def from_the_group():
    return [
        (group, first, first + ALIGNED_TILE)
        for group, (start, end) in enumerate(bounds())
        for first in range(start, end, ALIGNED_TILE)
    ]


@drawing(7.8, 3.6)
def groups_aligned(ax):
    """Where tiles begin: at multiples of their rows, so that groups share tiles, or at the first row of each group."""
    left, scale = 0.3, 0.0158
    total = sum(ALIGNED_SIZES)

    def groups(y):
        for group, (start, end) in enumerate(bounds()):
            box(ax, left + scale * start, y, scale * (end - start) - 0.02, 0.28, f"group {group}: {end - start}"
                if end - start > 30 else f"{group}: {end - start}", ALIGNED_COLOURS[group], 0.35, size=7.5)  # fmt: skip

    for y, title, tiles in (
        (2.85, "on the array's grid", on_the_grid()),
        (1.1, "from the first row of each group", from_the_group()),
    ):
        words(ax, left, y + 0.5, f"{title}: {len(tiles)} tiles of {ALIGNED_TILE} rows", ha="left", weight="bold")
        if "grid" in title:
            for row in range(0, total + ALIGNED_TILE, ALIGNED_TILE):
                x = left + scale * row
                ax.plot([x, x], [y - 0.9, y - 0.02], color=SOFT, linewidth=0.8, linestyle="--", zorder=0)
        groups(y)
        for number, (group, first, end) in enumerate(tiles):
            lane = number % 2 if "grid" not in title else group % 2
            at = y - 0.38 - 0.42 * lane
            start, stop = bounds()[group]
            mine = max(first, start), min(end, stop)
            look = dict(colour=ALIGNED_COLOURS[group], linewidth=0.8)
            box(ax, left + scale * first, at, scale * ALIGNED_TILE - 0.02, 0.3, fill=0.03, linestyle=":", **look)
            width = max(scale * (mine[1] - mine[0]) - 0.02, 0.04)
            box(ax, left + scale * mine[0], at, width, 0.3, fill=0.35, **look)
            middle = sum(mine) / 2 if mine[1] - mine[0] > 10 else mine[1] + 8
            words(ax, left + scale * middle, at + 0.15, str(number), 8)
    words(ax, 7.05, 2.5, "a tile with rows of\ntwo groups is\ncomputed twice", 8, colour=RED)
    words(ax, 7.05, 0.75, "only the last tile\nof a group\nis not full", 8, colour=RED)


ROWS = 280  # Rows of lhs; those after the last group belong to none.


def entries():
    """(group, first row, end of the group) of each tile; the last two groups are of rows without one."""
    sizes = (*SIZES, 0, ROWS - sum(SIZES))  # None before all groups, and some after.
    starts = [0, *itertools.accumulate(sizes)]
    return [
        (group, first, starts[group + 1])
        for group in range(len(sizes))
        for first in range(starts[group], starts[group + 1], TILE)
    ]


@drawing(7.8, 4.3)
def groups_table(ax):
    """The table of tiles: rows of lhs in groups, the tiles that cover them, and the integers that say where each is."""
    scale, left = 0.0232, 1.05
    colours = (*COLOURS, SOFT, SOFT)
    sizes = (*SIZES, 0, ROWS - sum(SIZES))  # None before all groups, and some after.
    starts = [0, *itertools.accumulate(sizes)]
    words(ax, left - 0.12, 3.74, "rows of lhs", 8.5, ha="right")
    words(ax, left - 0.12, 2.85, "tiles", 8.5, ha="right")
    for group, size in enumerate(sizes):
        x = left + scale * starts[group]
        if group == len(SIZES):
            continue
        if not size:
            words(ax, x, 4.1, f"group {group}: 0", 7.5, colour=colours[group])
            arrow(ax, (x, 4.03), (x, 3.93), colours[group], width=0.9)
            continue
        box(ax, x, 3.56, max(scale * size - 0.02, 0.03), 0.36, colour=colours[group], fill=0.35, linewidth=0.8)
        at = x + scale * size / 2
        name = f"group {group}: {size} rows" if size > 70 else f"group {group}: {size}"
        text = name if group < len(SIZES) else f"of none: {size}"
        high = size > 60
        words(ax, at, 3.74 if high else 4.1, text, 7.5, colour="#222222" if high else colours[group])
        if not high:
            arrow(ax, (at, 4.03), (at, 3.93), colours[group], width=0.9)
    for number, (group, first, end) in enumerate(entries()):
        x, mine = left + scale * first, min(TILE, end - first)
        y = 3.06 - 0.36 * (number % 3)
        reach = min(TILE, ROWS - first)
        box(ax, x, y, scale * reach - 0.02, 0.3, colour=colours[group], fill=0.0, linestyle=":", linewidth=0.8)
        box(ax, x, y, max(scale * mine - 0.02, 0.03), 0.3, colour=colours[group], fill=0.35, linewidth=0.8)
        words(ax, x + (scale * mine / 2 if mine > 10 else scale * mine + 0.1), y + 0.15, str(number), 8)
    words(ax, left, 2.12, "dotted: rows that a tile computes too, and does not store: rows of later groups",
          size=7.5, ha="left", colour=SOFT)  # fmt: skip

    x, width = left + 0.1, 0.62
    rows = list(zip(*entries(), strict=True))
    for y, name, values in zip((1.38, 1.06, 0.68, 0.3), ("entry", "group", "start", "end"),
                               (range(len(entries())), *rows), strict=True):  # fmt: skip
        words(ax, x - 0.12, y + 0.15, name, 8.5, ha="right")
        for i, value in enumerate(values):
            colour = colours[rows[0][i]]
            if name == "entry":
                words(ax, x + width * i + 0.28, y + 0.15, str(value), 8, colour=SOFT)
            else:
                box(ax, x + width * i, y, width - 0.06, 0.3, str(value), colour, fill=0.2, size=8.5)
    arrow(ax, (x + 2.5, 1.98), (x + 2.5, 1.72), RED)
    words(ax, x + 2.65, 1.86, "made in XLA of the sizes, on the device", 8, ha="left", colour=RED)
    words(ax, x, 0.1, f"count: {sum(g < len(SIZES) for g in rows[0])} entries of groups, {len(rows[0])} with those of "
          "rows without a group, which become zeros", size=8, ha="left")  # fmt: skip


STORES_ROWS, LEFT = 64, 63
STORES_COLOURS = {32: BLUE, 16: GREEN, 8: ORANGE, 4: SKY, 2: PINK, 1: RED}


def rungs(left: int) -> list[tuple[int, int]]:
    """(first row, rows) of each copy of a piece of which `left` rows are stored."""
    found, first, size = [], 0, STORES_ROWS // 2
    while size:
        if left & size:
            found.append((first, size))
            first += size
        size //= 2
    return found


@drawing(7.8, 4.2)
def groups_stores(ax):
    """The last piece of a group on its way out: 63 of 64 rows leave as rungs of 32, 16, 8, 4, 2 and 1 rows."""
    high, bottom = 0.05, 0.45
    y_of = lambda row: bottom + high * (STORES_ROWS - row)

    words(ax, 1.3, 4.0, "a whole piece: one copy", weight="bold")
    box(ax, 0.25, y_of(STORES_ROWS), 0.85, high * STORES_ROWS, "64 rows", BLUE, 0.25, size=8)
    box(ax, 1.6, y_of(STORES_ROWS), 0.85, high * STORES_ROWS, "64 rows", BLUE, 0.25, size=8)
    arrow(ax, (1.13, y_of(32)), (1.57, y_of(32)), BLUE)
    words(ax, 0.67, 0.24, "shared\nmemory", 7.5)
    words(ax, 2.02, 0.28, "out", 7.5)

    words(ax, 5.25, 4.0, f"the last one of a group: {LEFT} = {' + '.join(str(size) for _, size in rungs(LEFT))}",
          weight="bold")  # fmt: skip
    x = 3.25
    box(ax, x, y_of(STORES_ROWS), 0.85, high * STORES_ROWS, colour=SOFT, fill=0.05)
    box(ax, x + 2.5, y_of(STORES_ROWS), 0.85, high * STORES_ROWS, colour=SOFT, fill=0.05)
    for first, size in rungs(LEFT):
        middle, colour = y_of(first + size / 2), STORES_COLOURS[size]
        for at in (x, x + 2.5):
            tall = max(high * size - 0.012, 0.03)
            box(ax, at + 0.02, y_of(first + size) + 0.006, 0.81, tall, colour=colour, fill=0.4, linewidth=0.8)
        arrow(ax, (x + 0.88, middle), (x + 2.47, middle), colour, width=1.1)
        if size >= 4:
            words(ax, x + 0.42, middle, f"{size} rows" if size > 4 else "4", 7.5)
            words(ax, x + 1.65, middle + 0.1, f"left & {size}", 7.5, colour=colour)
    words(ax, x + 3.45, y_of(29), "rows of this\ngroup", 8, ha="left")
    words(ax, x + 3.45, y_of(63.5), "row 63: the next\ngroup's first,\nnot touched", 8, ha="left", colour=RED)
    words(ax, x + 0.42, 0.24, "shared\nmemory", 7.5)
    words(ax, x + 2.92, 0.28, "out", 7.5)
    words(ax, x + 1.65, 0.24, "each copy has a size that\nwas known to the compiler", 7.5, colour=SOFT)
