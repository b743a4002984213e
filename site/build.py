"""Builds the web site: gathers its sources in build/site-src, then runs Sphinx on them into build/site.

Warnings are errors. Nothing is fetched, and no notebook is run: their recorded outputs are shown.
"""

import re
import shutil
import sys
from pathlib import Path

import errors
import gallery
import measured
import nbformat
from sphinx.cmd.build import main as sphinx_build

ROOT = Path(__file__).resolve().parent.parent
SOURCE, OUTPUT = ROOT / "build" / "site-src", ROOT / "build" / "site"
LINKED = ["cookbook", "bench", "figures", "results", "tests"]  # Folders that notebooks may link to.


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", SOURCE / "chapters", ignore=shutil.ignore_patterns(".*"))
    for name in LINKED:
        (SOURCE / name).symlink_to(ROOT / name)
    chapters = [Chapter(path) for path in sorted((SOURCE / "chapters").glob("*.ipynb"))]
    _write("index.md", _index(chapters))
    _write("gallery.md", gallery.gallery_page(chapters))
    _write("results.md", measured.results_page())
    _write("errors.md", errors.errors_page())
    _write("api.md", (ROOT / "site" / "api.md").read_text())
    shutil.rmtree(OUTPUT, ignore_errors=True)
    code = sphinx_build(["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "site"), str(SOURCE), str(OUTPUT)])
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
        self.summary = re.match(r".{80,}?[.!?](?=\s|$)|.*", " ".join("".join(paragraphs[:1]).split()))[0]
        self.code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def _index(chapters: list[Chapter]) -> str:
    cards = ["{.cards .chapters}"]
    for chapter in chapters:
        cards += [
            f"- [**{chapter.number}** {chapter.title}](chapters/{chapter.stem}.ipynb)",
            "",
            f"  {chapter.summary}",
            "",
        ]
    ladder = ROOT / "figures" / "ladder.svg"
    figure = (
        f"![Rungs of the course against the vendor's library]({ladder.relative_to(ROOT)})" if ladder.exists() else ""
    )
    toctrees = _toctree("The course", [f"chapters/{chapter.stem}" for chapter in chapters])
    toctrees += _toctree("The library", ["gallery", "results", "errors", "api"])
    page = (ROOT / "site" / "index.md").read_text()
    return page.replace("<!-- ladder -->", figure).replace("<!-- chapters -->", "\n".join(cards)) + toctrees


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def _write(name: str, text: str) -> None:
    (SOURCE / name).write_text(text)


if __name__ == "__main__":
    sys.exit(main())
