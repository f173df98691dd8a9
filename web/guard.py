"""In front of the page's server: a request that is too large or names a URL as a picture ends here, and
browsers are told to load from here alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 2**20  # bytes of a request that uploads nothing
# Scripts and styles stand in Gradio's page itself; pictures that are being uploaded are blobs.
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


class Guard:
    """ASGI middleware.

    Args:
        max_upload: bytes of a request that uploads pictures, all of them together.
        max_body: of every other one.
    """

    def __init__(self, app: ASGIApp, max_upload: int, max_body: int = MAX_BODY):
        self.app, self.max_upload, self.max_body = app, max_upload, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        uploads = scope["path"].rstrip("/").endswith("/upload")
        limit = self.max_upload if uploads else self.max_body
        begun = False

        async def guarded(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("content-security-policy", POLICY)
            await send(message)

        try:
            length = Headers(scope=scope).get("content-length", "0")
            if not length.isdecimal() or int(length) > limit:
                raise _too_large(limit)
            received = _counted(receive, limit)
            if scope["method"] == "POST" and not uploads and not _is_form(scope):
                received = await _checked(received)
            await self.app(scope, received, guarded)
        except Refused as refused:
            if not begun:
                answer = JSONResponse({"detail": str(refused)}, refused.status)
                await answer(scope, receive, send)


def _too_large(limit: int) -> Refused:
    return Refused(413, f"expected at most {limit:,} bytes in a request, got more")


def _counted(receive: Receive, limit: int) -> Receive:
    """`receive` that raises Refused once there is more than `limit`."""
    read = 0

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > limit:
            raise _too_large(limit)
        return message

    return counted


def _is_form(scope: Scope) -> bool:
    kind = Headers(scope=scope).get("content-type", "").lower()
    return kind.startswith(("multipart/form-data", "application/x-www-form-urlencoded"))


async def _checked(receive: Receive) -> Receive:
    """`receive` with its body read and looked through: Gradio would fetch a picture whose path is a URL.

    Raises:
        Refused: there is one, or the body is no JSON.
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
    if any("://" in path[:32] for path in _paths(value)):
        raise Refused(400, "pictures from URLs are switched off here: upload the picture itself")
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


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
