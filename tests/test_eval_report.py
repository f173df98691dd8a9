"""report.html: everything in one file, whatever the data say."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from eval.report import SHOWN, SIDE, random_samples, worst_samples
from eval.tasks import shapes_task
from tests.evaluations import blank_image, report_of, run, save_rows


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    return report_of(tmp_path_factory.mktemp("report")).read_text(encoding="utf-8")


class Links(HTMLParser):
    """Everything in a page that names something outside of it."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]


def test_it_names_nothing_outside_itself(report):
    links = Links()
    links.feed(report)
    assert links.found and all(link.startswith("data:image/webp;base64,") for link in links.found)
    assert not {"link", "iframe", "object", "base"} & set(links.tags)
    assert "@import" not in report and not re.search(r"url\(|https?://", report)
    assert "default-src 'none'" in report


def test_its_images_are_whole_and_small(report):
    embedded = re.findall(r'src="data:image/webp;base64,([^"]+)"', report)
    assert len(embedded) >= SHOWN
    for data in embedded:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            image.load()
            assert max(image.size) <= SIDE


def test_it_shows_figures_and_controls(report):
    for part in ("By kind of question", "By length", "Worst answers", "Random answers", "samples/s"):
        assert part in report
    assert "image blanked" in report and "majority answer" in report and "sha256:" in report


def test_what_data_say_is_text(tmp_path):
    evil = '<script>alert("x")</script> & "quotes" \ud800'
    rows = [{"question": evil, "answer": evil, "family": "<b>", "image": blank_image(tmp_path)}]
    rows.append({"question": "plain", "answer": "x", "family": "other", "image": None})
    arguments = ("--data", save_rows(tmp_path / "rows.jsonl", rows), "--output", tmp_path / "out")
    assert run(*arguments, "--prompt", "{question}", "--compile", "off", "--controls") == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "<b>" not in page


def test_worst_samples_are_the_lowest_families_in_turn():
    task = shapes_task(60)
    records = {sample.id: {"score": 0.0 if int(sample.id) < 40 else 0.5} for sample in task.samples}
    records |= {sample.id: {"score": 1.0} for sample in task.samples if sample.family in ("count", "word")}
    worst, wrong = worst_samples(task, records)
    assert wrong == 48 and len(worst) == SHOWN and {records[one.id]["score"] for one in worst} == {0.0}
    assert len({one.family for one in worst[:8]}) == 8
    drawn = random_samples(task)
    assert len({one.id for one in drawn}) == SHOWN and drawn == random_samples(task)
