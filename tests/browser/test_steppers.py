"""The figures that move, each in a real browser: buttons, keys, without scripts, on a phone."""

import pytest

from figures import _stepper
from tests.browser.test_browser import browser, pytestmark  # noqa: F401

STEPPERS = _stepper.steppers()
SHOWN = "() => [...new Set([...document.querySelectorAll('.frame')].filter(e => e.getBoundingClientRect().width)" \
    ".map(e => e.dataset.frame))]"  # fmt: skip


def opened(browser, steps, **context):  # noqa: F811
    page = browser.new_context(**context).new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.set_content(f"<body>{steps._repr_html_()}{steps._repr_html_()}</body>")
    return page


@pytest.mark.parametrize("picture", STEPPERS, ids=lambda picture: picture.path.stem)
def test_keys_and_buttons_step_through(browser, picture):  # noqa: F811
    steps = picture.draw()
    page = opened(browser, steps, reduced_motion="reduce")
    first, second = page.locator(".cookbook-stepper").all()  # Twice on a page, each by itself.
    for i, caption in enumerate(steps.captions):
        assert first.locator("p").inner_text() == caption
        assert page.evaluate(SHOWN) == ["0"] if i == 0 else set(page.evaluate(SHOWN)) == {"0", str(i)}
        first.press("ArrowRight")
    assert second.locator("p").inner_text() == steps.captions[0]
    assert first.get_by_role("button", name="Next step").is_disabled()
    first.press("Home")
    assert first.locator("p").inner_text() == steps.captions[0]
    first.get_by_role("button", name="Next step").click()
    first.get_by_role("button", name="Step back").click()
    assert first.locator("p").inner_text() == steps.captions[0]
    assert first.get_by_role("button", name="Step back").is_disabled()
    first.press("End")
    assert first.locator("p").inner_text() == steps.captions[-1]
    assert page.errors == []
    page.context.close()


@pytest.mark.parametrize("picture", STEPPERS, ids=lambda picture: picture.path.stem)
def test_without_scripts_and_on_a_phone(browser, picture):  # noqa: F811
    steps = picture.draw()
    page = opened(browser, steps, java_script_enabled=False)
    assert page.locator("ol >> nth=0").locator("li").all_inner_texts() == steps.captions
    assert page.locator("svg >> nth=0").locator(".frame[data-frame='0'] >> nth=0").is_visible()
    assert not page.locator("svg >> nth=0").locator(".frame[data-frame='1'] >> nth=0").is_visible()
    page.context.close()
    page = opened(browser, steps, viewport=dict(width=390, height=844))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("button >> nth=0").bounding_box()["height"] >= 44
    page.context.close()
