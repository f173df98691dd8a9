"""The best of several answers to one question, by vote.

    options = GenerationOptions(num_return_sequences=8, temperature=0.8, seed=0, confidence=True)
    result = ask(checkpoint, ["photo.jpg"], "How many boats are there?", options).finish()
    print(result["answers"][winner(result["answers"], result["confidences"])])

A vote is won by the answer that was given most often (Wang and others, "Self-Consistency Improves Chain of
Thought Reasoning in Language Models", 2023), and among equals by the one with the higher mean confidence. A
confidence is the geometric mean of the probabilities of an answer's tokens, so that the order of confidences
is that of mean log-probabilities: a longer answer is not at a disadvantage (`generation.confidence`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence


def normalised(answer: str) -> str:
    """An answer as votes compare it: without case, white space around words, and a dot at the end."""
    return " ".join(answer.lower().split()).removesuffix(".").rstrip()


def winner(
    answers: Sequence[str], confidences: Sequence[float], same: Callable[[str], Hashable] = normalised
) -> int:
    """The number, from 0, of the surest of the most frequent answers, the first of equals; those for which
    `same` is equal are one."""
    groups: dict[Hashable, list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(same(answer), []).append(number)

    def worth(group: list[int]) -> tuple[int, float]:
        return len(group), math.fsum(confidences[number] for number in group) / len(group)

    most = max(groups.values(), key=worth)
    return max(most, key=confidences.__getitem__)
