"""Renders again, in place, what no GPU has to run: the drawings of notebooks, and sentences that quote figures."""

import argparse
import os
import pathlib
import re
import subprocess
import sys

import nbformat
from nbclient import NotebookClient

from lab import results
from lab.program import is_drawing
from tools.run_notebooks import NOTEBOOKS, OUTPUT, ROOT, _select


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="which ones: 05, B (an appendix), or a name; default: all")
    parser.add_argument(
        "--say", nargs="+", metavar="CELL", help="render the sentences of these cells' `lab.say` instead"
    )
    args = parser.parse_args()
    for path in _select(args.notebooks):
        _say(path, args.say) if args.say else _draw(path)
    return 0


def _draw(path: pathlib.Path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells = [cell for cell in code if is_drawing(cell.source)]
    imports = nbformat.v4.new_code_cell("\n".join(map(_imports, code)))
    alone = nbformat.v4.new_notebook(cells=[imports, *map(nbformat.from_dict, cells)])
    NotebookClient(alone, resources={"metadata": {"path": NOTEBOOKS}}).execute()
    for cell, drawn in zip(cells, alone.cells[1:], strict=True):
        cell.outputs = drawn.outputs
        cell.execution_count = cell.execution_count or drawn.execution_count  # A new cell has none.
        for output in cell.outputs:
            output.execution_count = cell.execution_count
    nbformat.write(notebook, path)
    print(f"{path.stem}: {len(cells)} drawings")


def _say(path: pathlib.Path, ids: list[str]):
    """Takes the sentences of a run on the CPU, which quote the recorded figures; all other outputs stay.

    Cells are named because a sentence may also quote what its chapter has computed, which a CPU computes otherwise.
    """
    notebook = nbformat.read(path, as_version=4)
    if unknown := set(ids) - {cell.id for cell in notebook.cells if _markdown(cell)}:
        sys.exit(f"{path.stem}: no cell that shows a sentence has the id {', '.join(sorted(unknown))}")
    os.environ["COOKBOOK_GPU"] = results.gpu_of(notebook.metadata.recorded.gpu)
    if subprocess.run([sys.executable, "tools/run_notebooks.py", path.stem.split("_")[0]], cwd=ROOT).returncode:
        sys.exit(f"{path.stem} fails on the CPU: nothing is written")
    said = {cell.id: _markdown(cell) for cell in nbformat.read(OUTPUT / path.name, as_version=4).cells}
    for cell in (cell for cell in notebook.cells if cell.id in ids):
        for shown, new in zip(_markdown(cell), said[cell.id], strict=False):
            if "Not recorded yet" in new["text/markdown"]:
                sys.exit(f"{path.stem}: a sentence quotes a figure that is not recorded:\n{cell.source}")
            shown.update(new)
    nbformat.write(notebook, path)


def _markdown(cell) -> list[dict]:
    """The Markdown that a cell of code shows."""
    data = (output.get("data", {}) for output in cell.get("outputs", []))
    return [shown for shown in data if "text/markdown" in shown]


def _imports(cell) -> str:
    """Lines of a cell that import from `figures`; some stand in a chapter's set-up, with all other imports."""
    return "\n".join(re.findall(r"^from figures\b[^(\n]*(?:\([^)]*\))?$", cell.source, re.M))


if __name__ == "__main__":
    sys.exit(main())
