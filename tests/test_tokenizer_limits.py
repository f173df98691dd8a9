"""Tokenizers made to do harm: refused when opened, or when their text is too much for them, in a sentence."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data.errors import ProcessorError, PromptError
from data.processor import Processor
from data.tokenizer import check_tokenizer, private_tokenizer
from tests.processors import processor


def replace(pattern: str, content: str, regex: bool = False) -> dict:
    return {"type": "Replace", "pattern": {"Regex" if regex else "String": pattern}, "content": content}


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(kind: str, parts: list) -> dict:
    return {"type": "Sequence", kind: parts}


def normalizers(*parts: dict) -> dict:
    return {"normalizer": sequence("normalizers", list(parts))}


def charsmap(table: bytes, strings: bytes) -> dict:
    raw = len(table).to_bytes(4, "little") + table + strings
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}}


def added(content: str, number: int) -> dict:
    marks = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 1000 + number, "content": content, "special": True} | marks


def text_twice(times: int) -> dict:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [text] * times, "pair": [text] * 2, "special_tokens": {}}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MANY = {"id": "x", "ids": [1] * 30_000, "tokens": ["x"] * 30_000}
# name → what a tokenizer.json has in place of a good one's, or what is done to its model.
REFUSED: dict[str, dict] = {
    "twenty doublings": normalizers(*[replace("e", "ee")] * 20),
    "a long replacement": normalizers(replace("e", "e" * 5000)),
    "compatibility, put in again": normalizers(*[{"type": "NFKD"}, replace("\u0635", "\ufdfa")] * 4),
    "a mapping of noise": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    "sixteen splits": {"pre_tokenizer": sequence("pretokenizers", [BYTES] * 16)},
    "deep": {"pre_tokenizer": reduce(lambda part, _: sequence("pretokenizers", [part]), range(50), BYTES)},
    "a text many times": {"post_processor": text_twice(50)},
    "thousands of ids in front": {"post_processor": text_twice(1) | {"special_tokens": {"x": MANY}}},
    "decoded doublings": {"decoder": sequence("decoders", [replace("e", "ee")] * 9)},
    "many added tokens": {"added_tokens": [added(f"<{i}>", i) for i in range(20_000)]},
    "a long added token": {"added_tokens": [added("x" * 100_000, 0)]},
    "a huge id": {"added_tokens": [added("x", 2**31)]},
    "long words": {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9, "vocab": {"e": 0}}},
    "a long suffix": {"model": {"type": "BPE", "end_of_word_suffix": "x" * 10_000, "vocab": {"e": 0}}},
    "a long piece": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["e", 0.0], ["e" * 5000, 0.0]]}},
    "no numbers": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["e", float("nan")]]}},
    "an id of no piece": {"model": {"type": "Unigram", "unk_id": 10**6, "vocab": [["e", 0.0]]}},
}  # fmt: skip
PATTERNS = (
    r"(e+)+$", r"(e|e)*x", r"(e*)*[xy]", r"e*e*[xy]", r"[a-z]+[a-z]+;", r"(e?){30}e{30}", "e?" * 20 + "e",
    r"(e{0,100}){0,100}x", r"(e)\1+x", r"(?<n>e\g<n>?x)", r"((e{1,9}){1,9}){1,9}[xy]", r"(?=(e+)+x)",
    r"(?:e|ee)+[xy]", r".*.*=.*", r"(?>e+)+x", "e" * 3000, "[",
    r"((e{1000}){1000}){1000}", r"(?=(e{200}){200})x", r"e{99999}",
)  # fmt: skip
_BEFORE, _WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How the vocabularies that are published split text: GPT-2, Llama 3, Qwen, GPT-4o, DeepSeek, CLIP, others.
PUBLISHED = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{_BEFORE}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    rf"{_BEFORE}|{_WORD}\p{{L}}+|\p{{N}}|{_REST}",
    rf"[\p{{Han}}]+|{_WORD}{_UPPER}*{_LOWER}+{_BEFORE}?|{_WORD}{_UPPER}+{_LOWER}*{_BEFORE}?|\p{{N}}|{_REST}",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+""",
    r"[一-龥぀-ゟ゠-ヿ]+", r"\s?[!-/:-~！-／：-～]+", r"\s+$", r" {2,}", r"(?=(\d{3})+(?!\d))", r"\p{N}{1,3}",
    r"<\|startoftext\|>|'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+", r" ?[^(\s|[.,!?…。，、|_।۔،])]+", "^", r"\d",
)  # fmt: skip


@pytest.fixture
def with_spec(tmp_path) -> Callable[[dict], Path]:
    """A processor's folder whose tokenizer.json says something else."""
    processor("embedded").hf_processor.save_pretrained(tmp_path / "good")

    def change(changes: dict) -> Path:
        folder = shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True)
        spec = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(spec | changes))
        return folder

    return change


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_refused_when_opened(changes, with_spec):
    with pytest.raises(ProcessorError) as error:
        Processor.from_pretrained(with_spec(changes))
    assert str(error.value).isprintable()


def test_patterns_that_may_take_for_ever_are_refused():
    for pattern in PATTERNS:
        for section in ({"pre_tokenizer": split(pattern)}, {"normalizer": replace(pattern, "x", True)}):
            with pytest.raises(ValueError, match="pattern"):
                check_tokenizer({"model": {"vocab": {}}} | section)


def test_published_patterns_are_taken():
    for pattern in PUBLISHED:
        spec = {"model": {"vocab": {}}, "pre_tokenizer": sequence("pretokenizers", [split(pattern), BYTES])}
        assert check_tokenizer(spec) >= 20_000, pattern


def test_published_normalizers_are_taken():
    """Those of Albert, T5, Llama 2, and Gemma."""
    albert = [replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]
    mark = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    mapping = charsmap(bytes(16), "\u0635\u0644\u0649 \u0627\u0644".encode() + b"\0")["normalizer"]
    for parts in (
        albert,
        [mapping, replace(" {2,}", " ", True)],
        [{"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")],
        [replace(" ", "\u2581")],
    ):
        assert check_tokenizer({"pre_tokenizer": mark} | normalizers(*parts)) >= 100_000


ONLY_A_TEXT_SHOWS = {
    "a panic": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "no token for the rest": {"model": {"type": "WordLevel", "unk_token": "none", "vocab": {"e": 0}}},
    "a mapping out of bounds": charsmap(b"\xff\xff\xff\x7f" * 1024, b"abc\0"),
    "a square": {"pre_tokenizer": split("e+[xyz]")},
    "doublings in sequences": normalizers(sequence("normalizers", [replace("e", "ee")] * 9)),
    "a text between all letters": normalizers(*[replace("", "x", True)] * 9),
    "a mapping to long texts": charsmap(bytes(16), b"x" * 1000 + b"\0"),
    "many normalizers": normalizers(*[{"type": kind} for kind in ("NFKD", "NFC", "Lowercase", "NFD")] * 4),
}


@pytest.mark.parametrize("changes", ONLY_A_TEXT_SHOWS.values(), ids=ONLY_A_TEXT_SHOWS)
def test_what_only_a_text_shows_is_a_sentence(changes, with_spec):
    with pytest.raises((PromptError, ProcessorError)) as error:
        Processor.from_pretrained(with_spec(changes)).ask(None, "e" * 300_000)
    assert str(error.value).isprintable()


def test_a_token_id_that_nobody_can_count_up_to():
    """To write a tokenizer out, the library counts up to its largest id: of 372 million it aborted."""
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 8_000_000}, merges=[]))
    with pytest.raises(PromptError, match="8000000"):
        private_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "0")
