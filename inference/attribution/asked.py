"""A question with the answer it got, to be gone through once more with nothing left to decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data.images import load_image
from data.inputs import TiledImage
from inference.answer import check_context, encode, prompt_tokens
from inference.attribution.layout import TileLayout
from inference.checkpoint import Checkpoint, RequestError

_TILES_AT_ONCE = 16
_LOGITS_AT_ONCE = 8_388_608  # 32 MiB of float32


class Asked:
    """Images, question and answer (teacher-forced), as ids, tiles and positions.

    images: as loaded, upright RGB.
    tiled: the same as tiles; layouts: how those lie.
    answer: its token ids, A of them.
    prompt: positions of images and question, P. The query at position P - 1 + t chooses answer token t.

    Raises:
        RequestError: no image, no answer, ids that the model does not have, too long for its context.
        PromptError, ImageError: question or image cannot be used.
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
        if not self.answer:
            raise RequestError("expected an answer of at least one token, got none")
        if not 0 <= min(self.answer) <= max(self.answer) < config.text.vocab_size:
            raise RequestError(
                f"answer_ids: expected ids from 0 to {config.text.vocab_size - 1}, "
                f"got {min(self.answer)} to {max(self.answer)}"
            )
        self.images = [load_image(image) for image in images]
        self.tiled: list[TiledImage] = [checkpoint.processor.tile(picture) for picture in self.images]
        row = encode(checkpoint, self.tiled, question, system)
        check_context(checkpoint, row, len(self.answer))
        side = config.vision.grid // config.scale_factor
        whole_first = checkpoint.processor.images.whole_first
        self.layouts = [TileLayout.of(tiled, side, whole_first) for tiled in self.tiled]
        self.prompt = prompt_tokens(checkpoint, row)
        self._input_ids = torch.tensor([row.input_ids], device=checkpoint.model.device)  # (1, T)

    @property
    def queries(self) -> range:
        """Positions that chose the answer's tokens."""
        return range(self.prompt - 1, self.prompt - 1 + len(self.answer))

    @property
    def image_places(self) -> Tensor:
        """Positions of the image tokens, tile by tile, (n · S,)."""
        config = self.checkpoint.model.config
        if config.image_placement == "prefix":
            return torch.arange(config.tokens_per_tile, device=self._input_ids.device)
        assert config.image_token_id is not None, "placeholders have an id"
        return (self._input_ids[0] == config.image_token_id).nonzero()[:, 0]

    def by_image(self, of_tokens: Tensor) -> list[Tensor]:
        """(T, n · S), a column an image token → for each image (T, tiles · S)."""
        per_tile = self.checkpoint.model.config.tokens_per_tile
        return list(of_tokens.split([layout.tiles * per_tile for layout in self.layouts], dim=1))

    @torch.no_grad()
    def features(self, tiles: Tensor) -> Tensor:
        """Tiles (n, 3, M, M) → what the decoder sees of them, (n, S, D); a few at a time."""
        encode_images = self.checkpoint.model.encode_images
        return torch.cat([encode_images(part) for part in tiles.split(_TILES_AT_ONCE)])

    @torch.no_grad()
    def embed(self, features: Tensor) -> Tensor:
        """Pictures' features (R, n, S, D), R versions of them → prompt and answer (R, P + A - 1, D)."""
        model, versions = self.checkpoint.model, len(features)
        table = model.language_model.embed_tokens
        ids = self._input_ids.expand(versions, -1)
        x = model.place_features(ids, table(ids), features.flatten(0, 1))
        # By themselves: an answer may hold the placeholder's id, which is no image there.
        said = torch.tensor(self.answer[:-1], dtype=torch.int64, device=ids.device)
        return torch.cat((x, table(said).to(x.dtype).expand(versions, -1, -1)), dim=1)

    @torch.no_grad()
    def log_probabilities(self, features: Tensor) -> Tensor:
        """Of each answer token given those before it, (R, A) float32, for R versions of the features."""
        language_model = self.checkpoint.model.language_model
        hidden, _ = language_model(self.embed(features))
        hidden = hidden[:, self.queries.start :].flatten(0, 1)  # (R · A, D)
        wanted = torch.tensor(self.answer, device=hidden.device).repeat(len(features))
        at_once = max(1, _LOGITS_AT_ONCE // language_model.config.vocab_size)
        parts = [
            language_model.logits(part).float().log_softmax(-1).gather(1, ids[:, None])
            for part, ids in zip(hidden.split(at_once), wanted.split(at_once), strict=True)
        ]
        return torch.cat(parts).view(len(features), len(self.answer))
