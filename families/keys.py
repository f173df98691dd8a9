"""Keys of a config.json and our fields: tables of names that read a section and write it again.

What a family refuses is a ValueError, which `models.checkpoints.load.read_config` puts its file before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Key(NamedTuple):
    """A key of config.json that holds one field of ours: its name there, and the value of a file that lacks
    it. `read` makes our value of theirs, `write` theirs of ours; None where they are the same."""

    name: str
    default: Any = None
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None


def squared(name: str, default: int) -> Key:
    """A key that holds the square of our field: the patches of a square table."""
    return Key(name, default, math.isqrt, lambda side: side**2)


Names = Mapping[str, Key]  # our fields of a section -> their keys


def same(**defaults: Any) -> dict[str, Key]:
    """Fields that have the same name in config.json."""
    return {name: Key(name, default) for name, default in defaults.items()}


def read(stored: Mapping, names: Names) -> dict[str, Any]:
    """Our fields of a section. A key that is absent or null has its default; lists become tuples."""
    found: dict[str, Any] = {}
    for ours, (name, default, made, _) in names.items():
        value = default if stored.get(name) is None else stored[name]
        if isinstance(default, bool | tuple):
            value = type(default)(value)
        found[ours] = value if made is None else made(value)
    return found


def write(config: Any, names: Names) -> dict[str, Any]:
    """`read` backwards."""
    values = {ours: getattr(config, ours) for ours in names}
    return {key.name: key.write(values[ours]) if key.write else values[ours] for ours, key in names.items()}


def present(stored: Mapping) -> dict[str, Any]:
    """A section without its keys that are null."""
    return {name: value for name, value in stored.items() if value is not None}


def section(config: Mapping, name: str) -> dict:
    """A nested object of a config, empty where it is absent or null."""
    return config.get(name) or {}


def quantization(config: Mapping) -> dict:
    """What a config says of how its weights are quantized, {} for nothing. MLX has a key of its own."""
    stored = section(config, "quantization_config") or section(config, "quantization")
    return stored or section(section(config, "text_config"), "quantization_config")


def layer_kinds(config: Mapping, kinds: Mapping[str, str], default: list[str]) -> list[str]:
    """Our names of what mixes each layer's positions; `layer_types` has theirs, the keys of `kinds`."""
    named = config.get("layer_types") or default
    if not {*named} <= kinds.keys():
        raise ValueError(f"layer_types: expected a list of {' or '.join(kinds)}, got {named}")
    return [kinds[kind] for kind in named]


def expect(config: Mapping, plain: Mapping[str, Any]) -> None:
    """Refuse a config in which keys have other values than these, which would need code that is not here."""
    for name, value in plain.items():
        if config.get(name) not in (None, value):
            raise ValueError(f"expected {name} to be {value!r}, got {config[name]!r}")


def token_ids(*values: Any, vocab_size: int) -> tuple[int, ...]:
    """The union of ids given as an int, a list of ints or None, in ascending order.

    An id below 0 or beyond the vocabulary is as good as absent: -1 is how some configs say so, and others
    name ids of the tokenizer that they were made for.
    """
    given = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return tuple(sorted({one for one in given if one is not None and 0 <= one < vocab_size}))


def first_id(*values: Any, vocab_size: int) -> int | None:
    """The first id that is given at all, and is in the vocabulary."""
    return next((ids[0] for value in values if (ids := token_ids(value, vocab_size=vocab_size))), None)
