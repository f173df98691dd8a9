"""The tab "Where did it look", as a client of the page sees it."""

from __future__ import annotations

import pytest
from gradio_client import Client, handle_file
from PIL import Image

import app
from tests.pages import client_of, full, make_desk, served
from tests.waiting import PATIENCE, wait_for

EXAMPLE, CUP = (str(app.ROOT / "assets" / f"{name}.png") for name in ("example", "cup"))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    desk = make_desk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        with served(desk) as page:
            yield page
    desk.thread.close()


def begin(
    page,
    *images: str,
    question: str = "What colour is the star?",
    method: str = "attention",
    client: Client | None = None,
):
    """A look that has been asked for."""
    gallery = [{"image": handle_file(image), "caption": None} for image in images]
    client = client or client_of(page)
    return client.submit(gallery, question, method, page.desk.models.default, api_name="/look")


def look(page, *images: str, **changes):
    """What the tab shows in the end: (answer, sheet, notice)."""
    return begin(page, *images, **changes).result()


@pytest.mark.parametrize("method", ["attention", "occlusion"])
def test_an_answer_and_its_maps(page, method):
    answer, sheet, notice = look(page, EXAMPLE, method=method)
    assert (answer, notice) == ("blue", "")
    with Image.open(sheet) as image:
        assert image.width == 940 and image.height > 600
    assert page.desk.thread.idle


def test_two_images(page):
    answer, sheet, notice = look(page, CUP, EXAMPLE, question="What is the printed word?")
    assert answer and notice == "" and Image.open(sheet).width > 900


@pytest.mark.parametrize(
    "images, changes, expected",
    [
        ((), {}, "Add an image first"),
        ((EXAMPLE,), {"question": "  "}, "Type a question first"),
        ((EXAMPLE,) * 9, {}, "at most 8 at once"),
    ],
)
def test_a_mistake_is_one_sentence(page, images, changes, expected):
    answer, sheet, notice = look(page, *images, **changes)
    assert expected in notice and 'role="alert"' in notice
    assert not isinstance(answer, str) and not isinstance(sheet, str)  # what is shown stays


def test_a_broken_image_is_named(page, tmp_path):
    (tmp_path / "boat.png").write_text("an image of a boat")
    _, sheet, notice = look(page, str(tmp_path / "boat.png"))
    assert "boat.png" in notice and "a file that starts with" in notice and sheet is None


def test_a_look_can_be_stopped(page):
    with full(page.desk.thread):
        client = client_of(page)
        looking = begin(page, EXAMPLE, client=client)
        assert wait_for(looking.outputs)
        client.predict(api_name="/stop_looking")
        _, sheet, notice = looking.result(PATIENCE)
        assert "Stopped before there was anything to see" in notice and sheet is None
    assert look(page, EXAMPLE)[0] == "blue"
