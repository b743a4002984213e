"""Drawings, and sentences that quote figures, are rendered in notebooks without a GPU."""

import nbformat
import pytest

from tools import draw

CHAPTER = draw.NOTEBOOKS / "12_flash_attention_backward.ipynb"  # Its set-up imports what its cells draw.


def test_drawings_come_out_as_they_were_and_nothing_else_changes(tmp_path):
    path = tmp_path / CHAPTER.name
    notebook = nbformat.read(CHAPTER, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and draw.is_drawing(cell.source):
            cell.outputs = []
    nbformat.write(notebook, path)
    draw._draw(path)
    assert nbformat.read(path, as_version=4).cells == nbformat.read(CHAPTER, as_version=4).cells


def test_sentences_are_those_of_a_run_on_the_cpu_in_the_named_cells_alone(tmp_path, monkeypatch):
    said = lambda text: [nbformat.v4.new_output("display_data", {"text/markdown": text})]
    cells = [nbformat.v4.new_code_cell("lab.say(text)", id=name, outputs=said(f"old {name}")) for name in ("a", "b")]
    facts = dict(recorded=dict(gpu="NVIDIA H200"))
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=facts), tmp_path / "05_x.ipynb")
    for cell in cells:
        cell.outputs = said(f"new {cell.id}")
    (tmp_path / "out").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=facts), tmp_path / "out/05_x.ipynb")
    monkeypatch.setattr(draw, "OUTPUT", tmp_path / "out")
    monkeypatch.setattr(draw.subprocess, "run", lambda *args, **kwargs: type("Ran", (), dict(returncode=0)))
    monkeypatch.setenv("COOKBOOK_GPU", "h100")
    with pytest.raises(SystemExit, match="no cell that shows a sentence has the id c"):
        draw._say(tmp_path / "05_x.ipynb", ["a", "c"])
    draw._say(tmp_path / "05_x.ipynb", ["b"])
    assert draw.os.environ["COOKBOOK_GPU"] == "h200"
    shown = [cell.outputs[0].data["text/markdown"] for cell in nbformat.read(tmp_path / "05_x.ipynb", 4).cells]
    assert shown == ["old a", "new b"]
