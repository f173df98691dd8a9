"""Answers to many at a time: one thread in which the model works, behind one bounded and fair queue.

    engine = Engine(open_checkpoint("checkpoints/ocelli-shapes").compiled())
    ticket = engine.submit(Ticket(partial(prompt_of, asked, images, options)))  # in an event loop
    async for piece in ticket:
        print(piece.text, end="")
    print(ticket.finish_reasons, ticket.cached_tokens)

A question waits in one of three lanes, in which clients take turns and worker threads make the prompts of
those that come next: images are opened at once, while videos and grammars that are not compiled yet, which
take seconds, hold up their like alone. Then it waits for free slots of the `Scheduler`. Between two steps new
requests enter, those that nobody waits for any more leave, and work that follows an answer does one step. An
error fails only its own request.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError

from data.processor import EncodedConversation
from data.tiles import Sizes
from generation.options import GenerationOptions
from generation.prefix_store import PREFIX_BYTES
from generation.requests import NewTokens, Request, RequestOutput
from generation.scheduler import Scheduler
from inference.apart import Apart
from inference.checkpoint import Checkpoint
from inference.conversation import ContextFullError
from inference.errors import RequestError, user_errors
from inference.forms import decided, requests_for
from inference.grammar import Form, ToolUse
from inference.kept import with_prefixes
from inference.thinking import held_to
from web.stops import Piece, StopText
from web.videos import RUNNING

SLOW_EACH = 8  # videos, and new grammars, of a client that wait: each may take seconds
SLOW_SECONDS = 8.0  # after which a client with too many of them may ask again
LONGEST_WAIT = 60.0  # seconds that a refused client is asked to wait at most
REST_AFTER = 60.0  # seconds without a request, after which memory is given back
FORGETTING = 0.9  # weight of the seconds that requests took so far, after each one more
END = object()  # of an iterator, and of a ticket


class QueueFull(RequestError):
    """Too many requests wait; `retry_after` is when to ask again, in seconds."""

    def __init__(self, retry_after: float):
        super().__init__("too many requests are waiting here just now: try again in a moment")
        self.retry_after = retry_after


class Interrupted(RuntimeError):
    """The model's thread met an error that is nobody's request's, or is being ended."""


@dataclass(frozen=True)
class EngineLimits:
    """What the engine does at the same time, and keeps.

    slots: answers. max_queue: requests that wait, of one client half of them.
    prefill_chunk: positions of a prompt, or one tile, between two tokens of the others; None computes prompts
    at once. prefix_bytes: of prefixes that are kept in memory, and prefix_folder, where as many outlive the
    process; None is no folder. lookup: see `GenerationOptions`.
    """

    slots: int = 8
    max_queue: int = 128
    prefill_chunk: int | None = 256
    prefix_bytes: int = PREFIX_BYTES
    prefix_folder: Path | None = None
    lookup: str = "auto"


@dataclass
class EngineStats:
    """Counts since the start; `waiting` and `running` are of now."""

    requests: int = 0
    waiting: int = 0
    running: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(eq=False)
class Ticket:
    """A question to the model, and what becomes of it. Once it is submitted, iterate, once, for its pieces.
    Errors come out of the iteration: one of `user_errors`, or Interrupted.

    prepare: makes the prompt and the options of its answers, in a worker thread.
    answers: how many, as the options say; of 0 the prompt is counted, and nothing asked.
    stop: texts before which an answer ends; they are not shown.
    logprobs: see `GenerationOptions`.
    client: who takes turns with the others.
    grammar: what answers are held to (see `Forms.constraint`); None for anything.
    video: whether it shows one or a PDF, which may take long to decode.
    then: other work in the model's thread after the (one) answer with these ids, step by step between those
        of other answers; what it yields comes out as `Piece.made`.

    finish_reasons: of each answer, "stop" or "length", at the end; decided: what `inference.forms.decided`
        says of each.
    prompt_tokens: positions of the prompt, and cached_tokens: those of them that were kept from before.
    completion_tokens: of the answers, and reasoning_tokens: those of them that were thinking.
    first_token_seconds: from the arrival; None before it.
    sizes: what coordinates in an answer are of (see `EncodedConversation`); known with the first piece.
    """

    prepare: Callable[[Checkpoint], tuple[EncodedConversation, GenerationOptions]]
    answers: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    client: str = ""
    grammar: str | ToolUse | None = None
    video: bool = False
    then: Callable[[Checkpoint, list[int]], Iterator[Any]] | None = None

    def __post_init__(self) -> None:
        self.finish_reasons = [""] * self.answers
        self.decided: list[dict[str, Any]] = [{}] * self.answers
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.reasoning_tokens = 0
        self.first_token_seconds: float | None = None
        self.sizes: Sizes | None = None
        # Of the engine: when it came and began to be answered, its compiled grammar, what is to be scheduled,
        # the texts of answers that have not ended, and the processes of `web.videos.RUNNING`.
        self.began, self.cancelled = time.monotonic(), False
        self.started: float | None = None
        self.form: Form | None = None
        self.requests: list[Request] = []
        self.texts: dict[int, StopText] = {}
        self.decoding = set[Apart]()
        self._pieces = asyncio.Queue[Any]()

    def enter(self, engine: Engine) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()

    def put(self, piece: object) -> None:
        """From any thread: a Piece, or the end, which is an Exception or END."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def cancel(self) -> None:
        """Nobody waits for it any more: iterating ends, and its slots are free at the next step. In vain
        after its end."""
        self.cancelled = True
        self.stop_decoding()
        self._engine.withdraw(self)
        self.put(END)

    def stop_decoding(self) -> None:
        for process in self.decoding.copy():
            process.terminate()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while (piece := await self._pieces.get()) is not END:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.cancel()


class Lane:
    """Threads that make prompts, and the tickets that wait for them. Clients take turns: one who has many
    waits for those who have few. Of a slow lane a client has one prompt made at a time."""

    def __init__(self, name: str, threads: int, slow: bool = True):
        self.slow, self._threads = slow, threads
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting = OrderedDict[str, deque[Ticket]]()  # by client, the next to be served first
        self._working = list[str]()  # the clients whose prompts are being made

    def of(self, client: str) -> Sequence[Ticket]:
        return self._waiting.get(client, ())

    def put(self, ticket: Ticket) -> None:
        self._waiting.setdefault(ticket.client, deque()).append(ticket)

    def next(self) -> Ticket | None:
        """One whose prompt is made now, until it is `done`; None where every thread is at work."""
        busy = self._working if self.slow else ()
        client = next((one for one in self._waiting if one not in busy), None)
        if client is None or len(self._working) == self._threads:
            return None
        self._waiting.move_to_end(client)  # behind the others
        ticket = self._waiting[client][0]
        self.remove(ticket)
        self._working.append(client)
        return ticket

    def done(self, ticket: Ticket) -> None:
        self._working.remove(ticket.client)

    def remove(self, ticket: Ticket) -> bool:
        """Whether it has waited here."""
        tickets = self._waiting.get(ticket.client, deque())
        if waited := ticket in tickets:
            tickets.remove(ticket)
            if not tickets:
                del self._waiting[ticket.client]
        return waited


class Engine:
    """See the module's docstring. `submit` is called in an event loop, `close` anywhere. Raises RequestError
    and OSError for a `prefix_folder` that cannot be used."""

    def __init__(self, checkpoint: Checkpoint, limits: EngineLimits = EngineLimits()):
        folder, most = limits.prefix_folder, limits.prefix_bytes
        self.checkpoint, self.limits = with_prefixes(checkpoint, folder, most, most), limits
        self.stats = EngineStats()
        self._lock = threading.Lock()  # of all that follows, but the scheduler and `_later`
        self._images, self._videos = Lane("images", 2, slow=False), Lane("videos", 2)
        self._forms = Lane("forms", 1)
        self._lanes = (self._images, self._videos, self._forms)
        self._ready: deque[Ticket] = deque()
        self._tickets: set[Ticket] = set()  # not ended
        self._seconds = 1.0  # that a request takes, lately
        self._closed, self._draining = False, False
        self._wake = threading.Event()
        self._scheduler = self._new_scheduler()
        self._later: deque[tuple[Ticket, Iterator[Any]]] = deque()  # work that follows answers
        self._thread = threading.Thread(target=self._work, daemon=True, name="model")
        self._thread.start()

    def _new_scheduler(self) -> Scheduler:
        one, limits = self.checkpoint, self.limits
        return Scheduler(
            one.model, limits.slots, one.decode_step, one.features, limits.prefill_chunk, one.prefixes
        )

    # ---------------------------------------------------------------------------------------- the queue

    def submit(self, ticket: Ticket) -> Ticket:
        """Take a question in. Raises QueueFull, and RequestError for more answers than there are slots."""
        slots, most, client = self.limits.slots, self.limits.max_queue, ticket.client
        if ticket.answers > slots:
            raise RequestError(f"expected at most {slots} answers at a time, got {ticket.answers}")
        if ticket.grammar is not None:
            ticket.form = self.checkpoint.forms.kept_constraint(ticket.grammar)
        new_form = ticket.grammar is not None and ticket.form is None
        lane = self._videos if ticket.video else self._forms if new_form else self._images
        ticket.enter(self)
        with self._lock:
            if self._closed or self._draining:
                raise QueueFull(1.0)  # by then the address is another server's, or nobody's
            waits = [one.client for one in self._tickets if one.started is None]
            running = sum(len(one.texts) for one in self._tickets if one.started is not None)
            free = max(0, slots - running)  # those that wait for their images alone take a free slot at once
            if len(waits) - free >= most or waits.count(client) - free >= max(1, most // 2):
                rounds = math.ceil(len(waits) / slots * self._seconds)
                raise QueueFull(min(max(1.0, rounds), LONGEST_WAIT))
            # The same new grammar once more is not one more.
            many = {one if one.video else one.grammar for one in (*lane.of(client), ticket)}
            if lane.slow and len(many) > SLOW_EACH:
                raise QueueFull(SLOW_SECONDS)
            self._tickets.add(ticket)
            self.stats.requests += 1
            self.stats.waiting += 1
            lane.put(ticket)
        self._begin_prompts()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """See `Ticket.cancel`. What is being prepared, or has begun, ends in the thread that works on it."""
        with self._lock:
            waited = any([lane.remove(ticket) for lane in self._lanes])
            if ticket in self._ready:
                waited = True
                self._ready.remove(ticket)
        if waited:
            self._end(ticket)
            self._begin_prompts()
        self._wake.set()

    def _begin_prompts(self) -> None:
        """Have prompts made as long as few are ready: those hold their images."""
        with self._lock:
            for lane in self._lanes if not self._closed else ():
                while len(self._ready) < self.limits.slots and (ticket := lane.next()) is not None:
                    lane.pool.submit(self._prepare, lane, ticket)

    def _prepare(self, lane: Lane, ticket: Ticket) -> None:
        """In a worker thread."""
        error: Exception | None = None
        try:
            if not ticket.cancelled:
                self._encode(ticket)
        except Exception as caught:
            error = caught
        except BaseException as caught:  # a panic of a library in Rust: else the ticket would wait for ever
            error = Interrupted(repr(caught))
        with self._lock:
            lane.done(ticket)
            if goes_on := error is None and not ticket.cancelled and bool(ticket.requests):
                self._ready.append(ticket)
        if not goes_on:
            self._end(ticket, error)
        self._begin_prompts()
        self._wake.set()

    def _encode(self, ticket: Ticket) -> None:
        """Its grammar, its images, its prompt."""
        checkpoint = self.checkpoint
        if ticket.grammar is not None and ticket.form is None:
            ticket.form = checkpoint.forms.constraint(ticket.grammar)
        RUNNING.set(ticket.decoding)
        row, options = ticket.prepare(checkpoint)
        checkpoint.check_images(row.image_tokens)
        if ticket.form is not None:
            options = held_to(options, ticket.form)
        ticket.sizes, ticket.prompt_tokens = row.sizes, len(row.input_ids)
        if not ticket.answers:
            return
        if (room := checkpoint.context - ticket.prompt_tokens) < 1:
            got = f"{ticket.prompt_tokens} ({row.image_tokens} of images)"
            raise ContextFullError(f"expected a prompt of fewer than {checkpoint.context} tokens, got {got}")
        options = replace(options, logprobs=ticket.logprobs, lookup=self.limits.lookup)
        requests = requests_for(checkpoint, row, min(options.max_new_tokens, room), options)
        for number, one in enumerate(requests):
            ticket.texts[number] = StopText(checkpoint, options, ticket.stop, number)
            ticket.requests.append(replace(one, key=(ticket, number)))

    def _end(self, ticket: Ticket, error: Exception | None = None) -> None:
        """A ticket has come to its end, for whatever reason."""
        with self._lock:
            if ticket not in self._tickets:
                return
            self._tickets.remove(ticket)
            stats = self.stats
            if ticket.started is None:
                stats.waiting -= 1
            else:
                stats.running -= 1
                took = time.monotonic() - ticket.started
                self._seconds = FORGETTING * self._seconds + (1 - FORGETTING) * took
                stats.prompt_tokens += ticket.prompt_tokens
            stats.new_tokens += ticket.completion_tokens
            stats.cached_tokens += ticket.cached_tokens
        ticket.requests, ticket.form = [], None
        ticket.put(END if error is None else error)

    # --------------------------------------------------------------------------------- the model's thread

    def _work(self) -> None:
        resting = True  # nothing was asked for so long that memory has been given back
        while not self._closed:
            woken = self._wake.wait(None if resting else REST_AFTER)
            if woken:  # else one that comes just now would be lost
                self._wake.clear()
            resting = not woken
            try:
                if resting:
                    self._scheduler.give_back()
                while woken and not self._closed and self._turn():
                    pass
            except Exception as error:  # of a step: it belongs to nobody, and what comes later goes on
                traceback.print_exception(error)
                self._give_up(error)
                self._wake.set()
        for ticket in list(self._tickets):
            self._end(ticket, Interrupted("the server has ended"))

    def _turn(self) -> bool:
        """A step of the model, and one of what follows answers. Whether there is more to do."""
        self._admit()
        if self._later:
            self._continue(*self._later.popleft())
        for ticket in [one for one in list(self._tickets) if one.cancelled and one.started is not None]:
            for number in list(ticket.texts):
                self._scheduler.cancel((ticket, number))
            self._end(ticket)
        for event in self._scheduler.step():
            self._deliver(event)
        return not self._scheduler.idle or bool(self._later or self._ready)

    def _continue(self, ticket: Ticket, steps: Iterator[Any]) -> None:
        """One step of what follows an answer."""
        try:
            made = END if ticket.cancelled or ticket not in self._tickets else next(steps, END)
        except Exception as error:
            self._end(ticket, error)
            return
        if made is END:
            self._end(ticket)
        else:
            ticket.put(Piece(0, made=made))
            self._later.append((ticket, steps))

    def _admit(self) -> None:
        """Give free slots to the tickets that are ready, in their order."""
        while True:
            with self._lock:
                if not self._ready or self._scheduler.free < len(self._ready[0].requests):
                    break
                ticket = self._ready.popleft()
                ticket.started = time.monotonic()
                self.stats.waiting -= 1
                self.stats.running += 1
            try:
                for request in ticket.requests:
                    self._scheduler.add(request)
            except Exception as error:
                for request in ticket.requests:
                    self._scheduler.cancel(request.key)
                theirs = isinstance(error, ValueError) and not isinstance(error, user_errors())
                self._end(ticket, RequestError(str(error)) if theirs else error)
        self._begin_prompts()

    def _deliver(self, event: NewTokens | RequestOutput) -> None:
        ticket, number = event.key
        if (text := ticket.texts.get(number)) is None:  # it has ended at a stop string
            return
        if isinstance(event, NewTokens):
            if ticket.first_token_seconds is None:
                ticket.first_token_seconds = time.monotonic() - ticket.began
            if number == 0:
                ticket.cached_tokens = event.reused_tokens
            self._show(ticket, text.put(event.token_ids, event.logprobs))
            if not text.stopped:
                return
            self._scheduler.cancel(event.key)
            ticket.finish_reasons[number] = "stop"
        elif event.error is not None:
            for other in ticket.texts:
                self._scheduler.cancel((ticket, other))
            self._end(ticket, event.error)
            return
        else:
            self._show(ticket, text.put([], None if ticket.logprobs is None else [], last=True))
            ticket.finish_reasons[number] = "stop" if text.stopped else event.stop_reason
            ticket.decided[number] = decided(ticket.form, event.decision)
        del ticket.texts[number]
        if not ticket.texts and ticket.then is not None:
            self._later.append((ticket, ticket.then(self.checkpoint, event.token_ids)))
        elif not ticket.texts:
            self._end(ticket)

    def _show(self, ticket: Ticket, piece: Piece) -> None:
        ticket.completion_tokens += len(piece.token_ids)
        ticket.reasoning_tokens += piece.thinking
        ticket.put(piece)

    def _give_up(self, error: Exception) -> None:
        """A step has failed: what was being answered ends, and a new scheduler begins."""
        self._forget()
        self._scheduler = self._new_scheduler()
        told = error if isinstance(error, OutOfMemoryError | MemoryError) else Interrupted(str(error))
        for ticket in [one for one in list(self._tickets) if one.started is not None]:
            self._end(ticket, told)

    def _forget(self) -> None:
        """What is kept for the model in memory."""
        self.checkpoint.features.clear()
        assert self.checkpoint.prefixes is not None, "it has been opened with some"
        self.checkpoint.prefixes.drop()

    # ---------------------------------------------------------------------------------------------- ends

    async def drain(self, seconds: float) -> None:
        """Take nothing new, and wait so long for what was accepted."""
        self._draining, end = True, time.monotonic() + seconds
        while self._tickets and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """End all work at its next step, and write what is to be kept. In vain the second time."""
        with self._lock:  # what is taken in before is ended below, and what comes later is refused
            self._closed = True
            left = list(self._tickets)
        self._wake.set()
        for lane in self._lanes:
            lane.pool.shutdown(wait=False, cancel_futures=True)
        if threading.current_thread() is not self._thread:
            self._thread.join(10)
        for ticket in left:
            ticket.stop_decoding()
        self._forget()
        assert self.checkpoint.prefixes is not None
        self.checkpoint.prefixes.close()
