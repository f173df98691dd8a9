"""Where the decoder's attention went, token of the answer by token.

    found = attention_maps(checkpoint, ["photo.jpg"], "What is it?", answer_ids)
    found.maps[0]                                       # (T, h, w): of the first image

Prompt and answer go through the decoder once more, block by block, in a pass of its own: what makes answers
knows nothing of it, and computes no weights. What a head attends to is not why an answer came out as it did
(Jain and Wallace, "Attention is not Explanation", arXiv:1902.10186): hold it against `occlusion_maps`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inference.attribution.asked import Asked
from inference.attribution.maps import AttentionMaps
from inference.checkpoint import Checkpoint, RequestError
from models.language_model import Attention, DecoderBlock, LanguageModel, apply_rope, rope_tables

_WEIGHTS_AT_ONCE = 4_194_304  # 16 MiB of float32


def attention_maps(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    answer_ids: Sequence[int],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    system: str | None = None,
) -> AttentionMaps:
    """Each answer token's attention to the images' tokens, put back in place on the images.

    Args:
        images: at least one, anything that `load_image` takes.
        answer_ids: T token ids of the answer. Its attention is that of the position that chose it, which is
            the one before it.
        layers, heads: counted from 0, which to average over; None is all.

    Returns:
        maps of (T, h, w) for each image.

    Raises:
        RequestError: no image, no answer, a layer or head that there is not, too long for the context.
        PromptError, ImageError: question or image cannot be used.
    """
    text = checkpoint.model.config.text
    check_choice("layers", layers, text.num_hidden_layers)
    check_choice("heads", heads, text.num_attention_heads)
    asked = Asked(checkpoint, images, question, answer_ids, system)
    tiles = torch.cat([image.tiles for image in asked.tiled])
    x = asked.embed(asked.features(tiles)[None])
    rows = attention_rows(checkpoint.model.language_model, x, asked.queries, layers, heads)
    by_image = asked.by_image(rows[:, asked.image_places])
    placed = [layout.place(own) for layout, own in zip(asked.layouts, by_image, strict=True)]
    setting = f"{_in_words('layer', layers)}, {_in_words('head', heads)}"
    return AttentionMaps(asked.images, asked.answer, [own.cpu().numpy() for own in placed], setting)


@torch.no_grad()
def attention_rows(
    language_model: LanguageModel,
    x: Tensor,
    queries: Sequence[int],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Tensor:
    """What some positions attend to, averaged over layers and heads: (Q, T) float32, rows of sum 1.

    Args:
        x: (1, T, D) embeddings of the whole text.
        queries: Q positions in it.

    Blocks after the last layer asked for are left out, and at most 16 MiB of weights exist at a time.
    """
    layers = range(len(language_model.layers)) if layers is None else sorted(set(layers))
    places = torch.as_tensor(list(queries), device=x.device)
    rope = rope_tables(language_model.inv_freq(x.device), torch.arange(x.shape[1], device=x.device), x.dtype)
    total = torch.zeros(len(places), x.shape[1], device=x.device)
    for index, block in enumerate(list(language_model.layers)[: layers[-1] + 1]):
        assert isinstance(block, DecoderBlock), f"expected a Llama-style block, got {type(block).__name__}"
        if index in layers:
            total += _layer_rows(block.self_attn, block.input_layernorm(x), rope, places, heads)
        x = block(x, rope, None, None, 0, x.shape[1])
    return total / len(layers)


def _layer_rows(
    attention: Attention,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    places: Tensor,
    heads: Sequence[int] | None,
) -> Tensor:
    """One layer's part of `attention_rows`, (Q, T), from what goes into its attention, x (1, T, D)."""
    length, groups = x.shape[1], attention.num_heads // attention.num_kv_heads
    k = attention.k_proj(x).view(1, length, attention.num_kv_heads, attention.head_dim).transpose(1, 2)
    k = apply_rope(k, *rope).float().transpose(-1, -2)  # (1, H_kv, D_h, T)
    keys = torch.arange(length, device=x.device)
    rows = []
    for part in places.split(max(1, _WEIGHTS_AT_ONCE // (attention.num_heads * length))):
        q = attention.q_proj(x[:, part]).view(1, len(part), attention.num_heads, attention.head_dim)
        q = apply_rope(q.transpose(1, 2), *(table[:, :, part] for table in rope)).float()  # (1, H, Q, D_h)
        q = q.unflatten(1, (attention.num_kv_heads, groups)).flatten(2, 3)  # a group's heads share their keys
        scores = q @ k / math.sqrt(attention.head_dim)  # (1, H_kv, groups · Q, T)
        scores = scores.view(attention.num_heads, len(part), length)
        weights = scores.masked_fill_(keys > part[:, None], -math.inf).softmax(-1)
        rows.append((weights if heads is None else weights[sorted(set(heads))]).mean(0))
    return torch.cat(rows)


def check_choice(what: str, chosen: Sequence[int] | None, count: int) -> None:
    """Raises RequestError unless `chosen` is None or some of the first `count` integers."""
    if chosen is not None and not (chosen and all(0 <= one < count for one in chosen)):
        got = ", ".join(map(str, chosen)) or "none"
        raise RequestError(f"{what}: expected some of 0 to {count - 1}, got {got}")


def _in_words(what: str, chosen: Sequence[int] | None) -> str:
    if chosen is None:
        return f"all {what}s"
    return f"{what}{'s' * (len(set(chosen)) > 1)} {', '.join(map(str, sorted(set(chosen))))}"
