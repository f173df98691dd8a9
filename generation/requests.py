"""What a scheduler takes and gives: requests, the tokens of a step, outputs; and a request on its way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from generation.confidence import TokenLogprobs as TokenLogprobs
from generation.keyed_prompts import KeyedPrompt
from generation.options import MAX_SEED, GenerationOptions
from generation.protocol import Pixels
from generation.sampling import Row
from generation.score import Decision


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and the options for its answer.

    input_ids: (T,) int64, without padding.
    pixel_values: (n, 3, H, W), still as bytes or not, or (1, n, 3, H, W) as processors pad them, or None.
    pixel_attention_mask: (n, H, W) or (1, n, H, W), or None.
    options: of one answer; for several, make a request for each with a seed of its own (`each_answer`).
    key: comes back with the output.
    """

    input_ids: Tensor
    pixel_values: Pixels | None = None
    pixel_attention_mask: Tensor | None = None
    options: GenerationOptions = field(default_factory=GenerationOptions)
    key: Any = None


@dataclass(frozen=True, eq=False)
class LazyRequest:
    """A request that is prepared when a slot is free for it. `prepare` may raise ValueError or OSError."""

    key: Any
    prepare: Callable[[], Request]


class NewTokens(NamedTuple):
    """What a step adds to an answer, its stop token included: one token, or several that were proposed.
    `logprobs` has an entry for each if they were asked for, and is None if not. `reused_tokens` as in
    `RequestOutput`."""

    key: Any
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    reused_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """The answer to a request.

    token_ids: with the stop token; empty after an error.
    stop_reason: "stop", "length" or "error".
    prompt_tokens: positions of the prompt, images included; 0 after an error.
    reused_tokens: how many of them were copied from another prompt.
    confidence: see `generation.confidence`; None where the options did not ask for it.
    decision: see `generation.score`; None for an answer that is no choice.
    logprobs: of each token, where the options ask for them.
    error: what was wrong with this request, or None.
    """

    key: Any
    token_ids: list[int]
    stop_reason: str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    confidence: float | None = None
    decision: Decision | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None


def each_answer(options: GenerationOptions) -> list[GenerationOptions]:
    """Options of `num_return_sequences` requests that get what `model.generate` gives with these options."""
    count, seed = options.num_return_sequences, options.seed
    seeds = [None if seed is None else (seed + answer) % MAX_SEED for answer in range(count)]
    one = replace(options, num_return_sequences=1, decode_step=None, prefill_chunk=None)
    return [replace(one, seed=seed) for seed in seeds]


@dataclass(eq=False, kw_only=True)
class SlotRow(Row):
    """A row on its way: entered, then placed in a slot and waiting, then decoding.

    reused: positions of its prompt that were copied from another.
    features: of its images' parts from `part` on, as far as they are encoded; (positions, D) each.
    embeds: (1, n, D) of positions that wait to be computed, from `start` on; at `stops` that pauses.
    told: tokens that were reported.
    """

    key: Any
    prompt: KeyedPrompt
    slot: int = -1
    reused: int = 0
    part: int = 0
    features: list[Tensor] = field(default_factory=list)
    embeds: Tensor | None = None
    start: int = 0
    stops: list[int] = field(default_factory=list)
    told: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.length = len(self.prompt)  # positions

    @property
    def position(self) -> int:
        """Where the last chosen token goes."""
        return self.length + self.launched - 1

    @property
    def room(self) -> int:
        """Positions that it needs in its slot."""
        return self.length + self.options.max_new_tokens - 1

    @property
    def decodes(self) -> bool:
        """Whether the next step chooses a token for it."""
        return 0 < self.launched < self.options.max_new_tokens and not self.stop_reason

    @property
    def ahead(self) -> list[int]:
        """The stops that it still comes to."""
        return [stop for stop in self.stops if stop > self.start]

    @property
    def upcoming(self) -> int:
        """Of the positions that wait, those that are computed next."""
        waiting = 0 if self.embeds is None else self.embeds.shape[1]
        return min([waiting, *(stop - self.start for stop in self.ahead)])


@dataclass
class Stats:
    """What a scheduler has done so far. Of the tokens that were `proposed`, and so verified, answers hold
    those that were `accepted`, each of which saved a pass.

    `seconds` are those of "prepare", "vision", "prefill" and "decode". On a GPU they count work where a
    result is read, images as part of the prefill: the device is not waited for to take the time.
    """

    cancelled: int = 0
    new_tokens: int = 0
    prefilled: int = 0
    reused: int = 0
    tiles_encoded: int = 0
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
