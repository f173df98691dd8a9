"""Answers to many at a time: one thread in which all models work, behind one bounded and fair queue.

    engine = Engine(Models(["checkpoints/ocelli-shapes"]))
    request = EngineRequest("checkpoints/ocelli-shapes", partial(prepare_messages, messages, options))
    ticket = engine.submit(request)  # in an event loop
    async for piece in ticket:
        print(piece.text, end="")
    print(ticket.finish_reasons, ticket.cached_tokens)

Requests wait in a queue of their model, clients take turns in it, and worker threads open the images of those
that come next. What waits for one model, as it is opened or is busy, holds no question to another. Each model
has a `Scheduler`, whose slots are shared by all who ask it, and what prompts left in them is kept for whoever
asks about the same image or goes on with a conversation. Between two steps new requests enter, and those that
nobody waits for any more leave; work that follows an answer has its turn there. An error is told to the
request that it belongs to.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import OutOfMemoryError

from data.conversation import GivenText, Message
from data.images import ImageLimits, describe, load_image
from data.processor import EncodedConversation
from data.tiles import Sizes
from data.tools import Tool
from data.visuals import HEAD, container_of
from generation.options import GenerationOptions
from generation.prefix_store import PREFIX_BYTES, PrefixStore
from generation.requests import NewTokens, Request, RequestOutput, TokenLogprobs
from generation.scheduler import Scheduler
from inference.answer import text_of
from inference.apart import SECONDS, Apart
from inference.asking import requests_for
from inference.calls import CallPiece, begun
from inference.checkpoint import Checkpoint
from inference.conversation import ContextFullError
from inference.coordinates import spoken_form
from inference.decide import decided
from inference.errors import RequestError, user_errors
from inference.grammar import Form, ToolUse
from inference.pixels import rescaled
from inference.prefix_files import own_folder, with_prefixes
from inference.thinking import Think, held_to
from web.images import VisitorLimits
from web.models import Models
from web.videos import RUNNING, open_apart

OPENERS = 2  # threads that open images and encode prompts
DECODERS = 2  # of these, for prompts with videos: a client has one of them at a time
SLOW_EACH = 8  # videos, and new forms, of a client that wait: each may take seconds
LONGEST_WAIT = 60.0  # seconds that a refused client is asked to wait at most
STORE_WAIT = 1.0  # seconds that questions wait for the prefixes of their model
REST_AFTER = 60.0  # seconds without a request, after which memory is given back
FORGETTING = 0.9  # weight of the seconds that requests took so far, after each one more
logger = logging.getLogger(__name__)
END = object()  # of an iterator


OF_STRANGERS = VisitorLimits(10 * 2**20, 24_000_000, allow_urls=False, allow_paths=False, max_seconds=20)


class QueueFull(RequestError):
    """Too many requests wait; `retry_after` is when to ask again, in seconds."""

    def __init__(self, retry_after: float):
        super().__init__("too many requests are waiting here just now: try again in a moment")
        self.retry_after = retry_after


class Interrupted(RuntimeError):
    """The models' thread met an error that is nobody's request's, or is being ended."""


@dataclass(frozen=True)
class EngineLimits:
    """slots: answers that a model makes at the same time. max_queue: requests that wait for a model,
    of one client half of them.
    prefill_chunk: positions of a prompt, or one tile, between two tokens of the others; None computes prompts
    at once. prefix_bytes: of prefixes that a model keeps in memory, and prefix_folder, where as many outlive
    the process; None is no folder. lookup: see `GenerationOptions`.

    Page and API hold requests to the rest: max_images, what each image may be, and max_new_tokens.
    """

    slots: int = 8
    max_queue: int = 128
    prefill_chunk: int | None = 256
    prefix_bytes: int = PREFIX_BYTES
    prefix_folder: Path | None = None
    max_images: int = 8
    max_new_tokens: int = 4_096
    image: ImageLimits = OF_STRANGERS
    lookup: str = "auto"


class Prepared(NamedTuple):
    """What a request is to a model.

    then: other work in the models' thread after the (one) answer with these ids, step by step between those
        of other answers; what it yields comes out of the ticket as `Piece.made`.
    """

    row: EncodedConversation
    options: GenerationOptions
    then: Callable[[list[int]], Iterator[Any]] | None = None


@dataclass(frozen=True, eq=False)
class EngineRequest:
    """A question to a model.

    prepare: makes the prompt for a checkpoint, in a worker thread.
    answers: how many; `num_return_sequences` of the options that are prepared. 0 counts the positions of the
        prompt and asks nothing.
    grammar: what answers are held to (see `Checkpoint.constraint`); None for anything.
    stop: texts before which an answer ends; they are not shown.
    logprobs: see `GenerationOptions`.
    client: who takes turns with the others.
    video: whether it shows one, which may take long to decode.
    """

    model: str
    prepare: Callable[[Checkpoint], Prepared]
    answers: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    client: str = ""
    grammar: str | ToolUse | None = None
    video: bool = False


@dataclass
class EngineStats:
    """Counts since the start; `waiting` and `running` are of now."""

    requests: int = 0
    waiting: int = 0
    running: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Piece(NamedTuple):
    """More of an answer: its text may lag behind the tokens, where it would be cut in the middle. `thought`
    is what was thought before it: the first `thinking` of the tokens, which have no logprobs. `calls` are of
    tools, beside the text. `turned`: where in the text the answer begins, if all before it was thought."""

    answer: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    thought: str = ""
    thinking: int = 0
    made: Any = None
    calls: Sequence[CallPiece] = ()
    turned: int | None = None


class Ticket:
    """A request that was accepted: iterate, once, for its pieces. Errors come out of the iteration: one of
    `user_errors`, or Interrupted.

    finish_reasons: of each answer, "stop" or "length", at the end; confidences: where the options ask for
        them, of those that no stop string ended.
    decided: of each answer that is one of several choices, what `inference.decide.decided` says of it.
    prompt_tokens: positions of the prompt, and cached_tokens: those of them that were kept from before.
    completion_tokens: of the answers, and reasoning_tokens: those of them that were thinking.
    first_token_seconds: from the arrival; None before it. decode_seconds: from there to the latest token.
    sizes, coordinates: what coordinates in an answer are of (see `EncodedConversation`), and how the model
        writes them (`Processor.coordinates`); known with the first piece.
    """

    def __init__(self, engine: Engine, request: EngineRequest):
        answers = request.answers
        self.request, self.began, self.cancelled = request, time.monotonic(), False
        self.finish_reasons = [""] * answers
        self.confidences: list[float | None] = [None] * answers
        self.decided: list[dict[str, Any]] = [{}] * answers
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.reasoning_tokens = 0
        self.first_token_seconds: float | None = None
        self.decode_seconds = 0.0
        self.sizes: Sizes | None = None
        self.coordinates: Any = None
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._pieces: list[Piece] = []
        self._news, self._over = asyncio.Event(), asyncio.Event()
        self._error: Exception | None = None
        self.checkpoint: Checkpoint | None = None  # once the model is open, until the end
        self.form: Form | None = None  # once its grammar is compiled, until the end
        self.then: Callable[[list[int]], Iterator[Any]] | None = None  # see `Prepared`
        # Of the models' thread: what is to be scheduled, and the texts of answers that have not ended.
        self.requests: list[Request] = []
        self.texts: dict[int, _Text] = {}
        self.decoding = set[Apart]()  # see `web.videos.RUNNING`
        self.started: float | None = None

    @property
    def place(self) -> int:
        """In the queue, from 1; 0 where the work has begun."""
        return self._engine.place(self)

    def cancel(self) -> None:
        """Nobody waits for it any more: iterating ends, and its slots are free at the next step. In vain
        after its end."""
        self.cancelled = True
        self.stop_decoding()
        self._engine.withdraw(self)
        self.put(None)

    def stop_decoding(self) -> None:
        for process in self.decoding.copy():
            process.terminate()

    def put(self, piece: Piece | Exception | None) -> None:
        """From any thread; None is the end."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._put, piece)

    def _put(self, piece: Piece | Exception | None) -> None:
        self._news.set()
        if isinstance(piece, Piece):
            self._pieces.append(piece)
        elif not self._over.is_set():
            self._error = piece
            self._over.set()

    async def some(self, seconds: float | None = None) -> list[Piece] | None:
        """The pieces that have come, or the next one; [] if none comes for so long, None at the end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
        pieces, self._pieces = self._pieces, []
        if not self._over.is_set():
            self._news.clear()
        elif not pieces and self._error is not None:
            raise self._error
        return None if self._over.is_set() and not pieces else pieces

    async def pause(self, seconds: float) -> None:
        """For so long, or until the end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while (pieces := await self.some()) is not None:
                for piece in pieces:
                    yield piece
        finally:
            self.cancel()


class _Text:
    """The text of one answer up to a stop string, which may begin in one token and end in another."""

    def __init__(self, checkpoint: Checkpoint, options: GenerationOptions, stop: tuple[str, ...]):
        self._text, self._stop, self.stopped = text_of(checkpoint, options), stop, False
        self._held, self._length = "", 0  # text that is not shown yet; of all text that is
        self._tokens = deque[tuple[int, int, TokenLogprobs | None]]()  # where each begins that is not shown

    def put(
        self,
        number: int,
        token_ids: Sequence[int],
        logprobs: list[TokenLogprobs] | None = None,
        last: bool = False,
    ) -> Piece:
        """What can be shown of answer `number` after these tokens, with the tokens of it and their logprobs:
        nothing that a stop string may begin with. Stop strings are looked for in the answer alone."""
        if self.stopped:
            return Piece(number, "", [])
        ready, span = list[tuple[int, int, TokenLogprobs | None]](), self._text.span
        turned: int | None = None
        for index, token_id in enumerate(token_ids):
            at = self._length + len(self._held)
            self._held += self._text.put(token_id)
            turned = len(self._held) if self._text.turned else turned
            if span is not None and span.thought == span.count and span.place != "answer":
                ready.append((at, token_id, None))
            else:
                self._tokens.append((at, token_id, None if logprobs is None else logprobs[index]))
        thinking = len(ready)  # up to the first token of the answer
        self._held += self._text.finish() if last else ""
        ends = [self._held.index(stop) for stop in self._stop if stop in self._held]
        self.stopped = bool(ends)
        end = min(ends) if ends else len(self._held)
        if not ends and not last:
            end -= max((begun(self._held, stop) for stop in self._stop), default=0)
        shown, self._held = self._held[:end], self._held[end:]
        self._length += end
        # A token in which the stop string begins belongs to the text, one that begins with it does not.
        while self._tokens and (self._tokens[0][0] < self._length or not (self._held or self.stopped)):
            ready.append(self._tokens.popleft())
        entries = None if logprobs is None else [one for *_, one in ready if one is not None]
        ids = [token_id for _, token_id, _ in ready]
        thought, calls = self._text.thought(), self._text.calls()
        return Piece(number, shown, ids, entries, thought, thinking, calls=calls, turned=turned)


class _Queue:
    """Tickets of clients that take turns: one who has many waits for those who have few."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Ticket]] = OrderedDict()  # the next to be served first

    def __iter__(self) -> Iterator[Ticket]:
        rounds = max(map(len, self._clients.values()), default=0)
        for number in range(rounds):
            for tickets in self._clients.values():
                if number < len(tickets):
                    yield tickets[number]

    def of(self, client: str) -> Sequence[Ticket]:
        return self._clients.get(client, ())

    def put(self, ticket: Ticket) -> None:
        self._clients.setdefault(ticket.request.client, deque()).append(ticket)

    def get(self, without: Container[str] = ()) -> Ticket | None:
        """The next one, but for these clients."""
        if (client := next((one for one in self._clients if one not in without), None)) is None:
            return None
        tickets = self._clients.pop(client)
        ticket = tickets.popleft()
        if tickets:
            self._clients[client] = tickets  # behind the others
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        tickets = self._clients.get(ticket.request.client, deque())
        if ticket not in tickets:
            return False
        tickets.remove(ticket)
        if not tickets:
            del self._clients[ticket.request.client]
        return True


class _Stores:
    """The kept prefixes of each model, opened and closed in a thread of their own: a folder's first model has
    all its weights hashed, and closing waits for what is being written. Meanwhile questions are answered
    without. Raises RequestError for a folder that cannot be used."""

    def __init__(self, limits: EngineLimits):
        self._limits, self._lock, self._closed = limits, threading.Lock(), False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefixes")
        # By the id of the model, which lives as long as its checkpoint is here; last, since when.
        self._opened: dict[int, tuple[Checkpoint, Future[PrefixStore | None], float]] = {}
        if limits.prefix_folder is not None:
            own_folder(limits.prefix_folder)

    def of(self, checkpoint: Checkpoint) -> PrefixStore | None:
        """The one of this model; None as long as it is being opened."""
        future = self._begun(checkpoint)[0]
        return future.result() if future is not None and future.done() else None

    def wait(self, checkpoint: Checkpoint) -> None:
        """Until the one of this model is open, or STORE_WAIT after that was begun."""
        future, began = self._begun(checkpoint)
        if future is not None:
            wait([future], max(0.0, began + STORE_WAIT - time.monotonic()))

    def waits(self, checkpoint: Checkpoint) -> bool:
        """Whether `wait` would take any time."""
        future, began = self._begun(checkpoint)
        return future is not None and not future.done() and time.monotonic() < began + STORE_WAIT

    def _begun(self, checkpoint: Checkpoint) -> tuple[Future[PrefixStore | None] | None, float]:
        """What becomes the one of this model, and since when."""
        key = id(checkpoint.model)
        with self._lock:
            if self._closed:
                return None, 0.0
            if key not in self._opened:
                self._opened[key] = checkpoint, self._thread.submit(self._open, checkpoint), time.monotonic()
            return self._opened[key][1:]

    def _open(self, checkpoint: Checkpoint) -> PrefixStore | None:
        folder, most = self._limits.prefix_folder, self._limits.prefix_bytes
        try:
            return with_prefixes(checkpoint, folder, most, most).prefixes
        except (ValueError, OSError) as error:  # the folder has changed since: answers need none of this
            logger.warning("prefixes are kept in memory alone: %s", error)
            return with_prefixes(checkpoint, None, most).prefixes

    def drop(self, holds: Callable[[Checkpoint], bool]) -> None:
        """Let go of those of models that are held no longer. Waits for nothing."""
        with self._lock:
            gone = [key for key, (checkpoint, *_) in self._opened.items() if not holds(checkpoint)]
            for key in gone:
                self._thread.submit(self._close, self._opened.pop(key)[1])

    def _close(self, future: Future[PrefixStore | None]) -> None:
        if (store := future.result()) is not None:
            store.close()

    def close(self, seconds: float = 60.0) -> None:
        """Write what is to be kept, for so long at most. In vain the second time."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self.drop(lambda checkpoint: False)
            wait([self._thread.submit(int)], seconds)  # after all that was to be done
            self._thread.shutdown(wait=False, cancel_futures=True)


class Engine:
    """See the module's docstring. `submit` is called in an event loop, `close` anywhere."""

    def __init__(self, models: Models, limits: EngineLimits | None = None):
        self.models, self.limits, self.stats = models, limits or EngineLimits(), EngineStats()
        models.closed = lambda checkpoint: self._wake.set()
        self._lock = threading.Lock()  # of all that follows, but the schedulers
        # By the place of a model, and whether there is a video: those that wait, and how many prompts are
        # being made; the clients whose videos are decoded.
        self._queues, self._opening = dict[tuple[str, bool], _Queue](), Counter[tuple[str, bool]]()
        self._decoding: set[str] = set()
        self._forms, self._forming = _Queue(), False  # whose grammars are to be compiled first
        self._ready: deque[Ticket] = deque()
        self._tickets: set[Ticket] = set()  # not ended
        self._seconds = 1.0  # that a request takes, lately
        self._closed, self._draining = False, False
        self._wake = threading.Event()
        self._openers = ThreadPoolExecutor(OPENERS, thread_name_prefix="openers")
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decoders")
        # A model that takes long to open, or never ends, takes none of their threads.
        self._doors = {place: ThreadPoolExecutor(1, f"door of {place}") for place in models.names}
        self._openings: dict[str, Future[Checkpoint]] = {}
        self._former = ThreadPoolExecutor(1, thread_name_prefix="forms")
        self._stores = _Stores(self.limits)
        # Of the models' thread: schedulers by the id of the model, and work that follows answers.
        self._schedulers: dict[int, tuple[Checkpoint, Scheduler]] = {}
        self._later: deque[tuple[Ticket, Iterator[Any]]] = deque()
        self._thread = threading.Thread(target=self._work, daemon=True, name="models")
        self._thread.start()
        if (first := models.held(models.default)) is not None:
            self._stores.of(first)  # it may be hashed before anybody asks

    # ---------------------------------------------------------------------------------------- the queue

    def submit(self, request: EngineRequest) -> Ticket:
        """Take a request in. Raises QueueFull, and RequestError for more answers than there are slots."""
        if (answers := request.answers) > self.limits.slots:
            raise RequestError(f"expected at most {self.limits.slots} answers at a time, got {answers}")
        ticket = Ticket(self, request)
        with self._lock:
            if self.ending:
                raise QueueFull(1.0)  # by then the address is another server's, or nobody's
            place = request.model
            others = [one for one in self._tickets if one.request.model == place]
            running = sum(len(one.texts) for one in others if one.started is not None)
            waits = [one.request.client for one in others if one.started is None]
            waiting, most = len(waits), self.limits.max_queue
            # Those that wait for their images alone take a free slot at once.
            free = max(0, self.limits.slots - running)
            if waiting - free >= most or waits.count(request.client) - free >= max(1, most // 2):
                rounds = waiting / self.limits.slots
                raise QueueFull(min(max(1.0, math.ceil(rounds * self._seconds)), LONGEST_WAIT))
            videos = (one for one in self._tickets if one.request.video and one.started is None)
            if request.video and sum(one.request.client == request.client for one in videos) >= SLOW_EACH:
                raise QueueFull(SLOW_EACH)  # as of forms, below
            self._tickets.add(ticket)
            self.stats.requests += 1
            self.stats.waiting += 1
        self.open(request.model).add_done_callback(partial(self._enter, ticket))
        return ticket

    @property
    def ending(self) -> bool:
        """Whether nothing new is taken in any more."""
        return self._closed or self._draining

    def open(self, model: str) -> Future[Checkpoint]:
        """A model, as soon as it is open. In any thread; what `Models.open` raises is in it."""
        with self._lock:
            if (opening := self._openings.get(model)) is not None:
                return opening
            opening = Future[Checkpoint]()
            held = self.models.held(model)
            if self._closed or (held is not None and not self._stores.waits(held)):
                opening.set_result(held) if held is not None else opening.cancel()
                return opening
            opening.set_running_or_notify_cancel()  # one who gives up does not end it for the others
            self._openings[model] = opening
        self._doors[model].submit(self._open_model, model, opening)
        return opening

    def _open_model(self, model: str, opening: Future[Checkpoint]) -> None:
        """In a thread of the model's own."""
        checkpoint, error = None, None
        try:
            checkpoint = self.models.open(model)
            self._stores.wait(checkpoint)  # here it holds up those alone who ask this model
        except (
            BaseException
        ) as caught:  # as a panic of a library in Rust is: else all who wait do so for ever
            error = caught
        self._openings.pop(model)
        with suppress(InvalidStateError):  # the engine has been closed meanwhile
            opening.set_exception(error) if checkpoint is None else opening.set_result(checkpoint)

    def _enter(self, ticket: Ticket, opening: Future[Checkpoint]) -> None:
        """Into the queue of a model that has been opened."""
        if opening.cancelled():
            return  # the engine has been closed, which ends it
        if (error := opening.exception()) is not None:
            self._end(ticket, error if isinstance(error, Exception) else Interrupted(str(error)))
            return
        checkpoint, request = opening.result(), ticket.request
        if request.grammar is not None:
            ticket.form = checkpoint.forms.kept_constraint(request.grammar)
        with self._lock:
            if ticket not in self._tickets:
                return  # nobody waited so long
            ticket.checkpoint = checkpoint
            formed = request.grammar is None or ticket.form is not None
            forms = {request.grammar, *(one.request.grammar for one in self._forms.of(request.client))}
            many = not formed and len(forms) > SLOW_EACH
            if not many:
                (self._queue_of(ticket) if formed else self._forms).put(ticket)
        if many:  # they would take the places of all others in the queue
            self._end(ticket, QueueFull(SLOW_EACH * SECONDS))
        self._open_next()

    def _kind(self, ticket: Ticket) -> tuple[str, bool]:
        return ticket.request.model, ticket.request.video

    def _queue_of(self, ticket: Ticket) -> _Queue:
        return self._queues.setdefault(self._kind(ticket), _Queue())

    def place(self, ticket: Ticket) -> int:
        with self._lock:
            waiting = [
                one
                for one in (*self._ready, *chain(*self._queues.values()), *self._forms)
                if one.started is None
            ]
            return waiting.index(ticket) + 1 if ticket in waiting else 0

    def withdraw(self, ticket: Ticket) -> None:
        """See `Ticket.cancel`."""
        with self._lock:
            waited = self._queue_of(ticket).remove(ticket) or self._forms.remove(ticket)
        if waited or ticket.checkpoint is None:  # in a queue, or at a model's door
            self._end(ticket)
        self._wake.set()

    def _open_next(self) -> None:
        """Have prompts made as long as few are ready: those hold their images."""
        with self._lock:
            # Without those that may wait for the end of what follows other answers.
            ready = Counter(one.request.model for one in self._ready if one.then is None)
            for (place, video), queue in self._queues.items():
                most = max(OPENERS, self.limits.slots)
                while not self._closed and self._opening[place, video] + ready[place] < most:
                    if video and len(self._decoding) == DECODERS:
                        break
                    if (ticket := queue.get(self._decoding if video else ())) is None:
                        break
                    self._opening[place, video] += 1
                    if video:
                        self._decoding.add(ticket.request.client)
                    pool = self._decoders if video else self._openers
                    pool.submit(self._prepare, ticket, self._encode, self._encoded)
            if not self._closed and not self._forming and (ticket := self._forms.get()) is not None:
                self._forming = True
                self._former.submit(self._prepare, ticket, self._compile, self._compiled)

    def _prepare(
        self, ticket: Ticket, work: Callable[[Ticket], None], done: Callable[[Ticket, bool], None]
    ) -> None:
        """In a worker thread. `done` is told under the lock whether the ticket goes on."""
        error: Exception | None = None
        try:
            if not ticket.cancelled:
                work(ticket)
        except Exception as caught:
            error = caught
        with self._lock:
            goes_on = error is None and not ticket.cancelled
            done(ticket, goes_on)
        if not goes_on:
            self._end(ticket, error)
        self._open_next()
        self._wake.set()

    def _compile(self, ticket: Ticket) -> None:
        """A grammar, in a thread of its own, because it may take a second: only others that are new wait."""
        if ticket.request.grammar is not None and ticket.checkpoint is not None:
            ticket.form = ticket.checkpoint.forms.constraint(ticket.request.grammar)

    def _compiled(self, ticket: Ticket, goes_on: bool) -> None:
        self._forming = False
        if goes_on:
            self._queue_of(ticket).put(ticket)

    def _encoded(self, ticket: Ticket, goes_on: bool) -> None:
        self._opening[self._kind(ticket)] -= 1
        if ticket.request.video:
            self._decoding.discard(ticket.request.client)
        if goes_on:  # from here on it is the models' thread that ends it
            self._ready.append(ticket)

    def _encode(self, ticket: Ticket) -> None:
        """The images, the prompt."""
        request, checkpoint = ticket.request, ticket.checkpoint
        assert checkpoint is not None, "it was in a queue"
        RUNNING.set(ticket.decoding)
        row, options, ticket.then = request.prepare(checkpoint)
        checkpoint.check_images(row.image_tokens)
        if ticket.form is not None:
            options = held_to(options, ticket.form)
        ticket.sizes, ticket.coordinates = row.sizes, checkpoint.processor.coordinates
        ticket.prompt_tokens = len(row.input_ids)
        if not request.answers:
            return
        if (room := checkpoint.context - ticket.prompt_tokens) < 1:
            got = f"{ticket.prompt_tokens} ({row.image_tokens} of images)"
            raise ContextFullError(f"expected a prompt of fewer than {checkpoint.context} tokens, got {got}")
        limit = min(options.max_new_tokens, room)
        options = replace(options, logprobs=request.logprobs, lookup=self.limits.lookup)
        requests = requests_for(checkpoint, row, limit, options)
        numbers, stop = range(len(requests)), request.stop
        ticket.texts = {number: _Text(checkpoint, options, stop) for number in numbers}
        ticket.requests = [replace(one, key=(ticket, number)) for number, one in enumerate(requests)]

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
            stats.new_tokens += ticket.completion_tokens
            stats.prompt_tokens += ticket.prompt_tokens if ticket.started is not None else 0
            stats.cached_tokens += ticket.cached_tokens
        ticket.requests, ticket.checkpoint, ticket.form, ticket.then = [], None, None, None
        ticket.put(error)

    # -------------------------------------------------------------------------------- the models' thread

    def _work(self) -> None:
        resting = True  # nothing was asked for so long that memory has been given back
        while not self._closed:
            if not self._wake.wait(None if resting else REST_AFTER):
                resting = True
                self._rest()
                continue
            resting = False
            self._wake.clear()
            working = True
            while working and not self._closed:
                working = self._turn()
                self._drop_closed()
        for ticket in list(self._tickets):
            self._end(ticket, Interrupted("the server has ended"))

    def _turn(self) -> bool:
        """A step of each model, and one of what follows answers. Whether there is more to do."""
        self._admit()
        if self._later:
            self._continue(*self._later.popleft())
        working = False
        for key, (_, scheduler) in list(self._schedulers.items()):
            try:
                self._withdraw_cancelled(scheduler)
                for event in scheduler.step():
                    self._deliver(scheduler, event)
                working = working or not scheduler.idle
            except Exception as error:  # of a step: it belongs to nobody, and the others go on
                traceback.print_exception(error)
                self._give_up(key, error)
        return working or bool(self._later)

    def _rest(self) -> None:
        """Nobody has asked for a while: what long requests made the slots grow by is for others."""
        for key, (_, scheduler) in list(self._schedulers.items()):
            try:
                scheduler.give_back()
            except Exception as error:  # as of a step
                traceback.print_exception(error)
                self._give_up(key, error)

    def _continue(self, ticket: Ticket, steps: Iterator[Any]) -> None:
        """One step of what follows an answer."""
        try:
            ended = ticket.cancelled or ticket not in self._tickets
            made = END if ended else next(steps, END)
        except Exception as error:
            self._end(ticket, error)
            return
        if made is END:
            self._end(ticket)
        else:
            ticket.put(Piece(0, "", [], made=made))
            self._later.append((ticket, steps))

    def _admit(self) -> None:
        """Give free slots to the tickets that are ready, in their order for each model."""
        full: set[int] = set()
        with self._lock:
            ready = list(self._ready)
        for ticket in ready:
            checkpoint = ticket.checkpoint
            assert checkpoint is not None, "it is ready"
            if ticket.cancelled or not ticket.requests:  # its prompt was to be counted alone
                self._leave_ready(ticket)
                self._end(ticket)
                continue
            if id(checkpoint.model) in full:
                continue
            try:
                scheduler = self._scheduler(checkpoint)
                if scheduler.free < len(ticket.requests):
                    full.add(id(checkpoint.model))
                    continue
                # What follows answers takes no slot, but a turn of the thread: as much of it as answers.
                if ticket.then is not None and self._following(checkpoint) >= self.limits.slots:
                    continue
                self._leave_ready(ticket, started=True)
                for request in ticket.requests:
                    scheduler.add(request)
            except Exception as error:
                self._leave_ready(ticket)
                if (known := self._schedulers.get(id(checkpoint.model))) is not None:
                    for request in ticket.requests:
                        known[1].cancel(request.key)
                self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        """A ticket's requests cannot begin."""
        if not isinstance(error, (*user_errors(), ValueError, OSError)):
            traceback.print_exception(error)
        theirs = isinstance(error, ValueError) and not isinstance(error, user_errors())
        self._end(ticket, RequestError(str(error)) if theirs else error)

    def _following(self, checkpoint: Checkpoint) -> int:
        """How many have begun with this model whose answer is followed, or will be, by other work."""
        with self._lock:
            begun = [one for one in self._tickets if one.then is not None and one.started is not None]
            checkpoints = [one.checkpoint for one in begun if one.checkpoint is not None]
        return sum(one.model is checkpoint.model for one in checkpoints)

    def _scheduler(self, checkpoint: Checkpoint) -> Scheduler:
        model = checkpoint.model
        if id(model) not in self._schedulers:
            scheduler = Scheduler(
                model,
                self.limits.slots,
                checkpoint.decode_step,
                checkpoint.features,
                self.limits.prefill_chunk,
            )
            self._schedulers[id(model)] = checkpoint, scheduler
        scheduler = self._schedulers[id(model)][1]
        if scheduler.prefixes is None:
            scheduler.prefixes = self._stores.of(checkpoint)
        return scheduler

    def _drop_closed(self) -> None:
        """Let go of models that are kept no longer and have nothing to do."""
        for key in [
            key
            for key, (checkpoint, scheduler) in self._schedulers.items()
            if scheduler.idle and not self.models.holds(checkpoint)
        ]:
            self._drop(key)
            gc.collect()  # a model and its decode step may hold each other
        kept = {id(checkpoint) for checkpoint, _ in self._schedulers.values()}
        self._stores.drop(lambda checkpoint: id(checkpoint) in kept or self.models.holds(checkpoint))

    def _drop(self, key: int) -> Checkpoint:
        """Let go of a model's scheduler and of what is kept for it in memory."""
        checkpoint, scheduler = self._schedulers.pop(key)
        checkpoint.features.clear()
        if scheduler.prefixes is not None:
            scheduler.prefixes.drop()
        return checkpoint

    def _leave_ready(self, ticket: Ticket, started: bool = False) -> None:
        with self._lock:
            if ticket not in self._ready:
                return
            self._ready.remove(ticket)
            if started:
                ticket.started = time.monotonic()
                self.stats.waiting -= 1
                self.stats.running += 1
        self._open_next()

    def _withdraw_cancelled(self, scheduler: Scheduler) -> None:
        with self._lock:
            gone = [one for one in self._tickets if one.cancelled and one.started is not None]
        for ticket in gone:
            if ticket.checkpoint is None or ticket.checkpoint.model is not scheduler.model:
                continue
            for number in list(ticket.texts):
                scheduler.cancel((ticket, number))
            self._end(ticket)

    def _deliver(self, scheduler: Scheduler, event: NewTokens | RequestOutput) -> None:
        ticket, number = event.key
        text = ticket.texts.get(number)
        if text is None:  # it has ended at a stop string
            return
        if isinstance(event, NewTokens):
            seconds = time.monotonic() - ticket.began
            if ticket.first_token_seconds is None:
                ticket.first_token_seconds = seconds
            ticket.decode_seconds = seconds - ticket.first_token_seconds
            if number == 0:
                ticket.cached_tokens = event.reused_tokens
            self._show(ticket, text.put(number, event.token_ids, event.logprobs))
            if not text.stopped:
                return
            scheduler.cancel(event.key)
            ticket.finish_reasons[number] = "stop"
        elif event.error is not None:
            for other in ticket.texts:
                scheduler.cancel((ticket, other))
            self._end(ticket, event.error)
            return
        else:
            self._show(
                ticket, text.put(number, [], [] if ticket.request.logprobs is not None else None, last=True)
            )
            ticket.finish_reasons[number] = "stop" if text.stopped else event.stop_reason
            ticket.confidences[number] = event.confidence
            ticket.decided[number] = decided(ticket.form, event.decision)
        del ticket.texts[number]
        if not ticket.texts and ticket.then is not None:
            self._later.append((ticket, ticket.then(event.token_ids)))
        elif not ticket.texts:
            self._end(ticket)

    def _show(self, ticket: Ticket, piece: Piece) -> None:
        ticket.completion_tokens += len(piece.token_ids)
        ticket.reasoning_tokens += piece.thinking
        ticket.put(piece)

    def _give_up(self, key: int, error: Exception) -> None:
        """A model's step has failed: its requests end, and a new scheduler begins."""
        checkpoint = self._drop(key)
        told = error if isinstance(error, OutOfMemoryError | MemoryError) else Interrupted(str(error))
        for ticket in list(self._tickets):
            asked = ticket.checkpoint
            if ticket.started is not None and asked is not None and asked.model is checkpoint.model:
                self._end(ticket, told)

    # ---------------------------------------------------------------------------------------------- ends

    async def drain(self, seconds: float) -> None:
        """Take nothing new, and wait so long for what was accepted."""
        self._draining, end = True, time.monotonic() + seconds
        while self._tickets and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """End all work at its next step, and write what is to be kept."""
        with self._lock:  # what is taken in before is ended below, and what comes later is refused
            self._closed = True
            left = list(self._tickets)
        self._wake.set()
        for pool in (self._openers, self._decoders, self._former, *self._doors.values()):
            pool.shutdown(wait=False, cancel_futures=True)
        for opening in list(self._openings.values()):
            with suppress(InvalidStateError):  # it is open
                opening.set_exception(Interrupted("the server has ended"))
        if threading.current_thread() is not self._thread:
            self._thread.join(10)
        for ticket in left:
            ticket.stop_decoding()
        for key in list(self._schedulers):
            self._drop(key)
        self._stores.close()


def prepare_messages(
    messages: list[Message],
    options: GenerationOptions,
    checkpoint: Checkpoint,
    thinks_by: str = "thinking",
    tools: Sequence[Tool] = (),
) -> Prepared:
    """The prompt of a conversation. Images have been looked at by whoever accepted them. Earlier answers say
    pixels, as they were shown (see `PixelText`), and are read by the model in its own numbers. `thinks_by`:
    what a model without thinking is to be asked without. `tools`: that the prompt speaks of, unless the model
    did not learn to write what calls hold."""
    think = isinstance(options.constraint, Think)
    if think:
        checkpoint.processor.chat.check_thinking(thinks_by)
    limits = replace(OF_STRANGERS, max_bytes=ImageLimits.max_bytes, max_pixels=ImageLimits.max_pixels)
    shown = sum(kind == "video" for message in messages for kind, _ in message.parts)
    of_each = replace(limits, max_seconds=limits.max_seconds / max(1, shown))
    form, size, processor = None, None, checkpoint.processor
    conversation, tools = [], tools if checkpoint.knows_tools else ()
    with ExitStack() as videos:

        def opened(kind: str, value: Any) -> Any:
            if kind == "video":
                processor.check_video(describe(value), animated=container_of(value[:HEAD]) is None)
                return videos.enter_context(open_apart(value, of_each, describe(value)))
            return load_image(value, limits) if kind == "image" else value

        for message in messages:
            parts = [(kind, opened(kind, value)) for kind, value in message.parts]
            if sizes := {value.size for kind, value in parts if kind == "image"}:
                size = sizes.pop() if len(sizes) == 1 else None
                form = (
                    spoken_form(processor.coordinates, processor.images.plan(*size).sizes) if size else None
                )
            if message.role == "assistant" and form is not None and size is not None:
                parts = [(kind, rescaled(form, str(text), size, back=True)) for kind, text in parts]
            content = [{"type": kind, kind: value} for kind, value in parts]
            about = {"tool_calls": message.calls, "tool_call_id": message.call_id, "name": message.name}
            about |= {"role": message.role, "reasoning_content": message.thoughts}
            conversation.append(about | {"content": GivenText(content) if message.as_text else content})
        encoded = processor.encode_conversation(conversation, True, think=think, tools=tools)
    return Prepared(encoded, options)
