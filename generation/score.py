"""One of several answers, chosen by how likely the model finds each of them as a whole.

    options = GenerationOptions(constraint=Choices(answers, stop_ids))       # token ids of each answer
    (decision,) = model.generate_detailed(**inputs, options=options).decisions
    decision.probabilities                                                   # [0.93, 0.07]

The probability of an answer is the product of those of its tokens and of the end after them, by any stop
token: what teacher forcing gives. The prompt is computed once. Its row of the cache is copied for several
answers at a time, and one pass over their tokens gives the logits after each; an answer that another one
begins with needs no copy of its own.

Temperature, filters and seed choose among the answers as they do among tokens elsewhere. Greedy takes the
answer that is likeliest as a whole, of equals the first; token by token it could be another one. The tokens
of the chosen answer are then forced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.draws import sample, uniforms
from generation.kv_cache import KVCache
from generation.sampling import Row, keep
from generation.steps import Step

AHEAD_BYTES = 128 * 2**20  # of copies of a row at a time; one is always made
AHEAD_POSITIONS = 128  # computed at a time: each has logits as wide as the vocabulary

Ids = tuple[int, ...]
# Sequences of ids -> of each the logits (n, V) after each of its ids, had it come next in the row.
Ahead = Callable[[Sequence[Ids]], Iterable[Tensor]]


@dataclass(frozen=True)
class Decision:
    """Which of several answers was chosen, by its place, and the natural logarithm of the probability that
    the model itself gives to each as a whole, its end included."""

    chosen: int
    logprobs: tuple[float, ...]

    @property
    def probabilities(self) -> list[float]:
        """Among these answers: they add up to 1."""
        shares = [math.exp(one - max(self.logprobs)) for one in self.logprobs]
        return [share / math.fsum(shares) for share in shares]

    @property
    def mass(self) -> float:
        """The probability that the model's answer would have been one of them."""
        return min(1.0, math.fsum(map(math.exp, self.logprobs)))


@dataclass(frozen=True)
class Choices:
    """Makes the constraint of each answer: `GenerationOptions.constraint`.

    answers: of each the token ids, its stop token included; no two alike. stop_ids: all that end an answer.
    """

    answers: tuple[Ids, ...]
    stop_ids: Ids

    def __call__(self) -> Choice:
        return Choice(self)


class Choice:
    """The `generation.protocol.Constraint` of one answer: once `decide` has chosen it, it is forced."""

    thinking = full = False
    decision: Decision | None = None

    def __init__(self, choices: Choices):
        self._choices, self._forced = choices, list[int]()

    @property
    def choice(self) -> Choice:
        return self

    def decide(self, row: Row, logits: Tensor, ahead: Ahead) -> None:
        """Choose one of the answers, from the logits (V,) of its first token."""
        found = log_probabilities(self._choices, logits, ahead)
        params = replace(row.params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
        uniform = None
        if not params.greedy:
            uniform = uniforms(torch.tensor([row.first_seed()]), torch.tensor(row.launched))
        scores = torch.tensor([found])
        self.decision = Decision(int(sample(scores, params, uniform)), found)
        self._forced = list(self._choices.answers[self.decision.chosen])
        if not math.isfinite(scores.logsumexp(-1).item()):
            logits.fill_(math.nan)  # the row's error, as for any other logits

    def close(self, scores: Tensor) -> None:
        pass

    def allows(self, token_id: int) -> bool:
        return self._forced[:1] == [token_id]

    def mask(self, scores: Tensor) -> None:
        keep(scores, self._forced[:1])

    def accept(self, token_id: int) -> None:
        del self._forced[:1]

    def forced(self) -> list[int]:
        return list(self._forced)


def decide(
    rows: Sequence[Row],
    logits: Tensor,
    step: Step,
    kv_cache: KVCache,
    at: Callable[[int], tuple[int, int, int]],
) -> None:
    """Choose the answers of those rows that come to their choice with these logits (k, V). `at` says of a row
    by its number: its row of the cache, its next slot, and the offset of its rotary places."""
    for number, row in enumerate(rows):
        choice = None if row.constraint is None or row.stop_reason else row.constraint.choice
        if choice is not None and choice.decision is None:
            choice.decide(row, logits[number], partial(look_ahead, step, kv_cache, *at(number)))


def log_probabilities(choices: Choices, logits: Tensor, ahead: Ahead) -> tuple[float, ...]:
    """The log-probability of each answer as a whole, by the logits (V,) of its first token, and `ahead` for
    those of the others."""
    first, known = logits.float()[None], dict[Ids, float]()
    said = sorted({ids[:-1] for ids in choices.answers})
    # In this order whatever begins with an answer follows it.
    whole = [ids for ids, after in pairwise([*said, ()]) if after[: len(ids)] != ids]
    for ids, rest in zip(whole, ahead(whole)):
        logprobs = torch.cat((first, rest.float())).log_softmax(-1)  # (n + 1, V)
        of_tokens = logprobs[range(len(ids)), ids].double().cumsum(0).tolist()
        of_end = logprobs[:, list(choices.stop_ids)].double().logsumexp(-1).tolist()
        for count, logprob in enumerate(of_tokens, 1):
            known[ids[:count]] = logprob + of_end[count]
    return tuple(known[ids[:-1]] for ids in choices.answers)


def look_ahead(
    step: Step, kv_cache: KVCache, number: int, start: int, offset: int, sequences: Sequence[Ids]
) -> Iterator[Tensor]:
    """Of each sequence of ids the logits (n, V) after each of them, had they followed the first `start`
    positions of row `number`, whose rotary places are `offset` on. The cache stays as it is."""
    own, longest = kv.view(kv_cache, start, number, 1), max(map(len, sequences))
    most = AHEAD_BYTES * start // (kv.size_in_bytes(own) * (start + longest))
    count = max(1, min(most, AHEAD_POSITIONS // longest))
    for begin in range(0, len(sequences), count):
        some = sequences[begin : begin + count]
        copies = kv.fork(own, start, len(some), start + longest)
        yield from step.ragged(some, copies, [start] * len(some), [offset] * len(some))
