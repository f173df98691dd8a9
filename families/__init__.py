"""Families of checkpoints: a module for each, with all that is its own.

A model finds its family by its config, `FAMILIES[config.family]`, a checkpoint by its config.json. Nothing
outside of this folder knows one by name. docs/add-a-family.md lists the members of a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from families import gemma4, idefics3, internvl, lfm2_vl, minicpm_v, nanovlm, paddleocr_vl, qwen3_5, qwen_vl

_ALL = idefics3, nanovlm, internvl, qwen_vl, qwen3_5, lfm2_vl, gemma4, paddleocr_vl, minicpm_v
FAMILIES: dict[str, ModuleType] = {family.NAME: family for family in _ALL} | {internvl.QIANFAN: internvl}
# The family of models that are made here, and of a processor's folder without a model.
NEW = idefics3


def family_of(config: Mapping) -> ModuleType | None:
    """The family of a config.json, by its model_type; nanoVLM's has none."""
    kind = config.get("model_type") or (nanovlm.NAME if "vit_hidden_dim" in config else None)
    return next((family for family in FAMILIES.values() if kind in family.MODEL_TYPES), None)
