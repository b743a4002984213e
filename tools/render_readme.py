"""Renders the README's tables from results/; `--check` only says whether they are up to date."""

import collections
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "site")]

from measured import GPU, link_rate_text, rate_text, where_mark  # noqa: E402

from bench import collectives  # noqa: E402
from bench.problems import CASES, LIBRARIES  # noqa: E402
from lab import results  # noqa: E402

README = ROOT / "README.md"
BETWEEN_MARKERS = re.compile(r"(<!-- (results|times): .*? -->\n).*?(<!-- end -->)", re.S)


def main() -> int:
    text = README.read_text()
    wanted = rendered(text)
    if "--check" in sys.argv:
        return text != wanted
    README.write_text(wanted)
    return 0


def rendered(readme: str) -> str:
    """`readme` with what stands between its markers made anew from results/."""
    tables = dict(results=_table, times=_times)
    return BETWEEN_MARKERS.sub(lambda match: f"{match[1]}{tables[match[2]]()}{match[3]}", readme)


def _times() -> str:
    """How long each command took, a column for each machine; `TIMES=1` records it."""
    recorded = [json.loads(path.read_text()) for path in sorted(results.ROOT.glob("*/times.json"))]
    columns = {}
    for command, entry in ((name, times[name]) for times in recorded for name in times):
        where = "CPU" if entry["gpu"] == "cpu" else results.gpus(entry)
        columns.setdefault(f"{where}, {entry['cores']} cores", {})[command] = max(1, -(-entry["seconds"] // 60))
    if not columns:
        return ""
    commands = sorted({command for times in columns.values() for command in times})
    lines = [f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n"]
    for command in commands:
        minutes = (f"{times[command]} min" if command in times else "" for times in columns.values())
        lines.append(f"| `{command}` | {' | '.join(minutes)} |\n")
    return "\nOnce set up, the commands take:\n\n" + "".join(lines) + "\n"


def _table() -> str:
    hosts = [(results.host(GPU, n), collectives.cases(n), link_rate_text) for n in results.hosts(GPU)]
    return "".join(_headlines(*host) for host in [(GPU, CASES, rate_text), ("b200", CASES, rate_text), *hosts])


def _headlines(gpu: str, cases, rate_of) -> str:
    """The problems of `cases` that the README shows, as measured on `gpu`."""
    stale = set(results.stale_list(gpu))
    dates, lines = collections.defaultdict(set), []
    for case in cases:
        impls = results.rows(case.op, gpu).get(case.problem, {})
        if not case.headline or case.impl not in impls:
            continue
        ours = impls[case.impl]
        beside = "; ".join(f"{peer} {rate_of(impls[peer])}" for peer in LIBRARIES if peer in impls)
        mark = " (stale)" if (case.problem, case.impl) in stale else ""
        lines.append(f"| `{case.problem}` | {rate_of(ours)}{mark} | {beside} | {where_mark(ours)} |\n")
        origin = ours["provenance"]
        dates[f"{results.gpus(origin)}, JAX {origin['jax']}"].add(origin["date"])
    if not lines:
        return ""
    origins = (f"{where}, {' to '.join(sorted({min(when), max(when)}))}" for where, when in sorted(dates.items()))
    header = f"| measured on {'; '.join(origins)} | cookbook | instead | GPU |\n|---|---|---|---|\n"
    return f"\n{header}{''.join(lines)}\n"


if __name__ == "__main__":
    sys.exit(main())
