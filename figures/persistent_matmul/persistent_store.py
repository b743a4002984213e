"""The way out: pieces of the sums are rounded, in turn, into two slots, from where TMA takes them to o."""

from figures._draw import BLUE, GREEN, ORANGE, SKY, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 2.85)
    words(ax, 1.55, 2.65, "registers of a compute warpgroup", size=9, weight="bold")
    words(ax, 1.55, 2.4, "64 x 256 float32: 64 KB", size=8)
    for piece, (colour, text) in enumerate(
        ((SOFT, "read"), (ORANGE, "being read"), (GREEN, "rounding"), (BLUE, "next"))
    ):
        x = 0.25 + 0.66 * piece
        box(ax, x, 0.95, 0.6, 1.0, f"piece\n{piece}", colour=colour, size=8.5)
        words(ax, x + 0.3, 0.75, text, size=7.5, colour=colour)

    words(ax, 4.4, 2.65, "shared memory", size=9, weight="bold")
    words(ax, 4.4, 2.4, "2 slots of 8 KB a warpgroup", size=8)
    box(ax, 3.75, 1.63, 1.3, 0.55, "slot 0: piece 2", colour=GREEN, size=8.5)
    box(ax, 3.75, 0.9, 1.3, 0.55, "slot 1: piece 1", colour=ORANGE, size=8.5)

    words(ax, 6.8, 2.65, "o in HBM, by way of L2", size=9, weight="bold")
    words(ax, 6.8, 2.4, "64 x 256 bfloat16: 32 KB", size=8)
    for piece in range(4):
        colour = (ORANGE, ORANGE, SKY, SKY)[piece]
        fill = (0.3, 0.15, 0.05, 0.05)[piece]
        box(ax, 6.05 + 0.38 * piece, 0.95, 0.36, 1.2, f"{piece}", colour=colour, size=8.5, fill=fill)
    words(ax, 6.42, 0.75, "in flight", size=7.5, colour=ORANGE)

    arrow(ax, (1.87, 1.95), (3.75, 2.08), GREEN, connectionstyle="angle,angleA=90,angleB=180,rad=4")
    words(ax, 3.2, 2.2, "round, write", size=8, colour=GREEN)
    arrow(ax, (5.05, 1.17), (6.05, 1.17), ORANGE, "TMA reads", offset=(-0.02, 0.13))
    text = (
        "1. wait_smem_to_gmem(1, wait_read_only=True): TMA has read piece 0; piece 1 may still be in its slot.\n"
        "2. Piece 2 is rounded into slot 0. 3. commit_smem, and its copy starts. Then slot 1, piece 3."
    )
    words(ax, 3.9, 0.34, text, size=8)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
