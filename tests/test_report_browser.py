"""report.html in a real browser: images show, tables sort, nothing is asked of the network, phones too.

Needs Playwright and a Chromium: `pip install playwright`, and `playwright install chromium` or the system's
own (`apt-get install chromium`). Skipped where they are not.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests.evaluations import report_of
from tests.waiting import PATIENCE

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

NATURAL = "images => images.map(image => image.complete && image.naturalWidth > 0)"
NAMES = "rows => rows.map(row => row.cells[0].textContent.trim())"
SCORES = "rows => rows.map(row => parseFloat(row.cells[2].textContent))"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return report_of(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def browser():
    own = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=own, args=arguments)
        except sync_api.Error as error:
            pytest.skip(f"no Chromium to start: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture
def page(browser, report):
    """The report, opened offline; `page.asked` are its requests, `page.said` what it complained about."""
    context = browser.new_context(viewport={"width": 1100, "height": 800}, offline=True)
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.asked, page.said = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.goto(report.as_uri())
    yield page
    context.close()


def test_images_show_and_nothing_is_asked_of_the_network(page, report):
    shown = page.eval_on_selector_all("img", NATURAL)
    assert len(shown) >= 12 and all(shown)
    assert [url for url in page.asked if not url.startswith("data:")] == [report.as_uri()]
    assert page.said == []
    assert len(page.screenshot(full_page=True)) > 50_000  # there is something to see


def test_tables_sort_both_ways_by_mouse_and_keyboard(page):
    rows = "table.sortable >> nth=0 >> tbody tr"
    before = page.eval_on_selector_all("table.sortable:first-of-type tbody tr", NAMES)
    score = page.locator("table.sortable").first.get_by_role("button", name="score")
    score.click()
    down = page.locator(rows).evaluate_all(SCORES)
    assert down == sorted(down, reverse=True) and len(set(down)) > 1
    assert page.locator("th[aria-sort=descending]").count() == 1
    score.focus()
    page.keyboard.press("Enter")
    assert page.locator(rows).evaluate_all(SCORES) == sorted(down)
    page.locator("table.sortable").first.get_by_role("button", name="questions about").click()
    names = page.locator(rows).evaluate_all(NAMES)
    assert names == sorted(names) and set(names) <= set(before)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 720})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    colour = "getComputedStyle(document.body).backgroundColor"
    light = sum(int(part) for part in page.evaluate(colour)[4:-1].split(",")) > 3 * 128
    assert light == (scheme == "light")


def test_it_works_without_scripts(browser, report):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(report.as_uri())
    assert page.locator("table.sortable tbody tr").count() > 2
    context.close()
