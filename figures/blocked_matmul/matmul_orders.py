"""The order in which blocks visit the tiles of o, and what the blocks that run together read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from matplotlib.colors import ListedColormap

from figures._draw import save
from lab import plot

TILES, TOGETHER = 64, 264  # Tiles along each side; blocks that run at once: two on each SM of an H100 or H200.
WIDTHS = (1, 16)


def tile_order(tiles_m, tiles_n, width):
    """Rows and columns of the tiles in the order in which blocks visit them."""
    tile = functools.partial(plgpu.planar_snake, shape=(tiles_m, tiles_n), minor_dim=0, tile_width=width)
    return [np.asarray(i) for i in jax.vmap(tile)(jnp.arange(tiles_m * tiles_n))]


def draw():
    with plot.figure(height=4.3, ncols=len(WIDTHS)) as (fig, axes):
        for ax, width in zip(axes, WIDTHS, strict=True):
            _draw(ax, *tile_order(TILES, TILES, width), width)
    return fig


def _draw(ax, rows, cols, width):
    """Waves in shades; beside and above, the tiles of a and b that the first wave reads."""
    gap = 5
    picture = np.full((TILES + gap, TILES + gap), np.nan)
    wave = np.arange(rows.size) // TOGETHER
    picture[rows + gap, cols + gap] = np.where(wave == 0, 2, wave % 2)
    first_rows, first_cols = np.unique(rows[:TOGETHER]), np.unique(cols[:TOGETHER])
    picture[gap:, :3], picture[:3, gap:] = 0, 0
    picture[first_rows + gap, :3] = 3
    picture[:3, first_cols + gap] = 4
    colours = ListedColormap([plot.FAINT, "#EDEDEA", plot.OURS, plot.COLOURS[1], plot.COLOURS[2]])
    ax.imshow(picture, cmap=colours, vmin=0, vmax=4, interpolation="nearest")
    path = slice(0, 2 * TOGETHER)
    ax.plot(cols[path] + gap, rows[path] + gap, color=plot.CARD, linewidth=0.5, alpha=0.7)
    ax.set_title("row after row" if width == 1 else f"in a snake, {width} tiles wide")
    ax.set_xlabel(f"first wave: {first_rows.size} tile rows of a, {first_cols.size} tile columns of b")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    save(__file__, draw())
