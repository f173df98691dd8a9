"""One thread in which models work: answers take turns there, one decode step each.

    thread = ModelThread()
    task = thread.begin(lambda: steps())       # a generator of pieces that returns a result
    while not task.ended:
        pieces = task.take()                   # what is new since the last call
    result = task.result()                     # or raises what went wrong

Models, their decode steps and caches are not made for several threads at once; of one thread they need to
know nothing, and it keeps one pool of workers for torch. Everything that touches a model runs here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")

AT_ONCE = 8  # answers that take turns; each holds a cache, the rest wait


class Task(Generic[Piece, Result]):
    """Work that was handed in: what it has made so far, and what came of it. For any thread."""

    def __init__(self, thread: ModelThread, begin: Callable[[], Generator[Piece, None, Result]]):
        self._thread = thread
        self._begin: Callable[[], Generator[Piece, None, Result]] | None = begin
        self._steps: Generator[Piece, None, Result] | None = None
        self._made: deque[Piece] = deque()
        self._result: list[Result] = []
        self._error: Exception | None = None
        self._cancelled = threading.Event()
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def before(self) -> int:
        """How many have to end before this one begins."""
        return self._thread.before(self)

    def take(self) -> list[Piece]:
        """What has been made since the last call; does not wait."""
        return [self._made.popleft() for _ in range(len(self._made))]

    def cancel(self) -> None:
        """End it: its generator is closed before the next step, and it has no result. One that waits has
        ended when this returns."""
        self._cancelled.set()
        if self._thread.forget(self):
            self._end()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end: whether it came."""
        return self._ended.wait(seconds)

    def result(self) -> Result | None:
        """What the generator returned; None if it was cancelled. Raises what it raised."""
        assert self.ended, "a task has a result once it has ended"
        if self._error is not None:
            raise self._error
        return self._result[0] if self._result else None

    def step(self) -> bool:
        """Go on by one piece: whether there is more to do. Called by the thread that owns the models."""
        try:
            if self._cancelled.is_set():
                if self._steps is not None:
                    self._steps.close()
                return self._end()
            if self._steps is None:
                assert self._begin is not None, "what has not begun can begin"
                self._steps, self._begin = self._begin(), None
            self._made.append(next(self._steps))
            return True
        except StopIteration as end:
            self._result.append(end.value)
        except Exception as error:  # whatever it is belongs to whoever asked: the thread goes on
            self._error = error
        return self._end()

    def _end(self) -> bool:
        self._begin = self._steps = None  # and with them caches and images
        self._ended.set()
        return False


class ModelThread:
    """See the module's docstring.

    Args:
        at_once: so many tasks take turns, the others wait in the order in which they came.
    """

    def __init__(self, at_once: int = AT_ONCE):
        self._at_once = at_once
        self._waiting: deque[Task] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running: deque[Task] = deque()
        self._thread = threading.Thread(target=self._run, name="models", daemon=True)
        self._thread.start()

    def begin(self, begin: Callable[[], Generator[Piece, None, Result]]) -> Task[Piece, Result]:
        """Hand in work: `begin` is called, and the generator it gives run, in the thread of the models."""
        task: Task[Piece, Result] = Task(self, begin)
        with self._changed:
            self._waiting.append(task)
            self._changed.notify()
        return task

    def close(self, seconds: float | None = None) -> None:
        """End all tasks before their next step, then the thread; wait for that, so long at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        with self._changed:
            return not (self._running or self._waiting)

    def before(self, task: Task) -> int:
        """The place of a task among those that wait, counted from 1; 0 if it does not."""
        with self._changed:
            return self._waiting.index(task) + 1 if task in self._waiting else 0

    def forget(self, task: Task) -> bool:
        """Take a task out of those that wait: whether it was there."""
        with self._changed:
            if task in self._waiting:
                self._waiting.remove(task)
                return True
            return False

    def _run(self) -> None:
        while task := self._next():
            more = task.step()
            with self._changed:
                self._running.remove(task)
                if more:
                    self._running.append(task)
            del task  # or it would be held while this waits

    def _next(self) -> Task | None:
        """Whose turn it is; None at the end."""
        with self._changed:
            while not (self._running or self._waiting or self._closed):
                self._changed.wait()
            while self._waiting and (len(self._running) < self._at_once or self._closed):
                self._running.appendleft(self._waiting.popleft())  # first words first
            if self._closed:
                for task in self._running:
                    task.cancel()
            return self._running[0] if self._running else None
