"""Each exercise: its cell is the skeleton of its solution; the one is turned down, the other accepted."""

import pathlib
import sys

import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tools"), str(ROOT / "notebooks")]

import skeletons as course  # noqa: E402

WRITTEN = sorted(path.stem for path in course.NOTEBOOKS.glob("[0-9]*.ipynb"))
EXERCISES = [(stem, exercise) for stem in WRITTEN for exercise in course.exercises(course.SOLUTIONS / f"{stem}.py")]


def cells(stem: str) -> dict:
    return {cell.id: cell for cell in nbformat.read(course.NOTEBOOKS / f"{stem}.ipynb", as_version=4).cells}


def verdict(stem: str, exercise: course.Exercise, source: str):
    """Value of the last expression of `source`, after the cells that it needs."""
    names = {"__name__": "__main__"}
    for cell in exercise.needs:
        exec(cells(stem)[cell].source, names)
    code, _, call = source.rstrip().rpartition("\n")
    exec(code, names)
    return eval(call, names)


def mistaken(stem: str, cell: str, right: str, wrong: str):
    """Verdict on the solution of an exercise in which `right` is replaced by `wrong`."""
    return changed(stem, cell, (right, wrong))


def changed(stem: str, cell: str, *changes: tuple[str, str]):
    """Verdict on the solution of an exercise after `changes`, pairs of a text and of what comes in its place."""
    exercise = next(found for found in course.exercises(course.SOLUTIONS / f"{stem}.py") if found.id == cell)
    solution = exercise.solution
    for right, wrong in changes:
        assert right in solution
        solution = solution.replace(right, wrong)
    return verdict(stem, exercise, solution)


@pytest.mark.parametrize("stem", WRITTEN)
def test_every_exercise_has_hints_and_a_solution(stem):
    notebook = nbformat.read(course.NOTEBOOKS / f"{stem}.ipynb", as_version=4).cells
    found = {cell.id: (above, cell) for above, cell in zip(notebook, notebook[1:], strict=False)}
    wanted = [cell.id for cell in notebook if "exercise" in cell.metadata.get("tags", [])]
    assert [exercise.id for exercise in course.exercises(course.SOLUTIONS / f"{stem}.py")] == wanted
    assert len(wanted) >= 4
    if stem not in ("15_serving", "15b_engine"):  # Their subjects are a scheduler and the loop around it, on the host.
        assert sum("kernel" in found[name][1].metadata.tags for name in wanted) >= 2, "tagged: exercise, kernel"
    for exercise in course.exercises(course.SOLUTIONS / f"{stem}.py"):
        text, cell = found[exercise.id]
        assert cell.source == exercise.skeleton, f"run: python tools/skeletons.py {stem.split('_')[0]}"
        assert text.source.count("<summary>Hint ") == 3, f"{exercise.id}: three hints stand in the cell above it"


@pytest.mark.parametrize("stem, exercise", EXERCISES, ids=lambda value: getattr(value, "id", value))
def test_skeleton_is_turned_down_and_solution_accepted(stem, exercise):
    before = verdict(stem, exercise, exercise.skeleton)
    assert not before and repr(before).startswith("Not yet:"), before
    after = verdict(stem, exercise, exercise.solution)
    assert after and repr(after).startswith("Right."), after


@pytest.mark.parametrize(
    "part, said",
    [
        ("# %% a b\nx\n", "must be '# %% CELL-ID'"),
        ("# %% a\n# BEGIN SOLUTION\nx\n", "without '# END SOLUTION'"),
        ("# %% a\n# END SOLUTION\n", "take turns"),
        ("# %% a\n# BEGIN SOLUTION\n# BEGIN SOLUTION\n", "take turns"),
    ],
)
def test_wrong_marks_are_refused(tmp_path, part, said):
    path = tmp_path / "00_a.py"
    path.write_text(part)
    with pytest.raises(ValueError, match=said):
        course.exercises(path)
