"""Logits to tokens: the only place where one becomes the other.

    rows = [Row(options, prompt_ids) for prompt_ids in prompts]
    chosen = choose(rows, logits)                      # (k, V) -> chosen.token (k, 1), on the logits' device
    chosen.read()                                      # waits for it, and notes it in the rows
    rows[0].tokens, rows[0].stop_reason

`choose` reads nothing back from the device, so that the next step may run before its tokens are read. For
rows that differ in nothing but numbers a CUDA graph can record it (`recordable`).

A row's random numbers are a hash of its seed and of how many it has drawn: the same on every device, alone or
in any batch, without a generator's state, and all rows in one call. What filters do is in
`generation/options.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from generation.confidence import TokenLogprobs, chosen_logprobs, confidence_of, likeliest, token_logprobs
from generation.kv_cache import to_device
from generation.options import (
    MAX_SEED,
    ConstraintError,
    GenerationOptions,
    NotFiniteError,
    SamplingParams,
    adjusted_scores,
    running_sum,
)
from generation.protocol import Constraint, Proposer

BAD = -1  # in place of a token id, where logits are not finite
# 2**64 over the golden ratio, and two odd factors, as in SplitMix64 (Steele, Lea and Flood, 2014); here
# as signed numbers.
_GOLDEN = -7046029254386353131
_FACTORS = -4658895280553007687, -7723592293110705685


def make_seeds(seed: int | None, prompts: int, answers: int) -> list[int]:
    """The seed of each of prompts · answers rows, the answers to a prompt side by side."""
    if seed is None:
        return torch.randint(MAX_SEED, (prompts * answers,)).tolist()
    return [(seed + answer) % MAX_SEED for answer in range(answers)] * prompts


def uniforms(seeds: Tensor, drawn: Tensor) -> Tensor:
    """The next random number of rows with `seeds` (B,), of which each has drawn `drawn`, () or (B,).

    (B,) float32 in [0, 1), of 24 bits.
    """
    bits = _hash(_hash(seeds) + (drawn + 1) * _GOLDEN)
    return _shift(bits, 40).float() * 2.0**-24


def _shift(x: Tensor, by: int) -> Tensor:
    """A shift to the right that brings in zeros; that of signed numbers repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _hash(x: Tensor) -> Tensor:
    """Every bit of int64 `x` moves about half of the result's; products wrap around."""
    x = (x ^ _shift(x, 30)) * _FACTORS[0]
    x = (x ^ _shift(x, 27)) * _FACTORS[1]
    return x ^ _shift(x, 31)


def sample(
    logits: Tensor, params: SamplingParams, uniform: Tensor | None = None, seen: Tensor | None = None
) -> Tensor:
    """Logits (B, V) to token ids (B, 1), without reading anything back from the device.

    Args:
        logits: must be finite; `choose` checks that.
        uniform: (B,) random numbers from `uniforms`; not needed when greedy.
        seen: see `adjusted_scores`; needed for penalties.
    """
    scores = adjusted_scores(logits, params, seen)
    if params.greedy:
        return scores.argmax(dim=-1, keepdim=True)
    if uniform is None or uniform.shape != scores.shape[:1]:
        raise ValueError(f"sampling with a temperature needs a random number for each of {len(scores)} rows")
    # The first token at which the summed probability exceeds the random share of the total. Unlike
    # torch.multinomial this does not ask the device whether the sum is positive. Sums at tokens that were
    # filtered out are zeroed, because rounding may let a sum rise where nothing was added.
    summed = running_sum(scores.softmax(-1)).masked_fill(scores == -math.inf, 0)
    wanted = uniform[:, None] * summed.amax(-1, keepdim=True)
    # argmax returns the first of equal maxima, and takes no bool.
    return (summed > wanted).to(torch.uint8).argmax(-1, keepdim=True)


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


@dataclass(eq=False)
class Row:
    """An answer while it is decoded: what its tokens are chosen by, and those that were.

    options: of one answer, with stop ids that are known.
    prompt_ids: (T,) without padding: what penalties know.
    seed: set with the first random number, unless it is given.
    tokens: those that were read, with the stop token; `launched` is how many were chosen.
    stop_reason: "stop" or "length" at the end, or "error": then `error` says which.
    seen: (V,) int32, the tokens so far, for penalties: as `adjusted_scores` takes them.
    sums: of `chosen_logprobs`, over the tokens that count for its confidence; reports: of each token, where
        the options ask for log-probabilities.
    proposer: what proposes its next tokens (see `generation.speculation`), if anything does.
    """

    options: GenerationOptions
    prompt_ids: Tensor
    seed: int | None = None
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)
    launched: int = 0
    stop_reason: str = ""
    error: Exception | None = None
    seen: Tensor | None = None
    sums: tuple[float, float] = (0.0, 0.0)
    reports: list[TokenLogprobs] = field(default_factory=list)
    proposer: Proposer | None = None
    _proposed_for: int = 0  # tokens that the proposer was told

    def __post_init__(self):
        self.params, self.stop_ids = self.options.choice, self.options.stop_token_ids or ()
        if self.options.constraint is not None:
            self.constraint = self.options.constraint()

    @property
    def plain(self) -> bool:
        """Whether `recordable` does all that it asks for."""
        return self.constraint is None and self.options.logprobs is None and not self.params.penalizes

    @property
    def decision(self) -> Decision | None:
        """Which of several whole answers was chosen; see `generation.score`."""
        choice = None if self.constraint is None else self.constraint.choice
        return None if choice is None else choice.decision

    @property
    def confidence(self) -> float:
        """See `generation.confidence`; of one of several answers, its probability among them."""
        if self.decision is None:
            return confidence_of(*self.sums)
        return self.decision.probabilities[self.decision.chosen]

    def first_seed(self) -> int:
        """The seed that `model.generate` would draw with."""
        if self.seed is None:
            (self.seed,) = make_seeds(self.options.seed, 1, 1)
        return self.seed

    def propose(self) -> list[int]:
        """Ids that may follow what was read; all of what was launched must have been."""
        if self.proposer is None:
            return []
        # The last token is never fed back, so that of n to come at most n - 1 are worth a proposal.
        worth = self.options.max_new_tokens - len(self.tokens) - 1
        new_ids, self._proposed_for = self.tokens[self._proposed_for :], len(self.tokens)
        return self.proposer.propose(new_ids)[:worth]

    def take(self, token_id: int, chosen: Sequence[float] | None, report: TokenLogprobs | None) -> None:
        """Note the next token, or `BAD`, with its `chosen_logprobs` and its report."""
        if token_id == BAD:
            self.error, self.stop_reason = self.error or NotFiniteError(len(self.tokens) + 1), "error"
            return
        stops = token_id in self.stop_ids
        constraint = self.constraint
        if constraint is not None:
            constraint.accept(token_id)
        thinks = constraint is not None and constraint.thinking
        if chosen is not None and not thinks and not (stops and self.sums[1]):
            self.sums = self.sums[0] + chosen[0], self.sums[1] + chosen[1]
        if report is not None:
            self.reports.append(report)
        self.tokens.append(token_id)
        full = len(self.tokens) >= self.options.max_new_tokens
        if stops or full or (constraint is not None and constraint.full):
            self.stop_reason = "stop" if stops else "length"


@dataclass(eq=False)
class Chosen:
    """Tokens (k, 1) of k rows, on the device, and what is read of them: `ids` (k,), and the largest logits
    (k,), or None where ids are `BAD` if these are not finite; `chosen_logprobs` (2, k) where a row asks for
    its confidence; `likeliest` of the rows that report it, and the numbers of those whose token was forced.
    """

    rows: Sequence[Row]
    token: Tensor
    ids: Tensor
    largest: Tensor | None = None
    chosen: Tensor | None = None
    reports: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    copied: torch.cuda.Event | None = None

    def __post_init__(self):
        for row in self.rows:
            row.launched += 1

    def send(self) -> Chosen:
        """Begin to copy to the host what `read` waits for; on a CPU it is there."""
        if (device := self.ids.device).type == "cuda":
            self.ids = _sent(self.ids)
            self.largest = None if self.largest is None else _sent(self.largest)
            self.chosen = None if self.chosen is None else _sent(self.chosen)
            self.reports = [(numbers, _sent(values), _sent(top)) for numbers, values, top in self.reports]
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(device))
        return self

    def read(self) -> list[int]:
        """Wait for the tokens, of all rows, and note them in those that have not ended."""
        if self.copied is not None:
            self.copied.synchronize()
        ids: list[int] = self.ids.tolist()
        if self.largest is not None:
            # The maximum is NaN or +inf if any logit is; -inf alone is a banned token.
            ids = [one if math.isfinite(top) else BAD for one, top in zip(ids, self.largest.tolist())]
        chosen = None if self.chosen is None else self.chosen.T.tolist()
        reports = {number: TokenLogprobs(None, []) for number in self.forced}
        for numbers, *likely in self.reports:
            reports |= zip(numbers, map(token_logprobs, *(one.tolist() for one in likely)))
        for number, row in enumerate(self.rows):
            if not row.stop_reason:
                row.take(ids[number], None if chosen is None else chosen[number], reports.get(number))
        return ids


def _sent(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def choose(rows: Sequence[Row], logits: Tensor) -> Chosen:
    """The next token of each row, from logits (k, V), which constraints change in place."""
    constrained = [
        (n, row, row.constraint)
        for n, row in enumerate(rows)
        if row.constraint is not None and not row.stop_reason
    ]
    for number, _, constraint in constrained:
        constraint.close(logits[number])
    asked = [n for n, row in enumerate(rows) if row.options.logprobs is not None and not row.stop_reason]
    forced = [n for n, row, held in constrained if n in asked and row.tokens and held.forced()]
    asked = [number for number in asked if number not in forced]
    own = [number for number in asked if rows[number].options.logprobs_mode == "model"]
    logprobs = _rows_of(logits, own).float().log_softmax(-1) if own else logits  # masks change logits
    if constrained:
        best = logits.argmax(-1).tolist()
    for number, row, constraint in constrained:
        try:
            # Confidences are among what is allowed. Else a mask that allows the likeliest changes nothing.
            argmax_only = row.params.likeliest and not row.options.confidence
            if not argmax_only or not constraint.allows(best[number]):
                constraint.mask(logits[number])
        except ConstraintError as error:  # of this row alone
            row.error = error
            logits[number] = math.nan
    token = draw_each(rows, logits)
    reports = []
    for count, members in _alike(own, lambda number: rows[number].options.logprobs).items():
        places = [own.index(number) for number in members]
        found = likeliest(_rows_of(logprobs, places), _rows_of(token, members), count or 0)
        reports.append((members, *found))
    sampled = [number for number in asked if rows[number].options.logprobs_mode == "sampler"]
    kinds = _alike(sampled, lambda number: (rows[number].params, rows[number].options.logprobs))
    for (params, count), members in kinds.items():
        logprobs = adjusted_scores(_rows_of(logits, members), params).log_softmax(-1)
        reports.append((members, *likeliest(logprobs, _rows_of(token, members), count or 0)))
    confident = any(row.options.confidence for row in rows)
    chosen = chosen_logprobs(logits, token) if confident else None
    return Chosen(rows, token, token[:, 0], logits.amax(-1), chosen, reports, forced)


def recordable(
    tokens: Tensor, counters: Tensor, params: SamplingParams, logprobs: Tensor | None
) -> Callable[[Tensor], None]:
    """`choose` for `plain` rows of equal `params`, as operations on the device alone, which a CUDA graph may
    record: logits (k, V) become the next tokens (k, 1), in place.

    counters: (5, k) int64 of each row: its position, seed, how many numbers it has drawn, the offset of its
        rotary places, and what is read.
    logprobs: (2, k), the tokens' `chosen_logprobs`, or None.
    """
    _, seeds, drawn, _, ids = counters

    def choose_in_place(logits: Tensor) -> None:
        token = sample(logits, params, None if params.greedy else uniforms(seeds, drawn))
        tokens.copy_(token)
        if logprobs is not None:
            logprobs.copy_(chosen_logprobs(logits, token))
        ids.copy_(token[:, 0].masked_fill(~logits.amax(-1).isfinite(), BAD))
        counters[0:3:2] += 1

    return choose_in_place


def draw_each(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """One token for each row, which may want different things: (k, V) -> (k, 1)."""
    if all(row.params == rows[0].params for row in rows):  # no copy of the logits
        return _draw_alike(rows, logits)
    token = torch.empty(len(rows), 1, dtype=torch.int64, device=logits.device)
    for members in _alike(range(len(rows)), lambda number: rows[number].params).values():
        index = to_device(torch.tensor(members), logits.device)
        token[index] = _draw_alike([rows[member] for member in members], logits[index])
    return token


def keep(scores: Tensor, ids: Sequence[int]) -> None:
    """Set all others of scores (V,) to -inf."""
    index = list(ids)
    kept = scores[index]
    scores.fill_(-math.inf)
    scores[index] = kept


def _alike(numbers: Iterable[int], kind: Callable[[int], Any]) -> dict[Any, list[int]]:
    """Numbers of rows by what they have in common."""
    alike: dict[Any, list[int]] = {}
    for number in numbers:
        alike.setdefault(kind(number), []).append(number)
    return alike


def _rows_of(x: Tensor, numbers: list[int]) -> Tensor:
    """These rows of x, without a copy where they are all."""
    return x if numbers == list(range(len(x))) else x[to_device(torch.tensor(numbers), x.device)]


def _draw_alike(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """Rows with equal parameters."""
    params, uniform, seen = rows[0].params, None, None
    if not params.greedy:
        numbers = torch.tensor([[row.first_seed() for row in rows], [row.launched for row in rows]])
        uniform = uniforms(*to_device(numbers, logits.device))
    if params.penalizes:
        for row in rows:
            if row.seen is None:
                # One more: an image's placeholder may follow the vocabulary.
                seen_ids = torch.zeros(logits.shape[1] + 1, dtype=torch.int32, device=logits.device)
                seen_ids[to_device(row.prompt_ids, logits.device)] = -1
                row.seen = seen_ids[:-1]
        seen = torch.stack([row.seen for row in rows if row.seen is not None])  # (k, V)
    token = sample(logits, params, uniform, seen)
    if seen is not None:
        for row, ids in zip(rows, token, strict=True):
            if row.seen is not None:
                row.seen[ids] = row.seen[ids].clamp(min=0) + 1
    return token
