"""Logits to tokens: the only place where one becomes the other.

    rows = [Row(options, prompt_ids) for prompt_ids in prompts]
    chosen = choose(rows, logits)                      # (k, V) -> chosen.token (k, 1), on the logits' device
    chosen.read()                                      # waits for it, and notes it in the rows
    rows[0].tokens, rows[0].stop_reason

`choose` is three steps: constraints mask the logits, a token is drawn from what is left (`draws.py`:
penalties, temperature, top-k, top-p and min-p, in this order, then one random number), and what was asked
about its probability is reported (`confidence.py`). `choose` reads nothing back from the device, so that the
next step may run before its tokens are read; `Chosen.read` does, and `Row.take` notes them and sees whether
the row has ended.

There is no generator whose state moves: a random number is a hash of the row's own seed and of how many it
has drawn. Answer j to a prompt has the seed `options.seed` + j, or without a seed one from torch's generator.
So a row's tokens do not depend on the others of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from generation.confidence import Noted, Notes, TokenLogprobs
from generation.draws import BAD, make_seeds, sample, uniforms
from generation.kv_cache import to_device
from generation.options import ConstraintError, GenerationOptions, NotFiniteError, SamplingParams
from generation.protocol import Constraint, Proposer


@dataclass(eq=False)
class Row:
    """One answer while it is decoded: what its tokens are chosen by, and those that were.

    prompt_ids: (T,) without padding: what penalties and proposals look at.
    options: of one answer, with stop ids that are known: `params` of the sampler, and when the answer ends.
    seed: of its random numbers; drawn with the first of them, unless it is given.
    constraint: what may come next (`generation.protocol.Constraint`); None allows every token.
    proposer: what proposes its next tokens (`generation.speculation`), if anything does.
    tokens: those that were read, with the stop token. `launched` counts those that were drawn, of which a GPU
        may be one ahead: the number of the row's next random number.
    stop_reason: "" while it goes on; then "stop" (a stop token), "length" or "error", which is `error`.
    logprobs: of each token, where the options ask for them, else None.
    """

    options: GenerationOptions
    prompt_ids: Tensor
    seed: int | None = None
    constraint: Constraint | None = None
    proposer: Proposer | None = None
    tokens: list[int] = field(default_factory=list)
    stop_reason: str = ""

    def __post_init__(self):
        self.params, self.stop_ids = self.options.choice, self.options.stop_token_ids or ()
        self.launched = 0
        self.error: Exception | None = None
        self._seen: Tensor | None = None
        if self.options.constraint is not None:
            self.constraint = self.options.constraint()
        self.logprobs: list[TokenLogprobs] | None = None if self.options.logprobs is None else []
        self.reports = self.options.confidence or self.options.logprobs is not None
        self.sums = 0.0, 0.0  # of `chosen_logprobs`, over the tokens that count for its confidence

    @property
    def plain(self) -> bool:
        """True without constraint, log-probabilities and penalties: what a recorded GPU step can do."""
        return self.constraint is None and self.options.logprobs is None and not self.params.penalizes

    @property
    def decision(self) -> Any:
        """Which of several whole answers was chosen: a `generation.score.Decision`, or None."""
        choice = None if self.constraint is None else self.constraint.choice
        return None if choice is None else choice.decision

    @property
    def confidence(self) -> float | None:
        """The geometric mean of the probabilities of the tokens that count (see `generation.confidence`); of
        one of several answers, its probability among them. None where the options do not ask for it."""
        if not self.options.confidence:
            return None
        if self.decision is None:
            return math.exp(min(0.0, self.sums[0] / max(1.0, self.sums[1])))
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

    def take(self, token_id: int, noted: Noted | None = None) -> None:
        """Note the next token, or `BAD`, and whether the answer ends with it."""
        if token_id == BAD:
            self.error, self.stop_reason = self.error or NotFiniteError(len(self.tokens) + 1), "error"
            return
        stops = token_id in self.stop_ids
        constraint = self.constraint
        if constraint is not None:
            constraint.accept(token_id)
        chosen, logprobs = noted or (None, None)
        thinks = constraint is not None and constraint.thinking
        if chosen is not None and not thinks and not (stops and self.sums[1]):
            self.sums = self.sums[0] + chosen[0], self.sums[1] + chosen[1]
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
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
    """Tokens (k, 1) of k rows, on the device, and what is read of them: `ids` (k,); the largest logits (k,),
    or None where ids are `BAD` if these are not finite; `notes` where a row asks for probabilities."""

    rows: Sequence[Row]
    token: Tensor
    ids: Tensor
    largest: Tensor | None = None
    notes: Notes | None = None
    copied: torch.cuda.Event | None = None

    def __post_init__(self):
        for row in self.rows:
            row.launched += 1

    def send(self) -> Chosen:
        """Begin to copy to the host what `read` waits for; on a CPU it is there."""
        if (device := self.ids.device).type == "cuda":
            self.ids = _sent(self.ids)
            self.largest = None if self.largest is None else _sent(self.largest)
            if self.notes is not None:
                self.notes.send(_sent)
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
        notes = [None] * len(ids) if self.notes is None else self.notes.read(len(ids))
        for row, token_id, noted in zip(self.rows, ids, notes):
            if not row.stop_reason:
                row.take(token_id, noted)
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
    reports, own = any(row.reports for row in rows), logits
    if held:
        own = logits.clone() if reports else logits  # of the model's own probabilities
        mask(rows, logits, held)
    token = draw(rows, logits)
    notes = Notes.of(rows, own, logits, token) if reports else None
    return Chosen(rows, token, token[:, 0], logits.amax(-1), notes)


def mask(rows: Sequence[Row], logits: Tensor, held: Sequence[tuple[int, Constraint]]) -> None:
    """Set logits (k, V) to -inf where a row's constraint, with its number in `held`, allows no token, and all
    of a row to NaN, which is its error, where none is allowed."""
    best = logits.argmax(-1).tolist()
    for number, constraint in held:
        row = rows[number]
        # An allowed likeliest token needs no mask, but for its confidence, which is among all allowed ones.
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
    alike: dict[SamplingParams, list[int]] = {}
    for number, row in enumerate(rows):
        alike.setdefault(row.params, []).append(number)
    for members in alike.values():
        index = to_device(torch.tensor(members), logits.device)
        token[index] = _draw_alike([rows[member] for member in members], logits[index])
    return token


def _draw_alike(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """Rows with equal parameters."""
    params, uniform, seen = rows[0].params, None, None
    if params.likeliest:
        return logits.argmax(-1, keepdim=True)
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


def keep(scores: Tensor, ids: Sequence[int]) -> None:
    """Set scores (V,) of all other tokens to -inf, in place."""
    index = list(ids)
    kept = scores[index]
    scores.fill_(-math.inf)
    scores[index] = kept
