"""The form of a chapter: what stands in CONTRIBUTING.md, "How a chapter is written", counted."""

import ast
import json
import pathlib
import re

import jax
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


@pytest.mark.parametrize("path", [path for path in NEW_FORM if "Recorded on" in head(path)], ids=lambda path: path.stem)
def test_a_chapter_shows_one_gpu(path):
    found = set(re.findall(r"NVIDIA (?:H100|H200|B200)", json.dumps(read(path))))
    stamp = json.loads(path.read_text())["metadata"]["recorded"]["gpu"] if found else ""
    (gpu,) = re.findall(r"Recorded on (?:one|a host with \w+) (NVIDIA \w+)", head(path))
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


# Forms of links, checked without a network. A file of JAX must be there in the installed one.
JAX_FILE = r"https://github\.com/jax-ml/jax/(?:blob|tree)/main/(jax/experimental/pallas/ops/gpu(?:/\w+\.py)?)"
PLACES = [
    JAX_FILE,
    r"https://docs\.jax\.dev/en/latest/[\w/]+\.html",
    r"https://docs\.nvidia\.com/(cuda/parallel-thread-execution|cutlass)/",
    r"https://github\.com/[\w-]+/[\w-]+",
    r"https://arxiv\.org/abs/\d{4}\.\d{4,5}",
    r"https://doi\.org/10\.\d{4}/[\w.]+",
    r"https://(www\.usenix\.org/conference|mlsys\.org/Conferences|pytorch\.org/blog)/[\w/.-]+",
]


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem[0].isdigit()], ids=lambda path: path.stem)
def test_a_chapter_says_where_to_read_on(path):
    """JAX's page, the reference kernel or engine, papers or documents; only asides may follow."""
    markdown = [cell.source for cell in read(path) if cell.cell_type == "markdown"]
    _, section, *more = re.split("^## Read on$", "\n\n".join(markdown), flags=re.M)
    assert not more and not re.search("^Sources: ", "\n".join(markdown), re.M), "two lists of sources"
    section, *asides = re.split("^## ", section, flags=re.M)
    assert all(text.startswith("Aside") for text in asides)
    items = " ".join(section.removeprefix("\n\n- ").split()).split(" - ")
    assert len(items) == 3
    for item, name in zip(
        items, ("JAX's page", "The reference (kernel|engine)", "The (paper|document)s?"), strict=True
    ):
        assert re.match(f"{name}: ", item), item
        links = re.findall(r"\]\((\S+?)\)", item)
        assert links and all(any(re.fullmatch(place, link) for place in PLACES) for link in links), links
        for file in re.findall(JAX_FILE, item):
            assert (pathlib.Path(jax.__file__).parent.parent / file).exists(), file
