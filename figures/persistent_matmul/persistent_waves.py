"""Waves: tiles in turn on a few SMs, and the share of the SMs' time that is used, by the number of tiles."""

import math

from matplotlib.patches import Rectangle

from figures._draw import save
from lab import plot

SMS, TILES = 6, 15  # SMs and tiles of the small picture.
NUM_SMS = 132  # On an H100 and on an H200.
# Sizes of o in tiles of 128 x 256, and where their text stands.
MARKED = ((128, "2048 x 2048", (200, 0.25)), (512, "4096 x 4096", (420, 0.45)), (544, "4096 x 4352", (650, 0.45)))


def busy_share(tiles: int, num_sms: int = NUM_SMS) -> float:
    """Share of the SMs' time in which they compute, if all tiles take equally long."""
    return tiles / (math.ceil(tiles / num_sms) * num_sms)


def draw():
    with plot.figure(height=3.0, ncols=2, width_ratios=(1, 1.5)) as (fig, (left, right)):
        waves = math.ceil(TILES / SMS)
        for i in range(waves * SMS):
            wave, sm = divmod(i, SMS)
            idle = i >= TILES
            colour = plot.FAINT if idle else plot.COLOURS[(0, 4, 2)[wave]]
            left.add_patch(Rectangle((wave, sm - 0.42), 0.97, 0.84, facecolor=colour, hatch="//" if idle else ""))
            ink = plot.INK if idle or wave == 1 else plot.CARD
            text = left.text(wave + 0.48, sm, "idle" if idle else f"tile {i}", ha="center", va="center", fontsize=7.5)
            text.set(color=ink, bbox=dict(facecolor=plot.CARD, edgecolor="none", pad=1.5) if idle else None)
        left.set(xlim=(0, waves), ylim=(SMS - 0.4, -0.6), xticks=range(waves + 1), xlabel="time, in tiles")
        left.set_yticks(range(SMS), [f"SM {sm}" for sm in range(SMS)])
        left.grid(visible=False)
        left.set_title(f"{TILES} tiles, {SMS} SMs: {TILES}/{waves * SMS} busy", fontsize=9)

        counts = range(1, 6 * NUM_SMS + 1)
        right.plot(counts, [busy_share(tiles) for tiles in counts], linewidth=1.2)
        for tiles, name, place in MARKED:
            share = busy_share(tiles)
            right.plot(tiles, share, "o", color=plot.BOUND)
            line = dict(arrowstyle="-", color=plot.INK, linewidth=0.8)
            text, ground = f"{name}\n{tiles} tiles: {share:.0%}", dict(facecolor=plot.CARD, edgecolor="none", pad=1)
            right.annotate(text, (tiles, share), place, fontsize=8, ha="center", arrowprops=line, bbox=ground)
        right.set(xlabel="tiles", ylim=(0, 1.05), xticks=[NUM_SMS * i for i in range(7)])
        right.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        right.set_title(f"Share of the time of {NUM_SMS} SMs that is used", fontsize=9)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
