"""Connections of the servers: as many as this process has descriptors for, and none that waits for ever."""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import psutil
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from web.errors import Refused

log = logging.getLogger("ocelli.server")

HEAD_SECONDS = 30  # for the head of a request to arrive at most, and half of them at least
MOST, LEAST = 2**14, 4  # connections
RESERVED = 24  # descriptors for files, for processes, and for connections that have only just been taken
ACCEPTED = 4  # connections that are taken at a time: asyncio looks at no limit in between
BACKLOG = 2048  # connections that wait in the system for that


def most_connections() -> int:
    """As many as the descriptors allow that this process has left; on Windows they are not counted."""
    limit = os.sysconf("SC_OPEN_MAX") if os.name == "posix" else -1
    if limit < 0:  # none
        return MOST
    return min(MOST, max(LEAST, limit - psutil.Process().num_fds() - RESERVED))


class Bound:
    """How many connections a server has at most, and whether its log says already that there are so many."""

    def __init__(self) -> None:
        self.most, self.told = most_connections(), False


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, which refuses in JSON what is no HTTP, and waits neither for heads and bodies nor
    for clients that do not read for ever. Where a new connection is one too many, the one goes that has been
    silent for longest and is not being answered."""

    def __init__(self, bound: Bound, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._bound, self._heard = bound, 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._heard = self.loop.time()
        self._look_after(None)
        if len(self.connections) > self._bound.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    @property
    def _done(self) -> bool:
        """Whether it is owed no answer."""
        return self.cycle is None or self.cycle.response_complete or self.transport.is_closing()

    @property
    def _sends(self) -> bool:
        """Whether the body of its request has yet to come, and nothing here keeps it from coming."""
        return not self._done and self.cycle.more_body and not self.flow.read_paused

    def _make_room(self) -> None:
        others = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
        others = [one for one in others if not one.transport.is_closing()]
        if len(others) < (most := self._bound.most):
            return
        if not self._bound.told:
            self._bound.told = True
            said = "%d connections are open, and this process may have no more descriptors (ulimit -n)"
            log.warning(f"{said}: for each new one the longest silent one is closed", most)
        silent = [one for one in others if one._done or one._sends]
        if silent:
            min(silent, key=lambda one: one._heard).transport.abort()
        else:
            message = "too many connections are open here just now: try again in a moment"
            self._refuse(Refused(503, message, retry_after=1))

    def _look_after(self, before: Any) -> None:
        """Cut a connection that has brought no request since the last look, nothing of its request's body, or
        has read nothing. Where none has begun after an answer, uvicorn's own timer runs."""
        kept = self.timeout_keep_alive_task is not None and not self.transport.is_closing()
        waits = (self._done and not kept) or self._sends or self.flow.write_paused
        heard = self._heard if self._sends else None  # a head may not come piece by piece for ever
        now = (self.cycle, self.transport.get_write_buffer_size(), heard) if waits else None
        if waits and now == before:
            self.transport.abort()
        self._look = self.loop.call_later(HEAD_SECONDS / 2, self._look_after, now)

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(400, "expected an HTTP request, got something else"))

    def _refuse(self, error: Refused) -> None:
        """The last that this connection hears."""
        body = json.dumps(error.body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        answer = h11.Response(status_code=error.status, headers=[*headers, (b"connection", b"close")])
        with suppress(h11.LocalProtocolError):  # in the middle of an answer
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()


class BoundedServer(uvicorn.Server):
    """uvicorn's server with `BoundedProtocol`; `settings` are those of `uvicorn.Config`."""

    def __init__(self, app: ASGIApp, **settings: Any):
        protocol: Any = partial(BoundedProtocol, Bound())
        super().__init__(uvicorn.Config(app, http=protocol, backlog=ACCEPTED, **settings))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # `backlog` has made it as few as are taken at a time
