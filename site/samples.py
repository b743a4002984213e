"""Random problems: how the kernels fare on sizes that nobody tuned them for, as a picture and a table."""

import numpy as np

from bench import sample
from lab import plot


def samples_section(picture) -> list[str]:
    """Text of the section; draws the picture to the file `picture`."""
    rows = {op: found for op in sample.SAMPLES if (found := sample.recorded(op))}
    if not rows:
        return []
    plot.save(_figure(rows), picture)
    lines = ["## Random problems", ""]
    lines += [
        "Sizes drawn at random, tuned configurations off, each kernel beside its best peer in one process. A dot is a "
        "problem: to the right of 1 ours is faster. `make bench OP=matmul SAMPLE=40 SEED=1` draws them again.",
        "",
        f"![Time of the best peer over ours]({picture.name})",
        "",
        "{.results}",
        "| op | problems | geometric mean | 10th percentile | worst | the worst problem |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for op, found in rows.items():
        mean, low, worst = sample.statistics([row.ratio for row in found])
        last = min(found, key=lambda row: row.ratio)
        sizes = "x".join(map(str, last.sizes))
        lines.append(f"| `{op}` | {len(found)} | {mean:.3f} | {low:.3f} | {worst:.3f} | {sizes}, beside {last.peer} |")
    return [*lines, ""]


def _figure(rows: dict):
    with plot.figure(9, 0.9 + 0.45 * len(rows)) as (fig, ax):
        for at, found in enumerate(rows.values()):
            ratios = np.sort([row.ratio for row in found])
            ax.plot(ratios, at + np.linspace(-0.22, 0.22, len(ratios)), "o", color=plot.OURS, alpha=0.55, markersize=4)
            ax.plot(sample.statistics(ratios)[:1] * 2, (at - 0.34, at + 0.34), color=plot.INK, linewidth=1.6)
        ax.axvline(1, color=plot.BOUND, linewidth=1)
        ax.set_xscale("log", base=2)
        ticks = [
            tick for tick in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8) if ax.get_xlim()[0] <= tick <= ax.get_xlim()[1]
        ]
        ax.set_xticks(ticks, map(str, ticks), minor=False)
        ax.minorticks_off()
        ax.set_yticks(range(len(rows)), rows)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.set_xlabel("time of the best peer over ours; the bar is the geometric mean")
    return fig
