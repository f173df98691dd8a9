"""Reading single values out of config.json dictionaries, shared by the readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from models.checkpoints.errors import CheckpointError
from models.config import RopeScaling, TextConfig, VisionConfig

T = TypeVar("T")


def build(make: Callable[..., T], **values) -> T:
    """`make(**values)`, with anything it refuses told as a fault of config.json.

    Raises:
        CheckpointError: with the constructor's own sentence.
    """
    try:
        return make(**values)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"config.json: {error}") from None


def section(config: Mapping, name: str) -> dict:
    """A nested object of a config, empty where it is absent or null.

    Raises:
        CheckpointError: if it is something else.
    """
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} must be an object, got {type(value).__name__}")
    return value


def vision_config(stored: Mapping, defaults: Mapping[str, Any]) -> VisionConfig:
    """A SigLIP-shaped vision section: our field names are the Hub's."""
    values = dict(defaults)
    values |= {f.name: stored[f.name] for f in fields(VisionConfig) if stored.get(f.name) is not None}
    for name in ("image_size", "patch_size"):
        size = values.get(name)
        if isinstance(size, list) and size and size.count(size[0]) == len(size):
            values[name] = size[0]  # [s, s] is a square
    return build(VisionConfig, **values)


def text_config(stored: Mapping, defaults: Mapping[str, Any]) -> TextConfig:
    """A Llama-shaped text section."""
    plain = {f.name for f in fields(TextConfig)} - {"rope_theta", "rope_scaling"}
    values = dict(defaults)
    values |= {name: stored[name] for name in plain if stored.get(name) is not None}
    rope = _rope(stored, values.get("max_position_embeddings", TextConfig.max_position_embeddings))
    return build(TextConfig, **values, **rope)


def _rope(stored: Mapping, max_positions: int) -> dict[str, Any]:
    """rope_theta and rope_scaling, by transformers' rules (`convert_rope_params_to_dict` of v5).

    A rope_scaling that is not null replaces rope_parameters; the theta inside whichever of them stands wins
    over the one beside it. Llama-3 scaling without an original length takes the maximum length.
    """
    rope = section(stored, "rope_scaling") or section(stored, "rope_parameters")
    theta = rope.get("rope_theta")
    if theta is None:
        theta = stored.get("rope_theta")
    theta = TextConfig.rope_theta if theta is None else theta
    rotary_share = rope.get("partial_rotary_factor", stored.get("partial_rotary_factor"))
    if rotary_share not in (None, 1, 1.0):
        raise CheckpointError(f"config.json: partial_rotary_factor must be 1, got {rotary_share!r}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind == "linear":
        scaling = build(RopeScaling, rope_type="linear", factor=rope.get("factor"))
        return {"rope_theta": theta, "rope_scaling": scaling}
    if kind != "llama3":
        raise CheckpointError(
            f"config.json: rotary scaling {kind!r} is not supported, expected default, linear or llama3"
        )
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = {name: rope[name] for name in names if rope.get(name) is not None}
    values.setdefault("original_max_position_embeddings", max_positions)
    missing = [name for name in names if name not in values]
    if missing:
        raise CheckpointError(f"config.json: llama3 rotary scaling lacks {', '.join(missing)}")
    return {"rope_theta": theta, "rope_scaling": build(RopeScaling, rope_type="llama3", **values)}


def token_ids(*values: Any, vocab_size: int) -> tuple[int, ...]:
    """The union of ids given as an int, a list of ints or None, in ascending order.

    What is below 0 or beyond the vocabulary is as good as absent: -1 is how some configs say so, and others
    name ids of the tokenizer that they were made for.
    """
    found: set[int] = set()
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if isinstance(item, bool) or not isinstance(item, int):
                raise CheckpointError(f"config.json: a token id must be a whole number, got {item!r}")
            if 0 <= item < vocab_size:
                found.add(item)
    return tuple(sorted(found))


def first_id(*values: Any, vocab_size: int) -> int | None:
    """The first id that is given at all, and is in the vocabulary."""
    for value in values:
        ids = token_ids(value, vocab_size=vocab_size)
        if ids:
            return ids[0]
    return None
