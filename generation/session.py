"""A kept prefix: a conversation, or many questions about one image, without computing anything twice.

    session = Session(model, FeatureCache(model, max_bytes=64 * 2**20))
    first = session.generate_detailed(**processor.ask("photo.jpg", "How many boats?"), max_new_tokens=32)
    second = session.generate_detailed(**processor.ask("photo.jpg", "What colour?"), max_new_tokens=32)
    second.reused, second.prefilled                   # positions taken from the cache, and computed

A session takes what `model.generate` takes and gives the same tokens. Its cache keeps the last prompt and
answer; a new prompt is compared with them from the front, the cache rewound to where they part, and only the
rest prefilled. So the next turn of a conversation costs what is new in it; a changed or shortened history
rewinds by itself; a second question about an image goes on behind the image.

Positions are compared by what was computed there: a token by its id, an image position by the digest of its
tile's pixels, because all placeholders carry the same id.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import RLock

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.decoding import (
    CacheCursor,
    Chooser,
    Generated,
    GenerationOptions,
    Stopwatch,
    TokenStream,
    answer,
    eager_step,
    initial_capacity,
    prefill,
)
from generation.feature_cache import FeatureCache, tile_digests
from generation.kv_cache import KVCache
from generation.memory import check_caches_fit
from generation.prompt import Prompt, prompt_lengths, seen_tokens, tiles_of_rows

PositionKey = int | tuple[bytes, int]  # a token's id, or a tile's digest and the place in its features


@dataclass(frozen=True)
class Spared:
    """What a kept prefix spared one prompt.

    reused: positions of the prompt that were in the cache; reused + prefilled is the prompt.
    prefilled: positions of the prompt that were computed.
    tiles_encoded: tiles that went through the vision model.
    tiles_reused: the prompt's other tiles: in the cache already, in the feature cache, or there twice.
    """

    reused: int
    prefilled: int
    tiles_encoded: int
    tiles_reused: int


@dataclass(frozen=True)
class SessionGenerated(Spared, Generated):
    """`Generated`, and what was spared."""


@dataclass(frozen=True)
class _Request:
    """A checked prompt: ids (1, T) without padding; tiles (N, 3, H, W) and masks (N, H, W), or None."""

    input_ids: Tensor
    tiles: Tensor | None
    masks: Tensor | None


class Session:
    """See the module's docstring. One prompt at a time: of threads that share a session each waits for the
    other's answer, or for its next token where that is streamed.

    An answer may be given up at any token (a closed stream, Ctrl-C): what is in the cache by then is known,
    and the next prompt goes on from as much of it as it shares. The weights, their dtype and device must stay
    as they are; call `reset` (and the feature cache's `clear`) when they change.

    Args:
        model: a `VisionLanguageModel` in eval mode.
        feature_cache: of this model, maybe shared with other sessions; None keeps no features.

    `spared` is of the last prompt, from its first token on: an answer that is given up has no other result.

    Raises:
        ValueError: a feature cache of another model.
    """

    def __init__(self, model, feature_cache: FeatureCache | None = None):
        if feature_cache is not None and feature_cache.model is not model:
            raise ValueError("feature_cache: expected one of the session's own model, got another model's")
        self.model = model
        self.feature_cache = FeatureCache(model, 0) if feature_cache is None else feature_cache
        self._cache: KVCache | None = None
        self._keys: list[PositionKey] = []  # what the cache holds from its first position on ...
        self._fed: list[Tensor] = []  # ... and behind that: ids (1,) not yet read back from the device
        self.spared: Spared | None = None
        self._turn = 0
        self._lock = RLock()  # held while anything here changes
        self._steps: Generator[Tensor, None, Generated] | None = None  # of the last answer

    @property
    def held(self) -> int:
        """Positions in the cache that the next prompt may share."""
        return len(self._keys) + len(self._fed)

    @property
    def kv_cache_bytes(self) -> int:
        return kv.size_in_bytes(self._cache) if self._cache else 0

    def reset(self) -> None:
        """Forget everything and give the cache's memory back."""
        with self._lock:
            self._begin_turn()
            self._cache, self._keys, self._fed, self.spared = None, [], [], None

    def generate(self, *inputs, **inputs_and_options) -> Tensor:
        """New token ids (N, T_new): see `VisionLanguageModel.generate`."""
        return self.generate_detailed(*inputs, **inputs_and_options).token_ids

    def generate_detailed(self, *inputs, **inputs_and_options) -> SessionGenerated:
        """`generate`, with what was spared, stop reasons, timings and sizes. Takes the same arguments."""
        with self._lock:
            return self.generate_stream(*inputs, **inputs_and_options).drain()

    def generate_stream(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options,
    ) -> TokenStream:
        """`generate`, token by token: iterate for (N,) ids, then read `.result`, a `SessionGenerated`.

        All work is done while iterating. A stream that is not at its end when another one of this session
        starts, or at a `reset`, cannot be gone on with.

        Args: those of `VisionLanguageModel.generate`, of one row. Of several answers (num_return_sequences)
        the session keeps none, only the prompt.

        Raises:
            TypeError: an option that does not exist.
            ValueError: what `VisionLanguageModel.generate` refuses; several prompts; use_cache=False. The
                session is then as it was.
        """
        options = self.model.generation_options(**options)
        if not options.use_cache:
            raise ValueError("a session is a kept cache: for use_cache=False, call the model's generate")
        with self._lock:
            request = self._check(input_ids, pixel_values, pixel_attention_mask, attention_mask, options)
        return TokenStream(self._one_thread_at_a_time(self._answer(request, options)))

    def _one_thread_at_a_time(
        self, steps: Generator[Tensor, None, SessionGenerated]
    ) -> Generator[Tensor, None, SessionGenerated]:
        """The same steps, each of them made while no other thread changes the session."""
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

    def _check(self, input_ids, pixel_values, pixel_mask, attention_mask, options) -> _Request:
        """Refuse what cannot be done, before any work."""
        config = self.model.config
        tiles = masks = row_tiles = None
        if pixel_values is not None and pixel_values.numel():
            tiles, masks, row_tiles = tiles_of_rows(pixel_values, pixel_mask)
        in_front = config.image_placement == "prefix" and tiles is not None
        (length, *_) = prompt_lengths(
            input_ids,
            attention_mask,
            front=config.tokens_per_tile if in_front else 0,
            max_new_tokens=options.max_new_tokens,
            context=config.text.max_position_embeddings,
        )
        if input_ids.shape[0] != 1:
            raise ValueError(f"a session takes one prompt at a time, got a batch of {input_ids.shape[0]}")
        if attention_mask is not None:
            input_ids = input_ids[attention_mask.to(input_ids.device).bool()][None]
        count = None if tiles is None else len(tiles)
        self.model.check_places(input_ids, count, config.tokens_per_tile, row_tiles)
        self._check_memory(length, options.max_new_tokens, options.num_return_sequences)
        return _Request(input_ids, tiles, masks)

    def _check_memory(self, length: int, new_tokens: int, answers: int) -> None:
        most, room = self.model.config.text.max_position_embeddings, length + new_tokens - 1
        own = min(kv.round_up(room if answers == 1 else length, kv.STEP), most)
        forks = [(answers, room)] if answers > 1 else []
        held = kv.capacity(self._cache) if self._cache else 0
        check_caches_fit(self.model.language_model, [(1, max(own, held)), *forks], self.kv_cache_bytes)

    def _answer(
        self, request: _Request, options: GenerationOptions
    ) -> Generator[Tensor, None, SessionGenerated]:
        """Yield (N,) ids: prefill what is new, then token by token, noting what went into the cache."""
        model, answers = self.model, options.num_return_sequences
        turn, self.spared = self._begin_turn(), None
        self._read_back()
        watch = Stopwatch(model.device)
        with torch.no_grad():  # a decorator would keep the arguments, and with them the pixels, to the end
            digests = [] if request.tiles is None else tile_digests(request.tiles, request.masks)
            keys = self._position_keys(request.input_ids[0].tolist(), digests)
            # The last position is computed in any case: its logits are not kept.
            reused = min(common_prefix(keys, self._keys), len(keys) - 1)
            embeddings, encoded = self._embed_rest(request, digests, keys, reused)
            watch.lap("vision")
            logits = self._prefill_rest(embeddings, keys, reused).repeat_interleave(answers, 0)  # (N, V)
        input_ids = request.input_ids
        del request, embeddings
        step = options.decode_step or eager_step(model.language_model)
        kv_cache, limit, length = self._cache, model.config.text.max_position_embeddings, len(keys)
        if answers > 1:
            limit = length + options.max_new_tokens - 1
            kv_cache = kv.fork(kv_cache, length, answers, initial_capacity(length, options.max_new_tokens))
        watch.lap("prefill")
        self.spared = spared = Spared(reused, length - reused, encoded, len(digests) - encoded)

        seen = None
        if options.repetition_penalty != 1:
            seen = seen_tokens(input_ids.to(model.device), None, model.config.text.vocab_size, answers)
        chooser = Chooser(options, 1, model.pad_id(options), model.device, seen)
        cursor = CacheCursor(kv_cache, (length,), model.device, limit)
        self._steps = answer(step, logits, chooser, cursor, options.max_new_tokens, [length], watch)
        made = yield from self._passing_on(self._steps, turn, noting=answers == 1)
        fork_bytes = made.kv_cache_bytes if answers > 1 else 0
        return SessionGenerated(
            **vars(made) | {"kv_cache_bytes": self.kv_cache_bytes + fork_bytes}, **vars(spared)
        )

    def _position_keys(self, ids: Sequence[int], digests: Sequence[bytes]) -> list[PositionKey]:
        config = self.model.config
        images = [(digest, place) for digest in digests for place in range(config.tokens_per_tile)]
        if config.image_placement == "prefix":
            return [*images, *ids]
        remaining = iter(images)
        return [next(remaining) if token_id == config.image_token_id else token_id for token_id in ids]

    def _embed_rest(
        self, request: _Request, digests: list[bytes], keys: list[PositionKey], reused: int
    ) -> tuple[Tensor, int]:
        """Embeddings (1, P - reused, D) of what is not in the cache, and the tiles encoded for them."""
        model, features, encoded = self.model, None, 0
        in_cache = sum(isinstance(key, tuple) for key in keys[:reused])  # image positions
        tile, place = divmod(in_cache, model.config.tokens_per_tile)
        if tile < len(digests):
            masks = None if request.masks is None else request.masks[tile:]
            features, encoded = self.feature_cache.encode(request.tiles[tile:], masks, digests[tile:])
            features = features.flatten(0, 1)[place:][None]  # (N, S, D) -> (1, N · S - place, D)
        front = len(keys) - request.input_ids.shape[1]
        ids = request.input_ids[:, max(0, reused - front) :].to(model.device)
        return model.place_features(ids, model.language_model.embed_tokens(ids), features), encoded

    def _prefill_rest(self, embeddings: Tensor, keys: list[PositionKey], reused: int) -> Tensor:
        """Rewind to `reused` and compute the rest: logits (1, V) of the last position."""
        text = self.model.config.text
        if self._cache is None:
            room = min(kv.round_up(len(keys), kv.STEP), text.max_position_embeddings)
            self._cache = kv.allocate_for(
                text, 1, room, like=embeddings, dtype=self.model.language_model.cache_dtype
            )
        kv.grow(self._cache, len(keys), text.max_position_embeddings)
        start_pos = kv.rewind(self._cache, len(self._keys), reused)
        # At every moment the keys tell no more than the cache holds, wherever an interrupt may come.
        del self._keys[reused:]
        prompt = Prompt(embeddings, (embeddings.shape[1],))
        logits = prefill(self.model.language_model, prompt, self._cache, start_pos)
        self._keys += keys[reused:]
        return logits

    def _begin_turn(self) -> int:
        """The number of a new turn. What the last answer's steps have to put in order in the cache they do
        now, and not when somebody lets go of its stream."""
        self._turn += 1
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        return self._turn

    def _passing_on(
        self, steps: Generator[Tensor, None, Generated], turn: int, noting: bool
    ) -> Generator[Tensor, None, Generated]:
        """An answer's tokens. If they go into the session's cache (`noting`), note those that are in it: each
        once the next one is there, and so all but the last one."""
        last = None
        with closing(steps):
            while True:
                try:
                    token = next(steps)
                except StopIteration as end:
                    return end.value
                if noting and last is not None:
                    self._fed.append(last)
                last = token
                yield token
                if self._turn != turn:
                    raise ValueError(
                        "this answer was left unfinished when its session began another one or was reset: "
                        "it cannot be gone on with"
                    )

    def _read_back(self) -> None:
        """Token ids of the last answer, device to host: once a turn, not once a token."""
        fed, self._fed = self._fed, []
        if fed:
            self._keys += torch.cat(fed).tolist()


def common_prefix(first: Sequence[PositionKey], second: Sequence[PositionKey]) -> int:
    """How many positions two prompts share from the front."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)
