"""The files of a processor, held against limits before transformers and tokenizers open them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils import DummyObject

from data.errors import PromptError
from models import untrusted
from models.untrusted import MAX_CONFIG, MAX_TOKENIZER, check_size, check_values

_CONFIGS = (
    "config.json", "processor_config.json", "preprocessor_config.json", "chat_template.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_VOCABULARY = re.compile(
    r".*\.(txt|bpe|codes|spm|tiktoken|model)|tokenizer\.model\..*|(tokenizer|tekken|.*vocab.*)\.json"
)
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
MOST_LINES = 1_000_000  # of a vocabulary that is no JSON
# Keys under which transformers finds the names of further files, which it then reads in place of these.
_POINTERS = ("configuration_files", "fast_tokenizer_files")


def check_files(folder: Path) -> None:
    """Hold them against the limits. Vocabularies are measured only: of two values all readers take the last.

    Raises:
        PromptError: a file is too large; its JSON is no object, nested too deeply, ambiguous or leads to
            other files; a `tokenizer_class` that is none.
    """
    configs = {name: read_object(folder / name) for name in _CONFIGS}
    for name, config in configs.items():
        if lead := [key for key in _POINTERS if config.get(key)]:
            raise PromptError(f"{name}: expected no {lead[0]}, which lead to files of other names; remove it")
    for name in ("tokenizer_config.json", "config.json"):  # the second counts where the first has none
        if configs[name].get("tokenizer_class") is not None:
            _check_tokenizer_class(name, configs[name]["tokenizer_class"])
            break
    read_template(folder)
    for path in sorted((folder / _MORE_TEMPLATES).glob("*")):
        with _named(path):
            check_size(path, MAX_CONFIG)
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if path.is_file() and _VOCABULARY.fullmatch(path.name) and path.name not in _CONFIGS:
            with _named(path):
                check_size(path, MAX_TOKENIZER)
                if path.suffix == ".json":
                    check_values(path.read_bytes())
                elif path.read_bytes().count(b"\n") > MOST_LINES:
                    raise ValueError(f"expected at most {MOST_LINES} lines, got more")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no file.

    Raises:
        PromptError: see `check_files`.
    """
    if not path.is_file():
        return {}
    with _named(path):
        return untrusted.read_object(path)


def read_template(folder: Path) -> str | None:
    """chat_template.jinja, None where there is none.

    Raises:
        PromptError: too large, or not UTF-8.
    """
    path = folder / _TEMPLATE
    if not path.is_file():
        return None
    with _named(path):
        check_size(path, MAX_CONFIG)
        return path.read_text(encoding="utf-8")


def _check_tokenizer_class(file: str, name: Any) -> None:
    """transformers calls `from_pretrained` of whatever class of its own has that name: a processor's asks for
    its tokenizer, and so for ever."""
    if not isinstance(name, str):
        return
    for known in {name, name.removesuffix("Fast"), f"{name}Fast"}:
        found = tokenizer_class_from_name(known)
        if found is None or isinstance(found, DummyObject):  # of a library that transformers says is missing
            continue
        if not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise PromptError(f"{file}: expected tokenizer_class to name a tokenizer, got {name[:80]!r}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with a file, with its name."""
    try:
        yield
    except ValueError as error:
        raise PromptError(f"{path.name}: {error}") from None
