"""A question with a given answer: where its images' tokens lie, and how likely its own tokens are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.images import TiledImage, load_image
from inference.answer import TextStream, encode, prompt_tokens
from inference.checkpoint import Checkpoint, RequestError

_TILES_AT_ONCE = 16
_LOGITS_AT_ONCE = 8_388_608  # 32 MiB of float32


class ForcedAnswer:
    """Images, question and answer as tiles, ids and positions.

    images: upright RGB. tiled: the same as tiles. layouts: how the tiles lie on them.
    answer: its A token ids.
    prompt: P positions of images and question. The query at position P - 1 + t chooses answer token t.

    Raises:
        RequestError: no image, no answer, ids that the model does not have, too long for its context.
        PromptError, ImageError: the question or an image cannot be used.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        images: Sequence[Any],
        question: str,
        answer_ids: Sequence[int],
        system: str | None = None,
    ):
        config = checkpoint.model.config
        self.checkpoint, self.answer = checkpoint, [int(i) for i in answer_ids]
        if not images:
            raise RequestError("expected at least one image to look at, got none")
        if not self.answer or not 0 <= min(self.answer) <= max(self.answer) < config.text.vocab_size:
            got = self.answer or "none"
            raise RequestError(f"answer_ids: expected ids from 0 to {config.text.vocab_size - 1}, got {got}")
        self.images = [load_image(image) for image in images]
        self.tiled: list[TiledImage] = [checkpoint.processor.tile(image) for image in self.images]
        row = encode(checkpoint, self.tiled, question, system)
        self.prompt = prompt_tokens(checkpoint, row)
        if self.prompt + len(self.answer) > checkpoint.context:
            raise RequestError(
                f"context too long: expected at most {checkpoint.context} tokens, "
                f"got {self.prompt} of prompt and {len(self.answer)} of answer"
            )
        side = config.vision.grid // config.scale_factor
        whole_first = checkpoint.processor.images.whole_first
        self.layouts = [TileLayout.of(tiled, side, whole_first) for tiled in self.tiled]
        self._input_ids = torch.tensor([row.input_ids], device=checkpoint.model.device)  # (1, T)

    @property
    def queries(self) -> range:
        """Positions that chose the answer's tokens."""
        return range(self.prompt - 1, self.prompt - 1 + len(self.answer))

    @property
    def image_positions(self) -> Tensor:
        """Positions of the image tokens, tile by tile, (n · S,)."""
        config = self.checkpoint.model.config
        if config.image_placement == "prefix":
            return torch.arange(config.tokens_per_tile, device=self._input_ids.device)
        assert config.image_token_id is not None, "placeholders have an id"
        return (self._input_ids[0] == config.image_token_id).nonzero()[:, 0]

    @torch.no_grad()
    def features(self, tiles: Tensor) -> Tensor:
        """Tiles (n, 3, M, M) → image features (n, S, D), a few tiles at a time."""
        encode_images = self.checkpoint.model.encode_images
        return torch.cat([encode_images(part) for part in tiles.split(_TILES_AT_ONCE)])

    @torch.no_grad()
    def embed(self, features: Tensor) -> Tensor:
        """R versions of the image features (R, n, S, D) → prompt and answer (R, P + A - 1, D)."""
        model, versions = self.checkpoint.model, len(features)
        table = model.language_model.embed_tokens
        ids = self._input_ids.expand(versions, -1)
        x = model.place_features(ids, table(ids), features.flatten(0, 1))
        # The answer apart: if it holds the placeholder's id, that is no image.
        answer = torch.tensor(self.answer[:-1], dtype=torch.int64, device=ids.device)
        return torch.cat((x, table(answer).to(x.dtype).expand(versions, -1, -1)), dim=1)

    @torch.no_grad()
    def log_probabilities(self, features: Tensor) -> Tensor:
        """Of each answer token given those before it, (R, A) float32, for R versions of the features."""
        language_model = self.checkpoint.model.language_model
        hidden, _ = language_model(self.embed(features))
        hidden = hidden[:, self.queries.start :].flatten(0, 1)  # (R · A, D)
        targets = torch.tensor(self.answer, device=hidden.device).repeat(len(features))
        at_once = max(1, _LOGITS_AT_ONCE // language_model.config.vocab_size)
        parts = [
            language_model.logits(part).float().log_softmax(-1).gather(1, ids[:, None])
            for part, ids in zip(hidden.split(at_once), targets.split(at_once), strict=True)
        ]
        return torch.cat(parts).view(len(features), len(self.answer))


@dataclass(frozen=True)
class TileLayout:
    """How the tokens of an image's tiles lie on the image.

    A processor stretches an image to whole tiles and cuts it into rows and columns of them. Often the whole
    image, squeezed into one more tile, stands first or last. Nothing is cropped or padded, so tiles and their
    tokens' cells divide the image evenly: cell (i, j) of a map (h, w) covers the pixels from i / h to
    (i + 1) / h of its height and from j / w to (j + 1) / w of its width. (If patches do not fill a tile, as
    27 patches of 14 pixels in SmolVLM-2.2B's 384, cells are drawn at most 1.6 % of a tile too far out.)

    side: tokens along each side of a tile, after pixel shuffle.
    """

    rows: int
    columns: int
    side: int
    has_whole: bool
    whole_first: bool

    @classmethod
    def of(cls, image: TiledImage, side: int, whole_first: bool) -> TileLayout:
        rows, columns = max(1, image.rows), max(1, image.columns)
        return cls(rows, columns, side, len(image.tiles) > rows * columns, whole_first)

    @property
    def tiles(self) -> int:
        return self.rows * self.columns + self.has_whole

    @property
    def shape(self) -> tuple[int, int]:
        """(h, w) cells of a map."""
        return self.rows * self.side, self.columns * self.side

    def place(self, weights: Tensor) -> Tensor:
        """Weights of tokens (T, tiles · side²) → a map of the image (T, h, w) with the same sum.

        A token of a tile in the grid has one cell. A token of the whole image's tile is divided evenly among
        the rows · columns cells that it covers.
        """
        weights = weights.reshape(len(weights), self.tiles, self.side, self.side)
        whole, grid = None, weights
        if self.has_whole:
            whole = weights[:, 0 if self.whole_first else -1]
            grid = weights[:, 1:] if self.whole_first else weights[:, :-1]
        # (T, rows · columns, side, side) → (T, rows, side, columns, side) → (T, h, w)
        grid = grid.unflatten(1, (self.rows, self.columns)).transpose(2, 3)
        placed = grid.reshape(len(weights), *self.shape)
        if whole is not None:
            spread = whole.repeat_interleave(self.rows, 1).repeat_interleave(self.columns, 2)
            placed = placed + spread / (self.rows * self.columns)
        return placed


@dataclass(frozen=True)
class Word:
    """`text` without space in it, and the indices in the answer of the tokens that spell it."""

    text: str
    tokens: tuple[int, ...]


def answer_words(checkpoint: Checkpoint, token_ids: Sequence[int]) -> list[Word]:
    """The words of an answer up to its stop token.

    A token belongs to each word that it spells a character of. Tokens that spell one character together
    belong to the same word.
    """
    stream, stops = TextStream(checkpoint.processor.tokenizer), frozenset(checkpoint.stop_token_ids)
    text, incomplete = "", []
    spans: list[tuple[int, int, int]] = []  # (token, begin, end) in the text
    for index, token_id in enumerate(token_ids):
        if token_id in stops:
            break
        incomplete.append(index)
        if piece := stream.put(token_id):
            spans += [(token, len(text), len(text) + len(piece)) for token in incomplete]
            text, incomplete = text + piece, []
    rest = stream.finish()
    spans += [(token, len(text), len(text) + len(rest)) for token in incomplete]
    text += rest
    words = []
    for match in re.finditer(r"\S+", text):
        tokens = (token for token, begin, end in spans if begin < match.end() and end > match.start())
        words.append(Word(match[0], tuple(tokens)))
    return words
