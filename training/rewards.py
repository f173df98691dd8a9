"""Rewards: numbers that say how good answers are, by name or by a Python function of one's own.

    rewards = Rewards({"exact": 1.0, "my_rewards:brevity": 0.1})    # weights, as a recipe has them
    given = rewards(["three", "4"], row)     # {"exact": [1.0, 0.0], "my_rewards:brevity": [0.2, 0.9]}
    totals = rewards.totals(given)           # [1.02, 0.09]

A reward is called with the answers to one question, as texts, and with that question's row: its columns by
name, without images, and `target`, the answer that the row holds. It returns a number for each answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol

from messages import did_you_mean


class Reward(Protocol):
    """See the module's docstring."""

    def __call__(self, answers: list[str], row: Mapping[str, Any], **more: Any) -> list[float]: ...


def plain(text: str) -> str:
    """A text without what does not count: case, space around it, a final dot."""
    return text.strip().lower().removesuffix(".").strip()


def exact(answers: list[str], row: Mapping[str, Any], **more: Any) -> list[float]:
    """1 for the target, but for case, space and a final dot; else 0."""
    return [float(plain(answer) == plain(str(row["target"]))) for answer in answers]


REWARDS: dict[str, Callable[..., list[float]]] = {"exact": exact}


def find_reward(name: str) -> Reward:
    """A reward by its name, or the function that `module:function` names; a ValueError says what is wrong."""
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        near = did_you_mean(name, REWARDS)
        raise ValueError(f"rewards: expected {', '.join(REWARDS)} or module:function, got {name!r}{near}")
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"rewards: {name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"rewards: {name!r}: expected a function, got {type(found).__name__}")
    return found


class Rewards:
    """Several rewards with their weights. Raises ValueError for a name that is not known."""

    def __init__(self, weights: Mapping[str, float]):
        self.weights = dict(weights)
        self._rewards = {name: find_reward(name) for name in weights}

    def __call__(self, answers: list[str], row: Mapping[str, Any]) -> dict[str, list[float]]:
        """What each gives to the answers to one question; ValueError unless that is a finite number each."""
        given = {name: list(map(float, reward(answers, row))) for name, reward in self._rewards.items()}
        for name, values in given.items():
            if len(values) != len(answers) or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"reward {name}: expected {len(answers)} finite numbers, got {values!r:.200}"
                )
        return given

    def totals(self, given: Mapping[str, Sequence[float]]) -> list[float]:
        """The weighted sum for each answer."""
        weighted = ([self.weights[name] * value for value in values] for name, values in given.items())
        return [math.fsum(values) for values in zip(*weighted, strict=True)]
