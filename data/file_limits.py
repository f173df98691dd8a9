"""The files of a processor, held against limits before transformers and tokenizers open them.

The rules are those of `models.checkpoints.strict_json`, which this package may not import.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from data.errors import PromptError

MAX_CONFIG, MAX_TOKENIZER = 4 * 2**20, 32 * 2**20  # bytes
MOST_VALUES = 2_500_000  # of tokenizer.json: commas and opening brackets
_CONFIGS = (
    "config.json", "processor_config.json", "preprocessor_config.json", "chat_template.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
_TEMPLATE = "chat_template.jinja"


def check_files(folder: Path) -> None:
    """Hold them against the limits. Vocabularies are measured only: of two values all readers take the last.

    Raises:
        PromptError: a file is too large; its JSON is no object, nested too deeply or ambiguous; a
            `tokenizer_class` that is none.
    """
    for name in _CONFIGS:
        _check_tokenizer_class(name, read_object(folder / name).get("tokenizer_class"))
    read_template(folder)
    for name in _VOCABULARIES:
        path = folder / name
        if path.is_file():
            _check_size(path, MAX_TOKENIZER)
            raw = path.read_bytes() if name.endswith(".json") else b""
            if sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
                raise PromptError(f"{name}: expected at most {MOST_VALUES} values, got more")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no file.

    Raises:
        PromptError: see `check_files`.
    """
    if not path.is_file():
        return {}
    _check_size(path, MAX_CONFIG)
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_unambiguous)
    except ValueError as error:
        raise PromptError(f"{path.name}: not valid JSON ({error})") from None
    except RecursionError:
        raise PromptError(f"{path.name}: not valid JSON (nested too deeply)") from None
    if not isinstance(value, dict):
        raise PromptError(f"{path.name}: expected a JSON object, got {type(value).__name__}")
    return value


def read_template(folder: Path) -> str | None:
    """chat_template.jinja, None where there is none.

    Raises:
        PromptError: too large.
    """
    path = folder / _TEMPLATE
    if not path.is_file():
        return None
    _check_size(path, MAX_CONFIG)
    return path.read_text(encoding="utf-8")


def _check_tokenizer_class(file: str, name: Any) -> None:
    """transformers calls `from_pretrained` of whatever class of its own has that name: a processor's asks for
    its tokenizer, and so for ever."""
    if not isinstance(name, str):
        return
    for known in {name, name.removesuffix("Fast"), f"{name}Fast"}:
        found = tokenizer_class_from_name(known)
        if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise PromptError(f"{file}: expected tokenizer_class to name a tokenizer, got {name[:80]!r}")


def _check_size(path: Path, most: int) -> None:
    size = path.stat().st_size
    if size > most:
        raise PromptError(f"{path.name}: expected at most {most} bytes, got {size}")


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"the key {name[:80]!r} stands twice, with different values")
    return found
