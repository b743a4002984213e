"""The last three rungs of chapter 5 over time: serial, a ring, and a ring with a product always queued."""

from figures._draw import save
from lab import plot

LOAD, MULTIPLY = plot.COLOURS[4], plot.OURS
LOAD_TIME, GAP, STEPS = 2.2, 0.35, 9
RUNGS = (
    ("serial: one slot, load, wait, multiply, wait", 1, 0),
    ("ring: three slots, wgmma_wait(0); the tensor core idles between two products", 3, 0),
    ("ring: four slots, wgmma_wait(1); the next product is queued while one runs", 4, 1),
)


def schedule(slots: int, in_flight: int) -> list[tuple[float, float, float]]:
    """For each step: when its load starts, and when its product starts and ends. Times in units of one product.

    The warpgroup goes on when at most `in_flight` products run; it then refills the slot of the one that has ended.
    """
    loads = [0.0] * (slots - in_flight)
    products, now = [(0.0, 0.0)], 0.0
    for step in range(STEPS):
        now = max(now, loads[step] + LOAD_TIME) + GAP
        start = max(now, products[-1][1])
        products.append((start, start + 1))
        now = max(now, products[-1 - in_flight][1])
        loads.append(now)
    return [(load, *product) for load, product in zip(loads, products[1:], strict=False)]


def draw():
    heights = [slots + 1 for _, slots, _ in RUNGS]
    with plot.figure(height=5.9, nrows=3, sharex=True, height_ratios=heights) as (fig, axes):
        for ax, (title, slots, in_flight) in zip(axes, RUNGS, strict=True):
            for i, (load, start, end) in enumerate(schedule(slots, in_flight)):
                _bar(ax, i % slots, load, load + LOAD_TIME, f"load {i}", LOAD)
                _bar(ax, i % slots, start, end, f"{i}", MULTIPLY)
                _bar(ax, slots, start, end, f"{i}", MULTIPLY)
            ax.set_yticks(range(slots + 1), [*(f"slot {slot}" for slot in range(slots)), "tensor core"])
            ax.set_ylim(slots + 0.6, -0.6)
            ax.grid(axis="y", visible=False)
            ax.set_title(title, fontsize=9)
        axes[0].set_xlim(0, 11)
        axes[-1].set_xlabel("time, in units of one step's product")
    return fig


def _bar(ax, y, start, end, text, colour):
    ax.barh(y, end - start, left=start, height=0.74, color=colour, edgecolor=plot.CARD, linewidth=1.2)
    ink = plot.CARD if colour == MULTIPLY else plot.INK
    ax.text((start + end) / 2, y, text, ha="center", va="center", fontsize=8, color=ink, clip_on=True)


if __name__ == "__main__":
    save(__file__, draw())
