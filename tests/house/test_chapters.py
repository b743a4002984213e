"""The form of a chapter: what stands in CONTRIBUTING.md, "How a chapter is written", counted."""

import ast
import json
import pathlib
import re

import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MINUTES_MAX, CELLS_MAX, LINES_MAX, KERNEL_LINES_MAX = 45, 35, 300, 60


def read(path):
    return nbformat.read(path, as_version=4).cells


def head(path) -> str:
    """The paragraph in italics below a chapter's title, as one line."""
    paragraphs = (" ".join(text.split()) for text in read(path)[0].source.split("\n\n"))
    return next((text for text in paragraphs if text.startswith("*")), "")


# Chapters in the new form say on which GPU or host they were recorded, or for which GPU, which nobody here has, they
# are compiled.
RECORDED = [path for path in NOTEBOOKS if "Recorded on one NVIDIA" in head(path)]
NEW_FORM = RECORDED + [path for path in NOTEBOOKS if re.search("Compiled for a B200|Recorded on a host", head(path))]
named = pytest.mark.parametrize("path", NEW_FORM, ids=lambda path: path.stem)
# They have no picture and no rungs. A is read in one sitting; B is searched, and has a folded cell for each error.
APPENDICES = [path for path in NOTEBOOKS if not path.stem[0].isdigit()]
SITTINGS = NEW_FORM + [path for path in APPENDICES if path.stem == "A_migration"]


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def visible_code(cells) -> list[str]:
    return [cell.source for cell in cells if cell.cell_type == "code" and not is_folded(cell)]


def is_folded(cell) -> bool:
    return bool({"hide-cell", "hide-input"} & set(tags(cell)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_the_site_folds_jupyterlab_folds_too(path):
    for cell in read(path):
        hidden = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        assert hidden == is_folded(cell), cell.source


@pytest.mark.parametrize("path", SITTINGS, ids=lambda path: path.stem)
def test_a_chapter_is_one_sitting(path):
    minutes = re.search(r"(\d+) minutes", head(path))
    assert minutes and int(minutes[1]) <= MINUTES_MAX, head(path)
    cells = read(path)
    shown = [cell for cell in cells if not is_folded(cell)]  # A reader sees at most the output of a folded one.
    assert len(shown) <= CELLS_MAX
    assert sum(len(code.splitlines()) for code in visible_code(cells)) <= LINES_MAX


@pytest.mark.parametrize("path", NEW_FORM + APPENDICES, ids=lambda path: path.stem)
def test_a_kernel_is_read_on_one_page(path):
    for code in visible_code(read(path)):
        for node in ast.walk(ast.parse(re.sub(r"^[%!].*", "", code, flags=re.M))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < KERNEL_LINES_MAX, f"{path.stem}: {node.name}"


@named
def test_a_chapter_begins_with_a_picture(path):
    """Before any code: the head, at most set-up that is folded, and a picture whose code is."""
    for cell in read(path):
        if cell.cell_type == "code" and "hide-cell" not in tags(cell) and "parameters" not in tags(cell):
            assert "hide-input" in tags(cell), cell.source
            assert any("image" in kind for output in cell.outputs for kind in output.get("data", {})), cell.source
            return
    pytest.fail(f"{path.stem} shows no code")


@pytest.mark.parametrize("path", APPENDICES, ids=lambda path: path.stem)
def test_an_appendix_begins_with_a_table_and_folds_its_set_up(path):
    first, *cells = read(path)
    assert "\n|---|" in first.source
    assert is_folded(next(cell for cell in cells if cell.cell_type == "code"))
    assert sum(len(code.splitlines()) for code in visible_code(cells)) <= LINES_MAX


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_chapter_shows_one_gpu(path):
    found = set(re.findall(r"NVIDIA (?:H100|H200|B200)", json.dumps(read(path))))
    stamp = json.loads(path.read_text())["metadata"]["recorded"]["gpu"] if found else ""
    (gpu,) = re.findall(r"Recorded on one (NVIDIA \w+)", head(path))
    assert stamp.startswith(gpu) and found == {gpu}


@named
def test_an_aside_comes_last_and_its_code_is_folded(path):
    cells = read(path)
    first = next((i for i, cell in enumerate(cells) if cell.source.startswith("## Aside")), len(cells))
    for cell in cells[first:]:
        assert cell.cell_type == "markdown" or is_folded(cell), cell.source
        assert "exercise" not in tags(cell)


def test_the_first_chapters_let_a_reader_write_a_kernel_from_an_empty_cell():
    for path in NEW_FORM:
        if path.stem[:2] in ("00", "01", "02", "03"):
            exercises = [cell.source for cell in read(path) if "exercise" in tags(cell)]
            assert any("def " not in source for source in exercises), path.stem
