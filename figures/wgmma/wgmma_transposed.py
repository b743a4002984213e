"""The ways in which A and B may lie in memory, and the bit of the instruction for each."""

from figures._draw import GREEN, ORANGE, SOFT, arrow, box, canvas, save, words

CASES = (
    ("A", "(M, K)", "a_smem", "K", "M", ORANGE, "no bit"),
    ("A", "(K, M)", "a_smem.T", "M", "K", ORANGE, ".tnspA"),
    ("B", "(K, N)", "b_smem", "N", "K", GREEN, ".tnspB"),
    ("B", "(N, K)", "b_smem.T", "K", "N", GREEN, "no bit"),
)


def draw():
    fig, ax = canvas(7.8, 2.75)
    for i, (name, stored, argument, along, down, colour, bit) in enumerate(CASES):
        x, y, side = 0.45 + 1.9 * i, 1.05, 1.05
        box(ax, x, y, side, side, "", colour, 0.08)
        for line in range(6):
            height = y + side - 0.13 - 0.155 * line
            arrow(ax, (x + 0.1, height), (x + side - 0.08, height), colour if line < 2 else SOFT, width=0.9)
        words(ax, x + side / 2, y + side + 0.42, f"{name} stored as {stored}", size=9, weight="bold")
        words(ax, x + side / 2, y + side + 0.16, along, size=9)
        words(ax, x - 0.16, y + side / 2, down, size=9)
        words(ax, x + side / 2, 0.78, f"wgmma takes {argument}", size=8, family="DejaVu Sans Mono")
        words(ax, x + side / 2, 0.52, bit, size=9, weight="bold", colour=colour if bit[0] == "." else SOFT)
    text = "arrows: neighbours in memory; where they do not follow K, a bit says so (16-bit types only)"
    words(ax, 3.9, 0.14, text, size=8, colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
