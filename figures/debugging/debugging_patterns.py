"""Six pictures of an error over a matrix of 4 x 4 tiles, and what each is a sign of; drawn by NumPy, not run."""

import numpy as np

from figures._draw import save
from lab import plot

TILES, SIDE = 4, 16  # Tiles along each side of the matrix, elements along each side of a tile.


def _whole(is_wrong, size=1.0):
    """Errors of a matrix, random in the tiles (row, column) of which `is_wrong` holds."""
    noise = np.abs(np.random.default_rng(0).standard_normal((TILES * SIDE, TILES * SIDE)))
    row, column = (index // SIDE for index in np.indices(noise.shape))
    return np.where(is_wrong(row, column), size * noise, 0.0)


def _last_tile():
    return _whole(lambda i, j: (i == TILES - 1) & (j == TILES - 1), np.nan)


def _swizzled():
    """One tile of 64 columns whose rows' pieces of 8 values are read in an order that the writer did not use."""
    row, column = np.indices((64, 64))
    piece = column // 8
    return np.abs((piece ^ (row % 8)) - piece) / 3.0  # Errors where values grow along a row.


def patterns():
    """(title, what it is a sign of, errors) of each."""
    turn = lambda i, j: (i * TILES + j) // 2  # Two blocks take tiles in turn.
    return (
        ("one tile, never written", "the number of turns", _last_tile()),
        ("the last row of tiles", "the tail", _whole(lambda i, j: i == TILES - 1)),
        ("every tile, a little", "a step of K", _whole(lambda i, j: i >= 0, 0.3)),
        ("every second turn", "slot or phase", _whole(lambda i, j: turn(i, j) % 2 == 1)),
        ("right on the diagonal", "two indices exchanged", _whole(lambda i, j: i != j)),
        ("inside of a tile: 8 rows", "the swizzle", _swizzled()),
    )


def draw():
    with plot.figure(7.8, 5.4, nrows=2, ncols=3) as (fig, axes):
        for ax, (title, sign, errors) in zip(axes.flat, patterns(), strict=True):
            plot.error_image(ax, errors, 2.5, title)
            ax.set_title(title, fontsize=9, fontweight="bold")
            ax.set_xlabel(sign)
            step = 8 if "inside" in title else SIDE
            for axis, size in ((ax.yaxis, errors.shape[0]), (ax.xaxis, errors.shape[1])):
                axis.set_ticks(np.arange(0, size, step) - 0.5, [])
            ax.grid(visible=True, linewidth=0.5)
            ax.set_axisbelow(False)
            ax.tick_params(length=0)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
