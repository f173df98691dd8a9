"""Images by URL: from the public internet only, however the address is spelt and wherever it redirects."""

from __future__ import annotations

import io
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data import fetch
from data.errors import ImageError
from data.fetch import is_public
from data.images import ImageLimits, load_image
from tests.processors import draw_image

PRIVATE = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1",
    "ff02::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:0a00:0001", "::127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b:1::a00:1", "2002:7f00:1::", "2001:db8::1",
    "192.0.0.9", "192.0.0.170", "192.88.99.1", "198.51.100.1", "203.0.113.1", "0.1.2.3",
    "::ffff:0:7f00:1", "::ffff:0:808:808", "5f00::1", "2001::808:808", "2001:20::1", "3fff::1", "100::1",
    "4000::1", "fe00::1", "::ffff:192.88.99.1",
]  # fmt: skip
PUBLIC = [
    "93.184.216.34",
    "8.8.8.8",
    "2606:2800:220:1:248:1893:25c8:1946",
    "::ffff:8.8.8.8",
    "2001:200::1",
    "2001:4860:4860::8888",
    "192.0.1.1",
]


def test_which_addresses_are_public():
    assert [address for address in (*PRIVATE, *PUBLIC) if is_public(address)] == PUBLIC


@pytest.fixture(scope="module")
def server():
    file = io.BytesIO()
    draw_image(7, 5).save(file, "PNG")
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Host"]))
            if self.path.endswith("/owned"):
                self.wfile.write(b"HTTP/1.1 500 \x1b]0;owned\x07\x1b[2J\r\n\r\n")
                return
            if self.path.endswith("/drip"):  # a header without an end, a byte at a time
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
                with suppress(OSError):
                    while not closing.wait(0.02):
                        self.wfile.write(b"x")
                return
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
                return
            self.send_response(404 if self.path == "/none.png" else 200)
            if self.path == "/cut.png":
                self.send_header("Content-Length", str(len(file.getvalue()) + 100))
            self.end_headers()
            if self.path == "/drip.png":
                with suppress(OSError):
                    while not closing.wait(0.02):
                        self.wfile.write(b"x")
            images = ("/a.png", "/cut.png", "/caf%C3%A9%20b.png")
            self.wfile.write(file.getvalue() if self.path in images else b"x" * 10_000_000)

        def log_message(self, *args):
            pass

    asked: list[tuple[str, str]] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.asked = asked
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        closing.set()
        server.shutdown()


@pytest.fixture
def names(server, monkeypatch):
    """A name server of our own: answers by name, each given once and the last one from then on. Public
    addresses lead to the loopback server."""
    for variable in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv(fetch.ALLOW, raising=False)
    server.asked.clear()
    answers: dict[str, list[list[str]]] = {}
    real_resolve, real_connect = socket.getaddrinfo, socket.socket.connect
    connected: list[str] = []

    def resolve(host, port, *args, **options):
        if host not in answers:
            return real_resolve(host, port, *args, **options)
        found = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    def connect(self, place):
        connected.append(place[0])
        if place[0].startswith("8.8.4."):
            raise TimeoutError("timed out")  # nobody answers there
        return real_connect(self, server.server_address if place[0] in PUBLIC else place)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket.socket, "connect", connect)
    answers["connected"] = connected
    return answers


def refused(url: str, match: str, max_bytes: int = 10**6) -> None:
    with pytest.raises(ImageError, match=match) as error:
        load_image(url, ImageLimits(max_bytes=max_bytes))
    assert str(error.value).isprintable()


def test_a_public_host_is_asked_at_the_address_that_was_checked(names, server):
    names["pictures.example"] = [["8.8.8.8"]]
    assert load_image("http://pictures.example/a.png").size == (7, 5)
    assert names["connected"] == ["8.8.8.8"]
    assert server.asked == [("/a.png", "pictures.example")]


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0177.0.0.1", "127.1", "[::ffff:127.0.0.1]", "0",
     "user:password@127.0.0.1", "%31%32%37.0.0.1", "１２７.0.0.1"],
)  # fmt: skip
def test_hosts_that_are_private_in_any_spelling(names, server, host, monkeypatch):
    """None of them is connected to; some are no host at all to this machine's resolver."""
    for url in (f"http://{host}:{server.server_port}/a.png", f"https://{host}/a.png"):
        refused(url, r"OCELLI_ALLOW_PRIVATE_URLS=1|download failed")
    assert not names["connected"] and not server.asked
    if host == "127.0.0.1":  # which may be allowed
        monkeypatch.setenv(fetch.ALLOW, "1")
        assert load_image(f"http://{host}:{server.server_port}/a.png").size == (7, 5)


def test_one_private_address_of_several_is_enough(names, server):
    names["mixed.example"] = [["8.8.8.8", "10.0.0.1"]]
    refused("http://mixed.example/a.png", r"mixed\.example is 10\.0\.0\.1")
    assert not names["connected"]


def test_a_redirect_to_a_private_address(names, server):
    names["public.example"] = [["8.8.8.8"]]
    names["inside.example"] = [["192.168.1.1"]]
    for target in (f"http://127.0.0.1:{server.server_port}/a.png", "http://inside.example/", "//[::1]/"):
        refused(f"http://public.example/to/{target}", "not on the public internet")
    assert set(names["connected"]) == {"8.8.8.8"}
    assert load_image("http://public.example/to//a.png").size == (7, 5)  # a harmless one


def test_a_name_that_changes_its_address(names, server):
    """Resolved once, connected to what was resolved: the second answer is never asked for."""
    names["rebinding.example"] = [["8.8.8.8"], ["127.0.0.1"]]
    assert load_image("http://rebinding.example/a.png").size == (7, 5)
    assert names["connected"] == ["8.8.8.8"]


def test_behind_a_proxy(names, server, monkeypatch):
    """The proxy may be private. It is not asked for what this machine knows to be private."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    names["inside.example"] = [["10.0.0.1"]]
    names["public.example"] = [["8.8.8.8"]]
    refused("http://public.example/big", "at most 20 bytes", max_bytes=20)
    assert server.asked == [("http://public.example/big", "public.example")]
    refused("http://inside.example/a.png", r"inside\.example is 10\.0\.0\.1")
    assert len(server.asked) == 1
    monkeypatch.setattr(fetch, "TIMEOUT", 0.3)
    refused("http://public.example/drip", "within 0.6 s, got 0 bytes")


def test_size_and_time(names, monkeypatch):
    """Also where the server sends something all the time: header or body, neither with an end."""
    names["public.example"] = [["8.8.8.8"]]
    refused("http://public.example/big", "at most 1,000,000 bytes")
    monkeypatch.setattr(fetch, "TIMEOUT", 0.3)
    refused("http://public.example/drip.png", r"within 0\.6 s")
    refused("http://public.example/drip", "within 0.6 s, got 0 bytes")


def test_of_many_silent_addresses_a_few_are_tried(names):
    names["silent.example"] = [[f"8.8.4.{number}" for number in range(1, 11)]]
    refused("http://silent.example/a.png", "download failed")
    assert names["connected"] == [f"8.8.4.{number}" for number in range(1, fetch.MOST_ADDRESSES + 1)]


@pytest.mark.slow
def test_answers_that_are_no_image(names):
    names["public.example"] = [["8.8.8.8"]]
    assert load_image("http://public.example/café b.png").size == (7, 5)
    answers = {
        "none.png": "404",
        "owned": r"500 \\x1b\]0;owned\\x07",
        "cut.png": "download failed",
        "to/ftp://x/a.png": "failed",
        "to/file:///etc/passwd": "failed",
        "to//to//to//to//to//to//to//": "redirect",
        "to/http://[bad/": "failed",
    }
    for path, match in answers.items():
        refused(f"http://public.example/{path}", match)
    refused("http://[bad/a.png", "download failed")
