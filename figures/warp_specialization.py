"""Figures of chapter 7: warp specialization."""

from figures._chart import LOAD, MULTIPLY, bar, chart, numbered, tile, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, PINK, SKY, SOFT, arrow, box, drawing, words
from figures._stepper import stepper
from figures.pipelining import Step
from lab import plot


@drawing(7.6, 3.1)
def roles_block(ax):
    """Two roles in one block: full stages go one way, empty stages the other, and each way has its barriers."""
    for x, role, what, colour in (
        (0.15, "memory", "starts TMA copies", ORANGE),
        (5.9, "compute", "WGMMA, store", BLUE),
    ):
        box(ax, x, 1.1, 1.55, 1.1, colour=colour)
        words(ax, x + 0.77, 1.85, f"{role}\nwarpgroup", weight="bold")
        words(ax, x + 0.77, 1.36, what, 7.5, colour=SOFT)
    full = (SKY, 0.6)
    states = (("4\narrives", SKY, 0.25), ("1\nis read", BLUE, 0.35), ("2\nis full", *full), ("3\nis full", *full))
    for stage, (text, colour, fill) in enumerate(states):
        box(ax, 2.42 + 0.72 * stage, 1.25, 0.64, 0.8, f"step {text}", colour=colour, fill=fill, size=7.5)
        words(ax, 2.74 + 0.72 * stage, 1.1, f"stage {stage}", 7, colour=SOFT)
    arrow(ax, (1.7, 1.65), (2.38, 1.65), ORANGE, width=2)
    arrow(ax, (5.3, 1.65), (5.88, 1.65), BLUE, width=2)
    arrow(ax, (2.74, 2.2), (6.6, 2.24), GREEN, connectionstyle="arc3,rad=-0.22")
    words(ax, 4.0, 2.93, "filled[stage]: the two copies arrive, the reader waits", 8.5, colour=GREEN)
    arrow(ax, (6.6, 1.06), (1.0, 1.06), INK, connectionstyle="arc3,rad=-0.2")
    words(ax, 3.8, 0.18, "freed[stage]: the reader arrives, the memory warpgroup waits before it refills", 8.5)


@drawing(7.6, 2.35)
def roles_registers(ax):
    """The registers of an SM, shared out among three warpgroups: evenly at the start, by need afterwards."""
    rows = (("at the start", (168, 168, 168)), ("after set_max_registers", (40, 232, 232)))
    left, whole, inches = 1.75, 512, 5.6  # Registers a thread, if one warpgroup had the whole file of 65,536.
    for i, (name, counts) in enumerate(rows):
        x, y = left, 1.45 - 0.75 * i
        words(ax, left - 0.1, y + 0.24, name.replace(" ", "\n", 1), 8.5, ha="right")
        for role, count in zip(("memory", "compute 0", "compute 1"), counts, strict=True):
            width = inches * count / whole
            box(ax, x, y, width - 0.03, 0.48, colour=ORANGE if role == "memory" else BLUE, fill=0.25)
            words(ax, x + width / 2, y + 0.24, f"{count}" if width < 0.6 else f"{role}: {count}", 8)
            if role != "memory":
                box(ax, x + 0.03, y + 0.03, inches * 128 / whole, 0.07, colour=BLUE, fill=0.8, linewidth=0)
            x += width
        box(ax, x, y, left + inches - x, 0.48, colour=SOFT, fill=0.1, linewidth=0.5)
    text = "registers per thread; 512 of them would be the whole file"
    words(ax, left, 2.15, text, 8.5, ha="left", colour=SOFT)
    text = (
        "dark: the accumulator of half a 128x256 tile, 128 registers. Right end: 8 per thread that\n"
        "nobody got, because counts are multiples of 8; they stay unused."
    )
    words(ax, left, 0.33, text, 8, ha="left", colour=SOFT)


M, N, K, UNIT = 128, 256, 64, 0.0078  # Sides of a step's tiles, and inches per row or column.


@drawing(7.6, 1.85)
def roles_shared(ax):
    """A step's stage as two compute warpgroups read it: half of A each, and all of B."""
    m, n, k = (UNIT * side for side in (M, N, K))
    left, bottom = 2.6, 0.1
    right, top = left + k + 0.25, bottom + m + 0.18
    words(ax, left - 0.12, bottom + m / 2, "A", ha="right")
    words(ax, right - 0.12, top + k / 2, "B", ha="right")
    box(ax, right, top, n, k, "read by both", size=8, colour=PINK, fill=0.45)
    for i, style in enumerate((dict(colour=BLUE, fill=0.35), dict(colour=GREEN, fill=0.35))):
        y = bottom + m / 2 * (1 - i)
        box(ax, left, y, k, m / 2, size=7.5, **style)
        box(ax, right, y, n, m / 2, f"warpgroup {i}: 64 x 256", size=8, **style)


LOAD_TIME, ISSUE = 1.5, 0.1  # In units of the time that the tensor core takes for one step.


def schedule(steps: int, stages: int, *, late=0, queued=False, serial=False, load=LOAD_TIME, issue=ISSUE, gap=0.0):
    """Simulates one block: the memory warpgroup starts copies, the compute warpgroup multiplies.

    Args:
      steps, stages: of the pipeline, and of the ring.
      late: a stage is released so many steps after its product.
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


@chart(height=4.8, nrows=2, sharex=True)
def roles_schedule(axes):
    """A memory and a compute warpgroup over time, by simulation: stages are released at once, and one step later."""
    cases = (
        (dict(gap=0.3), "released at once, wgmma_wait(0): a pause after each product"),
        (dict(late=1, queued=True, gap=0.3), "released one iteration later, wgmma_wait(1): no pause"),
    )
    stages, steps = 3, 9
    runs = [schedule(steps, stages, **case) for case, _ in cases]
    for ax, run, (_, title) in zip(axes, runs, cases, strict=True):
        for i, step in enumerate(run):
            bar(ax, i % stages, step.load_start, step.load_end, f"load {i}", LOAD)
            end = run[i + stages].load_start if i + stages < steps else step.mma_end
            bar(ax, i % stages, step.load_end, max(end, step.mma_end), "", plot.FAINT)
            bar(ax, i % stages, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
            bar(ax, stages, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
        tracks(ax, [*numbered("stage", stages), "tensor core"], f"{title}: {steps} steps take {run[-1].mma_end:.1f}")
    axes[-1].set_xlim(0, max(run[-1].mma_end for run in runs))
    axes[-1].set_xlabel("time, in units of one step's product; grey: filled, and waits to be read")


RING = 3  # Stages.
TURNS = (  # Steps loaded, arrived, multiplied and released; what memory and compute do; the caption.
    (
        *(3, 0, 0, 0, "waits at freed[0]", "waits at filled[0]"),
        "Memory fills the empty stages without a wait. Compute waits for step 0.",
    ),
    (
        *(3, 2, 0, 0, "waits at freed[0]", "multiplies step 0"),
        "Both copies of step 0 have arrived: filled[0] completes, and compute multiplies. Step 1 has arrived too.",
    ),
    (
        *(4, 3, 1, 1, "waits at freed[1]", "multiplies step 1"),
        "Product 0 has ended, and compute has arrived at freed[0]. Memory wraps around: stage 0 gets step 3.",
    ),
    (
        *(5, 3, 2, 2, "waits at freed[2]", "multiplies step 2"),
        "Stage 1 is released and gets step 4. Two stages load while compute multiplies step 2.",
    ),
    (
        *(6, 4, 3, 3, "drains: freed[0]", "multiplies step 3"),
        "Compute wraps around too: filled[0] completes a second time. Memory has started its last copies and drains.",
    ),
    (
        *(6, 6, 5, 5, "drains: freed[2]", "multiplies step 5"),
        "Nobody refills a stage, but compute still releases each one. Memory waits for these releases too.",
    ),
    (
        *(6, 6, 6, 6, "has drained", "stores the tile"),
        "Each barrier has completed twice, and each completion was waited for: nothing is left over.",
    ),
)


@stepper(7.8, 2.7)
def ring_in_steps(ax):
    """Six steps through a ring of three stages: who fills, waits, multiplies and releases."""
    for x, role, colour in ((0.15, "memory", ORANGE), (6.1, "compute", BLUE)):
        box(ax, x, 0.95, 1.55, 1.6, colour=colour)
        words(ax, x + 0.77, 2.1, f"{role}\nwarpgroup", weight="bold")
    for stage in range(RING):
        words(ax, 2.75 + 1.15 * stage, 0.75, f"stage {stage}", 8.5, colour=SOFT)
    words(ax, 2.3, 0.48, "filled:", 8.5, ha="right", colour=GREEN)
    words(ax, 2.3, 0.2, "freed:", 8.5, ha="right")
    words(ax, 5.5, 0.34, "completions of each barrier", 8.5, ha="left", colour=SOFT)
    yield
    for loaded, arrived, now, freed, memory, compute, caption in TURNS:
        words(ax, 0.92, 1.45, memory, 8)
        words(ax, 6.87, 1.45, compute, 8)
        for stage in range(RING):
            step, x = max(range(stage, loaded, RING)), 2.75 + 1.15 * stage
            if step >= arrived:
                state, colour = "in flight", PALE
                ax.plot((1.7, x), (2.4, 2.4), color=ORANGE, linewidth=1.4, solid_capstyle="butt")
                arrow(ax, (x, 2.4), (x, 2.13), ORANGE)
            elif step == now:
                state, colour = "is read", BLUE
                ax.plot((x, x), (1.25, 1.05), color=BLUE, linewidth=1.4)
                arrow(ax, (x, 1.05), (6.08, 1.05), BLUE)
            else:
                state, colour = ("has arrived", SKY) if step > now else ("is done", plot.CARD)
            ink = plot.CARD if colour == BLUE else INK
            text = f"step {step}\n{state}"
            tile(ax, x - 0.48, 1.25, 0.96, 0.87, colour, text, 8.5, ink=ink, edgecolor=INK, linewidth=0.8)
            for y, count, ink in ((0.48, arrived, GREEN), (0.2, freed, INK)):
                words(ax, x, y, str(len(range(stage, count, RING))), 9.5, colour=ink, weight="bold")
        yield caption
