"""report.html: everything in one file, whatever the data say; in a real browser where there is one.

The browser tests need Playwright and a Chromium (`playwright install chromium`, or the system's own).
"""

from __future__ import annotations

import base64
import io
import os
import re
import shutil

import pytest
from PIL import Image

from eval.report import SHOWN, SIDE, random_samples, worst_samples
from eval.tasks import shapes_task
from tests.evaluations import blank_image, report_of, run, save_rows
from tests.waiting import PATIENCE

NAMES = "rows => rows.map(row => row.cells[0].textContent.trim())"
SCORES = "rows => rows.map(row => parseFloat(row.cells[2].textContent))"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return report_of(tmp_path_factory.mktemp("report"))


def test_it_holds_its_images_and_names_nothing_outside_itself(path):
    report = path.read_text(encoding="utf-8")
    links = re.findall(r"""\b(?:src|href|srcset|action)\s*=\s*["']?([^"'\s>]+)""", report)
    assert len(links) >= SHOWN and all(link.startswith("data:image/webp;base64,") for link in links)
    assert not re.search(r"@import|url\(|https?://|<(link|iframe|object|base)\b", report)
    assert "default-src 'none'" in report
    for link in links:
        with Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))) as image:
            image.load()
            assert max(image.size) <= SIDE
    for part in ("By kind of question", "Worst answers", "majority answer", "sha256:", "samples/s"):
        assert part in report


def test_what_data_say_is_text(tmp_path):
    evil = '<script>alert("x")</script> & "quotes" \ud800'
    rows = [{"question": evil, "answer": evil, "family": "<b>", "image": blank_image(tmp_path)}]
    rows.append({"question": "plain", "answer": "x", "family": "other", "image": None})
    arguments = ("--data", save_rows(tmp_path / "rows.jsonl", rows), "--output", tmp_path / "out")
    assert run(*arguments, "--prompt", "{question}", "--compile", "off", "--controls") == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "<b>" not in page


def test_worst_answers_are_of_all_kinds():
    task = shapes_task(100)
    records = {sample.id: {"score": 0.0} for sample in task.samples}
    worst, count = worst_samples(task, records)
    assert count == 100 and len(worst) == SHOWN
    assert len({sample.family for sample in worst}) == len({sample.family for sample in task.samples})
    assert [sample.id for sample in random_samples(task)] == [sample.id for sample in random_samples(task)]


# ------------------------------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    own = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=own, args=arguments)
        except sync_api.Error as error:
            pytest.skip(f"no Chromium to start: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


def open_page(browser, **options):
    page = browser.new_context(viewport={"width": 1100, "height": 800}, offline=True, **options).new_page()
    page.set_default_timeout(1000 * PATIENCE)
    return page


def test_images_show_tables_sort_and_nothing_is_fetched(browser, path):
    page, fetched, complaints = open_page(browser), [], []
    page.on("request", lambda request: fetched.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    shown = page.eval_on_selector_all("img", "all => all.map(one => one.complete && one.naturalWidth > 0)")
    assert len(shown) >= 12 and all(shown)
    rows = page.locator("table.sortable >> nth=0 >> tbody tr")
    score = page.locator("table.sortable").first.get_by_role("button", name="score")
    score.click()
    down = rows.evaluate_all(SCORES)
    assert down == sorted(down, reverse=True) and len(set(down)) > 1
    score.focus()
    page.keyboard.press("Enter")
    assert rows.evaluate_all(SCORES) == sorted(down)
    page.locator("table.sortable").first.get_by_role("button", name="questions about").click()
    assert rows.evaluate_all(NAMES) == sorted(rows.evaluate_all(NAMES))
    assert [url for url in fetched if not url.startswith("data:")] == [path.as_uri()] and not complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes_and_works_without_scripts(browser, path, scheme):
    page = open_page(browser, java_script_enabled=scheme == "dark")
    page.goto(path.as_uri())
    assert page.locator("table.sortable tbody tr").count() > 2
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 720})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in colour[4:-1].split(",")) > 3 * 128) == (scheme == "light")
