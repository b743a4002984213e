"""A reader's visit to the built site, and one notebook run by hand in JupyterLab, in a real browser."""

import functools
import http.server
import importlib.util
import json
import operator
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import urllib.request

import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _missing() -> str | None:
    """Programs and modules that these tests need and this machine lacks, in words; None if it has all."""
    modules = [name for name in ("websocket", "sphinx", "jupyterlab") if importlib.util.find_spec(name) is None]
    if modules:
        return f"not installed: {', '.join(modules)}"
    import chromium

    return None if chromium.find() else f"none of {', '.join(chromium.NAMES)} is on PATH"


# CI must not pass without a browser; a learner's machine or a GPU host may do so.
pytestmark = pytest.mark.skipif(bool(_missing()) and not os.environ.get("CI"), reason=_missing() or "")


@pytest.fixture(scope="module")
def site():
    """Address of the site, freshly built and served from this machine."""
    built = subprocess.run([sys.executable, "site/build.py"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request, client_address):
            """A page that is left before it was sent whole is no error."""

    handler = functools.partial(Quiet, directory=ROOT / "build" / "site")
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def new_page():
    import chromium

    with chromium.browser() as new_page:
        yield new_page


@pytest.fixture
def page(new_page, site):
    """A page that must see no console error and send no request elsewhere."""
    page = new_page()
    yield page
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith((site, "data:", "blob:"))] == []


def test_every_page_is_whole_at_desktop_and_phone_width(page, site):
    """Opens each page in both widths: nothing missing, formulas set, no sideways scrolling, the stamp there."""
    names = sorted(str(path.relative_to(ROOT / "build/site")) for path in (ROOT / "build/site").rglob("*.html"))
    names = [name for name in names if not name.startswith(("_static", "_modules"))]
    assert len(names) >= len(NOTEBOOKS) + 5
    for name in names:
        page.open(site + name)
        page.wait("!document.querySelector('.math:not(:has(mjx-container))')", f"formulas of {name}")
        assert page.evaluate("document.querySelector('.stamp')?.innerText.includes('erified on')"), name
        assert page.evaluate("[...document.images].every(i => i.loading == 'lazy' || i.naturalWidth > 0)"), name
        page.resize(390, 844)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{name} scrolls sideways on a phone"
        page.resize(1300, 1000)


def test_landing_page_leads_to_every_chapter(page, site):
    page.open(site + "index.html")
    links = page.evaluate("[...document.querySelectorAll('ul.chapters a')].map(a => a.href)")
    assert links == [f"{site}chapters/{path.stem}.html" for path in NOTEBOOKS]
    page.evaluate("document.querySelector('ul.chapters a').click()")
    page.wait(f"location.href == {links[0]!r}", "the first chapter")


@pytest.mark.parametrize("words", ["softmax", "scratch must be provided when cross-warp reduction is required"])
def test_search_finds_a_kernel_and_a_message(page, site, words):
    page.open(site + "index.html")
    page.evaluate(
        f"(form => {{ form.querySelector('input').value = {words!r}; form.requestSubmit(); }})"
        "(document.querySelector('form.bd-search'))"
    )
    page.wait("document.querySelectorAll('#search-results li').length > 1", "search results")


def test_chapter_offers_its_notebook(page, site):
    page.open(f"{site}chapters/{NOTEBOOKS[0].stem}.html")
    url = page.evaluate("document.querySelector('.chapter-head a[download]').href")
    with urllib.request.urlopen(url) as answer:
        assert json.load(answer) == json.loads(NOTEBOOKS[0].read_text())


def test_gallery_shows_every_kernel_and_its_source(page, site):
    import cookbook

    page.open(site + "gallery.html")
    shown = page.evaluate("[...document.querySelectorAll('section section > h2')].map(h => h.firstChild.textContent)")
    assert {"matmul", "blackwell.matmul"} < {*shown} and all(operator.attrgetter(name)(cookbook) for name in shown)
    for url in page.evaluate("[...document.querySelectorAll('a.source')].map(a => a.href)"):
        with urllib.request.urlopen(url.split("#")[0]) as answer:
            assert answer.status == 200


def test_dark_mode(page, site):
    page.open(site + "index.html")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.evaluate("document.querySelector('.theme-change-button[data-mode=dark]').click()")
    page.wait(f"{background} != {light!r}", "the page to turn dark")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address of a JupyterLab on a copy of the notebooks, started as `make lab` does."""
    import chromium

    folder = tmp_path_factory.mktemp("lab") / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder)
    for path in folder.glob("*.ipynb"):  # Recorded outputs must not pass for outputs of this run.
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.update(outputs=[], execution_count=None)
        nbformat.write(notebook, path)
    log = folder / "lab.log"
    options = [f"--ServerApp.root_dir={folder}", "--no-browser", "--port=0", "--IdentityProvider.token="]
    options += ["--LabApp.expose_app_in_browser=True", "--allow-root"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_PATH": str(ROOT / "tools" / "jupyter")}
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "jupyter", "lab", *options], stderr=output, env=env)
    try:
        lines = chromium.wait(
            lambda: [line for line in log.read_text().splitlines() if "http://127.0.0.1:" in line], 60, "JupyterLab"
        )
        yield lines[0].split("http://127.0.0.1:")[1].split("/")[0]
    finally:
        process.terminate()
        process.wait(20)


def test_first_notebook_runs_in_jupyterlab(new_page, lab):
    page = new_page()
    page.open(f"http://127.0.0.1:{lab}/lab/tree/{NOTEBOOKS[0].name}")
    notebook = "[...jupyterapp.shell.widgets('main')][0]"
    page.wait(f"typeof jupyterapp == 'object' && !!{notebook}?.sessionContext", "JupyterLab to open the notebook", 60)
    page.wait(f"{notebook}.sessionContext.session?.kernel?.status == 'idle'", "its kernel", 60)
    page.evaluate(f"jupyterapp.shell.activateById({notebook}.id)")
    page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
    cells = f"{notebook}.content.model.sharedModel.cells.filter(c => c.cell_type == 'code')"
    errors = f"{cells}.flatMap(c => c.outputs).filter(o => o.output_type == 'error').map(o => o.evalue)"
    page.wait(f"{cells}.every(c => c.execution_count > 0) || {errors}.length > 0", "every cell to start", 200)
    page.wait(f"{notebook}.sessionContext.session.kernel.status == 'idle'", "the last cell to end")
    errors = page.evaluate(errors)
    assert errors == []
    assert not page.evaluate("document.body.innerText.includes('Would you like to')"), "the news pop-up"
