"""Between nanoVLM and transformers: what a model's weights need besides other names.

- Pixels. nanoVLM's run from 0 to 1, Idefics3's from -1 to 1. The difference goes into the first convolution,
  W x + b = (W / 2)(2 x - 1) + (b + sum(W) / 2): halves and doubles are exact, the bias is rounded once.
  (Pixels of 0 to 1 would do in transformers too, but for black tiles: all zeros there, as padding is.)
- Placeholders. nanoVLM v0.1 has none; in transformers' layout `<image>` needs an id, and its processor three
  more names. Ids beyond the vocabulary get rows that are the mean of the old ones: their logits are means of
  logits, so no greedy answer changes.

Every function changes the model that it is given, in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from models.vision_language_model import VisionLanguageModel


@torch.no_grad()
def take_pixels_around_zero(model: VisionLanguageModel) -> None:
    """From pixels x in 0 … 1 to 2 x - 1."""
    _scale_pixels(model, 0.5)


@torch.no_grad()
def take_pixels_from_zero(model: VisionLanguageModel) -> None:
    """From pixels 2 x - 1 to x in 0 … 1: the way back."""
    _scale_pixels(model, 2.0)


def _scale_pixels(model: VisionLanguageModel, factor: float) -> None:
    """W -> factor W, and the bias that goes with it: 1/2 and b + sum(W) / 2, or 2 and b - sum(W)."""
    convolution = model.vision_model.patch_embedding
    assert convolution.bias is not None, "the patch embedding has a bias"
    weight = convolution.weight.data
    moved = (1 - factor) * weight.sum((1, 2, 3), dtype=torch.float64)
    convolution.bias.data += moved.to(weight.dtype)
    convolution.weight.data = factor * weight


@torch.no_grad()
def put_placeholders(model: VisionLanguageModel, image_token_id: int, vocab_size: int) -> None:
    """Images at `image_token_id`, in a vocabulary of `vocab_size` rows, at least as many as there are."""
    language_model, config = model.language_model, model.config
    embedding, head = language_model.embed_tokens, language_model.lm_head
    rows = vocab_size - config.text.vocab_size
    assert rows >= 0, f"the vocabulary has {config.text.vocab_size} rows, it cannot shrink to {vocab_size}"
    if rows:
        embedding.weight = _with_mean_rows(embedding.weight, rows)
        head.weight = embedding.weight if config.tie_word_embeddings else _with_mean_rows(head.weight, rows)
    model.config = replace(
        config,
        text=replace(config.text, vocab_size=vocab_size),
        image_placement="placeholder",
        image_token_id=image_token_id,
    )


def _with_mean_rows(weight: Tensor, rows: int) -> nn.Parameter:
    mean = weight.data.double().mean(0, keepdim=True).to(weight.dtype)
    return nn.Parameter(torch.cat((weight.data, mean.expand(rows, -1))))


@torch.no_grad()
def add_to_weights(model: VisionLanguageModel, updates: Mapping[str, Tensor]) -> None:
    """Add to parameters, by name."""
    for name, update in updates.items():
        parameter = model.get_parameter(name)
        parameter.data += update.to(parameter.dtype)
