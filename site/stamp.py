"""Where and when a page was verified: a notebook's own record, or the newest measurement in results/."""

import functools
import json
from pathlib import Path

from lab.program import notebook_hash

ROOT = Path(__file__).resolve().parent.parent


def stamp_of(notebook: Path | None) -> dict | None:
    """Returns {gpu, driver, jax, date, stale} of `notebook`, or of results/ when it is None; None if never verified."""
    if notebook is None:
        return newest_measurement()
    recorded = json.loads(notebook.read_text())["metadata"].get("recorded")
    return recorded and recorded | {"stale": recorded["source"] != notebook_hash(notebook)}


@functools.cache
def newest_measurement() -> dict | None:
    """The provenance of the newest row of results/."""
    rows = [row for path in (ROOT / "results").glob("*/*.json") for row in all_rows(path)]
    return max((row["provenance"] for _, _, row in rows), key=lambda p: p["date"], default=None)


def all_rows(path: Path):
    """Yields (problem, implementation, row) for each measurement in one file of results/."""
    for problem, implementations in json.loads(path.read_text()).get("rows", {}).items():
        for implementation, row in implementations.items():
            yield problem, implementation, row
