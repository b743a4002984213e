"""Figures of chapter 9c: weights of 4 bits."""

from figures._draw import BLUE, GREEN, INK, ORANGE, RED, SKY, SOFT, arrow, box, drawing, words

LANES = BLUE, SKY, GREEN, ORANGE  # A colour for each of the four threads that share a row.


@drawing(7.8, 3.9)
def word_of_a_thread(ax):
    """A unit of 64 weights of a row: which thread multiplies which of them, and the eight that lie in one word."""
    cell, left = 0.218, 0.62
    words(ax, 0.05, 3.78, "64 values of K of one row, and the lane (thread) whose register WGMMA takes each from", 8.5,
          ha="left")  # fmt: skip
    for part in range(2):
        y = 3.3 - 0.36 * part
        words(ax, left - 0.08, y + 0.13, f"{32 * part} to {32 * part + 31}", 7.5, ha="right", colour=SOFT)
        for i in range(32):
            lane = i // 2 % 4
            is_shown = part == 0 and lane == 1
            gap = 0.03 * (i // 8)
            box(ax, left + i * cell + gap, y, cell - 0.015, 0.26, f"{32 * part + i}", LANES[lane],
                fill=0.75 if is_shown else 0.25, size=6.5, linewidth=0.6)  # fmt: skip
    for pair in range(4):
        words(ax, left + (8 * pair + 4) * cell + 0.03 * pair, 2.8, f"pair {pair}", 7.5, colour=SOFT)
    words(ax, 0.05, 2.45, "the row's 8 words: two for each lane, read at once", 8.5, ha="left")
    width = 0.88
    for i in range(8):
        lane, part = divmod(i, 2)
        box(ax, left + i * width, 1.98, width - 0.03, 0.28, f"lane {lane}, part {part}", LANES[lane],
            fill=0.75 if (lane, part) == (1, 0) else 0.25, size=7.5, linewidth=0.6)  # fmt: skip
    words(ax, 0.05, 1.6, "word 2, bits 31 to 0", 8.5, ha="left")
    bit, wide = 1.05, 0.82
    for i in range(8):
        half, pair = 1 - i // 4, 3 - i % 4
        x = bit + i * wide + 0.08 * (i // 4)
        box(ax, x, 1.1, wide - 0.03, 0.3, f"k = {8 * pair + 2 + half}", LANES[1], fill=0.25, size=8, linewidth=0.7)
    for half, x in ((1, bit + 2 * wide), (0, bit + 6 * wide + 0.08)):
        words(ax, x, 1.5, f"half {half}", 7.5, colour=SOFT)
    for half, at in ((1, 3), (0, 7)):
        x = bit + at * wide + 0.08 * (at // 4)
        arrow(ax, (x + wide / 2 - 0.02, 1.06), (x + wide / 2 - 0.02, 0.66), SOFT, width=1)
        box(ax, x - 3 * wide, 0.32, 3 * wide - 0.03, 0.3, "0 0 0 0 0 0 0 0 0 0 0 0", SOFT, fill=0.05, size=7.5,
            linewidth=0.7)  # fmt: skip
        box(ax, x, 0.32, wide - 0.03, 0.3, f"k = {2 + half}", RED, fill=0.2, size=8, linewidth=0.7)
    words(ax, 0.05, 0.47, "& 0x000F000F", 7.5, ha="left")
    caption = "pair 0: two numbers of 16 bits in one register; a shift by 4, 8 or 12 before gives pairs 1 to 3"
    words(ax, bit + 4 * wide, 0.14, caption, 8, colour=SOFT)


@drawing(7.8, 3.1)
def bits_of_floats(ax):
    """The bits of 4-bit weights as bfloat16: in the mantissa of 128, as a subnormal number, and as a small exponent."""
    cell, left = 0.235, 1.95
    right = left + 16 * cell + 0.1
    colour = lambda i: SOFT if i == 0 else GREEN if i < 9 else BLUE
    rows = (
        ("rung 2: q = 11, | 0x4300", "0100001100001011", range(12, 16), "128 + 11"),
        ("rung 3: q = 11", "0000000000001011", range(12, 16), "11 × 2⁻¹³³, subnormal"),
        ("e2m1: -3 = 1 10 1", "1000000101000000", (0, 7, 8, 9), "-3 × 2⁻¹²⁶"),
        ("e2m1: 0.5 = 0 00 1", "0000000001000000", (0, 7, 8, 9), "0.5 × 2⁻¹²⁶, subnormal"),
    )
    for text, x, tone in (("sign", 0.5, SOFT), ("exponent", 5, GREEN), ("mantissa", 12.5, BLUE)):
        words(ax, left + x * cell, 2.85, text, 8, colour=tone)
    for row, (label, bits, placed, value) in enumerate(rows):
        y = 2.35 - 0.45 * row
        words(ax, left - 0.12, y + 0.14, label, 8.5, ha="right")
        for i, bit in enumerate(bits):
            box(ax, left + i * cell, y, cell - 0.03, 0.28, bit, RED if i in placed else colour(i),
                fill=0.45 if i in placed else 0.12, size=8, linewidth=0.7)  # fmt: skip
        words(ax, right, y + 0.14, value, 8.5, ha="left")
    words(ax, left, 0.62, "filled: the four bits of the weight", 8, ha="left", colour=RED)
    words(ax, left, 0.38, "a bfloat16 has 8 bits of exponent, with a bias of 127", 8, ha="left", colour=INK)
    subnormal = "where all of them are 0 it is subnormal: no 1 stands before the mantissa, whose last bit is 2⁻¹³³"
    words(ax, left, 0.14, subnormal, 8, ha="left", colour=INK)
