"""Logits to tokens: the only place where one becomes the other.

    rows = [Row(options, prompt_ids) for prompt_ids in prompts]
    chosen = choose(rows, logits)                      # (k, V) -> chosen.token (k, 1), on the logits' device
    chosen.read()                                      # waits for it, and notes it in the rows
    rows[0].tokens, rows[0].stop_reason

`choose` is three steps: constraints mask the logits, a token is drawn from what is left, and what was asked
about its probability is reported. It reads nothing back from the device, so that the next step may run before
its tokens are read. For rows that differ in nothing but numbers a CUDA graph can record it (`recordable`).

A row's random numbers are a hash of its seed and of how many it has drawn: the same on every device, alone or
in any batch, without a generator's state, and all rows in one call. So row and seed decide an answer, not the
batch that it is made in. What temperature, filters and penalties do to logits is in `generation/options.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from generation.confidence import Report, Reports, TokenLogprobs, alike, chosen_logprobs, token_logprobs
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
    """One answer while it is decoded: what its tokens are chosen by, and those that were.

    prompt_ids: (T,) without padding: what penalties and proposals look at.
    options: of one answer, with stop ids that are known: `params` of the sampler, and when the answer ends.
    seed: of its random numbers; drawn with the first of them, unless it is given.
    constraint: what may come next (`generation.protocol.Constraint`); None allows every token.
    proposer: what proposes its next tokens (`generation.speculation`), if anything does.
    tokens: those that were read, with the stop token; `launched` counts those that were chosen, which on a
        GPU may be one more.
    stop_reason: "" while it goes on; then "stop" (a stop token), "length" or "error", which is `error`.
    report: what is said of its tokens' probabilities.
    """

    options: GenerationOptions
    prompt_ids: Tensor
    seed: int | None = None
    constraint: Constraint | None = None
    proposer: Proposer | None = None
    tokens: list[int] = field(default_factory=list)
    stop_reason: str = ""
    report: Report = field(default_factory=Report)

    def __post_init__(self):
        self.params, self.stop_ids = self.options.choice, self.options.stop_token_ids or ()
        self.launched = 0
        self.error: Exception | None = None
        self._seen: Tensor | None = None
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
            return self.report.confidence
        return self.decision.probabilities[self.decision.chosen]

    def first_seed(self) -> int:
        """The seed that `model.generate` would draw with."""
        if self.seed is None:
            (self.seed,) = make_seeds(self.options.seed, 1, 1)
        return self.seed

    def seen(self, logits: Tensor) -> Tensor:
        """(V,) int32: how often the answer has each token, as `adjusted_scores` takes it."""
        if self._seen is None:
            # One more: an image's placeholder may follow the vocabulary.
            seen = torch.zeros(logits.shape[1] + 1, dtype=torch.int32, device=logits.device)
            seen[to_device(self.prompt_ids, logits.device)] = -1
            self._seen = seen[:-1]
        return self._seen

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
        self.report.add(None if thinks else chosen, report, stops)
        self.tokens.append(token_id)
        full = len(self.tokens) >= self.options.max_new_tokens
        if stops or full or (constraint is not None and constraint.full):
            self.stop_reason = "stop" if stops else "length"


def new_rows(prompt_ids: Sequence[Tensor], options: GenerationOptions) -> list[Row]:
    """A row for each answer to each prompt (T,), the answers to one prompt side by side."""
    answers = options.num_return_sequences
    seeds: list[int] | list[None] = [None] * (len(prompt_ids) * answers)
    if not options.greedy:
        seeds = make_seeds(options.seed, len(prompt_ids), answers)
    each = [ids for ids in prompt_ids for _ in range(answers)]
    return [Row(options, ids, seed) for ids, seed in zip(each, seeds, strict=True)]


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
    held = [
        (number, row.constraint)
        for number, row in enumerate(rows)
        if row.constraint is not None and not row.stop_reason
    ]
    for number, constraint in held:
        constraint.close(logits[number])
    reports = Reports(rows, logits)  # of the model's own probabilities, which masks change
    if held:
        mask(rows, logits, held)
    token = draw(rows, logits)
    confident = any(row.options.confidence for row in rows)
    chosen = chosen_logprobs(logits, token) if confident else None
    return Chosen(
        rows, token, token[:, 0], logits.amax(-1), chosen, reports.of(logits, token), reports.forced
    )


def mask(rows: Sequence[Row], logits: Tensor, held: Sequence[tuple[int, Constraint]]) -> None:
    """Set logits (k, V) to -inf where a row's constraint, with its number in `held`, allows no token, and all
    of a row to NaN, which is its error, where none is allowed."""
    best = logits.argmax(-1).tolist()
    for number, constraint in held:
        row = rows[number]
        # Confidences are among what is allowed. Else a mask that allows the likeliest changes nothing.
        argmax_only = row.params.likeliest and not row.options.confidence
        try:
            if not argmax_only or not constraint.allows(best[number]):
                constraint.mask(logits[number])
        except ConstraintError as error:  # of this row alone
            row.error = error
            logits[number] = math.nan


def draw(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """One token for each row, which may want different things: (k, V) -> (k, 1)."""
    if all(row.params == rows[0].params for row in rows):  # no copy of the logits
        return _draw_alike(rows, logits)
    token = torch.empty(len(rows), 1, dtype=torch.int64, device=logits.device)
    for members in alike(range(len(rows)), lambda number: rows[number].params).values():
        index = to_device(torch.tensor(members), logits.device)
        token[index] = _draw_alike([rows[member] for member in members], logits[index])
    return token


def _draw_alike(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """Rows with equal parameters."""
    params, uniform, seen = rows[0].params, None, None
    if not params.greedy:
        numbers = torch.tensor([[row.first_seed() for row in rows], [row.launched for row in rows]])
        uniform = uniforms(*to_device(numbers, logits.device))
    if params.penalizes:
        seen = torch.stack([row.seen(logits) for row in rows])  # (k, V)
    token = sample(logits, params, uniform, seen)
    if params.penalizes:
        for row, ids in zip(rows, token, strict=True):
            own = row.seen(logits)
            own[ids] = own[ids].clamp(min=0) + 1
    return token


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


def keep(scores: Tensor, ids: Sequence[int]) -> None:
    """Set scores (V,) of all other tokens to -inf, in place."""
    index = list(ids)
    kept = scores[index]
    scores.fill_(-math.inf)
    scores[index] = kept
