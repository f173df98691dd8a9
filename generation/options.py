"""What a caller may ask of `generate`, and what it refuses or fails with.

    options = GenerationOptions(max_new_tokens=64, temperature=0.7, top_k=40)
    options = with_overrides(options, {"seed": 3}, config.eos_token_ids)    # model.generate(..., seed=3)

A field of `SamplingParams` is an option of `generate`, a flag of generate.py and a field of the server, as
its `metadata` says; two rows are sampled together, and a recorded step is replayed, where all fields are
equal. What they do to logits stands in `generation/draws.py`. Importing this file needs no torch, so that a
command line can be refused at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

MAX_SEED = 2**63 - 1


def sampling(default: Any, metavar: str, text: str, of_draws: bool = False, **bounds: float) -> Any:
    """A field of `SamplingParams`: its help text, and the numbers that it takes (see `check_number`).
    `of_draws`: it has no effect on a greedy choice."""
    about = {"metavar": metavar, "help": text, "of_draws": of_draws, "low": None, "over": None, "high": None}
    return field(default=default, metadata=about | bounds)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen: see the help text of each field.

    temperature: 0 is the exact argmax; the filters then have no effect.
    top_k: ties with the k-th stay. top_p: the token that reaches this mass stays.
    repetition_penalty: divides positive and multiplies negative logits of tokens already seen.
    seed: answer j of every prompt draws with seed + j, so that a row gets in a batch what it gets alone;
        None takes seeds from torch's global generator.
    """

    temperature: float = sampling(0.0, "T", "sampling temperature; 0 is greedy", low=0)
    top_k: int = sampling(0, "K", "sample from the K likeliest tokens; 0 is off", True, low=0)
    top_p: float = sampling(
        1.0, "P", "sample from the likeliest tokens of probability P together; 1 is off", True, over=0, high=1
    )
    min_p: float = sampling(
        0.0, "P", "drop tokens less likely than P times the most likely one; 0 is off", True, low=0, high=1
    )
    repetition_penalty: float = sampling(1.0, "R", "above 1 repeats less; 1 is off", over=0)
    frequency_penalty: float = sampling(
        0.0, "F", "subtract F from a token's logit for each time the answer has it; 0 is off", low=-2, high=2
    )
    presence_penalty: float = sampling(
        0.0, "P", "subtract P from the logits of tokens that the answer has already; 0 is off", low=-2, high=2
    )
    seed: int | None = sampling(
        None, "SEED", "seed of sampling; answer N uses SEED + N - 1", True, low=0, high=MAX_SEED
    )

    def __post_init__(self):
        for option in fields(SamplingParams):
            value, about = getattr(self, option.name), option.metadata
            if value is not None or option.default is not None:
                bounds = {name: about[name] for name in ("low", "over", "high")}
                check_number(option.name, value, not isinstance(option.default, float), **bounds)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def choice(self) -> SamplingParams:
        """The parameters that affect a token's choice, normalised for comparison: no seed, and no filters
        where the choice is greedy."""
        off = [one for one in fields(SamplingParams) if self.greedy and one.metadata["of_draws"]]
        own = {one.name: getattr(self, one.name) for one in fields(SamplingParams)}
        return SamplingParams(**own | {one.name: one.default for one in off} | {"seed": None})

    @property
    def likeliest(self) -> bool:
        """Whether the next token is the argmax of the model's own logits."""
        return self.greedy and not self.penalizes

    @property
    def penalizes(self) -> bool:
        """Whether what a row holds already changes the logits."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class GenerationOptions(SamplingParams):
    """Everything a caller may ask of `generate` besides the inputs.

    max_new_tokens: maximum length of an answer; prompt and answer must fit the model's context.
    stop_token_ids: a row ends with any of these; None means the checkpoint's, () none.
    num_return_sequences: answers to each prompt, from one prefill.
    confidence: also say how sure the model was of each answer (see `generation.confidence`).
    logprobs: also give each token's log-probability, and those of so many likeliest tokens beside it (see
        `generation.confidence`); None gives none.
    logprobs_mode: "model", or "sampler": after temperature and filters, as the token was drawn.
    use_cache: False recomputes everything for every token: the slow reference.
    decode_step: a `generation.steps.Step` in place of the eager one.
    prefill_chunk: positions of a prompt that are computed at a time, which bounds the memory of activations;
        None computes all at once.
    lookup: tokens that are looked up in prompt and answer and verified together (`generation.speculation`):
        "auto" where that gives the same bits and as long as it pays, "on" always, "off" never. Sessions and
        schedulers have them, by a step that can verify them; `model.generate`, the reference, has none.
    constraint: makes a `generation.protocol.Constraint`, anew for each answer; None allows all tokens. What
        it forces is computed together, in place of looked-up tokens.
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None
    num_return_sequences: int = 1
    confidence: bool = False
    logprobs: int | None = None
    logprobs_mode: str = "model"
    use_cache: bool = True
    decode_step: Any = None
    prefill_chunk: int | None = None
    lookup: str = "auto"
    constraint: Callable | None = None

    def __post_init__(self):
        super().__post_init__()
        least = {"max_new_tokens": 1, "num_return_sequences": 1, "logprobs": 0, "prefill_chunk": 1}
        for name, low in least.items():
            value, none = getattr(self, name), name in ("logprobs", "prefill_chunk")
            if value is not None or not none:
                check_integer(name, value, low)
        for name, known in (("logprobs_mode", ("model", "sampler")), ("lookup", ("auto", "on", "off"))):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
        if not self.use_cache and (self.decode_step is not None or self.lookup == "on"):
            raise ValueError(
                "use_cache=False cannot go with decode_step or lookup='on', which need the cache"
            )
        if self.logprobs_mode == "sampler" and self.penalizes:
            raise ValueError("logprobs_mode: 'sampler' cannot go with a penalty")
        if self.stop_token_ids is not None:
            ids = self.stop_token_ids
            ids = tuple(ids) if isinstance(ids, Iterable) else (ids,)
            for token_id in ids:
                check_integer("stop_token_ids", token_id, low=0)
            object.__setattr__(self, "stop_token_ids", ids)


def with_overrides(
    options: GenerationOptions | None, overrides: Mapping[str, Any], eos_token_ids: Iterable[int]
) -> GenerationOptions:
    """`options` (None: the defaults) with some fields replaced, and the checkpoint's stop ids if it has none.
    A TypeError says of names that are no options which there are."""
    known = [field.name for field in fields(GenerationOptions)]
    if unknown := overrides.keys() - known:
        raise TypeError(f"generate takes no {', '.join(sorted(unknown))}; it takes {', '.join(known)}")
    options = replace(options, **overrides) if options else GenerationOptions(**overrides)
    if options.stop_token_ids is None:
        options = replace(options, stop_token_ids=tuple(eos_token_ids))
    return options


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


def check_number(name: str, value, whole: bool = False, low=None, over=None, high=None) -> None:
    """Raises ValueError for what is no number, or no whole one, from `low` or over `over` to `high`."""
    good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    good = good and (low is None or value >= low) and (over is None or value > over)
    if not good or value == math.inf or (high is not None and value > high):
        bounds = {"of at least": low, "over": over, "of at most": high}
        said = " and ".join(f"{how} {bound}" for how, bound in bounds.items() if bound is not None)
        raise ValueError(f"{name}: expected {'an integer' if whole else 'a number'} {said}, got {value!r}")


def check_integer(name: str, value, low: int, high: int | None = None) -> None:
    check_number(name, value, whole=True, low=low, high=high)
