"""Assertions on a checker's verdict, and the skeletons that learners start from."""

import functools
import json
import pathlib

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"


def skeletons(notebook: str):
    """`skeleton(cell_id)`: what that cell of `notebook` ("06_pipelining") defines before it calls the checker."""
    return functools.partial(_skeleton, notebook)


def _skeleton(notebook: str, cell_id: str) -> dict:
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text())["cells"]
    source = "".join(next(cell["source"] for cell in cells if cell["id"] == cell_id))
    names = {}
    exec(source[: source.index(f"ex{notebook.split('_')[0]}.")], names)
    return names


def accepted(verdict):
    assert verdict, verdict
    assert repr(verdict).startswith("Right.")


def rejected(verdict, said):
    assert not verdict
    assert repr(verdict).startswith("Not yet:") and said in verdict.text, verdict
