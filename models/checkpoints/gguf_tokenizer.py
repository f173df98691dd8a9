"""A tokenizer as GGUF's metadata have it, as the Hub's files.

llama.cpp knows by a name (`tokenizer.ggml.pre`) how a byte-level BPE cuts text into words; a tokenizer.json
spells it out. Mistakes are ValueErrors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_CONTROL, _USER_DEFINED, _NORMAL, _UNUSED = 3, 4, 1, 5  # types of tokens
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
TEMPLATE, TOKENS, SPEC = "tokenizer.chat_template", "tokenizer.ggml.tokens", "tokenizer.huggingface.json"


_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


class _Words(NamedTuple):
    """The parts of a tokenizer.json that cut text into words."""

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    model: Mapping[str, Any] = MappingProxyType({})  # what its BPE has besides tokens and merges
    add_bos: bool = False  # where a file does not say
    decoder: Mapping[str, Any] = _BYTES


def _sequence(*parts: dict[str, Any], use_regex: bool) -> dict[str, Any]:
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "Sequence", "pretokenizers": [*parts, bytes_]} if parts else bytes_


def _split(digits: str, letters: str = r"\p{L}") -> dict[str, Any]:
    """The rule of GPT-4's tokenizer and its successors, with so many digits in a word."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[" + letters + "]+|" + digits
        + r"| ?[^\s" + letters + r"\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _sequence(split, use_regex=False)


_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, use_regex=True)
_LLAMA3 = _Words(_split(r"\p{N}{1,3}"), None, {"ignore_merges": True}, True)
# By its name in llama.cpp.
WORDS = {
    "smollm": _Words(_DIGITS),
    "refact": _Words(_DIGITS),
    "qwen2": _Words(_split(r"\p{N}"), {"type": "NFC"}),
    "qwen35": _Words(_split(r"\p{N}", r"\p{L}\p{M}"), {"type": "NFC"}),
    "llama-bpe": _LLAMA3,
    "lfm2": _LLAMA3,
    "gpt-2": _Words(_sequence(use_regex=True)),
    "gemma4": _Words(
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"},
        True,
        {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
    ),
}  # fmt: skip


def read(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """(files of the Hub by name: JSON, or text; the ids of added tokens)."""
    if (model := metadata.get("tokenizer.ggml.model")) not in ("gpt2", "gemma4"):
        raise ValueError(f"tokenizer.ggml.model: expected gpt2, a byte-level BPE, or gemma4, got {model!r}")
    pre = model if model == "gemma4" else str(metadata.get("tokenizer.ggml.pre"))
    if (words := WORDS.get(pre)) is None:
        raise ValueError(f"tokenizer.ggml.pre: expected {', '.join(WORDS)}, got {pre!r}")
    tokens = metadata[TOKENS]
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind != _UNUSED}
    pairs = (merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"])
    merges = [pair for pair in pairs if len(pair) == 2 and {*pair, "".join(pair)} <= vocab.keys()]
    added = [
        {"id": i, "content": token, "special": kinds[i] == _CONTROL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token, i in vocab.items()
        if kinds[i] in (_CONTROL, _USER_DEFINED)
    ]
    roles: dict[str, str] = {}
    for name, role in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens) and tokens[token_id] in vocab:
            roles[role] = tokens[token_id]
    post: dict[str, Any] | None = None
    first = roles.get("bos_token")
    if metadata.get("tokenizer.ggml.add_bos_token", words.add_bos) and first:
        text = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        known = {first: {"id": first, "ids": [vocab[first]], "tokens": [first]}}
        pair = [*text, {"Sequence": {"id": "B", "type_id": 0}}]
        post = {"type": "TemplateProcessing", "single": text, "pair": pair, "special_tokens": known}
    spec = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": words.normalizer,
        "pre_tokenizer": words.pre_tokenizer,
        "post_processor": post,
        "decoder": words.decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **words.model},
    }
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    files = {"tokenizer.json": metadata.get(SPEC, spec), "tokenizer_config.json": described}
    if isinstance(template := metadata.get(TEMPLATE), str):
        files["chat_template.jinja"] = template
    return files, {token["content"]: token["id"] for token in added}
