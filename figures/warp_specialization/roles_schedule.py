"""Schedule of a memory and a compute warpgroup, by simulation: a ring with barriers both ways."""

from figures._draw import save
from figures.pipelining.pipeline_schedule import LOAD, MULTIPLY, Step, bar
from lab import plot

LOAD_TIME, ISSUE = 1.5, 0.1  # In units of the time that the tensor core takes for one step.
STAGES, STEPS = 3, 9
CASES = (
    (dict(stages=STAGES, gap=0.3), "given back at once, wgmma_wait(0): a gap after every product"),
    (dict(stages=STAGES, late=1, queued=True, gap=0.3), "given back one step later, wgmma_wait(1): no gap"),
)


def schedule(steps: int, stages: int, *, late=0, queued=False, serial=False, load=LOAD_TIME, issue=ISSUE, gap=0.0):
    """Simulates one block: the memory warpgroup starts copies, the compute warpgroup multiplies.

    Args:
      steps, stages: of the pipeline, and slots of the ring.
      late: a slot is given back so many steps after its product.
      queued: wgmma_wait(1): a product is started while the one before runs. Then `late` must be 1.
      serial: the memory warpgroup waits for each copy before it starts the next.
      load: from the start of a copy to its arrival.
      issue: what the memory warpgroup itself needs to start the copies of one step.
      gap: from the end of the wait to the start of the product, work of the compute warpgroup.
    """
    freed: dict[int, float] = {}
    run: list[Step] = []
    memory = compute = 0.0  # When each warpgroup comes to its next line.
    for step in range(steps):
        load_start = max(memory, freed[step - stages]) if step >= stages else memory
        load_end = load_start + issue + load
        memory = load_end if serial else load_start + issue
        issued = max(compute, load_end) + gap
        mma_start = max(issued, run[-1].mma_end if run else 0.0)
        run.append(Step(load_start, load_end, mma_start, mma_start + 1))
        ended = run[step - 1].mma_end if step else 0.0  # The end of the previous product.
        compute = max(issued, ended) if queued else mma_start + 1
        freed[step - late] = compute
    return run


def draw():
    """A ring whose slots are given back at once, and one step later."""
    runs = [schedule(STEPS, **case) for case, _ in CASES]
    with plot.figure(height=4.8, nrows=2, sharex=True) as (fig, axes):
        for ax, run, (_, title) in zip(axes, runs, CASES, strict=True):
            for i, step in enumerate(run):
                bar(ax, i % STAGES, step.load_start, step.load_end, f"load {i}", LOAD)
                end = run[i + STAGES].load_start if i + STAGES < STEPS else step.mma_end
                bar(ax, i % STAGES, step.load_end, max(end, step.mma_end), "", plot.FAINT)
                bar(ax, i % STAGES, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
                bar(ax, STAGES, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
            ax.set_yticks(range(STAGES + 1), [*(f"slot {slot}" for slot in range(STAGES)), "tensor core"])
            ax.set_ylim(STAGES + 0.6, -0.6)
            ax.grid(axis="y", visible=False)
            ax.set_title(f"{title}: {STEPS} steps take {run[-1].mma_end:.1f}", fontsize=9)
        axes[-1].set_xlim(0, max(run[-1].mma_end for run in runs))
        axes[-1].set_xlabel("time, in units of one step's product; grey: filled, and waits to be read")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
