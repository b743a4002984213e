"""Sphinx's settings. The sources are assembled by build.py into build/site-src; nothing is fetched, then or later."""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "site")]

from stamp import stamp_of  # noqa: E402

project = "Pallas kernel cookbook"
html_title = project
author = "The authors of the cookbook"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = [
    "cookbook",
    "bench",
    "figures",
    "results",
    "serving",
    "tests",
    "chapters/exercises",
    "chapters/solutions",
]  # Linked to, not read as pages.

# Notebooks: shown as they were recorded, never run here.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # Sentences that `lab.say` shows have tables and formulas, too.
nb_code_prompt_show, nb_code_prompt_hide = "Show {type}", "Hide {type}"  # Content, source or outputs of a folded cell.
nb_mime_priority_overrides = [("html", "text/latex", None)]
myst_enable_extensions = ["attrs_block", "attrs_inline", "dollarmath"]
myst_heading_anchors = 3

# API reference.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
viewcode_line_numbers = True
default_role = "code"

# Mathematics: one vendored file, its menu off because the menu could load more.
mathjax_path = "vendor/mathjax/tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}}

html_theme = "sphinx_book_theme"
html_static_path = [str(ROOT / "site" / "_static")]
templates_path = [str(ROOT / "site" / "_templates")]
html_css_files = ["cookbook.css"]
html_favicon = str(ROOT / "site" / "_static" / "logo.svg")
html_show_sphinx = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": project, "image_light": "_static/logo.svg", "image_dark": "_static/logo.svg"},
    "navbar_persistent": [],
    "use_download_button": True,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "toc_title": "On this page",
    "search_bar_text": "Search the course",
    "footer_content_items": ["stamp.html"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "github-dark-high-contrast",
}


def setup(app):
    app.connect("html-page-context", _add_stamp)
    app.connect("autodoc-process-docstring", _markdown_to_rst, priority=400)  # Before napoleon.


def _add_stamp(app, pagename, templatename, context, doctree):
    """Every page says on what it was verified; a chapter also at its head, with a link to its notebook."""
    notebook = ROOT / "notebooks" / f"{Path(pagename).name}.ipynb"
    is_chapter = pagename.startswith("chapters/") and notebook.exists()
    context["stamp"] = stamp_of(notebook if is_chapter else None)
    context["notebook"] = notebook.name if is_chapter else None
    context["repository"] = os.environ.get("GITHUB_REPOSITORY")  # The workflow that publishes the site knows it.
    if is_chapter:
        head = app.builder.templates.render("chapter_head.html", context)
        context["body"] = context["body"].replace("</h1>", f"</h1>{head}", 1)


def _markdown_to_rst(app, what, name, obj, options, lines):
    """Our docstrings are plain text with `code` in single backticks: nothing else in them is markup."""
    lines[:] = [re.sub(r"`([^`]+)`|[*|]|(?<=\w)_(?!\w)", _escaped, line) for line in lines]


def _escaped(match: re.Match) -> str:
    if match[1] is None:
        return "\\" + match[0]
    touches = [text[-1:].isalnum() for text in (match.string[: match.start()], match.string[match.end() :][:1])]
    before, after = ("\\ " if touch else "" for touch in touches)
    return f"{before}``{match[1]}``{after}"
