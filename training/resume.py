"""Settings of a resumed run: which of them may differ from those that it was saved with."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from training.config import TrainConfig, flag

# A state's weights, averages and momenta are of this model, with these optimizers; data that differ are
# refused by the loader, which knows what decides the order of rows.
_SOURCES = ("init_from", "vision_from", "text_from")
_FIXED = (
    *_SOURCES,
    *("lora_rank", "lora_targets", "muon"),
    *("vision_width", "vision_layers", "vision_heads", "image_size", "patch_size", "scale_factor"),
    *("text_width", "text_layers", "text_heads", "text_kv_heads", "text_inner", "vocab_size", "longest_edge"),
)
_OF_THIS_CALL = ("output", "resume")
_LONGEST = 60  # characters of a value that is shown


def differences(saved: Mapping[str, Any], config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Setting -> what it was and what it is, of those that differ; what was not saved had its default."""
    defaults = {item.name: item.default for item in dataclasses.fields(TrainConfig)}
    was, now = defaults | dict(saved), config.to_dict()
    return {
        name: (was[name], now[name])
        for name in defaults
        if name not in _OF_THIS_CALL and not _same(name, was[name], now[name])
    }


def _same(name: str, was: Any, now: Any) -> bool:
    if name in _SOURCES and was and now:  # a folder by another of its names
        return os.path.realpath(was) == os.path.realpath(now)
    return was == now


def fixed_differences(saved: Mapping[str, Any], config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Those with which a saved state cannot be resumed."""
    changed = differences(saved, config)
    fixed = {name: change for name, change in changed.items() if name in _FIXED}
    if "ema" in changed and 0 in changed["ema"]:
        fixed["ema"] = changed["ema"]
    known = {item.name for item in dataclasses.fields(TrainConfig)}
    before = TrainConfig(**{name: value for name, value in saved.items() if name in known})
    if before.is_shapes != config.is_shapes:
        fixed["data"] = changed["data"]
    for name, part in (
        ("lr", "language_model"),
        ("vision_lr", "vision_model"),
        ("projector_lr", "projector"),
    ):
        if bool(before.rates[part]) != bool(config.rates[part]):
            fixed[name] = (before.rates[part], config.rates[part])
    return fixed


def in_words(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """ "--lr 0.1 -> 0.2, --data" where values are too long to be shown."""
    shown = []
    for name, (was, now) in changes.items():
        values = f"{was!r} -> {now!r}" if isinstance(was, str) else f"{was} -> {now}"
        shown.append(f"{flag(name)} {values}" if len(values) <= _LONGEST else flag(name))
    return ", ".join(shown)
