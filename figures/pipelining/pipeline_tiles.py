"""Tiles of the output to scale, and what one step of each reads: area is arithmetic, edges are traffic."""

from matplotlib.patches import Rectangle

from figures._draw import save
from figures.pipelining.pipeline_schedule import LOAD
from lab import plot

TILES = ((64, 256), (128, 128), (128, 192), (128, 256))
TILE_K, GAP = 64, 14


def draw():
    with plot.figure(height=3.0) as (fig, ax):
        left = 0
        for tile_m, tile_n in TILES:
            corner = left + TILE_K + GAP
            _box(ax, left, -tile_m, TILE_K, tile_m, LOAD, "A")
            _box(ax, corner, GAP, tile_n, TILE_K, LOAD, "B")
            registers = tile_m * tile_n // 128
            flop_a_byte = 2 * tile_m * tile_n / (2 * (tile_m + tile_n))
            colour = plot.BOUND if registers > 192 else plot.OURS
            _box(ax, corner, -tile_m, tile_n, tile_m, colour, f"{tile_m}x{tile_n}")
            text = f"{flop_a_byte:.0f} FLOP a byte\n{registers} accumulators\na thread"
            ax.text(corner, -tile_m - 10, text, fontsize=7.5, va="top")
            left = corner + tile_n + 70
        ax.set(xlim=(-10, left - 60), ylim=(-235, TILE_K + 20), aspect="equal")
        ax.axis("off")
        ax.set_title("One step of K = 64: light is loaded, dark is kept in registers")
    return fig


def _box(ax, x, y, width, height, colour, text):
    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=plot.CARD))
    ink = plot.INK if colour == LOAD else plot.CARD
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=7)


if __name__ == "__main__":
    save(__file__, draw())
