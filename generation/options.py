"""What a caller may ask of `generate`, validated. Nothing here needs torch: a mistake is told at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen.

    temperature: 0 is greedy, the exact argmax; the filters then have nothing to choose among.
    top_k: keep the k likeliest (ties with the k-th stay); 0 is off.
    top_p: keep the likeliest tokens up to and including the one that reaches this mass; 1 is off.
    min_p: keep tokens at least this fraction as likely as the likeliest; 0 is off.
    repetition_penalty: divides positive and multiplies negative logits of tokens already seen; 1 is off.
    seed: answer j of every prompt draws with seed + j, so that a row gets in a batch what it gets alone;
        None takes seeds from torch's global generator.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self):
        check_number("temperature", self.temperature, lambda value: value >= 0, "0 or more")
        check_integer("top_k", self.top_k, low=0)
        check_number("top_p", self.top_p, lambda value: 0 < value <= 1, "over 0 and at most 1")
        check_number("min_p", self.min_p, lambda value: 0 <= value <= 1, "from 0 to 1")
        check_number("repetition_penalty", self.repetition_penalty, lambda value: value > 0, "over 0")
        if self.seed is not None:
            check_integer("seed", self.seed, low=0, high=MAX_SEED)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class GenerationOptions(SamplingParams):
    """Everything a caller may ask of `generate` besides the inputs, validated.

    max_new_tokens: at most so many; prompt and answer must fit the model's context.
    stop_token_ids: a row ends with any of these; None means the checkpoint's, () none.
    num_return_sequences: answers to each prompt, from one prefill.
    use_cache: False recomputes everything for every token: the slow reference.
    decode_step: replaces the eager step (see `generation.decoding`).
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None
    num_return_sequences: int = 1
    use_cache: bool = True
    decode_step: Callable | None = None

    def __post_init__(self):
        super().__post_init__()
        check_integer("max_new_tokens", self.max_new_tokens, low=1)
        check_integer("num_return_sequences", self.num_return_sequences, low=1)
        if self.decode_step is not None and not self.use_cache:
            raise ValueError("decode_step replaces the cached step: it cannot go with use_cache=False")
        if self.stop_token_ids is not None:
            ids = self.stop_token_ids
            ids = tuple(ids) if isinstance(ids, Iterable) else (ids,)
            for token_id in ids:
                check_integer("stop_token_ids", token_id, low=0)
            object.__setattr__(self, "stop_token_ids", ids)


def check_number(name: str, value, good: Callable[[float], bool], wanted: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not good(value):
        raise ValueError(f"{name}: expected a number {wanted}, got {value!r}")


def check_integer(name: str, value, low: int, high: int | None = None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an integer {bound}, got {value!r}")
