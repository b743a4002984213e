"""Builds the web site: gathers its sources in build/site-src, then runs Sphinx on them into build/site.

Warnings are errors. Nothing is fetched, and no notebook is run: their recorded outputs are shown.
"""

import gc
import re
import shutil
import sys
from pathlib import Path

import errors
import gallery
import measured
import nbformat
import samples
import timelines
from sphinx.cmd.build import main as sphinx_build

from figures import _course

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))

import skeletons  # noqa: E402

SOURCE, OUTPUT = ROOT / "build" / "site-src", ROOT / "build" / "site"
LINKED = ["cookbook", "bench", "figures", "results", "serving", "tests"]  # Folders that notebooks may link to.


def main() -> int:
    gc.set_threshold(100_000)  # Collecting after 700 objects, the default, takes a quarter of Sphinx's time.
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", SOURCE / "chapters", ignore=shutil.ignore_patterns(".*"))
    for name in LINKED:
        (SOURCE / name).symlink_to(ROOT / name)
    chapters = [Chapter(path) for path in sorted((SOURCE / "chapters").glob("*.ipynb"))]
    for path in (SOURCE / "chapters").glob("*.ipynb"):
        _fold(path)
    _write("index.md", _index(chapters))
    _write("gallery.md", gallery.gallery_page(chapters))
    _write("results.md", measured.results_page(samples.samples_section(SOURCE / "samples.svg")))
    _write("errors.md", errors.errors_page())
    _write("api.md", (ROOT / "site" / "api.md").read_text())
    shutil.rmtree(OUTPUT, ignore_errors=True)
    code = sphinx_build(["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "site"), str(SOURCE), str(OUTPUT)])
    timelines.write(OUTPUT / "traces")
    for path in (ROOT / "notebooks").glob("*.ipynb"):  # To be downloaded as they are, without solutions.
        shutil.copy(path, OUTPUT / "_sources" / "chapters")
    if not code:
        print(f"The site is in {OUTPUT.relative_to(ROOT)}. To look at it: python3 -m http.server -d build/site")
    return code


class Chapter:
    """One notebook of the course: `stem` (05_wgmma), `number`, `title`, first sentences (`summary`), and its `code`.

    The number of an appendix is a letter.
    """

    def __init__(self, path: Path):
        cells = nbformat.read(path, as_version=4).cells
        text = next((cell.source for cell in cells if cell.cell_type == "markdown"), "")
        self.stem = path.stem
        self.number = path.stem.split("_")[0].removeprefix("0")
        start = rf"^#\s*((Appendix )?{self.number}[.:]?\s+)?"
        self.title = re.sub(start, "", text.splitlines()[0]).split(":")[0] if text else path.stem
        paragraphs = [p for p in re.split(r"\n\s*\n", text) if not re.match(r"\s*[#>|!*<-]", p)]
        prose = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join("".join(paragraphs[:1]).split()))  # Without links.
        self.summary = re.match(r".{80,}?[.!?](?=\s|$)|.*", prose)[0]
        self.code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def _fold(path: Path) -> None:
    """Fold what a chapter's reader should not see at once: results after a guess, and solutions of exercises."""
    notebook = nbformat.read(path, as_version=4)
    solutions = skeletons.SOLUTIONS / f"{path.stem}.py"
    solved = (
        {exercise.id: exercise.solution for exercise in skeletons.exercises(solutions)} if solutions.exists() else {}
    )
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "code" and re.search(r"\bmy_guess\b(?! *=)", cell.source):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-output"]
        if cell.id in solved:
            text = f"<details><summary>Solution</summary>\n\n```python\n{solved[cell.id]}\n```\n\n</details>"
            cells.append(nbformat.v4.new_markdown_cell(text, id=f"{cell.id}-solution"))
    if links := timelines.of_chapter(path.stem):
        cells.append(nbformat.v4.new_markdown_cell(links, id="timelines"))
    notebook.cells = cells
    nbformat.write(notebook, path)


def _index(chapters: list[Chapter]) -> str:
    by_number = {chapter.stem.split("_")[0]: chapter for chapter in chapters}
    cards, toctrees = [], ""
    for name, you, numbers in _course.parts([*by_number]):
        part = [by_number[number] for number in numbers]
        cards += [f"### {name}", "", f"You will {you}.", "", "{.cards .chapters}", *map(_card, part)]
        toctrees += _toctree(name, [f"chapters/{chapter.stem}" for chapter in part])
    ladder = ROOT / "figures" / "ladder.svg"
    figure = (
        f"![Rungs of the course against the vendor's library]({ladder.relative_to(ROOT)})" if ladder.exists() else ""
    )
    toctrees += _toctree("The library", ["gallery", "results", "errors", "api", "chapters/glossary"])
    page = (ROOT / "site" / "index.md").read_text()
    for name, text in (("ladder", figure), ("routes", _course.table("chapters/")), ("chapters", "\n".join(cards))):
        page = page.replace(f"<!-- {name} -->", text)
    return page + toctrees


def _card(chapter: Chapter) -> str:
    link = f"[**{chapter.number}** {chapter.title}](chapters/{chapter.stem}.ipynb)"
    return f"- {link}\n\n  {chapter.summary}\n"


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def _write(name: str, text: str) -> None:
    (SOURCE / name).write_text(text)


if __name__ == "__main__":
    sys.exit(main())
