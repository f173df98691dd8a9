"""Tokens that are proposed and verified together: prompt lookup, and what a constraint forces.

    speculation = Speculation(step, model)
    speculation.begin(row)                             # its proposer, as its options say
    ...                                                # in place of a step, where there are proposals:
    if any(proposals := speculation.propose(rows, most=8)):
        logits = step.ragged(ids, kv_cache, starts)    # of each row's last token and its proposals
        speculation.verify(rows, proposals, logits, choose)    # the rows have one token more each, or several

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

from generation.kv_cache import STATE_WINDOW, has_states
from generation.options import GenerationOptions
from generation.protocol import Proposer, VisionLanguage
from generation.sampling import Chosen, Row
from generation.steps import Step

MOST = 8  # ids looked up at a time
SIZES = (3, 2)  # of the n-grams that are looked up, the longest first


class PromptLookup(Proposer):
    """Proposes what followed the last time that the answer's last tokens stood in the prompt or the answer.

    Args:
        prompt_ids: (T,) of the row.
        image_token_id: is neither looked up nor proposed; None where images have no ids.
    """

    def __init__(self, prompt_ids: Tensor, image_token_id: int | None):
        self._prompt_ids, self._image_token_id = prompt_ids, image_token_id
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the token after the latest n-gram stands
        self._since_image = 0  # tokens at the end without an image
        self.found = 0  # tokens that stood there before, of the last proposal

    def propose(self, new_ids: list[int]) -> list[int]:
        if not self._ids:  # not earlier: the first token does not wait for it
            self._append(self._prompt_ids.tolist())
        self._append(new_ids)
        places = {size: self._after.get(tuple(self._ids[-size:])) for size in SIZES}
        self.found = next((size for size in SIZES if places[size] is not None), 0)
        if (start := places.get(self.found)) is None:
            return []
        # What is copied may run into its own beginning: a short period goes on and on.
        ids = self._ids[start : start + MOST]
        while len(ids) < MOST:
            ids.append(ids[start + len(ids) - len(self._ids)])
        return ids[: ids.index(self._image_token_id)] if self._image_token_id in ids else ids

    def _append(self, ids: list[int]) -> None:
        for token_id in ids:
            for size in SIZES:
                if size <= self._since_image:
                    self._after[tuple(self._ids[-size:])] = len(self._ids)
            self._ids.append(token_id)
            self._since_image = 0 if token_id == self._image_token_id else self._since_image + 1


class LikelyLookup(PromptLookup):
    """`PromptLookup` for a row that is decoded alone, of as many ids as are likely to be right, by how often
    the row's proposals were: a wrong one costs 0.1 to 0.5 of a step, and beside other rows as much of each.
    One id at least where three tokens stood there before."""

    LIKELY = 0.4  # probability that a proposal has to have
    FORGETTING = 0.9  # weight of what a pass showed after each one that follows

    def __init__(self, prompt_ids: Tensor, image_token_id: int | None, speculation: Speculation):
        super().__init__(prompt_ids, image_token_id)
        self._speculation = speculation
        self._right = self._wrong = 1.0
        self._last: list[int] = []  # proposed for the pass before
        self._unseen: list[int] = []  # new ids that were not looked up yet

    def propose(self, new_ids: list[int]) -> list[int]:
        if self._last:
            agree = list(takewhile(bool, map(eq, new_ids, self._last)))
            self._right = min(self.FORGETTING * self._right + len(agree) + 0.01, 2 * MOST)
            wrong = len(agree) < min(len(new_ids), len(self._last))
            self._wrong = self.FORGETTING * self._wrong + wrong + 0.01
        self._unseen, self._last = self._unseen + new_ids, []
        if self._speculation.alone:
            ids, self._unseen = super().propose(self._unseen), []
            share = self._right / (self._right + self._wrong)
            self._last = ids[: max(int(math.log(self.LIKELY) / math.log(share)), self.found == SIZES[0])]
        return self._last


def looks_up(options: GenerationOptions, step: Step) -> bool:
    """Whether tokens of an answer with these options are looked up: "auto" where answers stay the same to the
    bit."""
    return options.lookup == "on" or (options.lookup == "auto" and step.same_bits)


class Speculation:
    """The proposals of rows that one step decodes together.

    proposed: ids that were verified; accepted: those among them that answers hold and that saved a pass.
    """

    def __init__(self, step: Step, model: VisionLanguage):
        self.proposed = self.accepted = 0
        self.alone = True  # whether the next pass is of one row
        self._step, self._image_token_id = step, model.config.image_token_id
        # A state takes back no more.
        self._most = STATE_WINDOW // 2 if has_states(model.language_model.cache_layout) else 2**31

    def begin(self, row: Row) -> None:
        """Give a row what looks its tokens up, as its options say."""
        options, inputs = row.options, (row.prompt_ids, self._image_token_id)
        if options.lookup == "on":
            row.proposer = PromptLookup(*inputs)
        elif looks_up(options, self._step):
            row.proposer = LikelyLookup(*inputs, self)

    def propose(self, rows: Sequence[Row], most: int) -> list[list[int]]:
        """Ids that may follow in each row, at most so many, none for most rows: what its constraint forces,
        which is always right, and else what is looked up."""
        self.alone = len(rows) == 1
        proposals = [self._ids_for(row)[: min(most, self._most)] for row in rows]
        self.proposed += sum(map(len, proposals))
        return proposals

    def _ids_for(self, row: Row) -> list[int]:
        ids, proposer = list[int](), row.proposer
        if proposer is not None:
            new_ids, proposer.given = row.tokens[proposer.given :], len(row.tokens)
            ids = proposer.propose(new_ids)
        forced = [] if row.constraint is None else row.constraint.forced()
        if ids[: len(forced)] != forced:
            ids = forced
        # The last token is never fed back, so that of n to come at most n - 1 are worth a proposal.
        return ids[: row.options.max_new_tokens - len(row.tokens) - 1]

    def verify(
        self,
        rows: Sequence[Row],
        proposals: Sequence[Sequence[int]],
        logits: Sequence[Tensor],
        choose: Callable[[Sequence[Row], Tensor], Chosen],
    ) -> None:
        """Choose tokens from the logits (1 + n, V) that follow each row's last token and n proposals, as far
        as these are what is chosen."""
        agreeing, place = list(range(len(rows))), 0
        while agreeing:
            columns = torch.stack([logits[number][place] for number in agreeing])
            choose([rows[number] for number in agreeing], columns).read()
            self.accepted += len(agreeing) if place else 0
            agreeing = [
                number
                for number in agreeing
                if not rows[number].stop_reason
                and [rows[number].tokens[-1]] == list(proposals[number][place : place + 1])
            ]
            place += 1
