"""An answer drafted from the whole image's tile alone, while the other tiles are still to be encoded.

    session = Session(model, FeatureCache(model))
    stream = draft_stream(session, full_inputs, short_inputs, options)
    for ids in stream.draft():                        # (1,) ids, as soon as one tile is encoded
        ...
    for ids in stream:                                # then the answer
        ...
    stream.drafted, stream.accepted                   # the draft, and how many tokens of it were right

An image that is cut into tiles is among them once more, as a whole. `short_inputs` are the prompt with that
tile only, as the same processor makes it of an image that it does not cut. The same weights answer it first.
Then the other tiles are encoded and the full prompt is prefilled, and the decode loop is offered the drafted
tokens (`generation.steps`): it keeps those that it draws itself. So the answer is that of the session
without a draft, greedy or sampled, and a draft that is right saves decode steps.

A draft is made where it can help: one answer to one prompt, whose whole image is not encoded yet, nor are
other tiles, and which is much shorter with the whole image alone. It ends when it has taken a small share of
the time that the other tiles will take. That time is known by then, because a tile has just been encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.decoding import Stopwatch, TokenStream, decode, pad_id
from generation.kv_cache import CachePosition, seen_tokens
from generation.options import GenerationOptions, NotFiniteError, with_overrides
from generation.prefix import KeyedPrompt, embed_rest, read_prompt
from generation.sampling import make_seeds
from generation.session import Session
from generation.steps import Proposer, Step, prompt_lookup, sampler_for, step_of

CHUNK = 16  # drafted tokens that are verified in one pass


@dataclass(frozen=True)
class DraftLimits:
    """When a draft is made, and when it ends.

    share: of the time that the other tiles are expected to take; the first token, which the short prompt's
        prefill gives, is made in any case.
    least_wait: seconds that the other tiles are expected to take at least: less is no time to read in.
    most_prompt: positions of the short prompt, as a share of those that the full one has to compute.
    """

    share: float = 0.025
    least_wait: float = 0.3
    most_prompt: float = 1 / 3


LIMITS = DraftLimits()


@dataclass
class Draft:
    """Drafted ids, with the stop token; seconds of work until the first one, and for all of them."""

    token_ids: list[int] = field(default_factory=list)
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    def accepted(self, answer: Sequence[int]) -> int:
        """How many of its tokens this answer begins with."""
        most = min(len(self.token_ids), len(answer))
        return next((n for n in range(most) if self.token_ids[n] != answer[n]), most)


class DraftStream(TokenStream):
    """The stream of an answer, which may be preceded by a draft. Iterating `draft` makes it, for as long as
    you like; iterating the stream ends it and makes the answer."""

    def __init__(self, answer: TokenStream, drafted: Draft, steps: Generator[Tensor, None, None] | None):
        super().__init__(answer._steps)
        self._draft, self._draft_steps = drafted, steps

    @property
    def drafted(self) -> Draft | None:
        """The draft as far as it is made; None if there is none."""
        return self._draft if self._draft.token_ids else None

    @property
    def accepted(self) -> int | None:
        """How many drafted tokens the answer begins with, once it has ended; None without a draft."""
        if self.drafted is None or self.result is None:
            return None
        return self.drafted.accepted(self.result.rows()[0])

    def draft(self) -> Iterator[Tensor]:
        """The ids of the draft, (1,) on the CPU each; nothing where no draft helps, or the answer has begun.
        You may leave the loop and go on later."""
        while self._draft_steps is not None and (token := next(self._draft_steps, None)) is not None:
            yield token.cpu()

    def end_draft(self) -> None:
        """End the draft where it is, and let go of what it was made from."""
        if self._draft_steps is not None:
            self._draft_steps.close()
            self._draft_steps = None

    def _rest(self) -> Iterator[Tensor]:
        self.end_draft()
        return super()._rest()


class DraftProposer(Proposer):
    """Proposes a draft for as long as the answer agrees with it, and then what `after` makes proposes."""

    def __init__(self, drafted: list[int], after: Callable[[], Proposer | None]):
        self._drafted, self._make_after = drafted, after
        self._answer: list[int] = []
        self._agrees = True
        self._after: Proposer | None = None

    def propose(self, new_ids: list[int]) -> list[int]:
        self._answer += new_ids
        if self._agrees:
            place = len(self._answer)
            if place < len(self._drafted) and self._drafted[:place] == self._answer:
                return self._drafted[place : place + CHUNK]
            self._agrees, self._after, new_ids = False, self._make_after(), self._answer
        return [] if self._after is None else self._after.propose(new_ids)

    def observe(self, positions: int, seconds: float) -> None:
        if self._after is not None:
            self._after.observe(positions, seconds)


def draft_stream(
    session: Session,
    inputs: Mapping[str, Any],
    short_inputs: Mapping[str, Any] | None,
    options: GenerationOptions,
    limits: DraftLimits | None = None,
) -> DraftStream:
    """The answer of `session.generate_stream(**inputs, options=options)`, with a draft before it where one
    helps.

    Args:
        session: its feature cache keeps the whole image's tile from the draft to the answer.
        short_inputs: the prompt with the whole image alone; None where there is none.
        limits: None for the usual ones.

    Raises ValueError for what the session refuses, and for a short prompt with other tiles than the full one.
    """
    model, limits = session.model, limits or LIMITS
    options = with_overrides(options, {}, model.config.eos_token_ids)
    prompt, drafted = read_prompt(model, **inputs, max_new_tokens=options.max_new_tokens), Draft()
    left, steps, proposer = 0, None, None
    if short_inputs is not None and options.num_return_sequences == 1:
        short = read_prompt(model, **short_inputs, max_new_tokens=options.max_new_tokens)
        if not set(short.digests) <= set(prompt.digests):
            raise ValueError(
                "short_inputs: expected tiles that are among those of the full prompt, got others"
            )
        left = tiles_left(session, prompt, short, limits)
    if left:
        if not options.greedy and options.seed is None:  # one seed for draft and answer
            options = replace(options, seed=make_seeds(None, 1, 1)[0])
        steps = _draft_steps(session, short, options, drafted, left, limits)
        if verifies(session, options):
            ids, image_token_id = prompt.input_ids, model.config.image_token_id

            def lookup() -> Proposer | None:
                """A draft that was wrong somewhere may be right after that: it is looked up like a prompt."""
                known = torch.cat((ids, torch.tensor(drafted.token_ids, dtype=ids.dtype)))
                return prompt_lookup(options, known[None], image_token_id)

            proposer = DraftProposer(drafted.token_ids, lookup)
    return DraftStream(session.stream_prompt(prompt, options, proposer), drafted, steps)


def verifies(session: Session, options: GenerationOptions) -> bool:
    """Whether drafted tokens are offered to the decode loop. Where a pass over several positions is rounded
    otherwise than single steps, as PyTorch's is, an answer could come to differ from the one without a draft:
    there the draft is shown, and nothing is taken from it, unless the options have tokens proposed anyway."""
    step = step_of(options.decode_step, session.model.language_model)
    return step.chunks and (step.same_bits or options.lookup == "on")


def tiles_left(session: Session, prompt: KeyedPrompt, short: KeyedPrompt, limits: DraftLimits) -> int:
    """How many tiles are to be encoded after those of the short prompt; 0 where a draft does not help, or
    the session would have to encode those twice."""
    config, features = session.model.config, session.feature_cache
    tile_bytes = (
        config.tokens_per_tile * config.text.hidden_size * session.model.language_model.norm.weight.itemsize
    )
    reused = session.reusable(prompt)
    too_long = len(short) > limits.most_prompt * (len(prompt) - reused)
    if config.image_placement == "prefix" or too_long or len(short.digests) * tile_bytes > features.max_bytes:
        return 0
    tile = int((prompt.keys[:reused] < 0).sum()) // config.tokens_per_tile
    missing = features.missing(prompt.digests[tile:])
    first = missing & set(short.digests)
    return len(missing - first) if first else 0  # without a tile to encode, nothing says how long one takes


@torch.no_grad()
def _draft_steps(
    session: Session,
    short: KeyedPrompt,
    options: GenerationOptions,
    drafted: Draft,
    left: int,
    limits: DraftLimits,
) -> Generator[Tensor, None, None]:
    """Yield (1,) ids of the draft, which are noted in `drafted`."""
    model, length = session.model, len(short)
    language_model, device = model.language_model, model.device
    began = perf_counter()
    watch = Stopwatch(device)
    embeddings, encoded = embed_rest(model, session.feature_cache, short, 0)
    watch.lap("vision")
    rest = left * watch.seconds["vision"] / max(encoded, 1)  # 0: another session was quicker
    if not encoded or rest < limits.least_wait:
        return
    room = kv.round_up(length + 1, kv.VIEW_STEP)
    like, dtype = embeddings, language_model.cache_dtype
    kv_cache = kv.allocate_for(language_model.config, 1, room, like, dtype)
    step = step_of(options.decode_step, language_model)
    logits = step.prefill(embeddings, [length], kv_cache)
    seen = None
    if options.repetition_penalty != 1:
        seen = seen_tokens(short.input_ids[None].to(device), None, model.config.text.vocab_size, 1)
    del embeddings, like, short
    sampler = sampler_for(options, 1, pad_id(model, options), device, seen)
    position = CachePosition(kv_cache, (length,), device)
    if step.loops:  # recording a graph takes longer than a draft
        step = Step(language_model)
    tokens = decode(step, logits, sampler, position, options.max_new_tokens)
    most = watch.seconds["vision"] + limits.share * rest
    try:
        for token in tokens:
            drafted.token_ids.append(int(token))  # waits for the device
            drafted.seconds += perf_counter() - began
            drafted.first_token_seconds = drafted.first_token_seconds or drafted.seconds
            yield token[:, 0]
            if drafted.seconds > most:
                return
            began = perf_counter()  # what the reader did meanwhile took no work
    except NotFiniteError:  # broken weights, which the answer tells of
        return
