"""Two rings in a row: TMA fills slots of 8-bit weights, the supply warpgroup converts them, compute multiplies."""

from cookbook.lab import plot
from figures.pipeline_schedule import bar

LOAD, CONVERT, MULTIPLY = plot.COLOURS[4], plot.COLOURS[1], plot.OURS
STAGES, WIDE, STEPS = 4, 2, 8
LOAD_TIME, CONVERT_TIME, MULTIPLY_TIME = 2.6, 0.9, 0.7


def schedule() -> dict[str, list[tuple[float, float]]]:
    """(start, end) of each step's copy, conversion and product."""
    load, convert, multiply = [(0.0, LOAD_TIME)] * STAGES, [], []
    for step in range(STEPS):
        start = max(load[step][1], convert[-1][1] if convert else 0.0)
        if step >= WIDE:  # Its wide slot was multiplied two steps ago; so was a slot of the ring, to be refilled.
            start = max(start, multiply[step - WIDE][1])
            issued = max(convert[-1][1], multiply[step - WIDE][1])
            load.append((issued, issued + LOAD_TIME))
        convert.append((start, start + CONVERT_TIME))
        begin = max(convert[-1][1], multiply[-1][1] if multiply else 0.0)
        multiply.append((begin, begin + MULTIPLY_TIME))
    return dict(load=load[:STEPS], convert=convert, multiply=multiply)


def draw():
    run = schedule()
    lanes = [f"slot {i}: int8" for i in range(STAGES)] + ["supply"]
    lanes += [f"wide slot {i}: bf16" for i in range(WIDE)] + ["compute"]
    supply, compute = STAGES, STAGES + 1 + WIDE
    with plot.figure(height=4.0) as (fig, ax):
        for i in range(STEPS):
            (load_start, load_end), (start, end), (begin, stop) = (run[k][i] for k in ("load", "convert", "multiply"))
            bar(ax, i % STAGES, load_start, load_end, f"load {i}", LOAD)
            bar(ax, i % STAGES, start, end, f"{i}", CONVERT)
            bar(ax, supply, start, end, f"{i}", CONVERT)
            bar(ax, supply + 1 + i % WIDE, start, end, f"{i}", CONVERT)
            bar(ax, supply + 1 + i % WIDE, begin, stop, f"{i}", MULTIPLY)
            bar(ax, compute, begin, stop, f"{i}", MULTIPLY)
        ax.set_yticks(range(len(lanes)), lanes)
        ax.set_ylim(len(lanes) - 0.4, -0.6)
        ax.set_xlim(0, run["multiply"][-1][1])
        ax.set_xticks([])
        ax.grid(visible=False)
        ax.set_xlabel("time")
        ax.set_title("Light: TMA writes. Yellow: supply converts. Dark: the tensor core reads", fontsize=9)
    return fig


if __name__ == "__main__":
    plot.save(draw(), "figures/precision_ring.svg")
