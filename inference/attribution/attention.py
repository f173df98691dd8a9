"""Maps of the decoder's attention, for each token of the answer.

    found = drained(attention_steps(ForcedAnswer(checkpoint, ["photo.jpg"], "What is it?", answer_ids)))
    found.maps[0]                                       # (T, h, w): of the first image

Prompt and answer go through the decoder once more, block by block: the model that answers does not know about
it and computes no weights. What a head attends to is not why the answer came out as it did (Jain and Wallace,
"Attention is not Explanation", arXiv:1902.10186): compare it with `occlusion_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from inference.attribution.teacher_forcing import (
    ForcedAnswer,
    Rope,
    Steps,
    place_on_image,
    through_blocks,
)
from inference.checkpoint import Checkpoint, RequestError
from models.config import TextConfig
from models.language_model import Attention, DecoderBlock, LanguageModel


@dataclass(frozen=True)
class AttentionMaps:
    """Shares of attention, averaged over layers and heads.

    images: N of them, upright RGB.
    maps: for each image (T, h, w): the share of each answer token's attention that goes to each cell. The sum
        over all images' cells is what images get; text gets the rest of 1.
    """

    images: list[Image.Image]
    maps: list[np.ndarray]

    title = "The decoder's attention"
    setting = "all layers, all heads"
    scale = ("no attention", "most attention")
    note = "Attention is not explanation: it does not show what a word depends on."
    full_heat = 1e-9

    def of(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """For each image (h, w): the mean over some of the answer's tokens, given by their indices."""
        return [of_image[list(tokens)].mean(0) for of_image in self.maps]

    def caption(self, tokens: Sequence[int]) -> str:
        share = sum(float(of_image.sum()) for of_image in self.of(tokens))
        return f"{share:.0%} of it on the image{'s' * (len(self.maps) > 1)}"


def attention_steps(forced: ForcedAnswer) -> Steps[AttentionMaps]:
    """Each answer token's attention to the images' tokens, put in place on the images. A token's attention is
    that of the position before it, which chose it."""
    check_attention(forced.checkpoint)
    features = yield from forced.features()
    x = forced.embed(torch.cat(features)[None])
    rows = yield from attention_rows(forced.checkpoint.model.language_model, x, forced.queries, forced.places)
    counts = [image.positions for image in forced.tiled]
    by_image = rows[:, forced.image_positions].split(counts, dim=1)
    cells = forced.checkpoint.processor.images.cells
    maps = [place_on_image(weights, image, cells(image)) for weights, image in zip(by_image, forced.tiled)]
    return AttentionMaps(forced.images, [heat.cpu().numpy() for heat in maps])


@torch.no_grad()
def attention_rows(
    language_model: LanguageModel, x: Tensor, queries: Sequence[int], places: Tensor | None = None
) -> Steps[Tensor]:
    """The attention of Q positions of a text, embedded as x (1, T, D), averaged over the layers that have
    attention and their heads: (Q, T) float32, rows of sum 1."""
    chosen = attending(language_model.config)
    positions = torch.as_tensor(list(queries), device=x.device)
    total = torch.zeros(len(positions), x.shape[1], device=x.device)

    def see(index: int, block: DecoderBlock, rope: Rope, x: Tensor) -> None:
        if index in chosen:
            total.add_(_weights(block.self_attn, block.input_layernorm(x), rope, positions).mean(0))

    yield from through_blocks(language_model, x, places, see)
    return total / len(chosen)


def _weights(attention: Attention, x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """One layer's weights (H, Q, T) from the input of its attention, x (1, T, D)."""
    length, groups = x.shape[1], attention.num_heads // attention.num_kv_heads
    q, k, *_ = attention.project(x, rope)
    k = k.float().transpose(-1, -2)  # (1, H_kv, D_h, T)
    q = q[:, :, positions].float()  # (1, H, Q, D_h)
    q = q.unflatten(1, (attention.num_kv_heads, groups)).flatten(2, 3)  # a group's heads share their keys
    scores = (q @ k / math.sqrt(attention.head_dim)).view(attention.num_heads, len(positions), length)
    hidden = torch.arange(length, device=x.device) > positions[:, None]  # (Q, T)
    return scores.masked_fill_(hidden, -math.inf).softmax(-1)


def attending(text: TextConfig) -> list[int]:
    """The layers that mix positions by attention of the usual kind, and whose weights can be shown."""
    return [layer for layer in range(text.num_hidden_layers) if text.mixer(layer) == "attention"]


def check_attention(checkpoint: Checkpoint) -> None:
    """Raises RequestError if the model has no layer whose attention can be shown."""
    if not attending(checkpoint.model.config.text):
        raise RequestError(
            "attention maps: this family's layers are not read; occlusion shows what it looked at"
        )
