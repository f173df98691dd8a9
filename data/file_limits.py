"""The files of a processor, held against limits before transformers and tokenizers open them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.errors import PromptError
from data.tokenizer_limits import check_tokenizer
from models import config as untrusted
from models.config import MAX_CONFIG, MAX_TOKENIZER, check_size, check_values

_CONFIGS = (
    "config.json", "processor_config.json", "preprocessor_config.json", "chat_template.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_VOCABULARY = re.compile(
    r".*\.(txt|bpe|codes|spm|tiktoken|model)|tokenizer\.model\..*|(tokenizer|tekken|.*vocab.*)\.json"
)
_TEMPLATE, _LEGACY, _MORE_TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
MOST_LINES = 1_000_000  # of a vocabulary that is no JSON
# Keys under which transformers finds the names of further files, which it then reads in place of these.
_POINTERS = ("configuration_files", "fast_tokenizer_files")


def check_files(folder: Path) -> None:
    """Hold them against the limits. Vocabularies are measured only: of two values all readers take the last.

    Raises:
        PromptError: a file is too large; its JSON is no object, nested too deeply, ambiguous or leads to
            other files.
    """
    configs = {name: read_object(folder / name) for name in _CONFIGS}
    for name, config in configs.items():
        if lead := [key for key in _POINTERS if config.get(key)]:
            raise PromptError(f"{name}: expected no {lead[0]}, which lead to files of other names; remove it")
    for path in (folder / _TEMPLATE, *_more_templates(folder)):
        if path.is_file():
            _text(path)
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


def chat_template(folder: Path) -> str | None:
    """The chat template that transformers 5.23 takes for a processor: processor_config.json's, that of
    chat_template.json, the files of templates (`tokenizer_template`). None where there is none.

    Raises:
        PromptError: see `check_files`; several templates, none of them the default, or of two ages.
    """
    written = read_object(folder / "processor_config.json").get("chat_template")
    legacy = folder / _LEGACY
    if written is None and legacy.is_file():
        if more := _more_templates(folder):
            raise PromptError(
                f"{_LEGACY}: expected it alone, got {_MORE_TEMPLATES}/{more[0].name} too, which transformers "
                f"does not open together; rename the first to {_TEMPLATE} and keep only the text in it"
            )
        written = read_object(legacy).get("chat_template")
        if written is None:
            raise PromptError(f"{_LEGACY}: expected a chat_template in it, found none")
    return tokenizer_template(folder) if written is None else _default(written, folder)


def tokenizer_template(folder: Path) -> str | None:
    """The chat template of a tokenizer: chat_template.jinja, with those of other names in a folder beside it,
    or what tokenizer_config.json has. None where there is none.

    Raises:
        PromptError: as `chat_template`.
    """
    files = {path.stem: path for path in _more_templates(folder)}
    if (folder / _TEMPLATE).is_file():
        files["default"] = folder / _TEMPLATE
    written = {name: _text(path) for name, path in files.items()}
    return _default(written or read_object(folder / "tokenizer_config.json").get("chat_template"), folder)


def _default(written: Any, folder: Path) -> str | None:
    """The one of several templates by name, as a dictionary or a list of objects, that is used unasked."""
    if isinstance(written, list):
        named = [entry for entry in written if isinstance(entry, dict) and {"name", "template"} <= set(entry)]
        written = {str(entry["name"]): entry["template"] for entry in named}
    if isinstance(written, dict):
        if "default" not in written:
            got = ", ".join(sorted(written))[:200] or "none"
            raise PromptError(f"{folder}: expected a chat template named default, got {got}")
        written = written["default"]
    if not isinstance(written, str | None):
        raise PromptError(f"{folder}: expected a chat template as text, got {type(written).__name__}")
    return written


def _more_templates(folder: Path) -> list[Path]:
    return sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))


def _text(path: Path) -> str:
    with _named(path):
        check_size(path, MAX_CONFIG)
        return path.read_text(encoding="utf-8")


def read_tokenizer(path: Path) -> dict[str, Any] | None:
    """tokenizer.json, None where there is none.

    Raises:
        PromptError: see `check_files` and `check_tokenizer`.
    """
    if not path.is_file():
        return None
    with _named(path):
        spec = untrusted.read_object(path, MAX_TOKENIZER)
        check_tokenizer(spec)
        return spec


def check_tokenizer_class(tokenizer_config: dict[str, Any], config: dict[str, Any]) -> None:
    """transformers calls `from_pretrained` of whatever class of its own has the name that these files give: a
    processor's asks for its tokenizer, and so for ever.

    Raises:
        PromptError: it is no tokenizer's name.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
    from transformers.utils import DummyObject

    file = "config.json" if tokenizer_config.get("tokenizer_class") is None else "tokenizer_config.json"
    name = (config if file == "config.json" else tokenizer_config).get("tokenizer_class")
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
