"""Figures of chapter 5: WGMMA."""

from figures._chart import LOAD, MULTIPLY, bar, chart, numbered, tile, tracks
from figures._draw import BLUE, GREEN, ORANGE, PINK, SOFT, arrow, box, drawing, places, words
from figures._stepper import stepper


@drawing(7.8, 3.15)
def wgmma_instruction(ax):
    """One WGMMA: which part of each matrix it takes, and in which memory it finds it."""
    left, bottom, width, height = 1.75, 0.62, 2.9, 1.6  # Place and size of the accumulator.
    for warp in range(4):
        y = bottom + height * (3 - warp) / 4
        text = f"warp {warp}: rows {16 * warp} to {16 * warp + 15}"
        box(ax, left, y, width, height / 4 - 0.04, text, BLUE, size=8.5, linewidth=0.8)
    box(ax, left - 0.62, bottom, 0.5, height - 0.04, "A", ORANGE, fill=0.3, size=11)
    box(ax, left, bottom + height + 0.1, width, 0.42, "B", GREEN, fill=0.3, size=11)
    words(ax, left - 0.72, bottom + height / 2, "64", ha="right")
    words(ax, left - 0.37, bottom - 0.16, "16")
    middle = left + width / 2
    words(ax, middle, bottom + height + 0.68, "N = 8, 16, 24, ... 256")
    words(ax, middle, bottom - 0.18, "accumulator += A @ B", 10, weight="bold")
    words(ax, middle, bottom - 0.42, "64 x 16 x N multiply-adds, one instruction", 8.5, colour=SOFT)
    x = left + width + 0.55
    words(ax, x, 2.62, "A and B: tiles in shared memory", ha="left", weight="bold")
    words(ax, x, 2.33, "The instruction gets two descriptors:\nan address and a layout each.", 8.5, ha="left")
    words(ax, x, 1.62, "accumulator: float32, in registers", ha="left", weight="bold", colour=BLUE)
    text = "spread over the 128 threads of a warp-\ngroup, 16 rows for each of its 4 warps."
    words(ax, x, 1.33, text, 8.5, ha="left")
    arrow(ax, (x - 0.08, 2.62), (left + width + 0.04, 2.46), GREEN)
    arrow(ax, (x - 0.08, 1.62), (left + width + 0.04, 1.5), BLUE)


SHOWN = {0: BLUE, 6: ORANGE, 13: GREEN, 31: PINK}  # Lanes in colour.


def place(row: int, column: int) -> tuple[int, int]:
    """(lane, register) of an element in the rows of warp 0."""
    lane = row % 8 * 4 + column % 8 // 2
    return lane, 4 * (column // 8) + 2 * (row // 8) + column % 2


@drawing(7.8, 4.55)
def wgmma_accumulator(ax):
    """Which thread of a warp holds which element of the accumulator: the first 16 rows and columns of a tile."""
    side = 0.235  # Inches, of a cell.
    left, top = 0.75, 4.12
    for row in range(16):
        words(ax, left - 0.12, top - side * (row + 0.5), str(row), 7, ha="right", colour=SOFT)
        words(ax, left + side * (row + 0.5), top + 0.1, str(row), 7, colour=SOFT)
        for column in range(16):
            lane, _ = place(row, column)
            x, y = left + side * column, top - side * (row + 1)
            shown = lane in SHOWN
            style = dict(size=6.5, linewidth=0.5, weight="bold" if shown else "normal")
            box(ax, x, y, side - 0.02, side - 0.02, str(lane), SHOWN.get(lane, SOFT), 0.5 if shown else 0.06, **style)
    words(ax, left + 8 * side, 4.42, "column of the tile", 8)
    words(ax, 0.22, top - 8 * side, "row of the tile", 8, rotation=90)
    x = left + 16 * side + 0.35
    words(ax, x, 3.75, "In each cell: its thread", ha="left", weight="bold")
    text = "A thread holds two neighbours of a row, and\nthe same two 8 rows below; then again every\n8 columns."
    words(ax, x, 3.28, text, 8.5, ha="left")
    words(ax, x, 2.55, "Thread 6's first registers:", 8.5, ha="left", weight="bold", colour=ORANGE)
    for register in range(8):
        row, column = next((r, c) for r in range(16) for c in range(16) if place(r, c) == (6, register))
        text = f"register {register}: row {row:>2}, column {column:>2}"
        words(ax, x + 0.08, 2.28 - 0.2 * register, text, 8, ha="left", family="DejaVu Sans Mono")
    words(ax, left, 0.1, "Pallas calls this layout Layout.WGMMA.", 8, ha="left", colour=SOFT)


@drawing(7.8, 2.75)
def wgmma_transposed(ax):
    """The ways in which A and B may lie in memory, and the bit of the instruction for each."""
    cases = (
        ("A", "(M, K)", "a_smem", "K", "M", ORANGE, "no bit"),
        ("A", "(K, M)", "a_smem.T", "M", "K", ORANGE, ".tnspA"),
        ("B", "(K, N)", "b_smem", "N", "K", GREEN, ".tnspB"),
        ("B", "(N, K)", "b_smem.T", "K", "N", GREEN, "no bit"),
    )
    for i, (name, stored, argument, along, down, colour, bit) in enumerate(cases):
        x, y, side = 0.45 + 1.9 * i, 1.05, 1.05
        box(ax, x, y, side, side, "", colour, 0.08)
        for line in range(6):
            height = y + side - 0.13 - 0.155 * line
            arrow(ax, (x + 0.1, height), (x + side - 0.08, height), colour if line < 2 else SOFT, width=0.9)
        words(ax, x + side / 2, y + side + 0.42, f"{name} stored as {stored}", weight="bold")
        words(ax, x + side / 2, y + side + 0.16, along)
        words(ax, x - 0.16, y + side / 2, down)
        words(ax, x + side / 2, 0.78, f"wgmma takes {argument}", 8, family="DejaVu Sans Mono")
        words(ax, x + side / 2, 0.52, bit, weight="bold", colour=colour if bit[0] == "." else SOFT)
    text = "arrows: neighbours in memory; where they do not follow K, a bit says so (16-bit types only)"
    words(ax, 3.9, 0.14, text, 8, colour=SOFT)


LOAD_TIME, GAP, STEPS = 1.6, 0.35, 9
RUNGS = (
    ("serial: one stage; copy, wait, multiply, wait", 1, 0),
    ("ring: three stages, wgmma_wait(0); the tensor core idles between two products", 3, 0),
    ("ring: three stages, wgmma_wait(1); the next product is queued while one runs", 3, 1),
)


def schedule(stages: int, in_flight: int) -> list[tuple[float, float, float]]:
    """For each step: when its load starts, and when its product starts and ends. Times in units of one product.

    The warpgroup goes on when at most `in_flight` products run; it then refills the stage of the one that has ended.
    """
    loads = [0.0] * (stages - in_flight)
    products, now = [(0.0, 0.0)], 0.0
    for step in range(STEPS):
        now = max(now, loads[step] + LOAD_TIME) + GAP
        start = max(now, products[-1][1])
        products.append((start, start + 1))
        now = max(now, products[-1 - in_flight][1])
        loads.append(now)
    return [(load, *product) for load, product in zip(loads, products[1:], strict=False)]


@chart(height=5.9, nrows=3, sharex=True, height_ratios=[stages + 1 for _, stages, _ in RUNGS])
def wgmma_overlap(axes):
    """The last three rungs of chapter 5 over time: serial, a ring, and a ring with a product always queued."""
    for ax, (title, stages, in_flight) in zip(axes, RUNGS, strict=True):
        for i, (load, start, end) in enumerate(schedule(stages, in_flight)):
            bar(ax, i % stages, load, load + LOAD_TIME, f"load {i}", LOAD)
            bar(ax, i % stages, start, end, f"{i}", MULTIPLY)
            bar(ax, stages, start, end, f"{i}", MULTIPLY)
        tracks(ax, [*numbered("stage", stages), "tensor core"], title)
    axes[-1].set(xlim=(0, 11), xlabel="time, in units of one step's product")


@stepper(7.8, 3.6)
def swizzle_in_steps(ax):
    """How swizzling by 128 bytes spreads a column of pieces over the 32 banks of shared memory."""
    left, top, side = 0.75, 3.0, 0.31
    words(ax, left + 4 * side, 3.43, "8 rows of 128 bytes, in pieces of 16", 9, weight="bold")
    words(ax, left + 4 * side, 3.2, "bank 0 ............................. bank 31", 8, colour=SOFT)
    for row in range(8):
        words(ax, left - 0.1, top - side * (row + 0.5), f"row {row}", 8, ha="right", colour=SOFT)
    x = left + 8 * side + 0.7
    words(ax, x, 2.75, "WGMMA reads the same piece of 8 rows at once.", 9, ha="left", weight="bold")
    text = "In one access each bank gives 4 bytes, so\n8 pieces of 16 bytes fit if no two share a bank."
    words(ax, x, 2.42, text, 8.5, ha="left", va="top")
    yield

    def pieces(place, wanted, rows=8):
        for row, position in places(rows, 8):
            piece = place(row, position)
            shown = piece == wanted
            x, y = left + side * position, top - side * (row + 1)
            colour, alpha = (ORANGE, 0.6) if shown else (BLUE, 0.12)
            tile(ax, x, y, side - 0.03, side - 0.03, colour, str(piece), 8, alpha=alpha)

    def verdict(text, colour):
        words(ax, x, 1.35, text, 11, ha="left", weight="bold", colour=colour)

    pieces(lambda row, position: position, 0)
    verdict("8 accesses", PINK)
    yield "Row-major: piece 0 of every row lies in banks 0 to 3. The eight pieces have to be read one after another."
    for rows, text in ((1, "Row 0 stays as it is: c xor 0 = c."), (2, "In row 1 neighbours change places: c xor 1.")):
        pieces(lambda row, position: position ^ row, 0, rows)
        yield f"TMA writes the swizzled tile: piece c of row r goes to place c xor r. {text}"
    pieces(lambda row, position: position ^ row, 0)
    verdict("1 access", GREEN)
    yield "All eight rows: piece 0 now stands on a diagonal, each row in another place. It uses all 32 banks once."
    pieces(lambda row, position: position ^ row, 5)
    verdict("1 access", GREEN)
    yield "The same holds for every other piece, here piece 5. So WGMMA reads any piece of a column in one access."
