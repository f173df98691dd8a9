"""What every request passes: who may ask, one line of log, counts, and an answer whatever happens."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from messages import printable
from web import anthropic
from web.engine import Engine, Ticket
from web.errors import Refused, log_fault, refusal
from web.streams import event_of

log = logging.getLogger("ocelli.server")

LINGER_SECONDS, LINGER_BYTES = 5, 2**25  # for what is still sent of a request that was refused
OPEN = ("/", "/openapi.json", "/health", "/page/")  # without a key: a page asks for it, balancers send none
MESSAGES = "/v1/messages"
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)  # seconds


def client_of(scope: Scope) -> str:
    """The address of a client, without the scope that an IPv6 one may have. What a proxy says of it may be
    any text: quoted, if it is no address."""
    said = (scope.get("client") or ("", 0))[0]
    try:
        return str(ipaddress.ip_address(said)).partition("%")[0]
    except ValueError:
        return ascii(said[:60])


@dataclass
class Record:
    """What log and metrics say of a request, and the form of errors in its protocol: `names` are its fields
    by what chat completions call them, `body` makes a response of an error, and `failed` the last event of a
    stream."""

    read: bool = False  # the whole body
    sent: bool = False  # the whole response
    model: str = "-"
    images: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    take: Callable[[int], None] = lambda more: None  # room for bytes besides the body
    names: dict[str, str] = field(default_factory=dict)
    body: Callable[[Refused], dict[str, Any]] = lambda refused: refused.body
    failed: Callable[[Refused], dict[str, Any]] = lambda refused: refused.body

    def refused(self, error: Exception) -> Refused:
        refused = refusal(error)
        field = (refused.param or "").split("[")[0]
        if field not in self.names:
            return refused
        name, said = self.names[field], str(refused).removeprefix(f"{refused.param}: ")
        said = f"{name}: {said.replace(f'without {field}', f'without {name}')}"
        return Refused(refused.status, said, name, refused.code, refused.retry_after)

    def __str__(self) -> str:
        said = [f"model={self.model} images={self.images}"] if self.model != "-" else []
        if tickets := self.tickets:
            prompt, cached, new = (
                sum(getattr(one, f"{kind}_tokens") for one in tickets)
                for kind in ("prompt", "cached", "completion")
            )
            reasons = dict.fromkeys(reason for one in tickets for reason in one.finish_reasons if reason)
            said.append(f"prompt={prompt} cached={cached} new={new} finish={','.join(reasons) or '-'}")
        return " ".join([*said, *self.details])


class Hosts:
    """The names that a server has.

    An unknown name may be one whose owner has just pointed it at this machine (DNS rebinding), and then the
    owner's page would count as this one. Nobody can point an address in numbers elsewhere.

    Args:
        bound: what the server listens on.
        allowed: names that it has besides, such as a proxy's. Pages of these may send requests, too.
        origins: of other sites whose pages may send requests; "*" is all.
    """

    def __init__(self, bound: str, allowed: Iterable[str] = (), origins: Collection[str] = ()):
        self._allowed, self.origins = {name.lower() for name in allowed}, origins
        machine = socket.gethostname().lower()
        self._names = {"localhost", bound.lower(), machine, f"{machine}.local", *self._allowed}

    def check(self, headers: Headers) -> None:
        """Raises Refused for a request to another name, or from another site's page."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        name = _name(host)
        if name not in self._names and not _is_address(name):
            raise Refused(403, f"{name[:100]!r} is not a name of this server: allow it with --allowed-host")
        if origin is None:
            foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            foreign = foreign and headers.get("sec-fetch-mode") != "navigate"
        else:
            place = origin.lower().partition("://")[2]
            known = place == host or _name(place) in self._allowed
            foreign = not known and not {origin, "*"} & {*self.origins}
        if foreign:
            advice = "allow that site with --allowed-origin"
            raise Refused(403, f"pages of other sites may not send requests here: {advice}")


def _name(place: str) -> str:
    """A host without its port."""
    return place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


class Histogram:
    """Seconds, counted in buckets."""

    def __init__(self, name: str, about: str):
        self.name, self.about = name, about
        self._counts, self._sum = [0] * (len(BUCKETS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[sum(seconds > edge for edge in BUCKETS)] += 1
        self._sum += seconds

    def lines(self) -> list[str]:
        total, made = 0, _head(self.name, "histogram", self.about)
        for edge, count in zip([*map(str, BUCKETS), "+Inf"], self._counts, strict=True):
            total += count
            made.append(f'{self.name}_bucket{{le="{edge}"}} {total}')
        return [*made, f"{self.name}_sum {self._sum:.6f}", f"{self.name}_count {total}"]


class Metrics:
    """Counts of one server, which /metrics shows in Prometheus' text format."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.responses: Counter[int] = Counter()  # by status
        self.seconds = Histogram("ocelli_request_seconds", "From a question's arrival to its answer's end.")
        self.first = Histogram("ocelli_first_token_seconds", "From a question's arrival to its first token.")

    def text(self) -> str:
        stats = self._engine.stats
        lines = _head("ocelli_responses_total", "counter", "Responses, by HTTP status.")
        for status, count in sorted(self.responses.items()):
            lines.append(f'ocelli_responses_total{{status="{status}"}} {count}')
        for name, kind, about, value in (
            ("requests_total", "counter", "Questions that were accepted.", stats.requests),
            ("queue_requests", "gauge", "Questions that wait.", stats.waiting),
            ("running_requests", "gauge", "Questions that are being answered.", stats.running),
            ("new_tokens_total", "counter", "Tokens of answers.", stats.new_tokens),
            ("prompt_tokens_total", "counter", "Positions of prompts, images included.", stats.prompt_tokens),
            ("cached_tokens_total", "counter", "Of these, positions kept from before.", stats.cached_tokens),
        ):
            lines += [*_head(f"ocelli_{name}", kind, about), f"ocelli_{name} {value}"]
        return "\n".join([*lines, *self.first.lines(), *self.seconds.lines(), ""])


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


class Door:
    """ASGI middleware around everything. A request's `Record` is in its state.

    Args:
        api_key: what clients have to send as a bearer token, except for what is OPEN; None asks for none.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts, metrics: Metrics, api_key: str | None):
        self.app, self.hosts, self.metrics = app, hosts, metrics
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # there are no web sockets
        began, status, streams, record = time.monotonic(), 0, False, Record()
        if scope["path"].startswith(MESSAGES):
            record.body = record.failed = anthropic.error_body
        scope.setdefault("state", {})["record"] = record

        async def heard(message: Message) -> None:
            nonlocal status, streams
            status = message.get("status", status)
            unread = status >= 400 and not record.read
            if message["type"] == "http.response.start":
                streams = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                close = [(b"connection", b"close")] if unread else []
                message["headers"] = [*message["headers"], *close]
            elif not message.get("more_body"):
                record.sent = True
                if unread:
                    await send({**message, "more_body": True})
                    await _swallow(receive)
                    message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            headers = Headers(scope=scope)
            if has_two_lengths(headers):
                raise Refused(400, "expected either Content-Length or Transfer-Encoding, got both")
            self.hosts.check(headers)
            self._check_key(headers, scope["path"])
            asked = "GET" if scope["method"] == "HEAD" else scope["method"]  # the body stays in uvicorn
            await self.app({**scope, "method": asked}, receive, heard)
        except Exception as error:
            refused = record.refused(error)
            if refused.status == 500:
                log_fault(error)
            if isinstance(error, ClientDisconnect):
                record.details.append("left")
            elif not status:
                response = JSONResponse(record.body(refused), refused.status, refused.headers)
                await response(scope, receive, heard)
            elif streams and not record.sent:
                record.details.append(f"error={refused.code}")
                async with asyncio.timeout(1):  # it may be a client that does not read
                    await heard({"type": "http.response.body", "body": event_of(record.failed(refused))})
        finally:
            status, seconds = status or 499, time.monotonic() - began
            self._count(record, status, seconds)
            client, path = client_of(scope), printable(quote(scope["path"]), 80)
            line = f"{client} {scope['method']} {path} {status} {seconds:.3f}s {record}"
            log.info("%s", line.rstrip())

    def _count(self, record: Record, status: int, seconds: float) -> None:
        self.metrics.responses[status] += 1
        for ticket in record.tickets:
            ticket.cancel()  # in vain after its end
            self.metrics.seconds.add(seconds)
            if ticket.first_token_seconds is not None:
                self.metrics.first.add(ticket.first_token_seconds)

    def _check_key(self, headers: Headers, path: str) -> None:
        if self._key is None or path in OPEN or path.startswith(OPEN[-1]):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if (other := headers.get("x-api-key")) is not None:  # Anthropic's clients
            scheme, key = "bearer", other
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
            raise Refused(401, "expected this server's API key as a bearer token", code="invalid_api_key")


def has_two_lengths(headers: Headers) -> bool:
    """A proxy that believes the other one sees another request where this one ends."""
    return "content-length" in headers and "transfer-encoding" in headers


class Origins(CORSMiddleware):
    """CORS for pages of the origins that are allowed; those of others, and requests of two lengths, meet the
    `Door`, which refuses and logs them, also what browsers ask first."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]):
        super().__init__(
            app, origins, ("GET", "HEAD", "POST"), ["*"], allow_private_network=True,
            expose_headers=("retry-after",),
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        allowed = "origin" in headers and self.is_allowed_origin(headers["origin"])
        allowed = allowed and not has_two_lengths(headers)
        await (super().__call__ if allowed else self.app)(scope, receive, send)


async def _swallow(receive: Receive) -> None:
    """Read and discard the rest of a refused request: else a client that is still sending sees a reset, and
    not the refusal."""
    left = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0 and (message := await receive()).get("more_body", False):
                left -= len(message["body"])
