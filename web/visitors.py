"""The people at a page: what each has asked, and the caches that are kept for them, both bounded.

visitors = Visitors(kept_bytes=2**30)
visitor = visitors.get(session_hash)           # known, or a new one
visitors.make_room()                           # caches of those who asked longest ago go first
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from generation.options import GenerationOptions
from generation.prefix import FeatureCache
from generation.session import Session
from inference.checkpoint import Checkpoint, RequestError
from inference.conversation import Conversation
from web.limits import PageLimits
from web.model_thread import Task

MOST_VISITORS, MOST_OPEN = 100, 500
KEPT_BYTES = 512 * 2**20
FEATURE_BYTES = 64 * 2**20


class TooManyError(Exception):
    """More pages than may be open at once."""


@dataclass(frozen=True)
class Asked:
    """What a visitor has filled in. Numbers come from a browser, or from whoever pretends to be one.

    images: files on this machine that the visitor uploaded or took from the examples.
    remember: earlier questions and answers about the same images stand before this question.
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

    def options(self, limits: PageLimits) -> GenerationOptions:
        """What the model is asked for; a seed is drawn where none was given. Raises RequestError."""
        for name, most in (("answers", limits.max_answers), ("max_new_tokens", limits.max_new_tokens)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise RequestError(f"{name.replace('_', ' ')}: expected 1 to {most}, got {str(value)[:40]}")
        try:
            return GenerationOptions(
                max_new_tokens=self.max_new_tokens,
                num_return_sequences=self.answers,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                seed=secrets.randbelow(2**31) if self.seed is None else self.seed,
            )
        except ValueError as error:
            raise RequestError(str(error)) from error


@dataclass(eq=False)
class Exchange:
    """A question with its answers as they are shown.

    images: files shown with it, where they are others than the question before had.
    about: files it was asked about.
    ended: "" while answers are being made, then of each answer why it ended: stop, length, context, stopped.
    """

    question: str
    images: tuple[str, ...]
    about: tuple[str, ...]
    answers: list[str]
    ended: list[str] = field(default_factory=list)


class Visitor:
    """One open page. Everything but `cancel` belongs to the event loop, the conversation to the thread of the
    models while a task runs.

    busy: held by whoever asks, until what came of it is shown.
    asking: the question that is being answered.
    unanswered: the last one that came to nothing, until it is taken back.
    """

    def __init__(self) -> None:
        self.log: list[Exchange] = []
        self.images: tuple[str, ...] = ()  # of the last question
        self.conversation: Conversation | None = None
        self.task: Task | None = None
        self.busy = asyncio.Lock()
        self.asking: Asked | None = None
        self.unanswered: Asked | None = None
        self.cancelled = self.gone = False

    @property
    def kept_bytes(self) -> int:
        """Memory that is held between questions: the cache, and images cut into tiles."""
        if self.conversation is None:
            return 0
        tiles = [image.tiles for turn in self.conversation.turns for image in turn.images]
        return self.conversation.session.kv_cache_bytes + sum(tile.nbytes for tile in tiles)

    def cancel(self) -> None:
        """End the answer that is being made, if there is one, or is about to be."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()

    def take_back(self) -> Exchange:
        """Take the last exchange out, as if it had not been asked."""
        taken = self.log.pop()
        self.images = self.log[-1].about if self.log else ()
        if self.conversation is not None and self.conversation.turns:
            self.conversation.undo()
        return taken

    def forget(self) -> None:
        """Let go of the conversation; what is shown stays."""
        self.conversation = None


class Visitors:
    """See the module's docstring. For any thread.

    Args:
        most: visitors that are known without a page of theirs being open; who asked longest ago is forgotten
            first.
        most_open: pages that are open at once.
        kept_bytes: of caches and images that are kept for the next question of those who are not answered
            just now.
    """

    def __init__(self, most: int = MOST_VISITORS, kept_bytes: int = KEPT_BYTES, most_open: int = MOST_OPEN):
        self._most, self._kept_bytes, self._most_open = most, kept_bytes, most_open
        self._open: Counter[str] = Counter()  # connections by session
        self._known: OrderedDict[str, Visitor] = OrderedDict()  # who asked last stands last
        self._features: dict[int, FeatureCache] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def kept_bytes(self) -> int:
        """Memory that is kept for all of them."""
        with self._lock:
            return sum(visitor.kept_bytes for visitor in self._known.values())

    def get(self, key: str) -> Visitor:
        """The visitor with that session, from now on the one who asked last."""
        with self._lock:
            visitor = self._known.setdefault(key, Visitor())
            self._known.move_to_end(key)
            # Anybody can invent sessions: those whose page is open stay.
            closed = {known: other for known, other in self._known.items() if known not in self._open}
            idle = [known for known, other in closed.items() if not other.busy.locked() and known != key]
            for known in idle[: max(0, len(closed) - self._most)]:
                del self._known[known]
            return visitor

    @contextmanager
    def connected(self, key: str) -> Iterator[None]:
        """A page of that session is open.

        Raises:
            TooManyError: of others as many as may be at once.
        """
        with self._lock:
            if self._open.total() >= self._most_open:
                raise TooManyError
            self._open[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[key] -= 1
                if not self._open[key]:
                    del self._open[key]

    def remove(self, key: str) -> None:
        """A page was closed: its answer ends, its memory is free."""
        with self._lock:
            visitor = self._known.pop(key, None)
        if visitor is not None:
            visitor.gone = True
            visitor.cancel()
            if not visitor.busy.locked():
                visitor.forget()

    def make_room(self) -> None:
        """Forget conversations until what is kept is within bounds: those without an open page, then the
        oldest."""
        with self._lock:
            kept = sum(visitor.kept_bytes for visitor in self._known.values())
            for _, visitor in sorted(self._known.items(), key=lambda known: known[0] in self._open):
                if kept <= self._kept_bytes:
                    return
                if not visitor.busy.locked():
                    kept -= visitor.kept_bytes
                    visitor.forget()

    def conversation(self, checkpoint: Checkpoint, before: Conversation | None) -> Conversation:
        """A new conversation, on the cache of the one before where that is of the same model."""
        if before is not None and before.checkpoint is checkpoint:
            return Conversation(checkpoint, session=before.session)
        with self._lock:
            key = id(checkpoint.model)
            if key not in self._features:
                self._features[key] = FeatureCache(checkpoint.model, FEATURE_BYTES)
            return Conversation(checkpoint, session=Session(checkpoint.model, self._features[key]))

    def close_model(self, checkpoint: Checkpoint) -> None:
        """Let go of everything that holds a model, but for answers that are being made."""
        with self._lock:
            self._features.pop(id(checkpoint.model), None)
            for visitor in self._known.values():
                held = visitor.conversation
                if held is not None and held.checkpoint is checkpoint and not visitor.busy.locked():
                    visitor.forget()
