"""`explain` finds an error in the error index, which says what it means and what to try; `raises` expects one.

The index is error_index.toml. notebooks/B_errors.ipynb provokes each of its messages and fixes it.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
import sys
import textwrap
import tomllib
import traceback

import jax

from .checking import CheckError

ISSUES = "https://github.com/jax-ml/jax/issues"


@dataclasses.dataclass(frozen=True)
class Row:
    """A message of Pallas, Mosaic GPU or the interpreter; or a symptom, where nothing is said."""

    id: str
    theme: str
    means: str
    fix: str
    read: str  # "chapter#section", or a chapter.
    says: str = ""  # How the message begins on JAX 0.12; "" where that JAX says nothing. "…" stands for any text.
    before: str | None = None  # How it began on JAX 0.11, where that differs.
    symptom: str = ""
    elsewhere: str = ""  # Why a machine without a GPU cannot show it.
    number: int | None = None  # In the list that the index grew from.

    @property
    def starts(self) -> tuple[str, ...]:
        """Each way in which the message begins on some JAX."""
        return tuple(start for start in (self.says, self.before) if start)

    @property
    def title(self) -> str:
        """The message's start, or the symptom."""
        return (*self.starts, self.symptom)[0]

    @property
    def start_here(self) -> str:
        """How the message begins on the JAX that runs; "" if it says nothing."""
        return self.says if self.before is None or jax.__version_info__ >= (0, 12) else self.before

    @property
    def versions(self) -> str:
        """How JAX's versions differ, in a sentence; "" if they do not."""
        if self.before is None:
            return ""
        return f"JAX 0.11 says {as_code(self.before)}" + ("." if self.says else "; JAX 0.12 accepts the code.")

    @property
    def chapter(self) -> str:
        """The notebook where to read about it."""
        return self.read.partition("#")[0]

    @property
    def section(self) -> str:
        """The heading there; "" for the whole notebook."""
        return self.read.partition("#")[2]

    def markdown(self) -> str:
        """The text of its section in appendix B."""
        heading = self.title if self.symptom else as_code(self.title)
        where = f"[{self.chapter}]({self.chapter}.ipynb)" + (f", *{self.section}*" if self.section else "")
        anchor = f'<a id="{self.id}"></a>'
        means = " ".join(filter(None, (f"**{self.id}**: {self.means}", self.versions)))
        return "\n\n".join((anchor, f"### {heading}", means, f"**Try:** {self.fix}", f"**Read:** {where}"))


def as_code(text: str) -> str:
    """`text` as code in Markdown, if it has backticks itself, too."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _load() -> dict[str, Row]:
    with open(pathlib.Path(__file__).with_name("error_index.toml"), "rb") as file:
        index = tomllib.load(file)
    tidy = lambda value: " ".join(value.split()) if isinstance(value, str) else value
    return {
        row_id: Row(row_id, theme, **{name: tidy(value) for name, value in fields.items()})
        for theme, rows in index.items()
        for row_id, fields in rows.items()
    }


ROWS = _load()


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Answer of `explain`: three lines on what the error means, what to try, and where to read about it."""

    row: Row | None  # None: the index does not know the error.
    message: str  # The line of the error that the row is about; of an unknown error the first.

    def _lines(self, notebook) -> tuple[str, ...]:
        """The lines below the message; `notebook` makes a link of a notebook's name."""
        if self.row:
            row, section = self.row, f', "{self.row.section}"' if self.row.section else ""
            return (
                f"It means: {row.means}",
                f"Try: {row.fix}",
                f"Read: {notebook(row.chapter)}{section}; {notebook('B_errors')} has {row.id!r}, and the fix.",
            )
        if not self.message:
            return ("No error has been raised.", "Try: `lab.explain(error)`, or `lab.explain()` after a failing cell.")
        return (
            f"It means: unknown. The error index has {len(ROWS)} rows, and none begins like this.",
            "Try: make the kernel smaller for as long as the error stays: one block, one warpgroup, one step "
            f"({notebook('20_debugging')}).",
            f"Read: {ISSUES}, where somebody may have met it. If nobody has, report the smallest kernel there; a row "
            "in lab/error_index.toml helps the next reader.",
        )

    def __repr__(self) -> str:
        lines = self._lines(lambda name: f"notebooks/{name}.ipynb")
        fill = functools.partial(textwrap.fill, width=118, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(fill(line) for line in (self.message, *lines) if line)

    def _repr_markdown_(self) -> str:
        message = [as_code(self.message)] if self.message else []
        return "\n\n".join(message + [*self._lines(lambda name: f"[{name}]({name}.ipynb)")])


def explain(error: BaseException | str | None = None) -> Explanation:
    """Says what an error of a kernel means and what to try. Raises nothing itself.

    Args:
      error: an exception, whose causes are looked at too; or the text of one. By default the exception that is being
        handled, or else the last that nobody handled, such as that of the notebook's cell before.
    """
    if error is None:
        error = sys.exception() or getattr(sys, "last_value", None)
    texts = list(_texts(error))
    for text in texts:
        if found := _find(text):
            return Explanation(*found)
    # An interpreted kernel's message stands below the stack of its callback.
    last = re.split(r"\n(?=\w+(?:Error|Exception): )", texts[0].strip())[-1] if texts else ""
    return Explanation(None, last.partition("\n")[0])


@contextlib.contextmanager
def raises(row_id: str):
    """Expects the error of a row of the index inside, and prints the line that begins as the row says.

    Where the JAX that runs says nothing, nothing may be raised.

    Raises:
      ValueError: the index has no such row.
      CheckError: no error was raised, another one, or one whose message has changed.
    """
    if row_id not in ROWS:
        raise ValueError(f"row_id = {row_id!r} is no row of the error index; lab.explaining.ROWS has them all.")
    row = ROWS[row_id]
    try:
        yield
    except Exception as error:
        found = explain(error)
        if found.row is not row or not _line(row.start_here, found.message):
            wanted = f"an error that begins with {row.start_here!r}" if row.start_here else "no error"
            raise CheckError(f"{row_id}: JAX {jax.__version__} should raise {wanted}; it raised:\n{found!r}") from error
        name = type(error).__name__
        line = found.message if found.message.startswith(name) else f"{name}: {found.message}"
        print(textwrap.shorten(re.sub(r"/\S*/site-packages/", "", line), 120, placeholder=" ..."))
    else:
        if row.start_here:
            raise CheckError(f"{row_id}: no error was raised; JAX {jax.__version__} should say {row.start_here!r}.")
        print(f"JAX {jax.__version__} accepts this.")


def _texts(error):
    """Name and text of an error and of each of its causes, or the place where one without a text was raised."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if not isinstance(error, BaseException):
            yield error if isinstance(error, str) else type(error).__name__
            return
        # JAX chains the stack of the user's code as a cause of its own.
        if type(error).__name__ != "JaxStackTraceBeforeTransformation":
            yield f"{type(error).__name__}{_message(error)}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _message(error: BaseException) -> str:
    with contextlib.suppress(Exception):  # Its __str__ may raise.
        if text := str(error):
            return f": {text}"
    frames = traceback.extract_tb(error.__traceback__)
    return f" (in {frames[-1].name})" if frames else ""


def _find(text: str) -> tuple[Row, str] | None:
    """The row with the longest start among those whose message is in `text`, and the line that begins so."""
    starts = sorted(((start, row) for row in ROWS.values() for start in row.starts), key=lambda item: -len(item[0]))
    return next(((row, line) for start, row in starts if (line := _line(start, text))), None)


def _line(start: str, text: str) -> str:
    """The line of `text` that begins with `start`, from there on; "" if none does.

    A message begins a line, or follows the name of an error or of an operation.
    """
    pattern = ".*?".join(map(re.escape, start.split("…")))
    found = start and re.search(rf"(?m)(?:^|: |\bop )({pattern}.*)$", text)
    return found[1].strip() if found else ""
