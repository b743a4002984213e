"""Where eight rows of a 64-column bf16 tile lie in the 32 banks of shared memory: plain, swizzled, padded."""

from figures._draw import save
from lab import plot

ROWS, PIECES, COLUMN = 8, 8, 2  # A piece is 16 bytes: 8 elements of bf16, 4 banks. COLUMN is the one that is read.
PLACES = {
    "plain: 128 bytes a row": lambda row, piece: (row, piece),
    "swizzled: piece c at c ^ r": lambda row, piece: (row, piece ^ row % 8),
    "padded: 144 bytes a row": lambda row, piece: divmod(9 * row + piece, 8),
}


def draw():
    with plot.figure(7.8, 3.5, ncols=3) as (fig, axes):
        for ax, (title, place) in zip(axes, PLACES.items(), strict=True):
            for row in range(ROWS):
                for piece in range(PIECES):
                    line, quad = place(row, piece)
                    read = piece == COLUMN
                    colour = plot.BOUND if read else plot.COLOURS[4] if row % 2 else "#B9DDF3"
                    ax.add_patch(_cell(quad, line, colour))
                    text = dict(
                        fontsize=7, color=plot.CARD if read else plot.INK, fontweight="bold" if read else "normal"
                    )
                    ax.text(quad + 0.5, line + 0.5, f"{row},{piece}", ha="center", va="center", **text)
            quads = [place(row, COLUMN)[1] for row in range(ROWS)]
            ways = max(map(quads.count, quads))
            ax.set(xlim=(0, 8), ylim=(9.05, 0))
            ax.set_xticks([i + 0.5 for i in range(8)], [f"{4 * i}" for i in range(8)])
            ax.set_yticks([])
            ax.set_title(title, fontsize=9)
            cost = f"{ways} accesses, in turn" if ways > 1 else "one access"
            ax.set_xlabel(f"first of four banks\npiece {COLUMN} of rows 0 to 7: {cost}", fontsize=8)
            ax.grid(visible=False)
            ax.tick_params(length=0, labelsize=7.5)
            for spine in ax.spines.values():
                spine.set_visible(False)
        axes[0].set_ylabel("128 bytes of SMEM a line", fontsize=8)
    return fig


def _cell(quad, line, colour):
    import matplotlib.patches as patches

    return patches.Rectangle((quad + 0.03, line + 0.03), 0.94, 0.94, facecolor=colour, edgecolor="none")


if __name__ == "__main__":
    save(__file__, draw())
