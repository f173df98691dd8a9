"""Tokens that are proposed and verified together: prompt lookup, and what a constraint forces.

    row.proposer = proposer_of(row, step, image_token_id)
    ...                                                # in place of a step, where there are proposals:
    if any(proposals := propose(rows, most=8)):
        logits = step.ragged(ids, kv_cache, starts)    # of each row's last token and its proposals
        verify(rows, proposals, logits, choose)        # the rows have one token more each, or several

A step reads all weights for one token of each row; a pass over several positions of them reads them once for
all. At each position a token is chosen from that position's logits, with the random numbers, penalties and
stop ids that it would have had without proposals. Proposals that equal the choices cost no pass of their own;
the first choice that differs is the next token, and what lies in the cache after it is free again. So
proposals change when tokens come and never which, as long as a pass over several positions gives the bits of
single steps. Steps say so themselves (`Step.same_bits`): where a product of several positions is rounded
otherwise, a tie within that rounding may be decided otherwise too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import eq

import torch
from torch import Tensor

from generation.options import GenerationOptions
from generation.sampling import Chosen, Row
from generation.steps import Step

MOST = 8  # ids looked up at a time
SIZES = (3, 2)  # of the n-grams that are looked up, the longest first
LIKELY = 0.4  # probability that a proposal has to have: a wrong one costs 0.1 to 0.5 of a step
FORGETTING = 0.9  # weight of what a pass showed after each one that follows


class PromptLookup:
    """The `generation.protocol.Proposer` of what followed the last time that the answer's last tokens stood
    in the prompt or the answer.

    Args:
        prompt_ids: (T,) of the row.
        image_token_id: is neither looked up nor proposed; None where images have no ids.
        always: proposes all that is found. Else as many ids as are likely to be right, by how often the row's
            proposals were, one at least where three tokens stood there before, and none beside other rows,
            where a wrong one costs as much of each.
    """

    def __init__(self, prompt_ids: Tensor, image_token_id: int | None, always: bool = True):
        self._prompt_ids, self._image_token_id, self._always = prompt_ids, image_token_id, always
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the token after the latest n-gram stands
        self._since_image = 0  # tokens at the end without an image
        self._seen = 0  # tokens of the answer that are in `_ids`
        self._last: list[int] = []  # proposed for the pass before
        self._right = self._wrong = 1.0

    def propose(self, tokens: list[int], alone: bool) -> list[int]:
        if self._last:
            self._learn(tokens[self._seen :])
        if not (alone or self._always):
            return []
        if not self._ids:  # not earlier: the first token does not wait for it
            self._append(self._prompt_ids.tolist())
        self._append(tokens[self._seen :])
        self._seen = len(tokens)
        found = ((size, self._after.get(tuple(self._ids[-size:]))) for size in SIZES)
        size, start = next(((size, start) for size, start in found if start is not None), (0, 0))
        if not size:
            return []
        # What is copied may run into its own beginning: a short period goes on and on.
        ids = self._ids[start : start + MOST]
        while len(ids) < MOST:
            ids.append(ids[start + len(ids) - len(self._ids)])
        ids = ids[: ids.index(self._image_token_id)] if self._image_token_id in ids else ids
        if not self._always:
            share = self._right / (self._right + self._wrong)
            self._last = ids = ids[: max(int(math.log(LIKELY) / math.log(share)), size == SIZES[0])]
        return ids

    def _learn(self, new_ids: list[int]) -> None:
        """Count how many of the last proposals were right."""
        agree = len(list(takewhile(bool, map(eq, new_ids, self._last))))
        self._right = min(FORGETTING * self._right + agree + 0.01, 2 * MOST)
        wrong = agree < min(len(new_ids), len(self._last))
        self._wrong, self._last = FORGETTING * self._wrong + wrong + 0.01, []

    def _append(self, ids: list[int]) -> None:
        for token_id in ids:
            for size in SIZES:
                if size <= self._since_image:
                    self._after[tuple(self._ids[-size:])] = len(self._ids)
            self._ids.append(token_id)
            self._since_image = 0 if token_id == self._image_token_id else self._since_image + 1


def looks_up(options: GenerationOptions, step: Step) -> bool:
    """Whether tokens of an answer with these options are looked up: "auto" where answers stay the same to the
    bit."""
    return options.lookup == "on" or (options.lookup == "auto" and step.same_bits)


def proposer_of(row: Row, step: Step, image_token_id: int | None) -> PromptLookup | None:
    """What looks up a row's tokens, as its options say."""
    if not looks_up(row.options, step):
        return None
    return PromptLookup(row.prompt_ids, image_token_id, row.options.lookup == "on")


def propose(rows: Sequence[Row], most: int, pass_steps: float = 1.0) -> list[list[int]]:
    """Ids that may follow in each row, at most so many, none for most rows: what its constraint forces, which
    is always right, and else what its proposer says. Where nothing proposes, nor is forced what saves a row
    the `pass_steps` that a pass over several positions takes as long as, there are none: []."""
    proposals = []
    for row in rows:
        ids = [] if row.proposer is None else row.proposer.propose(row.tokens, len(rows) == 1)
        forced = [] if row.constraint is None else row.constraint.forced()
        if ids[: len(forced)] != forced:
            ids = forced
        # The last token is never fed back, so that of n to come at most n - 1 are worth a proposal.
        proposals.append(ids[: min(most, row.options.max_new_tokens - len(row.tokens) - 1)])
    pays = sum(map(len, proposals)) >= (pass_steps - 1) * len(rows) or any(row.proposer for row in rows)
    return proposals if pays else []


def verify(
    rows: Sequence[Row],
    proposals: Sequence[Sequence[int]],
    logits: Sequence[Tensor],
    choose: Callable[[Sequence[Row], Tensor], Chosen],
) -> int:
    """Choose tokens from the logits (1 + n, V) that follow each row's last token and n proposals, as far as
    these are what is chosen. Returns how many proposals were, and so saved a pass."""
    agreeing, place, accepted = list(range(len(rows))), 0, 0
    while agreeing:
        columns = torch.stack([logits[number][place] for number in agreeing])
        choose([rows[number] for number in agreeing], columns).read()
        accepted += len(agreeing) if place else 0
        agreeing = [
            number
            for number in agreeing
            if not rows[number].stop_reason
            and [rows[number].tokens[-1]] == list(proposals[number][place : place + 1])
        ]
        place += 1
    return accepted
