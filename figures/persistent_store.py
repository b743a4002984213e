"""The way out: accumulators are rounded a piece at a time into two slots, from where TMA takes them to o."""

from figures._draw import BLUE, GREEN, ORANGE, SKY, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 2.75)
    words(ax, 1.55, 2.55, "registers of a compute warpgroup", size=9, weight="bold")
    words(ax, 1.55, 2.3, "64 x 256 float32: 64 KB", size=8)
    for piece, (colour, text) in enumerate(
        ((SOFT, "sent"), (ORANGE, "being read"), (GREEN, "rounding"), (BLUE, "waits"))
    ):
        x = 0.25 + 0.66 * piece
        box(ax, x, 0.85, 0.6, 1.2, f"piece\n{piece}", colour=colour, size=8.5)
        words(ax, x + 0.3, 0.65, text, size=7.5, colour=colour)

    words(ax, 4.4, 2.55, "shared memory", size=9, weight="bold")
    words(ax, 4.4, 2.3, "2 slots of 8 KB a warpgroup", size=8)
    box(ax, 3.75, 1.5, 1.3, 0.55, "slot 0: piece 2", colour=GREEN, size=8.5)
    box(ax, 3.75, 0.8, 1.3, 0.55, "slot 1: piece 1", colour=ORANGE, size=8.5)

    words(ax, 6.8, 2.55, "o in HBM, by way of L2", size=9, weight="bold")
    words(ax, 6.8, 2.3, "64 x 256 bfloat16: 32 KB", size=8)
    for piece in range(4):
        colour = (SOFT, ORANGE, SKY, SKY)[piece]
        box(
            ax,
            6.05 + 0.38 * piece,
            0.85,
            0.36,
            1.2,
            f"{piece}",
            colour=colour,
            size=8.5,
            fill=0.3 if piece < 1 else 0.05,
        )

    arrow(ax, (2.2, 1.78), (3.75, 1.78), GREEN, "round, write", offset=(0.42, 0.13))
    arrow(ax, (5.05, 1.08), (6.05, 1.08), ORANGE, "TMA copies", offset=(-0.02, 0.13))
    text = (
        "Before a piece is rounded into a slot, wait_smem_to_gmem(1, wait_read_only=True): TMA has read what lay there."
        "\nIt need not have arrived at o: nobody waits for that until the block has done its last tile."
    )
    words(ax, 3.9, 0.3, text, size=8)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
