"""Each exercise: its cell is the skeleton of its solution; the one is turned down, the other accepted.

`TRIED`, at the head of a file of solutions, has other answers: the name of a cell, and below it an answer a line, with
what the verdict must say: `ANSWER  # SAID`. Where nothing is said, the verdict says the same as of the line before;
"Right." stands for answers that must be accepted. An answer is an expression, which may use the solution; or it is the
solution in which texts are replaced, `right => wrong && right => wrong`, where `\\n` stands for a new line. It goes on
in lines that are indented by 4.
"""

import ast
import copy
import functools
import importlib
import inspect
import pathlib
import re
import sys
import types

import jax
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tools"), str(ROOT / "notebooks")]

import skeletons as course  # noqa: E402

from exercises import judge  # noqa: E402 isort: skip

WRITTEN = sorted(path.stem for path in course.NOTEBOOKS.glob("[0-9]*.ipynb"))
EXERCISES = {(stem, e.id): e for stem in WRITTEN for e in course.exercises(course.SOLUTIONS / f"{stem}.py")}


def tried(stem: str):
    """(cell, what the verdict must say, answer) of each answer."""
    head = (course.SOLUTIONS / f"{stem}.py").read_text().partition("# %%")[0]
    texts = [ast.literal_eval(node.value) for node in ast.parse(head).body if isinstance(node, ast.Assign)]
    cell = said = ""
    text = re.sub(r"\n {4,}(#?)", lambda match: "  #" if match[1] else " ", "".join(texts))
    for line in text.splitlines():
        if not line.startswith(" "):
            cell = line
        else:
            answer, has_text, last = line.strip().rpartition("  # ")
            said = last if has_text else said
            yield cell, said, answer if has_text else last


TRIED = [(stem, *answer) for stem in WRITTEN for answer in tried(stem)]


@functools.lru_cache(maxsize=4)
def cells(stem: str) -> dict:
    return {cell.id: cell for cell in nbformat.read(course.NOTEBOOKS / f"{stem}.ipynb", as_version=4).cells}


@functools.lru_cache(maxsize=4)
def prepared(stem: str, needs: tuple[str, ...]) -> dict:
    """The names that these cells define."""
    names = {"__name__": "__main__"}
    for cell in needs:
        exec(cells(stem)[cell].source, names)
    return names


def solved(stem: str, cell: str, source: str, changes=()) -> tuple[dict, str]:
    """(names, call): those that are defined when `source` was run but for its last line, which is the call."""
    code, _, call = source.rstrip().rpartition("\n")
    for right, wrong in changes:
        assert right in code, f"{right!r} is not in the solution"
        code = code.replace(right, wrong)
    names = dict(prepared(stem, EXERCISES[stem, cell].needs))
    exec(code, names)
    return names, call


@pytest.mark.parametrize("stem", WRITTEN)
def test_every_exercise_has_hints_and_a_solution(stem):
    notebook = nbformat.read(course.NOTEBOOKS / f"{stem}.ipynb", as_version=4).cells
    found = {cell.id: (above, cell) for above, cell in zip(notebook, notebook[1:], strict=False)}
    wanted = [cell.id for cell in notebook if "exercise" in cell.metadata.get("tags", [])]
    assert [cell for of, cell in EXERCISES if of == stem] == wanted
    assert len(wanted) >= 4
    assert sum("kernel" in found[name][1].metadata.tags for name in wanted) >= 2, "tagged: exercise, kernel"
    for name in wanted:
        text, cell = found[name]
        assert cell.source == EXERCISES[stem, name].skeleton, f"run: python tools/skeletons.py {stem.split('_')[0]}"
        assert text.source.count("<summary>Hint ") == 3, f"{name}: three hints stand in the cell above it"


@pytest.mark.parametrize("stem, cell", EXERCISES)
def test_skeleton_is_turned_down_and_solution_accepted(stem, cell, monkeypatch):
    names, call = solved(stem, cell, EXERCISES[stem, cell].skeleton)
    before = eval(call, names)
    assert not before and repr(before).startswith("Not yet:"), before
    names, call = solved(stem, cell, EXERCISES[stem, cell].solution)
    after = eval(call, names)
    assert after and repr(after).startswith("Right."), after
    _turn_down_what_is_no_answer_anywhere(stem, cell, call, names, monkeypatch)


def _turn_down_what_is_no_answer_anywhere(stem, cell, call, names, monkeypatch):
    """Wrong in each exercise: a function that returns nothing or a text, raises or never ends; for a kernel, what XLA
    computes, before it, after it or alone, and a kernel for one shape only."""
    check, answer = (eval(text, names) for text in call.removesuffix(")").split("(", 1))
    if not inspect.isroutine(answer):
        return

    def raises(*args, **kwargs):
        raise KeyError("tile")

    def loops(*args, **kwargs):
        while True:
            pass

    wrong = {(lambda *args, **kwargs: None): "", (lambda *args, **kwargs: "many"): "", raises: "KeyError"}
    if LAUNCHES.search(EXERCISES[stem, cell].solution):
        wrong[lambda *args, **kwargs: args[-1]] = "must be a kernel"
        wrong[lambda *args, **kwargs: jax.tree.map(lambda x: x * 1, answer(*args, **kwargs))] = "outside of the kernel"
        if (stem, cell) not in OF_ONE_SHAPE:
            wrong[for_one_shape(answer)] = "another shape"
    for other, said in wrong.items():
        verdict = check(other)
        assert not verdict and said in verdict.text and "\n" not in verdict.text, verdict
    monkeypatch.setattr(judge, "SECONDS", 0.2)
    assert "has not ended after 0.2 s" in check(loops).text


def for_one_shape(answer):
    """`answer`, of no other shapes than those with which it is called first."""
    seen = []

    def checked(*args, **kwargs):
        seen.append([x.shape for x in jax.tree.leaves(args) if hasattr(x, "shape")])
        if seen[-1] != seen[0]:
            raise ValueError("another shape")
        return answer(*args, **kwargs)

    return checked


# The chapter's constants are the shapes, or the task names them.
OF_ONE_SHAPE = {
    ("13b_equal_parts", "exercise-last-block"), ("17b_delta_rule", "exercise-2"), ("17b_delta_rule", "exercise-4"),
    ("19_blackwell", "exercise-commit"), ("21_lifting", "exercise-3-cell"),
}  # fmt: skip

LAUNCHES = re.compile(r"(?m)^    (return|out|out, _ =|kernel =)?.*\b(kernel|launch|per_row)\(")


AS_IF_LOWERED = types.SimpleNamespace(as_text=lambda: "mosaic_gpu")


@pytest.mark.parametrize("stem, cell, said, answer", TRIED)
def test_other_answers(stem, cell, said, answer, monkeypatch):
    """A wrong one is lowered only if the verdict says something else without: lowering takes longer than all else."""
    is_changed = "=>" in answer
    pairs = [pair.split("=>") for pair in answer.replace("\\n", "\n").split("&&")] if is_changed else []
    changes = [(right.strip(" "), wrong.strip(" ")) for right, wrong in pairs]
    names, call = solved(stem, cell, EXERCISES[stem, cell].solution, changes)
    judged = lambda: eval(call if is_changed else f"{call.partition('(')[0]}({answer})", names)
    with monkeypatch.context() as patch:
        if said != "Right.":
            patch.setattr(jax.stages.Traced, "lower", lambda *_, **__: AS_IF_LOWERED)
        verdict = judged()
    if said not in repr(verdict):
        verdict = judged()
    assert bool(verdict) == (said == "Right."), verdict
    assert verdict or said in verdict.text, verdict


def draws(stem: str, cell: str) -> bool:
    """Whether the checker asks for cases that are new each time."""
    module, check = EXERCISES[stem, cell].solution.rpartition("\n")[2].partition("(")[0].split(".")
    source = inspect.getsource(getattr(importlib.import_module(f"exercises.{module}"), check).__wrapped__)
    return ("draw=" in source or "drawn(" in source) and "jax.jit" not in source  # A table cannot be traced.


@pytest.mark.parametrize("stem, cell", [key for key in EXERCISES if draws(*key)])
def test_a_table_is_no_answer(stem, cell):
    names, call = solved(stem, cell, EXERCISES[stem, cell].solution)
    check, answer = (eval(text, names) for text in call.removesuffix(")").split("("))
    asked, by_key = {}, lambda args: repr([getattr(arg, "tolist", lambda arg=arg: arg)() for arg in args])

    def noted(*args):
        key = by_key(args)
        asked[key] = answer(*args)
        return copy.deepcopy(asked[key])

    assert check(noted)
    assert len(asked) > 4
    assert not check(lambda *args: asked.get(by_key(args), next(reversed(asked.values()))))


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
