"""The web page as a client sees it, without a browser: answers, refusals, goodbyes; app.py's mistakes."""

from __future__ import annotations

import io
import json
import os
import socket
import threading

import gradio
import httpx
import pytest
import yaml
from gradio_client import Client, handle_file
from huggingface_hub import constants
from PIL import Image

import app
from tests.pages import EMBEDDED, client_of, make_desk, never_stopping, served
from tests.waiting import PATIENCE, free_port, wait_for
from web.models import Models

ASSETS = app.ROOT / "assets"
EXAMPLE, CUP, WOLF = (str(ASSETS / f"{name}.png") for name in ("example", "cup", "wolf"))
# Who asks at the same time, and what each must be told.
CROWD = (
    (EXAMPLE, "What colour is the star?", "blue"),
    (EXAMPLE, "What word do you see?", "tree"),
    (CUP, "What is the printed word?", "cup"),
    (WOLF, "What is the printed word?", "wolf"),
)


@pytest.fixture(scope="module", autouse=True)
def uploads(tmp_path_factory):
    """Where all pages of this module put what is uploaded: Gradio knows one place in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        yield


@pytest.fixture(scope="module")
def slow_desk(tmp_path_factory):
    desk = make_desk(never_stopping(tmp_path_factory.mktemp("babbling") / "model"), slow=True)
    yield desk
    desk.thread.close()


@pytest.fixture(scope="module")
def page(uploads):
    desk = make_desk(any_model=True)
    with served(desk) as page:
        yield page
    desk.thread.close()


def ask(client: Client, picture: str, question: str) -> tuple:
    """What the page shows after a question: (texts of the chat, notice)."""
    pictures = [{"image": handle_file(picture), "caption": None}] if picture else []
    chat, _, notice, *_ = client.predict(pictures, question, EMBEDDED, api_name="/ask")
    return [part["text"] for message in chat for part in message["content"] if "text" in part], notice


def test_a_crowd_is_answered_each_its_own(page):
    clients = [client_of(page) for _ in CROWD]
    answers: dict[int, list] = {}

    def one(number):
        picture, question, _ = CROWD[number]
        answers[number] = [ask(clients[number], picture, question)[0] for _ in range(3)]

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
    assert len(chat) == 3  # picture, question, answer
    assert client.predict(api_name="/clear")[0] == []


def test_what_the_server_refuses(page, tmp_path):
    """Too large an upload, too large a body, URLs and server paths as pictures; and the page goes on."""
    url = page.url + "gradio_api/"
    upload = httpx.post(
        url + "upload", files={"files": ("big.png", io.BytesIO(bytes(60 * 2**20)))}, timeout=PATIENCE
    )
    assert upload.status_code == 413 and "maximum allowed size" in upload.text
    flood = httpx.post(
        url + "upload", files={"files": ("all.png", io.BytesIO(bytes(90 * 2**20)))}, timeout=PATIENCE
    )
    assert flood.status_code == 413 and "expected at most" in flood.json()["detail"]
    body = httpx.post(url + "queue/join", content=b"[" * 2**21, timeout=PATIENCE)
    assert body.status_code == 413
    for garbage in (b"\xde\xad", b"[" * 99_999, b"{"):
        answer = httpx.post(url + "queue/join", content=garbage, timeout=PATIENCE)
        assert answer.status_code == 400 and "expected JSON" in answer.json()["detail"]
    for path in ("http://example.org/x.png", "HTTPS://example.org/x.png", "file:///etc/passwd"):
        data = [[{"image": {"path": path, "meta": {"_type": "gradio.FileData"}}, "caption": None}], "Hm?"]
        answer = httpx.post(
            url + "queue/join", json={"data": data, "fn_index": 0, "session_hash": "s"}, timeout=PATIENCE
        )
        assert answer.status_code == 400 and "uploaded here" in answer.json()["detail"]
    secret = tmp_path / "secret.png"
    Image.new("RGB", (9, 9)).save(secret)
    for path in (str(secret), os.environ["GRADIO_TEMP_DIR"], "../../secret.png"):
        data = {"data": [[{"image": {"path": path}, "caption": None}], "What is it?", EMBEDDED]}
        answer = httpx.post(url + "call/ask", json=data, timeout=PATIENCE)
        assert answer.status_code == 400 and "uploaded here" in answer.json()["detail"]
    assert ask(client_of(page), EXAMPLE, "What colour is the star?")[0][-1] == "blue"


def test_a_model_that_does_not_exist_is_told(page, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # nobody waits for a network
    client = client_of(page)
    chat, _, notice, *_ = client.predict([], "Hello?", "nobody/nothing-here", api_name="/ask")
    assert "nobody/nothing-here" in notice and 'role="alert"' in notice and chat == []
    assert ask(client, EXAMPLE, "What colour is the star?")[0][-1] == "blue"


def test_who_goes_away_stops_the_answer_and_leaves_no_memory(slow_desk):
    """A client that breaks off in the middle of an answer, as a closed tab does."""
    with served(slow_desk) as page:
        name, session = slow_desk.models.default, "gone"
        url = page.url + "gradio_api/"
        data = [[], "What is it?", name, 1, 0, 1, 0, 0, 1000, -1, False]
        alive = httpx.Client(timeout=PATIENCE)
        with alive.stream("GET", url + f"heartbeat/{session}") as heartbeat:
            beats = heartbeat.iter_lines()
            next(beats)
            function = next(
                one["id"]
                for one in alive.get(page.url + "config").json()["dependencies"]
                if one["api_name"] == "ask"
            )
            body = {"data": data, "fn_index": function, "session_hash": session}
            assert alive.post(url + "queue/join", json=body).status_code == 200
            with httpx.stream("GET", url + f"queue/data?session_hash={session}", timeout=PATIENCE) as stream:
                for line in stream.iter_lines():
                    if "process_generating" in line and len(json.loads(line[5:])["output"]["data"]) > 0:
                        visitor = slow_desk.visitors.get(session)
                        task = visitor.task
                        if task is not None and visitor.log and visitor.log[-1].answers[0]:
                            exchange = visitor.log[-1]
                            break
        alive.close()
        assert wait_for(lambda: task.ended and exchange.ended)
        assert exchange.ended == ["stopped"]  # an answer of 1000 tokens ends by itself, after 200 seconds
        assert wait_for(lambda: slow_desk.visitors.kept_bytes == 0 and len(slow_desk.visitors) == 0)


# ------------------------------------------------------------------------------------------ command line
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "70000"], "--port: expected 1 to 65535, got 70000"),
        (["--host", "203.0.113.9", "--port", "7999"], "cannot listen on 203.0.113.9"),
        (["--model", "no/such/folder"], "there is no folder no/such/folder"),
        (["--device", "tpu"], "device: expected auto"),
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
