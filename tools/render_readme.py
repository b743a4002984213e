"""Renders the README's table of figures from results/; `--check` only says whether it is up to date."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "site")]

from measured import GPU, OURS, TARGETS, rate_text  # noqa: E402

from cookbook.lab import results  # noqa: E402

README = ROOT / "README.md"
BETWEEN_MARKERS = re.compile(r"(<!-- results: .*? -->\n).*?(<!-- end -->)", re.S)


def main() -> int:
    text = README.read_text()
    wanted = rendered(text)
    if "--check" in sys.argv:
        return text != wanted
    README.write_text(wanted)
    return 0


def rendered(readme: str) -> str:
    """`readme` with what stands between its markers made anew from results/."""
    return BETWEEN_MARKERS.sub(lambda match: f"{match[1]}{_table()}{match[2]}", readme)


def _table() -> str:
    stale = set(results.stale_list(GPU))
    origins, lines = set(), []
    for target in TARGETS:
        impls = results.rows(target.problem.split("/")[0], GPU).get(target.problem, {})
        ours = next((impl for impl in impls if impl in OURS), None)
        if not target.headline or ours is None:
            continue
        peers = sorted((row["ms"], peer) for peer, row in impls.items() if peer not in OURS)
        beside = "; ".join(f"{peer} {rate_text(impls[peer])}" for _, peer in peers)
        mark = " (stale)" if (target.problem, ours) in stale else ""
        lines.append(f"| `{target.problem}` | {rate_text(impls[ours])}{mark} | {beside} |\n")
        origins.add("{gpu}, JAX {jax}, {date}".format(**impls[ours]["provenance"]))
    if not lines:
        return ""
    header = f"| measured on {'; '.join(sorted(origins))} | cookbook | instead |\n|---|---|---|\n"
    return f"\n{header}{''.join(lines)}\n"


if __name__ == "__main__":
    sys.exit(main())
