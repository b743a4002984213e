"""Which thread of a warpgroup holds which element: WG_STRIDED and WGMMA, on the same 64 x 16 array."""

import numpy as np

from figures._draw import save
from lab import plot

SHAPE, VEC, ZOOM = (64, 16), 8, 16


def owners(layout, shape) -> np.ndarray:
    """The thread, 0 to 127, that holds each element of an array of `shape`.

    Args:
      layout: a Pallas layout, such as `plgpu.Layout.WGMMA` or `plgpu.Layout.WG_STRIDED(shape, 8)`; read from its own
        definition.
    """
    definition = layout.to_mgpu()
    index = np.arange(np.prod(shape)).reshape(shape)
    if not hasattr(definition, "tiling"):
        return index // definition.vec_size % 128
    for tile in definition.tiling.tiles:  # Each tile splits the last dimensions into how many tiles, and the tile.
        outer, n = index.ndim - len(tile), len(tile)
        split = [part for size, t in zip(index.shape[outer:], tile, strict=True) for part in (size // t, t)]
        index = index.reshape(*index.shape[:outer], *split)
        index = index.transpose(*range(outer), *range(outer, outer + 2 * n, 2), *range(outer + 1, outer + 2 * n, 2))
    place = np.indices(index.shape)
    warp, lane = (
        np.ravel_multi_index([place[d] for d in dims], [index.shape[d] for d in dims])
        for dims in (definition.warp_dims, definition.lane_dims)
    )
    owner = np.empty(index.size, int)
    owner[index.ravel()] = (32 * warp + lane).ravel()
    return owner.reshape(shape)


def draw():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layouts = (
        (f"WG_STRIDED, {VEC} elements a thread", plgpu.Layout.WG_STRIDED(SHAPE, VEC)),
        ("WGMMA", plgpu.Layout.WGMMA),
    )
    with plot.figure(7.8, 4.6, ncols=4, width_ratios=(1, 3.6, 1, 3.6)) as (fig, axes):
        for (whole, zoom), (name, layout) in zip((axes[:2], axes[2:]), layouts, strict=True):
            owner = owners(layout, SHAPE)
            _warps(whole, owner)
            _threads(zoom, owner[:ZOOM])
            zoom.set_title(name, fontsize=9)
            zoom.set_xlabel(f"threads that hold rows 0 to {ZOOM - 1}", fontsize=8.5)
            whole.set_xlabel("warps", fontsize=8.5)
    return fig


def _warps(ax, owner):
    import matplotlib.colors as colors

    ax.imshow(owner // 32, cmap=colors.ListedColormap(plot.COLOURS[:4]), alpha=0.75, aspect="auto")
    for warp in range(4):
        rows = np.nonzero((owner // 32 == warp).any(axis=1))[0]
        ax.text(7.5, rows.mean(), f"{warp}", ha="center", va="center", fontsize=9, fontweight="bold")
    ax.axhline(ZOOM - 0.5, color=plot.INK, linewidth=1)
    ax.set_yticks((0, 16, 32, 48, 63))
    _bare(ax)


def _threads(ax, owner):
    ax.imshow(owner % 32, cmap="twilight", alpha=0.45, vmin=0, vmax=35, aspect="auto")
    for (row, col), thread in np.ndenumerate(owner):
        if col == 0 or owner[row, col - 1] != thread:  # Once a run.
            run = np.argmin(np.append(owner[row, col:] == thread, False))
            ax.text(col + (run - 1) / 2, row, f"{thread}", ha="center", va="center", fontsize=8)
            ax.plot((col - 0.5,) * 2, (row - 0.5, row + 0.5), color=plot.CARD, linewidth=1.2)
    for row in range(ZOOM + 1):
        ax.axhline(row - 0.5, color=plot.CARD, linewidth=1.2)
    if owner[8, 0] == owner[0, 0]:
        ax.axhline(7.5, color=plot.INK, linewidth=1)
        ax.axvline(7.5, color=plot.INK, linewidth=1)
    ax.set_yticks((0, 4, 8, 12, 15))
    _bare(ax)


def _bare(ax):
    ax.set_xticks((0, 8, 15))
    ax.grid(visible=False)
    ax.tick_params(length=0, labelsize=7.5)
    for spine in ax.spines.values():
        spine.set_visible(False)


if __name__ == "__main__":
    save(__file__, draw())
