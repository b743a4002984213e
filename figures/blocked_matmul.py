"""Figures of chapter 4: blocked matmul."""

from figures._chart import bar, chart, lanes, numbered, tile
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, SOFT, arrow, box, drawing, places, words
from lab import plot

TILE, STEP = 0.42, 0.28  # Edges of a tile of o, and of one step along K, in inches.


@drawing(7.6, 4.4)
def matmul_tiles(ax):
    """Which parts of a and b one block of a blocked matrix product reads: a row of tiles and a column of tiles."""
    tiles_m, tiles_n, steps = 4, 6, 6
    mine, now = (1, 3), 2  # The tile of o that is drawn, and the step of K.
    left, base = 0.75, 0.5
    wide, high, deep = tiles_n * TILE, tiles_m * TILE, steps * STEP
    right, top = left + deep + 0.3, base + high + 0.3
    row, col = base + (tiles_m - 1 - mine[0]) * TILE, right + mine[1] * TILE
    for x, y, width, height in ((left, base, deep, high), (right, top, wide, deep), (right, base, wide, high)):
        box(ax, x, y, width, height, colour=INK, fill=0.03, linewidth=0.8)
    for i in range(steps):
        fill = 0.75 if i == now else 0.2
        box(ax, left + i * STEP, row, STEP, TILE, colour=ORANGE, fill=fill, linewidth=0.8)
        box(ax, col, top + (steps - 1 - i) * STEP, TILE, STEP, colour=GREEN, fill=fill, linewidth=0.8)
    for i, j in places(tiles_m, tiles_n):
        if (i, j) != mine:
            x, y = right + j * TILE, base + (tiles_m - 1 - i) * TILE
            box(ax, x, y, TILE, TILE, colour=SOFT, fill=0.06, linewidth=0.6)
    box(ax, col, row, TILE, TILE, colour=BLUE, fill=0.85, linewidth=0.8)
    arrow(ax, (left + (now + 1) * STEP + 0.03, row + TILE / 2), (col - 0.03, row + TILE / 2), ORANGE)
    arrow(ax, (col + TILE / 2, top + (steps - 1 - now) * STEP - 0.03), (col + TILE / 2, row + TILE + 0.03), GREEN)
    words(ax, left - 0.12, base + high / 2, "a\nM x K", ha="right", weight="bold")
    words(ax, right - 0.12, top + deep / 2, "b\nK x N", ha="right", weight="bold")
    words(ax, right + wide / 2, base - 0.2, "o   M x N", weight="bold")
    words(ax, left + deep / 2, base - 0.2, "steps along K:  0  1  2 ...", 8)
    x = right + wide + 0.25
    for y, colour, text in (
        (3.3, ORANGE, "tile_m rows of a,\nfrom end to end"),
        (2.55, GREEN, "tile_n columns of b,\nfrom end to end"),
        (1.8, BLUE, "the block's tile of o:\ntile_m x tile_n sums"),
    ):
        box(ax, x, y - 0.08, 0.16, 0.16, colour=colour, fill=0.8, linewidth=0.5)
        words(ax, x + 0.26, y, text, 8.5, ha="left")
    words(ax, x, 0.95, "dark: read by one step along K;\nlight: by the block's other steps", 8.5, ha="left")


@drawing(7.6, 3.3)
def matmul_edges(ax):
    """Tiles of the result to scale: a step of K reads the two edges of a tile, and multiplies and adds on its area."""
    tiles = ((1, 128), (16, 32), (64, 64), (128, 128))
    scale, edge = 0.0125, 0.09  # Inches a value of o; thickness of a drawn edge.
    x, top = 0.35, 2.6
    for tile_m, tile_n in tiles:
        width, height = tile_n * scale, max(tile_m * scale, 0.03)
        look = dict(edgecolor="none", alpha=0.75)
        tile(ax, x, top - height, width, height, BLUE, **look)
        tile(ax, x - edge - 0.04, top - height, edge, height, ORANGE, **look)
        tile(ax, x, top + 0.04, width, edge, GREEN, **look)
        products, values = tile_m * tile_n, tile_m + tile_n
        words(ax, x, 2.97, f"{tile_m} x {tile_n}", 9.5, ha="left", weight="bold")
        text = f"reads {values} values,\nmultiplies {products:,} times:\n{products / values:.3g} for each value"
        words(ax, x, min(top - height - 0.3, 2.3), text, 8, ha="left")
        x += max(width, 1.45) + 0.35
    for left, colour, text in (
        (0.3, ORANGE, "a column of a's tile"),
        (2.2, GREEN, "a row of b's tile"),
        (3.9, BLUE, "sums of o, each with one multiply-add"),
    ):
        tile(ax, left, 0.06, 0.14, 0.14, colour, alpha=0.75)
        words(ax, left + 0.22, 0.13, text, 8, ha="left")


SIDE = 2.9  # Inches, of the tile of 128 x 128.
ROWS, COLS, VEC = 16, 32, 4  # Sizes of the pattern that repeats; values side by side that one thread holds.
THREAD = 10  # The one that is picked out.


@drawing(7.8, 4.05)
def matmul_threads(ax):
    """Which thread holds which sums of a 128 x 128 tile, and what it reads for one step of K."""
    words(ax, 0.3, 3.86, "the pattern: 16 rows x 32 columns", ha="left", weight="bold")
    _pattern(ax, 0.55, 0.42, 2.75, 3.05)
    words(ax, 4.35, 3.86, f"thread {THREAD} in the tile of 128 x 128", ha="left", weight="bold")
    _tile(ax, 4.75, 0.42, SIDE / 128)


def _pattern(ax, x, y, width, height):
    """Threads by number: four warps of four rows each, eight threads side by side."""
    beside = COLS // VEC
    cell_width, cell_height = width / beside, height / ROWS
    for row, i in places(ROWS, beside):
        thread = row * beside + i
        left, bottom = x + i * cell_width, y + height - (row + 1) * cell_height
        colour, alpha, ink = (BLUE, 0.9, plot.CARD) if thread == THREAD else (plot.COLOURS[1 + row // 4], 0.3, INK)
        _cell(ax, (left, bottom), cell_width, cell_height, colour, alpha)
        words(ax, left + cell_width / 2, bottom + cell_height / 2, str(thread), 6.5, colour=ink)
    for warp in range(4):
        middle = y + height - (warp + 0.5) * 4 * cell_height
        words(ax, x - 0.1, middle, f"warp {warp}", 7.5, ha="right", rotation=90)
    words(ax, x + width / 2, y - 0.17, "each cell: 1 row, 4 columns, of the thread named", 8, colour=SOFT)


def _tile(ax, x, y, scale):
    row, col = THREAD // (COLS // VEC), THREAD % (COLS // VEC) * VEC
    tile(ax, x, y, SIDE, SIDE, PALE, edgecolor=INK, linewidth=0.8)
    for i in range(128 // ROWS):
        bottom = y + SIDE - (i * ROWS + row + 1) * scale
        for j in range(128 // COLS):
            left = x + (j * COLS + col) * scale
            _cell(ax, (left, bottom), VEC * scale, scale, BLUE, 1.0, 0.0)
            if i == 0:
                _cell(ax, (left, y + SIDE + 0.1), VEC * scale, 0.14, GREEN, 0.9)
        _cell(ax, (x - 0.24, bottom), 0.14, scale, ORANGE, 1.0, 0.0)
    tile(ax, x - 0.24, y, 0.14, SIDE, ORANGE, alpha=0.15)
    tile(ax, x, y + SIDE + 0.1, SIDE, 0.14, GREEN, alpha=0.15)
    tile(ax, x, y + SIDE - ROWS * scale, COLS * scale, ROWS * scale, "none", edgecolor=INK, linewidth=1)
    words(ax, x - 0.32, y + SIDE / 2, "8 of a's column", 8, ha="right", rotation=90)
    words(ax, x + SIDE / 2, y + SIDE + 0.36, "4 x 4 of b's row", 8)
    words(ax, x + SIDE / 2, y - 0.17, "8 x 16 sums: 128 multiply-adds for 24 values read", 8, colour=SOFT)
    arrow(ax, (3.4, y + SIDE + 0.02), (x - 0.34, y + SIDE - 0.05), SOFT, width=1)


def _cell(ax, corner, width, height, colour, alpha, line=0.5):
    tile(ax, *corner, width, height, colour, alpha=alpha, edgecolor=plot.CARD, linewidth=line)


@drawing(7.8, 3.5)
def matmul_path(ax):
    """Two paths of the operands: each warp loads what it multiplies, or TMA copies it once for all of them."""
    _path(ax, 0.2, "from global memory, by the warps", through_smem=False)
    _path(ax, 4.1, "through shared memory, by TMA", through_smem=True)


def _path(ax, x, title, through_smem):
    words(ax, x, 3.33, title, 10, ha="left", weight="bold")
    box(ax, x, 2.35, 3.5, 0.7, colour=SOFT, fill=0.07)
    words(ax, x + 0.1, 2.92, "global memory (L2, HBM)", 8, ha="left", colour=SOFT)
    a = [x + 0.3 + 0.32 * i for i in range(4)]
    warps = [x + 0.4 + 0.9 * i for i in range(4)]
    b = x + 2.05
    _operands(ax, a, b, 2.42)
    bottom = 2.38
    if through_smem:
        box(ax, x, 1.2, 3.5, 0.62, colour=BLUE, fill=0.06)
        words(ax, x + 0.1, 1.69, "shared memory", 8, ha="left", colour=BLUE)
        _operands(ax, a, b, 1.25)
        arrow(ax, (a[1] + 0.3, bottom), (a[1] + 0.3, 1.85), ORANGE, width=3)
        arrow(ax, (b + 0.6, bottom), (b + 0.6, 1.85), GREEN, width=3)
        words(ax, x + 1.75, 2.1, "TMA: once,\nfor all warps", 8)
        bottom = 1.22
    for i, warp in enumerate(warps):
        arrow(ax, (a[i] + 0.13, bottom), (warp - 0.08, 0.72), ORANGE, width=1)
        arrow(ax, (b + 0.3 + 0.2 * i, bottom), (warp + 0.1, 0.72), GREEN, width=1)
        box(ax, warp - 0.32, 0.38, 0.66, 0.34, f"warp {i}", BLUE, fill=0.3, size=8)
    last = "the warp that wants a value waits for its load" if not through_smem else "one copy; then short loads"
    words(ax, x + 1.75, 0.15, last, 8, colour=SOFT)


def _operands(ax, a, b, y):
    for i, left in enumerate(a):
        box(ax, left, y, 0.28, 0.3, f"a{i}", ORANGE, fill=0.5, size=7.5, linewidth=0.6)
    box(ax, b, y, 1.25, 0.3, "b", GREEN, fill=0.5, size=8, linewidth=0.6)


COPY, PRODUCT = 1.0, 1.8  # Lengths in the schedules; the time has no scale.


@chart(height=3.1, nrows=2, sharex=True)
def matmul_ring(axes):
    """One block over time: it waits for each copy, or a ring of two stages has the next copies in flight."""
    for ax, stages in zip(axes, (1, 2), strict=True):
        free, ready = [0.0] * stages, 0.0
        for i in range(5):
            stage = i % stages
            arrived = free[stage] + COPY
            start = max(arrived, ready)
            ready = free[stage] = start + PRODUCT
            bar(ax, stage, arrived - COPY, arrived, f"copy {i}", ORANGE)
            bar(ax, stages, start, ready, f"product {i}", BLUE)
        lanes(ax, [*numbered("stage", stages), "warps"], "staged" if stages == 1 else "a ring of two stages")
        ax.set_xlim(0, 5 * (COPY + PRODUCT))
    axes[-1].set_xlabel("time")
