"""The web page in a real browser: everything a visitor does and gets wrong, with the page up after each.

Needs Playwright and a Chromium, see tests/test_eval_report.py. Skipped where they are not.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from PIL import Image

import app
from data.boxes import COORDINATES, Box, Point
from data.visuals import open_video
from tests.clips import noise, write_animation, write_clip
from tests.pages import (
    CUP,
    EMBEDDED,
    EXAMPLE,
    THREE,
    WOLF,
    full,
    locating,
    make_service,
    never_stopping,
    served,
)
from tests.qwen_checkpoints import save_hf
from tests.test_thinking import save as thinking_checkpoint
from tests.waiting import PATIENCE, wait_for
from web import page as page_module
from web.parts import EXAMPLES

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

pytestmark = pytest.mark.usefixtures("uploads")
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
    service = make_service(any_model=True)
    with served(service) as house:
        yield house


@pytest.fixture(scope="module")
def slow_house(uploads, tmp_path_factory):
    """A page on a model that never comes to an end by itself."""
    service = make_service(never_stopping(tmp_path_factory.mktemp("slow") / "model"), slow=True)
    with served(service) as house:
        yield house


@pytest.fixture(scope="module")
def listed_house(uploads):
    """A page on the embedded model, and no other."""
    with served(make_service()) as house:
        yield house


class Visit:
    """One open page: `requests` that it sent, `errors` of its scripts."""

    def __init__(self, browser, house, width: int = 1280, height: int = 900, theme: str = "light"):
        self.house, self.url, self.requests, self.errors = house, house.url, [], []
        size = {"width": width, "height": height}
        self.context = browser.new_context(viewport=size, color_scheme=theme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(self.url)
        self.page.wait_for_selector("#message .submit-button")
        self.page.wait_for_selector("#message img")
        self.settles()

    def reload(self) -> None:
        """Load the page anew."""
        self.page.reload()
        self.page.wait_for_selector("#message .submit-button")
        self.settles()

    def ask(self, question: str | None = None) -> None:
        if question is not None:
            self.page.fill("#message textarea", question)
        self.page.click("#message .submit-button")

    def question(self) -> str:
        return self.page.input_value("#message textarea")

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
        """Wait until the conversation has so many, and no other is in progress."""
        answers = self.page.locator("#chat .bot.message")
        sync_api.expect(answers).to_have_count(number, timeout=1000 * PATIENCE)
        self.ended()

    def answered(self, *answers: str) -> None:
        """Wait until the conversation has these answers, and no other is in progress."""
        self.page.wait_for_function(
            """answers => [...document.querySelectorAll("#chat .bot.message")]
                .map(message => message.innerText.trim()).join("|") == answers""",
            arg="|".join(answers),
        )
        self.ended()

    def speaks(self) -> None:
        """Wait until an answer has some words."""
        self.page.wait_for_function("document.querySelector('#chat .bot.message')?.innerText.length > 20")

    def ended(self) -> None:
        """Wait until no answer is in progress."""
        self.page.wait_for_selector("#message .submit-button")

    def refuses(self, text: str) -> None:
        self.page.locator("#notice [role=alert]", has_text=text).wait_for()

    def says(self, text: str) -> None:
        self.page.locator("#notice [role=status]", has_text=text).wait_for()

    def shows(self, number: int) -> None:
        """Wait until so many images stand in the question's box."""
        thumbnails = self.page.locator("#message .thumbnail-item img")
        sync_api.expect(thumbnails).to_have_count(number, timeout=1000 * PATIENCE)

    def gives(self, event: str, place: str, *files, more: dict[str, str] | None = None) -> bool:
        """Drop or paste files somewhere: whether the page took them, or left them to the browser."""
        contents = [[Path(file).name, base64.b64encode(Path(file).read_bytes()).decode()] for file in files]
        return self.page.evaluate(
            """([kind, place, files, more]) => {
                const data = new DataTransfer();
                for (const [name, content] of files) {
                    const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
                    data.items.add(new File([bytes], name, {type: "image/png"}));
                }
                Object.entries(more).forEach(([type, text]) => data.setData(type, text));
                const options = {bubbles: true, cancelable: true};
                const event = kind == "drop" ? new DragEvent("drop", {dataTransfer: data, ...options})
                    : new ClipboardEvent("paste", {clipboardData: data, ...options});
                document.querySelector(place).dispatchEvent(event);
                return event.defaultPrevented;
            }""",
            [event, place, contents, more or {}],
        )

    def upload(self, *files) -> None:
        """Put other images in the place of those that are there."""
        while (remove := self.page.locator("#message .delete-button")).count():
            remove.first.click()
        self.page.set_input_files("#message input[type=file]", [str(file) for file in files])
        self.shows(len(files))

    def choose(self, model: str) -> None:
        """Take one of the models that are listed, with the mouse: Enter takes what was typed only once Gradio
        has narrowed its list down to that."""
        self.page.locator("#model input").click()
        self.page.get_by_role("option", name=model).click()

    def works(self) -> None:
        """The page is up: an image from the examples is answered about."""
        self.page.locator("#examples button", has_text="What is the printed word?").click()
        self.page.wait_for_function(
            "document.querySelector('#message textarea').value == 'What is the printed word?'"
        )
        before = self.answers()
        self.ask()
        self.answered(*before, "cup")
        assert self.errors == []


@pytest.fixture
def visit(browser, house):
    visit = Visit(browser, house)
    yield visit
    visit.context.close()


@pytest.mark.slow
def test_one_click_answers_and_nothing_is_requested_from_other_hosts(visit):
    visit.ask()
    visit.answered("blue")
    assert visit.question() == ""
    figures = visit.page.locator("#figures").inner_text()
    assert re.search(r"first words\s+[\d.]+ s", figures) and re.search(r"cache\s+[\d.]+ MiB", figures)
    visit.ask("What word do you see?")  # about the same image
    visit.answered("blue", "tree")
    reused = re.search(r"tokens reused\s+(\d+) of (\d+)", visit.page.locator("#figures").inner_text())
    assert 0 < int(reused[1]) < int(reused[2])
    foreign = [url for url in visit.requests if not url.startswith((visit.url, "data:", "blob:"))]
    assert foreign == [] and visit.errors == []


def test_questions_and_answers_are_text(browser, house, monkeypatch):
    """Nothing that is typed, or that a model says, becomes a part of the page."""
    text = "<b>a</b> <image>b</image> <img src='/none.png'> <form><input></form> <loc_5> &lt; <!-- c -->"
    messages = page_module._messages

    def says(log):
        return messages([replace(exchange, answers=[text]) for exchange in log])

    monkeypatch.setattr(page_module, "_messages", says)
    visit = Visit(browser, house)
    visit.ask(text)
    visit.has_answers(1)
    texts = [text.strip() for text in visit.page.locator("#chat .message").all_inner_texts()]
    assert texts.count(text) == 2, texts
    chat = visit.page.locator("#chat .message")
    assert chat.locator("b, form, input, image, img[src*=none]").count() == 0
    assert not [url for url in visit.requests if "none.png" in url]
    visit.context.close()


@pytest.mark.slow
def test_images_are_uploaded_dropped_and_pasted(visit):
    visit.upload(WOLF)
    visit.ask("What is the printed word?")
    visit.answered("wolf")
    number = 1
    for place in ("#message textarea", "#title"):
        for event in ("drop", "paste"):
            visit.gives(event, place, CUP)
            visit.shows(1)
            visit.ask("What is the printed word?")
            visit.answered("wolf", *["cup"] * number)
            number += 1
    visit.upload(WOLF, CUP)
    visit.ask("What is the printed word?")
    visit.has_answers(number + 1)
    assert visit.answers()[-1] not in ("", "…")
    assert visit.page.locator("#notice [role=alert]").count() == 0
    visit.works()


def test_nothing_that_is_dropped_takes_the_place_of_the_page(visit, tmp_path):
    """Files dropped as a hand does it, and links; the browser would open both."""
    text, page = tmp_path / "notes.txt", visit.page
    text.write_text("no image")
    hand = visit.context.new_cdp_session(page)
    frame = page.locator("#chat").bounding_box()
    link = {"mimeType": "text/uri-list", "data": "https://example.org/a.png"}
    for items, files, outcome in (
        ([], [str(text)], "#notice [role=alert]"),
        ([], [str(WOLF)], "#message .thumbnail-item img[src*=wolf]"),
        ([link], [], "#notice [role=alert]"),
    ):
        for kind in ("dragEnter", "dragOver", "drop"):
            event = {"x": frame["x"] + 50, "y": frame["y"] + 50, "type": kind}
            data = {"items": items, "files": files, "dragOperationsMask": 1}
            hand.send("Input.dispatchDragEvent", {**event, "data": data})
        page.wait_for_selector(outcome)
    visit.refuses("link")
    taken = """([kind, place]) => {
        const data = new DataTransfer();
        data.setData("text/uri-list", "https://example.org/a.png");
        const event = new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
        document.querySelector(place).dispatchEvent(event);
        return event.defaultPrevented;
    }"""
    for place in ("body", "#chat", "#examples"):
        assert all(page.evaluate(taken, [kind, place]) for kind in ("dragover", "drop"))
    visit.refuses("link")
    assert page.url == visit.url and not [url for url in visit.requests if "example.org" in url]
    visit.works()


def test_text_that_comes_with_a_picture_of_itself_is_pasted_as_text(visit):
    """As word processors copy it; an image that is copied from another page comes with HTML alone."""
    text = {"text/plain": "Hm?", "text/html": "<b>Hm?</b>"}
    assert not visit.gives("paste", "#message textarea", CUP, more=text)  # the browser goes on with it
    assert visit.gives("paste", "#message textarea", CUP, more={"text/html": "<img>"})
    visit.page.wait_for_selector("#message .thumbnail-item img[src*=cup]")


@pytest.mark.slow
def test_ones_own_image_takes_the_place_of_the_example_and_a_second_one_stands_beside_it(visit):
    visit.gives("drop", "#chat", THREE)
    visit.page.wait_for_selector("#message .thumbnail-item img[src*=three]")
    visit.shows(1)
    assert visit.question() not in [example["text"] for example in EXAMPLES]
    visit.ask("How many shapes are there?")
    visit.answered("3")
    visit.gives("drop", "#chat", THREE, CUP, WOLF)
    visit.shows(3)
    visit.says("2 images at a time")
    visit.ask("How many shapes are there?")
    visit.has_answers(2)
    visit.page.locator("#examples button").first.click()
    visit.page.wait_for_selector("#message .thumbnail-item img[src*=example]")
    visit.gives("paste", "body", CUP)
    visit.page.wait_for_selector("#message .thumbnail-item img[src*=cup]")
    visit.shows(1)
    assert not visit.page.locator("#notice").is_visible() and visit.errors == []


def test_what_cannot_be_read_is_named_at_once_and_the_rest_is_shown(visit, tmp_path):
    """Nobody has to ask first, or to take it away again; and a name is text."""
    huge = tmp_path / "<img src='none.png' onerror='window.hit = 1'>.png"
    Image.new("1", (9000, 9000)).save(huge)
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(CUP).read_bytes()[:900])
    visit.gives("drop", "#chat", broken, WOLF)
    visit.refuses("broken.png")
    visit.shows(1)
    visit.ask("What is the printed word?")
    visit.answered("wolf")
    visit.page.set_input_files("#message input[type=file]", [str(huge)])
    visit.refuses(huge.name)
    visit.refuses("80,000,000")
    assert visit.page.locator("#message .thumbnail-item").count() == 0
    assert visit.page.evaluate("window.hit") is None and visit.errors == []
    assert not [url for url in visit.requests if "none.png" in url]


@pytest.mark.slow
def test_a_large_photograph_is_made_smaller_before_it_is_sent_and_its_boxes_are_its_own(
    browser, listed_house, tmp_path, monkeypatch
):
    visit, large, times = Visit(browser, listed_house), tmp_path / "large.png", 12
    image = Image.open(EXAMPLE).convert("RGB")
    image = image.resize((times * image.width, times * image.height), Image.Resampling.LANCZOS)
    image.save(large, compress_level=0)
    service, came = visit.house.service, []
    take_in = service.take_in
    monkeypatch.setattr(service, "take_in", lambda path: came.append(os.path.getsize(path)) or take_in(path))
    visit.upload(large)
    shown = visit.page.locator("#message .thumbnail-item img")
    edge = service.edge
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") == edge < image.width
    assert len(came) == 1 and came[0] < large.stat().st_size / 50
    visit.ask("Where is the star?")
    visit.page.locator("#chat .located img").wait_for()
    visit.ended()
    said = visit.page.locator("#chat .said").inner_text()
    box = [int(number) / times for number in re.findall(r"\d+", said)]
    assert box == pytest.approx([157, 25, 245, 115], abs=8)
    visit.context.close()


@pytest.mark.slow
def test_what_the_chosen_model_makes_of_several_images_is_said_before_it_is_open(browser, uploads, tmp_path):
    folders = [tmp_path / name for name in ("several", "single")]
    for folder, says in zip(folders, ({}, {"most_images": 1}), strict=True):
        shutil.copytree(EMBEDDED, folder)
        (folder / "generation_config.json").write_text(json.dumps({"single_turn": True, **says}))
    with served(make_service(*folders)) as house:
        visit = Visit(browser, house)
        visit.upload(CUP, WOLF)
        visit.says("2 images")
        for name in ("single", "several"):
            visit.choose(name)
            told = visit.page.locator("#notice [role=status]", has_text="single")
            sync_api.expect(told).to_have_count(int(name == "single"), timeout=1000 * PATIENCE)
        visit.says("2 images")
        visit.context.close()


def test_a_photograph_stays_large_where_any_model_may_be_asked_about_it(visit, tmp_path):
    """What a model that nobody has opened makes of it is not known."""
    large = tmp_path / "large.png"
    Image.new("RGB", (3000, 2000)).save(large)
    visit.upload(large)
    shown = visit.page.locator("#message .thumbnail-item img")
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") == 3000


@pytest.mark.slow
def test_a_conversation_survives_a_reload_and_is_no_other_tabs(browser, listed_house):
    visit = Visit(browser, house := listed_house)
    page = visit.page
    visit.upload(WOLF)
    visit.open(page.locator("#sampling > button"), until=page.get_by_label("Seed"))
    page.get_by_label("Seed").fill("7")
    visit.ask("What is the printed word?")
    visit.answered("wolf")
    visit.reload()
    visit.answered("wolf")
    visit.shows(0)
    assert page.locator("#figures dd").count() >= 3 and visit.question() == ""
    visit.open(page.locator("#sampling > button"), until=page.get_by_label("Seed"))
    assert page.get_by_label("Seed").input_value() == "7"
    visit.ask("What is the printed word?")  # about the same image
    visit.answered("wolf", "wolf")
    other = Visit(browser, house)
    other.has_answers(0)
    other.context.close()
    second = visit.context.new_page()  # a tab of the same browser
    second.goto(visit.url)
    second.wait_for_selector("#message img")
    assert second.locator("#chat .bot.message").count() == 0
    second.close()
    page.click("#undo")
    visit.answered("wolf")
    page.click("#clear")
    visit.has_answers(0)
    visit.reload()
    visit.has_answers(0)
    assert visit.errors == []
    visit.context.close()


@pytest.mark.slow
def test_several_answers_retry_edit_and_undo(visit):
    page, sampling = visit.page, visit.page.locator("#sampling")
    visit.open(sampling.locator("> button"), until=sampling.get_by_label("Remember the conversation"))
    sampling.get_by_label("number input for Number of answers").fill("4")
    sampling.get_by_label("number input for Temperature").fill("1.2")
    sampling.get_by_label("Seed").fill("7")
    visit.ask("Describe the picture.")
    visit.has_answers(4)
    answers = visit.answers()
    assert all(answers) and len(set(answers)) > 1
    sampling.get_by_label("number input for Number of answers").fill("1")
    sampling.get_by_label("number input for Temperature").fill("0")
    page.locator("#chat button[aria-label=Retry]").last.click()
    visit.has_answers(1)
    page.locator("#chat button[aria-label=Edit]").last.click()
    page.fill("#chat textarea", "What colour is the star?")
    page.locator("#chat button[aria-label=Submit]").click()
    visit.answered("blue")
    page.click("#undo")
    visit.has_answers(0)
    assert visit.question() == "What colour is the star?" and page.locator("#message img").count() == 1
    visit.ask()
    visit.answered("blue")
    page.click("#clear")
    visit.has_answers(0)
    assert visit.errors == []


def test_mistakes_are_reported_and_the_question_is_not_lost(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # nobody waits for a network
    other = tmp_path / "other.png"
    Image.new("RGB", (40, 40), "red").save(other)
    visit.upload(other)
    source = visit.page.locator("#message .thumbnail-item img").get_attribute("src")
    Path(source.partition("file=")[2]).unlink()  # as happens to the oldest where many upload
    visit.ask("What is it?")
    visit.refuses("other.png")
    assert visit.answers() == [] and visit.question() == "What is it?"
    assert visit.page.locator("#message img[src*=other]").count() == 1
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


@pytest.mark.slow
def test_stop_ends_the_answer_and_the_next_question_is_answered(browser, slow_house):
    visit = Visit(browser, slow_house)
    visit.ask()
    visit.speaks()
    visit.page.click("#message .stop-button")
    visit.page.locator("#chat", has_text="[stopped]").wait_for()
    visit.ended()
    visit.ask("And now?")
    sync_api.expect(visit.page.locator("#chat .bot.message")).to_have_count(2, timeout=1000 * PATIENCE)
    visit.page.click("#clear")
    visit.has_answers(0)
    with full(slow_house.service):
        visit.ask("Which colour?")
        visit.page.wait_for_selector("#message .stop-button")
        visitor = next(reversed(slow_house.service._visitors.values()))  # the last one to ask
        assert wait_for(lambda: not visitor.cancelled)  # as the cleared conversation was
        visit.page.click("#message .stop-button")
        assert wait_for(lambda: visitor.cancelled)  # with a free thread, words might come before the stop
    visit.page.locator("#notice", has_text="Stopped before the first word.").wait_for()
    visit.ended()
    assert visit.answers() == [] and visit.question() == "Which colour?"
    visit.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("width, height", [(1280, 800), (390, 844)])
def test_what_is_needed_is_seen_without_scrolling(browser, house, width, height):
    """Before and after an answer, one with a box and a mistake; the box is in the answer's bubble."""
    visit = Visit(browser, house, width=width, height=height)
    page = visit.page

    def seen(*selectors: str) -> None:
        for selector in selectors:
            frame = page.locator(selector).last.bounding_box()
            assert frame["y"] >= 0 and frame["y"] + frame["height"] <= height, selector
            assert frame["x"] >= 0 and frame["x"] + frame["width"] <= width, selector
        assert (
            page.evaluate("document.documentElement.scrollWidth") <= width and page.evaluate("scrollY") == 0
        )

    always = ("#message textarea", "#message .submit-button", "#undo", "#clear")
    seen(*always, "#chat")
    assert not page.locator("#figures").is_visible()  # nor anything else that says nothing yet
    visit.ask()
    visit.answered("blue")
    assert page.locator("#figures dd").count() >= 3
    visit.ask("Where is the star?")
    page.locator("#chat .located img").wait_for()
    visit.ended()
    page.wait_for_function(  # Gradio scrolls the conversation a moment later
        """() => document.querySelector("#chat .said").getBoundingClientRect().bottom
            < document.querySelector("#message").getBoundingClientRect().top"""
    )
    seen(*always, "#chat .user.message", "#chat .located .frame", "#chat .located button", "#chat .said")
    assert page.locator("#chat .said").inner_text() == "star: box 158 28 246 113"
    visit.ask(" ")
    visit.refuses("Type a question")
    seen(*always, "#notice")
    assert visit.errors == []
    visit.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("theme, width", [("light", 1280), ("dark", 360)])
def test_it_can_be_read_touched_and_heard(browser, house, theme, width):
    visit = Visit(browser, house, width=width, theme=theme)
    page, sampling = visit.page, visit.page.locator("#sampling")
    look = ACCESSIBILITY.read_text(encoding="utf-8")
    assert page.evaluate("document.querySelector('.dark') != null") == (theme == "dark")
    assert page.evaluate(look) == []
    visit.open(sampling.locator("> button"), until=sampling.get_by_label("Remember the conversation"))
    visit.ask()
    visit.answered("blue")
    visit.ask(" ")
    visit.refuses("Type a question")
    assert page.evaluate(look) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    visit.open(page.get_by_role("tab", name="Attribution"), until=page.get_by_label("occlusion"))
    assert page.evaluate(look) == []
    visit.context.close()


@pytest.mark.slow
def test_attribution_begins_with_the_last_question_and_reuses_what_it_cost(browser, house, monkeypatch):
    width = 360
    visit = Visit(browser, house, width=width)
    page, service = visit.page, visit.house.service
    model = service.models.held(service.models.default).model
    encode, encoded = model.encode_images, []
    monkeypatch.setattr(model, "encode_images", lambda *all: encoded.append(1) or encode(*all))
    ask, look = (page.get_by_role("tab", name=name, exact=True) for name in ("Ask", "Attribution"))
    field = page.locator("#where-message textarea")
    visit.upload(CUP)
    visit.ask("What is the printed word?")
    visit.answered("cup")
    before = len(encoded)
    look.click()
    page.wait_for_selector("#where-message .thumbnail-item img[src*=cup]")
    assert field.input_value() == "What is the printed word?"
    assert page.locator("#where-message .thumbnail-item").count() == 1
    page.click("#where-message .submit-button")
    page.wait_for_selector("#where-sheet img")
    page.wait_for_selector("#where-message .submit-button")
    assert page.locator("#where-answer textarea").input_value() == "cup"
    assert len(encoded) == before
    sheet, label = (page.locator(f"#where-sheet {part}").first.bounding_box() for part in ("img", "label"))
    assert sheet["y"] >= label["y"] + label["height"] - 1  # nothing of the sheet is covered
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    field.fill("Describe the picture.")
    visit.open(ask, until=page.locator("#message"))
    visit.open(look, until=field)
    assert field.input_value() == "Describe the picture."  # until something else was asked
    visit.open(ask, until=page.locator("#message"))
    visit.ask("How many shapes are there?")
    visit.has_answers(2)
    look.click()
    page.wait_for_function(
        "document.querySelector('#where-message textarea').value == 'How many shapes are there?'"
    )
    assert visit.errors == []
    visit.context.close()


@pytest.mark.slow
def test_a_box_and_its_name_light_up_together(browser, uploads, tmp_path):
    """About a photograph that is wider than the page, and stored on its side."""
    theme, width, size = "dark", 360, (2304, 1200)
    star = Box("blue star", (942, 78, 1482, 360))
    things = [star, Box("<b>", (0, 0, *size)), Point("digit", (1908, 656))]
    model = locating(tmp_path / "model", COORDINATES["qwen3-vl"].write(things, size))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(EXAMPLE).convert("RGB").resize(size).transpose(Image.Transpose.ROTATE_90)
    turned.save(tmp_path / "turned.jpg", exif=exif)
    with served(make_service(model)) as house:
        visit = Visit(browser, house, width=width, theme=theme)
        visit.upload(tmp_path / "turned.jpg")
        visit.ask("What colour is the star?")
        page, image = visit.page, visit.page.locator(".located svg")
        image.wait_for()
        visit.ended()
        image.hover(position={"x": 1, "y": 1})  # once it has come to rest
        frame = image.bounding_box()
        assert frame["x"] >= 0 and frame["x"] + frame["width"] <= width
        assert frame["width"] / frame["height"] == pytest.approx(size[0] / size[1], rel=0.02)
        x, y = (frame["width"] / size[0] * (star.box[at] + star.box[at + 2]) / 2 for at in (0, 1))
        image.hover(position={"x": x, "y": y}, force=True)  # where the large box lies, too
        lit = page.locator(".located button.lit")
        sync_api.expect(lit).to_have_text("blue star")
        assert page.locator(".located rect").count() == 2 and page.locator(".located g.lit rect").count() == 1
        page.mouse.move(1, 1)
        page.keyboard.press("Tab")
        while page.evaluate("document.activeElement.innerText") != "digit":
            page.keyboard.press("Tab")
        sync_api.expect(lit).to_have_text("digit")
        assert page.locator(".located g.lit circle").count() == 1
        page.locator(".located button", has_text="<b>").hover()
        sync_api.expect(lit).to_have_text(["<b>", "digit"])
        page.mouse.click(1, 1)
        sync_api.expect(page.locator(".located .lit")).to_have_count(0)
        assert page.evaluate(ACCESSIBILITY.read_text(encoding="utf-8")) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width and not visit.errors
        visit.context.close()


@pytest.mark.slow
def test_a_video_is_uploaded_shown_and_asked_about(browser, uploads, tmp_path):
    """A file that is played in the conversation, and an animation, by a model that takes videos."""
    pytest.importorskip("av")
    save_hf("qwen3_vl", tmp_path / "model")
    file = write_clip(tmp_path / "clip.mp4", noise(9, 64, 48), 4, "libx264")
    gif = write_animation(tmp_path / "dance.gif", noise(6, 64, 48), 250)
    with served(make_service(tmp_path / "model")) as house:
        visit = Visit(browser, house)
        visit.open(
            visit.page.locator("#sampling button").first,
            visit.page.get_by_label("number input for Maximum number of new tokens"),
        )
        visit.page.get_by_label("number input for Maximum number of new tokens").fill("4")
        for number, (shown, element) in enumerate(((file, "video"), (gif, "img"))):
            while (remove := visit.page.locator("#message .delete-button")).count():
                remove.first.click()
            visit.page.set_input_files("#message input[type=file]", [str(shown)])
            visit.page.locator("#message .thumbnail-item").wait_for()
            visit.ask("how many red")
            visit.has_answers(number + 1)
            player = visit.page.locator(f"#chat .user {element}").last
            player.wait_for()
            if element == "video":
                visit.page.wait_for_function("document.querySelector('#chat .user video').videoWidth == 64")
            exchange = next(iter(house.service._visitors.values())).log[-1]
            checkpoint = house.service.models.held(house.service.models.default)
            inputs = checkpoint.processor.ask(open_video(shown), "how many red")
            assert exchange.stats["prompt_tokens"] >= len(inputs["input_ids"][0])
        assert visit.errors == []
        visit.context.close()


@pytest.mark.slow
def test_what_was_thought_is_folded_away_beside_the_answer(browser, uploads, tmp_path):
    """Where a model thinks; another one refuses in a sentence."""
    folder = thinking_checkpoint(tmp_path / "reasoner", "qwen", "open")
    with served(make_service(folder, EMBEDDED)) as house:
        visit = Visit(browser, house)
        think = visit.page.get_by_label("Think")
        visit.open(visit.page.locator("#sampling button").first, think)
        think.check()
        visit.page.get_by_label("number input for Maximum number of new tokens").fill("20")
        visit.ask("how many circles are there?")
        visit.has_answers(2)
        (exchange,) = next(iter(house.service._visitors.values())).log
        thought, answer = visit.page.locator("#chat .bot.message").all()
        assert thought.inner_text().strip() == "Thinking" and exchange.thoughts[0]
        assert (
            exchange.stats["thinking"] == exchange.thoughts
            and exchange.answers[0].strip() in answer.inner_text()
        )
        thought.locator("[role=button]").first.click()
        words = thought.locator(".message-content")
        sync_api.expect(words).to_be_visible()
        assert len(words.inner_text()) > len(exchange.thoughts[0]) / 2
        assert "of thinking" in visit.page.locator("#figures").inner_text()
        visit.choose("ocelli-shapes")
        visit.ask("What colour is the star?")
        visit.refuses("thinking")
        assert visit.errors == []
        visit.context.close()
