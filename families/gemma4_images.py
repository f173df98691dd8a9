"""Images of Gemma 4: whole, in their own shape, as large as a number of positions allows.

The rule is bit for bit that of transformers' Gemma4ImageProcessor (its PIL backend).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from data.chat import chat_template
from data.errors import ProcessorError
from data.tiles import Visual
from data.tokenizer import AnyTokenizer, image_settings, open_with
from families.qwen_images import QwenImages
from families.saving import SavedProcessor
from models.checkpoints.files import Opened

# Names of the placeholder and of the tokens around it in tokenizer_config.json, and their usual texts.
_TOKENS = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
_POSITIONS = (70, 140, 280, 560, 1120)  # that transformers lets an image have
# Gemma4ImageProcessor's own, where a file does not say: pixels in 0 … 1, which the tower shifts.
_DEFAULTS: dict[str, Any] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 280,
    "image_mean": [0.0] * 3,
    "image_std": [1.0] * 3,
}


class Gemma4Images(QwenImages):
    """The rule of transformers' Gemma4ImageProcessor. `settings` are those of preprocessor_config.json,
    `tokens` as of `_TOKENS`."""

    def __init__(self, settings: Mapping[str, Any], tokens: Mapping[str, str]):
        known: dict[str, Any] = _DEFAULTS | {name: one for name, one in settings.items() if one is not None}
        side = known["patch_size"] * known["pooling_kernel_size"]
        most = known["max_soft_tokens"] * side**2
        known["merge_size"] = known["pooling_kernel_size"]
        super().__init__(known | {"size": {"shortest_edge": side**2, "longest_edge": most}})
        self.settings, self.tokens, self.image_token = dict(settings), dict(tokens), tokens["image_token"]

    def transformers(self, tokenizer: Any, chat_template: str) -> SavedProcessor:
        settings = {"image_processor": self.settings}
        return SavedProcessor(tokenizer, chat_template, self.image_token, settings, roles=self.tokens)

    def within(self, positions: int) -> Gemma4Images:
        if not (most := max((one for one in _POSITIONS if one <= positions), default=0)):
            raise ProcessorError(f"expected at least {_POSITIONS[0]}, got {positions}")
        return Gemma4Images(self.settings | {"max_soft_tokens": most}, self.tokens)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of positions: the most that keep the image's shape within the budget."""
        positions = self.budget // self.factor**2
        by = math.sqrt(positions * self.factor**2 / (height * width))
        rows, columns = (math.floor(by * side / self.factor) for side in (height, width))
        if not rows:
            return 1, min(width // height, positions)
        if not columns:
            return min(height // width, positions), 1
        return rows, columns

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        return f"{self.tokens['boi_token']}{self.image_token * visual.positions}{self.tokens['eoi_token']}"


def open_images(opened: Opened) -> tuple[Gemma4Images, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint."""
    said = opened.json("tokenizer_config.json")
    more = said.get("extra_special_tokens")  # or a list of tokens without names
    said = said | (more if isinstance(more, dict) else {})
    tokens = {name: str(said.get(name) or default) for name, default in _TOKENS.items()}
    tokenizer = open_with(opened, (*tokens.values(),))
    return Gemma4Images(image_settings(opened), tokens), tokenizer, chat_template(opened)
