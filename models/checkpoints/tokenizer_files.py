"""The end token that a tokenizer's files name: all that a model needs of them.

tokenizer_config.json (or, in old repositories, special_tokens_map.json) names it, and tokenizer_config.json
or tokenizer.json tells its id. The large tokenizer.json is read only where the small one does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from models.checkpoints.locate import CheckpointFiles
from models.checkpoints.strict_json import read_json
from models.untrusted import MAX_TOKENIZER

_RELATIVE = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")


def end_token_id(files: CheckpointFiles) -> int | None:
    """The id of the tokenizer's end token, or None where the checkpoint has no tokenizer or it names none.

    Raises:
        CheckpointError: for a file that is not JSON.
    """
    find = _finder(files)
    config_path = find("tokenizer_config.json")
    config = {} if config_path is None else read_json(config_path)
    name = _content(config.get("eos_token"))
    if name is None and (config_path is not None or files.origin.commit is None):
        map_path = find("special_tokens_map.json")
        name = _content(read_json(map_path).get("eos_token")) if map_path is not None else None
    if name is None:
        return None
    added = config.get("added_tokens_decoder")
    for token_id, token in added.items() if isinstance(added, dict) else ():
        if _content(token) == name and token_id.isdecimal() and len(token_id) < 10:
            return int(token_id)
    tokenizer_path = find("tokenizer.json")
    return None if tokenizer_path is None else _id_in(read_json(tokenizer_path, MAX_TOKENIZER), name)


def _finder(files: CheckpointFiles) -> Callable[[str], Path | None]:
    """Where the tokenizer's files are: beside the weights, or for nanoVLM in the folder `lm_tokenizer`."""
    inside = files.config.get("lm_tokenizer")
    if files.origin.commit is not None or not isinstance(inside, str) or not _RELATIVE.fullmatch(inside):
        return files.find
    if files.find("tokenizer.json") is not None or files.find("tokenizer_config.json") is not None:
        return files.find
    return lambda name: files.find(f"{inside}/{name}")


def _content(token: object) -> str | None:
    """A token's text, which is stored alone or in an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id_in(tokenizer: Mapping, name: str) -> int | None:
    """The id of a token in tokenizer.json: among the added ones, or in the vocabulary."""
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, Mapping) and token.get("content") == name and isinstance(token.get("id"), int):
            return token["id"]
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    token_id = vocab.get(name) if isinstance(vocab, Mapping) else None
    return token_id if isinstance(token_id, int) else None
