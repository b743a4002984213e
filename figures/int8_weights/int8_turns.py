"""How two compute warpgroups that convert in registers might take turns: one converts, the other's product runs."""

from figures._draw import lanes, save
from figures.pipelining.pipeline_schedule import LOAD, MULTIPLY, bar
from lab import plot

CONVERT = plot.COLOURS[1]
STEPS = 4
CONVERT_TIME, LOAD_TIME, MULTIPLY_TIME = 1.0, 0.45, 1.0
LANES = ("warpgroup 0", "its products", "warpgroup 1", "its products")


def schedule() -> list[dict[str, list[tuple[float, float]]]]:
    """For each warpgroup (start, end) of each step's load, conversion and product: one tensor core serves both."""
    runs = [dict(load=[(0.0, LOAD_TIME)], convert=[], multiply=[]) for _ in range(2)]
    busy = 0.0
    for step in range(STEPS):
        for run in runs:
            start = max(run["load"][step][1], run["multiply"][-1][1] if step else 0.0)
            run["convert"].append((start, start + CONVERT_TIME))
            started = start + CONVERT_TIME  # From here on the warpgroup reads the next step's weights.
            begin = max(started, busy)
            busy = begin + MULTIPLY_TIME
            run["multiply"].append((begin, busy))
            run["load"].append((started, started + LOAD_TIME))
    return runs


def draw():
    runs = schedule()
    with plot.figure(height=2.9) as (fig, ax):
        for i, run in enumerate(runs):
            for step in range(STEPS):
                bar(ax, 2 * i, *run["load"][step], f"{step}", LOAD)
                bar(ax, 2 * i, *run["convert"][step], f"{step}", CONVERT)
                bar(ax, 2 * i + 1, *run["multiply"][step], f"{step}", MULTIPLY)
        lanes(ax, LANES, "Light: 8 bits to registers. Yellow: 16 bits made of them. Dark: the tensor cores")
        ax.set(xlim=(0, runs[1]["multiply"][-1][1]), xlabel="time")
    return fig


if __name__ == "__main__":
    save(__file__, draw())
