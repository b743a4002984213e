"""Text that the notebooks print: tables of figures, guesses, and the lines that a rung changes."""

import dataclasses
import difflib
import functools
import html
import inspect
import math
import re

from . import results


def table(header, *rows, measured=()) -> None:
    """Prints aligned columns, then where the figures come from.

    Args:
      header, rows: cells of any kind, as many in each; a NaN, which was never measured, is a dash.
      measured: the `Measurement`s of the table. If the code of one has changed since, that is said too.
    """
    text = [["-" if "nan" in str(cell) else str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    for row in text:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if measured:
        stale = " (STALE: the code has changed since)" if any(figure.stale for figure in _known(measured)) else ""
        print(f"[{sources(measured) or 'no recorded figures, and no GPU to measure them'}]{stale}")


def sources(measured) -> str:
    """Where the figures of a table or a picture come from; empty if none of them is known. For each GPU the first and
    the last day: "measured on NVIDIA H100; recorded on NVIDIA H200, 2026-11-20 to 2026-11-22"."""
    days: dict[str, set[str]] = {}
    for figure in _known(measured):
        gpus = results.gpus(figure.provenance)
        how = f"recorded on {gpus}, " if figure.recorded else f"measured on {gpus}"
        days.setdefault(how, set()).add(figure.provenance["date"] if figure.recorded else "")
    return "; ".join(how + " to ".join(sorted({min(when), max(when)})) for how, when in sorted(days.items()))


def _known(measured) -> list:
    return [figure for figure in measured if not math.isnan(figure.median_ms)]


def guess(mine: float | None, found: float, unit: str) -> None:
    """Prints a reader's guess beside the figure that it was about.

    Args:
      mine: the guess, such as the notebook's `my_guess`; None while there is none, and then nothing is printed.
      found: the bound, prediction or measurement; NaN where it is not known.
      unit: of both figures.

    Raises:
      ValueError: `mine` is neither None nor a number from 0 on.
    """
    if mine is None:
        return
    if not isinstance(mine, int | float) or not mine >= 0:
        raise ValueError(f"my_guess = {mine!r}; must be a number of {unit} that is not negative, or None")
    side = "high" if mine > found else "low"
    if math.isnan(found):
        verdict = "there is no figure yet to compare it with"
    elif abs(mine - found) <= 0.1 * found:
        verdict = f"within 10% of {found:.3g} {unit}"
    elif mine and found:
        verdict = f"{max(mine / found, found / mine):.2g} times too {side} for {found:.3g} {unit}"
    else:
        verdict = f"too {side} for {found:.3g} {unit}"
    print(f"your guess: {mine:.3g} {unit}, {verdict}")


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Markdown, which a notebook shows as text."""

    text: str

    def _repr_markdown_(self) -> str:
        return self.text


def say(text: str) -> Paragraph:
    """Sentences that quote figures, for the end of a cell: `lab.say(f"It reaches {run.tflops:.0f} TFLOP/s.")`.

    Where a figure was never measured (a NaN, or None) the paragraph would say nothing, and a note takes its place: no
    sentence may use these words.
    """
    if re.search(r"\b(nan|None)\b", text):
        return Paragraph("*Not recorded yet: this paragraph quotes figures that a GPU has to take first.*")
    return Paragraph(text)


@dataclasses.dataclass(frozen=True, repr=False)
class Diff:
    """The difference of two functions' sources, as text and, in a notebook, in colour."""

    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        colours = {"+": "#E3F3E6", "-": "#FBE4E4", ".": "#EEF1F6"}
        grounds = (colours.get(line[:1], "transparent") for line in self.lines)
        spans = (
            f'<span style="display:block;background:{ground}">{html.escape(line) or " "}</span>'
            for ground, line in zip(grounds, self.lines, strict=True)
        )
        return f'<pre style="line-height:1.35;color:#222;background:#FCFCFA">{"".join(spans)}</pre>'


def show_diff(before, after, context: int = 2) -> Diff:
    """The lines by which the function `after` differs from `before`, with `context` lines around each change.

    Lines that are only indented differently count as the same.

    Args:
      before, after: functions, `functools.partial`s of them, or texts.
    """

    def source(fn) -> list[str]:
        while isinstance(fn, functools.partial):
            fn = fn.func
        return (fn if isinstance(fn, str) else inspect.getsource(inspect.unwrap(fn))).splitlines()

    old, new = source(before), source(after)
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in old], [line.strip() for line in new], False)
    lines: list[str] = []
    for group in matcher.get_grouped_opcodes(context):
        lines += ["..."] if lines else []
        for tag, i, i_end, j, j_end in group:
            if tag == "equal":
                lines += [f"  {line}" for line in new[j:j_end]]
            else:
                lines += [f"- {line}" for line in old[i:i_end]] + [f"+ {line}" for line in new[j:j_end]]
    return Diff(tuple(lines))
