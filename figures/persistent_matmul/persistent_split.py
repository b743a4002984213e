"""Three tiles with a long K on eight SMs: whole, split in two parts, and cut wherever an SM's share ends."""

from matplotlib.patches import Rectangle

from figures._draw import save
from lab import plot

TILES, STEPS, SMS = 3, 16, 8
CASES = (
    ("a block a tile: 3 of 8 SMs, 16 steps", STEPS),
    ("split_k=2: 6 of 8 SMs, 8 steps, then 2 parts are added", STEPS // 2),
    ("stream-K: 8 of 8 SMs, 6 steps; tiles are cut where a share ends", TILES * STEPS // SMS),
)


def draw():
    with plot.figure(height=4.6, nrows=3) as (fig, axes):
        for ax, (title, share) in zip(axes, CASES, strict=True):
            for index in range(TILES * STEPS):
                tile, step = divmod(index, STEPS)
                sm = index // share if STEPS % share else step // share * TILES + tile  # Part by part.
                colour = plot.COLOURS[:6][sm % 6] if sm < 6 else (plot.PEER, plot.INK)[sm - 6]
                ax.add_patch(Rectangle((step, tile - 0.4), 1, 0.8, facecolor=colour, alpha=0.75, edgecolor=plot.CARD))
                if index % share == 0 or step == 0:
                    ink = plot.CARD if sm in (0, 5, 7) else plot.INK
                    ax.text(step + 0.12, tile, f"SM {sm}", fontsize=7, va="center", color=ink, clip_on=True)
            ax.set_yticks(range(TILES), [f"tile {tile}" for tile in range(TILES)])
            ax.set(xlim=(0, STEPS), ylim=(TILES - 0.5, -0.5), xticks=range(0, STEPS + 1, 4))
            ax.grid(visible=False)
            ax.set_title(title, fontsize=9)
        axes[-1].set_xlabel("steps of K")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
