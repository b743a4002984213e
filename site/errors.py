"""The error index as one page: each message, what it means, and where appendix B fixes it."""

import re
from pathlib import Path

from lab.explaining import ROWS, as_code

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def errors_page() -> str:
    """A table for each theme; a row leads to its section of the appendix and to the chapter that explains it."""
    page = [
        "# Error index",
        "",
        "How the messages of Pallas, Mosaic GPU and the interpreter begin, and what they mean. A message leads to a "
        "kernel that provokes it, and to the fix. In a notebook, `lab.explain()` looks up the error of the last cell.",
        "",
    ]
    themes = dict.fromkeys(row.theme for row in ROWS.values())
    for theme in themes:
        page += [f"## {theme}", "", "| message | it means | read |", "|---|---|---|"]
        page += [_line(row) for row in ROWS.values() if row.theme == theme] + [""]
    return "\n".join(page)


def _line(row) -> str:
    title = row.title if row.symptom else as_code(row.title)
    message = f"[{title}](chapters/B_errors.ipynb#{_slug(row.title)})"
    other = f"<br>JAX 0.11: {as_code(row.before)}" if row.before and row.says else ""
    chapter = row.chapter
    if (NOTEBOOKS / f"{chapter}.ipynb").exists():
        chapter = f"[{chapter}](chapters/{chapter}.ipynb)"
    return f"| {message}{other} | {row.means} | {chapter} |"


def _slug(heading: str) -> str:
    """The anchor that MyST gives a heading, as GitHub does."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
