"""The page's visitors: what they may take, their conversations, and what they see while an engine answers.

    service = Service(Engine(Models(["checkpoints/ocelli-shapes"])))
    visitor = service.visitor("a session")
    request = AskRequest(("photo.png",), "How many boats?", "checkpoints/ocelli-shapes")
    async for view in service.ask(visitor, request):
        show(view)

Questions wait in the engine's queue and are answered in its slots, together with those of programs. A visitor
keeps texts and token ids alone: a conversation's prompt is made of them anew, and the engine finds what it
kept of it. Every error ends in a view with one sentence. A service belongs to one event loop; only `close`
may be called elsewhere.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from data.errors import ImageError, PromptError
from data.images import ImageLimits, NamedBytes, describe, load_image, read_bytes
from data.tiles import Sizes, Visual
from data.visuals import HEAD, is_video
from generation.kv_cache import bytes_per_position
from generation.options import GenerationOptions
from inference.answer import split
from inference.checkpoint import Checkpoint, RequestError, other_model, too_many_images
from inference.conversation import NextTurn, Turn, encode_short, next_turn
from inference.coordinates import PixelText
from inference.thinking import THINK_TOKENS, Think
from models.checkpoints.files import Origin
from models.checkpoints.names import PHOTOGRAPHS
from web.engine import DRAFT, Engine, EngineLimits, EngineRequest, Piece, Prepared, Ticket
from web.errors import log_fault, refusal
from web.guard import Turns
from web.images import VisitorLimits
from web.pictures import original_size, take_in
from web.videos import open_apart

REDRAW = 0.1  # an answer is shown anew at most this often
ALIVE = 1.0  # while nothing happens, a view is given this often: it fails where the visitor has gone
ENDING = 2.0  # seconds that a page which is loaded anew waits for the end of its earlier answer
_KEY = re.compile(r"[0-9a-f]{32}")  # of 128 bits
STOPPED = "Stopped before the first word."
# Pixels of a longest side: what a page shows of an image at most, what a model that is not open yet may see
# (Qwen-VL's 16 million of a square), and no bound.
SHOWN, SEEN, UNBOUND = 1024, 4096, 10**6
# As large as on the command line.
OF_VISITORS = VisitorLimits(allow_urls=False, allow_paths=False, max_seconds=20)


@dataclass(frozen=True)
class ServiceLimits:
    """What visitors may take besides `EngineLimits`.

    max_characters: of one question. max_turns: kept of a conversation, the latest.
    max_uploaded_bytes: kept of all visitors together.
    max_visitors: remembered without an open page, and kept_seconds: how long they are, for a page that is
        loaded anew. max_open: open pages.
    max_tiled_bytes: of images cut into tiles, which are kept for their visitors' next questions.
    image: what an image may be: what it may be on the command line.
    """

    max_characters: int = 4_000
    max_turns: int = 50
    max_uploaded_bytes: int = 2**30
    max_visitors: int = 100
    max_open: int = 500
    max_tiled_bytes: int = 128 * 2**20
    kept_seconds: float = 600.0
    image: ImageLimits = OF_VISITORS


@dataclass(frozen=True)
class AskRequest:
    """A question to a model. The numbers come from a browser, or from a program that pretends to be one.

    images: uploaded files on this machine.
    seed: None draws one.
    remember: whether earlier questions about the same images stand before this one.
    draft: whether a single answer about new images may be drafted from the whole image while its tiles are
        encoded.
    think: whether the model thinks first; then there is no draft.
    """

    images: tuple[str, ...]
    question: str
    model: str
    answers: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    seed: int | None = None
    remember: bool = False
    draft: bool = False
    think: bool = False

    def options(self, limits: EngineLimits) -> GenerationOptions:
        """The options of the answer. Raises RequestError."""
        for name, most in (("answers", limits.slots), ("max_new_tokens", limits.max_new_tokens)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise RequestError(f"{name}: expected a whole number from 1 to {most}, got {str(value)[:40]}")
        shared = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        try:
            return GenerationOptions(
                **{name: getattr(self, name) for name in shared},
                num_return_sequences=self.answers,
                confidence=True,
                seed=seed,
                constraint=Think(min(THINK_TOKENS, limits.max_new_tokens)) if self.think else None,
            )
        except ValueError as error:
            raise RequestError(str(error)) from error


@dataclass(eq=False)
class Exchange:
    """A question and its answers as a page shows them.

    images: those that the question before did not have.
    stop_reasons: of each answer, once all have ended: stop, length, context or stopped.
    stats: see `TurnReply.finish`; "first_words" is the time from the question to them, in seconds, and
        "drafted_words" that to the draft's.
    draft: what is shown until an answer begins. thoughts: what was thought before each answer.
    turn: once all answers have ended, for the prompts of later questions, of a model from `origin`; without
        its images, which are the request's.
    sizes, small, coordinates: of the image that coordinates in an answer are of, if it is known, and in a
        draft, and how its model writes them (`Processor.coordinates`). They are set when the prompt is made.
    """

    request: AskRequest
    images: tuple[str, ...]
    answers: list[str]
    stop_reasons: list[str] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    draft: str = ""
    turn: Turn | None = None
    origin: Origin | None = None
    sizes: Sizes | None = None
    small: Sizes | None = None
    coordinates: Any = None
    thoughts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thoughts = [""] * len(self.answers)

    def readable(self, text: str, draft: bool = False) -> str:
        """An answer or the draft so far, as a person reads it: boxes and points as lines, in pixels."""
        pixels = PixelText(self.coordinates, self.small if draft else self.sizes)
        return pixels.put(text) + (pixels.finish() if self.stop_reasons else "")

    def take(self, piece: Piece, seconds: float) -> None:
        """More of an answer or of its draft, so long after the question."""
        if piece.answer == DRAFT:
            self.draft += piece.text
        else:
            self.answers[piece.answer] += piece.text
            self.thoughts[piece.answer] += piece.thought
        if piece.text:
            self.stats.setdefault("drafted_words" if piece.answer == DRAFT else "first_words", seconds)

    def settle(
        self, asked: NextTurn, checkpoint: Checkpoint, ids: list[list[int]], ticket: Ticket, stopped: bool
    ) -> None:
        """Describe the answers, which have these ids."""
        result = asked.result(checkpoint, ids, stopped)
        per_position, positions = bytes_per_position(checkpoint.model.language_model), result["prompt_tokens"]
        after_first = sum(len(answer) - 1 for answer in ids)
        self.turn = replace(asked.answered(result), images=())
        self.origin, self.stop_reasons = checkpoint.model.origin, result["stop_reasons"]
        self.stats |= {
            **result,
            "reused_tokens": ticket.cached_tokens,
            "confidences": [one for one in ticket.confidences if one is not None],
            "decode_tokens_per_second": after_first / seconds if (seconds := ticket.decode_seconds) else None,
            "kv_cache_bytes": per_position * sum(positions + len(answer) for answer in ids),
            "sampled": not asked.options.greedy,
            "seed": asked.options.seed,
            **checkpoint.settings,
        }


def turns_before(log: Sequence[Exchange], checkpoint: Checkpoint) -> list[Turn]:
    """The turns of the conversation that the last exchange belongs to."""
    turns: list[Turn] = []
    for exchange in reversed(log):
        if exchange.turn is None or exchange.origin != checkpoint.model.origin:
            break
        turns.insert(0, exchange.turn)
        if exchange.turn.alone:
            break
    return turns


@dataclass(frozen=True)
class View:
    """What a page shows at one moment.

    notice: a sentence on an error (`failed`) or on what the visitor waits for, or "".
    busy: an answer is being made.
    returned: a request that was not answered, or was taken back.
    """

    log: list[Exchange]
    notice: str = ""
    failed: bool = False
    busy: bool = False
    returned: AskRequest | None = None


class Visitor:
    """One open page: its conversation, and the lock that whoever works for it holds.

    client: who takes turns with others at the engine.
    key: a secret of the browser's tab, by which a page that is loaded anew is known; "" where it has none.
    left: when its page was closed. looked_at: the question that the attribution tab was last filled with.
    """

    def __init__(self, client: str = "") -> None:
        self.client, self.key, self.left = client, "", 0.0
        self.looked_at: Exchange | None = None
        self.log: list[Exchange] = []
        self.busy = asyncio.Lock()
        self.request: AskRequest | None = None  # the one in work
        self.ticket: Ticket | None = None  # of what the engine is asked
        self.cancelled, self.cancels = False, 0  # the one in work; how often one was

    @property
    def images(self) -> tuple[str, ...]:
        """The images that the last question was about."""
        return self.log[-1].request.images if self.log else ()

    def cancel(self) -> None:
        """End the work in progress, and what waits for it."""
        self.cancelled, self.cancels = True, self.cancels + 1
        if self.ticket is not None:
            self.ticket.cancel()


class Service:
    """See the module's docstring."""

    def __init__(self, engine: Engine, limits: ServiceLimits | None = None):
        self.engine, self.models, self.limits = engine, engine.models, limits or ServiceLimits()
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()  # the latest to ask stands last
        self._open: Counter[str] = Counter()  # connections of open pages, by session
        self._tiled: OrderedDict[tuple[Origin | None, str], tuple[Visual, ...]] = OrderedDict()
        self._lock = threading.Lock()  # of the tiled images
        # One upload at a time is looked at: it may hold a large image's pixels.
        self.looking = ThreadPoolExecutor(1, thread_name_prefix="uploads")
        self._turns = Turns(1)

    def close(self) -> None:
        """End all work, and the engine."""
        for visitor in list(self._visitors.values()):
            visitor.cancel()
        self.looking.shutdown(wait=False, cancel_futures=True)
        self.engine.close()

    # ---------------------------------------------------------------------------------------- questions

    def check(self, request: AskRequest) -> GenerationOptions:
        """Refuse what can be refused without a model. Raises one of `user_errors`."""
        most, images = self.limits.max_characters, self.engine.limits.max_images
        self.models.check(request.model)
        if not request.question.strip():
            raise PromptError("Type a question first: the field is empty.")
        if (length := len(request.question)) > most:
            raise PromptError(f"question: expected at most {most:,} characters, got {length:,}")
        if (count := len(request.images)) > images:
            raise ImageError(f"images: expected at most {images} at once, got {count}; remove some of them")
        return request.options(self.engine.limits)

    def load(self, path: str) -> Image.Image | bytes:
        """An uploaded image, or the bytes of an uploaded video, within the limits of the service."""
        name, limits = repr(Path(path).name), self.limits.image
        try:
            with open(path, "rb") as file:
                data = NamedBytes(read_bytes(file, limits, name))
        except FileNotFoundError:
            raise ImageError(f"{name} is no longer kept here: add it again") from None
        data.name = name
        return data if is_video(data, limits, name) else load_image(data, limits, name)

    def shows_video(self, path: str) -> bool:
        """Whether an upload is a video. In any thread."""
        with suppress(OSError, ImageError), open(path, "rb") as file:  # whoever opens it says so
            return is_video(file.read(HEAD), self.limits.image, path, file.read)
        return False

    @property
    def edge(self) -> int:
        """Pixels of the longest side that uploaded images are made smaller to: no model here sees more."""
        models = self.models
        held = [one for name in models.names if (one := models.held(name)) is not None]
        edges = [SHOWN, *(one.processor.images.longest_side for one in held)]
        if models.any_model:
            return UNBOUND  # what a guest that is not open yet makes of them is not known
        return max(edges) if len(held) == len(models.names) else max(*edges, SEEN)

    async def taken_in(self, path: str, client: str) -> str:
        """`take_in` of a client's upload, of which one after another has its turn."""
        turn = self._turns.of(client)
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self.looking, self.take_in, path)

    def take_in(self, path: str) -> str:
        """See `web.pictures.take_in`; a video stays as it is, and is decoded when it is asked about. In the
        thread `looking`. What is neither is deleted, with an ImageError."""
        try:
            shown = self.load(path)
            return path if isinstance(shown, bytes) else take_in(path, shown, self.edge)
        except ImageError:
            Path(path).unlink(missing_ok=True)
            raise

    def about_images(self, model: str, count: int) -> str:
        """A sentence on what a model makes of several images, or "" for one."""
        if count < 2:
            return ""
        name = model or self.models.default
        return too_many_images(name, self.models.said(name), count) or (
            f"The model is shown all {count} images, in this order."
        )

    def tiled(self, checkpoint: Checkpoint, path: str, among: int = 1) -> tuple[Visual, ...]:
        """An uploaded image, opened and cut into tiles, or a video, or what stands for one; of so many, which
        share the seconds of a video. In any thread."""
        key = checkpoint.model.origin, path
        with self._lock:
            if key in self._tiled:
                self._tiled.move_to_end(key)
                return self._tiled[key]
        shown, limits = self.load(path), self.limits.image
        limits = replace(limits, max_seconds=limits.max_seconds / among)
        if isinstance(shown, bytes):
            with open_apart(shown, limits, describe(shown)) as clip:
                cut = checkpoint.processor.visuals(clip)
        else:
            cut = checkpoint.processor.visuals(shown)
        tiled = tuple(replace(one, size=original_size(path, one.size)) for one in cut)
        with self._lock:
            self._tiled[key] = tiled
            size = sum(one.parts.nbytes for some in self._tiled.values() for one in some)
            while size > self.limits.max_tiled_bytes:
                size -= sum(one.parts.nbytes for one in self._tiled.popitem(last=False)[1])
        return tiled

    async def ask(self, visitor: Visitor, request: AskRequest) -> AsyncGenerator[View, None]:
        """Answer a question. The visitor's next question ends the answer, as does closing the iteration."""
        began = time.perf_counter()
        visitor.cancel()
        cancels = visitor.cancels
        async with visitor.busy:
            visitor.cancelled, visitor.request = visitor.cancels != cancels, request
            try:
                options = self.check(request)
                if self.models.held(request.model) is None:
                    yield View(visitor.log, f"Opening {self.models.shown(request.model)} …", busy=True)
                    await asyncio.wrap_future(self.engine.open(request.model))
                new = () if visitor.log and request.images == visitor.images else request.images
                exchange = Exchange(request, new, [""] * request.answers)
                async with aclosing(self._answer(visitor, exchange, options, began)) as views:
                    async for view in views:
                        yield view
            except Exception as error:  # the service goes on in any case
                yield View(visitor.log, told(error), failed=True, returned=request)
            finally:
                visitor.request = None

    async def _answer(
        self, visitor: Visitor, exchange: Exchange, options: GenerationOptions, began: float
    ) -> AsyncGenerator[View, None]:
        """The question and its answers as they grow. An answer without a word does not stay."""
        request, ids = exchange.request, [list[int]() for _ in exchange.answers]
        log = tuple(visitor.log) if request.remember and not exchange.images else ()
        made: list[tuple[NextTurn, Checkpoint]] = []

        drafted = request.draft and not request.think and request.answers == 1 and exchange.images

        def prepare(checkpoint: Checkpoint) -> Prepared:
            count = len(request.images)
            images = tuple(one for path in request.images for one in self.tiled(checkpoint, path, count))
            turns, shown = turns_before(log, checkpoint), images
            if turns:
                turns[0], shown = replace(turns[0], images=images), ()
            asked = next_turn(checkpoint, None, turns, shown, request.question, options)
            made.append((asked.without_tiles(), checkpoint))
            exchange.sizes, exchange.coordinates = asked.row.sizes, checkpoint.processor.coordinates
            short = encode_short(checkpoint, None, (), images, request.question) if drafted else None
            exchange.small = short.sizes if short is not None else None
            return Prepared(asked.row, asked.options, short)

        video = await asyncio.to_thread(lambda: any(map(self.shows_video, request.images)))
        ticket = self.engine.submit(
            EngineRequest(request.model, prepare, request.answers, client=visitor.client, video=video)
        )
        visitor.log.append(exchange)
        del visitor.log[: -self.limits.max_turns]
        try:
            async with aclosing(self.follow(visitor, ticket)) as bursts:
                async for pieces, place in bursts:
                    for piece in pieces:
                        exchange.take(piece, time.perf_counter() - began)
                        if piece.answer != DRAFT:
                            ids[piece.answer] += piece.token_ids
                    yield View(visitor.log, queue_notice(place), busy=True)
        except Exception:
            ids = [[]]  # an answer that failed is none
            raise
        finally:
            if kept := bool(made) and all(split(made[0][1], one, options)[1] for one in ids):
                exchange.settle(*made[0], ids, ticket, visitor.cancelled or "" in ticket.finish_reasons)
            elif exchange in visitor.log:
                visitor.log.remove(exchange)
        # What a guest says about several images is known from now on.
        guest, said = request.model not in self.models.names, self.models.said(request.model)
        told = too_many_images(request.model, said, len(request.images)) if guest else ""
        if other := other_model(said, exchange.answers):
            told = f"{other[:1].upper()}{other[1:]}: {self.models.how(PHOTOGRAPHS)}."
        yield View(visitor.log, told) if kept else View(visitor.log, STOPPED, returned=request)

    async def follow(self, visitor: Visitor, ticket: Ticket) -> AsyncGenerator[tuple[list[Piece], int], None]:
        """The pieces of a ticket, in lists to be shown at once, with its place in the queue: ([], 3) while it
        waits. It ends early when the visitor cancels."""
        visitor.ticket = ticket
        if visitor.cancelled:
            ticket.cancel()
        try:
            yield [], ticket.place
            while (pieces := await ticket.some(ALIVE)) is not None:
                yield pieces, ticket.place
                await ticket.pause(REDRAW)
        finally:
            visitor.ticket = None
            ticket.cancel()

    async def undo(self, visitor: Visitor) -> View:
        """Take the last question back, which may be the one in work."""
        in_work = visitor.request
        visitor.cancel()
        if in_work is not None and visitor.log and visitor.log[-1].request is in_work:
            visitor.log.pop()  # at once: see `clear`
        async with visitor.busy:
            if in_work is not None:
                return View(visitor.log, returned=in_work)
            if not visitor.log:
                return View([], "There is nothing to undo.", failed=True)
            return View(visitor.log, returned=visitor.log.pop().request)

    async def clear(self, visitor: Visitor) -> View:
        """Forget the conversation."""
        visitor.cancel()
        visitor.log.clear()  # at once: a page may show the end of the answer after what is returned here
        async with visitor.busy:
            visitor.log.clear()
            return View(visitor.log)

    # ----------------------------------------------------------------------------------------- visitors

    def visitor(self, session: str, client: str = "") -> Visitor:
        """The visitor of a session, now the latest to ask. Of those without an open page, the first to have
        asked are forgotten: anybody can invent sessions."""
        visitor = self._visitors.setdefault(session, Visitor(client))
        self._visitors.move_to_end(session)
        closed = {key: other for key, other in self._visitors.items() if key not in self._open}
        idle = [key for key, other in closed.items() if key != session and not other.busy.locked()]
        before = time.monotonic() - self.limits.kept_seconds
        old = [key for key in idle if closed[key].key and closed[key].left < before]
        for key in {*old, *idle[: max(0, len(closed) - self.limits.max_visitors)]}:
            del self._visitors[key]
        return visitor

    async def restore(self, session: str, client: str, key: str) -> Visitor:
        """The visitor of a session, with the conversation of the page that had this key before: a browser's
        tab that was loaded anew. A tab that is open twice has it twice from then on."""
        visitor = self.visitor(session, client)
        if visitor.key or not _KEY.fullmatch(key):
            return visitor
        same = [other for other in self._visitors.values() if secrets.compare_digest(other.key, key)]
        visitor.key = key
        if same:
            with suppress(TimeoutError):  # its answer is being ended, if its page is closed
                await asyncio.wait_for(same[-1].busy.acquire(), ENDING)
                same[-1].busy.release()
            visitor.log[:0] = [exchange for exchange in same[-1].log if exchange.stop_reasons]
        for other in [name for name, one in self._visitors.items() if one in same and name not in self._open]:
            del self._visitors[other]
        return visitor

    @contextmanager
    def connected(self, session: str) -> Iterator[None]:
        """A page of the session is open. At the end of the last one its answer ends. It is then forgotten, or
        remembered for a while if it has a key.

        Raises RequestError where too many pages are open."""
        if self._open.total() >= self.limits.max_open:
            raise RequestError("too many pages are open here just now: try again in a moment")
        self._open[session] += 1
        try:
            yield
        finally:
            self._open[session] -= 1
            if not self._open[session]:
                del self._open[session]
                if (visitor := self._visitors.get(session)) is not None:
                    visitor.cancel()
                    visitor.left = time.monotonic()
                    if not visitor.key:
                        del self._visitors[session]


def queue_notice(place: int) -> str:
    return f"Many are asking just now: you are number {place} in the queue." if place else ""


def told(error: Exception) -> str:
    """A visitor's sentence on an error. Where it is our own fault, its place goes to the log."""
    refused = refusal(error, about_models=True)
    if refused.status == 500:
        log_fault(error)
    return str(refused)
