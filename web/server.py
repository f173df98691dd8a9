"""The HTTP server around an engine: uvicorn, with a bound on what is slow, and a drain at the end.

engine = Engine(open_checkpoint("checkpoints/ocelli-shapes").compiled())
with socket.create_server(("127.0.0.1", 8000)) as listening:
    Server(engine, Hosts("127.0.0.1")).run([listening])
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp

from web.api import make_app
from web.door import Door, Hosts, Metrics, Origins
from web.engine import Engine
from web.guard import ApiLimits

KEPT_SECONDS = 75  # that a connection is kept for the next request: longer than most clients keep theirs
MOST_CONNECTIONS = 1000  # a request on one more is answered with 503
OTHER_DESCRIPTORS = 128  # that this process needs besides
ACCEPTED, BACKLOG = 4, 2048  # connections that are taken at a time, and that wait in the system for that
HEAD_BYTES = 2**16  # of a request


def most_connections() -> int:
    """As many as the descriptors (`ulimit -n`) of this process allow."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(ACCEPTED, allowed - OTHER_DESCRIPTORS))


class Server(uvicorn.Server):
    """Answers until a signal comes or `should_exit` is set, and then for up to `drain` seconds what it has
    accepted: `run([socket])`.

    Args:
        api_key, hosts: see `Door`.
        proxies: addresses whose X-Forwarded-For is believed, such as a balancer's.
    """

    def __init__(
        self,
        engine: Engine,
        hosts: Hosts,
        limits: ApiLimits = ApiLimits(),  # noqa: B008
        api_key: str | None = None,
        drain: float = 30,
        proxies: Sequence[str] = (),
    ):
        self.metrics = Metrics(engine)
        door: ASGIApp = Door(make_app(engine, limits, self.metrics), hosts, self.metrics, api_key)
        config = uvicorn.Config(
            Origins(door, [*hosts.origins]) if hosts.origins else door,
            http="h11",
            ws="none",
            log_level="critical",
            access_log=False,
            server_header=False,
            limit_concurrency=most_connections(),
            backlog=ACCEPTED,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=KEPT_SECONDS,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
            timeout_graceful_shutdown=max(1, round(drain)) + 2,
        )
        super().__init__(config)
        self._engine, self._drain = engine, drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            # asyncio accepts `backlog` of them in a row, and logs a traceback for each without a descriptor.
            listening.listen(BACKLOG)

    async def shutdown(self, sockets: list | None = None) -> None:
        """After the drain what is left is told that the server ends."""
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()
        self._engine.close()

    async def _end(self) -> None:
        await self._engine.drain(self._drain)
        self._engine.close()
