"""Groups of rows on four SMs: a launch for each group, a batch padded to the largest, and one launch for all."""

from matplotlib.patches import Rectangle

from figures._draw import BLUE, GREEN, ORANGE, PINK, SKY, save
from lab import plot

SIZES, TILE, COLUMNS, SMS = (70, 0, 130, 1, 63), 64, 2, 4  # Rows of each group; rows of a tile; columns of tiles; SMs.
COLOURS = BLUE, GREEN, ORANGE, PINK, SKY  # Colours of the groups.


def tiles_of(size: int) -> int:
    return -(-size // TILE) * COLUMNS


def in_waves(tiles, first=0):
    """(wave, SM, group, whether it has rows of a group) of each tile, in waves from `first` on."""
    return [(first + i // SMS, i % SMS, *tile) for i, tile in enumerate(tiles)]


def a_launch_each():
    placed, wave = [], 0
    for group, size in enumerate(SIZES):
        placed += in_waves([(group, True)] * tiles_of(size), wave)
        wave += -(-tiles_of(size) // SMS)
    return placed


def padded():
    most = max(map(tiles_of, SIZES))
    return in_waves([(group, i < tiles_of(size)) for group, size in enumerate(SIZES) for i in range(most)])


def together():
    return in_waves([(group, True) for group, size in enumerate(SIZES) for _ in range(tiles_of(size))])


def draw():
    launches = sum(size > 0 for size in SIZES)
    rows = sum(SIZES)
    cases = (
        (f"a launch for each group: {launches} launches", a_launch_each()),
        (f"padded to the largest: {len(SIZES) * max(SIZES)} rows in place of {rows}", padded()),
        ("one launch, tiles from a table", together()),
    )
    end = max(placed[-1][0] for _, placed in cases) + 1
    with plot.figure(7.8, 4.9, nrows=3, sharex=True) as (fig, axes):
        for ax, (title, placed) in zip(axes, cases, strict=True):
            waves = placed[-1][0] + 1
            busy = {(wave, sm) for wave, sm, _, _ in placed}
            for wave, sm, group, useful in placed:
                look = dict(facecolor=COLOURS[group], alpha=0.6) if useful else dict(facecolor=plot.FAINT, hatch="xx")
                ax.add_patch(Rectangle((wave + 0.02, sm - 0.42), 0.96, 0.84, edgecolor=plot.CARD, **look))
                ground = dict(facecolor=plot.CARD, edgecolor="none", pad=1)
                text = f"group {group}" if useful else "padding"
                ax.text(wave + 0.5, sm, text, ha="center", va="center", fontsize=6.5, bbox=None if useful else ground)
            for wave in range(waves):
                for sm in range(SMS):
                    if (wave, sm) not in busy:
                        ax.text(wave + 0.5, sm, "idle", ha="center", va="center", fontsize=6.5, color="#767676")
            ax.axvline(waves, color=plot.BOUND, linewidth=1.5)
            share = sum(useful for *_, useful in placed) / waves / SMS
            ax.text(waves + 0.08, SMS / 2 - 0.5, f"{share:.0%} of the time\nuseful", fontsize=8, color=plot.BOUND,
                    va="center")  # fmt: skip
            ax.set_yticks(range(SMS), [f"SM {sm}" for sm in range(SMS)])
            ax.set(xlim=(0, end + 1.1), ylim=(SMS - 0.4, -0.6))
            ax.grid(visible=False)
            ax.set_title(title, fontsize=9)
        axes[-1].set_xticks(range(end + 1))
        axes[-1].set_xlabel("time, in tiles")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
