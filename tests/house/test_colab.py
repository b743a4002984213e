"""A notebook opens without a checkout: in Colab by its first cell, in Binder by environment.yml and postBuild."""

import pathlib
import shutil
import subprocess
import sys

import jinja2
import nbformat
import pytest
from nbclient import NotebookClient

from tools import colab

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_links_differ_in_colab(path):
    before = nbformat.read(path, as_version=4).cells
    first, *after = colab.for_colab(nbformat.read(path, as_version=4), "https://github.com/a/b").cells
    assert "git clone --quiet --depth 1 https://github.com/a/b $COURSE" in first.source
    assert [cell for cell in before if cell.cell_type == "code"] == [cell for cell in after if cell.cell_type == "code"]
    for cell in (cell for cell in after if cell.cell_type == "markdown"):
        for link in colab.RELATIVE_LINK.findall(cell.source):
            pytest.fail(f"{link} leads nowhere in Colab")


def test_a_link_leads_to_the_repository():
    cell = nbformat.v4.new_markdown_cell("[x](05_wgmma.ipynb#a) [y](../cookbook/rows) [z](#here) [w](https://c.d)")
    notebook = colab.for_colab(nbformat.v4.new_notebook(cells=[cell]), "https://e.f")
    at = "https://e.f/blob/main/"
    assert notebook.cells[1].source == (
        f"[x]({at}notebooks/05_wgmma.ipynb#a) [y]({at}cookbook/rows) [z](#here) [w](https://c.d)"
    )


def test_the_first_cell_fetches_a_course_that_runs(tmp_path, monkeypatch):
    """But for pip, which would download what this environment has."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    origin = tmp_path / "origin"  # A checkout under test need not be a repository.
    for name in ("cookbook", "lab", "figures", "notebooks/exercises"):
        shutil.copytree(ROOT / name, origin / name, ignore=shutil.ignore_patterns("__pycache__", "*.svg"))
    for command in ("init --quiet", "add .", "-c user.name=a -c user.email=a@b commit --quiet -m course"):
        subprocess.run(["git", *command.split()], cwd=origin, check=True)
    notebook = colab.for_colab(nbformat.v4.new_notebook(), f"file://{origin}")
    lines = notebook.cells[0].source.replace("/content", str(tmp_path)).splitlines()
    notebook.cells[0].source = "\n".join(line for line in lines if "pip install" not in line)
    assert len(notebook.cells[0].source.splitlines()) == len(lines) - 1
    used = "import lab, cookbook, exercises.ex00, figures.start_here\nprint(lab.__file__)"
    notebook.cells.append(nbformat.v4.new_code_cell(used))
    NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
    assert notebook.cells[1].outputs[0].text.strip() == str(tmp_path / "pallas-cookbook" / "lab" / "__init__.py")


def test_binder_imports_from_the_checkout(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\necho {tmp_path}\n")
    python.chmod(0o755)
    subprocess.run([ROOT / "postBuild"], cwd=ROOT, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import lab; print(lab.__file__)"
    found = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(ROOT / "lab" / "__init__.py")


@pytest.mark.parametrize("repository", (None, "owner/name"))
def test_a_published_chapter_has_both_links(repository):
    folder = ROOT / "site" / "_templates"
    template = jinja2.Environment(loader=jinja2.FileSystemLoader(folder)).get_template("chapter_head.html")
    shown = template.render(repository=repository, notebook="05_wgmma.ipynb", sourcename="x", pathto=lambda *_: "y")
    for link in (
        "https://colab.research.google.com/github/owner/name/blob/colab/05_wgmma.ipynb",
        "https://mybinder.org/v2/gh/owner/name/HEAD?urlpath=lab/tree/notebooks/05_wgmma.ipynb",
    ):
        assert (link in shown) == (repository is not None)
