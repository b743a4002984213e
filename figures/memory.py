"""Figures of chapter 2: memory."""

import numpy as np

from figures._chart import bar, bare, chart, label, numbered, tile
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, RED, SKY, SOFT, arrow, box, drawing, places, words
from figures._stepper import stepper
from lab import plot


@drawing(7.8, 4.4)
def memory_levels(ax):
    """Reach of each memory of a GPU: two blocks of two warpgroups each, and the three memories that a kernel names."""
    for i, x in enumerate((0.2, 3.0)):
        _block(ax, x)
        words(ax, x + 0.1, 4.22, f"SM {i}, and the block on it", 9.5, ha="left", weight="bold")
    words(ax, 1.45, 2.85, "load, store", 7.5, colour=GREEN)
    words(ax, 2.1, 1.16, "TMA copies", 7.5, colour=RED, ha="left")
    words(ax, 0.48, 1.16, "load, store", 7.5, colour=RED, ha="left")
    box(ax, 0.2, 0.25, 5.45, 0.6, "GMEM: the arrays of JAX, in HBM, cached by L2", RED)
    for y, name, colour, rest in (
        (3.5, "registers", GREEN, "private to one thread"),
        (
            2.25,
            "SMEM",
            ORANGE,
            "shared by all warpgroups of\na block and its SM's TMA unit;\nfreed when the block ends",
        ),
        (0.55, "GMEM", RED, "shared by all blocks;\noutlives the kernel"),
    ):
        words(ax, 5.85, y + 0.05, name, 9.5, ha="left", va="bottom", weight="bold", colour=colour)
        words(ax, 5.85, y, rest, 8, ha="left", va="top")


def _block(ax, x):
    box(ax, x, 1.4, 2.65, 2.7, colour=BLUE, fill=0.05)
    for wg in range(2):
        left = x + 0.12 + 1.23 * wg
        box(ax, left, 3.15, 1.18, 0.83, colour=SOFT, fill=0.08)
        words(ax, left + 0.59, 3.83, f"warpgroup {wg}", 8)
        box(ax, left + 0.07, 3.22, 1.04, 0.45, "registers", GREEN, size=8)
        arrow(ax, (left + 0.59, 2.55), (left + 0.59, 3.22), GREEN, style="<|-|>")
    box(ax, x + 0.42, 2.13, 2.1, 0.42, "SMEM", ORANGE)
    box(ax, x + 1.4, 1.5, 0.8, 0.36, "TMA", INK, size=8.5)
    arrow(ax, (x + 1.8, 1.86), (x + 1.8, 2.13), ORANGE, style="<|-|>")
    arrow(ax, (x + 1.8, 0.85), (x + 1.8, 1.5), RED, style="<|-|>")
    arrow(ax, (x + 0.24, 0.85), (x + 0.24, 3.22), RED, style="<|-|>")


@drawing(7.8, 3.6)
def memory_handshake(ax):
    """One tile through shared memory: what the warpgroup and the TMA unit do, and the four places of waiting."""
    threads, tma = 2.2, 1.1  # Heights of the two lanes.
    send = 0.26  # Width of the box of a call that only hands work over.
    for y, name, who in ((threads, "warpgroup", "128 threads"), (tma, "TMA unit", "copies by itself")):
        words(ax, 0.1, y + 0.06, name, 9.5, ha="left", va="bottom", weight="bold")
        words(ax, 0.1, y + 0.02, who, 7.5, ha="left", va="top", colour=SOFT)
        ax.plot((1.1, 7.7), (y, y), color=SOFT, linewidth=0.8, zorder=0)
    _bar(ax, 1.2, send, threads, INK)
    _bar(ax, 1.46, 1.42, threads, SOFT, "waits", fill=0.08)
    _bar(ax, 2.88, 1.25, threads, BLUE, "SMEM to registers,\nnegate, to SMEM")
    _bar(ax, 4.13, 0.3, threads, RED)
    _bar(ax, 4.43, send, threads, INK)
    _bar(ax, 4.69, 2.25, threads, SOFT, "waits", fill=0.08)
    _bar(ax, 1.46, 1.35, tma, SKY, "GMEM to SMEM")
    _bar(ax, 4.69, 0.85, tma, ORANGE, "reads SMEM")
    _bar(ax, 5.54, 1.35, tma, GREEN, "writes GMEM")
    arrow(ax, (1.46, threads - 0.2), (1.5, tma + 0.2), INK)
    arrow(ax, (2.81, tma + 0.2), (2.88, threads - 0.2), SKY)
    words(ax, 2.95, 1.65, "all bytes arrived:\nthe barrier flips", 7.5, ha="left")
    arrow(ax, (4.69, threads - 0.2), (4.73, tma + 0.2), INK)
    arrow(ax, (5.54, tma + 0.2), (5.54, threads - 0.2), ORANGE, width=1.0, linestyle=":")
    arrow(ax, (6.89, tma + 0.2), (6.94, threads - 0.2), GREEN)
    for x, anchor, y, text, colour, ha in (
        (1.2, 1.32, 3.1, "copy_gmem_to_smem", INK, "left"),
        (2.2, 2.32, 2.72, "barrier_wait", SOFT, "left"),
        (4.25, 4.28, 3.1, "commit_smem", RED, "right"),
        (4.55, 4.56, 2.72, "copy_smem_to_gmem", INK, "left"),
        (5.85, 5.97, 3.1, "wait_smem_to_gmem(0)", SOFT, "left"),
    ):
        ax.plot((anchor, anchor), (threads + 0.2, y - 0.1), color=colour, linewidth=0.8)
        words(ax, x, y, text, 8, ha=ha, colour=colour, family="monospace")
    words(ax, 5.6, 1.65, "wait_read_only=True\nwould continue here", 7.5, ha="left", colour=SOFT)
    arrow(ax, (1.1, 0.42), (7.7, 0.42), INK, "time", at=(7.7, 0.22), ha="right", width=1.0)


def _bar(ax, x, width, y, colour, text="", fill=0.35):
    box(ax, x, y - 0.2, width, 0.4, colour=plot.CARD, fill=1.0)  # Hides the line of the lane.
    box(ax, x, y - 0.2, width, 0.4, text, colour, fill=fill, size=7.5)


LOAD_TIME, NEGATE, DRAIN = 1.0, 0.22, 0.3  # A tile's load, its time in registers, and the TMA's reading of it.


def schedule(stages: int, tiles: int) -> list[tuple[float, float, float]]:
    """For each tile: when its load starts, when the work on it starts, and when its stage is free again.

    A stage is refilled one tile late (at once if there is only one), as in the chapter's kernel.
    """
    lag = min(1, stages - 1)
    start, work, free, now = {i: 0.0 for i in range(stages)}, {}, {}, 0.0
    for i in range(tiles):
        work[i] = max(now, start[i] + LOAD_TIME)
        now = work[i] + NEGATE
        free[i] = now + DRAIN
        if i >= lag:
            now = max(now, free[i - lag])
            start[i - lag + stages] = now
    return [(start[i], work[i], free[i]) for i in range(tiles)]


@chart(height=4.1, nrows=2, sharex=True, height_ratios=(1.35, 3))
def memory_ring(axes):
    """The stages of a ring over time, with one stage and with three: a simulation in units of one load's time."""
    until = schedule(1, 4)[-1][2]
    for ax, stages in zip(axes, (1, 3), strict=True):
        for i, (start, work, free) in enumerate(schedule(stages, 11 if stages == 3 else 4)):
            for left, right, colour, text in (
                (start, start + LOAD_TIME, SKY, f"load {i}"),
                (work, work + NEGATE, BLUE, f"{i}"),
                (work + NEGATE, free, ORANGE, f"{i}"),
            ):
                text = text if right <= until + 1e-6 else ""
                bar(ax, i % stages, left, right, text, colour, clip=False, linewidth=None)
        ax.set_yticks(range(stages), numbered("stage", stages))
        ax.set_ylim(stages - 0.45, -0.55)
        ax.grid(axis="y", visible=False)
    axes[0].set_title("one stage: one load in flight, and none while the tile is worked on")
    axes[1].set_title("three stages: while a tile is worked on, the others load")
    for colour, name in ((SKY, "TMA loads"), (BLUE, "the warpgroup works"), (ORANGE, "TMA reads, for the store")):
        axes[0].plot([], [], "s", color=colour, label=name)
    known = axes[0].get_legend_handles_labels()
    axes[0].figure.legend(*known, loc="outside lower right", ncols=3, handletextpad=0.2)
    axes[1].set(xlim=(0, until), xlabel="time, in units of one load")


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
    for sizes in definition.tiling.tiles:  # Each tile splits the last dimensions into how many tiles, and the tile.
        outer, n = index.ndim - len(sizes), len(sizes)
        split = [part for size, t in zip(index.shape[outer:], sizes, strict=True) for part in (size // t, t)]
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


@chart(7.8, 4.6, ncols=4, width_ratios=(1, 3.6, 1, 3.6))
def memory_layouts(axes):
    """Which thread of a warpgroup holds which element: WG_STRIDED and WGMMA, on the same 64 x 16 array."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layouts = (
        (f"WG_STRIDED, {VEC} elements per thread", plgpu.Layout.WG_STRIDED(SHAPE, VEC)),
        ("WGMMA", plgpu.Layout.WGMMA),
    )
    for (whole, zoom), (name, layout) in zip((axes[:2], axes[2:]), layouts, strict=True):
        owner = owners(layout, SHAPE)
        _warps(whole, owner)
        _threads(zoom, owner[:ZOOM])
        zoom.set_title(name, fontsize=9)
        zoom.set_xlabel(f"threads that hold rows 0 to {ZOOM - 1}", fontsize=8.5)
        whole.set_xlabel("warps", fontsize=8.5)


def _warps(ax, owner):
    import matplotlib.colors as colors

    ax.imshow(owner // 32, cmap=colors.ListedColormap(plot.COLOURS[:4]), alpha=0.75, aspect="auto")
    for warp in range(4):
        rows = np.nonzero((owner // 32 == warp).any(axis=1))[0]
        label(ax, 7.5, rows.mean(), f"{warp}", 9, fontweight="bold")
    ax.axhline(ZOOM - 0.5, color=INK, linewidth=1)
    ax.set(xticks=(0, 8, 15), yticks=(0, 16, 32, 48, 63))
    _bare(ax)


def _threads(ax, owner):
    ax.imshow(owner % 32, cmap="twilight", alpha=0.45, vmin=0, vmax=35, aspect="auto")
    for (row, col), thread in np.ndenumerate(owner):
        if col == 0 or owner[row, col - 1] != thread:  # Once a run.
            run = np.argmin(np.append(owner[row, col:] == thread, False))
            label(ax, col + (run - 1) / 2, row, f"{thread}")
            ax.plot((col - 0.5,) * 2, (row - 0.5, row + 0.5), color=plot.CARD, linewidth=1.2)
    for row in range(ZOOM + 1):
        ax.axhline(row - 0.5, color=plot.CARD, linewidth=1.2)
    if owner[8, 0] == owner[0, 0]:
        ax.axhline(7.5, color=INK, linewidth=1)
        ax.axvline(7.5, color=INK, linewidth=1)
    ax.set(xticks=(0, 8, 15), yticks=(0, 4, 8, 12, 15))
    _bare(ax)


def _bare(ax):
    bare(ax)
    ax.tick_params(labelsize=7.5)


PLACES = {
    "plain: 128 bytes per row": lambda row, piece: (row, piece),
    "swizzled: piece c at c ^ r": lambda row, piece: (row, piece ^ row % 8),
    "padded: 144 bytes per row": lambda row, piece: divmod(9 * row + piece, 8),
}


@chart(7.8, 3.5, ncols=3)
def memory_banks(axes):
    """Where eight rows of a 64-column bf16 tile lie in the 32 banks of shared memory: plain, swizzled, padded."""
    rows, pieces, column = (
        8,
        8,
        2,
    )  # A piece is 16 bytes: 8 elements of bf16, 4 banks. `column` is the one that is read.
    for ax, (title, place) in zip(axes, PLACES.items(), strict=True):
        for row, piece in places(rows, pieces):
            line, quad = place(row, piece)
            colour, ink, weight = SKY if row % 2 else "#B9DDF3", INK, "normal"
            if piece == column:
                colour, ink, weight = RED, plot.CARD, "bold"
            tile(ax, quad + 0.03, line + 0.03, 0.94, 0.94, colour, edgecolor="none")
            label(ax, quad + 0.5, line + 0.5, f"{row},{piece}", 7, colour=ink, fontweight=weight)
        quads = [place(row, column)[1] for row in range(rows)]
        ways = max(map(quads.count, quads))
        ax.set(xlim=(0, 8), ylim=(9.05, 0), yticks=[])
        ax.set_xticks([i + 0.5 for i in range(8)], [f"{4 * i}" for i in range(8)])
        ax.set_title(title, fontsize=9)
        cost = f"{ways} accesses, in turn" if ways > 1 else "one access"
        ax.set_xlabel(f"first of four banks\npiece {column} of rows 0 to 7: {cost}", fontsize=8)
        _bare(ax)
    axes[0].set_ylabel("128 bytes of SMEM per line", fontsize=8)


ARRIVALS = 2  # That the barrier of the steps expects.
BARRIER_STEPS = (  # Arrivals before the frame; whether the warpgroup ends its wait first; whether it waits; caption.
    (0, False, True, "Two copies are in flight. The bits are equal, so the warpgroup waits."),
    (1, False, True, "The copy of x arrives with its last byte. One of two arrivals is counted, and the bit stays."),
    (
        1,
        False,
        True,
        "The copy of y arrives, so the count is complete: the barrier flips its bit and counts from 0 again. "
        "The bits differ, and the wait ends.",
    ),
    (
        0,
        True,
        True,
        "The warpgroup has seen the flip, so its own bit flips, too. It starts the next two copies and waits until the "
        "bits differ again.",
    ),
    (2, False, True, "Both copies arrive. The barrier's bit is 0 again, the warpgroup's is 1, and the wait ends."),
    (
        2,
        True,
        False,
        "Now a mistake: two more copies arrive, and the warpgroup does not wait for them. Its bit flipped to 0 when "
        "the last wait ended, and stays 0.",
    ),
    (
        2,
        False,
        True,
        "After two more arrivals the barrier's bit is 0, like the warpgroup's. Two flips look like none: "
        "the warpgroup waits for a phase that is over.",
    ),
)


@stepper(7.8, 2.3)
def barrier_in_steps(ax):
    """A barrier that expects two arrivals: its count, its phase bit, and the bit of a warpgroup that waits at it."""
    words(ax, 1.1, 2.1, "TMA", weight="bold")
    words(ax, 3.95, 2.1, "barrier, in shared memory", weight="bold")
    words(ax, 6.75, 2.1, "warpgroup", weight="bold")
    box(ax, 2.7, 0.55, 2.5, 1.35, colour=SOFT, fill=0.04)
    box(ax, 5.9, 0.55, 1.7, 1.35, colour=SOFT, fill=0.04)
    words(ax, 2.85, 1.55, "arrivals", ha="left")
    words(ax, 2.85, 0.9, "phase bit", ha="left")
    words(ax, 6.05, 0.9, "its own bit", ha="left")
    yield
    arrived = seen = 0
    for arrivals, goes_on, waits, caption in BARRIER_STEPS:
        arrived, seen = arrived + arrivals, seen + goes_on
        flips, count = divmod(arrived, ARRIVALS)
        for copy, name in enumerate("xy"):
            lands = copy in [(arrived - 1 - i) % ARRIVALS for i in range(arrivals)]
            text = "arrives" if lands else "has arrived" if arrivals and not copy else "in flight"
            tile(ax, 0.3, 1.35 - 0.6 * copy, 1.6, 0.4, SKY if lands else PALE, f"copy of {name}: {text}", 8)
            if lands:
                arrow(ax, (1.95, 1.55 - 0.6 * copy), (2.65, 1.5 - 0.3 * copy), BLUE)
        for i in range(ARRIVALS):
            tile(ax, 4.2 + 0.4 * i, 1.4, 0.32, 0.32, BLUE if i < count else plot.CARD, edgecolor=INK)
        bits = flips % 2, seen % 2
        for x, bit in zip((4.2, 7.0), bits, strict=True):
            tile(ax, x, 0.75, 0.32, 0.32, (SKY, ORANGE)[bit], str(bit), 10, edgecolor=INK)
        words(ax, 4.62, 0.9, f"{flips} flips" if flips != 1 else "1 flip", 7.5, ha="left", colour=SOFT)
        differ = bits[0] != bits[1]
        text, colour = ("goes on", GREEN) if differ else ("waits", RED)
        words(ax, 6.75, 1.55, text if waits else "does not look", weight="bold", colour=colour if waits else SOFT)
        arrow(ax, (5.25, 0.91), (5.85, 0.91), colour, style="<|-|>")
        words(ax, 5.55, 0.3, "the bits differ" if differ else "the bits are equal", 8.5, colour=colour)
        yield caption
