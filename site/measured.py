"""Text of results/: rates, bounds, targets, and the page with every row."""

import html
import math

from bench import collectives
from bench.problems import CASES, PEERS, Case, mean_ratio
from lab import results, roofline

GPU = "h200"


def results_page(samples: list[str] = ()) -> str:
    """The targets, `samples`, then every row of results/: of one GPU, then of hosts whose GPUs work together."""
    page = [
        "# Results",
        "",
        *_where_measured(GPU),
        "",
        *peers_legend(),
        "",
        "## Targets",
        "",
        *_targets_table(),
        "",
        *samples,
    ]
    page += [*_first_calls(), ""]
    page += _topics(GPU, CASES, "##", rate_text, share_text)
    for count in results.hosts(GPU):
        page += _host(count)
    return "\n".join(page + _blackwell())


def _blackwell() -> list[str]:
    """The rows of kernels that a B200 alone runs."""
    page = ["## B200", ""]
    if not results.topics("b200"):
        page += ["Nothing has been measured: the kernels of `cookbook.blackwell` are compiled for a B200 and "
                 "interpreted, and nobody here has one. `make bench OP=blackwell.matmul` on a B200, and the same for "
                 "its other ops, fills this page, `make record NB='19 19b'` the chapters."]  # fmt: skip
        return [*page, ""]
    return [*page, *_where_measured("b200"), "", *_topics("b200", CASES, "###", rate_text, share_text)]


def _host(count: int) -> list[str]:
    """The rows of kernels that run on `count` GPUs of one host together."""
    gpu, cases = results.host(GPU, count), collectives.cases(count)
    page = [f"## {count} GPUs of one host", "", *_where_measured(gpu), ""]
    page += ["A kernel's time is its least on any of them: on the others it waits for the slowest. GB/s are those that "
             "leave a GPU over NVLink.", ""]  # fmt: skip
    if copy := results.stored(collectives.PEER_COPY, gpu):
        page += [f"Plain copies from each of them to the next, all at once, run at {copy['both_ways']:.0f} GB/s each.",
                 ""]  # fmt: skip
    page += ["{.results .targets}", "| | problem | measured | target |", "|---|---|---|---|"]
    for case in cases:
        rows = results.rows(case.op, gpu).get(case.problem, {})
        reached = collectives.verdict(case, {impl: row["ms"] for impl, row in rows.items()}, copy)
        if case.targets and reached is not None:
            measured = link_rate_text(rows["cookbook"])
            page.append(f"| {_verdict(reached)} | `{case.problem}` | {measured} | {collectives.wanted(case)} |")
    return [*page, "", *_topics(gpu, cases, "###", link_rate_text, lambda problem, row: "")]


def _topics(gpu: str, cases, heading: str, rate_of, share_of) -> list[str]:
    """A table of each topic's rows."""
    stale, page = set(results.stale_list(gpu)), []
    for topic in results.topics(gpu):
        if not (rows := in_order(topic, gpu, cases)):
            continue
        page += [
            f"{heading} {topic}",
            "",
            "{.results}",
            "| problem | kernel | time | rate | of the bound | spread | date | GPU |",
        ]
        page += ["|---|---|--:|--:|--:|--:|---|---|"]
        for problem, impls in rows:
            for impl, row in sorted(impls.items(), key=lambda item: item[1]["ms"]):
                cells = [
                    f"`{problem.partition('/')[2]}`",
                    impl + stale_mark((problem, impl) in stale),
                    f"{row['ms']:.4g} ms",
                ]
                cells += [rate_of(row), share_of(problem, row), f"{row['spread']:.1%}", row["provenance"]["date"]]
                cells.append(where_mark(row))
                page.append(f"| {' | '.join(cells)} |")
        page += [*_left_out(topic, gpu), ""]
    return page


def _left_out(topic: str, gpu: str) -> list[str]:
    """Peers that were not timed, and why."""
    lines = []
    for name, entry in results.values(topic, gpu).items():
        problem, found, _ = name.partition("/left_out/")
        if found:
            lines += [f"- `{problem.partition('/')[2]}`: {impl} is left out: {html.escape(why)}"
                      for impl, why in entry["value"].items()]  # fmt: skip
    return ["", *lines] if lines else []


def peers_legend() -> list[str]:
    """A line that says which library each peer is."""
    return ["Peers: " + "; ".join(f"`{name}`, {what}" for name, what in PEERS.items()) + "."]


def in_order(topic: str, gpu: str = GPU, cases=CASES) -> list[tuple[str, dict]]:
    """(problem, its rows) of a topic, in the order of `cases`."""
    order = [case.problem for case in cases]
    rows = results.rows(topic, gpu)
    return sorted(rows.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))


def bound(problem: str, row: dict) -> roofline.Bound:
    """The roofline bound of a row on the GPU where it was measured, at the dtype that ends the problem's name."""
    gpu = results.gpu_of(row["provenance"]["gpu"])
    return roofline.bound(row["flops"] or 0, row["nbytes"] or 0, _dtype(problem) or "bf16", gpu)


def _dtype(problem: str) -> str | None:
    dtype = problem.split("/")[-1]
    return dtype if dtype in roofline.PEAKS[GPU] else None


def share_text(problem: str, row: dict) -> str:
    """How near the bound: "86%". Nothing where the bound is another: of a dtype that the name lacks, or not of HBM."""
    if not (row["flops"] or row["nbytes"]):
        return ""
    least = bound(problem, row)
    known = least.limited_by == "memory" or _dtype(problem)
    return f"{least.ms / row['ms']:.0%}" if known and least.ms <= row["ms"] else ""


def rate_text(row: dict) -> str:
    """The rate that says most: TFLOP/s where the tensor cores could be the bound, TB/s elsewhere."""
    value, unit = rate(row)
    return "" if math.isnan(value) else f"{value:.0f} {unit}" if unit == "TFLOP/s" else f"{value:.2f} {unit}"


def rate(row: dict) -> tuple[float, str]:
    if row["flops"] and row["flops"] > 50 * (row["nbytes"] or 0):
        return row["flops"] / row["ms"] / 1e9, "TFLOP/s"
    return (row["nbytes"] / row["ms"] / 1e9 if row["nbytes"] else math.nan), "TB/s"


def link_rate_text(row: dict) -> str:
    """The rate of a kernel across GPUs: of each GPU's arithmetic, or of the bytes that leave it."""
    if row["flops"]:
        return f"{row['flops'] / row['ms'] / 1e9:.0f} TFLOP/s per GPU"
    return f"{row['nbytes'] / row['ms'] / 1e6:.0f} GB/s" if row["nbytes"] else ""


def where_mark(row: dict) -> str:
    """The GPU of a row, as "H100"."""
    return results.gpu_of(row["provenance"]["gpu"]).upper()


def stale_mark(stale: bool) -> str:
    return ' <span class="stale" title="The code has changed since this was measured">stale</span>' if stale else ""


def _where_measured(gpu: str) -> list[str]:
    """Facts of the machines and programs that measured."""
    by_problem = [impls for topic in results.topics(gpu) for impls in results.rows(topic, gpu).values()]
    origins = [row["provenance"] for impls in by_problem for row in impls.values()]
    if not origins:
        return ["Nothing has been measured yet: `make bench` on an H200 fills this page."]
    labels = {"gpu": "GPU", "driver": "driver", "jax": "JAX", "ptxas": "ptxas", "inputs": "inputs"}
    origins = [o | dict(gpu=results.gpus(o)) for o in origins]
    facts = [f"{label}: {', '.join(sorted({str(o[key]) for o in origins}))}" for key, label in labels.items()]
    return [
        f"{'; '.join(facts)}. Times are CUPTI kernel times, medians of warm calls; the spread is the interquartile "
        "range over the median. Machines drift: compare only rows of one run."
    ]


def _targets_table() -> list[str]:
    stale = set(results.stale_list(GPU))
    lines = ["{.results .targets}", "| | problem | measured | target |", "|---|---|---|---|"]
    for case in CASES:
        if case.target:
            rows = results.rows(case.op, GPU).get(case.problem, {})
            measured, verdict = judge(case, rows)
            measured += stale_mark((case.problem, case.impl) in stale)
            measured += f" on {where_mark(rows[case.impl])}" if verdict else ""
            lines.append(f"| {verdict} | `{case.problem}` | {measured} | {_wanted(case)} |")
    if not math.isnan(mean := mean_ratio("matmul", gpu=GPU)):
        lines.append(f"| {_verdict(mean >= 1)} | `matmul`, geometric mean | {mean:.3f} × cublas | cublas's rate |")
    return lines


def _first_calls() -> list[str]:
    """Seconds that each kernel takes the first time, from tracing to the result."""
    values = results.values("first_call", GPU)
    if not values:
        return []
    lines = ["## First call", "", "Tracing and compiling included; the target is 2 s.", "", "{.results}"]
    lines += ["| problem | kernel | seconds |", "|---|---|--:|"]
    for name, entry in values.items():
        problem, _, impl = name.partition("/")[2].rpartition("/")
        lines.append(f"| `{problem}` | {impl} | {entry['value']:.2f} |")
    return lines


def _wanted(case: Case) -> str:
    target = case.target
    rate = [f"{target.rate} {'TFLOP/s' if case.counts_flops else 'TB/s'}"] if target.rate else []
    if target.peer is None:
        return rate[0]
    return " and ".join(
        [*rate, f"{target.ratio:.4g} × {target.peer}" if target.ratio != 1 else f"{target.peer}'s rate"]
    )


def judge(case: Case, impls: dict[str, dict]) -> tuple[str, str]:
    """(what was measured, the verdict)."""
    ours, peer = impls.get(case.impl), impls.get(case.target.peer)
    if ours is None or (peer is None and case.target.peer is not None):
        return "not measured", ""
    met = rate(ours)[0] >= (case.target.rate or 0)
    if peer is None:
        return rate_text(ours), _verdict(met)
    ratio = peer["ms"] / ours["ms"]
    met = met and ratio >= case.target.ratio
    return f"{rate_text(ours)}, {ratio:.3f} × {case.target.peer}", _verdict(met)


def _verdict(met: bool) -> str:
    return f'<span class="{"met" if met else "missed"}">{"met" if met else "missed"}</span>'
