"""Draws the pictures of notebooks again, in place: the cells that only show a drawing, which no GPU has to run."""

import re
import sys

import nbformat
from nbclient import NotebookClient

from lab.program import is_drawing
from tools.run_notebooks import NOTEBOOKS, _select


def main() -> int:
    for path in _select(sys.argv[1:]):
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
    return 0


def _imports(cell) -> str:
    """Lines of a cell that import from `figures`; some stand in a chapter's set-up, with all other imports."""
    return "\n".join(re.findall(r"^from figures\b[^(\n]*(?:\([^)]*\))?$", cell.source, re.M))


if __name__ == "__main__":
    sys.exit(main())
