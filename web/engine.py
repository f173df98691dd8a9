"""A stand-in for the engine of the `engine` branch: one request at a time, to be replaced by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from data.chat import Message
from data.images import ImageLimits, load_image
from generation.decoding import GenerationOptions
from generation.scheduler import Scheduler
from inference.answer import AnswerText, requests_for
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
    def __init__(self, engine: Engine, question: EngineRequest):
        self.engine, self.question, self.cancelled = engine, question, False
        self.began, self.place = time.monotonic(), engine.stats.waiting
        self.finish_reasons: list[str] = []
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.first_token_seconds: float | None = None

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop = asyncio.get_running_loop()
        pieces = await loop.run_in_executor(self.engine.thread, self.engine.answer, self)
        self.first_token_seconds = time.monotonic() - self.began
        for piece in pieces:
            if not self.cancelled:
                await asyncio.sleep(0)
                yield piece


class Engine:
    def __init__(self, models: Models, limits: EngineLimits | None = None):
        self.models, self.limits, self.stats = models, limits or EngineLimits(), EngineStats()
        self.thread = ThreadPoolExecutor(1)

    def submit(self, question: EngineRequest) -> Ticket:
        if self.stats.waiting >= self.limits.max_queue:
            raise QueueFull(1.0)
        ticket = Ticket(self, question)
        self.stats.waiting += 1
        self.stats.requests += 1
        return ticket

    def answer(self, ticket: Ticket) -> list[Piece]:
        self.stats.waiting -= 1
        question, pieces = ticket.question, []
        checkpoint = self.models.open(question.model)
        limits = ImageLimits(allow_urls=False, allow_paths=False)
        conversation = [
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": value}
                    if kind == "text"
                    else {"type": "image", "image": load_image(value, limits)}
                    for kind, value in message.parts
                ],
            }
            for message in question.messages
        ]
        row = checkpoint.processor.encode_conversation(conversation, True)
        checkpoint.check_images(row.image_tokens)
        requests = requests_for(checkpoint, row, question.options.max_new_tokens, question.options)
        for number, request in enumerate(requests):
            (done,) = Scheduler(checkpoint.model, 1, checkpoint.decode_step).run([request])
            if done.error:
                raise done.error
            text, reason = AnswerText(checkpoint), done.stop_reason
            shown = ""
            ticket.prompt_tokens = done.prompt_tokens
            for token in done.token_ids:
                ticket.completion_tokens += 1
                shown += (piece := text.put(token))
                if ends := [shown.index(stop) for stop in question.stop if stop in shown]:
                    shown, reason = shown[: min(ends)], "stop"
                    pieces = [one for one in pieces if one.answer != number] + [Piece(number, shown)]
                    break
                pieces.append(Piece(number, piece, [token]))
            pieces.append(Piece(number, text.finish()))
            ticket.finish_reasons.append(reason)
        self.stats.new_tokens += ticket.completion_tokens
        self.stats.prompt_tokens += ticket.prompt_tokens
        return pieces

    async def drain(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
