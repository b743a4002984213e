"""Figures of chapter 1: elementwise."""

from figures._chart import tile
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, RED, SOFT, arrow, box, drawing, words
from figures._stepper import stepper
from lab import plot

TRIP, ISSUE, WORK = 1.5, 0.1, 0.16  # Lengths on the drawing of one trip of one block: request, wait, add and store.


@drawing(7.8, 4.2)
def blocks_in_time(ax):
    """One block waits for memory nearly all the time; many blocks wait together, and keep the memory busy."""
    words(ax, 0.25, 4.02, "One block: one trip after the other", 10, ha="left", weight="bold")
    _lane(ax, 3.45, 0.0, 4, "block 0")
    _memory(ax, 3.1, [TRIP * i + 0.75 for i in range(4)])
    arrow(ax, (1.25, 3.74), (1.25 + TRIP, 3.74), SOFT, style="<|-|>", width=1)
    words(ax, 1.35 + TRIP, 3.74, "one trip to HBM and back", 8, ha="left", colour=SOFT)
    words(ax, 0.25, 2.72, "Many blocks: their trips overlap", 10, ha="left", weight="bold")
    for i in range(6):
        _lane(ax, 2.3 - 0.27 * i, 0.23 * i, 4, f"block {i}")
    _memory(ax, 0.6, [TRIP * i + 0.23 * j + 0.75 for i in range(4) for j in range(6)])
    for x, colour, fill, text in (
        (1.3, BLUE, 0.8, "requests two tiles"),
        (2.85, SOFT, 0.1, "waits"),
        (3.65, GREEN, 0.8, "adds and stores"),
        (5.1, ORANGE, 0.8, "memory delivers them"),
    ):
        box(ax, x, 0.2, 0.18, 0.15, colour=colour, fill=fill, linewidth=0.5)
        words(ax, x + 0.26, 0.275, text, 8, ha="left")


def _lane(ax, y, first, trips, name):
    words(ax, 1.15, y + 0.1, name, 8, ha="right")
    for i in range(trips):
        x = 1.25 + first + TRIP * i
        if x + TRIP > 7.6:
            break
        box(ax, x, y, TRIP, 0.2, colour=SOFT, fill=0.1, linewidth=0.5)
        box(ax, x, y, ISSUE, 0.2, colour=BLUE, fill=0.8, linewidth=0)
        box(ax, x + TRIP - WORK, y, WORK, 0.2, colour=GREEN, fill=0.8, linewidth=0)


def _memory(ax, y, deliveries):
    words(ax, 1.15, y + 0.1, "HBM", 8, ha="right", colour=RED, weight="bold")
    box(ax, 1.25, y, 6.3, 0.2, colour=ORANGE, fill=0.05, linewidth=0.5)
    for x in deliveries:
        if x < 6.05:
            box(ax, 1.25 + x, y, 0.2, 0.2, colour=ORANGE, fill=0.8, linewidth=0)


@drawing(7.8, 2.75)
def thread_layout(ax):
    """Which thread loads which element of a tile, for loads of 1, 2, 4 and 8 bf16 elements per thread."""
    elements = 32  # The first of the tile; a cell is one element of 2 bytes.
    text = f"the first {elements} elements of a tile, and the thread that loads each"
    words(ax, 1.55, 2.55, text, ha="left", weight="bold")
    for row, vec in enumerate((1, 2, 4, 8)):
        y = 1.95 - 0.5 * row
        words(ax, 1.45, y + 0.17, f"{vec} element{'s' * (vec > 1)}\n{2 * vec} bytes per load", 8, ha="right")
        for i in range(0, elements, vec):
            thread = i // vec
            colour = plot.COLOURS[thread % 5]
            box(ax, 1.55 + 0.19 * i, y, 0.19 * vec - 0.02, 0.34, str(thread), colour, fill=0.25, size=7, linewidth=0.7)
    text = "one load of a warp, 32 threads side by side, fetches 64, 128, 256 or 512 bytes in a row"
    words(ax, 1.55, 0.18, text, 8, ha="left", colour=SOFT)


@drawing(7.8, 2.75)
def fusion(ax):
    """Two kernels move five arrays through HBM; one fused kernel moves three."""
    words(ax, 0.25, 2.55, "two kernels: 5 arrays cross", 10, ha="left", weight="bold")
    words(ax, 4.75, 2.55, "one kernel: 3 arrays cross", 10, ha="left", weight="bold")
    for x, width in ((0.25, 3.9), (4.75, 2.8)):
        box(ax, x, 0.25, width, 0.42, "HBM", RED)
    for x, text in ((0.45, "x + y"), (2.55, "gelu(s)"), (5.0, "gelu(x + y)")):
        box(ax, x, 1.75, 1.4, 0.5, text, INK, fill=0.08, size=10)
    _traffic(ax, ((0.6, "x", 1), (1.1, "y", 1), (1.6, "s", 0), (2.75, "s", 1), (3.65, "out", 0)))
    _traffic(ax, ((5.15, "x", 1), (5.65, "y", 1), (6.15, "out", 0)))
    words(ax, 7.5, 2.0, "s stays in\nregisters", 8, ha="right", colour=SOFT)


def _traffic(ax, arrays):
    for x, name, read in arrays:
        low, high = (x, 0.67), (x, 1.75)
        arrow(ax, low if read else high, high if read else low, BLUE if read else GREEN)
        words(ax, x + 0.07, 1.2, name, ha="left", colour=BLUE if read else GREEN)


@drawing(7.8, 2.6)
def tail(ax):
    """A length that is not a multiple of the tile: whole tiles, then pieces of 128 elements, the last shifted back."""
    length, tile, piece = 2348, 1024, 128
    scale = 6.4 / 2348  # Inches per element.
    at = lambda element: 0.25 + element * scale
    whole = length // tile * tile
    words(ax, 0.25, 2.42, f"{length} elements, tiles of {tile}", 10, ha="left", weight="bold")
    box(ax, 0.25, 1.75, length * scale, 0.3, "", SOFT, fill=0.12)
    words(ax, at(length) + 0.08, 1.9, "the array\nends here", 8, ha="left", colour=RED)
    ax.plot([at(length)] * 2, [0.5, 2.15], color=RED, linewidth=1.2)
    for i in range(whole // tile):
        text = f"block {i}: its tile, 16-byte loads"
        box(ax, at(i * tile), 1.3, tile * scale - 0.02, 0.32, text, BLUE, size=8)
    starts = list(range(whole, length, piece))
    for start in starts:
        last = start + piece > length
        x, y = at(min(start, length - piece)), 0.98 - 0.36 * last
        box(ax, x, y, piece * scale - 0.01, 0.28, "", ORANGE if last else GREEN, fill=0.35)
    x, block = at(whole) - 0.1, whole // tile - 1
    words(ax, x, 1.12, f"block {block} also does the pieces of {piece}", 8, ha="right")
    words(ax, x, 0.76, f"the last is shifted back, to start at {length} − {piece}", 8, ha="right")
    overlap = (starts[-2] + piece - (length - piece)) * scale
    x = at(length - piece) + overlap / 2
    arrow(ax, (x, 0.34), (x, 0.62), ORANGE)
    words(ax, x, 0.22, "computed twice, stored twice: the same value", 8, ha="right")


LINE, SECTOR = 128, 32  # Bytes.
LOADS = (  # Columns of a tile; elements per thread; the caption.
    (1024, 8, "Each thread reads 16 bytes, and the 32 threads lie side by side: 4 lines, and every byte is used."),
    (
        1024,
        1,
        "With 2 bytes per thread a load covers half a line. The other half takes a second load.",
    ),
    (64, 8, "A strip of 64 columns has 128 bytes in each row: still 4 whole lines, now in 4 rows."),
    (32, 8, "A strip of 32 columns: 4 threads share 64 bytes of a line, so the load touches 8 lines."),
    (16, 8, "A strip of 16 columns: 2 threads share a sector. All bytes that move are used, but they lie in 16 lines."),
    (
        8,
        8,
        "A strip of 8 columns: each thread is alone in its line. It uses half of its sector, so twice the bytes move.",
    ),
)


@stepper(7.8, 3.35)
def loads_in_steps(ax):
    """The bytes that one load of a warp reads in an array of 4096 columns, and the lines and sectors they lie in."""
    left, top, byte, high = 0.85, 2.95, 4.6 / 512, 0.085
    width, rows = 512 * byte, 32
    at = lambda row: top - high * (row + 1)
    words(ax, left, 3.18, "the first 512 bytes of 32 rows of the array: 4 lines of 4 sectors each", 8.5, ha="left")
    tile(ax, left, at(rows - 1), width, high * rows, PALE, zorder=0)
    for start in range(0, 513, SECTOR):
        look = dict(color=SOFT, linewidth=0.9) if start % LINE == 0 else dict(color=plot.CARD, linewidth=0.7)
        ax.plot([left + byte * start] * 2, [at(rows - 1), top], zorder=0.5, **look)
    for row in (0, 8, 16, 24, 31):
        words(ax, left - 0.08, at(row) + high / 2, f"row {row}", 7.5, ha="right", colour=SOFT)
    words(
        ax, left, 0.1, "colours: threads 0 to 31; grey: bytes that move with them and that no thread uses", 8, ha="left"
    )
    yield
    for columns, vec, caption in LOADS:
        lines, sectors, used = set(), set(), 32 * 2 * vec
        for thread in range(32):
            row, column = divmod(thread * vec, columns)
            line, sector = (row, 2 * column // LINE), (row, 2 * column // SECTOR)
            if sector not in sectors:
                tile(ax, left + byte * SECTOR * sector[1], at(row), byte * SECTOR, high, SOFT, alpha=0.55)
            lines.add(line)
            sectors.add(sector)
            colour = plot.COLOURS[thread % 5]
            tile(ax, left + byte * 2 * column, at(row) + 0.008, byte * 2 * vec, high - 0.016, colour)
        words(ax, 5.75, 2.75, f"{2 * vec} bytes per thread,\nstrip of {columns} columns", ha="left", va="top")
        words(ax, 5.75, 2.05, f"{len(lines)} line{'s' * (len(lines) > 1)}", 13, ha="left", weight="bold", colour=RED)
        words(ax, 5.75, 1.7, f"{len(sectors)} sectors of {SECTOR} bytes", ha="left")
        moved = SECTOR * len(sectors)
        words(ax, 5.75, 1.3, f"{used} of {moved} bytes are used", ha="left")
        yield caption
