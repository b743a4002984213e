"""What results/ holds, as text: rates, bounds, targets, and the page with every row."""

import math
from dataclasses import dataclass

from cookbook.lab import results, roofline

GPU = "h200"
OURS = ("cookbook", "matmul_pipelined")  # What our finished kernels are called among the implementations of a problem.


@dataclass(frozen=True)
class Target:
    """What a kernel must reach on `problem`: a rate, a multiple of a peer's rate, or both."""

    problem: str
    rate: float | None = None  # In TB/s or TFLOP/s.
    peer: str | None = None
    ratio: float = 1.0  # To the peer's rate.
    headline: bool = False  # Whether the README shows it.


TARGETS = [
    Target("add/536870912/bf16", peer="xla", headline=True),
    Target("softmax/16384x8192/bf16", rate=4.0, peer="xla", ratio=1.2, headline=True),
    Target("rms_norm/16384x8192/bf16", rate=3.95, peer="xla", headline=True),
    *(Target(f"{op}/{rows}x{cols}/bf16", peer="xla")
      for op in ("softmax", "rms_norm")
      for rows, cols in ((1048576, 128), (131072, 1000), (32768, 4096), (4096, 32768))),
    Target("matmul/4096x4096x4096/bf16", peer="cublas", ratio=0.88, headline=True),
    Target("matmul/8192x8192x8192/bf16", peer="cublas", ratio=0.88, headline=True),
]  # fmt: skip


def results_page() -> str:
    """The targets, then every row of results/."""
    page = ["# Results", "", *_where_measured(), "", "## Targets", "", *_targets_table(), ""]
    stale = set(results.stale_list(GPU))
    for topic in results.topics(GPU):
        if not (rows := results.rows(topic, GPU)):
            continue
        page += [
            f"## {topic}",
            "",
            "{.results}",
            "| problem | implementation | time | rate | of the bound | spread | JAX | date |",
        ]
        page += ["|---|---|--:|--:|--:|--:|---|---|"]
        for problem, impls in rows.items():
            for impl, row in sorted(impls.items(), key=lambda item: item[1]["ms"]):
                where = row["provenance"]
                cells = [f"`{problem}`", impl + stale_mark((problem, impl) in stale), f"{row['ms']:.4g} ms"]
                cells += [rate_text(row), share_text(problem, row), f"{row['spread']:.1%}", where["jax"], where["date"]]
                page.append(f"| {' | '.join(cells)} |")
        page.append("")
    return "\n".join(page)


def bound(problem: str, row: dict) -> roofline.Bound:
    """The roofline bound of a row, at the dtype that ends the problem's name."""
    dtype = problem.split("/")[-1]
    known = dtype in roofline.PEAKS[GPU]
    return roofline.bound(row["flops"] or 0, row["nbytes"] or 0, dtype if known else "bf16", GPU)


def share_text(problem: str, row: dict) -> str:
    """How near the bound: "86%"."""
    return f"{bound(problem, row).ms / row['ms']:.0%}" if row["flops"] or row["nbytes"] else ""


def rate_text(row: dict) -> str:
    """The rate that says most: TFLOP/s where the tensor cores could be the bound, TB/s elsewhere."""
    value, unit = rate(row)
    return "" if math.isnan(value) else f"{value:.0f} {unit}" if unit == "TFLOP/s" else f"{value:.2f} {unit}"


def rate(row: dict) -> tuple[float, str]:
    if row["flops"] and row["flops"] > 50 * (row["nbytes"] or 0):
        return row["flops"] / row["ms"] / 1e9, "TFLOP/s"
    return (row["nbytes"] / row["ms"] / 1e9 if row["nbytes"] else math.nan), "TB/s"


def stale_mark(stale: bool) -> str:
    return ' <span class="stale" title="The code has changed since this was measured">stale</span>' if stale else ""


def _where_measured() -> list[str]:
    """What all measurements have in common, or what they differ in."""
    by_problem = [impls for topic in results.topics(GPU) for impls in results.rows(topic, GPU).values()]
    origins = [row["provenance"] for impls in by_problem for row in impls.values()]
    if not origins:
        return ["Nothing has been measured yet: `make bench` on an H200 fills this page."]
    labels = {"gpu": "GPU", "driver": "driver", "jax": "JAX", "ptxas": "ptxas", "inputs": "inputs"}
    facts = [f"{label}: {', '.join(sorted({str(o[key]) for o in origins}))}" for key, label in labels.items()]
    return [
        f"{'; '.join(facts)}. Times are CUPTI kernel times, medians of warm calls; the spread is the interquartile "
        "range over the median. Machines drift: compare only rows of one run."
    ]


def _targets_table() -> list[str]:
    lines = ["{.results}", "| problem | target | measured | |", "|---|---|---|---|"]
    for target in TARGETS:
        impls = results.rows(target.problem.split("/")[0], GPU).get(target.problem, {})
        wanted = [f"{target.rate} TB/s"] if target.rate else []
        if target.peer:
            wanted += [f"{target.ratio:g} × {target.peer}" if target.ratio != 1 else f"as fast as {target.peer}"]
        lines.append(f"| `{target.problem}` | {' and '.join(wanted)} | {' | '.join(_judge(target, impls))} |")
    return lines


def _judge(target: Target, impls: dict) -> tuple[str, str]:
    """(what was measured, the verdict)."""
    row = next((row for impl, row in impls.items() if impl in OURS), None)
    peer = impls.get(target.peer)
    if row is None or (target.peer and peer is None):
        return "not measured", ""
    text, met = rate_text(row), True
    if target.rate:
        met &= rate(row)[0] >= target.rate
    if peer:
        ratio = peer["ms"] / row["ms"]
        text += f", {ratio:.2f} × {target.peer}"
        met &= ratio >= target.ratio
    return text, '<span class="met">met</span>' if met else '<span class="missed">missed</span>'
