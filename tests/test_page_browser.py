"""The web page in a real browser: everything a visitor does and gets wrong, with the page up after each.

Needs Playwright and a Chromium, see tests/test_eval_report.py. Skipped where they are not.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from PIL import Image

import app
from tests.pages import full, make_desk, never_stopping, served
from tests.waiting import PATIENCE, wait_for
from web.visitors import Exchange

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

pytestmark = pytest.mark.usefixtures("uploads")
ASSETS = app.ROOT / "assets"
ACCESSIBILITY = Path(__file__).with_name("accessibility.js")
ANIMATION_FRAMES = 20  # a third of a second: the first is the one that counts


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


@pytest.fixture(scope="module")
def house(uploads):
    """A page on the embedded model, that takes other ids besides."""
    desk = make_desk(any_model=True)
    with served(desk) as house:
        yield house
    desk.thread.close()


@pytest.fixture(scope="module")
def slow_house(uploads, tmp_path_factory):
    """A page on a model that never comes to an end by itself."""
    desk = make_desk(never_stopping(tmp_path_factory.mktemp("slow") / "model"), slow=True)
    with served(desk) as house:
        yield house
    desk.thread.close()


class Visit:
    """One open page: `asked` are its requests, `said` what it complained about."""

    def __init__(self, browser, url: str, width: int = 1280, height: int = 900, theme: str = "light"):
        self.url, self.asked, self.said = url, [], []
        size = {"width": width, "height": height}
        self.context = browser.new_context(viewport=size, color_scheme=theme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(url)
        self.page.wait_for_selector("#ask")
        self.page.wait_for_selector("#images img")
        self.settles()

    def ask(self, question: str | None = None) -> None:
        if question is not None:
            self.page.fill("#question textarea", question)
        self.page.click("#ask")

    def open(self, way: sync_api.Locator, until: sync_api.Locator) -> None:
        """Show what was hidden so far."""
        way.click()
        until.wait_for()
        self.settles()

    def settles(self) -> None:
        """Gradio writes a field's first value one animation frame after the field is there, over what a
        program has filled in by then: wait for some more frames."""
        self.page.evaluate(
            """left => {
                window.settled = false;
                const next = () => left-- ? requestAnimationFrame(next) : (window.settled = true);
                next();
            }""",
            ANIMATION_FRAMES,
        )
        self.page.wait_for_function("window.settled")

    def answers(self) -> list[str]:
        return [text.strip() for text in self.page.locator("#chat .bot.message").all_inner_texts()]

    def has_answers(self, number: int) -> None:
        """Wait until the conversation has so many."""
        answers = self.page.locator("#chat .bot.message")
        sync_api.expect(answers).to_have_count(number, timeout=1000 * PATIENCE)

    def shows(self, text: str) -> None:
        """Wait until the conversation shows a text."""
        self.page.locator("#chat", has_text=text).wait_for()

    def speaks(self) -> None:
        """Wait until an answer has some words."""
        self.page.wait_for_function("document.querySelector('#chat .bot.message')?.innerText.length > 20")

    def ended(self) -> None:
        """Wait until nothing is being answered."""
        self.page.wait_for_function("!document.querySelector('#ask').disabled")

    def refuses(self, text: str) -> None:
        self.page.locator("#notice [role=alert]", has_text=text).wait_for()

    def upload(self, *files) -> None:
        """Put other images in the place of those that are there."""
        clear = self.page.locator("#images button[aria-label='Clear']")
        if clear.count():
            clear.first.click()
        self.page.set_input_files("#images input[type=file]", [str(file) for file in files])

    def works(self) -> None:
        """The page is up: an image from the examples is answered about."""
        self.page.locator("#examples tbody tr", has_text="What is the printed word?").click()
        self.page.wait_for_function(
            "document.querySelector('#question textarea').value == 'What is the printed word?'"
        )
        self.ask()
        self.page.wait_for_function(
            "[...document.querySelectorAll('#chat .bot.message')].at(-1)?.innerText.trim() == 'cup'"
        )
        self.ended()
        assert self.said == []


@pytest.fixture
def visit(browser, house):
    visit = Visit(browser, house.url)
    yield visit
    visit.context.close()


def test_one_click_answers_and_nothing_is_asked_of_other_hosts(visit):
    visit.ask()
    visit.shows("blue")
    visit.ended()
    assert visit.answers() == ["blue"] and visit.page.input_value("#question textarea") == ""
    figures = visit.page.locator("#figures").inner_text()
    assert re.search(r"first words\s+[\d.]+ s", figures) and re.search(r"cache\s+[\d.]+ MiB", figures)
    visit.ask("What word do you see?")
    visit.shows("tree")
    visit.ended()
    assert visit.answers() == ["blue", "tree"]
    reused = re.search(r"tokens reused\s+(\d+) of (\d+)", visit.page.locator("#figures").inner_text())
    assert 0 < int(reused[1]) < int(reused[2])
    foreign = [url for url in visit.asked if not url.startswith((visit.url, "data:", "blob:"))]
    assert foreign == [] and visit.said == []


def test_questions_and_answers_are_text(browser, house, monkeypatch):
    """Nothing that is typed, or that a model says, becomes a part of the page."""
    said = "<b>a</b> <image>b</image> <img src='/none.png'> <form><input></form> <loc_5> &lt; <!-- c -->"
    # What the model says comes behind that.
    monkeypatch.setattr("web.asking.Exchange", lambda *parts: Exchange(*parts[:3], [f"{said} "]))
    visit = Visit(browser, house.url)
    visit.ask(said)
    visit.shows("c -->")
    visit.ended()
    texts = [text.strip() for text in visit.page.locator("#chat .message").all_inner_texts()]
    assert said in texts and any(text.startswith(f"{said} ") for text in texts), texts
    chat = visit.page.locator("#chat .message")
    assert chat.locator("b, form, input, image, img[src*=none]").count() == 0
    assert not [url for url in visit.asked if "none.png" in url]
    visit.context.close()


def test_uploads_several_images_and_examples(visit, tmp_path):
    visit.upload(ASSETS / "wolf.png")
    visit.page.wait_for_selector("#images img[src*='wolf']")
    visit.ask("What is the printed word?")
    visit.shows("wolf")
    visit.ended()
    visit.upload(ASSETS / "wolf.png", ASSETS / "cup.png")
    visit.page.wait_for_function("document.querySelectorAll('#images .thumbnail-item img').length == 2")
    visit.ask("What is the printed word?")
    visit.has_answers(2)
    visit.ended()
    assert len(visit.answers()) == 2 and all(answer not in ("", "…") for answer in visit.answers())
    assert visit.page.locator("#notice [role=alert]").count() == 0
    visit.works()


def test_four_people_at_once_are_answered_each_its_own(browser, house):
    crowd = (
        ("example", "What colour is the star?", "blue"),
        ("example", "What word do you see?", "tree"),
        ("cup", "What is the printed word?", "cup"),
        ("wolf", "What is the printed word?", "wolf"),
    )
    visits = [Visit(browser, house.url) for _ in crowd]
    for visit, (name, *_) in zip(visits, crowd):
        visit.upload(ASSETS / f"{name}.png")
        visit.page.wait_for_selector(f"#images img[src*='{name}']")
    for visit, (_, question, _) in zip(visits, crowd):
        visit.ask(question)
    for visit, (*_, expected) in zip(visits, crowd):
        visit.shows(expected)
        visit.ended()
        assert visit.answers() == [expected] and visit.said == []
        visit.context.close()


def test_several_answers_at_once(visit):
    sampling = visit.page.locator("#sampling")
    visit.open(sampling.locator("> button"), until=sampling.get_by_label("Remember the conversation"))
    sampling.get_by_label("number input for Answers at once").fill("4")
    sampling.get_by_label("number input for Temperature").fill("1.2")
    sampling.get_by_label("Seed").fill("7")
    visit.ask("Describe the picture.")
    visit.has_answers(4)
    visit.ended()
    answers = visit.answers()
    assert len(answers) == 4 and all(answers) and len(set(answers)) > 1
    visit.page.click("#undo")
    visit.has_answers(0)
    assert visit.page.input_value("#question textarea") == "Describe the picture."


def test_what_is_no_image_is_told(visit, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes((ASSETS / "cup.png").read_bytes()[:900])
    visit.upload(broken)
    visit.ask("What is it?")
    visit.refuses("damaged or cut off")
    assert visit.answers() == [] and visit.page.input_value("#question textarea") == "What is it?"
    text = tmp_path / "text.png"
    text.write_text("no image at all")
    visit.upload(text)
    visit.ask("What is it?")
    visit.refuses("expected an image")
    visit.works()


def test_too_large_an_upload_is_told(visit, tmp_path):
    large = tmp_path / "large.png"
    Image.frombytes("RGB", (5000, 4000), bytes(60_000_000)).save(large, compress_level=0)
    assert large.stat().st_size > 60_000_000
    visit.upload(large)
    visit.page.get_by_text(re.compile("exceeds|too large|maximum", re.IGNORECASE)).first.wait_for()
    visit.works()


def test_an_empty_question_and_an_unknown_model_are_told(visit, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # nobody waits for a network
    visit.ask("   ")
    visit.refuses("Type a question")
    field = visit.page.locator("#model input")
    field.fill("nobody/nothing-here")
    field.press("Enter")
    visit.ask("Hello?")
    visit.refuses("nobody/nothing-here")
    field.fill(str(app.DEFAULT_MODEL))
    field.press("Enter")
    visit.works()


def test_stop_ends_the_answer_and_the_next_question_is_answered(browser, slow_house):
    visit = Visit(browser, slow_house.url)
    visit.ask()
    visit.speaks()
    visit.page.click("#stop")
    visit.shows("[stopped]")
    visit.ended()
    assert len(visit.answers()) == 1
    visit.ask("And now?")
    visit.has_answers(2)
    visit.page.click("#clear")
    visit.has_answers(0)
    visit.ended()
    visit.context.close()


def test_stop_before_the_first_word_gives_the_question_back(browser, slow_house):
    visit = Visit(browser, slow_house.url)
    with full(slow_house.desk.thread):
        visit.ask("Which colour?")
        visit.page.wait_for_function("document.querySelector('#question textarea').value == ''")
        visit.page.click("#stop")
        visit.page.locator("#notice", has_text="Stopped before the first word.").wait_for()
        visit.ended()
        assert visit.answers() == [] and visit.page.input_value("#question textarea") == "Which colour?"
    visit.context.close()


def test_a_closed_tab_stops_the_answer_and_gives_its_memory_back(browser, slow_house):
    people = slow_house.desk.visitors
    assert wait_for(lambda: len(people) == 0)  # of the test before
    visit = Visit(browser, slow_house.url)
    visit.ask()
    visit.speaks()
    assert len(people) == 1 and people.kept_bytes > 0
    [person] = people._known.values()
    exchange = person.log[-1]
    visit.page.close()
    assert wait_for(lambda: len(people) == 0 and people.kept_bytes == 0)
    assert wait_for(lambda: slow_house.desk.thread.idle and exchange.ended)
    assert exchange.ended == ["stopped"]  # it would have gone on for a minute
    visit.context.close()


def test_it_fits_a_phone(browser, house):
    visit = Visit(browser, house.url, width=360, height=740)
    visit.ask()
    visit.shows("blue")
    visit.ended()
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 360
    visit.works()
    visit.context.close()


@pytest.mark.parametrize("theme, width", [("light", 1280), ("dark", 360)])
def test_it_can_be_read_touched_and_heard(browser, house, theme, width):
    visit = Visit(browser, house.url, width=width, theme=theme)
    page, sampling = visit.page, visit.page.locator("#sampling")
    assert page.evaluate("document.querySelector('.dark') != null") == (theme == "dark")
    visit.open(sampling.locator("> button"), until=sampling.get_by_label("Remember the conversation"))
    visit.ask()
    visit.shows("blue")
    visit.ended()
    look = ACCESSIBILITY.read_text(encoding="utf-8")
    assert page.evaluate(look) == []
    visit.ask(" ")
    visit.refuses("Type a question")
    assert page.evaluate(look) == []
    visit.open(page.get_by_role("tab", name="Where did it look"), until=page.get_by_label("occlusion"))
    assert page.evaluate(look) == []
    visit.context.close()


@pytest.mark.parametrize("width, method", [(1280, "attention"), (360, "occlusion")])
def test_where_it_looked(browser, house, width, method):
    visit = Visit(browser, house.url, width=width)
    page = visit.page
    visit.open(page.get_by_role("tab", name="Where did it look"), until=page.get_by_label(method))
    page.get_by_label(method).check()
    page.click("#look")
    page.wait_for_selector("#where-sheet img")
    page.wait_for_function("!document.querySelector('#look').disabled")
    assert page.get_by_label(method).is_checked()
    assert page.locator("#where-answer textarea").input_value() == "blue"
    field, image = (page.locator(f"#where-pictures{part}").bounding_box() for part in ("", " img"))
    sheet, label = (page.locator(f"#where-sheet {part}").first.bounding_box() for part in ("img", "label"))
    assert image["y"] + image["height"] <= field["y"] + field["height"]  # all of it can be seen
    assert sheet["y"] >= label["y"] + label["height"] - 1  # nothing of the sheet is covered
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not visit.said
    visit.context.close()
