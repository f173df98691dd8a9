"""Rewards: numbers that say how good answers are, by name or by a Python function of one's own.

    rewards = Rewards({"exact": 1.0, "my_rewards.py:brevity": 0.1})    # weights, as a recipe has them
    given = rewards(["three", "4"], row)     # {"exact": [1.0, 0.0], "my_rewards.py:brevity": [0.2, 0.9]}
    totals = rewards.totals(given)           # [1.02, 0.09]

| name | is |
|---|---|
| `exact` | 1 for a target, but for case, space and a final dot |
| `number` | 1 where the last number in the answer is within `tolerance` of the target's |
| `iou` | IoU with the box that is asked for, of several the F1 of IoUs matched one to one |
| `point_in_box` | 1 where the first point, or the first box's centre, lies in its box; of several the F1 |
| `length` | 1 from `least` to `most` characters, outside of which it falls to 0 at none and at twice `most` |
| each metric of `eval.metrics` | its score, with its options |

Options stand beside the weight: {"number": {"weight": 0.5, "tolerance": 0.1}}.

A reward is called with the answers to one question, as texts, and with that question's row: its columns by
name, without images, and `target`, the answer that the row holds (`accept`: others that are as good). A row
of boxes has what `data.box_rows.BoxRows.asked` says. It returns a number for each answer, or None for each
where it cannot score the row, which leaves it out of the sum. One's own is named `module:function` or
`FILE.py:function`, and gets options by name.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Protocol

from eval.boxes import ious, matched
from eval.metrics import METRICS, Metric, MetricError, asked_of, find_metric
from messages import did_you_mean, one_line

Row = Mapping[str, Any]
_NUMBER = re.compile(
    r"(?:(?<!\w)[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII
)


class Reward(Protocol):
    """See the module's docstring."""

    def __call__(self, answers: list[str], row: Row, **options: Any) -> Iterable[Any]: ...  # numbers, or None


def plain(text: str) -> str:
    """A text without what does not count: case, space around it, a final dot."""
    return text.strip().lower().removesuffix(".").strip()


def targets_of(row: Row) -> list[str]:
    accept = row.get("accept")
    others = accept if isinstance(accept, list | tuple) else [] if accept is None else [accept]
    return [str(row["target"]), *map(str, others)]


def exact(answers: list[str], row: Row) -> list[float]:
    wanted = {plain(target) for target in targets_of(row)}
    return [float(plain(answer) in wanted) for answer in answers]


def number(answers: list[str], row: Row, *, tolerance: float = 0.0) -> list[float]:
    wanted = [value for target in targets_of(row) if (value := _last_number(target)) is not None]
    if not wanted:
        raise MetricError(f"reward number: expected a target with a number, got {row['target']!r:.80}")

    def right(value: float | None) -> bool:
        return value is not None and any(abs(value - one) <= tolerance for one in wanted)

    return [float(right(_last_number(answer))) for answer in answers]


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def iou(answers: list[str], row: Row) -> list[float]:
    return [_iou(answer, row) for answer in answers]


def _iou(answer: str, row: Row) -> float:
    asked = asked_of(answer, row)
    if not asked.targets:
        return float(asked.refused)
    return 2 * matched(ious(asked.boxes, asked.targets)) / (len(asked.boxes) + len(asked.targets))


def length(answers: list[str], row: Row, *, most: float = 1000, least: float = 0) -> list[float]:
    def score(size: float) -> float:
        return size / least if size < least else min(1.0, max(0.0, 2 - size / max(most, 1)))

    return [score(len(answer.strip())) for answer in answers]


def _by_metric(metric: Metric, answers: list[str], row: Row) -> list[float]:
    return [metric.score(answer, targets_of(row), row) for answer in answers]


REWARDS: dict[str, Callable[..., list[float]]] = {
    reward.__name__: reward for reward in (exact, number, iou, length)
} | {"point_in_box": partial(_by_metric, find_metric("boxes", points=True))}


@contextmanager
def _code_of(name: str) -> Iterator[None]:
    """Turns whatever a user's function raises into a ValueError with file and line."""
    try:
        yield
    except Exception as error:  # of code that is not ours
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {one_line(error, 200)}"
        raise ValueError(f"reward {name}: {said} ({frame.filename}, line {frame.lineno})") from error


def find_reward(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """A reward by its name, or a person's own, with its options; a ValueError says what is wrong."""
    options = dict(options or {})
    if name in METRICS:
        return partial(_by_metric, find_metric(name, **options))
    found = REWARDS[name] if name in REWARDS else _own(name)
    try:
        inspect.signature(found).bind([], {}, **options)
    except TypeError as error:
        raise ValueError(f"reward {name}: options {', '.join(options) or 'none'}: {error}") from None
    for option, value in options.items() if name in REWARDS else ():
        if _number(f"reward {name}: {option}", value) < 0:
            raise ValueError(f"reward {name}: expected {option} of at least 0, got {value}")
    return partial(found, **options)


def _number(where: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ValueError(f"{where}: expected a finite number, got {given!r:.80}")
    return float(given)


def _own(name: str) -> Reward:
    place, colon, function = name.rpartition(":")
    if not colon:
        known = [*REWARDS, *METRICS]
        raise ValueError(
            f"rewards: expected {', '.join(known)} or module:function, got {name!r}"
            f"{did_you_mean(name, known)}"
        )
    with _code_of(name):
        if place.endswith(".py"):
            found = getattr(_run(Path(place)), function)
        else:
            found = resolve_name(name)
    if not callable(found):
        raise ValueError(f"reward {name}: expected a function, got {type(found).__name__}")
    return found


def _run(file: Path) -> ModuleType:
    """A person's file as a module, which dataclasses look up by its name; it may import files beside it."""
    spec = importlib.util.spec_from_file_location(f"rewards of {file.with_suffix('')}", file)
    assert spec is not None and spec.loader is not None, "a file of Python"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder := str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


class Rewards:
    """Several rewards with their weights, or mappings of `weight` and options. Raises ValueError for a name
    or an option that is not known. `refused`: by name, why a reward could not score the latest such row."""

    def __init__(self, weights: Mapping[str, Any]):
        given = {name: one if isinstance(one, Mapping) else {"weight": one} for name, one in weights.items()}
        self.weights = {
            name: _number(f"reward {name}: weight", one.get("weight", 1.0)) for name, one in given.items()
        }
        self._rewards = {
            name: find_reward(name, {key: value for key, value in one.items() if key != "weight"})
            for name, one in given.items()
        }
        self.refused: dict[str, str] = {}

    def __call__(self, answers: list[str], row: Row) -> dict[str, list[float]]:
        """What each that can score the row gives to the answers to one question; ValueError unless that is a
        finite number each."""
        given = {name: self._given(name, answers, row) for name in self._rewards}
        return {name: values for name, values in given.items() if values is not None}

    def _given(self, name: str, answers: list[str], row: Row) -> list[float] | None:
        reward = self._rewards[name]
        if ":" not in name:
            try:
                return list(reward(answers, row))
            except MetricError as error:
                self.refused[name] = one_line(error)
                return None
        with _code_of(name):
            given = reward(list(answers), row)
            values = None if isinstance(given, str | Mapping) else [*given]
        if values is None or any(isinstance(one, str) for one in values):
            raise ValueError(f"reward {name}: expected a list of numbers, got {given!r:.200}")
        if len(values) == len(answers) and all(one is None for one in values):
            self.refused[name] = f"reward {name}: None for each answer"
            return None
        with _code_of(name):
            numbers = [float(one) for one in values]
        if len(numbers) != len(answers) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"reward {name}: expected {len(answers)} finite numbers, got {numbers!r:.200}")
        return numbers

    def totals(self, given: Mapping[str, Sequence[float]]) -> list[float]:
        """The weighted sum for each answer; none where no reward could score the row."""
        weighted = ([self.weights[name] * value for value in values] for name, values in given.items())
        return [math.fsum(values) for values in zip(*weighted, strict=True)]
