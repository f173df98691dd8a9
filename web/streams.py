"""Server-sent events, with a comment wherever a stream is silent, so that no proxy takes it for dead."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.responses import Response
from starlette.types import Message, Send

PING_SECONDS = 15  # of silence: proxies wait for 60 or so
DONE = b"data: [DONE]\n\n"  # the end of a stream of chat completions
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # nginx would collect events
T = TypeVar("T")


async def started(events: AsyncIterator[T]) -> tuple[AsyncIterator[T], bool]:
    """The same events, once the first has come, or PING_SECONDS later: errors until then have a status. And
    whether none has come."""
    first = asyncio.ensure_future(anext(events))

    async def all_of_them() -> AsyncIterator[T]:
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


def streamed(events: AsyncIterator[dict[str, Any]], silent: bool, last: bytes = b"") -> Response:
    """silent: whether the client has waited for long already."""

    async def encoded() -> AsyncIterator[bytes]:
        if silent:
            yield KEEPALIVE_COMMENT
        async for event in events:
            yield event_of(event)
        if last:
            yield last

    return _Stream(encoded(), headers=HEADERS)


class _Stream(EventSourceResponse):
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


def event_of(value: dict[str, Any]) -> bytes:
    """With the name that protocols besides OpenAI's chat have for events."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return format_sse_event(data_str=data, event=value.get("type"))
