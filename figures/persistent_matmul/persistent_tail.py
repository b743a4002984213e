"""The last wave of tiles on a few SMs: whole, and cut into narrower tiles for the SMs that would idle."""

from matplotlib.patches import Rectangle

from figures._draw import save
from lab import plot

SMS, TILES, SPLIT = 6, 8, 3


def tiles_of_sms(split: int) -> list[tuple[int, float, float, str]]:
    """(SM, start, length, text) of each tile; those of the last wave are cut into `split`."""
    whole = TILES // SMS * SMS if split > 1 else TILES
    shown = [(i % SMS, float(i // SMS), 1.0, f"tile {i}") for i in range(whole)]
    for i in range((TILES - whole) * split):
        tile, part = divmod(i, split)
        shown.append((i % SMS, whole / SMS + i // SMS / split, 1 / split, f"{whole + tile}{'abc'[part]}"))
    return shown


def draw():
    with plot.figure(height=2.6, ncols=2, sharey=True) as (fig, axes):
        for ax, split in zip(axes, (1, SPLIT), strict=True):
            tiles = tiles_of_sms(split)
            for sm, start, length, text in tiles:
                colour = plot.COLOURS[0] if start < 1 else plot.COLOURS[4]
                ax.add_patch(Rectangle((start, sm - 0.42), length - 0.03, 0.84, facecolor=colour))
                ink = plot.CARD if start < 1 else plot.INK
                ax.text(start + length / 2 - 0.015, sm, text, ha="center", va="center", fontsize=7.5, color=ink)
            end = max(start + length for _, start, length, _ in tiles)
            for sm in range(SMS):
                busy = max(start + length for other, start, length, _ in tiles if other == sm)
                if busy < end:
                    ax.add_patch(Rectangle((busy, sm - 0.42), end - busy, 0.84, facecolor=plot.FAINT, hatch="//"))
            ax.axvline(end, color=plot.BOUND, linewidth=1.2)
            ax.set(xlim=(0, 2.05), ylim=(SMS - 0.4, -0.6), xticks=(0, 1, 2), xlabel="time, in whole tiles")
            ax.set_yticks(range(SMS), [f"SM {sm}" for sm in range(SMS)])
            ax.grid(visible=False)
        axes[0].set_title(f"{TILES} whole tiles on {SMS} SMs", fontsize=9)
        axes[1].set_title(f"tail_split={SPLIT}: the last {TILES - SMS} tiles, each in {SPLIT}", fontsize=9)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
