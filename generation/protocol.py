"""What generation needs of a model; `models` has the implementation."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Decoder(Protocol):
    """A language model: embeddings in, hidden states out, logits by a call of their own."""

    config: Any  # models.config.TextConfig
    embed_tokens: Any  # ids (B, T) -> (B, T, D)
    norm: Any  # its weight says where the model is

    @property
    def cache_dtype(self) -> torch.dtype: ...
    def __call__(
        self, x: Tensor, *, kv_cache: Any = None, start_pos: int | Tensor = 0
    ) -> tuple[Tensor, Any]: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class VisionLanguage(Protocol):
    """A `Decoder` with images."""

    config: Any  # models.config.VLMConfig, as wherever generation/ says config
    language_model: Any  # a Decoder

    @property
    def device(self) -> torch.device: ...

    @staticmethod
    def tiles_of_rows(
        pixel_values: Tensor, pixel_attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, list[int] | None]: ...

    def check_placeholders(
        self, input_ids: Tensor, tiles: int | None, row_tiles: list[int] | None = None
    ) -> None: ...

    def embed(
        self, input_ids: Tensor, pixel_values: Tensor | None, pixel_attention_mask: Tensor | None
    ) -> Tensor: ...
    def encode_images(self, pixel_values: Tensor, pixel_attention_mask: Tensor | None) -> Tensor: ...
    def place_features(self, input_ids: Tensor, x: Tensor, features: Tensor | None) -> Tensor: ...
