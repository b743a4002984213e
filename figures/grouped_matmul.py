"""Figures of chapter 16: grouped matmul."""

import itertools

from matplotlib.patches import Rectangle

from figures._chart import chart, label, numbered, tile, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, places, words
from figures._stepper import stepper
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
    cases = (
        (f"a launch for each group: {sum(size > 0 for size in SIZES)} launches", a_launch_each()),
        (f"padded to the largest: {len(SIZES) * max(SIZES)} rows in place of {sum(SIZES)}", padded()),
        ("one launch, tiles from a table", together()),
    )
    end = max(placed[-1][0] for _, placed in cases) + 1
    for ax, (title, placed) in zip(axes, cases, strict=True):
        waves = placed[-1][0] + 1
        for wave, sm, group, useful in placed:
            look = dict(facecolor=COLOURS[group], alpha=0.6) if useful else dict(facecolor=plot.FAINT, hatch="xx")
            ax.add_patch(Rectangle((wave + 0.02, sm - 0.42), 0.96, 0.84, edgecolor=plot.CARD, **look))
            ground = None if useful else dict(facecolor=plot.CARD, edgecolor="none", pad=1)
            label(ax, wave + 0.5, sm, f"group {group}" if useful else "padding", 6.5, bbox=ground)
        busy = {(wave, sm) for wave, sm, _, _ in placed}
        for wave, sm in sorted(set(places(waves, SMS)) - busy):
            label(ax, wave + 0.5, sm, "idle", 6.5, colour=SOFT)
        ax.axvline(waves, color=RED, linewidth=1.5)
        share = sum(useful for *_, useful in placed) / waves / SMS
        label(ax, waves + 0.08, SMS / 2 - 0.5, f"{share:.0%} of the time\nuseful", ha="left", colour=RED)
        tracks(ax, numbered("SM", SMS), title, grid=False)
    axes[-1].set(xlim=(0, end + 1.1), xticks=range(end + 1), xlabel="time, in tiles")


ALIGNED_SIZES = (100, 60, 130, 30)


def bounds():
    ends = list(itertools.accumulate(ALIGNED_SIZES))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def aligned_tiles(on_grid: bool):
    """(group, first row, end) of each tile that is computed: a tile counts once for each group that it has rows of."""
    return [
        (group, first, first + TILE)
        for group, (start, end) in enumerate(bounds())
        for first in range(start // TILE * TILE if on_grid else start, end, TILE)
    ]


@drawing(7.8, 3.6)
def groups_aligned(ax):
    """Where tiles begin: at multiples of their rows, so that groups share tiles, or at the first row of each group."""
    colours = BLUE, ORANGE, PINK, SKY
    left, scale = 0.3, 0.0158
    for y, title, on_grid in ((2.85, "on the array's grid", True), (1.1, "from the first row of each group", False)):
        tiles = aligned_tiles(on_grid)
        words(ax, left, y + 0.5, f"{title}: {len(tiles)} tiles of {TILE} rows", ha="left", weight="bold")
        if on_grid:
            for row in range(0, sum(ALIGNED_SIZES) + TILE, TILE):
                x = left + scale * row
                ax.plot([x, x], [y - 0.9, y - 0.02], color=SOFT, linewidth=0.8, linestyle="--", zorder=0)
        for group, (start, end) in enumerate(bounds()):
            text = f"group {group}: {end - start}" if end - start > 30 else f"{group}: {end - start}"
            width = scale * (end - start) - 0.02
            box(ax, left + scale * start, y, width, 0.28, text, colours[group], 0.35, size=7.5)
        for number, (group, first, end) in enumerate(tiles):
            at = y - 0.38 - 0.42 * ((group if on_grid else number) % 2)
            start, stop = bounds()[group]
            mine = max(first, start), min(end, stop)
            look = dict(colour=colours[group], linewidth=0.8)
            box(ax, left + scale * first, at, scale * TILE - 0.02, 0.3, fill=0.03, linestyle=":", **look)
            width = max(scale * (mine[1] - mine[0]) - 0.02, 0.04)
            box(ax, left + scale * mine[0], at, width, 0.3, fill=0.35, **look)
            middle = sum(mine) / 2 if mine[1] - mine[0] > 10 else mine[1] + 8
            words(ax, left + scale * middle, at + 0.15, str(number), 8)
    words(ax, 7.05, 2.5, "a tile with rows of\ntwo groups is\ncomputed twice", 8, colour=RED)
    words(ax, 7.05, 0.75, "only the last tile\nof a group\nis not full", 8, colour=RED)


ROWS = 280  # Rows of lhs; those after the last group belong to none.
ALL_SIZES = (*SIZES, 0, ROWS - sum(SIZES))  # Rows of no group: none before all groups, and some after.
STARTS = [0, *itertools.accumulate(ALL_SIZES)]


def entries():
    """(group, first row, end of the group) of each tile; the last two groups are of rows without one."""
    return [
        (group, first, STARTS[group + 1])
        for group in range(len(ALL_SIZES))
        for first in range(STARTS[group], STARTS[group + 1], TILE)
    ]


def rungs(left: int) -> list[tuple[int, int]]:
    """(first row, rows) of each copy of a piece of which `left` rows are stored."""
    found, first = [], 0
    for size in (32, 16, 8, 4, 2, 1):
        if left & size:
            found.append((first, size))
            first += size
    return found


@drawing(7.8, 4.2)
def groups_stores(ax):
    """The last piece of a group on its way out: 63 of 64 rows leave as rungs of 32, 16, 8, 4, 2 and 1 rows."""
    colours = {32: BLUE, 16: GREEN, 8: ORANGE, 4: SKY, 2: PINK, 1: RED}
    left = 63
    high, bottom = 0.05, 0.45
    y_of = lambda row: bottom + high * (TILE - row)
    words(ax, 1.3, 4.0, "a whole piece: one copy", weight="bold")
    for x in (0.25, 1.6):
        box(ax, x, bottom, 0.85, high * TILE, "64 rows", BLUE, 0.25, size=8)
    arrow(ax, (1.13, y_of(32)), (1.57, y_of(32)), BLUE)
    words(ax, 0.67, 0.24, "shared\nmemory", 7.5)
    words(ax, 2.02, 0.28, "out", 7.5)
    text = f"the last one of a group: {left} = {' + '.join(str(size) for _, size in rungs(left))}"
    words(ax, 5.25, 4.0, text, weight="bold")
    x = 3.25
    box(ax, x, bottom, 0.85, high * TILE, colour=SOFT, fill=0.05)
    box(ax, x + 2.5, bottom, 0.85, high * TILE, colour=SOFT, fill=0.05)
    for first, size in rungs(left):
        middle, colour, tall = y_of(first + size / 2), colours[size], max(high * size - 0.012, 0.03)
        for at in (x, x + 2.5):
            box(ax, at + 0.02, y_of(first + size) + 0.006, 0.81, tall, colour=colour, fill=0.4, linewidth=0.8)
        arrow(ax, (x + 0.88, middle), (x + 2.47, middle), colour, width=1.1)
        if size >= 4:
            words(ax, x + 0.42, middle, f"{size} rows" if size > 4 else "4", 7.5)
    words(ax, x + 3.45, y_of(29), "rows of this\ngroup", 8, ha="left")
    words(ax, x + 3.45, y_of(63.5), "row 63: the next\ngroup's first,\nnot touched", 8, ha="left", colour=RED)
    words(ax, x + 0.42, 0.24, "shared\nmemory", 7.5)
    words(ax, x + 2.92, 0.28, "out", 7.5)
    words(ax, x + 1.65, 0.24, "each copy has a size that\nwas known to the compiler", 7.5, colour=SOFT)


VISITED = (  # Entries of the table; the captions.
    (0, "Entry 0: 64 rows of group 0, all of them stored."),
    (
        1,
        "Group 0 has 6 rows left. The tile multiplies 58 rows of group 2 by the wrong matrix and drops them.",
    ),
    (2, "Group 1 has no rows and no entry. Entry 2 begins at row 70, the first row of group 2."),
    (4, "The last tile of group 2 stores 2 rows, and computes 62 rows of later groups for nothing."),
    (5, "Group 3 has a single row and a tile of its own."),
    (6, "Group 4 stores 63 of 64 rows, in six copies. Its last row belongs to no group."),
    (7, "The rows after the last group have an entry, too. Its tile has no matrix and no steps, and stores zeros."),
)


@stepper(7.8, 2.95)
def table_in_steps(ax):
    """Entries of the table of tiles in turn: the rows that a tile computes, those that it stores, and its matrix."""
    left, scale, colours = 1.05, 0.0232, (*COLOURS, SOFT, SOFT)
    words(ax, left - 0.12, 2.6, "rows of lhs", ha="right")
    for group, size in enumerate(ALL_SIZES):
        tile(ax, left + scale * STARTS[group], 2.45, scale * size, 0.3, colours[group], alpha=0.6)
        if size > 60:
            words(ax, left + scale * (STARTS[group] + size / 2), 2.6, f"group {group}: {size}", 8)
    for row in (0, 70, 200, 264, ROWS):
        words(ax, left + scale * row, 2.85, str(row), 7.5, colour=SOFT)
    table, width = entries(), 0.8
    for y, name in ((1.02, "entry"), (0.75, "group"), (0.45, "start"), (0.15, "end")):
        words(ax, left - 0.12, y + 0.14, name, ha="right")
    for i, entry in enumerate(table):
        words(ax, left + width * i + 0.36, 1.16, str(i), 8, colour=SOFT)
        for y, value in zip((0.75, 0.45, 0.15), entry, strict=True):
            tile(ax, left + width * i, y, 0.72, 0.27, "none", str(value), 8.5, edgecolor=SOFT, linewidth=0.6)
    yield
    for number, caption in VISITED:
        group, first, end = table[number]
        stored, colour = min(TILE, end - first), colours[group]
        x, shown = left + scale * first, scale * (min(first + TILE, ROWS) - first)
        tile(ax, x, 1.85, shown, 0.36, plot.CARD, edgecolor=SOFT, linewidth=0.8, hatch="////")
        tile(ax, x, 1.85, scale * stored, 0.36, colour, edgecolor=INK, linewidth=0.8)
        for row in (first, first + stored):
            ax.plot([left + scale * row] * 2, (2.23, 2.43), color=INK, linewidth=0.8)
        words(ax, left - 0.12, 2.03, "tile", ha="right")
        pieces = [str(size) for _, size in rungs(stored)]
        matrix = f"rhs[{group}]" if group < len(SIZES) else "none"
        rows = f"{stored} row{'s' * (stored > 1)}" + f", as {' + '.join(pieces)}" * (len(pieces) > 1)
        words(ax, left, 1.55, f"matrix: {matrix}; stored: {rows}; hatched: computed, not stored", 9, ha="left")
        tile(ax, left + width * number - 0.03, 0.11, 0.78, 0.95, colour, alpha=0.35)
        yield caption
