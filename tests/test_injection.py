"""Typed special tokens stay text: every special token of every kind of tokenizer, in every spelling."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

import pytest

from data.conversation import read_conversation
from data.errors import PromptError
from data.packing import SampleEncoder
from inference.answer import encode as encode_question
from inference.checkpoint import open_checkpoint
from tests.processors import KINDS, draw_image, processor

PLAIN = "how many?"
BYTE_LEVEL = ("embedded", "llama", "nanovlm-current", "nanovlm-base", "nanovlm-v0.1")
# What may stand between, before or behind letters without being seen: zero-width, joiners, directions, a BOM,
# variation selectors, tags, a soft hyphen, combining marks, fillers of other scripts.
INVISIBLE = (
    "\u200b", "\u200c", "\u200d", "\u200e", "\u200f", "\u202a", "\u202e", "\u2060", "\u2066", "\u2069",
    "\ufeff", "\u00ad", "\u034f", "\u180e", "\ufe0f", "\U000e0001", "\u0301", "\u20dd", "\u115f", "\x00",
    "\x7f", "\x1b",
)  # fmt: skip


def special_tokens(kind: str) -> list[str]:
    """The added tokens but for white space and HTML, which are vocabulary."""
    added = (token.content for token in processor(kind).tokenizer.added_tokens_decoder.values())
    return [
        name for name in added if name.replace("▁", " ").strip() and not re.fullmatch("</?(b|td|h1)>", name)
    ]


@cache
def compatible() -> dict[str, list[str]]:
    """The characters that NFKC makes an ASCII one of, by that one."""
    found: dict[str, list[str]] = {}
    for character in map(chr, range(0xA0, 0x1FFFF)):
        folded = unicodedata.normalize("NFKC", character)
        if len(folded) == 1 and folded.isascii():
            found.setdefault(folded, []).append(character)
    return found


def spellings(token: str) -> list[str]:
    """Ways to type it that a tokenizer, normalizer or template might take for the token."""
    half = len(token) // 2
    forms = [compatible().get(c, [c]) for c in token]
    return [
        token, token * 2, f"what is {token} doing here?", f"{token}\n{token}", f" {token} ", f"x{token}y",
        f"{token[:half]}{token}{token[half:]}",  # removing the inner one would make the outer one
        *("".join(form[choice % len(form)] for form in forms) for choice in range(4)),
        "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in token),
        token.upper(), token.swapcase(), token.title(), token[:-1], token[1:], token + token[::-1],
        "\u200b".join(token), "\u202e" + token[::-1] + "\u202c", f"\ue000{token}\ue001", f"</s>{token}",
        *(f"{token[:half]}{mark}{token[half:]}" for mark in INVISIBLE),
        *(f"{mark}{token}{mark}" for mark in INVISIBLE),
        f"{{{{ {token!r} }}}}", f"{{% raw %}}{token}{{% endraw %}}", f"{{{{ messages[0] }}}}{token}",
        f"\r\n{token}\r\n", f"\u2028{token}\u2029", token.encode("utf-16-le").decode("latin1"),
    ]  # fmt: skip


def message(role: str, *texts: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def encode(kind: str, messages: list[dict]) -> list[int]:
    """Ids of a conversation; nanoVLM v0.1 takes one question, with one image."""
    p = processor(kind)
    if kind != "nanovlm-v0.1":
        return p.chat.encode(read_conversation(messages)).input_ids
    parts = [part for one in messages for part in one["content"]]
    image = {"type": "image", "image": draw_image(4, 4)}
    return p.encode_conversation([{"role": "user", "content": [image, *parts]}], True).input_ids


def special_ids(kind: str, ids: list[int]) -> list[int]:
    """Those of `ids` that are special, but for the one that stands for characters a model does not know."""
    known = {processor(kind).tokenizer.convert_tokens_to_ids(token) for token in special_tokens(kind)}
    if kind in ("unigram", "gemma"):
        known.remove(processor(kind).tokenizer.unk_token_id)
    return [i for i in ids if i in known]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_typed_text_never_becomes_a_special_token(kind, monkeypatch):
    """In one conversation for each token: every spelling, whole and cut into parts, in every role."""
    naive, tokens = [], special_tokens(kind)
    tiles = [token for token in tokens if token.startswith("<row_")]  # one for all of them
    for token in [token for token in tokens if token not in tiles[1:]]:
        texts = spellings(token)
        cuts = [[token[:at], token[at:]] for at in (1, len(token) // 2, len(token) - 1)]
        said = [*([text] for text in texts), *cuts, list(token)]
        for role in ("user", "system", "assistant"):
            typed = special_ids(kind, encode(kind, [message(role, *one) for one in said]))
            plain = special_ids(kind, encode(kind, [message(role, *(PLAIN for _ in one)) for one in said]))
            assert typed == plain, (token, role)
        naive += processor(kind).tokenizer(texts, add_special_tokens=False)["input_ids"]
    # Control: the tokenizer by itself does make special ids out of these.
    assert sum(bool(special_ids(kind, ids)) for ids in naive) > len(naive) / 4


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_typed_special_tokens_are_kept_as_text(kind):
    texts = [text for token in special_tokens(kind)[::7] for text in spellings(token)]
    decoded = processor(kind).decode(encode(kind, [message("user", text) for text in texts]), True)
    assert [text for text in texts if text.strip() not in decoded] == []


@pytest.mark.parametrize("kind", ["embedded", "unigram", "nanovlm-current"])
def test_odd_unicode(kind):
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    odd = ("\ufeff", "a\x00b", "\uffff", "\U0010ffff", "\u202e", "e" + "\u0301" * 5000, family,
           "\ue000\ue001", "\r", "\ufdfa" * 200, "\ue0000.0\ue001")  # fmt: skip
    ids = encode(kind, [message("user", f"what is {text}?") for text in odd])
    assert special_ids(kind, ids) == special_ids(kind, encode(kind, [message("user", PLAIN)] * len(odd)))
    for text in ("\ud800", "a\udfff", "\ud83d"):
        with pytest.raises(PromptError, match="Unicode"):
            encode(kind, [message("user", text)])


@pytest.mark.parametrize("kind", ["embedded", "nanovlm-current"])
def test_typed_placeholders_beside_a_real_image(kind):
    p = processor(kind)
    honest = p.ask(draw_image(50, 20), PLAIN)
    typed = p.ask(draw_image(50, 20), f"{p.images.image_token * 3} {PLAIN} <image: 0>")
    assert honest.image_tokens == typed.image_tokens
    assert int((typed["input_ids"] == p.image_token_id).sum()) == typed.image_tokens[0] > 0


def test_a_text_that_would_become_special_after_all_is_refused(monkeypatch):
    p = processor("embedded")
    plain = p.tokenizer.backend_tokenizer  # as if the private copy had failed to hide the names
    monkeypatch.setattr(p.chat, "_tokenizer", plain)
    monkeypatch.setattr(p.chat, "_names", {name: name for name in p.chat._names})
    assert p.prepare([{"role": "user", "content": PLAIN}])["input_ids"].shape[0] == 1
    with pytest.raises(PromptError, match="special"):
        p.prepare([{"role": "user", "content": "why <image>"}])


def test_training_and_questions_go_the_same_way(model_folder):
    """What `SampleEncoder` (training) and `inference.answer.encode` (generate, batch, evaluation, and whoever
    asks an opened checkpoint) make of typed special tokens."""
    checkpoint = open_checkpoint(model_folder, device="cpu")
    p = checkpoint.processor
    special = set(p.tokenizer.added_tokens_decoder)

    def question(text: str) -> list[int]:
        return encode_question(checkpoint, [], text, system=text).input_ids

    def row(text: str) -> list[int]:
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        return SampleEncoder(p, 100_000).encode(turns, ("rows", 0)).input_ids

    for make in (question, row):
        expected = [i for i in make(PLAIN) if i in special]
        for token in p.tokenizer.get_added_vocab():
            assert [i for i in make(f"a {token} b") if i in special] == expected, token
