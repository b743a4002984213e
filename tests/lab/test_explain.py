"""The error index: each row has its section in appendix B, and `lab.explain` finds what it should and nothing else.

That a message still begins as the index says is seen when the appendix runs: `lab.raises` insists on it.
"""

import ast
import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from lab import explaining
from lab.explaining import ROWS
from tests.house.test_names import NAME, resolve

ROOT = pathlib.Path(__file__).resolve().parents[2]
APPENDIX = ROOT / "notebooks" / "B_errors.ipynb"
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def sources(path: pathlib.Path) -> dict[str, str]:
    return {cell["id"]: "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]}


CELLS = sources(APPENDIX)


def named(source: str, functions=("raises", "on_a_gpu")) -> list[str]:
    """Rows that a cell names in `lab.raises("row")` or `on_a_gpu("row", ...)`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    name = lambda function: getattr(function, "attr", getattr(function, "id", ""))
    return [call.args[0].value for call in calls if name(call.func) in functions and hasattr(call.args[0], "value")]


# The appendix ---------------------------------------------------------------------------------------------------------


@each_row
def test_a_row_has_one_section(row):
    """Its text is the index's, and its cell expects this error, or says why it cannot."""
    text = " ".join(CELLS[f"{row.id}-text"].split())
    wanted = " ".join(row.markdown().split())
    assert text.startswith(wanted), f"notebooks/B_errors.ipynb, cell {row.id}-text, should begin:\n{row.markdown()}"
    if row.symptom or row.elsewhere:
        assert set(named(CELLS[row.id])) <= {row.id}
    else:
        assert set(named(CELLS[row.id])) == {row.id}


def test_sections_follow_the_index():
    sections = [name.removesuffix("-text") for name, source in CELLS.items() if re.search("^### ", source, re.M)]
    assert sections == list(ROWS)
    themes = [source.splitlines()[0] for name, source in CELLS.items() if name.startswith("theme-")]
    assert themes == list(dict.fromkeys(f"## {row.theme}" for row in ROWS.values()))


def test_its_first_table_leads_to_every_section():
    lines = [line for line in CELLS["index"].splitlines() if "<a href" in line]
    found = {line.split("|")[1].strip(): re.findall(r'<a href="#([\w-]+)">\1</a>', line) for line in lines}
    assert found == {theme: [row.id for row in ROWS.values() if row.theme == theme] for theme in found}
    assert sum(found.values(), []) == list(ROWS)


def test_the_list_that_the_index_grew_from_is_whole():
    assert {row.number for row in ROWS.values()} - {None} == set(range(1, 54))


@each_row
def test_a_row_is_whole(row):
    assert bool(row.symptom) != bool(row.starts)
    assert row.starts or row.before is None
    for text in (row.means, row.fix):
        assert text.endswith((".", ".)")) and not re.match(r"(Of|What)\b", text)
    chapter = ROOT / "notebooks" / f"{row.chapter}.ipynb"
    assert chapter.exists()
    if row.section:
        assert re.search(rf"^##+ {re.escape(row.section)}$", "\n".join(sources(chapter).values()), re.M), row.read


@pytest.mark.parametrize("name", sorted({name for row in ROWS.values() for name in NAME.findall(row.fix)}))
def test_advice_works_as_it_is_written(name):
    if name == "plgpu.store" and jax.__version_info__ < (0, 12):
        pytest.skip("the advice is for JAX 0.12")
    assert resolve(name) is not None


# explain --------------------------------------------------------------------------------------------------------------


def filled(start: str) -> str:
    return start.replace("…", "17") + ", and more of it.\nAnother line."


@pytest.mark.parametrize("row, start", [(row, start) for row in ROWS.values() for start in row.starts])
def test_explain_finds_each_recorded_message(row, start):
    for text in (filled(start), f"op: INTERNAL: stack\nValueError: {filled(start)}"):
        explanation = lab.explain(RuntimeError(text))
        assert explanation.row is row
        assert explanation.message == filled(start).splitlines()[0]
    assert lab.explain(filled(start)).row is row


def test_explain_looks_at_causes():
    known = ValueError(filled(ROWS["smem-ran-out"].says))
    for chain in ("cause", "context"):
        try:
            try:
                raise known
            except ValueError as error:
                if chain == "cause":
                    raise RuntimeError("wrapped") from error
                raise RuntimeError("wrapped")  # noqa: B904
        except RuntimeError:
            assert lab.explain().row is ROWS["smem-ran-out"]
    try:
        raise RuntimeError("wrapped") from None
    except RuntimeError:
        assert lab.explain().row is None
    circle = RuntimeError("in a circle")
    circle.__context__ = RuntimeError("of two")
    circle.__context__.__context__ = circle
    assert lab.explain(circle).row is None


def test_explain_finds_an_error_without_a_message():
    def kernel(x, o):
        o[...] = x[...]

    x = jax.ShapeDtypeStruct((256,), "float32")
    call = pl.pallas_call(kernel, out_shape=x, compiler_params=plgpu.CompilerParams())
    with pytest.raises(AssertionError) as caught:
        lab.compile_for("h200", call, x)
    assert lab.explain(caught.value).row is ROWS["pallas-call"]


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error", [KeyError("k"), AssertionError(), Unprintable(), "some text", "", 5, "\n", "…", "`a`"]
)
def test_explain_says_that_it_does_not_know(error):
    explanation = lab.explain(error)
    assert explanation.row is None
    assert "unknown" in repr(explanation) + "unknown" * (explanation.message == "")
    assert "issues" in explanation._repr_markdown_() + "issues" * (explanation.message == "")


def test_explain_says_three_lines_and_links_the_chapter():
    explanation = lab.explain(ValueError("N must be a multiple of 8 and <= 256, got: 512"))
    text = repr(explanation)
    assert text.startswith("N must be a multiple of 8 and <= 256, got: 512\nIt means: ")
    assert [line.split(":")[0] for line in text.splitlines()[1:] if line[0] != " "] == ["It means", "Try", "Read"]
    assert "notebooks/05_wgmma.ipynb" in text and "(05_wgmma.ipynb)" in explanation._repr_markdown_()


IN_IPYTHON = """
from IPython.core.interactiveshell import InteractiveShell
import lab
assert "No error" in repr(lab.explain())
shell = InteractiveShell.instance()
shell.run_cell('raise RuntimeError("Ran out of shared memory.")')
shell.run_cell('import lab\\nanswer = lab.explain()')
assert shell.user_ns["answer"].row.id == "smem-ran-out"
"""


def test_explain_after_a_failing_cell():
    subprocess.run([sys.executable, "-c", IN_IPYTHON], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


# raises, and mutants of the index -------------------------------------------------------------------------------------


def shown(row_id: str, message: str | None):
    with lab.raises(row_id):
        if message is not None:
            raise RuntimeError(message)


def test_raises_prints_the_line(capsys):
    shown(
        "captured-array",
        "The kernel function in f at /a/b/site-packages/jax/c.py captures non-scalar array constants [",
    )
    assert capsys.readouterr().out == (
        "RuntimeError: The kernel function in f at jax/c.py captures non-scalar array constants [\n"
    )


@pytest.mark.parametrize("message", ["another", "Strides are not supported.", "Ran out of memory.", None])
def test_raises_insists_on_the_row(message):
    with pytest.raises(lab.CheckError, match="smem-ran-out"):
        shown("smem-ran-out", message)
    with pytest.raises(ValueError, match="is no row"):
        shown("smem_ran_out", message)


def test_raises_knows_the_versions(monkeypatch, capsys):
    old, new = ROWS["row-pitch"].before, ROWS["row-pitch"].says
    for version, right, wrong in (((0, 11, 2), old, new), ((0, 12, 0, 1), new, old)):
        monkeypatch.setattr(jax, "__version_info__", version)
        shown("row-pitch", right)
        with pytest.raises(lab.CheckError):
            shown("row-pitch", wrong)
    shown("custom-jvp", None)
    assert "accepts this" in capsys.readouterr().out
    with pytest.raises(lab.CheckError, match="should raise no error"):
        shown("custom-jvp", ROWS["custom-jvp"].before)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.start_here], ids=lambda row: row.id)
def test_a_changed_start_is_noticed(row, monkeypatch):
    """By `raises`, when JAX says what it says now."""
    message = filled(row.start_here)
    shown(row.id, message)
    start = row.start_here[:4] + "x" + row.start_here[4:]
    changed = dataclasses.replace(row, says=start, before=None)
    monkeypatch.setitem(explaining.ROWS, row.id, changed)
    with pytest.raises(lab.CheckError):
        shown(row.id, message)
