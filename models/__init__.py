"""Ocelli's network: a ViT encoder, a pixel-shuffle projector and a grouped-query-attention language model."""

from models.config import RopeScaling, TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel, VLMOutput

__all__ = ["RopeScaling", "TextConfig", "VLMConfig", "VLMOutput", "VisionConfig", "VisionLanguageModel"]
