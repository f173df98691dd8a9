"""Answers to many at a time: a bounded queue, a scheduler for each model, one thread in which they work.

A stand-in for the engine of the `engine` branch, with its interface; clients are served in order of arrival.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from data.chat import Message
from data.images import ImageLimits, load_image
from generation.decoding import GenerationOptions
from generation.requests import NewTokens, Request
from generation.scheduler import Scheduler
from inference.answer import AnswerText, prompt_tokens, requests_for
from inference.checkpoint import Checkpoint
from inference.errors import RequestError
from web.models import Models


class QueueFull(RequestError):
    """Too many requests wait; `retry_after` is when to ask again, in seconds."""

    def __init__(self, retry_after: float):
        super().__init__("too many requests are waiting here just now: try again in a moment")
        self.retry_after = retry_after


@dataclass(frozen=True)
class EngineLimits:
    slots: int = 8
    max_queue: int = 64
    prefill_chunk: int | None = None


@dataclass(eq=False)
class EngineRequest:
    model: str
    messages: list[Message]
    options: GenerationOptions
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    client: str = ""


@dataclass
class EngineStats:
    requests: int = 0
    waiting: int = 0
    running: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Piece:
    answer: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list | None = None


class Ticket:
    """A question that was accepted; see `Engine.submit`."""

    def __init__(self, question: EngineRequest):
        self.question, self.began = question, time.monotonic()
        self.cancelled, self.running, self.open = False, False, question.options.num_return_sequences
        self.finish_reasons: list[str] = [""] * self.open
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.first_token_seconds: float | None = None
        self.texts: list[_Text] = []
        self.loop = asyncio.get_running_loop()
        self.pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    def cancel(self) -> None:
        self.cancelled = True

    def put(self, piece: Piece | Exception | None) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self.pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece


class _Text:
    """The text of one answer up to a stop string, which may begin in one token and end in another."""

    def __init__(self, checkpoint: Checkpoint, stop: tuple[str, ...]):
        self._text, self._stop, self._held, self.stopped = AnswerText(checkpoint), stop, "", False

    def put(self, token_ids: list[int], last: bool = False) -> str:
        if self.stopped:
            return ""
        self._held += "".join(map(self._text.put, token_ids)) + (self._text.finish() if last else "")
        ends = [self._held.index(stop) for stop in self._stop if stop in self._held]
        self.stopped = bool(ends)
        sure = min(ends) if ends else len(self._held)
        if not ends and not last:
            begun = (n for stop in self._stop for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
            sure -= max(begun, default=0)
        shown, self._held = self._held[:sure], self._held[sure:]
        return shown


class Engine:
    """See the module's docstring."""

    def __init__(self, models: Models, limits: EngineLimits | None = None):
        self.models, self.limits, self.stats = models, limits or EngineLimits(), EngineStats()
        self._prepared: deque[tuple[Ticket, Checkpoint, list[Request]]] = deque()
        self._schedulers: dict[int, tuple[Scheduler, dict[Any, Ticket]]] = {}
        self._tickets: set[Ticket] = set()
        self._closed, self._wake = False, threading.Event()
        self._preparing = ThreadPoolExecutor(2)
        threading.Thread(target=self._work, daemon=True, name="models").start()

    def submit(self, question: EngineRequest) -> Ticket:
        if self._closed:
            raise RequestError("this server is ending")
        if self.stats.waiting >= self.limits.max_queue:
            raise QueueFull(1.0)
        ticket = Ticket(question)
        self._tickets.add(ticket)
        self.stats.requests += 1
        self.stats.waiting += 1
        self._preparing.submit(self._prepare, ticket)
        return ticket

    def _prepare(self, ticket: Ticket) -> None:
        try:
            question = ticket.question
            checkpoint = self.models.open(question.model)
            limits = ImageLimits(allow_urls=False, allow_paths=False)
            shown = {
                "text": lambda text: {"type": "text", "text": text},
                "image": lambda raw: {"type": "image", "image": load_image(raw, limits)},
            }
            row = checkpoint.processor.encode_conversation(
                [{"role": one.role, "content": [shown[kind](value) for kind, value in one.parts]}
                 for one in question.messages], True)  # fmt: skip
            checkpoint.check_images(row.image_tokens)
            requests = requests_for(checkpoint, row, question.options.max_new_tokens, question.options)
            ticket.texts = [_Text(checkpoint, question.stop) for _ in requests]
            ticket.prompt_tokens = prompt_tokens(checkpoint, row)
            self._prepared.append((ticket, checkpoint, requests))
        except Exception as error:
            self._end(ticket, error)
        self._wake.set()

    def _end(self, ticket: Ticket, error: Exception | None = None) -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            if ticket.running:
                self.stats.running -= 1
            else:
                self.stats.waiting -= 1
            ticket.put(error)

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait(0.05)
            self._wake.clear()
            while not self._closed and (
                self._admit() or any(not s.idle for s, _ in self._schedulers.values())
            ):
                for scheduler, tickets in self._schedulers.values():
                    for key, ticket in [(key, one) for key, one in tickets.items() if one.cancelled]:
                        scheduler.cancel(key)
                        del tickets[key]
                        self._end(ticket)
                    for event in scheduler.step():
                        self._deliver(scheduler, tickets, event)
        for ticket in list(self._tickets):
            self._end(ticket, RequestError("this server is ending"))

    def _admit(self) -> bool:
        while self._prepared:
            ticket, checkpoint, requests = self._prepared[0]
            if ticket.cancelled:
                self._prepared.popleft()
                self._end(ticket)
                continue
            key = id(checkpoint.model)
            if key not in self._schedulers:
                slots, chunk = self.limits.slots, self.limits.prefill_chunk
                made = Scheduler(checkpoint.model, slots, checkpoint.decode_step, prefill_chunk=chunk)
                self._schedulers[key] = made, {}
            scheduler, tickets = self._schedulers[key]
            if scheduler.free < len(requests):
                return True
            self._prepared.popleft()
            try:
                for number, request in enumerate(requests):
                    tickets[ticket, number] = ticket
                    asked = replace(request, key=(ticket, number), logprobs=ticket.question.logprobs)
                    scheduler.add(asked)
            except (ValueError, OSError) as error:
                for number in range(len(requests)):
                    scheduler.cancel((ticket, number))
                    tickets.pop((ticket, number), None)
                self._end(ticket, RequestError(str(error)))
                continue
            ticket.running = True
            self.stats.waiting -= 1
            self.stats.running += 1
        return False

    def _deliver(self, scheduler: Scheduler, tickets: dict[Any, Ticket], event: Any) -> None:
        if event.key not in tickets:
            return
        ticket, number = event.key
        text = ticket.texts[number]
        if isinstance(event, NewTokens):
            ticket.first_token_seconds = ticket.first_token_seconds or time.monotonic() - ticket.began
            ticket.completion_tokens += len(event.token_ids)
            ticket.put(Piece(number, text.put(event.token_ids), event.token_ids, event.logprobs))
            if not text.stopped:
                return
            scheduler.cancel(event.key)
            reason = "stop"
        elif event.error is not None:
            del tickets[event.key]
            ticket.cancelled = True
            self._end(ticket, event.error)
            return
        else:
            ticket.put(Piece(number, text.put([], last=True)))
            reason = event.stop_reason
            ticket.cached_tokens = event.reused_tokens if number == 0 else ticket.cached_tokens
        del tickets[event.key]
        ticket.finish_reasons[number] = reason
        ticket.open -= 1
        if not ticket.open:
            self.stats.new_tokens += ticket.completion_tokens
            self.stats.prompt_tokens += ticket.prompt_tokens
            self.stats.cached_tokens += ticket.cached_tokens
            self._end(ticket)

    async def drain(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._tickets and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._preparing.shutdown(wait=False, cancel_futures=True)
