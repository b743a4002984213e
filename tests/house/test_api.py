"""Appendix C: every name of Pallas's Mosaic GPU API is in it, in a chapter, or in its list of those left out."""

import pathlib
import re

import nbformat
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
CELLS = nbformat.read(NOTEBOOKS / "C_api.ipynb", as_version=4).cells
ENTRIES = [cell.id.removesuffix("-text") for cell in CELLS if cell.id.endswith("-text")]
LINES_MAX = 15


def source(cell_id: str) -> str:
    return next(cell.source for cell in CELLS if cell.id == cell_id)


def names_of(text: str) -> set[str]:
    return set(re.findall(r"\bplgpu\.(\w+)", text))


def names_explained() -> set[str]:
    """Names that a chapter or an entry of the appendix writes as `plgpu.name`; its set-up and its list do not count."""
    entries = [source(cell_id) for entry in ENTRIES for cell_id in (f"{entry}-text", entry)]
    chapters = [nbformat.read(path, as_version=4).cells for path in NOTEBOOKS.glob("[0-9]*.ipynb")]
    return names_of("\n".join([*entries, *(cell.source for cells in chapters for cell in cells)]))


def names_left_out() -> dict[str, str]:
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", source("end"), re.M)
    return {name: reason for names, reason in rows for name in re.findall(r"`(\w+)`", names)}


def test_every_name_is_explained_or_left_out():
    exported = {name for name in dir(plgpu) if not name.startswith("_")}
    explained, left_out = names_explained(), names_left_out()
    missing = exported - explained - left_out.keys()
    assert not missing, f"notebooks/C_api.ipynb needs an entry for, or leaves out with a reason: {sorted(missing)}"
    assert not left_out.keys() & explained, "named in the list of those left out, and explained"
    assert left_out.keys() <= exported and all(len(reason.split()) >= 4 for reason in left_out.values())


def test_no_code_uses_nvlink_multicast():
    """It may put the GPUs of a host out of service."""
    code = "\n".join(cell.source for cell in CELLS if cell.cell_type == "code")
    assert not re.search("multimem|multicast", code)


def test_the_table_of_contents_leads_to_every_entry():
    assert re.findall(r'^\| <a href="#([\w-]+)">', source("title"), re.M) == ENTRIES


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_is_whole(entry):
    """An anchor, a heading, when not to use it, the nearest chapter, both versions; then one short cell."""
    text, code = source(f"{entry}-text"), source(entry)
    assert text.startswith(f'<a id="{entry}"></a>\n\n### ')
    words = " ".join(text.split()).lower()
    assert "do not " in words and re.search(r"\*\*nearest:\*\* chapters? \[", words)
    assert "0.11.2" in words and "0.12.0.1" in words
    assert len(code.splitlines()) <= LINES_MAX
    assert re.search(r"\b(agrees|check|check_ptx|compiles|assert|assert_array_equal)\b", code), "it checks nothing"
