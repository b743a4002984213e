"""Two rings in a row: TMA fills slots of 8-bit weights, the supply warpgroup converts them, compute multiplies."""

from figures._draw import lanes, save
from figures.pipelining.pipeline_schedule import LOAD, MULTIPLY, bar
from lab import plot

CONVERT = plot.COLOURS[1]
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
    names = [f"slot {i}: a, int8" for i in range(STAGES)] + ["supply"]
    names += [f"wide slot {i}: bf16" for i in range(WIDE)] + ["compute"]
    supply, compute = STAGES, STAGES + 1 + WIDE
    with plot.figure(height=4.0) as (fig, ax):
        for i in range(STEPS):
            (load_start, load_end), (start, end), (begin, stop) = (run[k][i] for k in ("load", "convert", "multiply"))
            bar(ax, i % STAGES, load_start, load_end, f"load {i}", LOAD)
            bar(ax, i % STAGES, start, end, f"{i}", CONVERT)
            bar(ax, i % STAGES, begin, stop, f"{i}", MULTIPLY)  # It reads a's rows.
            bar(ax, supply, start, end, f"{i}", CONVERT)
            bar(ax, supply + 1 + i % WIDE, start, end, f"{i}", CONVERT)
            bar(ax, supply + 1 + i % WIDE, begin, stop, f"{i}", MULTIPLY)
            bar(ax, compute, begin, stop, f"{i}", MULTIPLY)
        lanes(ax, names, "Light: TMA writes. Yellow: supply converts. Dark: the tensor core reads")
        ax.set(xlim=(0, run["multiply"][-1][1]), xlabel="time")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
