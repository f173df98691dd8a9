"""A running page, without a browser: answers over the wire, what strangers may not do, errors of app.py."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gradio
import httpx
import pytest
import yaml
from gradio_client import Client, handle_file
from huggingface_hub import constants
from PIL import Image

import app
from tests.pages import (
    CUP,
    EMBEDDED,
    EXAMPLE,
    NAME,
    WOLF,
    client_of,
    full,
    make_service,
    never_stopping,
    served,
)
from tests.waiting import PATIENCE, wait_for
from web import connections, guard
from web.errors import Refused
from web.guard import LEAST_BYTES, Uploads

pytestmark = pytest.mark.usefixtures("uploads")


@pytest.fixture(scope="module")
def page(uploads):
    service = make_service(any_model=True)
    with served(service) as page:
        yield page


def ask(client: Client, image: str, question: str, model: str = EMBEDDED) -> tuple:
    """What the page shows after a question: (texts of the chat, notice)."""
    message = {"text": question, "files": [handle_file(image)] if image else []}
    chat, _, notice, *_ = client.predict(message, model, api_name="/ask")
    return [part["text"] for message in chat for part in message["content"] if "text" in part], notice


def send(page, method: str, path: str, **more) -> httpx.Response:
    return httpx.request(method, page.url + path, timeout=PATIENCE, trust_env=False, **more)


def upload(page, name: str = "a.png", size: int = 1000) -> httpx.Response:
    files = {"files": (name, io.BytesIO(bytes(size)))}
    return send(page, "POST", "gradio_api/upload", files=files)


# ------------------------------------------------------------------------------------------------ answers
@pytest.mark.slow
def test_a_crowd_is_answered_each_its_own(page):
    crowd = (
        (EXAMPLE, "What colour is the star?", "blue"),
        (EXAMPLE, "What word do you see?", "tree"),
        (CUP, "What is the printed word?", "cup"),
        (WOLF, "What is the printed word?", "wolf"),
    )
    clients = [client_of(page) for _ in crowd]
    answers: dict[int, list] = {}

    def one(number):
        image, question, _ = crowd[number]
        # The second question is about the image of the first.
        answers[number] = [ask(clients[number], file, question)[0] for file in (image, "")]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(crowd))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (_, question, right) in enumerate(crowd):
        assert answers[number] == [[question, right], [question, right] * 2]


@pytest.mark.slow
def test_stop_retry_undo_and_clear_over_the_wire(page, monkeypatch):
    client = client_of(page)
    ask(client, EXAMPLE, "What colour is the star?")
    assert ask(client, EXAMPLE, "What word do you see?")[0][-1] == "tree"
    client.predict(api_name="/stop")
    chat, *_ = client.predict(EMBEDDED, api_name="/retry")
    assert len(chat) == 5 and chat[-1]["content"][0]["text"] == "tree"  # image and two questions
    chat, _, _, message = client.predict(api_name="/undo")
    assert len(chat) == 3 and message["value"] == {"text": "What word do you see?", "files": []}
    assert client.predict(api_name="/clear")[0] == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # nobody waits for a network
    texts, notice = ask(client, "", "Hello?", "nobody/nothing-here")
    assert texts == [] and "nobody/nothing-here" in notice and 'role="alert"' in notice


def look(page, *images: str, question="What colour is the star?", method="attention", client=None):
    """An attribution that was asked for."""
    message = {"text": question, "files": [handle_file(image) for image in images]}
    client = client or client_of(page)
    return client.submit(message, method, Path(page.service.models.default).name, api_name="/look")


def test_an_attribution_can_be_stopped(page):
    with full(page.service):
        client = client_of(page)
        looking = look(page, EXAMPLE, client=client)
        assert wait_for(lambda: any(v.busy.locked() for v in list(page.service._visitors.values())))
        client.predict(api_name="/stop_looking")
    _, sheet, notice, _ = looking.result(PATIENCE)
    assert "Stopped" in notice and sheet is None


# -------------------------------------------------------------------------------------------- strangers
@pytest.mark.slow
def test_what_the_server_refuses(page, tmp_path):
    """Too large an upload, too large a body, URLs and server paths as images; and the page goes on."""
    assert upload(page, size=page.service.limits.image.max_bytes + 1).status_code == 413
    assert upload(page, size=page.service.limits.image.max_bytes + 2**20).status_code == 413
    join = "gradio_api/queue/join"
    assert send(page, "POST", join, content=b"[" * 2**21).status_code == 413
    assert send(page, "POST", join, content=iter([b"[" * 99])).status_code == 411  # of unknown length
    for garbage in (b"\xde\xad", b"[" * 99_999, b"{"):
        assert send(page, "POST", join, content=garbage).status_code == 400
    secret = tmp_path / "secret.png"
    Image.new("RGB", (9, 9)).save(secret)
    folder = os.environ["GRADIO_TEMP_DIR"]
    for path in ("http://example.org/x.png", "file:///etc/passwd", str(secret), folder, "../../secret.png"):
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        body = {"data": [{"text": "Hm?", "files": [file]}, EMBEDDED], "fn_index": 0, "session_hash": "s"}
        for route in (join, "gradio_api/call/ask"):
            assert send(page, "POST", route, json=body).status_code == 400
    assert ask(client_of(page), EXAMPLE, "What colour is the star?")[0][-1] == "blue"


def test_an_upload_without_a_file_is_a_sentence(page):
    """A field of the form that is text has no name; and a file may have an empty one."""
    form = 'Content-Disposition: form-data; name="files"'
    for head, status in ((form, 400), (f'{form}; filename=""', 200), (f'{form}; filename="a.png"', 200)):
        body = f"--x\r\n{head}\r\n\r\nabc\r\n--x--\r\n".encode()
        kind = {"content-type": "multipart/form-data; boundary=x"}
        answer = send(page, "POST", "gradio_api/upload", content=body, headers=kind)
        assert answer.status_code == status
        assert status == 200 or answer.json()["detail"]


def test_nobody_learns_where_this_repository_lies(page):
    for path in ("", "config", "gradio_api/info"):
        said = send(page, "GET", path).text
        assert str(app.ROOT) not in said and Path(EMBEDDED).name in said


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "gradio_api/file=http://example.org/x.png"),
        ("HEAD", "gradio_api/file=http%3A//example.org/x.png"),
        ("GET", "gradio_api/file=app.py"),
        ("GET", "gradio_api/file=/etc/passwd"),
        ("GET", "gradio_api/proxy=https://example.hf.space/x"),
        ("POST", "gradio_api/component_server"),
        ("POST", "gradio_api/vibe-edit"),
        ("GET", "monitoring"),
    ],
)
def test_the_server_fetches_and_reads_nothing_for_strangers(page, monkeypatch, method, path):
    looked_up, look_up = [], socket.getaddrinfo

    def watched(host, *rest, **more):
        looked_up.append(host)
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", watched)
    assert send(page, method, path).status_code in (403, 404)
    assert set(looked_up) <= {"127.0.0.1"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:7860"}, 200),
        ({"Host": "[::1]:7860"}, 200),  # nobody can point a number elsewhere
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "localhost:7860", "Origin": "http://localhost:7860"}, 200),
        ({"Host": "localhost:7860", "Origin": "http://localhost:3000"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),  # a link that is followed
        ({"Host": NAME, "Origin": f"https://{NAME}"}, 200),  # the name it was given
        ({"Host": "127.0.0.1:7860", "Origin": f"https://{NAME}"}, 200),  # a proxy that says its own
    ],
)
def test_only_its_own_pages_ask_it_and_only_by_its_names(page, headers, status):
    got = send(page, "GET", "config", headers=headers)
    assert got.status_code == status
    preflight = send(page, "OPTIONS", "config", headers={"Access-Control-Request-Method": "POST"} | headers)
    foreign = status == 403
    assert foreign == (preflight.status_code == 403)
    assert not (foreign and "access-control-allow-origin" in {**got.headers, **preflight.headers})


@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize("route", ["queue/join", "upload"])
def test_a_body_that_does_not_come_or_byte_by_byte_is_not_waited_for(page, monkeypatch, route, drips):
    monkeypatch.setattr(*((guard, "BODY_SECONDS", 0.5) if drips else (connections, "HEAD_SECONDS", 0.2)))
    form, begin = "application/json", "{"
    if route == "upload":
        form = "multipart/form-data; boundary=a"
        begin = '--a\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    head = f"POST /gradio_api/{route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(page.url).port), timeout=PATIENCE) as one:
        one.sendall(f"{head}Content-Type: {form}\r\n\r\n{begin}".encode())
        one.settimeout(0.1 if drips else PATIENCE)
        for _ in range(50):
            with suppress(TimeoutError, ConnectionResetError):
                assert b" 408 " in one.recv(2**16) if drips else one.recv(2**16) == b""
                return
            one.sendall(b"-")
    pytest.fail("it was waited for")


def test_invented_sessions_do_not_displace_an_open_page(page, monkeypatch):
    monkeypatch.setattr(page.service, "limits", replace(page.service.limits, max_visitors=5))
    client = client_of(page)
    assert ask(client, EXAMPLE, "What colour is the star?")[0][-1] == "blue"
    assert wait_for(lambda: client.session_hash in page.service._open)
    with httpx.Client(base_url=page.url, timeout=PATIENCE) as stranger:
        for number in range(9):
            body = {"data": [], "session_hash": f"invented{number}"}
            assert stranger.post("gradio_api/run/stop", json=body).status_code == 200
    texts, _ = ask(client, "", "What word do you see?")
    assert texts[-1] == "tree" and "What colour is the star?" in texts
    assert len(page.service._visitors) <= 5 + len(page.service._open)


def test_uploads_stay_within_their_bounds_and_the_page_keeps_its_own(page, tmp_path):
    own = tmp_path / "own.png"
    own.write_bytes(bytes(500))
    uploads, files = Uploads(tmp_path, most_bytes=4 * LEAST_BYTES), []
    for number, size in enumerate((2 * LEAST_BYTES, 1, 1, 1, 1, 1)):
        files.append(tmp_path / str(number) / "image.png")
        files[-1].parent.mkdir()
        files[-1].write_bytes(bytes(size))
        time.sleep(0.01)  # the clock of files is coarse
        if number == 4:
            os.utime(files[2])
        uploads.make_room()
    assert [file.exists() for file in files] == [False, False, True, True, True, True] and own.exists()
    assert not files[0].parent.exists()
    with uploads.room.taken(3 * LEAST_BYTES), pytest.raises(Refused), uploads.room.taken(LEAST_BYTES + 1):
        pass
    assert uploads.holds(str(files[2])) and uploads.holds(str(files[0]))  # it was there
    outside = (str(tmp_path), str(files[2].parent), "/etc/passwd", f"{tmp_path}/../x", "http://a/b", "a\0b")
    assert not any(map(uploads.holds, outside))


# ----------------------------------------------------------------------------------------------- goodbyes
def begin_answer(page, session: str) -> None:
    """A question whose answer takes 200 seconds is asked."""
    asks = (one for one in send(page, "GET", "config").json()["dependencies"] if one["api_name"] == "ask")
    file = upload(page, "cup.png").json()[0]
    Path(file).write_bytes(Path(CUP).read_bytes())
    message = {"text": "What is it?", "files": [{"path": file, "meta": {"_type": "gradio.FileData"}}]}
    data = [message, Path(page.service.models.default).name, 1, 0, 1, 0, 0, 1000, -1, *[False] * 3]
    body = {"data": data, "fn_index": next(asks)["id"], "session_hash": session}
    assert send(page, "POST", "gradio_api/queue/join", json=body).status_code == 200


def answer_of(page, session: str):
    """The lines of a stream that show an answer."""
    url = f"{page.url}gradio_api/queue/data?session_hash={session}"
    with httpx.stream("GET", url, timeout=PATIENCE) as stream:
        for line in stream.iter_lines():
            if "process_generating" in line and len(json.loads(line[5:])["output"]["data"]) > 0:
                yield line


@pytest.mark.slow
def test_who_goes_away_stops_the_answer_and_the_end_does_not_wait(tmp_path):
    """A client that breaks off in the middle of an answer, as a closed tab does, leaves no memory. While
    another one's is streamed the server ends all the same, and with it the stream."""
    slow = make_service(never_stopping(tmp_path / "model"), slow=True)
    began, ended = threading.Event(), threading.Event()

    def follow() -> None:
        with suppress(httpx.TransportError):
            for _ in answer_of(page, "long"):
                began.set()
        ended.set()

    with served(slow) as page:
        alive = httpx.Client(timeout=PATIENCE)
        with alive.stream("GET", f"{page.url}gradio_api/heartbeat/gone") as heartbeat:
            beats = heartbeat.iter_lines()  # kept, as its end would close the connection
            next(beats)
            begin_answer(page, "gone")
            for _ in answer_of(page, "gone"):
                visitor = slow.visitor("gone")
                if visitor.log and visitor.log[-1].answers[0]:
                    exchange = visitor.log[-1]
                    break
        alive.close()
        assert wait_for(lambda: exchange.stop_reasons) and exchange.stop_reasons == ["stopped"]
        assert wait_for(
            lambda: slow.engine.stats.running == 0 and not slow._visitors and not visitor.busy.locked()
        )
        begin_answer(page, "long")
        threading.Thread(target=follow, daemon=True).start()
        assert began.wait(PATIENCE)
    assert not page.thread.is_alive() and ended.wait(PATIENCE)


# ------------------------------------------------------------------------------------------ command line
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "70000"], "--port"),
        (["--host", "203.0.113.9", "--port", "7999"], "203.0.113.9"),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_a_start_that_fails_is_one_sentence(capsys, monkeypatch, arguments, expected):
    monkeypatch.delenv("GRADIO_SERVER_PORT", raising=False)
    assert app.main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("app.py: error: ") and expected in printed and printed.count("\n") == 1


def test_a_port_in_use_is_an_error_and_another_one_is_found(page, capsys):
    port = int(page.url.rstrip("/").rsplit(":", 1)[1])
    assert app.main(["--port", str(port)]) == 2
    assert str(port) in capsys.readouterr().err
    with app.listen("127.0.0.1", port, port + app.PORTS) as listening:
        assert port < listening.getsockname()[1] < port + app.PORTS


def test_the_readme_says_what_a_space_needs():
    front = yaml.safe_load((app.ROOT / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    pinned = (app.ROOT / "requirements.txt").read_text()
    assert front["sdk"] == "gradio" and (app.ROOT / front["app_file"]).samefile(app.__file__)
    assert f"gradio=={front['sdk_version']}\n" in pinned and front["sdk_version"] == gradio.__version__
    assert len(front["short_description"]) <= 60 and front["license"] == "apache-2.0"
