"""The order in which the blocks of a grid take tiles of the output, and the panels that one wave reads."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from figures._draw import save
from lab import plot

GRID, WAVE = (64, 64), 132  # 8192x8192 in tiles of 128x128; one block on each SM of an H100 or H200.
WAVES = 6  # Drawn.
ORDERS = ((1, 64, "row by row"), (1, 8, "strips of 8 columns"), (0, 16, "strips of 16 rows"))


def tiles(grid: tuple[int, int], minor_dim: int, tile_width: int):
    """(row, column) of the tile of each block, in the order of the blocks."""
    blocks = jnp.arange(grid[0] * grid[1])
    rows, columns = jax.jit(jax.vmap(lambda i: plgpu.planar_snake(i, grid, minor_dim, tile_width)))(blocks)
    return np.asarray(rows), np.asarray(columns)


def panels(grid, minor_dim, tile_width, wave=WAVE) -> list[tuple[int, int]]:
    """For each wave of blocks: how many rows of tiles of A and how many columns of tiles of B it reads."""
    rows, columns = tiles(grid, minor_dim, tile_width)
    starts = range(0, len(rows), wave)
    return [(len(set(rows[i : i + wave].tolist())), len(set(columns[i : i + wave].tolist()))) for i in starts]


def draw():
    """The first WAVES waves in colour, the path of the blocks as a line."""
    with plot.figure(height=3.3, ncols=3) as (fig, axes):
        for ax, (minor_dim, tile_width, name) in zip(axes, ORDERS, strict=True):
            rows, columns = tiles(GRID, minor_dim, tile_width)
            for wave in range(WAVES):
                part = slice(wave * WAVE, (wave + 1) * WAVE)
                ax.plot(columns[part], rows[part], "s", markersize=2.1, color=plot.COLOURS[wave])
            ax.plot(columns[: WAVES * WAVE], rows[: WAVES * WAVE], color=plot.INK, linewidth=0.4)
            of_a, of_b = panels(GRID, minor_dim, tile_width)[1]
            ax.set_title(f"{name}\n({minor_dim}, {tile_width}): {of_a} + {of_b} panels", fontsize=8.5)
            ax.set(xlim=(-1, GRID[1]), ylim=(GRID[0], -1), aspect="equal", xticks=(0, 32, 63), yticks=(0, 32, 63))
            ax.grid(visible=False)
        axes[0].set_ylabel("row of tiles")
        axes[1].set_xlabel("column of tiles")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
