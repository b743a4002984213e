"""The words: one for each thing, plain sentences, and a glossary that the chapters link to."""

import ast
import io
import pathlib
import re
import tokenize

import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
GLOSSARY = (ROOT / "notebooks" / "glossary.md").read_text()
# A pattern, and the words to use instead.
FORBIDDEN = {
    r"heads? of keys": "KV heads",
    r"\b(under way|on (its|their) way(?! out))\b": "in flight",
    r"\bgo(es)? along together\b": "are scheduled together, meet at a barrier",
    r"\bof ten,? one has\b": "p90",
    r"\b[Cc]an not\b": "cannot",
    r"\bso long it takes\b": "that long",
    r"\b(memory|HBM)'s own\b": "HBM itself",
    r"\b(stands?|comes?|lies?|far|close|short(ly)?|soon|just) behind\b": "after",
    r"\b(warpgroups?|warps?|threads?|blocks?|kernels?|slots?) who\b": "that",
    r"(^|[.:?!]\s+)Who (?![^.]*\?)": "a warpgroup that, whichever",
    r"(^|[.!?]\s+)Of (?!course\b)": "the noun that the sentence is about",
    r"(^|[.!?]\s+)What (?![^.!]*\?)": "the noun that the sentence is about",
    r"(^|[.!?]\s+)(To its|Likewise, of)\b": "the noun that the sentence is about",
}


def faults(text: str) -> list[str]:
    """The faults of a paragraph, code spans and formulas left out."""
    text = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|https?://\S+", "x", text, flags=re.S)
    paragraphs = [
        " ".join(part.split()).lstrip("#>*-|0123456789. ") for part in re.split(r"\n\s*\n|\n(?=[#>|*-])", text)
    ]
    return [
        f"'{match[0].strip()}' in '{paragraph[max(match.start() - 30, 0) : match.end() + 40]}': {better}"
        for paragraph in paragraphs
        for pattern, better in FORBIDDEN.items()
        for match in re.finditer(pattern, paragraph)
    ]


def comments_and_docstrings(source: str):
    """The blocks of comments and the docstrings of a module."""
    block, last = [], None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and (token.start[0] != last + 1):
                yield "\n".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    if block:
        yield "\n".join(block)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_words_of_a_chapter(path):
    cells = nbformat.read(path, as_version=4).cells
    prose = [re.sub(r"(?m)^#+ .*$", "", cell.source) for cell in cells if cell.cell_type == "markdown"]  # No headings.
    found = [fault for text in prose for fault in faults(text)]
    for cell in cells:
        if cell.cell_type == "code":
            source = re.sub(r"(?m)^(\s*)[%!].*", r"\1pass", cell.source)
            found += [fault for text in comments_and_docstrings(source) for fault in faults(text)]
    number = path.stem.split("_")[0].lstrip("0") or "0"
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = re.findall(r"glossary\.md#([\w-]+)", text)
    introduced = [anchor(name) for name, chapter in TERMS.items() if chapter == number]
    found += [f"'{name}' is introduced here: link it to glossary.md#{name}" for name in introduced if name not in links]
    found += [f"glossary.md#{name} does not exist" for name in links if name not in map(anchor, TERMS)]
    assert not found, "\n".join(found)


def anchor(name: str) -> str:
    return re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-")


TERMS = dict(re.findall(r"^### (.+)\n+(?:.+\n)*?.*\[(\w+)\]$", GLOSSARY, re.M))  # Term: chapter that introduces it.


def test_every_term_of_the_glossary_names_its_chapter():
    assert list(TERMS) == re.findall(r"^### (.+)$", GLOSSARY, re.M)
    numbers = {path.stem.split("_")[0].lstrip("0") or "0" for path in CHAPTERS}
    assert set(TERMS.values()) <= numbers


FOLDERS = (
    "cookbook",
    "lab",
    "serving",
    "bench",
    "tools",
    "site",
    "figures",
    "fuzz",
    "tests",
    "notebooks/exercises",
    "notebooks/solutions",
)
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: str(path.relative_to(ROOT)))
def test_words_of_a_file(path):
    found = [fault for text in comments_and_docstrings(path.read_text()) for fault in faults(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text, is_wrong",
    [
        ("Of rows that are stored nothing is kept.", True),
        ("What it does not save are tails.", True),
        ("What does it save?", False),
        ("Of course it does.", False),
        ("The copy is on its way.", True),
        ("`Of` is code.", False),
        ("A warpgroup who waits.", True),
        ("It is fast. What is left is the tail.", True),
    ],
)
def test_faults_are_found(text, is_wrong):
    assert bool(faults(text)) == is_wrong
