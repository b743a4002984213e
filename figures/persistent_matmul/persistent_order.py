"""The tiles that persistent blocks compute at the same time, in three orders, and the panels that a wave reads."""

from figures._draw import save
from figures.pipelining.pipeline_order import tiles
from lab import plot

GRID, WAVE = (64, 32), 132  # 8192 x 8192 in tiles of 128 x 256; one block on each SM of an H100 or H200.
TILE = (128, 256)
WAVES = 6  # Drawn.
ORDERS = ((1, 32, "row by row"), (0, 8, "snake, 8 rows"), (0, 16, "snake, 16 rows"))


def panels(grid, minor_dim, tile_width, wave=WAVE) -> list[tuple[int, int]]:
    """For each wave: the panels of A (a row of tiles) and of B (a column of tiles) that its blocks read."""
    rows, columns = tiles(grid, minor_dim, tile_width)
    starts = range(0, len(rows), wave)
    return [(len(set(rows[i : i + wave].tolist())), len(set(columns[i : i + wave].tolist()))) for i in starts]


def draw():
    with plot.figure(height=3.1, ncols=3) as (fig, axes):
        for ax, (minor_dim, tile_width, name) in zip(axes, ORDERS, strict=True):
            rows, columns = tiles(GRID, minor_dim, tile_width)
            for wave in range(WAVES):
                part = slice(wave * WAVE, (wave + 1) * WAVE)
                ax.plot(2 * columns[part] + 0.5, rows[part], "s", markersize=2.0, color=plot.COLOURS[wave])
                ax.plot(2 * columns[part] + 1.5, rows[part], "s", markersize=2.0, color=plot.COLOURS[wave])
            one = slice(0, WAVES * WAVE, WAVE)  # The tiles of block 0.
            ax.plot(2 * columns[one] + 1, rows[one], "o-", color=plot.INK, linewidth=0.7, markersize=4, mfc=plot.CARD)
            of_a, of_b = panels(GRID, minor_dim, tile_width)[1]
            ax.set_title(f"{name}\n({minor_dim}, {tile_width}): wave 1 reads\n{of_a} of A, {of_b} of B", fontsize=8.5)
            ax.set(xlim=(-1, 2 * GRID[1]), ylim=(GRID[0], -1), aspect="equal", yticks=(0, 32, 63))
            ax.set_xticks((1, 33, 63), (0, 16, 31))
            ax.grid(visible=False)
        axes[0].set_ylabel("row of tiles")
        axes[1].set_xlabel("column of tiles (twice as wide); circles: the tiles of block 0, one a wave")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
