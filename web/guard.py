"""In front of the page's server: what comes from another page, is too large, or would have Gradio fetch or
read something ends here, and browsers are told to load from here alone.

Gradio has more routes than this page uses. Some fetch URLs for whoever asks (`file=http…`, after a look-up at
a public name server), read or write files, or run what components offer: only those that the page needs pass.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from web.uploads import TooMuchError, Uploads
from web.visitors import TooManyError

API = "gradio_api"
# First parts of paths, below the root and below Gradio's API.
PAGE_ROUTES = frozenset(
    ("", "config", "theme.css", "static", "assets", "svelte", "favicon.ico", "robots.txt", "manifest.json")
)
API_ROUTES = frozenset((
    "info", "app_id", "startup-events", "heartbeat", "queue", "cancel", "reset", "upload", "upload_progress",
    "run", "api", "call", "theme.css", "login_check", "user", "token",
))  # fmt: skip
FILE = "file="
MAX_BODY = 2**20  # bytes of a request that uploads nothing
# Scripts and styles stand in Gradio's page itself; images that are being uploaded are blobs.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "connect-src 'self' data: blob:",
        "object-src 'none'",
        "base-uri 'self'",
    )
)


class Refused(Exception):
    """A request that ends here; the message is one sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class Hosts:
    """The names that a page has.

    A name that is not known may be one whose owner has just pointed it at this machine (DNS rebinding), and
    then the owner's page counts as this one. An address in numbers is nobody's to point.

    Args:
        bound: what the server listens on.
        allowed: names that it has besides, such as a proxy's; pages of these may ask, too.
    """

    def __init__(self, bound: str, allowed: Iterable[str] = ()):
        self.allowed = {name.lower() for name in allowed}
        own = socket.gethostname().lower()
        self._names = {"localhost", bound.lower(), own, f"{own}.local"}

    def check(self, headers: Headers) -> None:
        """Raises Refused: a request to another name, or from another site's page."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        name = _name(host)
        if name not in self._names | self.allowed and not _is_address(name):
            raise Refused(403, f"{name[:100]!r} is no name of this page: give it one by --allowed-host")
        if origin is None:
            foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            foreign = foreign and headers.get("sec-fetch-mode") != "navigate"
        else:
            place = urlsplit(origin.lower()).netloc
            foreign = place != host and _name(place) not in self.allowed
        if foreign:
            raise Refused(403, "pages of other sites may not ask this one: open it itself")


def _name(place: str) -> str:
    """A host without its port."""
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """ASGI middleware.

    Args:
        hosts: what the page is called.
        uploads: where files of visitors lie.
        connected: a context for each page that is open, by its session.
        max_upload: bytes of a request that uploads images, all of them together.
        max_body: of every other one.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Hosts,
        uploads: Uploads,
        connected: Callable[[str], AbstractContextManager],
        max_upload: int,
        max_body: int = MAX_BODY,
    ):
        self.app, self.hosts, self.uploads, self.connected = app, hosts, uploads, connected
        self.max_upload, self.max_body = max_upload, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # no web socket is needed here
        begun, counted = False, _Counted(receive)

        async def guarded(message: Message) -> None:
            nonlocal begun
            if counted.refusal is not None:
                return  # the server's own words about what it could not read
            begun = True
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("content-security-policy", POLICY)
            await send(message)

        try:
            await self._pass(scope, counted, guarded)
        except Refused as error:
            counted.refusal = error
        if counted.refusal is not None and not begun:
            answer = JSONResponse({"detail": str(counted.refusal)}, counted.refusal.status)
            await answer(scope, receive, send)

    async def _pass(self, scope: Scope, receive: _Counted, send: Send) -> None:
        headers = Headers(scope=scope)
        self.hosts.check(headers)
        route, rest = _route(scope)
        limit = receive.limit = self.max_upload if route == "upload" else self.max_body
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise _too_large(limit)
        if route == "upload":
            await self._upload(scope, receive, send, int(length) or limit)
        elif route == "heartbeat":
            try:
                with self.connected(rest):
                    await self.app(scope, receive, send)
            except TooManyError:
                raise Refused(503, "too many pages are open here just now: try again in a moment") from None
        else:
            await self.app(
                scope, await self._checked(receive) if scope["method"] == "POST" else receive, send
            )

    async def _upload(self, scope: Scope, receive: Receive, send: Send, size: int) -> None:
        """Take an upload, if there is room for all that arrive just now, and remember whose it is."""
        answer, status = b"", 0

        async def heard(message: Message) -> None:
            nonlocal answer, status
            status = message.get("status", status)
            answer += message.get("body", b"")
            if message["type"] == "http.response.body" and not message.get("more_body") and status == 200:
                self.uploads.uploaded(json.loads(answer), owner)
            await send(message)

        owner = (scope.get("client") or ("", 0))[0]
        headers = [header for header in scope["headers"] if header[0] != b"accept-encoding"]
        try:
            with self.uploads.coming(size):
                await self.app({**scope, "headers": headers}, receive, heard)
        except TooMuchError:
            raise Refused(503, "too much is being uploaded here just now: try again in a moment") from None
        finally:  # what was broken off has left a file, too
            await run_in_threadpool(self.uploads.make_room)

    async def _checked(self, receive: Receive) -> Receive:
        """`receive` with its body read and looked through for files.

        Raises:
            Refused: an image that nobody uploaded, or the body is no JSON.
        """
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                break
            body, more = body + message.get("body", b""), message.get("more_body", False)
        try:
            value = json.loads(body) if body else None
        except (ValueError, RecursionError):
            raise Refused(400, "expected JSON in the request, got something else") from None
        for path in _paths(value):
            if not self.uploads.holds(path):
                raise Refused(
                    400, "expected images that were uploaded here, got a URL, a folder or another file"
                )
            self.uploads.used(path)
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay


def _route(scope: Scope) -> tuple[str, str]:
    """What a request asks for, below the root and below Gradio's API, and the rest of its path.

    Raises:
        Refused: no route of this page; a file that is not named by a whole path, such as a URL.
    """
    path = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/")
    routes, (first, _, rest) = PAGE_ROUTES, path.partition("/")
    if first == API:
        if rest.startswith(FILE):
            if not Path(rest.removeprefix(FILE)).is_absolute():
                raise Refused(403, "expected the whole path of a file of this page")
            return FILE, rest
        routes, (first, _, rest) = API_ROUTES, rest.partition("/")
    if first not in routes:
        raise Refused(404, "there is nothing of that name here")
    return first, rest


def _too_large(limit: int) -> Refused:
    return Refused(413, f"expected at most {limit:,} bytes in a request, got more")


class _Counted:
    """`receive` that raises Refused once there is more than `limit`, and remembers it: what the server makes
    of that is not what is answered."""

    def __init__(self, receive: Receive):
        self._receive, self._read = receive, 0
        self.limit = MAX_BODY
        self.refusal: Refused | None = None

    async def __call__(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if self._read > self.limit:
            self.refusal = _too_large(self.limit)
            raise self.refusal
        return message


def _paths(value: Any) -> Iterator[str]:
    """Every "path" in a JSON value."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(path := value.get("path"), str):
                yield path
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
