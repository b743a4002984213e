"""How a ring of slots overlaps loads with products: the schedule that `plgpu.emit_pipeline` makes, by simulation."""

import dataclasses

from figures._draw import save
from lab import plot

LOAD, MULTIPLY = plot.COLOURS[4], plot.OURS
LOAD_TIME = 2.2  # In units of the time that the tensor core takes for one step.


@dataclasses.dataclass(frozen=True)
class Step:
    """Start and end of a step's load and of its product, in units of one product."""

    load_start: float
    load_end: float
    mma_start: float
    mma_end: float


def schedule(steps: int, stages: int, *, delay_release=0, wait=0, load=LOAD_TIME, gap=0.0) -> list[Step]:
    """Simulates one block: the loads overlap each other, the products run one after another.

    Args:
      steps: of the pipeline.
      stages: slots of the ring.
      delay_release: the slot refilled after a step is that of so many steps before.
      wait: products that may still run when the warpgroup goes on.
      load: time from the start of a copy to its arrival.
      gap: time from the wait to the first work of the next product.
    """
    load_start, mma_start, mma_end = {step: 0.0 for step in range(min(stages, steps))}, {}, {-1: 0.0}
    free = 0.0  # When the warpgroup comes to the next step.
    for step in range(steps):
        issued = max(free, load_start[step] + load) + gap
        mma_start[step] = max(issued, mma_end[step - 1])
        mma_end[step] = mma_start[step] + 1
        free = max(issued, mma_end.get(step - wait, 0.0))
        if step >= delay_release:
            load_start[step - delay_release + stages] = free
    return [Step(load_start[i], load_start[i] + load, mma_start[i], mma_end[i]) for i in range(steps)]


def bar(ax, y, start, end, text, colour, height=0.74, **style):
    ax.barh(y, end - start, left=start, height=height, color=colour, edgecolor=plot.CARD, linewidth=1.2, **style)
    dark = colour in (plot.OURS, plot.BOUND)
    colour = plot.CARD if dark else plot.INK
    ax.text((start + end) / 2, y, text, ha="center", va="center", fontsize=8, color=colour, clip_on=True)


def draw():
    """One slot against three: same loads, same products."""
    with plot.figure(height=4.4, nrows=2, sharex=True, height_ratios=(2, 4)) as (fig, axes):
        for ax, stages in zip(axes, (1, 3), strict=True):
            run = schedule(7, stages)
            for i, step in enumerate(run):
                bar(ax, i % stages, step.load_start, step.load_end, f"load {i}", LOAD)
                bar(ax, i % stages, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
                bar(ax, stages, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
            ax.set_yticks(range(stages + 1), [*(f"slot {slot}" for slot in range(stages)), "tensor core"])
            ax.set_ylim(stages + 0.6, -0.6)
            ax.grid(axis="y", visible=False)
            plural = "s" if stages > 1 else ""
            ax.set_title(f"max_concurrent_steps={stages}: {stages} slot{plural}, 7 steps take {run[-1].mma_end:.1f}")
        axes[1].axvspan(0, LOAD_TIME, color=plot.FAINT, alpha=0.5, zorder=0)
        axes[1].text(LOAD_TIME / 2, 3, "prologue", ha="center", va="center", fontsize=8)
        axes[1].set_xlabel("time, in units of one step's product")
        axes[0].set_xlim(0, schedule(7, 1)[-1].mma_end)
    return fig


if __name__ == "__main__":
    save(__file__, draw())
