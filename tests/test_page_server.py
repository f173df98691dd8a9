"""The web page as a client sees it, without a browser: answers, refusals, goodbyes; app.py's mistakes."""

from __future__ import annotations

import os
import socket
import threading

import gradio
import httpx
import pytest
import yaml
from gradio_client import Client, handle_file
from huggingface_hub import constants

import app
from tests.pages import EMBEDDED, client_of, make_desk, served
from tests.waiting import PATIENCE, free_port
from web.models import Models

pytestmark = pytest.mark.usefixtures("uploads")
ASSETS = app.ROOT / "assets"
EXAMPLE, CUP, WOLF = (str(ASSETS / f"{name}.png") for name in ("example", "cup", "wolf"))
# Who asks at the same time, and what each must be told.
CROWD = (
    (EXAMPLE, "What colour is the star?", "blue"),
    (EXAMPLE, "What word do you see?", "tree"),
    (CUP, "What is the printed word?", "cup"),
    (WOLF, "What is the printed word?", "wolf"),
)


@pytest.fixture(scope="module")
def page(uploads):
    desk = make_desk(any_model=True)
    with served(desk) as page:
        yield page
    desk.thread.close()


def ask(client: Client, image: str, question: str) -> tuple:
    """What the page shows after a question: (texts of the chat, notice)."""
    images = [{"image": handle_file(image), "caption": None}] if image else []
    chat, _, notice, *_ = client.predict(images, question, EMBEDDED, api_name="/ask")
    return [part["text"] for message in chat for part in message["content"] if "text" in part], notice


def test_a_crowd_is_answered_each_its_own(page):
    clients = [client_of(page) for _ in CROWD]
    answers: dict[int, list] = {}

    def one(number):
        image, question, _ = CROWD[number]
        answers[number] = [ask(clients[number], image, question)[0] for _ in range(3)]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(CROWD))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (_, question, right) in enumerate(CROWD):
        for times, texts in enumerate(answers[number], 1):
            assert texts == [question, right] * times


def test_stop_undo_and_clear_over_the_wire(page):
    client = client_of(page)
    ask(client, EXAMPLE, "What colour is the star?")
    assert ask(client, EXAMPLE, "What word do you see?")[0][-1] == "tree"
    client.predict(api_name="/stop")
    (
        chat,
        *_,
    ) = client.predict(api_name="/undo")
    assert len(chat) == 3  # image, question, answer
    assert client.predict(api_name="/clear")[0] == []


def test_a_model_that_does_not_exist_is_told(page, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # nobody waits for a network
    client = client_of(page)
    chat, _, notice, *_ = client.predict([], "Hello?", "nobody/nothing-here", api_name="/ask")
    assert "nobody/nothing-here" in notice and 'role="alert"' in notice and chat == []
    assert ask(client, EXAMPLE, "What colour is the star?")[0][-1] == "blue"


# ------------------------------------------------------------------------------------------ command line
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "70000"], "--port: expected 1 to 65535, got 70000"),
        (["--host", "203.0.113.9", "--port", "7999"], "cannot listen on 203.0.113.9"),
        (["--model", "no/such/folder"], "there is no folder no/such/folder"),
    ],
)
def test_a_start_that_fails_is_one_sentence(capsys, monkeypatch, arguments, expected):
    monkeypatch.delenv("GRADIO_SERVER_PORT", raising=False)
    assert app.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("app.py: error: ") and expected in said and said.count("\n") == 1


def test_a_port_in_use_is_told_and_another_one_found(page, capsys, monkeypatch):
    port = int(page.url.rstrip("/").rsplit(":", 1)[1])
    monkeypatch.setattr(app, "FIRST_PORT", port)
    assert app.main(["--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"app.py: error: port {port} is in use on 127.0.0.1: give another --port\n"
    )
    assert port < app.free_port("127.0.0.1", None) < port + app.PORTS


def test_a_port_that_is_taken_while_the_model_is_loaded(monkeypatch):
    """Two pages that are started at once: the second one goes elsewhere, whenever it loses its port."""
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setattr(app, "FIRST_PORT", free_port())
    load, tried = Models.open, []

    def serve(page, desk, host, port, *more):
        tried.append(port)
        if len(tried) == 1:
            raise OSError("Cannot find empty port")  # it was free a moment ago
        return port

    monkeypatch.setattr("web.page.serve", serve)
    with socket.socket() as other:

        def open_slowly(models, name):
            other.bind(("127.0.0.1", app.FIRST_PORT))
            other.listen()
            return load(models, name)

        monkeypatch.setattr(Models, "open", open_slowly)
        _, thread, port = app.start(app.build_parser().parse_args(["--no-browser"]))
        thread.close()
    assert app.FIRST_PORT < port < app.FIRST_PORT + app.PORTS and tried == [port, port]


def test_a_server_that_never_begins_is_told(capsys, monkeypatch):
    def serve(*arguments):
        raise OSError("Cannot find empty port")

    monkeypatch.setattr("web.page.serve", serve)
    assert app.main(["--no-browser"]) == 2
    said = capsys.readouterr().err
    assert "the server did not begin to listen on 127.0.0.1, port " in said and said.count("\n") == 1


@pytest.mark.parametrize("others", [None, "example.org"])
def test_a_proxy_is_not_asked_for_the_page(monkeypatch, others):
    desk = make_desk()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody is
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if others:
        monkeypatch.setenv("NO_PROXY", others)
    with served(desk) as page:
        assert httpx.get(page.url, timeout=PATIENCE, trust_env=False).status_code == 200
    assert os.environ.get("NO_PROXY") == others and "no_proxy" not in os.environ
    desk.thread.close()


def test_the_readme_says_what_a_space_needs():
    front = yaml.safe_load((app.ROOT / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    pinned = (app.ROOT / "requirements.txt").read_text()
    assert front["sdk"] == "gradio" and (app.ROOT / front["app_file"]).samefile(app.__file__)
    assert f"gradio=={front['sdk_version']}\n" in pinned and front["sdk_version"] == gradio.__version__
    assert len(front["short_description"]) <= 60 and front["license"] == "apache-2.0"
