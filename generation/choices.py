"""One of several answers, chosen by how likely the model finds each of them as a whole.

    options = GenerationOptions(constraint=Choices(answers, stop_ids))       # token ids of each answer
    (decision,) = model.generate_detailed(**inputs, options=options).decisions
    decision.probabilities                                                   # [0.93, 0.07]

The probability of an answer is the product of those of its tokens and of the end after them, by any stop
token: what teacher forcing gives. All of them come from one prefill. The row that holds the prompt is copied
for several answers at a time, and one pass over their tokens gives the logits after each; an answer that
another one begins with needs no copy of its own.

Among the answers temperature, filters and seed choose as they do among tokens elsewhere. Greedy is the
likeliest as a whole, of equals the first: a choice token by token may be another one. The tokens of what was
chosen are then forced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.kv_cache import KVCache
from generation.sampling import Decision, Row, sample, uniforms
from generation.steps import Step

AHEAD_BYTES = 128 * 2**20  # of copies of a row at a time; one is always made
AHEAD_POSITIONS = 128  # after them at a time: each has logits as wide as the vocabulary

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """Makes the constraint of each answer: `GenerationOptions.constraint`.

    answers: of each the token ids, its stop token included; no two alike. stop_ids: all that end an answer.
    known: log-probabilities of answers, by the prompt's length and what was said before; None keeps none.
    """

    answers: tuple[Ids, ...]
    stop_ids: Ids
    known: dict[Ids, dict[Ids, float]] | None = field(default=None, compare=False)

    def __call__(self) -> _Choosing:
        return _Choosing(self)

    def of_one_prompt(self) -> Choices:
        """The same for several answers to it, which look at all choices once."""
        return replace(self, known={})

    def decide(self, found: tuple[float, ...], row: Row) -> Decision:
        """The choice of a row by the log-probabilities of all answers."""
        penalties = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        params, uniform = replace(row.params, **penalties), None
        if not params.greedy:
            uniform = uniforms(torch.tensor([row.first_seed()]), torch.tensor(row.launched))
        return Decision(int(sample(torch.tensor([found]), params, uniform)), found)

    def look(self, scores: Tensor, row: Row, known: dict[Ids, float]) -> tuple[float, ...] | None:
        """One more pass over answers of a row whose next token has these logits (V,): log-probabilities of
        all, None as long as some are not `known`."""
        assert row.look_ahead is not None, "choices need the cache"
        first = scores.float()[None]
        said = sorted({ids[:-1] for ids in self.answers})
        # In this order whatever begins with an answer follows it.
        ends = (ids for ids, after in pairwise([*said, ()]) if after[: len(ids)] != ids)
        left = [ids for ids in ends if ids not in known]
        for ids, logits in zip(left, row.look_ahead(left) if left else ()):
            logprobs = torch.cat((first, logits.float())).log_softmax(-1)  # (n + 1, V)
            of_tokens = logprobs[range(len(ids)), ids].double().cumsum(0).tolist()
            of_end = logprobs[:, list(self.stop_ids)].double().logsumexp(-1).tolist()
            for count, logprob in enumerate(of_tokens, 1):
                known[ids[:count]] = logprob + of_end[count]
        return tuple(known[ids[:-1]] for ids in self.answers) if known.keys() >= {*said} else None


class _Choosing:
    """A `generation.protocol.Constraint`: the first token that it is asked about decides."""

    thinking = full = False

    def __init__(self, choices: Choices):
        self._choices, self._forced, self._known = choices, list[int](), dict[Ids, float]()

    def close(self, scores: Tensor, row: Row) -> bool:
        if row.decision is not None:
            return False
        if (shared := self._choices.known) is not None:
            self._known = shared.setdefault((len(row.prompt_ids), *row.tokens), {})
        if (found := self._choices.look(scores, row, self._known)) is None:
            return True
        row.decision, row.look_ahead = self._choices.decide(found, row), None
        self._forced = list(self._choices.answers[row.decision.chosen])
        if not math.isfinite(torch.tensor(found).logsumexp(0).item()):
            scores.fill_(math.nan)  # the row's error, as for any other logits
        return False

    def allows(self, token_id: int) -> bool:
        return self._forced[:1] == [token_id]

    def mask(self, scores: Tensor) -> None:
        keep(scores, self._forced[:1])

    def accept(self, token_id: int) -> None:
        del self._forced[:1]

    def forced(self) -> list[int]:
        return list(self._forced)


def keep(scores: Tensor, ids: Sequence[int]) -> None:
    """Set all others of scores (V,) to -inf."""
    index = list(ids)
    kept = scores[index]
    scores.fill_(-math.inf)
    scores[index] = kept


def look_ahead(
    step: Step, kv_cache: KVCache, number: int, start: int, offset: int, sequences: Sequence[Ids]
) -> Sequence[Tensor]:
    """Logits (n, V) after each of the n ids of sequences, had they followed the first `start` positions of
    row `number`, whose rotary places are `offset` on: of the first ones, as many as a pass takes. The cache
    stays as it is."""
    own, longest = kv.view(kv_cache, start, number, 1), max(map(len, sequences))
    most = AHEAD_BYTES * start // (kv.size_in_bytes(own) * (start + longest))
    count = max(1, min(most, AHEAD_POSITIONS // longest))
    some = sequences[:count]
    copies = kv.fork(own, start, len(some), start + longest)
    return step.ragged(some, copies, [start] * len(some), [offset] * len(some))
