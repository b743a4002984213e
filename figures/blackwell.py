"""Figures of chapter 19: Blackwell."""

from figures._chart import MULTIPLY, bar, chart, label, lanes
from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SOFT, arrow, box, drawing, words
from lab import plot


@drawing(7.8, 4.15)
def blackwell_tmem(ax):
    """Where the sums of a tile lie: in the registers of the warpgroups that multiply, or in tensor memory."""
    for left, name, title in (
        (0.2, "Hopper", "sums in registers, beside everything else"),
        (4.05, "Blackwell", "sums in tensor memory, which holds two tiles"),
    ):
        box(ax, left, 0.2, 3.55, 3.5, colour=SOFT, fill=0.04)
        words(ax, left + 0.05, 3.93, name, 10, weight="bold", ha="left")
        words(ax, left + 1.02, 3.92, title, 8, ha="left", colour=SOFT)
        box(ax, left + 0.25, 2.95, 3.05, 0.5, "shared memory: stages of A and B", colour=BLUE, size=8.5)

    box(ax, 0.45, 2.0, 3.05, 0.45, "tensor cores", colour=ORANGE, size=8.5)
    arrow(ax, (1.98, 2.95), (1.98, 2.45), BLUE)
    for wg in range(2):
        x = 0.45 + 1.6 * wg
        arrow(ax, (x + 0.72, 2.0), (x + 0.72, 1.55), ORANGE, style="<|-|>")
        box(ax, x, 0.75, 1.45, 0.8, colour=GREEN, fill=0.04)
        box(ax, x, 0.75, 0.85, 0.8, "sums\n64 x 256", colour=GREEN, fill=0.3, size=8)
        words(ax, x + 1.15, 1.15, "the\nrest", 7.5)
        words(ax, x + 0.72, 0.57, f"registers, warpgroup {wg}", 7.5, colour=GREEN)
    words(ax, 1.98, 0.34, "128 of each thread's 255 registers hold sums", 7.5, colour=SOFT)

    box(ax, 4.3, 2.0, 3.05, 0.45, "tensor cores", colour=ORANGE, size=8.5)
    arrow(ax, (5.0, 2.95), (5.0, 2.45), BLUE)
    arrow(ax, (5.0, 2.0), (5.0, 1.72), ORANGE, style="<|-|>")
    box(ax, 4.3, 1.0, 1.5, 0.72, "tile i + 1\n128 x 256", colour=PINK, fill=0.3, size=8)
    box(ax, 5.85, 1.0, 1.5, 0.72, "tile i\n128 x 256", colour=PINK, fill=0.12, size=8)
    words(ax, 4.3, 0.83, "tensor memory: 512 columns", 7.5, colour=PINK, ha="left")
    box(ax, 6.05, 0.3, 1.3, 0.38, "store's registers", colour=GREEN, size=7.5)
    arrow(ax, (6.95, 1.0), (6.95, 0.68), PINK)
    words(ax, 4.3, 0.49, "128 lanes: the rows of a tile", 7.5, colour=SOFT, ha="left")


START, FREE = ORANGE, GREEN


def mark(ax, x, lane, text):
    """An arrival at a barrier, from a lane to that of barriers between the two."""
    arrow = dict(arrowstyle="-|>", color=FREE, linewidth=1.2, shrinkA=0, shrinkB=0)
    ax.annotate("", (x, 1), (x, lane), arrowprops=arrow)
    label(ax, x + 0.06, 1, text, 7.5, ha="left", colour=FREE)


@chart(height=4.3, nrows=2, sharex=True)
def blackwell_issue(axes):
    """Threads that take part in a product: 128 threads that wait for it, or one that only starts it."""
    steps, issue = 5, 0.16  # Products that are shown, and the time to start one; a product takes 1.
    hopper, blackwell = axes
    for step in range(steps):
        bar(hopper, 2, step + issue, step + 1 + issue, f"{step}", MULTIPLY)
        bar(hopper, 0, step, step + issue, "", START)
        if step:
            bar(hopper, 0, step + issue, step + 0.97, f"wait for {step - 1}", plot.FAINT)
            mark(hopper, step + issue, 0.4, f"freed[{step - 1}]")
        bar(blackwell, 0, 1.6 * issue * step, 1.6 * issue * step + issue, "", START)
        bar(blackwell, 2, step + issue, step + 1 + issue, f"{step}", MULTIPLY)
        mark(blackwell, step + 1 + issue, 1.6, f"freed[{step}]")
    bar(hopper, 0, issue, 0.97, "", plot.FAINT)
    bar(blackwell, 0, 1.6 * issue * steps, 3.1, "next tile", START)
    names = "128 threads", "barriers", "tensor core"
    lanes(hopper, names, "Hopper: a warpgroup starts each product together, waits, and gives the stage back")
    names = "1 thread", "barriers", "tensor core"
    lanes(blackwell, names, "Blackwell: one thread starts it, and the tensor core itself gives the stage back")
    for ax in axes:
        ax.set_ylim(2.6, -0.6)
    blackwell.set(xlim=(-0.1, steps + 1.1), xlabel="time (schematic); stages are full")


TILES, MULTIPLIES, STORES = 4, 3.0, 1.0  # Tiles, and the times of a tile's products and of its store; schematic.


def schedule(accumulators: int, tiles: int = TILES, multiply: float = MULTIPLIES, store: float = STORES):
    """(start of the products, their end, end of the store) of each tile."""
    run = []
    for tile in range(tiles):
        start = run[-1][1] if run else 0.0
        if tile >= accumulators:
            start = max(start, run[tile - accumulators][2])  # That tile has left the accumulator.
        summed = start + multiply
        run.append((start, summed, max(summed, run[-1][2] if run else 0.0) + store))
    return run


@chart(height=3.4, nrows=2, sharex=True)
def blackwell_turns(axes):
    """Tiles of one SM whose sums take turns in one accumulator, or in two: when the tensor cores wait for the store."""
    for ax, accumulators in zip(axes, (1, 2), strict=True):
        for tile, (start, summed, stored) in enumerate(run := schedule(accumulators)):
            shade = dict(alpha=0.65) if tile % accumulators else {}
            bar(ax, 0, start, summed, f"tile {tile}, sums {tile % accumulators}", MULTIPLY, **shade)
            bar(ax, 1, stored - STORES, stored, f"tile {tile}", ORANGE)
        ax.axvline(run[-1][2], color=RED, linewidth=1.2)
        plural = "s: the store of a tile runs under the products of the next" if accumulators > 1 else ""
        lanes(ax, ("tensor cores", "store"), f"{accumulators} accumulator{plural}")
    axes[-1].set(xlim=(0, 16.6), xlabel="time (schematic)")
