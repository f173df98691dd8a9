"""What strangers may take of the server: limits, room for what they send, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from starlette.requests import Request

from data.images import ImageLimits
from web.errors import Refused
from web.images import VisitorLimits

BODY_SECONDS = 60  # for all of a body to arrive


@dataclass(frozen=True)
class ApiLimits:
    """What one request may hold and take.

    max_body: bytes of it. max_held: bytes of all requests that are being answered together.
    seconds: from its beginning to its end.
    max_images, image: how many images, and what each may be. max_new_tokens: of each answer.
    allow_urls: images may be fetched from public addresses.
    """

    max_body: int = 32 * 2**20
    max_held: int = 2**30
    seconds: float = 600
    max_images: int = 8
    max_new_tokens: int = 4_096
    image: ImageLimits = field(default_factory=lambda: VisitorLimits(10 * 2**20, 24_000_000, max_seconds=20))
    allow_urls: bool = False


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
    def taken(self) -> Iterator[Callable[[int], None]]:
        """Call what this yields with bytes that are held until the block ends. It raises Refused when the
        total exceeds `most_bytes`."""
        mine = 0

        def take(more: int) -> None:
            nonlocal mine
            if self.held + more > self.most_bytes:
                message = "too much is being sent here just now: try again in a moment"
                raise Refused(503, message, retry_after=10)
            self.held, mine = self.held + more, mine + more

        try:
            yield take
        finally:
            self.held -= mine


async def read_body(request: Request, most: int, take: Callable[[int], None]) -> bytes:
    """The body of a request; `take` is called with the bytes of each piece. Raises Refused once it is longer
    than `most` bytes or has taken BODY_SECONDS, and ClientDisconnect."""
    body, length = bytearray(), request.headers.get("content-length", "0")
    too_long = Refused(413, f"expected at most {most:,} bytes in a request, got more")
    if not length.isdecimal() or len(length) > 20 or int(length) > most:
        raise too_long
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                take(len(piece))
                body += piece
                if len(body) > most:
                    raise too_long
    except TimeoutError:
        raise Refused(408, "the body of this request took too long") from None
    return bytes(body)
