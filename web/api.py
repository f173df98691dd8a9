"""The endpoints: OpenAI's and Anthropic's protocols over an engine, and a page.

    POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
    POST /v1/attribution: see `web.attribution`
    GET / (the page), /v1/models, /health, /metrics, /openapi.json; HEAD as well

The other protocols are translated to and from chat completions (`web.blocks`). Each refusal is one JSON
object in the protocol's form. A client that goes away takes its request along.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import cached_property, partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from models import __version__
from models.checkpoints.sources import last_name
from web import anthropic, attribution, page, responses
from web.completion import Completion
from web.door import MESSAGES, Metrics, Record, client_of
from web.engine import Engine, Ticket
from web.errors import Refused
from web.guard import ApiLimits, Room, Turns, read_body
from web.media import Media, prompt_of
from web.protocol import ChatRequest, check_request, read_object
from web.streams import DONE, started, streamed

ABOUT = "Small vision-language models, in the protocols of OpenAI and Anthropic."


class Api:
    """What the endpoints share."""

    def __init__(self, engine: Engine, limits: ApiLimits, metrics: Metrics):
        self.engine, self.limits, self.metrics = engine, limits, metrics
        self.name, self.created = last_name(engine.checkpoint.name), int(time.time())
        self.media, self.room = Media(limits), Room(limits.max_held)
        # Of attribution one at a time: what waits has its body alone, and no image decoded.
        self.looking, self.all_looking = Turns(1), asyncio.Semaphore(1)

    def check(self, name: str) -> str:
        """The name of the model. Raises Refused for another one."""
        if name != self.name:
            message = f"there is no model {name[:100]!r} here: expected {self.name}"
            raise Refused(404, message, "model", "model_not_found")
        return name

    @cached_property
    def listed(self) -> dict[str, Any]:
        """The model as the protocol lists it."""
        listed = {"id": self.name, "object": "model", "created": self.created, "owned_by": "ocelli"}
        return listed | {"ocelli": page.about(self.engine.checkpoint)}


def api_of(request: Request) -> Api:
    return request.app.state.api


def record_of(request: Request) -> Record:
    return request.state.record


Shared = Annotated[Api, Depends(api_of)]
Logged = Annotated[Record, Depends(record_of)]


async def body_in_time(request: Request, api: Shared, record: Logged) -> AsyncIterator[bytes]:
    """The body of a request, which takes room from others until the response has been sent. The request ends
    when its client goes away or its time is over."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, "expected a body of content-type application/json")

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        if not record.sent:
            bound.reschedule(0)  # asyncio.timeout ends what runs inside of it

    leaving = None
    with api.room.taken() as take:  # what is only announced takes none
        try:
            async with asyncio.timeout(api.limits.seconds) as bound:
                body = await read_body(request, api.limits.max_body, take)
                record.read, record.take = True, take
                leaving = asyncio.create_task(gone())
                yield body
        except TimeoutError:
            raise ClientDisconnect if leaving is not None and leaving.done() else TimeoutError from None
        finally:
            if leaving is not None:
                leaving.cancel()


Body = Annotated[bytes, Depends(body_in_time)]


class Asking:
    """One request of any protocol, on its way to the engine and back."""

    def __init__(self, request: Request, api: Shared, record: Logged, body: Body):
        self.api, self.record, self.body, self.client = api, record, body, client_of(request.scope)

    def check(self, chat: dict[str, Any]) -> ChatRequest:
        """See `check_request`."""
        asked = check_request(chat)
        self.record.model = self.api.check(asked.model)
        return asked

    async def ticket(self, asked: ChatRequest, answers: int | None = None) -> Ticket:
        """What is asked, or so many answers to it. Raises Refused, ImageError and QueueFull."""
        api, record, client = self.api, self.record, self.client
        if asked.structured_outputs is not None:
            record.names = record.names | {"response_format": "structured_outputs"}
        options, grammar = asked.options(api.limits.max_new_tokens, api.engine.limits.slots), asked.held_to
        shown = await api.media.read(asked, client, record.take)
        record.images, video = len(shown), any(not one.name.startswith("image") for one in shown)
        prepare = partial(prompt_of, asked, api.media, shown, options)
        count, stop = asked.n if answers is None else answers, tuple(asked.stop)
        return self.submit(Ticket(prepare, count, stop, asked.top, client, grammar, video))

    def submit(self, ticket: Ticket) -> Ticket:
        self.record.tickets.append(self.api.engine.submit(ticket))
        return ticket

    def completion(self, asked: ChatRequest) -> Completion:
        """The answers to what is asked, from the first look at its images on."""
        return Completion(self.api.engine.checkpoint, asked, partial(self.ticket, asked))

    async def converted(self, made: Any, asked: ChatRequest) -> Response:
        """The answer in another protocol: the events of what is `made`, or the whole after them."""
        deltas, silent = await started(self.completion(asked).deltas())
        if asked.stream:
            return streamed(made.events(deltas), silent)
        async for _ in made.events(deltas):
            pass
        return JSONResponse(made.whole)


Asked = Annotated[Asking, Depends()]


# ------------------------------------------------------------------------------------------------- endpoints
router = APIRouter()


def body_of(schema: str = "") -> dict[str, Any]:
    """What OpenAPI says of a body that an endpoint reads by itself: any object, or one of this schema."""
    about = {"$ref": schema} if schema else {"type": "object"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": about}}}}


@router.post(
    "/v1/chat/completions",
    summary="Ask about images",
    openapi_extra=body_of("#/components/schemas/ChatRequest"),
)
async def chat_completions(asking: Asked) -> Response:
    asked = asking.check(read_object(asking.body))
    if not asked.stream:
        return JSONResponse(await asking.completion(asked).whole())
    return streamed(*await started(asking.completion(asked).chunks()), DONE)


@router.post("/v1/responses", summary="The same in OpenAI's Responses", openapi_extra=body_of())
async def create_response(asking: Asked) -> Response:
    asking.record.names, asked = responses.BACK, read_object(asking.body)
    checked = asking.check(responses.chat_body(asked))
    made = responses.Made(asked, checked)
    asking.record.failed = made.failed
    return await asking.converted(made, checked)


@router.post(MESSAGES, summary="The same in Anthropic's Messages", openapi_extra=body_of())
async def create_message(asking: Asked) -> Response:
    asking.record.names = anthropic.BACK
    asked = asking.check(anthropic.chat_body(read_object(asking.body)))
    return await asking.converted(anthropic.Made(asked.model), asked)


@router.post(MESSAGES + "/count_tokens", summary="How many tokens a message asks", openapi_extra=body_of())
async def count_tokens(asking: Asked) -> Response:
    asking.record.names = anthropic.BACK
    asked = asking.check(anthropic.chat_body({"max_tokens": 1} | read_object(asking.body)))
    ticket = await asking.ticket(asked, answers=0)
    async for _ in ticket:
        pass
    return JSONResponse({"input_tokens": ticket.prompt_tokens})


@router.post("/v1/attribution", summary="Where the model looked", openapi_extra=body_of())
async def attribution_maps(asking: Asked) -> Response:
    api, asked = asking.api, asking.check(read_object(asking.body))
    turn = api.looking.of(asking.client)  # by name: it goes with the last who waits for it
    async with turn, api.all_looking:
        shown = await api.media.read(asked, asking.client, asking.record.take)
        asking.record.images = len(shown)
        maps = attribution.Maps(asked, api.media, shown)
        ticket = asking.submit(Ticket(maps.prepare, client=asking.client, then=maps.steps))
        return JSONResponse(await maps.drawn(ticket))


@router.get("/v1/models", summary="The model that can be asked")
async def models(api: Shared) -> Response:
    return JSONResponse({"object": "list", "data": [api.listed]})


@router.get("/v1/models/{name:path}", summary="The same by its name")
async def model(api: Shared, name: str) -> Response:
    return JSONResponse(api.listed | {"id": api.check(name)})


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


def make_app(engine: Engine, limits: ApiLimits, metrics: Metrics) -> FastAPI:
    """The endpoints."""
    app = FastAPI(
        title="Ocelli", version=__version__, description=ABOUT, openapi_url=None, redirect_slashes=False
    )

    async def refuse(request: Request, error: Exception) -> Response:
        record = record_of(request)
        refused = record.refused(error)
        allow = (error.headers if isinstance(error, HTTPException) else None) or {}  # of a 405
        return JSONResponse(record.body(refused), refused.status, {**refused.headers, **allow})

    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(Exception, refuse)  # is raised again for the `Door`
    app.state.api = Api(engine, limits, metrics)
    app.include_router(router)
    app.include_router(page.router)
    return app
