"""A tokenizer's copy whose special tokens nobody can type, because nobody knows their names."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tokenizers import Tokenizer

from data.errors import PromptError
from data.tokenizer import AnyTokenizer
from data.tokenizer_limits import MOST_IDS, check_tokenizer


@dataclass(frozen=True)
class PrivateTokenizer:
    """A tokenizer whose added tokens have unguessable names.

    `ids` and `names` take a token's ordinary name to its id and to its private name. `unknown_id` is what a
    model without byte fallback gives to characters it has not seen: typed text may yield that one. `longest`
    is the number of characters it may be given, see `data.tokenizer_limits`.
    """

    tokenizer: Tokenizer
    ids: dict[str, int]
    names: dict[str, str]
    unknown_id: int | None
    longest: int


def private_tokenizer(tokenizer: AnyTokenizer, nonce: str) -> PrivateTokenizer:
    """The private copy. Added tokens of white space alone, which some tokenizers have for indentation, are
    text and keep their names."""
    if not tokenizer.is_fast:
        raise PromptError(
            f"tokenizer: expected one of the tokenizers library, got {type(tokenizer).__name__}"
        )
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= MOST_IDS:  # written out, the library counts up to it, and keeps each id that is missing
        raise PromptError(f"tokenizer: expected ids below {MOST_IDS}, got {largest}")
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    try:
        longest = check_tokenizer(spec)
    except ValueError as error:
        raise PromptError(f"tokenizer: {error}") from error
    renamed = [t for t in spec["added_tokens"] if t["special"] or t["content"].strip()]
    ids = {token["content"]: token["id"] for token in renamed}
    names = {content: f"<{nonce}-{i}>" for content, i in ids.items()}
    for token in renamed:
        token["content"] = names[token["content"]]
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:  # none may build, or build on, a special token
        pairs = (m if isinstance(m, list) else m.split(" ", 1) for m in model["merges"])
        model["merges"] = [
            [a, b] for a, b in pairs if a not in names and b not in names and a + b not in names
        ]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["truncation"] = spec["padding"] = None
    _keep_offsets(spec["post_processor"])
    private = Tokenizer.from_str(json.dumps(spec))
    wrong = [content for content, i in ids.items() if private.token_to_id(names[content]) != i]
    if wrong:
        raise PromptError(f"tokenizer: the ids of its added tokens are inconsistent, first at {wrong[0]!r}")
    if model["type"] == "Unigram":
        unknown = model.get("unk_id")
    else:
        unknown = private.token_to_id(model["unk_token"]) if model.get("unk_token") else None
    return PrivateTokenizer(private, ids, names, unknown, longest)


def _keep_offsets(post_processor: dict | None) -> None:
    """Offsets that include a token's leading space; the ids do not change."""
    if post_processor is None:
        return
    if "trim_offsets" in post_processor:
        post_processor["trim_offsets"] = False
    for inner in post_processor.get("processors", ()):
        _keep_offsets(inner)
