"""How an 8-bit integer becomes a bfloat16 by placing its bits, two masks and one subtraction."""

from figures._draw import BLUE, GREEN, INK, ORANGE, SOFT, box, canvas, save, words

BYTE = "10100110"  # -90.
EXAMPLES = (
    ("int8", "", BYTE, "-90"),
    ("PRMT: the byte behind 0x43", "01000011", BYTE, ""),
    ("LOP3: & 0xff7f", "01000011", "0" + BYTE[1:], "128 + 38"),
    ("LOP3: & 0xff80", "01000011", BYTE[0] + "0" * 7, "256"),
)
CELL = 0.235


def draw():
    fig, ax = canvas(7.5, 2.75)
    right = 2.35 + 16 * CELL
    for row, (label, high, low, value) in enumerate(EXAMPLES):
        y = 2.1 - 0.42 * row
        words(ax, 2.2, y + 0.13, label, size=8.5, ha="right")
        for i, bit in enumerate(high.rjust(8) + low):
            if bit == " ":
                continue
            colour = _colour(row, i)
            box(ax, 2.35 + i * CELL, y, CELL - 0.03, 0.28, bit, colour=colour, fill=0.2, size=8)
        words(ax, right + 0.12, y + 0.13, value, size=9, ha="left")
    words(ax, 2.2, 0.42, "HADD2: the difference", size=8.5, ha="right")
    words(ax, right + 0.12, 0.42, "166 - 256 = -90", size=9, ha="left", weight="bold")
    for text, x, y, colour in (("sign", 0, 2.08, SOFT), ("exponent", 4.2, 2.08, GREEN), ("mantissa", 11.7, 0.73, BLUE)):
        words(ax, 2.35 + (x + 0.4) * CELL, y, text, size=7.5, colour=colour)
    words(ax, 2.35, 0.12, "the byte's own sign falls on the last bit of the exponent, which is worth a factor of 2",
          size=7.5, ha="left", colour=ORANGE)  # fmt: skip
    return fig


def _colour(row: int, bit: int):
    """That of the field of a bfloat16 to which the bit belongs."""
    if row == 0:
        return ORANGE if bit == 8 else BLUE
    if bit == 0:
        return SOFT
    return ORANGE if bit == 8 else GREEN if bit < 8 else BLUE if bit > 8 else INK


if __name__ == "__main__":
    save(__file__, draw())
