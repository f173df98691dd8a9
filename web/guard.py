"""What stands between strangers and the server: names of hosts, bodies, and whose turn it is."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakValueDictionary

from starlette.datastructures import Headers
from starlette.requests import Request

from web.errors import Refused

BODY_SECONDS = 60  # for all of a body to arrive
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
