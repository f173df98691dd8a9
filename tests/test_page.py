"""The page in a real browser, and the files and maps that the server has for it.

Those in a browser are skipped where there is no Playwright or Chromium: `browser` in tests/conftest.py.
"""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import httpx
import pytest
from PIL import Image

from inference.command import DEFAULT_MODEL, ROOT
from tests.house import data_url
from tests.pages import never_stopping, slow
from tests.servers import running
from tests.waiting import PATIENCE

EXAMPLE, CUP = ROOT / "assets" / "example.png", ROOT / "assets" / "cup.png"
ACCESSIBILITY = Path(__file__).with_name("accessibility.js")
SIZES = {"desk": (1280, 800), "phone": (390, 844), "tablet": (768, 1024)}


@pytest.fixture(scope="module")
def url():
    with running() as served:
        yield served.url.rstrip("/")


@pytest.fixture
def open_page(browser, url):
    """A visitor's page, which asks nobody but its server and has no error of its own."""
    contexts, wrong = [], []

    def opened(at: str = url, size: str = "desk", **more):
        width, height = SIZES[size]
        # Playwright evaluates what it waits for as text, which the page's own policy forbids.
        context = browser.new_context(viewport={"width": width, "height": height}, bypass_csp=True, **more)
        contexts.append(context)
        contexts[-1].set_default_timeout(1000 * PATIENCE)
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request", lambda asked: asked.url.startswith((at, "blob:", "data:")) or wrong.append(asked.url)
        )
        page.goto(at)
        page.wait_for_function("document.querySelector('#chips button') && model")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def ask(page, question: str) -> str:
    """The answer's text, once it has come to its end."""
    before = page.locator(".under").count()
    page.fill("#question", question)
    page.click("#send")
    page.wait_for_function(f"document.querySelectorAll('.under').length > {before} && running === null")
    return answers(page)[-1]


def answers(page) -> list[str]:
    return page.locator(".answer .text").all_inner_texts()


# ------------------------------------------------------------------------------------------ without a browser
def test_the_page_needs_no_key_and_names_nothing_outside():
    with running(api_key="secret") as served:
        url = served.url.rstrip("/")
        for path in ("/", "/page/page.js", "/page/page.css", "/page/example.png", "/page/ask.md"):
            answer = httpx.get(url + path, trust_env=False)
            assert (
                answer.status_code == 200
                and "default-src 'none'" in answer.headers["content-security-policy"]
            )
            if path not in ("/page/example.png", "/page/ask.md"):
                assert not re.search(r"(src|href)=\"(?!/page/|data:,)|@import|url\(", answer.text)
        for path in ("/page/%2e%2e/serve.py", "/page/serve.py", "/page/"):
            assert httpx.get(url + path, trust_env=False).status_code in (401, 404)
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 401
        assert httpx.get(url, headers={"Host": "evil.example"}, trust_env=False).status_code == 403


def test_maps_come_with_the_answer_that_chat_completions_give(url):
    part = {"url": data_url(EXAMPLE)}
    content = [{"type": "image_url", "image_url": part}, {"type": "text", "text": "What colour is the star?"}]
    body = {"model": DEFAULT_MODEL.name, "messages": [{"role": "user", "content": content}]}
    more = {"trust_env": False, "timeout": PATIENCE}
    said = httpx.post(f"{url}/v1/chat/completions", json=body, **more).json()["choices"][0]["message"][
        "content"
    ]
    found = httpx.post(f"{url}/v1/attribution", json=body, **more).json()
    assert found["answer"] == said == "blue"
    with Image.open(io.BytesIO(base64.b64decode(found["image"].partition(",")[2]))) as sheet:
        assert sheet.format == "PNG" and sheet.width > 800
    wrong = {"messages": [{"role": "user", "content": "Why?"}]}
    refused = httpx.post(f"{url}/v1/attribution", json=body | wrong, **more)
    assert refused.status_code == 400 and refused.json()["error"]["message"]


# ----------------------------------------------------------------------------------------------- in a browser
@pytest.mark.slow(but=1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_has_all_that_a_question_needs(open_page, size, scheme):
    page = open_page(size=size, color_scheme=scheme)
    _, height = SIZES[size]
    for part in ("#shown", "#chips button >> nth=-1", "#question", "#send", "[data-kind=count]"):
        box = page.locator(part).bounding_box()
        assert box and box["y"] >= 0 and box["y"] + box["height"] <= height, part
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.is_disabled("#undo") and page.is_disabled("#clear")
    if size != "phone":
        assert page.get_attribute("#card", "href") == "/page/embedded-model.md" and page.is_visible("#card")
    page.click("#chips button >> nth=0")
    page.wait_for_selector(".under")
    assert answers(page) == ["blue"] and re.match(
        r"[\d.]+ s, sure at \d+ %", page.inner_text(".figures summary")
    )
    assert page.evaluate(ACCESSIBILITY.read_text(encoding="utf-8")) == []


def test_a_conversation_is_kept_taken_back_and_cleared(open_page):
    page = open_page()
    assert ask(page, "What colour is the star?") == "blue"
    said = ask(page, "<b>How many</b> shapes are there?")
    assert page.locator("#talk b").count() == 0 and "<b>How many</b>" in page.inner_text("#talk")
    page.reload()
    page.wait_for_selector(".under")
    assert answers(page) == ["blue", said] and page.locator("#talk .stage img").count() == 1
    page.click("#undo")
    assert answers(page) == ["blue"] and page.input_value("#question").startswith("<b>")
    page.click("#clear")
    assert not answers(page) and page.input_value("#question") == "" and page.is_disabled("#clear")
    other = open_page()  # another visitor, and another tab of this one, begin anew
    tab = page.context.new_page()
    tab.goto(page.url)
    tab.wait_for_selector("#chips button")
    assert not answers(other) and not answers(tab)


def test_what_is_found_stands_over_the_picture_at_any_zoom(open_page):
    page = open_page()
    page.fill("#question", "blue star")
    page.click("[data-kind=detect]")
    page.wait_for_selector(".stage rect")
    page.wait_for_function("running === null")
    assert "Find blue star" in page.inner_text(".mine") and "bbox" not in answers(page)[-1]
    for zoom in (1, 2):
        page.evaluate(f"document.body.style.zoom = {zoom}")
        image, box = (page.locator(f"#talk .stage {kind}").first.bounding_box() for kind in ("img", "rect"))
        assert image["x"] < box["x"] < box["x"] + box["width"] < image["x"] + image["width"]
        # The star is in the upper half, right of the middle of the left half.
        assert 0.3 < (box["x"] + box["width"] / 2 - image["x"]) / image["width"] < 0.7
        assert (box["y"] + box["height"] / 2 - image["y"]) / image["height"] < 0.5
    page.click(".under button:has-text('Where did it look')")
    page.wait_for_selector("img.where")


def test_pictures_are_made_smaller_and_what_cannot_be_shown_is_named(open_page, tmp_path):
    page = open_page()
    Image.new("RGB", (5000, 2500), "green").save(tmp_path / "large.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    page.set_input_files(
        "#choose", [CUP, tmp_path / "broken.png", tmp_path / "clip.mp4", tmp_path / "large.png"]
    )
    page.wait_for_function("files.length === 2 && document.querySelector('#notice').textContent")
    notice = page.inner_text("#notice")
    assert "broken.png" in notice and "clip.mp4" in notice and "videos" in notice
    assert page.evaluate("[files[1].width, files[1].height]") == [2048, 1024]
    assert page.locator("#files .number").all_inner_texts() == ["1", "2"]
    page.click("#files button >> nth=1")
    assert ask(page, "What is the printed word?") == "cup"
    assert ask(page, "How many shapes are there?")  # about the same picture
    page.evaluate(
        """data => {
            const moved = new DataTransfer(), bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
            moved.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
            for (const kind of ["dragover", "drop"])
                document.dispatchEvent(new DragEvent(kind, { dataTransfer: moved, cancelable: true }));
        }""",
        base64.b64encode(EXAMPLE.read_bytes()).decode(),
    )
    page.wait_for_function("files.length === 1")
    assert ask(page, "What colour is the star?") == "blue"


def test_an_answer_is_stopped_and_a_failure_gives_the_question_back(open_page, tmp_path):
    folder = never_stopping(tmp_path / "model")
    with running(slow(folder)) as served:
        url = served.url.rstrip("/")
        page = open_page(url)
        page.fill("#question", "What is there?")
        page.click("#send")
        page.wait_for_function("document.querySelector('.answer .text')?.textContent")
        page.keyboard.press("Escape")
        page.wait_for_selector(".under")
        assert "stopped" in page.inner_text(".figures summary")
    page.fill("#question", "Still there?")
    page.click("#send")
    page.wait_for_function("document.querySelector('#notice').textContent")
    assert (
        "cannot be reached" in page.inner_text("#notice") and page.input_value("#question") == "Still there?"
    )
