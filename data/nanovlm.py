"""Images the nanoVLM way: its resize, its tiles, no normalisation, and its prompts, in three generations.

| generation | told by | image | prompt |
|---|---|---|---|
| v0.1 (May 2025) | no `vlm_extra_tokens` | one square, bilinear | features stand in front of the text |
| placeholders | `vlm_extra_tokens`, no `max_img_size` | one square, bilinear | `<|image|>` x n |
| tiles (today) | `max_img_size` | bicubic grid of tiles, the whole image first | below |

Values are pixel / 255 with no mean or deviation, so a black tile is zero: tiles go to the model as
(N, 3, M, M), where nothing is padding.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from data.chat import CHATML_TEMPLATE, V01_TEMPLATE, Message, tokenizer_template
from data.errors import ProcessorError, PromptError
from data.tiles import Tiles
from data.tokenizer import AnyTokenizer, check_files, folder_of, open_tokenizer

_VALUES = (torch.arange(256).float() / 255).expand(3, -1).contiguous()  # what a byte stands for
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class NanoVLMImages:
    """How a nanoVLM checkpoint (its config.json as a dict) cuts images and writes them into a prompt."""

    string_content = True
    whole_first = True
    uncut = 1, 1
    flat = True
    resizes = True

    def __init__(self, config: dict[str, Any], tokenizer: AnyTokenizer):
        # Absent keys are what `models.checkpoints.nanovlm` takes them to be.
        self.tile_size: int = config.get("vit_img_size", 224)
        patch, factor = config.get("vit_patch_size", 16), config.get("mp_pixel_shuffle_factor", 2)
        grid = self.tile_size // patch // factor
        self.tokens_per_tile: int = config.get("mp_image_token_length", grid**2)
        extra = config.get("vlm_extra_tokens") or {}
        self.image_token: str | None = extra.get("image_token")
        self.global_token: str | None = extra.get("global_image_token")
        self.max_side: int | None = config.get("max_img_size")
        self.longest_side: int = self.tile_size if self.max_side is None else self.max_side
        self.to_max_side = bool(config.get("resize_to_max_side_len", False))
        self.prefix = not extra
        self.add_special_tokens = self.prefix  # as nanoVLM: a template's output is tokenized as it stands
        if extra and self.image_token is None:
            raise PromptError("config.json: vlm_extra_tokens has no image_token")
        self._known = tokenizer.get_added_vocab()

    def normalise_messages(self, messages: list[Message], label: str) -> list[Message]:
        """All images in front of the first user text, as in training. v0.1: one question about one image."""
        images = [part for message in messages for part in message.parts if part[0] == "image"]
        if self.prefix:
            roles = [message.role for message in messages]
            if roles not in (["user"], ["user", "assistant"]) or len(images) != 1:
                raise PromptError(
                    f"{label}: a nanoVLM v0.1 model takes one image and one question, got "
                    f"{len(images)} images and messages from {', '.join(roles)}"
                )
        text = [
            Message(message.role, tuple(part for part in message.parts if part[0] == "text"))
            for message in messages
        ]
        if images:
            first = next((i for i, message in enumerate(text) if message.role == "user"), None)
            if first is None:
                raise PromptError(f"{label}: images need a user message to stand in front of")
            text[first] = Message("user", (*images, *text[first].parts))
        return text

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """What `tiles` makes of an image of this size: (n, rows, columns)."""
        if self.max_side is None:
            return 1, 1, 1
        height, width = resized_size(height, width, self.tile_size, self.max_side, self.to_max_side)
        if height % self.tile_size or width % self.tile_size:
            raise ProcessorError(
                "config.json: expected max_img_size to be a multiple of vit_img_size "
                f"({self.tile_size}), got {self.max_side}"
            )
        rows, cols = height // self.tile_size, width // self.tile_size
        whole = self.global_token is not None and (rows, cols) != (1, 1)
        return rows * cols + whole, rows, cols

    def tiles(self, image: Image.Image) -> tuple[Tiles, int, int]:
        """An RGB image → tiles (n, 3, M, M) from 0 to 1 with the whole image first, and their rows and
        columns (1, 1 where there is one tile)."""
        size = self.tile_size
        if self.max_side is None:
            pixels = _to_bytes(image.resize((size, size), Image.Resampling.BILINEAR))  # (3, M, M)
            return Tiles.of(pixels[None], _VALUES), 1, 1
        height, width = resized_size(image.height, image.width, size, self.max_side, self.to_max_side)
        pixels = _to_bytes(image.resize((width, height), Image.Resampling.BICUBIC))  # (3, H, W)
        rows, cols = height // size, width // size
        grid = pixels.view(3, rows, size, cols, size).permute(1, 3, 0, 2, 4).reshape(-1, 3, size, size)
        tiles = Tiles.of(grid, _VALUES)
        if (rows, cols) == (1, 1) or self.global_token is None:
            return tiles, rows, cols
        whole = F.interpolate(pixels[None].float() / 255, (size, size), mode="bilinear", antialias=True)
        return Tiles.cat((Tiles.of(whole), tiles)), rows, cols

    def prompt(self, rows: int, cols: int, index: int, count: int) -> str:
        """What stands in a prompt for image `index` of `count`."""
        if self.image_token is None:  # v0.1: the features stand in front of the text
            return ""
        tile = self.image_token * self.tokens_per_tile
        if self.max_side is None:
            return tile
        if (rows, cols) != (1, 1) and f"<row_{rows}_col_{cols}>" not in self._known:
            raise PromptError(f"the image makes {rows} x {cols} tiles, more than the tokenizer has names for")
        numbered = f"<image: {index}>" if count > 1 else ""
        cells = "".join(f"<row_{r}_col_{c}>{tile}" for r in range(1, rows + 1) for c in range(1, cols + 1))
        if self.global_token is None:
            return numbered + cells
        return numbered + self.global_token + tile + ("" if (rows, cols) == (1, 1) else cells)


def resized_size(height: int, width: int, tile: int, max_side: int, to_max_side: bool) -> tuple[int, int]:
    """nanoVLM's (height, width), multiples of `tile`.

    The order of the floating-point operations is nanoVLM's: for some sizes the rounding adds a row of tiles
    that exact arithmetic would not, and the checkpoints were trained with it.
    """
    long, short = max(height, width), min(height, width)
    new_long = max_side if to_max_side else min(max_side, math.ceil(long / tile) * tile)
    scale = new_long / long
    new_short = max(math.ceil(short * scale / tile) * tile, tile)
    return (new_short, new_long) if width >= height else (new_long, new_short)


def open_nanovlm(folder: Path, config: dict[str, Any]) -> tuple[NanoVLMImages, AnyTokenizer, str]:
    """The image rules, tokenizer and chat template of a nanoVLM checkpoint.

    `lm_tokenizer` names a folder inside the checkpoint or a repository on the Hub. The extra tokens are added
    where absent, in the config's order, so that they get the ids the model was trained with.
    """
    named = str(config.get("lm_tokenizer", ""))
    if not _REPO_ID.fullmatch(named):
        raise PromptError(f"config.json: expected lm_tokenizer to name a folder or repository, got {named!r}")
    place = folder if (folder / "tokenizer.json").is_file() else folder / named
    if not place.is_dir():
        place = folder_of(named)
    for holds in {folder, place}:
        check_files(holds)
    tokenizer = open_tokenizer(place)
    extra = config.get("vlm_extra_tokens") or {}
    absent = [token for token in extra.values() if token not in tokenizer.get_vocab()]
    if absent:
        tokenizer.add_special_tokens({"additional_special_tokens": absent}, False)
    template = config.get("lm_chat_template") or tokenizer_template(place) or CHATML_TEMPLATE
    return NanoVLMImages(config, tokenizer), tokenizer, template if extra else V01_TEMPLATE


def _to_bytes(image: Image.Image) -> Tensor:
    """RGB image → (3, H, W) uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
