"""Writes the notebooks for Colab, which opens one without a checkout beside it: a first cell fetches the course.

`python tools/colab.py https://github.com/OWNER/NAME build/colab`; the workflow `pages.yml` publishes them as the branch
`colab`, to which each chapter of the site links.
"""

import posixpath
import re
import sys
from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")
FIRST = """\
# @title Run this first: it fetches the course and what it needs, which takes a few minutes.
import sys

COURSE = "/content/pallas-cookbook"
!git clone --quiet --depth 1 {repository} $COURSE
!{{sys.executable}} -m pip install --quiet "$COURSE[lab,aot,serving]"
%cd -q $COURSE/notebooks
sys.path.insert(0, COURSE)
"""


def main() -> int:
    repository, folder = sys.argv[1].removesuffix("/"), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(for_colab(nbformat.read(path, as_version=4), repository), folder / path.name)
    return 0


def for_colab(notebook, repository: str):
    """`notebook` with the first cell, and with links that lead to the repository instead of a folder beside it."""
    at = repository + "/blob/main/"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = RELATIVE_LINK.sub(lambda link: f"]({at}{_in_repository(link[1])})", cell.source)
    code = FIRST.format(repository=repository)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(code, id="colab", metadata={"cellView": "form"}))
    return notebook


def _in_repository(link: str) -> str:
    return posixpath.normpath(posixpath.join("notebooks", link))


if __name__ == "__main__":
    sys.exit(main())
