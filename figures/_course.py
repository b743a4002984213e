"""The chapters and the routes through them, read from notebooks/routes.toml."""

import dataclasses
import functools
import pathlib
import tomllib

FILE = pathlib.Path(__file__).resolve().parent.parent / "notebooks" / "routes.toml"


@dataclasses.dataclass(frozen=True)
class Chapter:
    """One chapter; `needs` has the numbers ("09b") of the chapters that it builds on."""

    stem: str
    title: str
    bound: str
    minutes: int
    needs: tuple[str, ...]

    @property
    def number(self) -> str:
        return self.stem.split("_")[0]


@dataclasses.dataclass(frozen=True)
class Route:
    """The chapters that lead to one or more goals, in the order of the course; `you` says what its reader will do."""

    name: str
    you: str
    chapters: tuple[Chapter, ...]

    @property
    def minutes(self) -> int:
        return sum(chapter.minutes for chapter in self.chapters)


@functools.cache
def chapters() -> dict[str, Chapter]:
    """Every chapter by its number, in the order of the course."""
    found = [Chapter(stem, **_tuples(entry)) for stem, entry in _read()["chapters"].items()]
    return {chapter.number: chapter for chapter in found}


def routes() -> list[Route]:
    """The routes, each with everything that its goals need."""
    found = []
    for entry in _read()["routes"]:
        needed = set().union(*map(with_needs, entry["goals"]))
        there = tuple(chapter for number, chapter in chapters().items() if number in needed)
        found.append(Route(entry["name"], entry["you"], there))
    return found


def parts(numbers: list[str]) -> list[tuple[str, str, list[str]]]:
    """(name, what its reader will do, its chapters' numbers) of each part, of these chapters in order."""
    entries = _read()["parts"]
    starts = [numbers.index(entry["first"]) for entry in entries] + [len(numbers)]
    return [
        (entry["name"], entry["you"], numbers[start:end])
        for entry, start, end in zip(entries, starts, starts[1:], strict=False)
    ]


def with_needs(number: str) -> set[str]:
    """The chapter, what it needs, what that needs, and so on."""
    return {number}.union(*map(with_needs, chapters()[number].needs))


def direct_needs(number: str) -> list[str]:
    """The needs of a chapter that no other of its needs has already: the arrows of the map."""
    needs = chapters()[number].needs
    return [each for each in needs if not any(each in with_needs(other) for other in needs if other != each)]


def depth(number: str) -> int:
    """How many chapters come one after the other before this one."""
    return max((1 + depth(each) for each in chapters()[number].needs), default=0)


def table(folder: str = "") -> str:
    """The routes as a table in Markdown; `folder` leads from the page to the notebooks."""
    lines = ["| route | you will | chapters | time |", "|---|---|---|---|"]
    for route in routes():
        lines.append(f"| **{route.name}** | {route.you} | {_links(route, folder)} | {time(route.minutes)} |")
    whole = sum(chapter.minutes for chapter in chapters().values())
    lines.append(f"| **The whole course** | climb every rung | all {len(chapters())} | {time(whole)} |")
    return "\n".join(lines) + "\n"


def time(minutes: int) -> str:
    """ "45 min", "7 h 30 min"."""
    hours, rest = divmod(minutes, 60)
    return " ".join([f"{hours} h"] * (hours > 0) + [f"{rest} min"] * (rest > 0))


def _links(route: Route, folder: str) -> str:
    """ "0 to 8, 10", each number linked: three or more that follow one another are named by the first and the last."""
    order, runs = [*chapters().values()], []
    for chapter in route.chapters:
        if runs and order.index(chapter) == order.index(runs[-1][-1]) + 1:
            runs[-1].append(chapter)
        else:
            runs.append([chapter])
    link = lambda chapter: f"[{chapter.number.removeprefix('0')}]({folder}{chapter.stem}.ipynb)"
    return ", ".join(
        f"{link(run[0])} to {link(run[-1])}" if len(run) > 2 else ", ".join(map(link, run)) for run in runs
    )


def _tuples(entry: dict) -> dict:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


@functools.cache
def _read() -> dict:
    return tomllib.loads(FILE.read_text())
