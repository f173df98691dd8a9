"""A question with a given answer: where its images' tokens lie, and how likely its own tokens are.

All that takes long is done in short steps, none longer than a tile or a block of the decoder: a server
answers others between two of them. `drained` does the steps at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from data.images import load_image
from data.tiles import Cell, Parts, Visual
from inference.answer import encode
from inference.answer_text import TextStream
from inference.checkpoint import Checkpoint, RequestError
from models.language_model import At, DecoderBlock, LanguageModel, rope_tables

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Rope: TypeAlias = tuple[Tensor, Tensor]


def drained(steps: Steps[T]) -> T:
    """The result of steps, which are counted on stderr meanwhile if that is a terminal."""
    with tqdm(unit="step", disable=None, leave=False) as bar:
        while True:
            try:
                next(steps)
                bar.update()
            except StopIteration as end:
                return end.value


class ForcedAnswer:
    """Images, question and answer as tiles, ids and positions.

    Args:
        tiled: the images as tiles, if whoever asks has them.

    images: upright RGB. tiled: the same as tiles.
    answer: its A token ids.
    queries: the positions that chose them, each one before its token's own.
    places: rotary places of prompt and answer, (T + A - 1,), or (3, 1, T + A - 1) where they have three axes.

    Raises RequestError (no image, no answer, ids that the model does not have, too long for its context),
    PromptError, ImageError.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        images: Sequence[Any],
        question: str,
        answer_ids: Sequence[int],
        system: str | None = None,
        tiled: Sequence[Visual] | None = None,
    ):
        vocab = checkpoint.model.config.text.vocab_size
        self.checkpoint, self.answer = checkpoint, list(answer_ids)
        if not images:
            raise RequestError("expected at least one image to look at, got none")
        if not self.answer or not 0 <= min(self.answer) <= max(self.answer) < vocab:
            raise RequestError(f"answer_ids: expected ids from 0 to {vocab - 1}, got {self.answer}")
        self.images = [load_image(image) for image in images]
        self.tiled = list(tiled or map(checkpoint.processor.cut, self.images))
        row = encode(checkpoint, self.tiled, question, system)
        prompt = len(row.input_ids)
        if prompt + len(self.answer) > checkpoint.context:
            raise RequestError(
                f"context too long: expected at most {checkpoint.context} tokens, "
                f"got {prompt} of prompt and {len(self.answer)} of answer"
            )
        self.queries = range(prompt - 1, prompt - 1 + len(self.answer))
        self._input_ids = torch.tensor([row.input_ids], device=checkpoint.model.device)  # (1, T)
        self.places = torch.arange(prompt + len(self.answer) - 1, device=checkpoint.model.device)
        if found := checkpoint.model.places([torch.tensor(row.input_ids)], row.parts):
            of_prompt, offset = found[0]
            after = (self.places[prompt:] + offset).expand(3, -1)
            self.places = torch.cat((of_prompt.to(after.device), after), dim=1)[:, None]

    @property
    def image_positions(self) -> Tensor:
        """Positions of the image tokens, part by part, (P,)."""
        return (self._input_ids[0] == self.checkpoint.model.config.image_token_id).nonzero()[:, 0]

    def features(self) -> Steps[list[Tensor]]:
        """Those of each part of the images, from which the answer was made."""
        return self.encode([image.parts for image in self.tiled], keep=True)

    @torch.no_grad()
    def encode(self, images: Sequence[Parts], keep: bool = False) -> Steps[list[Tensor]]:
        """Parts → features of each, (its positions, D), every different part in a step. `keep`: as those of
        answers are kept, so that what was encoded for them is not encoded again."""
        kept, model = self.checkpoint.features, self.checkpoint.model
        parts, found = Parts.cat(images), dict[bytes, Tensor]()
        for place, digest in enumerate(parts.digests):
            if digest not in found:
                one = parts[place : place + 1]
                encoded = kept.encode(one, one.digests)[0] if keep else model.encode_images(one)
                found[digest] = encoded[0]
                yield
        return [found[digest] for digest in parts.digests]

    @torch.no_grad()
    def embed(self, features: Tensor) -> Tensor:
        """R versions of the image features (R, P, D) → prompt and answer (R, T + A - 1, D), wider where the
        first text layers are to add features (DeepStack)."""
        model, versions = self.checkpoint.model, len(features)
        ids = self._input_ids.expand(versions, -1)
        x = model.place_features(ids, features.flatten(0, 1))
        # The answer apart: if it holds the placeholder's id, that is no image.
        answer = torch.tensor(self.answer[:-1], dtype=torch.int64, device=ids.device)
        table = model.language_model.embed_tokens
        said = table(answer).to(x.dtype)
        said = pad(said, (0, x.shape[2] - said.shape[1])).expand(versions, -1, -1)
        return torch.cat((x, said), dim=1)

    @torch.no_grad()
    def log_probabilities(self, features: Tensor) -> Steps[Tensor]:
        """Those of each answer token, given the ones before it, (R, A) float32, for features (R, P, D)."""
        language_model = self.checkpoint.model.language_model
        hidden = yield from through_blocks(language_model, self.embed(features), self.places)
        scores = language_model.logits(hidden[:, self.queries.start :]).float().log_softmax(-1)  # (R, A, V)
        targets = torch.tensor(self.answer, device=scores.device)[:, None].expand(len(features), -1, -1)
        return scores.gather(2, targets)[..., 0]


@torch.no_grad()
def through_blocks(
    language_model: LanguageModel,
    x: Tensor,
    places: Tensor | None = None,
    see: Callable[[int, DecoderBlock, Rope, Tensor], None] = lambda *_: None,
) -> Steps[Tensor]:
    """The hidden states (B, T, D) of a whole text, embedded as x (B, T, D), a block in each step. `see` gets
    each block's number, the block and its input. `places` are those of `ForcedAnswer`."""
    if not isinstance(language_model.layers[0], DecoderBlock):  # it runs as a whole
        return language_model(x, position_ids=places)[0]
    slots = torch.arange(x.shape[1], device=x.device)
    turns = language_model.turns(slots if places is None else places)
    rope = rope_tables(language_model.inv_freq(x.device), turns, x.dtype)
    x, *deep = x.split(language_model.config.hidden_size, dim=-1)
    for index, block in enumerate(language_model.layers):
        assert isinstance(block, DecoderBlock), "layers are decoder blocks"
        see(index, block, rope, x)
        yield
        x = block(x, None, At(rope, None, 0, len(slots), slots))
        if index < len(deep):
            x = x + deep[index]
    return language_model.norm(x)


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
