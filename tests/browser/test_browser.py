"""A reader's visit to the built site, and one notebook run by hand in JupyterLab, in a real browser."""

import functools
import http.server
import importlib.util
import json
import operator
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDED = ("playwright", "axe_playwright_python", "sphinx", "jupyterlab")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None] + ["chromium"] * (CHROMIUM is None)

pytestmark = [
    pytest.mark.slow,  # The site takes a minute to build.
    # CI must not pass without a browser; a learner's machine or a GPU host may do so.
    pytest.mark.skipif(bool(MISSING) and not os.environ.get("CI"), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def site():
    """Address of the site, freshly built by `make site` and served from this machine."""
    built = subprocess.run(["make", "site", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True)
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
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, site):
    """A page that must see no console error and send no request elsewhere."""
    page = browser.new_page(base_url=site, viewport=dict(width=1300, height=1000))
    errors, requests = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: requests.append(request.url))
    yield page
    page.close()
    assert errors == []
    assert [url for url in requests if not url.startswith((site, "data:", "blob:"))] == []


def pages() -> list[str]:
    """Every page of the built site but copies of source code."""
    names = sorted(str(path.relative_to(ROOT / "build/site")) for path in (ROOT / "build/site").rglob("*.html"))
    return [name for name in names if not name.startswith(("_static", "_modules"))]


def test_every_page_is_whole_at_desktop_and_phone_width(page):
    """Opens each page in both widths: nothing missing, formulas and tables set, no sideways scrolling, the stamp there.

    On a laptop no line of code is wider than its box.
    """
    assert len(pages()) >= len(NOTEBOOKS) + 5
    cut = "[...document.querySelectorAll('.cell_input pre')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    longest_lines = f"{cut}.map(e => e.innerText.split('\\n').sort((a, b) => b.length - a.length)[0])"
    unset = "[...document.querySelectorAll('p')].map(e => e.innerText).filter(text => /^\\|.*\\|/.test(text))"
    for name in pages():
        page.goto(name)
        page.wait_for_function("!document.querySelector('.math:not(:has(mjx-container))')")
        assert page.evaluate(unset) == [], f"{name} shows a table's source"
        assert "erified on" in page.text_content(".stamp"), name
        assert page.evaluate("[...document.images].every(i => i.loading == 'lazy' || i.naturalWidth > 0)"), name
        assert page.evaluate(longest_lines) == [], f"{name} cuts these lines"
        page.set_viewport_size(dict(width=390, height=844))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{name} scrolls sideways on a phone"
        page.set_viewport_size(dict(width=1300, height=1000))


KINDS = ["index.html", f"chapters/{NOTEBOOKS[1].stem}.html", "results.html", "chapters/glossary.html", "gallery.html",
         "errors.html", "api.html"]  # fmt: skip

# Leaves each table one row of each kind: axe takes most of a minute for 2,000 rows that differ in their text alone.
SHORTEN_TABLES = """() => document.querySelectorAll('tbody').forEach(table => {
    const kinds = new Set();
    for (const row of [...table.rows]) {
        const kind = row.outerHTML.replace(/>[^<]*/g, '>');
        kinds.has(kind) ? row.remove() : kinds.add(kind);
    }
})"""


@pytest.mark.parametrize("mode, kinds", [("light", KINDS), ("dark", KINDS[:3])], ids=["light", "dark"])
def test_pages_pass_an_accessibility_check(page, mode, kinds):
    """axe finds nothing against WCAG 2.1, level AA, on a page of each kind; in the dark, which has other colours, on
    those that have all of them.

    Two things are left out: figures, which carry their own colours, and Sphinx's long signatures, lists without terms.
    """
    from axe_playwright_python.sync_playwright import Axe

    options = dict(runOnly=["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], preload=False, resultTypes=["violations"])
    page.emulate_media(color_scheme=mode, reduced_motion="reduce")  # A colour that still fades in has less contrast.
    for name in kinds:
        page.goto(name)
        page.wait_for_function(f"document.documentElement.dataset.theme == {mode!r}")
        page.evaluate(SHORTEN_TABLES)
        report = Axe().run(page, context=dict(exclude=[[".cell_output svg"], [".sig dl"]]), options=options)
        assert report.violations_count == 0, f"{name}: {report.generate_report()}"


def test_the_keyboard_reaches_the_text_and_opens_a_hint(page):
    page.goto("chapters/00_start_here.html")
    page.keyboard.press("Tab")
    assert "Skip to main content" in page.evaluate("document.activeElement.innerText")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: url.endswith("#main-content"))
    for _ in range(500):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('details > summary')"):
            break
    is_open = "document.activeElement.parentElement.open"
    assert not page.evaluate(is_open)
    page.keyboard.press("Enter")
    assert page.evaluate(is_open)


def test_landing_page_leads_to_every_chapter(page, site):
    page.goto("index.html")
    links = page.eval_on_selector_all("ul.chapters a", "links => links.map(link => link.href)")
    assert links == [f"{site}chapters/{path.stem}.html" for path in NOTEBOOKS]
    page.click("ul.chapters a >> nth=0")
    page.wait_for_url(links[0])


def test_chapters_lead_to_their_neighbours(page):
    names = [f"{path.stem}.html" for path in NOTEBOOKS]
    page.goto(f"chapters/{names[0]}")
    page.click("a.right-next")
    page.wait_for_url(f"**/{names[1]}")
    page.click("a.left-prev")
    page.wait_for_url(f"**/{names[0]}")
    links = """async ([names, link]) => Promise.all(names.map(async name => {
        const text = await (await fetch(name)).text();
        return new DOMParser().parseFromString(text, 'text/html').querySelector(link).getAttribute('href');
    }))"""
    assert page.evaluate(links, [names[:-1], "a.right-next"]) == names[1:]
    assert page.evaluate(links, [names[1:], "a.left-prev"]) == names[:-1]


def test_a_guess_comes_before_the_result(page):
    """The output of a cell that compares a guess with a result is folded, and so is a solution."""
    chapter = "chapters/00_start_here.html"
    page.goto(chapter)
    folded = page.locator("details.hide.below-input, details.hide.above-output")
    assert folded.count() and not folded.first.get_attribute("open")
    solution = page.locator("details", has_text="Solution").first
    assert not solution.locator("pre").is_visible()
    solution.locator("summary").click()
    assert solution.locator("pre").is_visible()


def test_a_timeline_names_its_spans_and_can_be_taken_along(page):
    page.goto("chapters/11_flash_attention.html")
    with page.expect_download() as download:
        page.click("text=download the Chrome trace")
    spans = [event for event in json.loads(download.value.path().read_text())["traceEvents"] if event["ph"] == "X"]
    svg = page.eval_on_selector("text=look at each span", "link => fetch(link.href).then(found => found.text())")
    titles = re.findall(r"<rect [^>]*><title>(.*?)</title>", svg)
    assert len(titles) == sum(span["name"] != "Init" for span in spans) > 10
    assert re.fullmatch(r"[\w ,]+: \d+\.\d{3} µs, from \d+\.\d{3} µs on", titles[0])


@pytest.mark.parametrize("words", ["softmax", "scratch must be provided when cross-warp reduction is required"])
def test_search_finds_a_kernel_and_a_message(page, words):
    page.goto("index.html")
    page.evaluate(
        "words => (form => { form.querySelector('input').value = words; form.requestSubmit(); })"
        "(document.querySelector('form.bd-search'))",
        words,
    )
    page.wait_for_function("document.querySelectorAll('#search-results li').length > 1")


def test_chapter_offers_its_notebook(page, site):
    page.goto(f"chapters/{NOTEBOOKS[0].stem}.html")
    url = page.eval_on_selector(".chapter-head a[download]", "link => link.href")
    assert page.request.get(url).json() == json.loads(NOTEBOOKS[0].read_text())


def test_gallery_shows_every_kernel_and_its_source(page):
    import cookbook

    page.goto("gallery.html")
    shown = page.eval_on_selector_all("section section > h2", "titles => titles.map(h => h.firstChild.textContent)")
    assert {"matmul", "blackwell.matmul"} < {*shown} and all(operator.attrgetter(name)(cookbook) for name in shown)
    for url in page.eval_on_selector_all("a.source", "links => links.map(link => link.href)"):
        assert page.request.get(url.split("#")[0]).ok


def test_dark_mode(page):
    page.goto("index.html")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.evaluate("document.querySelector('.theme-change-button[data-mode=dark]').click()")
    page.wait_for_function(f"{background} != {light!r}")
    page.reload()  # The choice is kept.
    page.wait_for_function(f"{background} != {light!r}")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address of a JupyterLab on a copy of the notebooks, started as `make lab` does."""
    folder = tmp_path_factory.mktemp("lab") / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder)
    for path in folder.glob("*.ipynb"):  # Recorded outputs must not pass for outputs of this run.
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.update(outputs=[], execution_count=None)
        nbformat.write(notebook, path)
    cell = nbformat.v4.new_code_cell("from figures.memory import barrier_in_steps\n\nbarrier_in_steps.draw()")
    kernel = dict(kernelspec=dict(name="python3", display_name="Python 3"))
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), folder / "stepper.ipynb")
    log = folder / "lab.log"
    options = [f"--ServerApp.root_dir={folder}", "--no-browser", "--port=0", "--IdentityProvider.token="]
    options += ["--LabApp.expose_app_in_browser=True", "--allow-root"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_PATH": str(ROOT / "tools" / "jupyter")}
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "jupyter", "lab", *options], stderr=output, env=env)
    try:
        deadline = time.monotonic() + 60
        while not (address := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())):
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield address[0]
    finally:
        process.terminate()
        process.wait(20)


def test_first_notebook_runs_in_jupyterlab(browser, lab):
    page = browser.new_page(viewport=dict(width=1300, height=1000))
    page.goto(f"{lab}lab/tree/{NOTEBOOKS[0].name}")
    notebook = "[...jupyterapp.shell.widgets('main')][0]"
    wait = lambda condition, seconds: page.wait_for_function(condition, timeout=1e3 * seconds)
    wait(f"typeof jupyterapp == 'object' && !!{notebook}?.sessionContext", 60)
    wait(f"{notebook}.sessionContext.session?.kernel?.status == 'idle'", 60)
    page.evaluate(f"jupyterapp.shell.activateById({notebook}.id)")
    page.evaluate("void jupyterapp.commands.execute('notebook:run-all-cells')")
    cells = f"{notebook}.content.model.sharedModel.cells.filter(c => c.cell_type == 'code')"
    errors = f"{cells}.flatMap(c => c.outputs).filter(o => o.output_type == 'error').map(o => o.evalue)"
    wait(f"{cells}.every(c => c.execution_count > 0) || {errors}.length > 0", 200)
    wait(f"{notebook}.sessionContext.session.kernel.status == 'idle'", 60)
    assert page.evaluate(errors) == []
    assert "Would you like to" not in page.inner_text("body"), "the news pop-up"
    page.close()


def test_a_stepper_steps_in_jupyterlab(browser, lab):
    page = browser.new_page(viewport=dict(width=1300, height=1000))
    page.goto(f"{lab}lab/tree/stepper.ipynb")
    notebook = "[...jupyterapp.shell.widgets('main')].find(w => w.context?.path == 'stepper.ipynb')"
    page.wait_for_function(f"typeof jupyterapp == 'object' && !!{notebook}?.sessionContext", timeout=60e3)
    page.wait_for_function(f"{notebook}.sessionContext.session?.kernel?.status == 'idle'", timeout=60e3)
    page.evaluate(f"jupyterapp.shell.activateById({notebook}.id)")
    page.evaluate("void jupyterapp.commands.execute('notebook:run-all-cells')")
    stepper = page.locator(".cookbook-stepper")
    stepper.get_by_role("button", name="Next step").click(timeout=60e3)
    assert stepper.locator("span").inner_text().strip().startswith("2 of ")
    stepper.press("ArrowRight")
    assert stepper.locator("span").inner_text().strip().startswith("3 of ")
    assert page.evaluate(f"{notebook}.content.widgets.length") == 1  # The key was no command of JupyterLab's.
    page.close()
