"""Maps of where a checkpoint's decoder attended, for each token of a given answer, and the answer's words.

    found = drained(attention_steps(checkpoint, ["photo.jpg"], "What is it?", answer_ids))
    found.maps[0]                                       # (T, h, w): of the first image

Prompt and answer go through the decoder once more, block by block: the model that answers does not know about
it and computes no weights. What a head attends to is not why the answer came out as it did (Jain and Wallace,
"Attention is not Explanation", arXiv:1902.10186).

All that takes long is done in short steps, none longer than a tile or a block of the decoder: a server
answers others between two of them. `drained` does the steps at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from data.images import load_image
from data.tiles import Cell, Visual
from inference.answer import encode
from inference.answer_text import TextStream
from inference.checkpoint import Checkpoint, RequestError
from models.config import TextConfig
from models.language_model import At, Attention, DecoderBlock, LanguageModel, rope_tables

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]


def drained(steps: Steps[T]) -> T:
    """The result of steps, which are counted on stderr meanwhile if that is a terminal."""
    with tqdm(unit="step", disable=None, leave=False) as bar:
        while True:
            try:
                next(steps)
                bar.update()
            except StopIteration as end:
                return end.value


@dataclass(frozen=True)
class AttentionMaps:
    """Shares of attention, averaged over layers and heads.

    images: N of them, upright RGB.
    maps: for each image (T, h, w): the share of each answer token's attention that goes to each cell. The sum
        over all images' cells is what images get; text gets the rest of 1.
    """

    images: list[Image.Image]
    maps: list[np.ndarray]

    def of(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """For each image (h, w): the mean over some of the answer's tokens, given by their indices."""
        return [of_image[list(tokens)].mean(0) for of_image in self.maps]


@torch.no_grad()
def attention_steps(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    answer_ids: Sequence[int],
    system: str | None = None,
    tiled: Sequence[Visual] | None = None,
) -> Steps[AttentionMaps]:
    """Each answer token's attention to the images' tokens, put in place on the images. A token's attention is
    that of the position before it, which chose it.

    Args:
        answer_ids: its A tokens.
        tiled: the images as tiles, if whoever asks has them.

    Raises RequestError (no image, no answer, ids that the model does not have, too long for its context, no
    layer whose attention can be shown), PromptError, ImageError.
    """
    check_attention(checkpoint)
    model, answer = checkpoint.model, list(answer_ids)
    vocab, device = model.config.text.vocab_size, model.device
    if not images:
        raise RequestError("expected at least one image to look at, got none")
    if not answer or not 0 <= min(answer) <= max(answer) < vocab:
        raise RequestError(f"answer_ids: expected ids from 0 to {vocab - 1}, got {answer}")
    shown = [load_image(image) for image in images]
    tiled = list(tiled or map(checkpoint.processor.cut, shown))
    row = encode(checkpoint, tiled, question, system)
    ids, prompt = torch.tensor([row.input_ids], device=device), len(row.input_ids)
    if prompt + len(answer) > checkpoint.context:
        raise RequestError(
            f"context too long: expected at most {checkpoint.context} tokens, "
            f"got {prompt} of prompt and {len(answer)} of answer"
        )
    features = list[Tensor]()  # of each part (its positions, D), those from which the answer was made
    for part in (one.parts[n : n + 1] for one in tiled for n in range(len(one.parts))):
        features += checkpoint.features.encode(part, part.digests)[0]
        yield
    x = model.place_features(ids, torch.cat(features))  # (1, T, D), wider with DeepStack
    # The answer apart: if it holds the placeholder's id, that is no image.
    said = model.language_model.embed_tokens(torch.tensor([answer[:-1]], dtype=torch.int64, device=device))
    x = torch.cat((x, pad(said.to(x.dtype), (0, x.shape[2] - said.shape[2]))), dim=1)  # (1, T + A - 1, D)
    places = torch.arange(x.shape[1], device=device)
    if found := model.places([torch.tensor(row.input_ids)], row.parts):
        of_prompt, offset = found[0]
        after = (places[prompt:] + offset).expand(3, -1)
        places = torch.cat((of_prompt.to(device), after), dim=1)[:, None]  # (3, 1, T + A - 1)
    rows = yield from attention_rows(model.language_model, x, range(prompt - 1, x.shape[1]), places)
    of_images = rows[:, :prompt][:, ids[0] == model.config.image_token_id]
    by_image = of_images.split([image.positions for image in tiled], dim=1)
    cells = checkpoint.processor.images.cells
    maps = [place_on_image(weights, image, cells(image)) for weights, image in zip(by_image, tiled)]
    return AttentionMaps(shown, [heat.cpu().numpy() for heat in maps])


@torch.no_grad()
def attention_rows(
    language_model: LanguageModel, x: Tensor, queries: Sequence[int], places: Tensor | None = None
) -> Steps[Tensor]:
    """The attention of Q positions of a text, embedded as x (1, T, D), averaged over the layers that have
    attention and their heads: (Q, T) float32, rows of sum 1. `places` are rotary ones, (T,) or (3, 1, T)."""
    chosen, slots = attending(language_model.config), torch.arange(x.shape[1], device=x.device)
    positions = torch.as_tensor(list(queries), device=x.device)
    total = torch.zeros(len(positions), len(slots), device=x.device)
    turns = language_model.turns(slots if places is None else places)
    rope = rope_tables(language_model.inv_freq(x.device), turns, x.dtype)
    x, *deep = x.split(language_model.config.hidden_size, dim=-1)
    for index, block in enumerate(language_model.layers):
        assert isinstance(block, DecoderBlock), "layers are decoder blocks"
        if index in chosen:
            total += _weights(block.self_attn, block.input_layernorm(x), rope, positions).mean(0)
        yield
        x = block(x, None, At(rope, None, 0, len(slots), slots))
        if index < len(deep):
            x = x + deep[index]
    return total / len(chosen)


def _weights(attention: Attention, x: Tensor, rope: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
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
            "attention maps: this family's layers are not read; take a model of another family"
        )


def place_on_image(weights: Tensor, image: Visual, cells: Sequence[Cell]) -> Tensor:
    """Weights of an image's tokens (T, P), part by part, → a map of the image (T, h, w) with the same sum.

    A processor stretches an image to whole tiles, without crop or padding, so cells divide the image evenly.
    (If patches do not fill a tile, as in SmolVLM-2.2B, they lie at most 1.6 % of a tile too far out.) `cells`
    are what each part shows. The map is as fine as the part that shows least; a token of another, such as the
    whole image, is divided among what it covers, by area.
    """
    shapes = [tuple(part.pixels.shape[1:]) for part in image.parts]
    pixels = sum(map(math.prod, shapes))
    grids = []  # of each part's tokens: as many as its share of the pixels
    for height, width in shapes:
        each = height * width * weights.shape[1] // pixels
        tall = math.isqrt(each * height // width)
        grids.append((tall, each // tall))
    _, (tall, across) = min((cell[2] - cell[0] + cell[3] - cell[1], grid) for cell, grid in zip(cells, grids))
    rows, columns = (max(cell[place] for cell in cells) for place in (2, 3))
    placed = weights.new_zeros(len(weights), rows * tall, columns * across)
    parts = weights.split([math.prod(grid) for grid in grids], dim=1)
    for part, grid, (top, left, bottom, right) in zip(parts, grids, cells, strict=True):
        within = placed[:, top * tall : bottom * tall, left * across : right * across]
        down, along = (_shares(*sides).to(weights) for sides in zip(within.shape[1:], grid))
        within += down @ part.unflatten(1, grid) @ along.T
    return placed


def _shares(cells: int, tokens: int) -> Tensor:
    """(cells, tokens): how much of each token lies in each cell, where both divide one length evenly."""
    cell, token = torch.arange(cells)[:, None], torch.arange(tokens)
    ends = torch.minimum((cell + 1) * tokens, (token + 1) * cells)
    return (ends - torch.maximum(cell * tokens, token * cells)).clamp(min=0) / cells


class Word(NamedTuple):
    """`text` without space in it, and the indices in the answer of the tokens that spell it."""

    text: str
    tokens: tuple[int, ...]


def answer_words(checkpoint: Checkpoint, token_ids: Sequence[int]) -> list[Word]:
    """The words of an answer up to its stop token. A token belongs to each word that it spells a character
    of, alone or together with its neighbours."""
    stream, stops = TextStream(checkpoint.processor.tokenizer), set(checkpoint.stop_token_ids)
    ids = list(takewhile(lambda token_id: token_id not in stops, token_ids))
    pieces = [stream.put(token_id) for token_id in ids]
    if pieces:
        pieces[-1] += stream.finish()
    text, first = "", 0
    spans: list[tuple[int, int, int]] = []  # (token, begin, end) in the text
    for index, piece in enumerate(pieces):
        if piece:  # which the tokens since the last piece spell together
            spans += [(token, len(text), len(text) + len(piece)) for token in range(first, index + 1)]
            text, first = text + piece, index + 1
    words = []
    for match in re.finditer(r"\S+", text):
        tokens = (token for token, begin, end in spans if begin < match.end() and end > match.start())
        words.append(Word(match[0], tuple(tokens)))
    return words
