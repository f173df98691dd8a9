"""Tokens that are proposed and verified together: prompt lookup, what a constraint forces.

    speculation = Speculation(step, model)
    speculation.begin(row)                             # its proposer, as its options say
    ...                                                # in place of a step, where there are proposals:
    if any(proposals := speculation.propose(rows)):
        logits = step.ragged(ids, kv_cache, starts)    # of each row's last token and its proposals
        speculation.verify(rows, proposals, logits)    # the rows have one token more each, or several

A step reads all weights for one token of each row; a pass over several positions of them reads them once for
all. At each position a token is chosen from that position's logits, with the random numbers, penalties and
stop ids that it would have had without proposals. Proposals that equal the choices cost no pass of their own;
the first choice that differs is the next token, and what lies in the cache after it is free again. So
proposals change when tokens come and never which, as long as a pass over several positions gives the bits of
single steps. Steps say so themselves (`Step.same_bits`): where a product of several positions is rounded
otherwise, a tie within that rounding may be decided otherwise too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from generation.kv_cache import STATE_WINDOW, has_states
from generation.options import GenerationOptions
from generation.protocol import Constraint, Proposer, VisionLanguage
from generation.sampling import Chosen, Row, choose
from generation.steps import Step

MOST = 8  # ids looked up at a time
SIZES = (3, 2)  # of the n-grams that are looked up, the longest first


class ForcedTokens(Proposer):
    """Proposes what a constraint forces, which is always right, and else what `after` proposes."""

    def __init__(self, constraint: Constraint, after: Proposer | None):
        self._constraint, self._after, self._forced = constraint, after, False

    def propose(self, new_ids: list[int]) -> list[int]:
        ids = [] if self._after is None else self._after.propose(new_ids)
        forced = self._constraint.forced()
        self._forced = bool(forced) and ids[: len(forced)] != forced
        return forced if self._forced else ids

    def observe(self, proposed: int) -> None:
        if self._after is not None:
            self._after.observe(0 if self._forced else proposed)


class _PromptLookup(Proposer):
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

    def propose(self, new_ids: list[int]) -> list[int]:
        if not self._ids:  # not earlier: the first token does not wait for it
            self._append(self._prompt_ids.tolist())
        self._append(new_ids)
        for size in SIZES:
            start = self._after.get(tuple(self._ids[-size:]))
            if start is not None:
                break
        else:
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


class _PassCosts:
    """What passes have taken, by how many rows they had and how many positions of these together.

    rows: of the next pass.
    """

    ASSUMED = 0.2  # what a position more costs, in steps, before any pass with one was seen

    def __init__(self) -> None:
        self.rows = 1
        self._recent: dict[tuple[int, int], deque[float]] = {}  # seconds of the last such passes
        self._seconds: dict[int, dict[int, float]] = {}  # of so many rows: the medians, by positions

    def observe(self, positions: int, seconds: float) -> None:
        recent = self._recent.setdefault((self.rows, positions), deque(maxlen=5))
        recent.append(seconds)
        self._seconds.setdefault(self.rows, {})[positions] = sorted(recent)[len(recent) // 2]

    @property
    def known(self) -> bool:
        """Whether it has seen what a step of these rows takes."""
        return self.rows in self._seconds.get(self.rows, ())

    def cost(self, proposed: int) -> float:
        """What a pass costs a row that proposes so many ids, in its steps: more where others wait for them as
        well. What was never seen lies on the line through the nearest that was."""
        rows, seconds = self.rows, self._seconds.get(self.rows, {})
        wanted = rows + proposed
        seen = min(seconds, key=lambda other: (other == rows, abs(other - wanted)), default=rows)
        each = self.ASSUMED
        if seen > rows and self.known:
            each = (seconds[seen] / seconds[rows] - 1) / (seen - rows)
        return 1 + rows * max(each, 0.0) * proposed


class _WhilePaying(Proposer):
    """Another's proposals, as many at a time as bring the most tokens a second, by what passes have taken and
    how many proposals were right so far.

    All times are in single steps. What was lost by wrong proposals stays below `LOSS` of the answer, with
    `HEAD_START` tokens for its beginning; what was gained may be risked again, up to `STAKE`.
    """

    LOSS, HEAD_START, STAKE = 0.01, 16, 2.0
    FORGETTING = 0.9  # weight of what a pass showed after each one that follows

    def __init__(self, proposer: Proposer, costs: _PassCosts):
        self._proposer, self._costs = proposer, costs
        self._proposed = 0  # ids in the last pass
        self._unseen: list[int] = []  # new ids that the other was not told yet
        self._tokens, self._gained = 0, 0.0
        self._right = self._wrong = 1.0

    def observe(self, proposed: int) -> None:
        self._proposed = proposed

    def propose(self, new_ids: list[int]) -> list[int]:
        self._tokens += len(new_ids)
        if self._proposed:
            self._settle(len(new_ids) - 1)
        self._unseen += new_ids
        if not self._costs.known or (self._costs.rows > 1 and self._costs.cost(1) >= 2):
            return []  # even right ones would not pay
        ids, self._unseen = self._proposer.propose(self._unseen), []
        if not ids:
            return []
        allowed = self._gained + self.LOSS * (self._tokens + self.HEAD_START)
        share = self._right / (self._right + self._wrong)
        best, best_rate, expected = 0, 0.0, 1.0
        for count in range(1, len(ids) + 1):
            expected += share**count
            cost = self._costs.cost(count)
            if cost - 1 > allowed:
                break
            if expected / cost > best_rate:
                best, best_rate = count, expected / cost
        # Where none would pay, one proposal finds out whether that has changed.
        return ids[: best if best_rate > 1 else min(best, 1)]

    def _settle(self, accepted: int) -> None:
        """Account for the last pass."""
        gained = self._gained + 1 + accepted - self._costs.cost(self._proposed)
        self._gained = min(gained, self.STAKE)
        self._right = self._right * self.FORGETTING + accepted
        self._wrong = self._wrong * self.FORGETTING + (accepted < self._proposed)


def looks_up(options: GenerationOptions, step: Step) -> bool:
    """Whether tokens of an answer with these options are looked up: "auto" where answers stay the same to the
    bit."""
    return options.lookup == "on" or (options.lookup == "auto" and step.same_bits)


class Speculation:
    """The proposals of rows that one step decodes together.

    proposed: ids that were verified; accepted: those among them that answers hold and that saved a pass.
    """

    def __init__(self, step: Step, model: VisionLanguage):
        self.costs, self.proposed, self.accepted = _PassCosts(), 0, 0
        self._step, self._image_token_id = step, model.config.image_token_id
        # A state takes back no more.
        self._most = STATE_WINDOW // 2 if has_states(model.language_model.cache_layout) else None

    def begin(self, row: Row) -> None:
        """Give a row its proposer: of what its constraint forces, and of what is looked up."""
        options, step = row.options, self._step
        if not step.chunks:
            return
        proposer: Proposer | None = None
        if looks_up(options, step):
            proposer = _PromptLookup(row.prompt_ids, self._image_token_id)
            proposer = proposer if options.lookup == "on" else _WhilePaying(proposer, self.costs)
        if row.constraint is not None:
            proposer = ForcedTokens(row.constraint, proposer)
        row.proposer = proposer

    def propose(self, rows: Sequence[Row]) -> list[list[int]]:
        """Ids that may follow in each row, none for most."""
        self.costs.rows = len(rows)
        return [self._ids_for(row)[: self._most] for row in rows]

    def _ids_for(self, row: Row) -> list[int]:
        if (proposer := row.proposer) is None:
            return []
        # The last token is never fed back, so that of n to come at most n - 1 are worth a proposal.
        worth = row.options.max_new_tokens - len(row.tokens) - 1
        new_ids, proposer.given = row.tokens[proposer.given :], len(row.tokens)
        return proposer.propose(new_ids)[:worth]

    def observe(self, rows: Sequence[Row], proposals: Sequence[Sequence[int]], seconds: float) -> None:
        """The pass over these, and each row's last token, took so long."""
        count = sum(map(len, proposals))
        self.proposed += count
        self.costs.observe(len(rows) + count, seconds)
        for row, ids in zip(rows, proposals, strict=True):
            if row.proposer is not None:
                row.proposer.observe(len(ids))

    def verify(
        self,
        rows: Sequence[Row],
        proposals: Sequence[Sequence[int]],
        logits: Sequence[Tensor],
        choose: Callable[[Sequence[Row], Tensor], Chosen] = choose,
    ) -> None:
        """Choose tokens from the logits (1 + n, V) that follow each row's last token and n proposals, as far
        as these are what is chosen. choose: in place of `sampling.choose`."""
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
