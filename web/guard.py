"""What stands between strangers and the servers: names, bodies, the page's uploads and routes are bounded.

Gradio has more routes than this page uses. Some fetch URLs for whoever asks (`file=http…`, after a look-up at
a public name server), read or write files, or run what components offer. Only those that the page needs pass.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.errors import RequestError
from web.errors import Refused

API, FILE = "gradio_api", "file="
# The first parts of paths that pass, below the root and below Gradio's API.
PAGE_ROUTES = frozenset(
    ("", "config", "theme.css", "static", "assets", "svelte", "favicon.ico", "robots.txt", "manifest.json")
)
API_ROUTES = frozenset((
    "info", "app_id", "startup-events", "heartbeat", "queue", "cancel", "reset", "upload", "upload_progress",
    "run", "api", "call", "theme.css", "login_check", "user", "token",
))  # fmt: skip
MAX_BODY = 2**20  # bytes of a request that uploads nothing
BODY_SECONDS = 60  # for all of a body to arrive
LEAST_RATE = 2**16  # bytes a second in which uploads have to arrive
LEAST_BYTES = 2**19  # that a file counts for: the space of all bounds their number, too
# Scripts and styles stand in Gradio's page itself; images that are being uploaded are blobs.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' data: blob:; "
    "font-src 'self' data:; worker-src 'self' blob:; connect-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'self'"
)
TOO_SLOW = "the body of this request took too long"


class Turns:
    """Each client has so many of its things done at a time, so that no one is behind all of another's."""

    def __init__(self, each: int):
        self._each, self._clients = each, WeakValueDictionary[str, asyncio.Semaphore]()

    def of(self, client: str) -> asyncio.Semaphore:
        """To be held by name, for as long as it is waited for: it goes with the last who does."""
        return self._clients.setdefault(client, asyncio.Semaphore(self._each))


class Room:
    """At most `most_bytes` of what strangers send, all of them together."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.held = most_bytes, 0

    @contextmanager
    def taken(self, size: int = 0) -> Iterator[Callable[[int], None]]:
        """Reserve `size` bytes; call what this yields to reserve more. Raises Refused when the total exceeds
        `most_bytes`."""
        before = 0

        def take(more: int) -> None:
            nonlocal before
            if self.held + more > self.most_bytes:
                raise Refused(
                    503, "too much is being sent here just now: try again in a moment", retry_after=10
                )
            self.held, before = self.held + more, before + more

        take(size)
        try:
            yield take
        finally:
            self.held -= before


async def read_body(request: Request, most: int, take: Callable[[int], None] = lambda more: None) -> bytes:
    """The body of a request; `take` is called with the bytes of each piece. Raises Refused once it is longer
    than `most` bytes or has taken BODY_SECONDS, and ClientDisconnect."""
    body, length = bytearray(), request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 20 or int(length) > most:
        raise Refused(413, f"expected at most {most:,} bytes in a request, got more")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                take(len(piece))
                body += piece
                if len(body) > most:
                    raise Refused(413, f"expected at most {most:,} bytes in a request, got more")
    except TimeoutError:
        raise Refused(408, TOO_SLOW) from None
    return bytes(body)


class Uploads:
    """The files that visitors upload, and those that are made for them: one folder of at most `most_bytes`,
    in which those stay that were used last. What lies in it already is the page's own, and stays."""

    def __init__(self, folder: str | Path, most_bytes: int):
        self.folder, self.room = Path(folder).resolve(), Room(most_bytes)
        self._own = {path for _, _, path in self._files()}

    def holds(self, path: str) -> bool:
        """Whether this is the path of a file in the folder, which may be deleted by now."""
        with suppress(OSError, ValueError):  # a NUL, or far too long
            place = Path(path).resolve()
            return place.is_relative_to(self.folder) and not place.is_dir()
        return False

    def make_room(self) -> None:
        """Delete those that nobody has used for longest, until the rest is within bounds."""
        files = sorted(file for file in self._files() if file[2] not in self._own)
        size = sum(size for _, size, _ in files)
        for _, of_file, path in files:
            if size <= self.room.most_bytes - self.room.held:
                return
            size -= of_file
            with suppress(OSError):
                path.unlink()
                path.parent.rmdir()  # unless it holds others

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of each file."""
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    yield status.st_ctime, max(status.st_size, LEAST_BYTES), path


class Hosts:
    """The names that a server has.

    An unknown name may be one whose owner has just pointed it at this machine (DNS rebinding), and then the
    owner's page would count as this one. Nobody can point an address in numbers elsewhere.

    Args:
        bound: what the server listens on.
        allowed: names that it has besides, such as a proxy's. Pages of these may send requests, too.
    """

    def __init__(self, bound: str, allowed: Iterable[str] = ()):
        self.allowed = {name.lower() for name in allowed}
        machine = socket.gethostname().lower()
        self._names = {"localhost", bound.lower(), machine, f"{machine}.local"}

    def check(self, headers: Headers, origins: Collection[str] | None = None) -> None:
        """Raises Refused for a request to another name, or from another site's page but those of `origins`,
        of which "*" is all; None where no origin can be allowed."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        name = _name(host)
        if name not in self._names | self.allowed and not _is_address(name):
            raise Refused(403, f"{name[:100]!r} is not a name of this server: allow it with --allowed-host")
        if origin is None:
            foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            foreign = foreign and headers.get("sec-fetch-mode") != "navigate"
        else:
            place = origin.lower().partition("://")[2]
            foreign = (
                place != host and _name(place) not in self.allowed and not {origin, "*"} & {*(origins or ())}
            )
        if foreign:
            advice = "" if origins is None else ": allow that site with --allowed-origin"
            raise Refused(403, f"pages of other sites may not send requests here{advice}")


def _name(place: str) -> str:
    """A host without its port."""
    return place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


class Guard:
    """ASGI middleware.

    Args:
        connected: gives a context for each page that is open, by its session.
        max_upload: bytes of a request that uploads images, all of them together.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Hosts,
        uploads: Uploads,
        connected: Callable[[str], AbstractContextManager],
        max_upload: int,
    ):
        self.app, self.hosts, self.uploads, self.connected = app, hosts, uploads, connected
        self.max_upload = max_upload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # the page needs no web sockets

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("content-security-policy", POLICY)
            await send(message)

        try:
            await self._pass(scope, receive, with_policy)
        except ClientDisconnect:
            pass
        except Refused as error:
            await JSONResponse({"detail": str(error)}, error.status)(scope, receive, with_policy)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self.hosts.check(headers)
        route, rest = _route(scope)
        limit = self.max_upload if route == "upload" else MAX_BODY
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or (scope["method"] == "POST" and "content-length" not in headers):
            raise Refused(411, "expected a request that gives its length")  # the server keeps it to that
        if not length.isdecimal() or int(length) > limit:
            raise Refused(413, f"expected at most {limit:,} bytes in a request, got more")
        if route == "upload":
            await self._upload(scope, receive, send, int(length))
        elif route == "heartbeat":
            try:
                with self.connected(rest):
                    await self.app(scope, receive, send)
            except RequestError as error:
                raise Refused(503, str(error)) from None
        elif scope["method"] == "POST":
            await self.app(scope, await self._checked(scope, receive), send)
        else:
            await self.app(scope, receive, send)

    async def _upload(self, scope: Scope, receive: Receive, send: Send, size: int) -> None:
        """Take an upload, if there is room for all that arrive just now."""
        failed = False

        async def heard(message: Message) -> None:
            nonlocal failed
            failed = failed or message.get("status") == 500  # there is more to say of what is raised after it
            if not failed:
                await send(message)

        headers = [header for header in scope["headers"] if header[0] != b"accept-encoding"]
        try:
            with self.uploads.room.taken(size):
                async with asyncio.timeout(BODY_SECONDS + size / LEAST_RATE):
                    await self.app({**scope, "headers": headers}, receive, heard)
        except TimeoutError:
            raise Refused(408, TOO_SLOW) from None
        except (TypeError, ValueError):  # of Gradio's
            raise Refused(400, "expected images in the upload, each a file with its name") from None
        finally:  # an upload that was broken off has left a file, too
            await run_in_threadpool(self.uploads.make_room)

    async def _checked(self, scope: Scope, receive: Receive) -> Receive:
        """`receive` for a body that was read and looked through. Raises Refused where it is no JSON, or names
        a file that nobody uploaded."""
        body = await read_body(Request(scope, receive), MAX_BODY)
        try:
            value = json.loads(body) if body else None
        except (ValueError, RecursionError):
            raise Refused(400, "expected JSON in the request, got something else") from None
        for path in _paths(value):
            if not self.uploads.holds(path):
                raise Refused(
                    400, "expected images that were uploaded here, got a URL, a folder or another file"
                )
            with suppress(OSError):
                os.utime(path)  # it is used
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(messages, None) or await receive()

        return replay


def _route(scope: Scope) -> tuple[str, str]:
    """The route of a request below the root or below Gradio's API, and the rest of its path.

    Raises Refused where the page has no such route, and for files without an absolute path, such as URLs.
    """
    path = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/")
    routes, (first, _, rest) = PAGE_ROUTES, path.partition("/")
    if first == API:
        if rest.startswith(FILE):
            if not Path(rest.removeprefix(FILE)).is_absolute():
                raise Refused(403, "expected the absolute path of a file of this page")
            return FILE, rest
        routes, (first, _, rest) = API_ROUTES, rest.partition("/")
    if first not in routes:
        raise Refused(404, "there is nothing of that name here")
    return first, rest


def _paths(value: Any) -> Iterator[str]:
    """Every "path" in a JSON value."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(path := value.get("path"), str):
                yield path
            stack += value.values()
        elif isinstance(value, list):
            stack += value
