"""What a scheduler is asked and answers, and requests made ready: checked, positions known by content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from generation.decoding import GenerationOptions
from generation.feature_cache import tile_digests
from generation.options import MAX_SEED, SamplingParams
from generation.prompt import prompt_lengths, real_tiles

SHARE_FROM = 32  # positions of text that are worth sharing; an image always is
_MANY_TILES = 65_536  # digests remembered


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and what is wanted of it.

    input_ids: (T,) int64, without padding.
    pixel_values: (n, 3, H, W) or (1, n, 3, H, W) as processors pad them, or None.
    pixel_attention_mask: (n, H, W) or (1, n, H, W), or None.
    options: for this request; of several answers, each is a request of its own with a seed of its own.
    key: comes back with the result.
    digests: `tile_digests` of the tiles, where the caller has them from an earlier request already.
    """

    input_ids: Tensor
    pixel_values: Tensor | None = None
    pixel_attention_mask: Tensor | None = None
    options: GenerationOptions = field(default_factory=GenerationOptions)
    key: Any = None
    digests: Sequence[bytes] | None = None


@dataclass(frozen=True, eq=False)
class Deferred:
    """A request that is made when a slot is free for it. `prepare` may raise ValueError or OSError."""

    key: Any
    prepare: Callable[[], Request]


@dataclass(frozen=True)
class Completed:
    """What came of a request.

    token_ids: with the stop token; empty where there is an error.
    stop_reason: "stop", "length" or "error".
    prompt_tokens: positions of the prompt, images included; 0 where there is an error.
    reused_tokens: how many of them were taken from another prompt.
    error: what was wrong with this request, or None.
    """

    key: Any
    token_ids: list[int]
    stop_reason: str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    error: Exception | None = None


def each_answer(options: GenerationOptions) -> list[GenerationOptions]:
    """Options of `num_return_sequences` requests that get what `model.generate` gives with these options."""
    count, seed = options.num_return_sequences, options.seed
    seeds = [None if seed is None else (seed + answer) % MAX_SEED for answer in range(count)]
    return [replace(options, num_return_sequences=1, decode_step=None, seed=own) for own in seeds]


@dataclass(eq=False)
class Row:
    """A request in work: `keys` (L,) tells its prompt's positions from any other's, tiles below 0."""

    key: Any
    options: GenerationOptions
    params: SamplingParams
    input_ids: Tensor
    tiles: Tensor | None
    masks: Tensor | None
    digests: list[bytes]
    keys: Tensor
    slot: int = -1
    reused: int = 0
    rest: Tensor | None = None  # (1, L - reused, D), until it is prefilled
    tokens: list[int] = field(default_factory=list)
    seed: int | None = None  # what it draws with, once it has drawn
    seen: Tensor | None = None  # (V,) bool, where there is a repetition penalty

    @property
    def prompt(self) -> int:
        return len(self.keys)

    @property
    def position(self) -> int:
        """Where the last chosen token goes."""
        return self.prompt + len(self.tokens) - 1

    def gains(self, start: int, end: int) -> bool:
        """Whether having positions start … end - 1 for nothing is worth an arrangement."""
        return end - start >= SHARE_FROM or bool((self.keys[start:end] < 0).any())


class RequestReader:
    """Makes rows of requests.

    Args:
        model: a `VisionLanguageModel`.
        context: positions that prompt and answer may take.
    """

    def __init__(self, model, context: int):
        self._config, self._context = model.config, context
        self._check_places = model.check_places
        self._params: dict[SamplingParams, SamplingParams] = {}
        self._tile_ids: dict[bytes, int] = {}
        self._next_tile_id = -1

    def read(self, request: Request) -> Row:
        """Refuse what cannot be done, before any work.

        Raises:
            ValueError: shapes, ids or options that cannot be, images and placeholders that do not fit each
                other, prompt and answer longer than the context.
        """
        config, options, ids = self._config, request.options, request.input_ids.cpu()
        if options.num_return_sequences != 1 or not options.use_cache or options.decode_step is not None:
            raise ValueError(
                "a request cannot have num_return_sequences, use_cache or decode_step: "
                "make one for each answer, and give the scheduler the decode step"
            )
        if options.stop_token_ids is None:
            options = replace(options, stop_token_ids=tuple(config.eos_token_ids))
        tiles = masks = None
        if request.pixel_values is not None and request.pixel_values.numel():
            tiles, masks = real_tiles(request.pixel_values, request.pixel_attention_mask)
            self._check_tiles(tiles, masks)
        self._check_ids(ids)
        in_front = config.tokens_per_tile if config.image_placement == "prefix" and tiles is not None else 0
        prompt_lengths(ids[None], None, in_front, options.max_new_tokens, self._context)
        self._check_places(ids[None], None if tiles is None else len(tiles), config.tokens_per_tile)
        digests = self._digests(request, tiles, masks)
        keys = self._position_keys(ids, digests)
        return Row(request.key, options, self._sampling(options), ids, tiles, masks, digests, keys)

    def _sampling(self, options: GenerationOptions) -> SamplingParams:
        """Without the seed, and the same object for all rows that can be sampled together."""
        if options.greedy:
            params = SamplingParams(repetition_penalty=options.repetition_penalty)
        else:
            names = SamplingParams.__dataclass_fields__
            params = replace(SamplingParams(**{name: getattr(options, name) for name in names}), seed=None)
        return self._params.setdefault(params, params)

    @staticmethod
    def _digests(request: Request, tiles: Tensor | None, masks: Tensor | None) -> list[bytes]:
        if tiles is None:
            return []
        if request.digests is None:
            return tile_digests(tiles, masks)
        if len(request.digests) != len(tiles):
            raise ValueError(
                f"digests: expected one for each of {len(tiles)} tiles, got {len(request.digests)}"
            )
        return list(request.digests)

    def _check_ids(self, ids: Tensor) -> None:
        vocab = self._config.text.vocab_size
        if ids.dim() != 1 or ids.numel() == 0 or ids.dtype != torch.int64:
            raise ValueError(
                f"input_ids: expected (T,) int64 with at least one token, got {tuple(ids.shape)} {ids.dtype}"
            )
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(
                f"input_ids: expected 0 to {vocab - 1}, got {int(ids.min())} to {int(ids.max())}"
            )

    def _check_tiles(self, tiles: Tensor, masks: Tensor | None) -> None:
        vision = self._config.vision
        expected = (vision.num_channels, vision.image_size, vision.image_size)
        if tuple(tiles.shape[1:]) != expected:
            raise ValueError(f"pixel_values: expected tiles of {expected}, got {tuple(tiles.shape[1:])}")
        if masks is not None and masks.shape != (len(tiles), *expected[1:]):
            raise ValueError(
                f"pixel_attention_mask: expected {(len(tiles), *expected[1:])}, got {tuple(masks.shape)}"
            )

    def _position_keys(self, ids: Tensor, digests: list[bytes]) -> Tensor:
        """(L,) int64: a token's id, or a number below 0 for the tile at an image's position."""
        config = self._config
        if len(self._tile_ids) > _MANY_TILES:
            self._tile_ids.clear()  # numbers are not used twice: a tile that comes again is just not known
        for digest in digests:
            if digest not in self._tile_ids:
                self._tile_ids[digest], self._next_tile_id = self._next_tile_id, self._next_tile_id - 1
        tiles = torch.tensor([self._tile_ids[digest] for digest in digests], dtype=torch.int64)
        tiles = tiles.repeat_interleave(config.tokens_per_tile)
        if config.image_placement == "prefix":
            return torch.cat((tiles, ids))
        return ids.masked_scatter(ids == config.image_token_id, tiles)
