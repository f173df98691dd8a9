"""A conversation, or many questions about one image, without computing anything twice.

    session = Session(model, FeatureCache(model))
    first = session.generate_detailed(**processor.ask("photo.jpg", "How many boats?"), max_new_tokens=32)
    second = session.generate_detailed(**processor.ask("photo.jpg", "What colour?"), max_new_tokens=32)
    second.reused, second.prefilled                   # positions taken from the cache, and computed

A session takes what `model.generate` takes and gives the same tokens. It keeps the last prompt and answer in
one slot of the scheduler's kind (`prefix.SlotCache`). A new prompt is compared with them from the front, and
only the part that differs is prefilled. So the next turn of a conversation costs what is new in it, a
shortened or edited history rewinds by itself, and a second question about an image starts after the image.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from threading import RLock

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.decoding import (
    GenerationOutput,
    Stopwatch,
    TokenStream,
    initial_capacity,
    pad_id,
    run_decode,
)
from generation.kv_cache import CachePosition, seen_tokens
from generation.memory import check_caches_fit
from generation.options import GenerationOptions, NotFiniteError, with_overrides
from generation.prefix import CacheBudget, FeatureCache, KeyedPrompt, SlotCache, embed_rest, read_prompt
from generation.prefix_store import PrefixStore
from generation.protocol import Pixels, VisionLanguage
from generation.steps import Proposer, prompt_lookup, sampler_for, step_of


@dataclass(frozen=True)
class PrefixReuse:
    """What the kept prefix saved for one prompt.

    reused: positions of the prompt that were in the cache already.
    prefilled: its other positions, which were computed.
    tiles_encoded: tiles that went through the vision model.
    tiles_reused: the prompt's other tiles: in the cache, in the feature cache, or twice in the prompt.
    """

    reused: int
    prefilled: int
    tiles_encoded: int
    tiles_reused: int


@dataclass(frozen=True)
class SessionOutput(PrefixReuse, GenerationOutput):
    """`GenerationOutput`, and what was saved."""


class Session:
    """See the module's docstring. A session answers one prompt at a time: threads that share it wait for one
    another's answer, or for the next token of a streamed one.

    You may give up an answer at any token (a closed stream, Ctrl-C): the session knows what is in its cache,
    and the next prompt reuses as much of it as it shares. Call `reset` (and the feature cache's `clear`) when
    the weights, their dtype or device change.

    Args:
        model: a `VisionLanguageModel` in eval mode.
        feature_cache: of this model, possibly shared with other sessions; None keeps no features.
        prefixes: of this model, possibly shared: prompts of other sessions and earlier processes.

    `reuse` is about the last prompt, from its first token on.
    """

    def __init__(
        self,
        model: VisionLanguage,
        feature_cache: FeatureCache | None = None,
        prefixes: PrefixStore | None = None,
    ):
        if feature_cache is not None and feature_cache.model is not model:
            raise ValueError("feature_cache: expected one of the session's own model, got another model's")
        self.model = model
        self.feature_cache = FeatureCache(model, 0) if feature_cache is None else feature_cache
        self._prefixes = prefixes
        self._context = model.config.text.max_position_embeddings
        self._lock = RLock()  # held while anything here changes
        self._steps: Generator[Tensor, None, GenerationOutput] | None = None  # of the last answer
        self.reset()

    @property
    def held(self) -> int:
        """Positions in the cache that the next prompt may share."""
        return self._slots.filled[0] + len(self._fed)

    @property
    def kv_cache_bytes(self) -> int:
        return kv.size_in_bytes(self._slots.kv_cache)

    def reset(self) -> None:
        """Forget everything and give the cache's memory back."""
        with self._lock:
            self._end_answer()
            language_model = self.model.language_model
            self._slots = SlotCache(language_model, CacheBudget.of(language_model, slots=1))
            self._fed: list[Tensor] = []  # ids (1,) after what the slot knows, still on the device
            self.reuse: PrefixReuse | None = None

    def _end_answer(self) -> None:
        """The last answer's steps tidy up the cache now, and not whenever somebody lets go of its stream."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def generate(self, *inputs, **inputs_and_options) -> Tensor:
        """New token ids (N, T_new): see `VisionLanguageModel.generate`."""
        return self.generate_detailed(*inputs, **inputs_and_options).token_ids

    def generate_detailed(self, *inputs, **inputs_and_options) -> SessionOutput:
        """`generate`, with what was saved, stop reasons, timings and sizes. Takes the same arguments."""
        with self._lock:
            output = self.generate_stream(*inputs, **inputs_and_options).drain()
        assert isinstance(output, SessionOutput)
        return output

    def generate_stream(
        self,
        input_ids: Tensor,
        pixel_values: Pixels | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        options: GenerationOptions | None = None,
        **overrides,
    ) -> TokenStream:
        """`generate`, token by token: iterate for (N,) ids, then read `.result`, a `SessionOutput`.

        Takes what `VisionLanguageModel.generate` takes, for one row, and refuses what that refuses, several
        prompts and use_cache=False; the session is then as it was. Of several answers (num_return_sequences)
        the session keeps none, only the prompt. A stream that has not ended when another one of this session
        starts, or at a `reset`, cannot be resumed.
        """
        options = with_overrides(options, overrides, self.model.config.eos_token_ids)
        inputs = (input_ids, pixel_values, pixel_attention_mask, attention_mask)
        return self.stream_prompt(read_prompt(self.model, *inputs, options.max_new_tokens), options)

    def stream_prompt(
        self, prompt: KeyedPrompt, options: GenerationOptions, proposer: Proposer | None = None
    ) -> TokenStream:
        """`generate_stream` of a prompt that was read with these options' `max_new_tokens`. `proposer` stands
        in for what the options would have propose tokens (see `generation.steps`)."""
        if not options.use_cache:
            raise ValueError("a session is a kept cache: for use_cache=False, call the model's generate")
        answers, room = options.num_return_sequences, len(prompt) + options.max_new_tokens - 1
        with self._lock:
            own = kv.round_up(room if answers == 1 else len(prompt), kv.STEP)
            caches = [(1, max(min(own, self._context), self._slots.capacity))]
            if answers > 1:
                caches.append((answers, room))
            check_caches_fit(self.model.language_model, caches, held=self.kv_cache_bytes)
        return TokenStream(self._locked(self._answer(prompt, options, proposer)))

    def reusable(self, prompt: KeyedPrompt) -> int:
        """How many positions of a prompt the cache holds. The last one is always computed, because its logits
        are not kept."""
        with self._lock:
            return min(*self._slots.filled_in_common(prompt.keys), len(prompt) - 1)

    def _locked(
        self, steps: Generator[Tensor, None, SessionOutput]
    ) -> Generator[Tensor, None, SessionOutput]:
        """The same steps, each with the lock held: another thread may take its turn between two tokens."""
        try:
            while True:
                with self._lock:
                    try:
                        token = next(steps)
                    except StopIteration as end:
                        return end.value
                yield token
        finally:
            with self._lock:
                steps.close()

    def _answer(
        self, prompt: KeyedPrompt, options: GenerationOptions, proposer: Proposer | None
    ) -> Generator[Tensor, None, SessionOutput]:
        """Yield (N,) ids: prefill what is new, then decode, noting what goes into the cache."""
        model, answers, slots, length = self.model, options.num_return_sequences, self._slots, len(prompt)
        self._end_answer()
        self.reuse = None
        if self._fed:  # the last answer's ids go to the slot's keys: once a turn, not once a token
            ids = torch.cat(self._fed).cpu()
            self._fed = []  # forgotten first: an interrupt here must not leave them to be noted twice
            slots.append(0, ids)
        watch = Stopwatch(model.device)
        with torch.no_grad():  # a decorator would keep the arguments, and with them the pixels, to the end
            reused = self.reusable(prompt)
            if self._prefixes is not None:
                slots.reserve(length)
                slots.assign(0, prompt.keys, source=0, shared=reused)
                reused = self._prefixes.extend(slots, 0, prompt, reused)
            embeddings, encoded = embed_rest(model, self.feature_cache, prompt, reused)
            watch.lap("vision")
            slots.reserve(length)
            slots.assign(0, prompt.keys, source=0, shared=reused)
            step = step_of(options.decode_step, model.language_model)
            logits = step.prefill(embeddings, [length - reused], slots.kv_cache, reused)
            slots.filled[0] = length
        reuse = PrefixReuse(reused, length - reused, encoded, len(prompt.digests) - encoded)
        seen = None
        if options.repetition_penalty != 1:
            ids = kv.to_device(prompt.input_ids[None], model.device)
            seen = seen_tokens(ids, None, model.config.text.vocab_size, answers)
        if proposer is None:
            proposer = prompt_lookup(options, prompt.input_ids[None], model.config.image_token_id)
        keys, digests = prompt.keys, prompt.digests
        del prompt, embeddings
        kv_cache, limit = slots.kv_cache, self._context
        if answers > 1:
            limit = length + options.max_new_tokens - 1
            kv_cache = kv.fork(kv_cache, length, answers, initial_capacity(length, options.max_new_tokens))
            logits = logits.repeat_interleave(answers, 0)  # (N, V)
        watch.lap("prefill")
        self.reuse = reuse

        sampler = sampler_for(options, 1, pad_id(model, options), model.device, seen)
        position = CachePosition(kv_cache, (length,), model.device, limit)
        count = options.max_new_tokens
        steps = run_decode(step, logits, sampler, position, count, [length], watch, proposer)
        self._steps, last = steps, None
        with closing(steps):
            while True:
                try:
                    token = next(steps)
                    if last is None and self._prefixes is not None:
                        sampler.check_finite()  # without stop tokens nobody has asked yet
                        self._prefixes.save(keys, digests, slots.kv_cache, 0)
                except StopIteration as end:
                    output = end.value
                    break
                except NotFiniteError:
                    self._fed = []
                    slots.clear(0)
                    raise
                # A token is in the cache once the next one arrives: all of an answer but its last.
                if answers == 1 and last is not None:
                    self._fed.append(last)
                last = token
                yield token
                if self._steps is not steps:
                    raise ValueError(
                        "this answer was unfinished when its session began another one or was reset: "
                        "it cannot be resumed"
                    )
        total = self.kv_cache_bytes + (output.kv_cache_bytes if answers > 1 else 0)
        return SessionOutput(**vars(output) | {"kv_cache_bytes": total}, **vars(reuse))
