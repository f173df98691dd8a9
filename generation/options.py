"""What a caller may ask of `generate`, and what it refuses or fails with. Nothing here needs torch.

options = GenerationOptions(max_new_tokens=64, temperature=0.7)
options = with_overrides(options, {"seed": 3}, config.eos_token_ids)    # model.generate(..., seed=3)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

MAX_SEED = 2**63 - 1
FILTERS = ("top_k", "top_p", "min_p")  # options without effect on a greedy choice

# What people bring from transformers' `generate`, and what to use here instead.
_INSTEAD = {
    "do_sample": "set temperature: 0 (the default) takes the likeliest token, more than 0 samples one",
    "num_beams": "there is no beam search; num_return_sequences with a temperature gives several answers",
    "max_length": "use max_new_tokens, which does not count the prompt",
    "eos_token_id": "use stop_token_ids",
    "streamer": "iterate over generate_stream",
    "stopping_criteria": "iterate over generate_stream and break",
    "logits_processor": "pass a constraint, or a decode_step that changes the logits",
    "past_key_values": "use generation.session.Session, which keeps its cache",
}


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen.

    temperature: 0 is greedy, the exact argmax; the filters then have no effect.
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

    @cached_property
    def choice(self) -> SamplingParams:
        """What chooses a token, but for the random number: all of these without the seed, and without the
        filters where they have no effect."""
        values = {field.name: getattr(self, field.name) for field in fields(SamplingParams)}
        without = ("seed", *FILTERS) if self.greedy else ("seed",)
        return SamplingParams(**{name: value for name, value in values.items() if name not in without})

    @property
    def likeliest(self) -> bool:
        """Whether the next token is the argmax of the model's own logits."""
        return self.choice == SamplingParams()


@dataclass(frozen=True)
class GenerationOptions(SamplingParams):
    """Everything a caller may ask of `generate` besides the inputs.

    max_new_tokens: maximum length of an answer; prompt and answer must fit the model's context.
    stop_token_ids: a row ends with any of these; None means the checkpoint's, () none.
    num_return_sequences: answers to each prompt, from one prefill.
    confidence: also say how sure the model was of each answer (see `generation.confidence`).
    logprobs: also give each token's log-probability, and those of so many likeliest tokens beside it (see
        `generation.confidence`); None gives none.
    use_cache: False recomputes everything for every token: the slow reference.
    decode_step: replaces the eager step (see `generation.decoding`).
    lookup: tokens that are looked up in prompt and answer and verified together (`generation.steps`):
        "auto" where that gives the same bits and as long as it pays, "on" always, "off" never. A single
        answer to a single prompt has them, and only by a step that can verify them.
    constraint: makes a `generation.protocol.Constraint`, anew for each answer; None allows all tokens. What
        it forces is computed together, in place of looked-up tokens.
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None
    num_return_sequences: int = 1
    confidence: bool = False
    logprobs: int | None = None
    use_cache: bool = True
    decode_step: Callable | None = None
    lookup: str = "auto"
    constraint: Callable | None = None

    def __post_init__(self):
        super().__post_init__()
        check_integer("max_new_tokens", self.max_new_tokens, low=1)
        check_integer("num_return_sequences", self.num_return_sequences, low=1)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, low=0)
        if self.decode_step is not None and not self.use_cache:
            raise ValueError("decode_step replaces the cached step: it cannot go with use_cache=False")
        if self.lookup not in ("auto", "on", "off"):
            raise ValueError(f"lookup: expected 'auto', 'on' or 'off', got {self.lookup!r}")
        if self.lookup == "on" and not self.use_cache:
            raise ValueError("lookup needs the cache: it cannot be 'on' with use_cache=False")
        if self.stop_token_ids is not None:
            ids = self.stop_token_ids
            ids = tuple(ids) if isinstance(ids, Iterable) else (ids,)
            for token_id in ids:
                check_integer("stop_token_ids", token_id, low=0)
            object.__setattr__(self, "stop_token_ids", ids)

    def without(self, *names: str) -> GenerationOptions:
        """With the defaults of these fields: what is left tells whether anything else was asked for."""
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self)}
        return replace(self, **{name: defaults[name] for name in names})


def with_overrides(
    options: GenerationOptions | None, overrides: Mapping[str, Any], eos_token_ids: Iterable[int]
) -> GenerationOptions:
    """`options` (None: the defaults) with some fields replaced, and the checkpoint's stop ids if it has none.
    A TypeError says of names that are no options what to use instead."""
    known = [field.name for field in fields(GenerationOptions)]
    if unknown := [name for name in overrides if name not in known]:
        raise TypeError(f"generate takes no {'; no '.join(_what_instead(name, known) for name in unknown)}")
    options = replace(options, **overrides) if options else GenerationOptions(**overrides)
    if options.stop_token_ids is None:
        options = replace(options, stop_token_ids=tuple(eos_token_ids))
    return options


def _what_instead(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    otherwise = f"did you mean {near[0]}?" if near else f"expected some of {', '.join(known)}"
    return f"{name}: {_INSTEAD.get(name, otherwise)}"


class CacheMemoryError(ValueError):
    """More rows or positions than there is memory for."""


class ConstraintError(ValueError):
    """A constraint that cannot say what may come next in an answer."""


class NotFiniteError(ValueError):
    """The logits for new token number `token` (from 1) hold NaN or infinity."""

    def __init__(self, token: int):
        super().__init__(
            f"the model's logits are not finite (NaN or infinity) for new token {token}: broken weights, or "
            "a dtype of too small a range"
        )
        self.token = token

    def __reduce__(self):  # exceptions are pickled with their message alone
        return type(self), (self.token,)


def check_number(name: str, value, good: Callable[[float], bool], wanted: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not good(value):
        raise ValueError(f"{name}: expected a number {wanted}, got {value!r}")


def check_integer(name: str, value, low: int, high: int | None = None) -> None:
    known = isinstance(value, int) and not isinstance(value, bool)
    if not known or value < low or (high is not None and value > high):
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an integer {bound}, got {value!r}")
