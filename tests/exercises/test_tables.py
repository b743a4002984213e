"""A table of what a checker asked before is no answer: some of its cases are new each time."""

import copy

import pytest
import test_solutions as course

CELLS = {
    "00_start_here": ("exercise-4-cell",),
    "01_elementwise": ("exercise-4-cell", "exercise-1-cell"),
    "02_memory": ("exercise-num-stages", "exercise-conflict-degree"),
    "08_persistent_matmul": ("exercise-1", "exercise-multicast"),
    "09_low_precision": ("exercise-4",),
    "09b_int8_weights": ("exercise-1",),
    "13_paged_decode": ("exercise-2",),
    "13b_equal_parts": ("exercise-part",),
    "14_ragged_prefill": ("exercise-3", "exercise-1"),
    "14b_ragged_kernel": ("exercise-spoilt", "exercise-4"),
    "15b_engine": ("exercise-2", "exercise-3"),
    "16_grouped_matmul": ("exercise-1", "exercise-2"),
    "16b_experts": ("exercise-3",),
    "18_nvlink": ("exercise-1", "exercise-2"),
    "18b_overlap": ("exercise-1", "exercise-3"),
    "19_blackwell": ("exercise-starts",),
    "19b_pairs": ("exercise-halves", "exercise-scale", "exercise-columns"),
    "21_lifting": ("exercise-1-cell", "exercise-4-cell"),
    "22_decode_step": ("exercise-3", "exercise-4"),
}


@pytest.mark.parametrize("stem, cell", [(stem, cell) for stem, cells in CELLS.items() for cell in cells])
def test_a_table_is_no_answer(stem, cell):
    asked = {}
    by_key = lambda args: repr([getattr(arg, "tolist", lambda arg=arg: arg)() for arg in args])

    def noting(answer):
        def noted(*args):
            asked[by_key(args)] = answer(*args)
            return copy.deepcopy(asked[by_key(args)])

        return noted

    def from_table(_):
        return lambda *args: asked.get(by_key(args), next(reversed(asked.values())))

    assert verdict(stem, cell, noting)
    assert len(asked) > 4
    assert not verdict(stem, cell, from_table)


def verdict(stem: str, cell: str, change):
    """Verdict on `change(the solution's function)`."""
    exercise = next(e for e in course.course.exercises(course.course.SOLUTIONS / f"{stem}.py") if e.id == cell)
    names = {"__name__": "__main__"}
    for needed in exercise.needs:
        exec(course.cells(stem)[needed].source, names)
    code, _, call = exercise.solution.rstrip().rpartition("\n")
    exec(code, names)
    check, answer = call.removesuffix(")").split("(")
    return eval(check, names)(change(names[answer]))
