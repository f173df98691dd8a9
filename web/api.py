"""The HTTP server: OpenAI's and Anthropic's protocols over an engine, and a page. Strangers stand before it.

    engine = Engine(Models(["checkpoints/ocelli-shapes"]))
    with socket.create_server(("127.0.0.1", 8000)) as listening:
        Server(engine, Hosts("127.0.0.1")).run([listening])

    POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
    POST /v1/attribution: see `web.attribution`
    GET / (the page), /v1/models, /health, /metrics, /openapi.json; HEAD as well

The others that answer are written from the first: see `web.blocks`. A stream has a comment in it wherever it
is silent for PING_SECONDS, so that no proxy takes it for dead.

Each refusal is one JSON object in OpenAI's form. A client that goes away takes its request along. One line is
logged for a request, without its content. On SIGTERM what was accepted is answered, up to `drain` seconds.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, unquote, urlsplit

from fastapi import APIRouter, Depends, FastAPI
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from data import conversation
from data.errors import ImageError
from data.image_sizes import image_size
from data.images import ImageLimits, NamedBytes, read_bytes
from inference.boxes import located
from inference.calls import CallPiece, whole_calls
from inference.coordinates import PixelText
from inference.votes import pick
from messages import printable
from models import __version__
from web import anthropic, attribution, page, responses
from web.blocks import piece_of
from web.connections import BoundedServer
from web.engine import (
    Engine,
    EngineRequest,
    Piece,
    Ticket,
    prepare_messages,
)
from web.errors import Refused, log_fault, refusal
from web.guard import Hosts, Room, Turns, read_body
from web.models import model_ids
from web.protocol import ChatRequest, StreamOptions, check_request, read_object, read_request

log = logging.getLogger("ocelli.server")

KEPT_SECONDS = 75  # that a connection is kept for the next request: longer than most clients keep theirs
LINGER_SECONDS, LINGER_BYTES = 5, 2**25  # for what is still sent of a request that was refused
FETCHES = 8  # images of the internet that are fetched at a time
PING_SECONDS = 15  # of silence in a stream: proxies wait for 60 or so
DONE = b"data: [DONE]\n\n"  # the end of OpenAI's streams, but for Responses
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # nginx would collect events
ABOUT = "Small vision-language models, in the protocols of OpenAI and Anthropic."
OPEN = ("/", "/openapi.json", "/health", "/page/")  # without a key: a page asks for it, balancers send none
OLLAMA = "/api"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LEAST_LOGPROB = -9999.0  # JSON has no infinity
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)  # seconds


@dataclass(frozen=True)
class ApiLimits:
    """What one client may take besides `EngineLimits`.

    max_body: bytes of a request. max_held: bytes of all requests that are being answered together.
    seconds: from a request's beginning to its end.
    allow_urls: images may be fetched from public addresses. allow_paths: the folder from whose files images
        may be read, or None.
    """

    max_body: int = 32 * 2**20
    max_held: int = 2**30
    seconds: float = 600
    allow_urls: bool = False
    allow_paths: Path | None = None


def client_of(scope: Scope) -> str:
    """The address of a client, without the scope that an IPv6 one may have. What a proxy says of it may be
    any text: quoted, if it is no address."""
    said = (scope.get("client") or ("", 0))[0]
    try:
        return str(ipaddress.ip_address(said)).partition("%")[0]
    except ValueError:
        return ascii(said[:60])


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
    """Reads what `image_url` and `video_url` name, in threads."""

    def __init__(self, limits: ApiLimits, image: ImageLimits):
        self._folder = limits.allow_paths
        self._limits = replace(image, allow_urls=limits.allow_urls, allow_paths=False)
        self._of_videos = replace(self._limits, max_bytes=limits.max_body)
        self._decoding = ThreadPoolExecutor(2, thread_name_prefix="images")
        self._fetching = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetches")  # waits, mostly
        self._turns = Turns(2)

    async def open(self, url: str, name: str, client: str, take: Callable[[int], None]) -> bytes:
        """The bytes of an image whose header is within the limits, or of a video, whose name says that it is
        one: what that holds is looked at where it takes time from nobody else. `take` is called with the
        number of those that the request did not bring. Raises ImageError."""
        remote = url[:8].lower().startswith(("http://", "https://"))
        pool, turn = self._fetching if remote else self._decoding, self._turns.of(client)
        async with turn:
            data = await asyncio.get_running_loop().run_in_executor(pool, self._open, url, name)
        if url[:5].lower() != "data:":
            take(len(data))
        return data

    def _open(self, url: str, name: str) -> bytes:
        scheme = url[:8].lower()
        source: str | bytes | None = url
        if not scheme.startswith(("data:", "http://", "https://")):
            if self._folder is None or not scheme.startswith("file://"):
                said = f"expected a data: URL with the {name.split()[0]} itself"
                raise ImageError(
                    f"{name}: {said}; serve.py --allow-paths DIR allows file:// URLs of a folder"
                )
            if (source := self._file(self._folder, url)) is None:
                raise ImageError(f"{name}: expected a file within the folder that this server may read")
        video = name.startswith("video")
        data = NamedBytes(read_bytes(source, self._of_videos if video else self._limits, name))
        data.name = name
        if not video:
            image_size(data, self._limits, name)
        return data

    def _file(self, folder: Path, url: str) -> bytes | None:
        """A file in the folder, by its path there or whole, as far as a video may be long, and a byte. None
        for all else: a client does not learn what there is on this machine."""
        with suppress(OSError, ValueError):  # it may not be read; no URL, or a NUL in it
            named, inside = unquote(urlsplit(url).path), os.path.realpath(folder)
            for path in (Path(os.path.realpath(one)) for one in (folder / named.lstrip("/"), named)):
                if path.is_relative_to(inside) and path.is_file():  # a pipe might never end
                    with open(path, "rb") as file:
                        return file.read(self._of_videos.max_bytes + 1)
        return None


# ----------------------------------------------------------------------------------- what endpoints depend on
@dataclass
class Record:
    """What the log and the metrics say of a request, and how errors are told in its protocol: `names` are its
    fields by what chat completions call them, `body` makes a response of an error, and `failed` the last
    event of a stream."""

    read: bool = False  # the whole body
    sent: bool = False  # the whole response
    model: str = "-"
    images: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    take: Callable[[int], None] = lambda more: None  # room for bytes besides the body
    names: dict[str, str] = field(default_factory=dict)
    body: Callable[[Refused], dict[str, Any]] = lambda told: told.body
    failed: Callable[[Refused], dict[str, Any]] = lambda told: told.body

    def told(self, error: Exception) -> Refused:
        told = refusal(error)
        field = (told.param or "").split("[")[0]
        if field not in self.names:
            return told
        name, said = self.names[field], str(told).removeprefix(f"{told.param}: ")
        said = f"{name}: {said.replace(f'without {field}', f'without {name}')}"
        return Refused(told.status, said, name, told.code, told.retry_after)

    def __str__(self) -> str:
        said = [f"model={self.model} images={self.images}"] if self.model != "-" else []
        if tickets := self.tickets:
            prompt = sum(one.prompt_tokens for one in tickets)
            cached = sum(one.cached_tokens for one in tickets)
            new = sum(one.completion_tokens for one in tickets)
            reasons = dict.fromkeys(reason for one in tickets for reason in one.finish_reasons if reason)
            said.append(f"prompt={prompt} cached={cached} new={new} finish={','.join(reasons) or '-'}")
        return " ".join([*said, *self.details])


class Api:
    """What the endpoints share."""

    def __init__(self, engine: Engine, limits: ApiLimits, metrics: Metrics):
        self.engine, self.limits, self.metrics = engine, limits, metrics
        self.names, self.created = model_ids(engine.models.names), int(time.time())
        self.images, self.room = Images(limits, engine.limits.image), Room(limits.max_held)
        self.store = responses.Store()
        # Of attribution one at a time: what waits has its body alone, and no image decoded.
        self.looking, self.all_looking = Turns(1), asyncio.Semaphore(1)

    def listed(self, name: str) -> dict[str, Any]:
        """A model as the protocol lists it. Raises Refused for one that is not here."""
        if name not in self.names:
            known = ", ".join(self.names)
            message = f"there is no model {name[:100]!r} here: expected one of {known}"
            raise Refused(404, message, "model", "model_not_found")
        listed = {"id": name, "object": "model", "created": self.created, "owned_by": "ocelli"}
        held = self.engine.models.held(self.names[name])
        return listed | ({"ocelli": page.about(held)} if held else {})


def api_of(request: Request) -> Api:
    return request.app.state.api


def record_of(request: Request) -> Record:
    return request.state.record


Shared = Annotated[Api, Depends(api_of)]
Logged = Annotated[Record, Depends(record_of)]


async def json_body(request: Request, api: Shared, record: Logged) -> AsyncIterator[bytes]:
    """The body of a request, which takes room from others until the response has been sent."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, "expected a body of content-type application/json")
    with api.room.taken() as take:  # what is only announced takes none
        async with asyncio.timeout(api.limits.seconds):
            body = await read_body(request, api.limits.max_body, take)
        record.read, record.take = True, take
        yield body


async def body_in_time(
    request: Request, api: Shared, record: Logged, body: Annotated[bytes, Depends(json_body)]
) -> AsyncIterator[bytes]:
    """The body of a request that ends when its client goes away or its time is over."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        if not record.sent:
            bound.reschedule(0)  # asyncio.timeout ends what runs inside of it

    leaving = None
    try:
        async with asyncio.timeout(api.limits.seconds) as bound:
            leaving = asyncio.create_task(gone())
            yield body
    except TimeoutError:
        raise ClientDisconnect if leaving is not None and leaving.done() else TimeoutError from None
    finally:
        if leaving is not None:
            leaving.cancel()


Body = Annotated[bytes, Depends(body_in_time)]


# ------------------------------------------------------------------------------------------------- endpoints
router = APIRouter()


def body_of(schema: str = "") -> dict[str, Any]:
    """What OpenAPI says of a body that an endpoint reads by itself: any object, or one of this schema."""
    about = {"$ref": schema} if schema else {"type": "object"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": about}}}}


@router.post(CHAT, summary="Ask about images", openapi_extra=body_of("#/components/schemas/ChatRequest"))
async def chat_completions(request: Request, api: Shared, record: Logged, body: Body) -> Response:
    asked, headers = read_request(body, api.engine.limits.max_new_tokens)
    if not asked.stream:
        return JSONResponse(await (await asked_chat(request, api, record, asked)).whole(), headers=headers)
    chunks, silent = await started(chunks_of(request, api, record, asked))
    return streamed(chunks, silent, headers, DONE)


@router.post(RESPONSES, summary="The same in the protocol of OpenAI's Responses", openapi_extra=body_of())
async def create_response(request: Request, api: Shared, record: Logged, body: Body) -> Response:
    record.names, asked = responses.BACK, read_object(body)
    before = api.store.before(piece_of(asked, "previous_response_id", str), body, api.limits.max_body)
    chat = responses.chat_body(asked, before.messages)
    checked, headers = check_request(chat, api.engine.limits.max_new_tokens)
    made = responses.Made(asked, checked, before, partial(api.store.put, client=client_of(request.scope)))
    chunks, silent = await started(chunks_of(request, api, record, checked, bool(asked.get("stream"))))
    record.failed = made.failed
    return await told(made, made.events(chunks), silent, asked, headers)


@router.get(RESPONSES + "/{name}", summary="A response that is kept")
async def kept_response(api: Shared, name: str) -> Response:
    return Response(api.store.get(name).response, media_type="application/json")


@router.delete(RESPONSES + "/{name}", summary="Keep it no longer")
async def drop_response(api: Shared, name: str) -> Response:
    api.store.drop(name)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


@router.post(MESSAGES, summary="The same in the protocol of Anthropic's Messages", openapi_extra=body_of())
async def create_message(request: Request, api: Shared, record: Logged, body: Body) -> Response:
    record.names, asked = anthropic.BACK, read_object(body)
    chat = anthropic.chat_body(asked)
    checked, headers = check_request(chat, api.engine.limits.max_new_tokens)
    made = anthropic.Made(checked.model)
    chunks, silent = await started(chunks_of(request, api, record, checked, bool(asked.get("stream"))))
    return await told(made, made.events(chunks), silent, asked, headers)


@router.post(MESSAGES + "/count_tokens", summary="How many tokens a message asks", openapi_extra=body_of())
async def count_tokens(request: Request, api: Shared, record: Logged, body: Body) -> Response:
    record.names, asked = anthropic.BACK, read_object(body)
    chat = anthropic.chat_body({"max_tokens": 1} | asked)
    checked, headers = check_request(chat, api.engine.limits.max_new_tokens)
    ticket = (await asked_chat(request, api, record, checked, answers=0)).ticket
    async for _ in ticket:
        pass
    return JSONResponse({"input_tokens": ticket.prompt_tokens}, headers=headers)


@router.post("/v1/attribution", summary="Where the model looked", openapi_extra=body_of())
async def attribution_maps(request: Request, api: Shared, record: Logged, body: Body) -> Response:
    value = read_object(body)
    method = attribution.read_method(value)
    asked, _ = check_request(value, api.engine.limits.max_new_tokens)
    record.model, client = api.listed(asked.model)["id"], client_of(request.scope)
    turn = api.looking.of(client)  # by name: it goes with the last who waits for it
    async with turn, api.all_looking:
        messages = await opened(request, api, asked, record)
        prepare = partial(attribution.prepare, messages, method)
        question = EngineRequest(api.names[asked.model], prepare, 1, client=client)
        record.tickets.append(api.engine.submit(question))
        return JSONResponse(await attribution.drawn(record.tickets[-1], attribution.question_of(messages)))


async def asked_chat(
    request: Request, api: Api, record: Record, asked: ChatRequest, answers: int | None = None
) -> Answer:
    """What is asked, as a question to the engine, of so many `answers` in place of those that it asks for.
    Raises Refused and ImageError."""
    record.model, limits = api.listed(asked.model)["id"], api.engine.limits
    if asked.structured_outputs is not None:
        record.names = record.names | {"response_format": "structured_outputs"}
    options = asked.options(limits.max_new_tokens, limits.slots)
    messages, client = await opened(request, api, asked, record), client_of(request.scope)
    tools, count = asked.shown_tools, asked.n if answers is None else answers
    prepare = partial(prepare_messages, messages, options, thinks_by=asked.thinks_by, tools=tools)
    video = any(part.video_url for message in asked.messages for part in message.content or ())
    model, stop = api.names[asked.model], tuple(asked.stop)
    question = EngineRequest(model, prepare, count, stop, asked.top, client, asked.held_to, video)
    record.tickets.append(api.engine.submit(question))
    return Answer(api.engine, record.tickets[-1], asked)


async def chunks_of(
    request: Request, api: Api, record: Record, asked: ChatRequest, streamed: bool = True
) -> Events:
    """The chunks of what is asked, from the first look at its images on. `streamed`: see `Answer.events`."""
    async for chunk in (await asked_chat(request, api, record, asked)).events(streamed):
        yield chunk


async def opened(
    request: Request, api: Api, asked: ChatRequest, record: Record
) -> list[conversation.Message]:
    """The conversation with its images and videos as bytes. Raises Refused and ImageError."""
    parts = [part for message in asked.messages for part in message.content or ()]
    shown = [(part.type.removesuffix("_url"), part.shown.url) for part in parts if part.shown is not None]
    record.images, client = len(shown), client_of(request.scope)
    if len(shown) > (most := api.engine.limits.max_images):
        raise Refused(400, f"messages: expected at most {most} images, got {len(shown)}", "messages")
    named = [(f"{kind} {number}", url) for number, (kind, url) in enumerate(shown, start=1)]
    try:  # where one fails, the others end with it: they would take room that is never given back
        async with asyncio.TaskGroup() as group:
            opening = [
                group.create_task(api.images.open(url, name, client, record.take)) for name, url in named
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    images = (task.result() for task in opening)
    return [
        conversation.Message(
            "system" if message.role == "developer" else message.role,
            tuple(
                ("text", part.text) if part.shown is None else (part.type.removesuffix("_url"), next(images))
                for part in message.content or ()
            ),
            message.calls,
            message.tool_call_id or "",
            (message.role == "assistant" and message.reasoning_content) or "",
            (message.role == "tool" and message.name) or "",
            isinstance(message.content, conversation.GivenText),
        )
        for message in asked.messages
    ]


Events = AsyncIterator[dict[str, Any]]


async def started(events: Events) -> tuple[Events, bool]:
    """The same events, once the first has come, or PING_SECONDS later: errors until then have a status. And
    whether none has come."""
    first = asyncio.ensure_future(anext(events))

    async def all_of_them() -> Events:
        try:
            yield await first
        finally:
            first.cancel()
        async for event in events:
            yield event

    try:
        await asyncio.wait([first], timeout=PING_SECONDS)
    except asyncio.CancelledError:
        first.cancel()
        raise
    if first.done():
        first.result()  # raises what it has failed with
    return all_of_them(), not first.done()


class Stream(EventSourceResponse):
    """Events with pings between them. FastAPI has these as well, in routes that always stream, at the cost of
    two more queues for each event."""

    async def stream_response(self, send: Send) -> None:
        latest = time.monotonic()

        async def noted(message: Message) -> None:
            nonlocal latest
            await send(message)
            latest = time.monotonic()

        async def ping() -> None:
            while True:
                if (left := latest + PING_SECONDS - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                else:
                    await noted({"type": "http.response.body", "body": KEEPALIVE_COMMENT, "more_body": True})

        pinging = asyncio.create_task(ping())
        try:
            await super().stream_response(noted)
        finally:
            pinging.cancel()


def streamed(events: Events, silent: bool, headers: dict[str, str], last: bytes = b"") -> Response:
    """silent: whether the client has waited for long already."""

    async def encoded() -> AsyncIterator[bytes]:
        if silent:
            yield KEEPALIVE_COMMENT
        async for event in events:
            yield event_of(event)
        if last:
            yield last

    return Stream(encoded(), headers=STREAM_HEADERS | headers)


async def told(
    made: Any, events: Events, silent: bool, asked: dict[str, Any], headers: dict[str, str]
) -> Response:
    """What is made of chunks in another protocol: its events, or the whole after them."""
    if asked.get("stream"):
        return streamed(events, silent, headers)
    async for _ in events:
        pass
    return JSONResponse(made.whole, headers=headers)


def event_of(value: dict[str, Any]) -> bytes:
    """With the name that protocols besides OpenAI's chat have for events."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return format_sse_event(data_str=data, event=value.get("type"))


@router.get("/v1/models", summary="The models that can be asked")
async def models(api: Shared) -> Response:
    return JSONResponse({"object": "list", "data": [api.listed(name) for name in api.names]})


@router.get("/v1/models/{name:path}", summary="One of them")
async def model(api: Shared, name: str) -> Response:
    return JSONResponse(api.listed(name))


@router.get("/health", summary="Whether the server runs")
async def health() -> Response:
    return JSONResponse({"status": "ok"})


@router.get("/metrics", summary="Counts for Prometheus")
async def metrics(api: Shared) -> Response:
    return PlainTextResponse(api.metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/openapi.json", include_in_schema=False)
async def description(request: Request) -> Response:
    made = request.app.openapi()
    schema = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    known = made.setdefault("components", {}).setdefault("schemas", {})
    known |= schema.pop("$defs") | {"ChatRequest": schema}
    return JSONResponse(made)


@router.get("/v1", include_in_schema=False)
async def index() -> Response:
    paths = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
    paths |= {"models": "/v1/models", "description": "/openapi.json"}
    return JSONResponse({"name": "Ocelli", "about": ABOUT, **paths})


@router.api_route(OLLAMA + "{rest:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
async def ollama() -> Response:
    raise Refused(404, "this server does not speak Ollama's protocol: use OpenAI's, at /v1 of this address")


class Answer:
    """The answers to one request in the protocol's form."""

    def __init__(self, engine: Engine, ticket: Ticket, asked: ChatRequest):
        self.engine, self.ticket, self.asked = engine, ticket, asked
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())  # since 1970

    def _object(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self.asked.model}
        return {**head, "choices": choices, **more}

    def _usage(self) -> dict[str, Any]:
        """Positions of the prompt with its images, how many of them were kept from before, and new tokens,
        with those of the thinking."""
        prompt, new = self.ticket.prompt_tokens, self.ticket.completion_tokens
        cached = {"cached_tokens": self.ticket.cached_tokens}
        thought = {"reasoning_tokens": self.ticket.reasoning_tokens}
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**counts, "prompt_tokens_details": cached, "completion_tokens_details": thought}

    def _pixels(self) -> PixelText:
        return PixelText(self.ticket.coordinates, self.ticket.sizes, lines=False)

    def _located(self, text: str) -> dict[str, Any]:
        """What an answer locates, beside its text, from what the model wrote."""
        return located(self.ticket.coordinates, self.ticket.sizes, text)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Those of a piece, without the token that ends an answer and what was thought before it."""
        model = self.ticket.request.model
        if piece.logprobs is None or (checkpoint := self.engine.models.held(model)) is None:
            return None
        stops, tokenizer = set(checkpoint.stop_token_ids), checkpoint.processor.tokenizer

        def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            part = "\ufffd" in text  # of a character: its bytes are not known here
            shown = None if part else list(text.encode())
            # None: a schema left no choice.
            number = 0.0 if logprob is None else max(logprob, LEAST_LOGPROB)
            return {"token": text, "logprob": number, "bytes": shown}

        content = [
            entry(token_id, token.logprob) | {"top_logprobs": [entry(*one) for one in token.top]}
            for token_id, token in zip(piece.token_ids[piece.thinking :], piece.logprobs, strict=True)
            if token_id not in stops
        ]
        return {"content": content, "refusal": None}

    def _reason(self, index: int, calls: bool) -> str:
        """Why an answer ended. One that was cut is not said to have called, if it has."""
        reason = self.ticket.finish_reasons[index]
        return "tool_calls" if calls and reason == "stop" else reason

    async def whole(self) -> dict[str, Any]:
        texts, tokens = [""] * self.asked.n, [list[Any]() for _ in range(self.asked.n)]
        thoughts, made = [""] * self.asked.n, [list[CallPiece]() for _ in range(self.asked.n)]
        async for piece in self._settled():
            texts[piece.answer] += piece.text
            made[piece.answer] += piece.calls
            thoughts[piece.answer] += piece.thought
            tokens[piece.answer] += (self._logprobs(piece) or {"content": []})["content"]
        choices = []
        for index, (text, content) in enumerate(zip(texts, tokens)):
            calls = [_call(call.id, call.name, call.arguments) for call in whole_calls(made[index])]
            shown = None if made[index] and not text else self._pixels().whole(text)
            said = {"content": shown, **self._located(text)} | ({"tool_calls": calls} if calls else {})
            message = {"role": "assistant", **said, "refusal": None, **self.ticket.decided[index]}
            if thoughts[index]:
                message["reasoning_content"] = thoughts[index].strip()
            logprobs = {"content": content, "refusal": None} if self.asked.logprobs else None
            choice = {"index": index, "message": message, "logprobs": logprobs}
            choices.append(choice | {"finish_reason": self._reason(index, bool(calls))})
        more = {"usage": self._usage()}
        if self.asked.pick:
            more["picked"] = self._pick(choices, self.asked.pick)
        return self._object("chat.completion", choices, **more)

    def _pick(self, choices: list[dict[str, Any]], by: str) -> dict[str, Any]:
        """Put the answer that is picked first, before the others in the order of their seeds, each with its
        confidence. Returns what `pick` says of them in this order."""
        for choice, confidence in zip(choices, self.ticket.confidences, strict=True):
            choice["confidence"] = confidence

        def picked() -> dict[str, Any]:
            texts = [choice["message"]["content"] for choice in choices]
            return pick(texts, [choice["confidence"] for choice in choices], by)

        choices.insert(0, choices.pop(picked()["number"]))
        for index, choice in enumerate(choices):
            choice["index"] = index
        return picked()

    async def _settled(self) -> AsyncIterator[Piece]:
        """All pieces once the last is there, with what turned out to be thought as that."""
        pieces = [piece async for piece in self.ticket]
        for at, piece in enumerate(pieces):
            if piece.turned is not None:
                for before, one in enumerate(pieces[:at]):
                    if one.answer == piece.answer:
                        self.ticket.reasoning_tokens += len(one.token_ids) - one.thinking
                        said, logprobs = one.thought + one.text, one.logprobs and []
                        one = one._replace(text="", thought=said, logprobs=logprobs)
                        pieces[before] = one._replace(thinking=len(one.token_ids))
                text, thought = piece.text[piece.turned :], piece.text[: piece.turned].rstrip()
                pieces[at] = piece._replace(text=text, thought=piece.thought + thought)
        for piece in pieces:
            yield piece

    async def events(self, streamed: bool = True) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream: each answer begins with its role and ends with its reason. Of one that
        nobody sees before its end they are `_settled`."""
        options = self.asked.stream_options or StreamOptions()
        extra: dict[str, Any] = {"usage": None} if options.include_usage else {}
        silent = set(range(self.asked.n))

        def chunk(
            index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
        ) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            if options.continuous_usage_stats and extra:
                extra["usage"] = self._usage()
            return self._object("chat.completion.chunk", [choice], **extra)

        def role(index: int) -> dict[str, Any]:
            silent.discard(index)
            return chunk(index, {"role": "assistant", "content": ""})

        texts, pixels, calls = [""] * self.asked.n, dict[int, PixelText](), set[int]()
        async for piece in self.ticket if streamed else self._settled():
            logprobs = self._logprobs(piece)
            if piece.answer in silent:
                pixels[piece.answer] = self._pixels()
                yield role(piece.answer)
            if piece.thought:
                yield chunk(piece.answer, {"reasoning_content": piece.thought})
            texts[piece.answer] += piece.text
            shown = pixels[piece.answer].put(piece.text)
            if shown or (logprobs and logprobs["content"]):
                yield chunk(piece.answer, {"content": shown}, logprobs)
            for call in piece.calls:
                calls.add(piece.answer)
                more = {"function": {"arguments": call.arguments}}
                about = _call(call.id, call.name, "") if call.name else more
                if call.name or call.arguments:
                    yield chunk(piece.answer, {"tool_calls": [{"index": call.index, **about}]})
        for index in sorted(silent):
            yield role(index)
        for index in range(self.asked.n):
            if index in pixels and (left := pixels[index].finish()):
                yield chunk(index, {"content": left})
            about = self._located(texts[index]) | self.ticket.decided[index]
            yield chunk(index, about, finish=self._reason(index, index in calls))
        if extra:
            yield self._object("chat.completion.chunk", [], usage=self._usage())


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool in the protocol's form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --------------------------------------------------------------------------------------------------- the app
def make_app(engine: Engine, limits: ApiLimits, metrics: Metrics) -> FastAPI:
    """The endpoints."""
    app = FastAPI(
        title="Ocelli", version=__version__, description=ABOUT, openapi_url=None, redirect_slashes=False
    )

    async def refuse(request: Request, error: Exception) -> Response:
        record = record_of(request)
        told = record.told(error)
        allow = (error.headers if isinstance(error, HTTPException) else None) or {}  # of a 405
        return JSONResponse(record.body(told), told.status, {**told.headers, **allow})

    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(Exception, refuse)  # is raised again for the `Door`
    app.state.api = Api(engine, limits, metrics)
    app.include_router(router)
    app.include_router(page.router)
    return app


class Door:
    """ASGI middleware around everything: who may ask, what is logged and counted, and an answer whatever
    happens. A request's `Record` is in its state.

    Args:
        api_key: what clients have to send as a bearer token, except for what is OPEN; None asks for none.
        origins: whose pages may send requests, besides those of `hosts`; "*" is all.
    """

    def __init__(
        self, app: ASGIApp, hosts: Hosts, metrics: Metrics, api_key: str | None, origins: Sequence[str] = ()
    ):
        self.app, self.hosts, self.metrics, self.origins = app, hosts, metrics, origins
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # there are no web sockets
        began, status, streams, record = time.monotonic(), 0, False, Record()
        if scope["path"].startswith(MESSAGES):
            record.body = record.failed = anthropic.error_body
        elif scope["path"].startswith(OLLAMA):
            record.body = lambda told: {"error": str(told)}
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
            self.hosts.check(headers, self.origins)
            self._check_key(headers, scope["path"])
            asked = "GET" if scope["method"] == "HEAD" else scope["method"]  # the body stays in uvicorn
            await self.app({**scope, "method": asked}, receive, heard)
        except Exception as error:
            told = record.told(error)
            if told.status == 500:
                log_fault(error)
            if isinstance(error, ClientDisconnect):
                record.details.append("left")
            elif not status:
                await JSONResponse(record.body(told), told.status, told.headers)(scope, receive, heard)
            elif streams and not record.sent:
                record.details.append(f"error={told.code}")
                async with asyncio.timeout(1):  # it may be a client that does not read
                    await heard({"type": "http.response.body", "body": event_of(record.failed(told))})
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


# ------------------------------------------------------------------------------------------------ the server
class Server(BoundedServer):
    """Answers until a signal comes or `should_exit` is set, and then for up to `drain` seconds what it has
    accepted: `run([socket])`.

    Args:
        proxies: addresses whose X-Forwarded-For is believed, such as a balancer's.
        origins: of other sites, such as "https://ui.example", whose pages may ask; "*" is all.
    """

    def __init__(
        self,
        engine: Engine,
        hosts: Hosts,
        limits: ApiLimits = ApiLimits(),
        api_key: str | None = None,
        drain: float = 30,
        proxies: Sequence[str] = (),
        origins: Sequence[str] = (),
    ):
        self.metrics = Metrics(engine)
        door: ASGIApp = Door(make_app(engine, limits, self.metrics), hosts, self.metrics, api_key, origins)
        if origins:
            shown = ("retry-after", "x-ocelli-clipped")
            methods = ("GET", "HEAD", "POST", "DELETE")
            more: dict[str, Any] = {"allow_private_network": True, "expose_headers": shown}
            door = Origins(door, origins, methods, ["*"], **more)
        super().__init__(
            door,
            ws="none",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEPT_SECONDS,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
            timeout_graceful_shutdown=max(1, round(drain)) + 2,
        )
        self._engine, self._drain = engine, drain

    async def shutdown(self, sockets: list | None = None) -> None:
        """After the drain what is left is told that the server ends."""
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()
        self._engine.close()

    async def _end(self) -> None:
        await self._engine.drain(self._drain)
        self._engine.close()
