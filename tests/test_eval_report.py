"""report.html: everything in one file, whatever the data say; in a real browser where there is one.

The browser test needs Playwright and a Chromium (`playwright install chromium`, or the system's own).
"""

from __future__ import annotations

import re

import pytest

from eval.report import SHOWN, SIDE
from tests.evaluations import run, save_rows, write_rows
from tests.waiting import PATIENCE

SHOWN_IMAGES = "all => all.map(one => one.complete ? Math.max(one.naturalWidth, one.naturalHeight) : 0)"
EVIL = '<script>alert("x")</script> & "quotes" \ud800'


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The report of a run with controls, with wrong answers and with rows that look like HTML."""
    folder = tmp_path_factory.mktemp("report")
    write_rows(folder)
    rows = [
        {"image": f"image-{n % 4}.png", "question": f"Which {n}?", "answer": "never heard of"}
        for n in range(20)
    ]
    rows = [row | {"family": f"kind {n % 10}"} for n, row in enumerate(rows)]
    rows[0] |= {"question": EVIL, "answer": EVIL, "family": "<b>"}
    rows[1]["image"] = None
    arguments = ("--data", save_rows(folder / "rows.jsonl", rows), "--output", folder / "out")
    assert (
        run(*arguments, "--prompt", "{question}", "--max-new-tokens", 2, "--compile", "off", "--controls")
        == 0
    )
    return folder / "out" / "report.html"


@pytest.mark.slow
def test_it_holds_its_images_and_names_nothing_outside_itself(path):
    report = path.read_text(encoding="utf-8")
    links = re.findall(r"""\b(?:src|href|srcset|action)\s*=\s*["']?([^"'\s>]+)""", report)
    assert len(links) >= SHOWN and all(link.startswith("data:image/webp;base64,") for link in links)
    assert not re.search(r"@import|url\(|https?://|<(script|link|iframe|object|base|b)\b", report)
    assert "default-src 'none'" in report and "&lt;script&gt;alert" in report
    for part in (
        "By kind of question",
        "By confidence",
        "calibration error",
        "Worst answers",
        "majority answer",
        "sha256:",
        "samples/s",
    ):
        assert part in report
    worst = report[report.index("Worst answers") : report.index("Random answers")]
    assert all(f"kind {n}" in worst for n in range(1, 10)), "each kind of question has its worst answer there"


@pytest.mark.slow
def test_it_shows_its_images_offline_and_fits_a_phone_in_both_schemes(browser, path):
    page, fetched, complaints = browser.new_context(offline=True).new_page(), [], []
    page.set_default_timeout(1000 * PATIENCE)
    page.on("request", lambda request: fetched.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(path.as_uri())
    shown = page.eval_on_selector_all("img", SHOWN_IMAGES)
    assert len(shown) >= SHOWN and all(0 < side <= SIDE for side in shown)
    assert page.locator("table tbody tr").count() > 2
    page.set_viewport_size({"width": 360, "height": 720})
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in colour[4:-1].split(",")) > 3 * 128) == (scheme == "light")
    assert [url for url in fetched if not url.startswith("data:")] == [path.as_uri()] and not complaints
