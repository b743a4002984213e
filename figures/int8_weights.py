"""Figures of chapter 9b: weights of 8 bits."""

from figures._chart import LOAD, MULTIPLY, bar, chart, lanes
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, RED, SOFT, arrow, box, drawing, words

COLUMNS = {"HBM": 1.75, "shared memory": 3.6, "registers": 5.3, "tensor core": 6.75}
WIDTH, HEIGHT = 0.62, 0.42


@drawing(7.5, 3.95)
def int8_designs(ax):
    """Three places where 8-bit weights can become 16-bit ones, and the bytes that each weight moves on the way."""
    rows = {"in HBM first": 2.75, "in shared\nmemory": 1.6, "in registers": 0.4}
    for name, x in COLUMNS.items():
        words(ax, x, 3.75, name, weight="bold")
        ax.axvline(x, 0.03, 0.9, color=PALE, linewidth=26, zorder=0)
    for name, y in rows.items():
        words(ax, 0.1, y + HEIGHT / 2, name, ha="left", weight="bold")
    y = rows["in HBM first"]
    _value(ax, "HBM", y + 0.3, "int8")
    _value(ax, "HBM", y - 0.25, "bf16")
    _value(ax, "shared memory", y - 0.25, "bf16")
    _go(ax, "HBM", "shared memory", y - 0.25, "2", GREEN)
    _go(ax, "shared memory", "tensor core", y - 0.25, "2", RED)
    arrow(ax, (1.43, y + 0.55), (1.43, y - 0.1), ORANGE, connectionstyle="arc3,rad=0.6", **BENT)
    words(ax, 2.2, y + 0.52, "a kernel of its own: 1 + 2", 7.5, ha="left", colour=ORANGE)
    y = rows["in registers"]
    _value(ax, "HBM", y, "int8")
    _value(ax, "shared memory", y, "int8")
    _value(ax, "registers", y, "bf16")
    _go(ax, "HBM", "shared memory", y, "1", GREEN)
    _go(ax, "shared memory", "registers", y, "1", ORANGE)
    _go(ax, "registers", "tensor core", y, "", RED)
    y = rows["in shared\nmemory"]
    _value(ax, "HBM", y + 0.25, "int8")
    _value(ax, "shared memory", y + 0.25, "int8")
    _value(ax, "shared memory", y - 0.25, "bf16")
    _go(ax, "HBM", "shared memory", y + 0.25, "1", GREEN)
    _go(ax, "shared memory", "tensor core", y - 0.25, "2", RED)
    edge = COLUMNS["shared memory"] + WIDTH / 2
    arrow(ax, (edge, y + 0.5), (edge, y + 0.04), ORANGE, connectionstyle="arc3,rad=-1.3", **BENT)
    words(ax, 4.4, y + 0.42, "1 + 2, by a warpgroup", 7.5, ha="left", colour=ORANGE)


def _go(ax, start, end, y, text, colour):
    """An arrow from one column to another; `text` is the bytes of a weight that go along it."""
    left = COLUMNS[start] + WIDTH / 2 + 0.04
    right = COLUMNS[end] - (0.35 if end == "tensor core" else WIDTH / 2 + 0.04)
    arrow(ax, (left, y + HEIGHT / 2), (right, y + HEIGHT / 2), colour=colour, text=text, size=7.5)
    if end == "tensor core":
        box(ax, COLUMNS[end] - 0.33, y, 0.66, HEIGHT, "WGMMA", colour=SOFT, fill=0.25, size=8)


@drawing(7.5, 2.75)
def int8_bits(ax):
    """How an 8-bit integer becomes a bfloat16 by placing its bits, two masks and one subtraction."""
    byte = "10100110"  # -90.
    examples = (
        ("int8", "", byte, "-90"),
        ("PRMT: the byte behind 0x43", "01000011", byte, ""),
        ("LOP3: & 0xff7f", "01000011", "0" + byte[1:], "128 + 38"),
        ("LOP3: & 0xff80", "01000011", byte[0] + "0" * 7, "256"),
    )
    cell = 0.235
    right = 2.35 + 16 * cell
    for row, (label, high, low, value) in enumerate(examples):
        y = 2.1 - 0.42 * row
        words(ax, 2.2, y + 0.13, label, 8.5, ha="right")
        for i, bit in enumerate(high.rjust(8) + low):
            if bit == " ":
                continue
            colour = _colour(row, i)
            box(ax, 2.35 + i * cell, y, cell - 0.03, 0.28, bit, colour=colour, fill=0.2, size=8)
        words(ax, right + 0.12, y + 0.13, value, ha="left")
    words(ax, 2.2, 0.42, "HADD2: the difference", 8.5, ha="right")
    words(ax, right + 0.12, 0.42, "166 - 256 = -90", ha="left", weight="bold")
    for text, x, y, colour in (("sign", 0, 2.08, SOFT), ("exponent", 4.2, 2.08, GREEN), ("mantissa", 11.7, 0.73, BLUE)):
        words(ax, 2.35 + (x + 0.4) * cell, y, text, 7.5, colour=colour)
    text = "the byte's own sign falls on the last bit of the exponent, which is worth a factor of 2"
    words(ax, 2.35, 0.12, text, 7.5, ha="left", colour=ORANGE)


def _colour(row: int, bit: int):
    """That of the field of a bfloat16 to which the bit belongs."""
    if row == 0:
        return ORANGE if bit == 8 else BLUE
    if bit == 0:
        return SOFT
    return ORANGE if bit == 8 else GREEN if bit < 8 else BLUE if bit > 8 else INK


STAGES, WIDE, STEPS = 4, 2, 8


def schedule() -> dict[str, list[tuple[float, float]]]:
    """(start, end) of each step's copy, conversion and product."""
    load_time, convert_time, multiply_time = 2.6, 0.9, 0.7
    load, convert, multiply = [], [], []
    for step in range(STEPS):
        freed = multiply[step - STAGES][1] if step >= STAGES else 0.0
        load.append((freed, freed + load_time))
        used = multiply[step - WIDE][1] if step >= WIDE else 0.0
        start = max(load[step][1], used, convert[-1][1] if convert else 0.0)
        convert.append((start, start + convert_time))
        begin = max(convert[-1][1], multiply[-1][1] if multiply else 0.0)
        multiply.append((begin, begin + multiply_time))
    return dict(load=load, convert=convert, multiply=multiply)


BENT = dict(shrinkA=2, shrinkB=2, mutation_scale=10)


def _value(ax, column, y, text):
    colour = BLUE if text == "int8" else INK
    box(ax, COLUMNS[column] - WIDTH / 2, y, WIDTH, HEIGHT, text, colour=colour, fill=0.25, size=8)


@chart(height=4.0)
def int8_ring(ax):
    """Two rings in a row: TMA fills stages of 8-bit weights, one warpgroup converts them, another one multiplies."""
    run = schedule()
    stages, wide = [f"stage {i}: a, int8" for i in range(STAGES)], [f"wide stage {i}: bf16" for i in range(WIDE)]
    converts, multiplies = STAGES, STAGES + 1 + WIDE
    for i in range(STEPS):
        load, convert, multiply = (run[what][i] for what in ("load", "convert", "multiply"))
        bar(ax, i % STAGES, *load, f"load {i}", LOAD)
        bar(ax, i % STAGES, *convert, f"{i}", ORANGE)
        bar(ax, i % STAGES, *multiply, f"{i}", MULTIPLY)  # It reads a's rows.
        bar(ax, converts, *convert, f"{i}", ORANGE)
        bar(ax, converts + 1 + i % WIDE, *convert, f"{i}", ORANGE)
        bar(ax, converts + 1 + i % WIDE, *multiply, f"{i}", MULTIPLY)
        bar(ax, multiplies, *multiply, f"{i}", MULTIPLY)
    title = "Light: TMA writes. Yellow: converted. Dark: the tensor cores read"
    lanes(ax, [*stages, "warpgroup 1 converts", *wide, "warpgroup 0 multiplies"], title)
    ax.set(xlim=(0, run["multiply"][-1][1]), xlabel="time")


@drawing(7.5, 4.0)
def int8_path(ax):
    """The path of weights through registers to the tensor core: 8 bits, then 16; o is transposed."""
    columns = (("HBM", 0.6), ("shared memory", 2.35), ("registers", 4.4), ("tensor core", 6.45))
    weights, rows = 2.35, 0.7  # Where the two operands lie, above each other.
    for name, x in columns:
        words(ax, x, 3.8, name, weight="bold")
    for x in (1.3, 3.4, 5.45):
        ax.axvline(x, 0.13, 0.97, color=PALE, zorder=0)
    box(ax, 0.15, weights, 0.9, 0.9, "weights\n(N, K)\n8 bits", colour=BLUE, fill=0.2, size=8)
    box(ax, 0.15, rows, 0.9, 0.55, "a (M, K)\n16 bits", colour=GREEN, fill=0.2, size=8)
    _stages(ax, weights, 0.9, BLUE, "8 bits")
    _stages(ax, rows, 0.55, GREEN, "16 bits")
    arrow(ax, (1.08, weights + 0.45), (1.62, weights + 0.45), colour=BLUE, text="TMA: 1", size=8)
    arrow(ax, (1.08, rows + 0.27), (1.62, rows + 0.27), colour=GREEN, text="TMA", size=8)
    box(ax, 3.62, weights, 0.5, 0.9, "8 bits", colour=BLUE, fill=0.2, size=8)
    box(ax, 4.5, weights, 0.8, 0.9, "16 bits", colour=ORANGE, fill=0.35, size=8)
    arrow(ax, (3.02, weights + 0.45), (3.6, weights + 0.45), colour=BLUE, text="load: 1", size=8)
    arrow(ax, (4.14, weights + 0.45), (4.48, weights + 0.45), colour=ORANGE)
    words(ax, 4.42, weights + 1.08, "convert, exchange", 8, colour=ORANGE)
    box(ax, 5.95, rows, 1.0, 2.55, colour=RED, fill=0.08)
    words(ax, 6.45, 1.95, "WGMMA", weight="bold")
    words(ax, 6.45, 1.65, "sums of oᵀ,\nfloat32", 8)
    arrow(ax, (5.33, weights + 0.45), (5.93, weights + 0.45), colour=ORANGE, text="A", size=9)
    arrow(ax, (3.02, rows + 0.27), (5.93, rows + 0.27), colour=GREEN, text="B: a, read transposed", size=8)
    words(ax, 6.45, 0.48, "transposed back\non its way out", 8, colour=SOFT)
    words(ax, 2.95, 0.25, "1: bytes per weight; no others cross shared memory", 8, colour=SOFT)
    words(ax, 2.35, weights - 0.2, "a ring of stages", 8, colour=SOFT)
    words(ax, 4.42, weights - 0.2, "of one compute warpgroup", 8, colour=SOFT)
    words(ax, 4.42, 1.75, "nothing is written back", 8)


def _stages(ax, y, height, colour, text):
    """A ring of four stages, of which one is full."""
    for i in range(4):
        box(ax, 1.65 + 0.34 * i, y, 0.31, height, colour=colour, fill=0.25 if i == 3 else 0.08)
    words(ax, 1.65 + 0.34 * 3 + 0.155, y + height / 2, text, 7, rotation=90)
