"""Exercises and their solutions: notebooks/solutions/NN_topic.py holds both, and the notebook's cells are made from it.

A solutions file consists of parts, one for each exercise cell of the notebook:

    # %% exercise-1 needs: setup ring
    def slot_of(step, stages):
        #: return None  # Your code.
        # BEGIN SOLUTION
        return step % stages
        # END SOLUTION


    ex07.check_slot(slot_of)

`exercise-1` is the cell's id, and `needs` names the notebook's cells that must have run before it. The learner's
skeleton has the lines after `#:` and none of those between BEGIN and END; the solution is the reverse.

A cell that starts empty has `#: # Write slot_of(step, stages) here.` above a solution that begins with its `def`, and
ends in `ex07.check_slot_of(globals().get("slot_of"))`. While nothing is written, the verdict quotes the checker's
docstring.

    python tools/skeletons.py [NN ...]    writes the skeletons into the notebooks
"""

import dataclasses
import re
import sys
from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
SOLUTIONS = NOTEBOOKS / "solutions"


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One exercise cell: its `id`, the cells that it `needs`, and its code before and after it is solved."""

    id: str
    needs: tuple[str, ...]
    skeleton: str
    solution: str


def exercises(path: Path) -> list[Exercise]:
    """The exercises of one file of solutions.

    Raises:
      ValueError: a marker is unknown or not closed.
    """
    _, *parts = re.split(r"(?m)^# %% *(.*)\n", path.read_text())
    found = []
    for title, code in zip(parts[::2], parts[1::2], strict=True):
        match = re.fullmatch(r"([\w-]+)(?: needs: ([\w -]+))?", title.strip())
        if not match:
            raise ValueError(f"{path.name}: '# %% {title}' must be '# %% CELL-ID' or '# %% CELL-ID needs: OTHER-IDS'")
        found.append(Exercise(match[1], tuple((match[2] or "").split()), *_both(code, f"{path.name}, {match[1]}")))
    return found


def _both(code: str, where: str) -> tuple[str, str]:
    """(skeleton, solution)."""
    skeleton, solution, is_inside = [], [], False
    for line in code.strip("\n").splitlines():
        if (marker := line.strip()) in ("# BEGIN SOLUTION", "# END SOLUTION"):
            if is_inside == (marker == "# BEGIN SOLUTION"):
                raise ValueError(f"{where}: '{marker}' twice; BEGIN and END take turns")
            is_inside = not is_inside
        elif match := re.fullmatch(r"( *)#: ?(.*)", line):
            skeleton.append((match[1] + match[2]).rstrip())
        else:
            solution.append(line)
            skeleton += [] if is_inside else [line]
    if is_inside:
        raise ValueError(f"{where}: '# BEGIN SOLUTION' without '# END SOLUTION'")
    return "\n".join(skeleton), "\n".join(solution)


def main() -> None:
    """Write the skeletons into the notebooks named by their numbers, or into all."""
    for path in sorted(SOLUTIONS.glob("*.py")):
        if sys.argv[1:] and not path.stem.startswith(tuple(sys.argv[1:])):
            continue
        notebook = nbformat.read(NOTEBOOKS / f"{path.stem}.ipynb", as_version=4)
        cells = {cell.id: cell for cell in notebook.cells}
        for exercise in exercises(path):
            cells[exercise.id].source = exercise.skeleton
        nbformat.write(notebook, NOTEBOOKS / f"{path.stem}.ipynb")


if __name__ == "__main__":
    main()
