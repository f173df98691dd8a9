"""Tokenizers as transformers has them: opened by it, or built by the rules of its class GPT2Tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from models.checkpoints.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} where there is no file."""
    return read_json(path) if path.is_file() else {}


def of_transformers(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers opens in a folder."""
    import transformers

    model = read_object(folder / "config.json")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if model.get("model_type") not in (None, *transformers.CONFIG_MAPPING):
        options["config"] = transformers.PreTrainedConfig()  # else a type that it does not know is warned of
    return transformers.AutoTokenizer.from_pretrained(folder, **options)


def gpt2(spec: dict[str, Any], add_prefix_space: bool, special: set[str]) -> Tokenizer:
    """The tokenizer of transformers' class GPT2Tokenizer for a tokenizer.json: vocabulary, merges and
    post-processor are the file's, the other rules are the class's."""
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    rules = {
        "normalizer": None,
        "pre_tokenizer": byte_level | {"add_prefix_space": add_prefix_space},
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {name: spec["model"][name] for name in ("type", "vocab", "merges")}
        | {"continuing_subword_prefix": "", "end_of_word_suffix": ""},
        "added_tokens": [
            token | {"special": token["special"] or token["content"] in special}
            for token in spec.get("added_tokens") or ()
        ],
    }
    return Tokenizer.from_str(json.dumps(spec | rules))
