"""A conversation, or many questions about one image, without computing anything twice.

    session = Session(model, FeatureCache(model))
    first = session.generate_detailed(**processor.ask("photo.jpg", "How many boats?"), max_new_tokens=32)
    second = session.generate_detailed(**processor.ask("photo.jpg", "What colour?"), max_new_tokens=32)
    second.reused, second.prefilled                   # positions taken from the cache, and computed

A session takes what `model.generate` takes and gives the same tokens. It is a `Scheduler` of one slot, which
keeps the last prompt and answer. A new prompt is compared with them from the front, and only the part that
differs is prefilled. So the next turn of a conversation costs what is new in it, a shortened or edited
history rewinds by itself, and a second question about an image starts after the image.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from generation.features import FeatureCache
from generation.keyed_prompts import KeyedPrompt, read_prompt
from generation.options import GenerationOptions, with_overrides
from generation.output import GenerationOutput, TokenStream, column_of, fields_of, pad_id
from generation.prefix_store import PrefixStore
from generation.protocol import Pixels, VisionLanguage
from generation.requests import SlotRow, Stats, each_answer
from generation.scheduler import Scheduler
from generation.steps import Step


class Session:
    """See the module's docstring. A session answers one prompt at a time, of one thread.

    You may give up an answer at any token (a closed stream, Ctrl-C): the session knows what is in its cache,
    and the next prompt reuses as much of it as it shares. Call `reset` (and the feature cache's `clear`) when
    the weights, their dtype or device change.

    Args:
        model: a `VisionLanguageModel` in eval mode.
        feature_cache: of this model, possibly shared with other sessions; None keeps no features.
        prefixes: of this model, possibly shared: prompts of other sessions and earlier processes.

    Several answers to one prompt take as many slots; where their number or the step changes, the cache begins
    anew. `reuse` is what was saved for the last prompt, known from its first token on: the fields of a
    `GenerationOutput` that are a session's own.
    """

    def __init__(
        self,
        model: VisionLanguage,
        feature_cache: FeatureCache | None = None,
        prefixes: PrefixStore | None = None,
    ):
        if feature_cache is not None and feature_cache.model is not model:
            raise ValueError("feature_cache: expected one of the session's own model, got another model's")
        self.model, self._prefixes = model, prefixes
        self.feature_cache = FeatureCache(model, 0) if feature_cache is None else feature_cache
        self.reset()

    @property
    def held(self) -> int:
        """Positions in the cache that the next prompt may share."""
        return max(self._scheduler.cache.filled) if self._scheduler else 0

    @property
    def kv_cache_bytes(self) -> int:
        return self._scheduler.kv_cache_bytes if self._scheduler else 0

    def reset(self) -> None:
        """Forget everything and give the cache's memory back."""
        self._scheduler: Scheduler | None = None
        self._made: tuple[int, Step | None] | None = None  # slots and step of the scheduler
        self._rows: list[SlotRow] = []  # of the last answer
        self.reuse: dict[str, Any] = {}

    def generate(self, *inputs, **inputs_and_options) -> Tensor:
        """New token ids (N, T_new): see `VisionLanguageModel.generate`."""
        return self.generate_detailed(*inputs, **inputs_and_options).token_ids

    def generate_detailed(self, *inputs, **inputs_and_options) -> GenerationOutput:
        """`generate`, with what was saved, stop reasons, timings and sizes. Takes the same arguments."""
        return self.generate_stream(*inputs, **inputs_and_options).drain()

    def generate_stream(
        self,
        input_ids: Tensor,
        pixel_values: Pixels | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        options: GenerationOptions | None = None,
        **overrides,
    ) -> TokenStream:
        """`generate`, token by token: iterate for (N,) ids, then read `.result`.

        Takes what `VisionLanguageModel.generate` takes, for one row, and refuses what that refuses, several
        prompts and use_cache=False; the session is then as it was. A stream that has not ended when another
        one of this session starts, or at a `reset`, cannot be resumed.
        """
        options = with_overrides(options, overrides, self.model.config.eos_token_ids)
        inputs = (input_ids, pixel_values, pixel_attention_mask, attention_mask)
        prompt = read_prompt(self.model, *inputs, options.max_new_tokens)
        if not options.use_cache:
            raise ValueError("a session is a kept cache: for use_cache=False, call the model's generate")
        return TokenStream(self._answer(prompt, options))

    def _answer(
        self, prompt: KeyedPrompt, options: GenerationOptions
    ) -> Generator[Tensor, None, GenerationOutput]:
        """Yield (N,) ids of the answers."""
        self._end_answer()
        made = options.num_return_sequences, options.decode_step
        if made != self._made or self._scheduler is None:
            self._scheduler = None  # its memory is free before the next one's is taken
            self._scheduler = Scheduler(self.model, *made, self.feature_cache, prefixes=self._prefixes)
            self._made = made
        scheduler, pad, count = self._scheduler, pad_id(self.model, options), 0
        stats = scheduler.stats = Stats()
        self.reuse, scheduler.chunk = {}, options.prefill_chunk
        length, tiles = len(prompt), len(prompt.items)
        self._rows = rows = list[SlotRow]()
        try:
            for number, own in enumerate(each_answer(options)):
                rows.append(scheduler.enter(number, prompt, own))
            del prompt
            while True:
                while not all(row.stop_reason or len(row.tokens) > count for row in rows):
                    scheduler.step()
                for row in rows:
                    if row.error is not None:
                        raise row.error
                if not self.reuse:
                    reused, encoded = rows[0].reused, stats.tiles_encoded
                    self.reuse = {"reused": reused, "prefilled": length - reused}
                    self.reuse |= {"tiles_encoded": encoded, "tiles_reused": tiles - encoded}
                if count == max(len(row.tokens) for row in rows):
                    break
                yield column_of(rows, count, pad)
                if self._rows is not rows:
                    raise ValueError(
                        "this answer was unfinished when its session began another one or was reset: "
                        "it cannot be resumed"
                    )
                count += 1
        finally:
            if self._rows is rows:
                self._end_answer()
        return GenerationOutput(
            **fields_of(rows, pad, self.model.device),
            prompt_tokens=[length],
            seconds={name: stats.seconds[name] for name in ("vision", "prefill", "decode")},
            kv_cache_bytes=self.kv_cache_bytes,
            decode_steps=stats.decode_steps,
            proposed_tokens=stats.proposed,
            accepted_tokens=stats.accepted,
            **self.reuse,
        )

    def _end_answer(self) -> None:
        rows, self._rows = self._rows, []
        for row in rows:
            if self._scheduler is not None:
                self._scheduler.cancel(row.key)
