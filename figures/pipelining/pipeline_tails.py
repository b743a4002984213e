"""A product whose sides are no multiples of the tile: the zeros that TMA fills in, and the values that it drops."""

from matplotlib.patches import Rectangle

from figures._draw import save
from lab import plot

M, N, K = 200, 192, 320
TILE_M, TILE_N, TILE_K = 128, 128, 64


def draw():
    with plot.figure(height=3.6) as (fig, ax):
        _matrix(ax, 0, 0, M, K, TILE_M, TILE_K, f"A {M}x{K}", "zeros")
        _matrix(ax, 380, 0, K, N, TILE_K, TILE_N, f"B {K}x{N}", "zeros")
        _matrix(ax, 700, 0, M, N, TILE_M, TILE_N, f"C {M}x{N}", "dropped")
        ax.set(xlim=(-10, 970), ylim=(330, -40), aspect="equal")
        ax.axis("off")
    return fig


def _matrix(ax, left, top, rows, columns, tile_rows, tile_columns, name, outside):
    below, beside = -rows % tile_rows, -columns % tile_columns  # How far the last tiles reach out of the matrix.
    size = (left, top), columns + beside, rows + below
    ax.add_patch(Rectangle(*size, facecolor=plot.FAINT, edgecolor=plot.BOUND, hatch="//", linewidth=0))
    ax.add_patch(Rectangle((left, top), columns, rows, facecolor=plot.COLOURS[4]))
    for row in range(0, rows, tile_rows):
        for column in range(0, columns, tile_columns):
            corner = (left + column, top + row)
            ax.add_patch(Rectangle(corner, tile_columns, tile_rows, facecolor="none", edgecolor=plot.INK))
    ax.text(left, top - 10, name, fontweight="bold")
    where = (left + columns / 2, top + rows + below / 2) if below else (left + columns + beside / 2, top + rows / 2)
    ax.text(*where, outside, ha="center", va="center", fontsize=8, bbox=dict(facecolor=plot.CARD, pad=1.5, linewidth=0))


if __name__ == "__main__":
    save(__file__, draw())
