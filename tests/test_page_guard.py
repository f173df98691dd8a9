"""What a running page lets in, keeps and lets go, as strangers meet it."""

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

import httpx
import pytest
from PIL import Image

from tests.pages import EMBEDDED, NAME, client_of, make_desk, never_stopping, served
from tests.test_page_server import EXAMPLE, ask
from tests.waiting import PATIENCE, wait_for
from web.uploads import KEEP, TooMuchError, Uploads

pytestmark = pytest.mark.usefixtures("uploads")


@pytest.fixture(scope="module")
def slow_desk(tmp_path_factory):
    desk = make_desk(never_stopping(tmp_path_factory.mktemp("babbling") / "model"), slow=True)
    yield desk
    desk.thread.close()


@pytest.fixture(scope="module")
def page(uploads):
    desk = make_desk()
    desk.limits = replace(desk.limits, max_uploaded_files=5)
    with served(desk) as page:
        yield page
    desk.thread.close()


def send(page, method: str, path: str, **more) -> httpx.Response:
    return httpx.request(method, page.url + path, timeout=PATIENCE, trust_env=False, **more)


def upload(page, name: str = "a.png", size: int = 1000) -> httpx.Response:
    files = {"files": (name, io.BytesIO(os.urandom(size)))}
    return send(page, "POST", "gradio_api/upload", files=files)


def test_what_the_server_refuses(page, tmp_path):
    """Too large an upload, too large a body, URLs and server paths as images; and the page goes on."""
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


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "gradio_api/file=http://example.org/x.png"),
        ("GET", "gradio_api/file=https://example.org/x.png"),
        ("HEAD", "gradio_api/file=http%3A//example.org/x.png"),
        ("GET", "gradio_api/file/http://example.org/x.png"),
        ("GET", "gradio_api/file=app.py"),
        ("GET", "gradio_api/file=/etc/passwd"),
        ("GET", "gradio_api/proxy=https://example.hf.space/x"),
        ("GET", "gradio_api/deep_link?session_hash=x"),
        ("GET", "gradio_api/stream/x/y/1/playlist-file"),
        ("GET", "gradio_api/custom_component/x/client/y/z"),
        ("POST", "gradio_api/component_server"),
        ("POST", "gradio_api/process_recording"),
        ("POST", "gradio_api/vibe-edit"),
        ("GET", "gradio_api/vibe-code"),
        ("GET", "gradio_api/dev/reload"),
        ("GET", "monitoring"),
        ("GET", "pwa_icon"),
        ("GET", "docs"),
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
        ({"Host": "[::1]:7860"}, 200),
        ({"Host": "192.0.2.7"}, 200),  # nobody can point a number elsewhere
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:7860"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:7860", "Origin": "http://localhost:7860"}, 200),
        ({"Host": "localhost:7860", "Origin": "http://localhost:3000"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),  # a link that is followed
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        ({"Host": NAME, "Origin": f"https://{NAME}"}, 200),  # the name it was given
        ({"Host": "127.0.0.1:7860", "Origin": f"https://{NAME}"}, 200),  # a proxy that says its own
    ],
)
def test_only_its_own_pages_ask_it_and_only_by_its_names(page, headers, status):
    got = send(page, "GET", "config", headers=headers)
    assert got.status_code == status
    asking = {"Access-Control-Request-Method": "POST"} | headers
    preflight = send(page, "OPTIONS", "config", headers=asking)
    foreign = status == 403
    assert foreign == (preflight.status_code == 403)
    told = {**got.headers, **preflight.headers}
    assert not (foreign and "access-control-allow-origin" in told)


def test_invented_sessions_do_not_displace_an_open_page(page):
    client = client_of(page)
    assert ask(client, EXAMPLE, "What colour is the star?")[0][-1] == "blue"
    assert wait_for(lambda: client.session_hash in page.desk.visitors._open)
    with httpx.Client(base_url=page.url, timeout=PATIENCE) as stranger:
        for number in range(110):
            body = {"data": [], "session_hash": f"invented{number}"}
            assert stranger.post("gradio_api/run/stop", json=body).status_code == 200
    texts, _ = ask(client, EXAMPLE, "What word do you see?")
    assert texts[-1] == "tree" and "What colour is the star?" in texts
    assert len(page.desk.visitors) <= 100 + len(page.desk.visitors._open)


def test_uploads_stay_within_their_number_and_the_page_keeps_its_own(page):
    shown = [part["image"]["url"] for part in images_shown(page)]
    for number in range(12):
        assert (last := upload(page, f"{number}.png")).status_code == 200
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    latest = {str(number) for number in range(7, 12)}
    assert wait_for(lambda: {path.stem for path in folder.rglob("[0-9]*.png")} <= latest)
    assert Path(last.json()[0]).exists()
    for url in shown:
        assert send(page, "GET", url.removeprefix(page.url).lstrip("/")).status_code == 200


def images_shown(page) -> list[dict]:
    """What a page shows before anybody did anything."""
    components = send(page, "GET", "config").json()["components"]
    (gallery,) = (one for one in components if one["props"].get("elem_id") == "pictures")
    return gallery["props"]["value"]


def test_who_holds_most_loses_the_oldest_and_what_is_old_goes(tmp_path, monkeypatch):
    own = tmp_path / "own.png"
    own.write_bytes(bytes(500))
    uploads = Uploads(tmp_path, most_bytes=1000, most_files=100)

    def arrive(name: str, size: int, owner: str) -> Path:
        path = tmp_path / name / "picture.png"
        path.parent.mkdir()
        path.write_bytes(bytes(size))
        uploads.uploaded([str(path)], owner)
        uploads.make_room()
        time.sleep(0.01)  # the clock of files is coarse
        return path

    guest = arrive("guest", 300, "a")
    flood = [arrive(f"flood{number}", 200, "b") for number in range(20)]
    assert guest.exists() and own.exists() and [path.exists() for path in flood[-3:]] == [True] * 3
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.png")) <= 1500
    assert not flood[0].parent.exists()
    with uploads.coming(900), pytest.raises(TooMuchError), uploads.coming(101):
        pass
    assert uploads.holds(str(guest)) and uploads.holds(str(flood[0]))  # it was there
    outside = (str(tmp_path), str(guest.parent), "/etc/passwd", f"{tmp_path}/../x", "http://a/b", "a\0b")
    assert not any(map(uploads.holds, outside))
    later = time.time() + 2 * KEEP
    monkeypatch.setattr(time, "time", lambda: later)
    uploads.make_room()
    assert list(tmp_path.rglob("*.png")) == [own]


def begin_answer(page, session: str) -> None:
    """A question whose answer takes 200 seconds is asked."""
    asks = (one for one in send(page, "GET", "config").json()["dependencies"] if one["api_name"] == "ask")
    data = [images_shown(page), "What is it?", page.desk.models.default, 1, 0, 1, 0, 0, 1000, -1, False]
    body = {"data": data, "fn_index": next(asks)["id"], "session_hash": session}
    assert send(page, "POST", "gradio_api/queue/join", json=body).status_code == 200


def answer_of(page, session: str):
    """The lines of a stream that show an answer."""
    url = f"{page.url}gradio_api/queue/data?session_hash={session}"
    with httpx.stream("GET", url, timeout=PATIENCE) as stream:
        for line in stream.iter_lines():
            if "process_generating" in line and len(json.loads(line[5:])["output"]["data"]) > 0:
                yield line


def test_who_goes_away_stops_the_answer_and_leaves_no_memory(slow_desk):
    """A client that breaks off in the middle of an answer, as a closed tab does."""
    with served(slow_desk) as page:
        alive = httpx.Client(timeout=PATIENCE)
        with alive.stream("GET", f"{page.url}gradio_api/heartbeat/gone") as heartbeat:
            beats = heartbeat.iter_lines()
            next(beats)
            begin_answer(page, "gone")
            for _ in answer_of(page, "gone"):
                visitor = slow_desk.visitors.get("gone")
                task = visitor.task
                if task is not None and visitor.log and visitor.log[-1].answers[0]:
                    exchange = visitor.log[-1]
                    break
        alive.close()
        assert wait_for(lambda: task.ended and exchange.ended)
        assert exchange.ended == ["stopped"]
        assert wait_for(lambda: slow_desk.visitors.kept_bytes == 0 and len(slow_desk.visitors) == 0)


def test_the_end_does_not_wait_for_long_answers(slow_desk):
    """While an answer is being streamed the server ends all the same, and with it the stream."""
    began, ended = threading.Event(), threading.Event()

    def follow(page) -> None:
        with suppress(httpx.TransportError):
            for _ in answer_of(page, "long"):
                began.set()
        ended.set()

    with served(slow_desk) as page:
        begin_answer(page, "long")
        threading.Thread(target=follow, args=[page], daemon=True).start()
        assert began.wait(PATIENCE)
    assert not page.server.thread.is_alive() and ended.wait(PATIENCE)
