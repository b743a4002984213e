"""Renders the README's tables from results/ and routes.toml; `--check` only says whether they are up to date."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "site")]

from measured import GPU, link_rate_text, rate_text  # noqa: E402

from bench import collectives  # noqa: E402
from bench.problems import CASES, LIBRARIES  # noqa: E402
from figures import _course  # noqa: E402
from lab import results  # noqa: E402

README = ROOT / "README.md"
BETWEEN_MARKERS = re.compile(r"(<!-- (results|times|routes): .*? -->\n).*?(<!-- end -->)", re.S)


def main() -> int:
    text = README.read_text()
    wanted = rendered(text)
    if "--check" in sys.argv:
        return text != wanted
    README.write_text(wanted)
    return 0


def rendered(readme: str) -> str:
    """`readme` with what stands between its markers made anew."""
    tables = dict(results=_table, times=_times, routes=_routes)
    return BETWEEN_MARKERS.sub(lambda match: f"{match[1]}{tables[match[2]]()}{match[3]}", readme)


def _routes() -> str:
    return f"\n{_course.table('notebooks/')}\n"


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


SHOWN = (  # A problem of each family; the site's page of results has all.
    "softmax/16384x8192/bf16",
    "matmul/8192x8192x8192/bf16",
    "matmul_fp8/4096x4096x4096/fp8",
    "matmul_int8_weights/16x8192x8192/bf16",
    "ragged_dot/65536x1536x2048_g128_skewed/bf16",
    "attention/hd128_b4_s4096_h16_full/bf16",
    "attention/hd128_b4_s4096_h16_causal/bf16",
    "paged_attention/b64_s8192_page16/bf16",
    "ssd/b4_t8192_h32_g32_p64_n128/bf16",
    "gated_delta_rule/b1_t8192_h16_64_d128/bf16",
    "all_gather_matmul/m8192_n3584_k8192/bf16",
)


def _table() -> str:
    """A line for each problem of `SHOWN`: our rate, and the fastest peer's."""
    lines = []
    hosts = [(results.host(GPU, n), collectives.cases(n), link_rate_text) for n in results.hosts(GPU)]
    for gpu, cases, rate_of in [(GPU, CASES, rate_text), *hosts]:
        shown = {case.problem: case for case in cases if case.problem in SHOWN}
        lines += [_line(gpu, shown[problem], rate_of) for problem in SHOWN if problem in shown]
    return "| | cookbook | the fastest peer | measured on |\n|---|---|---|---|\n" + "".join(lines)


def _line(gpu: str, case, rate_of) -> str:
    impls = results.rows(case.op, gpu).get(case.problem, {})
    if case.impl not in impls:
        return ""
    ours = impls[case.impl]
    peers = [peer for peer in LIBRARIES if peer in impls and peer not in case.parts]
    best = min(peers, key=lambda peer: impls[peer]["ms"], default=None)
    mark = " (stale)" if (case.problem, case.impl) in results.stale_list(gpu) else ""
    beside = f"{best} {rate_of(impls[best])}" if best else ""
    return f"| `{case.problem}` | {rate_of(ours)}{mark} | {beside} | {results.gpus(ours['provenance'])} |\n"


if __name__ == "__main__":
    sys.exit(main())
