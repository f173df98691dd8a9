"""What became of one fuzzed input: taken, refused in a sentence of our own, or a finding."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

TARGETS = ("checkpoints", "images", "processor", "rows", "batch", "recipes")
MOST_SECONDS = 5.0  # of processor time for one input
MOST_BYTES = 2 * 2**30


class Wrong(Exception):
    """An input was taken, and what came of it is not what was promised."""


@dataclass(frozen=True)
class Outcome:
    """kind: "accepted", "refused" or "finding"; name: what as, for counting; detail: of a finding."""

    kind: str
    name: str
    detail: str = ""
    seconds: float = 0.0


def target(name: str) -> ModuleType:
    """A target's module: `REFUSALS`, the exceptions that are refusals; `inputs()`, a strategy of inputs that
    can be pickled; `opened(folder)`, what takes one of them and tells in a word what it was, with a folder
    for its files."""
    return import_module(name if "." in name else f"tests.robustness.fuzz_{name}")


def judge(run: Callable[[Any], str], value: Any, refusals: tuple[type[Exception], ...]) -> Outcome:
    """Run one input. Whatever it raises is judged; only the keyboard still interrupts."""
    began = time.process_time()
    try:
        outcome = Outcome("accepted", run(value))
    except KeyboardInterrupt:
        raise
    except refusals as error:
        outcome = _refused(error)
    except BaseException as error:  # Rust's panics are no Exception
        outcome = Outcome("finding", _signature(error), _trace(error))
    seconds = time.process_time() - began
    if seconds > MOST_SECONDS and outcome.kind != "finding":
        outcome = Outcome("finding", "slow", f"{seconds:.1f} s of processor time: {outcome.name}")
    return Outcome(outcome.kind, outcome.name, outcome.detail, seconds)


def _refused(error: Exception) -> Outcome:
    text = str(error)
    if not text.strip() or not text.isprintable():
        return Outcome("finding", f"sentence:{_signature(error)}", f"no sentence: {text!r}\n{_trace(error)}")
    if len(text) > 4000:
        return Outcome("finding", f"long:{_signature(error)}", f"{len(text)} characters: {text[:500]}")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):
            return Outcome("finding", f"memory:{_signature(cause)}", _trace(error))
        cause = cause.__cause__ or cause.__context__
    return Outcome("refused", type(error).__name__)


def _signature(error: BaseException) -> str:
    """Exceptions of one kind that come from one place count as one."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(Path(__file__).resolve().parents[2])
    ours = [frame for frame in frames if frame.filename.startswith(root) and "tests" not in frame.filename]
    last = (ours or frames)[-1:]
    where = "".join(f"{Path(frame.filename).name}:{frame.name}" for frame in last)
    return f"{type(error).__name__}@{where}"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]
