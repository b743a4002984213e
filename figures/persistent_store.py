"""The way out: accumulators are rounded two pieces at a time into two slots, from where TMA takes them to o."""

from figures._draw import BLUE, GREEN, ORANGE, SKY, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 2.85)
    words(ax, 1.55, 2.65, "registers of a compute warpgroup", size=9, weight="bold")
    words(ax, 1.55, 2.4, "64 x 256 float32: 64 KB", size=8)
    for piece, (colour, text) in enumerate(((SOFT, "sent"), (SOFT, "sent"), (GREEN, "rounding"), (BLUE, "next"))):
        x = 0.25 + 0.66 * piece
        box(ax, x, 0.95, 0.6, 1.0, f"piece\n{piece}", colour=colour, size=8.5)
        words(ax, x + 0.3, 0.75, text, size=7.5, colour=colour)

    words(ax, 4.4, 2.65, "shared memory", size=9, weight="bold")
    words(ax, 4.4, 2.4, "2 slots of 8 KB a warpgroup", size=8)
    box(ax, 3.75, 1.63, 1.3, 0.55, "slot 0: piece 2", colour=GREEN, size=8.5)
    box(ax, 3.75, 0.9, 1.3, 0.55, "slot 1: for piece 3", colour=BLUE, size=8.5)

    words(ax, 6.8, 2.65, "o in HBM, by way of L2", size=9, weight="bold")
    words(ax, 6.8, 2.4, "64 x 256 bfloat16: 32 KB", size=8)
    for piece in range(4):
        colour = (ORANGE, ORANGE, SKY, SKY)[piece]
        fill = 0.3 if piece < 2 else 0.05
        box(ax, 6.05 + 0.38 * piece, 0.95, 0.36, 1.2, f"{piece}", colour=colour, size=8.5, fill=fill)
    words(ax, 6.42, 0.75, "on their way", size=7.5, colour=ORANGE)

    arrow(ax, (1.87, 1.95), (3.75, 2.08), GREEN, connectionstyle="angle,angleA=90,angleB=180,rad=4")
    words(ax, 3.2, 2.2, "round, write", size=8, colour=GREEN)
    arrow(ax, (2.86, 1.17), (3.75, 1.17), BLUE, linestyle="--")
    arrow(ax, (5.05, 1.55), (6.05, 1.55), ORANGE, "both copies", offset=(-0.02, 0.13))
    text = (
        "1. wait_smem_to_gmem(0, wait_read_only=True): TMA has read pieces 0 and 1, o need not have them yet.\n"
        "2. Pieces 2 and 3 are rounded into the slots. 3. One commit_smem, then both copies start."
    )
    words(ax, 3.9, 0.34, text, size=8)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
