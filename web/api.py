"""The HTTP server for programs: OpenAI's protocol over an engine. Strangers stand before it.

    engine = Engine(Models(["checkpoints/ocelli-shapes"]))
    with socket.create_server(("127.0.0.1", 8000)) as listening:
        Server(engine, Hosts("127.0.0.1")).run([listening])

    POST /v1/chat/completions    GET /v1/models, /health, /metrics, /docs, /openapi.json

Each refusal is one JSON object in OpenAI's form. A client that goes away takes its request along. One line is
logged for a request, without its content. On SIGTERM what was accepted is answered, up to `drain` seconds.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import OutOfMemoryError

from data import chat
from data.errors import ImageError, ProcessorError, PromptTooLong
from data.images import ImageLimits, image_size, read_bytes
from data.processor import EncodedConversation
from generation.options import CacheMemoryError, GenerationOptions, NotFiniteError
from inference.boxes import located
from inference.checkpoint import Checkpoint, PixelText
from inference.conversation import ContextFullError
from inference.errors import FormError, user_errors
from messages import one_line, printable
from models.checkpoints.hub import CheckpointError
from web.connections import BoundedServer
from web.engine import Engine, EngineRequest, Piece, QueueFull, Ticket, encode_messages
from web.explain import ABOUT, CHAT, explanation, openapi
from web.guard import FOR_PROGRAMS, Hosts, Refused, Room, read_body
from web.models import model_ids
from web.protocol import ApiError, ChatRequest, Head, chunk, completion, read_request, usage

log = logging.getLogger("ocelli.server")

KEPT_SECONDS = 75  # that a connection is kept for the next request: longer than most clients keep theirs
LINGER_SECONDS, LINGER_BYTES = 5, 2**25  # for what is still sent of a request that was refused
FETCHES = 8  # images of the internet that are fetched at a time
STREAM_HEADERS = [  # the last one is for nginx, which would collect events
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
OPEN = ("/", "/docs", "/openapi.json", "/health")  # without a key: a browser can send none, nor can balancers
PATHS = ("/v1", "/health", "/metrics", "/docs", "/openapi.json")  # of the server for programs, beside a page
LEAST_LOGPROB = -9999.0  # JSON has no infinity
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)  # seconds


@dataclass(frozen=True)
class ApiLimits:
    """What one client may take besides `EngineLimits`.

    max_body: bytes of a request. max_held: bytes of all requests that are being answered together.
    seconds: from a request's beginning to its end.
    strict: what is ignored or made less otherwise is refused: see `web.protocol.read_request`.
    allow_urls: images may be fetched from public addresses. allow_paths: the folder from whose files images
        may be read, or None.
    """

    max_body: int = 32 * 2**20
    max_held: int = 2**30
    seconds: float = 600
    strict: bool = False
    allow_urls: bool = False
    allow_paths: Path | None = None


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error. Our own faults stay here, and so do paths of this machine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, one_line(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, Refused):
        codes = {403: "forbidden", 408: "timeout", 413: "request_too_large", 503: "overloaded"}
        return ApiError(error.status, str(error), code=codes.get(error.status), retry_after=error.retry_after)
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase.lower()
        return ApiError(error.status_code, f"{phrase}: see GET /v1/models, POST {CHAT} and GET /docs")
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client has gone", code="client_gone")
    if isinstance(error, TimeoutError):
        return ApiError(504, "this took longer than a request may take here", code="timeout")
    if isinstance(error, CacheMemoryError | MemoryError | OutOfMemoryError):
        message = "there is not enough memory: ask for fewer or shorter answers, or about smaller images"
        return ApiError(503, message, code="out_of_memory", retry_after=10)
    theirs = isinstance(error, user_errors())
    if not theirs or isinstance(error, OSError | CheckpointError | ProcessorError | NotFiniteError):
        return ApiError(500, "something went wrong on the server: other requests are not affected",
                        code="internal_error")  # fmt: skip
    param = "messages" if isinstance(error, ImageError) else None
    param = "response_format" if isinstance(error, FormError) else param
    too_long = isinstance(error, ContextFullError | PromptTooLong)
    code = "context_length_exceeded" if too_long else "invalid_value"
    return ApiError(400, FOR_PROGRAMS.sub("", one_line(error)), param, code)


def client_of(scope: Scope) -> str:
    """The address of a client. What a proxy says of it is a stranger's text."""
    return printable((scope.get("client") or ("", 0))[0], 60)


def log_fault(error: BaseException) -> None:
    """Where it went wrong, without its message, which may quote a request."""
    log.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)).rstrip())


# ---------------------------------------------------------------------------------------------------- metrics
class Histogram:
    """Seconds, counted in buckets."""

    def __init__(self, name: str, about: str):
        self.name, self.about = name, about
        self._counts, self._sum = [0] * (len(BUCKETS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[sum(seconds > edge for edge in BUCKETS)] += 1
        self._sum += seconds

    def lines(self) -> list[str]:
        total, made = 0, [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} histogram"]
        for edge, count in zip([*map(str, BUCKETS), "+Inf"], self._counts, strict=True):
            total += count
            made.append(f'{self.name}_bucket{{le="{edge}"}} {total}')
        return [*made, f"{self.name}_sum {self._sum:.6f}", f"{self.name}_count {total}"]


class Metrics:
    """What /metrics shows, in Prometheus' text format."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.responses: Counter[int] = Counter()
        self.seconds = Histogram("ocelli_request_seconds", "From a question's arrival to its answer's end.")
        self.first = Histogram("ocelli_first_token_seconds", "From a question's arrival to its first token.")

    def text(self) -> str:
        stats, lines = self.engine.stats, ["# HELP ocelli_responses_total Responses, by HTTP status."]
        lines.append("# TYPE ocelli_responses_total counter")
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
            lines += [f"# HELP ocelli_{name} {about}", f"# TYPE ocelli_{name} {kind}"]
            lines.append(f"ocelli_{name} {value}")
        return "\n".join([*lines, *self.first.lines(), *self.seconds.lines(), ""])


# ----------------------------------------------------------------------------------------------------- images
class Images:
    """Opens what `image_url` names, in threads."""

    def __init__(self, limits: ApiLimits, image: ImageLimits):
        self._folder = limits.allow_paths
        self._limits = replace(image, allow_urls=limits.allow_urls, allow_paths=False)
        self._decoding = ThreadPoolExecutor(2, thread_name_prefix="images")
        self._fetching = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetches")  # waits, mostly

    async def open(self, url: str, name: str) -> bytes:
        """The bytes of an image whose header is within the limits. Raises ImageError."""
        remote = url[:8].lower().startswith(("http://", "https://"))
        pool = self._fetching if remote else self._decoding
        return await asyncio.get_running_loop().run_in_executor(pool, self._open, url, name)

    def _open(self, url: str, name: str) -> bytes:
        scheme = url[:8].lower()
        source: str | bytes | None = url
        if not scheme.startswith(("data:", "http://", "https://")):
            if self._folder is None or not scheme.startswith("file://"):
                raise ImageError(f"{name}: expected a data: URL with the image itself")
            if (source := self._file(self._folder, url)) is None:
                raise ImageError(f"{name}: expected a file within the folder that this server may read")
        data = read_bytes(source, self._limits, name)
        image_size(data, self._limits, name)
        return data

    def _file(self, folder: Path, url: str) -> bytes | None:
        """A file in the folder, as far as an image may be long and a byte more. None for all else: a client
        does not learn what there is on this machine."""
        with suppress(OSError, ValueError):  # it may not be read; no URL, or a NUL in it
            path = Path(os.path.realpath(folder / unquote(urlsplit(url).path).lstrip("/")))
            if path.is_relative_to(os.path.realpath(folder)) and path.is_file():  # a pipe might never end
                with open(path, "rb") as file:
                    return file.read(self._limits.max_bytes + 1)
        return None


# ------------------------------------------------------------------------------------------- chat completions
@dataclass
class Record:
    """What the log says of a request."""

    read: bool = False  # the whole body
    model: str = "-"
    images: int = 0
    ticket: Ticket | None = None
    details: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        said = [f"model={self.model} images={self.images}"] if self.model != "-" else []
        if (ticket := self.ticket) is not None:
            said.append(f"prompt={ticket.prompt_tokens} cached={ticket.cached_tokens}")
            said.append(f"new={ticket.completion_tokens} finish={','.join(ticket.finish_reasons) or '-'}")
        return " ".join([*said, *self.details])


class ChatCompletions:
    """POST /v1/chat/completions, as an ASGI application."""

    def __init__(self, engine: Engine, limits: ApiLimits, metrics: Metrics):
        self.engine, self.limits, self.metrics = engine, limits, metrics
        self.names = model_ids(engine.models.names)
        self._images, self._room = Images(limits, engine.limits.image), Room(limits.max_held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, record = Headers(scope=scope), scope["state"]["record"]
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "expected a body of content-type application/json", code="unsupported_media")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 20 or int(length) > self.limits.max_body:
            raise Refused(413, f"expected at most {self.limits.max_body:,} bytes in a request, got more")
        with self._room.taken() as take:  # what is only announced takes no room from others
            body = await read_body(receive, self.limits.max_body, take)
            record.read = True
            began = time.monotonic()
            answering = asyncio.create_task(self._answer(body, scope, send, record))
            leaving = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    raise ClientDisconnect
                await answering
            finally:
                for task in (answering, leaving):
                    task.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
                if (ticket := record.ticket) is not None:
                    ticket.cancel()  # in vain after its end
                    self.metrics.seconds.add(time.monotonic() - began)
                    if ticket.first_token_seconds is not None:
                        self.metrics.first.add(ticket.first_token_seconds)

    async def _answer(self, body: bytes, scope: Scope, send: Send, record: Record) -> None:
        bounds = self.engine.limits
        asked, said = read_request(body, bounds.max_new_tokens, self.limits.strict)
        name = self.names.get(asked.model)
        if name is None:
            known = ", ".join(dict.fromkeys(self.names))
            message = f"there is no model {asked.model[:100]!r} here: expected one of {known}"
            raise ApiError(404, message, "model", "model_not_found")
        record.model = asked.model
        options, grammar = asked.options(bounds.max_new_tokens, bounds.slots), asked.grammar
        started = False
        try:
            async with asyncio.timeout(self.limits.seconds):
                messages = await self._messages(asked, record)

                def prompt(checkpoint: Checkpoint) -> tuple[EncodedConversation, GenerationOptions]:
                    return encode_messages(checkpoint, messages), options

                client = client_of(scope)
                question = EngineRequest(name, prompt, options, tuple(asked.stop), asked.top, client, grammar)
                record.ticket = ticket = self.engine.submit(question)
                head = Head(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), asked.model)
                answer = Answer(ticket, asked, head, Vocabulary(self.engine, name))
                if not asked.stream:
                    await JSONResponse(await answer.whole(), headers=said)(scope, _never, send)
                    return
                events = answer.events()
                event: dict[str, Any] | None = await anext(events)  # errors until here have a status
                started = True
                headers = [*STREAM_HEADERS, *((name.encode(), text.encode()) for name, text in said.items())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                while event is not None:
                    await _send_event(send, event)
                    event = await anext(events, None)
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        except Exception as error:
            if not started:
                raise
            told = api_error(error)
            if told.status == 500:
                log_fault(error)
            record.details.append(f"error={told.code}")
            async with asyncio.timeout(1):  # it may be a client that does not read
                await _send_event(send, told.body)
                await send({"type": "http.response.body", "body": b""})

    async def _messages(self, asked: ChatRequest, record: Record) -> list[chat.Message]:
        """The conversation with its images as bytes. Raises ApiError and ImageError."""
        parts = [part for message in asked.messages for part in message.content or ()]
        urls = [part.image_url.url for part in parts if part.image_url is not None]
        record.images = len(urls)
        if len(urls) > (most := self.engine.limits.max_images):
            raise ApiError(400, f"messages: expected at most {most} images, got {len(urls)}", "messages")
        opening = [self._images.open(url, f"image {number}") for number, url in enumerate(urls, start=1)]
        opened = iter(await asyncio.gather(*opening))
        return [
            chat.Message(
                "system" if message.role == "developer" else message.role,
                tuple(
                    ("text", part.text) if part.image_url is None else ("image", next(opened))
                    for part in message.content or ()
                ),
            )
            for message in asked.messages
        ]


async def _left(receive: Receive) -> None:
    """Until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _swallow(receive: Receive) -> None:
    """What else comes of a request that was refused: a client that still sends would not read the refusal if
    the connection were closed upon it."""
    left = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0 and (message := await receive()).get("more_body", False):
                left -= len(message["body"])


async def _never() -> Message:
    return await asyncio.Future()


async def _send_event(send: Send, event: dict[str, Any]) -> None:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


class Vocabulary:
    """Tokens as the protocol shows them beside their logprobs."""

    def __init__(self, engine: Engine, model: str):
        self._engine, self._model = engine, model

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Those of a piece, without the token that ends an answer."""
        if piece.logprobs is None or (checkpoint := self._engine.models.held(self._model)) is None:
            return None
        stops, tokenizer = set(checkpoint.stop_token_ids), checkpoint.processor.tokenizer

        def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            part = "\ufffd" in text  # of a character: its bytes are not known here
            shown = None if part else list(text.encode())
            sure = 0.0 if logprob is None else max(logprob, LEAST_LOGPROB)  # None: a schema left no choice
            return {"token": text, "logprob": sure, "bytes": shown}

        content = [
            entry(token_id, own.logprob) | {"top_logprobs": [entry(*one) for one in own.top]}
            for token_id, own in zip(piece.token_ids, piece.logprobs, strict=True)
            if token_id not in stops
        ]
        return {"content": content, "refusal": None}


class Answer:
    """The answers to one request in the protocol's form."""

    def __init__(self, ticket: Ticket, asked: ChatRequest, head: Head, vocabulary: Vocabulary):
        self.ticket, self.asked, self.head, self._vocabulary = ticket, asked, head, vocabulary

    def _usage(self) -> dict[str, Any]:
        return usage(self.ticket.prompt_tokens, self.ticket.cached_tokens, self.ticket.completion_tokens)

    def _pixels(self) -> PixelText:
        return PixelText(self.ticket.generation_config, self.ticket.image_size, lines=False)

    def _located(self, text: str) -> dict[str, Any]:
        """What an answer locates, beside its text, from what the model wrote."""
        return located(self.ticket.generation_config, self.ticket.image_size, text)

    async def whole(self) -> dict[str, Any]:
        texts = [""] * self.asked.n
        messages = [dict[str, Any]() for _ in texts]
        logprobs: list[Any] = [
            {"content": [], "refusal": None} if self.asked.logprobs else None for _ in texts
        ]
        async for piece in self.ticket:
            texts[piece.answer] += piece.text
            if (own := self._vocabulary.logprobs(piece)) is not None:
                logprobs[piece.answer]["content"] += own["content"]
        for message, text in zip(messages, texts):
            message |= {"content": self._pixels().whole(text), **self._located(text)}
        return completion(self.head, messages, self.ticket.finish_reasons, logprobs, self._usage())

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream: each answer begins with its role and ends with its reason."""
        options = self.asked.stream_options
        extra = {"usage": None} if options is not None and options.include_usage else {}
        silent = set(range(self.asked.n))

        def role(index: int) -> dict[str, Any]:
            silent.discard(index)
            return chunk(self.head, index, {"role": "assistant", "content": ""}) | extra

        texts, pixels = [""] * self.asked.n, dict[int, PixelText]()
        async for piece in self.ticket:
            logprobs = self._vocabulary.logprobs(piece)
            if piece.answer in silent:
                pixels[piece.answer] = self._pixels()
                yield role(piece.answer)
            texts[piece.answer] += piece.text
            shown = pixels[piece.answer].put(piece.text)
            if shown or (logprobs and logprobs["content"]):
                yield chunk(self.head, piece.answer, {"content": shown}, logprobs) | extra
        for index in sorted(silent):
            yield role(index)
        for index, reason in enumerate(self.ticket.finish_reasons):
            if index in pixels and (left := pixels[index].finish()):
                yield chunk(self.head, index, {"content": left}) | extra
            yield chunk(self.head, index, self._located(texts[index]), finish=reason) | extra
        if extra:
            yield self.head.of("chat.completion.chunk") | {"choices": [], "usage": self._usage()}


# --------------------------------------------------------------------------------------------------- the app
def make_app(engine: Engine, limits: ApiLimits, metrics: Metrics) -> FastAPI:
    """The routes. Errors pass through to the `Door`."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    completions, created = ChatCompletions(engine, limits, metrics), int(time.time())
    listed = {
        own: {"id": own, "object": "model", "created": created, "owned_by": "ocelli"}
        for own in completions.names
    }
    app.router.routes.append(Route(CHAT, completions, methods=["POST"]))

    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> Response:
        return JSONResponse(openapi(app))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(explanation(openapi(app)))

    @app.get("/", include_in_schema=False)
    @app.get("/v1", include_in_schema=False)
    async def index(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):  # a browser
            return RedirectResponse("/docs")
        paths = {"chat": CHAT, "models": "/v1/models", "docs": "/docs", "description": "/openapi.json"}
        return JSONResponse({"name": "Ocelli", "about": ABOUT, **paths})

    @app.get("/v1/models", summary="The models that can be asked")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": list(listed.values())})

    @app.get("/v1/models/{name:path}", summary="One of them")
    async def model(name: str) -> Response:
        if name not in listed:
            raise ApiError(404, f"there is no model {name[:100]!r} here", "model", "model_not_found")
        return JSONResponse(listed[name])

    @app.get("/health", summary="Whether the server runs")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", summary="Counts for Prometheus")
    async def shown() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    async def refuse(request: Request, error: Exception) -> Response:
        told = api_error(error)
        allow = (error.headers if isinstance(error, HTTPException) else None) or {}  # of a 405
        return JSONResponse(told.body, told.status, {**told.headers, **allow})

    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(Exception, refuse)  # is raised again for the `Door`
    return app


def beside(door: ASGIApp, page: ASGIApp) -> ASGIApp:
    """The server for programs at its own paths, and a page at all others."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        own = scope["type"] == "http" and scope["path"].startswith(PATHS)
        await (door if own else page)(scope, receive, send)

    return app


class Door:
    """ASGI middleware around everything: who may ask, what is logged, and an answer whatever happens.

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
        began, status, record = time.monotonic(), 0, Record()
        scope.setdefault("state", {})["record"] = record

        async def heard(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            unread = status >= 400 and not record.read
            if message["type"] == "http.response.start" and unread:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            if message["type"] == "http.response.body" and unread and not message.get("more_body"):
                await send({**message, "more_body": True})
                await _swallow(receive)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            headers = Headers(scope=scope)
            self.hosts.check(headers)
            self._check_key(headers, scope["path"])
            await self.app(scope, receive, heard)
        except Exception as error:
            told = api_error(error)
            if told.status == 500:
                log_fault(error)
            if isinstance(error, ClientDisconnect):
                record.details.append("left")
            elif not status:
                await JSONResponse(told.body, told.status, told.headers)(scope, receive, heard)
        finally:
            status = status or 499
            self.metrics.responses[status] += 1
            client, path = client_of(scope) or "-", printable(scope["path"], 80)
            line = f"{client} {scope['method']} {path} {status} {time.monotonic() - began:.3f}s {record}"
            log.info("%s", line.rstrip())

    def _check_key(self, headers: Headers, path: str) -> None:
        if self._key is None or path in OPEN:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
            raise ApiError(401, "expected this server's API key as a bearer token", code="invalid_api_key")


# ------------------------------------------------------------------------------------------------ the server
class Server(BoundedServer):
    """Answers until a signal comes or `should_exit` is set, and then for up to `drain` seconds what it has
    accepted: `run([socket])`.

    Args:
        proxies: addresses whose X-Forwarded-For is believed, such as a balancer's.
        page: answers for all other paths, if there is one; with its own guard.
    """

    def __init__(
        self,
        engine: Engine,
        hosts: Hosts,
        limits: ApiLimits = ApiLimits(),
        api_key: str | None = None,
        drain: float = 30,
        proxies: Sequence[str] = (),
        page: ASGIApp | None = None,
    ):
        self.metrics = Metrics(engine)
        door = Door(make_app(engine, limits, self.metrics), hosts, self.metrics, api_key)
        super().__init__(
            door if page is None else beside(door, page),
            ws="none",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEPT_SECONDS,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
            timeout_graceful_shutdown=max(1, round(drain)) + 2,
        )
        self._engine, self._drain, self._page = engine, drain, page

    async def shutdown(self, sockets: list | None = None) -> None:
        """After the drain what is left is told that the server ends."""
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()
        self._engine.close()

    async def _end(self) -> None:
        await self._engine.drain(self._drain)
        self._engine.close()
        if self._page is not None:  # the connections of open pages do not end by themselves
            await asyncio.sleep(1)
            self.force_exit = True
