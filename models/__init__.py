"""Ocelli's network: a ViT encoder, a pixel-shuffle projector and a grouped-query-attention language model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.config import RopeScaling, TextConfig, VisionConfig, VLMConfig
    from models.vision_language_model import VisionLanguageModel
    from models.whole_rows import VLMOutput

__version__ = "0.1.0"
__all__ = ["RopeScaling", "TextConfig", "VLMConfig", "VLMOutput", "VisionConfig", "VisionLanguageModel"]


def __getattr__(name: str):
    """Imported when first asked for: PyTorch takes seconds, and finding a checkpoint does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"VisionLanguageModel": "models.vision_language_model", "VLMOutput": "models.whole_rows"}
    return getattr(import_module(homes.get(name, "models.config")), name)
