"""A tokenizer.json held against what published ones are, before the library that runs it sees it.

The file is a program: normalizers rewrite the text one after another, patterns with backtracking split it, a
post-processor and decoders put more around it. Twenty replacements of `e` by `ee` make a million characters
of one; a pattern such as `(a+)+$` takes for ever, or makes the library panic. So the parts are counted, what
they can make of one character is multiplied, and patterns are parsed: no repetition in a repetition, and at
most one that may be tried at every length. `check_tokenizer` tells how long a text may be, for the rest to
stay small.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from data.errors import ProcessorError, one_line

MOST_IDS = 4_194_304  # as many as a config may say there are
# Of a published tokenizer.json the most are 7 normalizers, 7 pre-tokenizers, 4 decoders, and patterns of 500
# characters; the longest token is 128 characters long, and 6,400 are added to a vocabulary.
MOST_PARTS, DEEPEST = 16, 4
LONGEST_PATTERN, LONGEST_INSERT, LONGEST_TOKEN = 2000, 64, 1024
MOST_WRITTEN_OUT = 10_000  # characters of a pattern when its library has written out `{1000}`, nested or not
MOST_ADDED, MOST_ADDED_CHARACTERS, MOST_POST_VALUES = 16_384, 1_000_000, 20_000
LONGEST_WORD = 1000  # of WordPiece, whose time grows with the square of it
MOST_GROWTH = 100  # characters that one character may become
MOST_CHARACTERS = 8_000_000  # of text after that: a few hundred megabytes
MOST_SQUARED = 20_000  # characters for a pattern whose time grows with the square of them: two seconds
_OWN_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
# Characters that Unicode makes of one: U+FDFA has 18 in compatibility.
_UNICODE = {"NFKC": 18, "NFKD": 18, "BertNormalizer": 18, "NFD": 4, "NFC": 3, "Lowercase": 3}
_DOUBLES = {"ByteLevel": 2, "Metaspace": 2}  # a byte's letter, a mark in front of each word
# How published patterns end: white space is tried at every length, but then taken at once.
_WHITE_SPACE = (r"|\s*[\r\n]+|\s+(?!\S)|\s+", r"|\s*[\r\n]|\s+(?!\S)|\s+", r"|\s+(?!\S)|\s+")


@contextmanager
def no_panic() -> Iterator[None]:
    """A panic of the library, which is no Exception, as one.

    Raises:
        ProcessorError: in its place.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ProcessorError(
            f"tokenizer.json: the tokenizers library gave up ({one_line(error, 200)})"
        ) from None


def check_tokenizer(spec: Mapping[str, Any]) -> int:
    """How many characters of text the tokenizer of a parsed tokenizer.json may be given.

    Raises:
        ValueError: it is no tokenizer that anyone publishes, and what is wrong with it.
    """
    longest_piece = _check_vocabulary(spec)
    squared = 0
    for section in _OWN_SECTIONS:
        parts = list(_parts(spec.get(section), section))
        if len(parts) > MOST_PARTS:
            raise ValueError(f"{section}: expected at most {MOST_PARTS} parts, got {len(parts)}")
        for part in parts:
            squared += _check_part(part, section)
    if _count_values(spec.get("post_processor")) > MOST_POST_VALUES:
        raise ValueError(f"post_processor: expected at most {MOST_POST_VALUES} values, got more")
    before = [part for name in _OWN_SECTIONS[:2] for part in _parts(spec.get(name), name)]
    growth = _growth(before)
    for what, grows in (
        ("text", growth),
        ("decoded text", _growth(list(_parts(spec.get("decoder"), "decoder")))),
    ):
        if grows > MOST_GROWTH:
            raise ValueError(
                f"expected {what} to grow at most {MOST_GROWTH} times, got {min(grows, 10**9):.0f}"
            )
    normalizers = len(list(_parts(spec.get("normalizer"), "normalizer")))
    longest = int(MOST_CHARACTERS / growth / max(normalizers / 4, 1))  # each takes its time anew
    if (spec.get("model") or {}).get("type") == "Unigram":  # tries each piece at each place
        longest = min(longest, MOST_CHARACTERS // longest_piece)
    return min(longest, int(MOST_SQUARED / squared**0.5)) if squared else longest


def _check_vocabulary(spec: Mapping[str, Any]) -> int:
    """The length of the longest token, in characters, at least 1."""
    added, model = spec.get("added_tokens") or [], spec.get("model") or {}
    if not isinstance(added, list) or not isinstance(model, dict):
        raise ValueError("expected a list of added_tokens and a model")
    if not all(isinstance(token, dict) for token in added):
        raise ValueError("added_tokens: expected objects")
    contents = [str(token.get("content", "")) for token in added]
    if len(added) > MOST_ADDED or sum(map(len, contents)) > MOST_ADDED_CHARACTERS:
        raise ValueError(
            f"added_tokens: expected at most {MOST_ADDED} of {MOST_ADDED_CHARACTERS} characters together, "
            f"got {len(added)} of {sum(map(len, contents))}"
        )
    vocab = model.get("vocab") or {}
    if not isinstance(vocab, dict | list):
        raise ValueError(f"model: expected a vocabulary, got {type(vocab).__name__}")
    if isinstance(vocab, list):
        pieces = [str(entry[0]) for entry in vocab if isinstance(entry, list) and entry]
        ids: list[Any] = []
    else:
        pieces, ids = list(vocab), list(vocab.values())
    ids += [token.get("id") for token in added]
    largest = max((i for i in ids if isinstance(i, int)), default=0)
    if largest >= MOST_IDS:  # the library counts up to it, and keeps each id that is missing
        raise ValueError(f"expected ids below {MOST_IDS}, got {largest}")
    if (longest := max(map(len, (*pieces, *contents)), default=0)) > LONGEST_TOKEN:
        raise ValueError(f"expected tokens of at most {LONGEST_TOKEN} characters, got one of {longest}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(str(model.get(name) or "")) > LONGEST_INSERT:
            raise ValueError(f"model: expected a {name} of at most {LONGEST_INSERT} characters, got more")
    word = model.get("max_input_chars_per_word", 0)
    if not isinstance(word, int) or word > LONGEST_WORD:
        raise ValueError(f"model: expected max_input_chars_per_word of at most {LONGEST_WORD}, got {word}")
    return max(longest, 1)


def _parts(value: Any, where: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The parts of a section that do something, its sequences taken apart."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
    inner = [value[name] for name in _LISTS if isinstance(value.get(name), list)]
    if not inner:
        yield value
        return
    if depth == DEEPEST:
        raise ValueError(f"{where}: expected sequences nested at most {DEEPEST} deep, got more")
    for one in inner:
        if len(one) > MOST_PARTS:
            raise ValueError(f"{where}: expected at most {MOST_PARTS} parts, got {len(one)}")
        for part in one:
            yield from _parts(part, where, depth + 1)


def _count_values(value: Any) -> int:
    waiting, count = [value], 0
    while waiting:
        one = waiting.pop()
        count += 1
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
    return count


def _check_part(part: Mapping[str, Any], section: str) -> bool:
    """Whether the part has a pattern whose time grows with the square of the text.

    Raises:
        ValueError: what it inserts is too long; its pattern may take for ever.
    """
    for name in ("content", "prepend", "replacement", "prefix", "suffix", "str_rep"):
        if isinstance(part.get(name), str) and len(part[name]) > LONGEST_INSERT:
            raise ValueError(f"{section}: expected a {name} of at most {LONGEST_INSERT} characters, got more")
    for name in ("single", "pair"):
        pieces = part.get(name)
        texts = (
            [p for p in pieces if isinstance(p, dict) and "Sequence" in p] if isinstance(pieces, list) else []
        )
        if len(texts) > (1 if name == "single" else 2):
            raise ValueError(f"{section}: expected a text once in {name}, got it {len(texts)} times")
    pattern = part.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        return _is_squared(pattern["Regex"], section)
    return False


def _growth(parts: Sequence[Mapping[str, Any]]) -> float:
    """How many characters these parts make of one at most.

    Unicode's mappings count once, the largest: they leave nothing for the next one to map, unless something
    was put in between.
    """
    growth, mapped = 1.0, 1
    for part in parts:
        kind = part.get("type")
        if kind in _UNICODE or kind == "Precompiled":
            longest = _UNICODE.get(str(kind)) or _longest_mapped(part)
            growth *= max(longest / mapped, 1)
            # SentencePiece's mapping is the file's own: no other that follows has been done with it.
            mapped = max(longest, mapped) if kind in _UNICODE else 1
        elif kind == "Replace":
            growth *= _growth_of_replacement(part)
            mapped = mapped if str(part.get("content", "")).isascii() else 1
        elif kind in ("Prepend", "Strip"):
            growth *= 1 if kind == "Strip" else 1 + len(str(part.get("prepend", "")))
        else:
            growth *= _DOUBLES.get(str(kind), 1)
    return growth


def _growth_of_replacement(part: Mapping[str, Any]) -> float:
    pattern, content = part.get("pattern"), len(str(part.get("content", "")))
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return max(1.0, content / max(len(pattern["String"]), 1))
    return 1.0 + content  # a pattern may match between any two characters


def _longest_mapped(part: Mapping[str, Any]) -> int:
    """Of SentencePiece's mapping: its length, the lookup table of that length, and strings ended by NUL."""
    raw = base64.b64decode(str(part.get("precompiled_charsmap", "")), validate=True)
    table = 4 + int.from_bytes(raw[:4], "little")
    return max((len(one.decode("utf-8", "replace")) for one in raw[table:].split(b"\0")), default=1) or 1


# ------------------------------------------------------------------------------------------------ patterns
_ESCAPES = re.compile(r"\\[pP]\{[^}]*\}|\\[hHXRK]|\\x\{[0-9A-Fa-f]+\}|\[:\^?\w+:\]")
_MOST_CHOICES = 6  # of different lengths, side by side


def _is_squared(pattern: str, section: str) -> bool:
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"{section}: expected a pattern of at most {LONGEST_PATTERN} characters, got more")
    shown = f"{section}: the pattern {pattern[:60]!r}"
    for end in _WHITE_SPACE:
        pattern = pattern.removesuffix(end)
    try:
        tree = _parser.parse(_plain(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shown} is not understood ({error})") from None
    try:
        tried = _tried(tree, False)
    except ValueError as error:
        raise ValueError(f"{shown} {error}") from None
    if (length := _written_out(tree)) > MOST_WRITTEN_OUT:
        raise ValueError(f"{shown} is {length} characters long when its repetitions are written out")
    if tried > 1:
        raise ValueError(f"{shown} has {tried} repetitions that may be tried at every length, expected one")
    return tried == 1


def _plain(pattern: str) -> str:
    """The pattern in the words of `re`: a class of characters, of whatever kind, is one letter here."""
    made, i = [], 0
    while i < len(pattern):
        if escape := _ESCAPES.match(pattern, i):
            made.append(r"\w")
            i = escape.end()
        elif pattern[i] == "\\":
            made.append(pattern[i : i + 2])
            i += 2
        elif pattern[i] == "[":
            i = _end_of_class(pattern, i)
            made.append(r"\w")
        else:
            made.append(pattern[i])
            i += 1
    return "".join(made)


def _end_of_class(pattern: str, start: int) -> int:
    depth, i = 0, start
    while i < len(pattern):
        if pattern[i] == "\\":
            i += 1
        elif pattern[i] == "[":
            depth += 1
            if pattern[i + 1 : i + 2] == "^":
                i += 1
            if pattern[i + 1 : i + 2] == "]":  # the first in a class is itself
                i += 1
        elif pattern[i] == "]":
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    raise re.error("a class without an end")


def _tried(tree: Any, after: bool) -> int:
    """How many repetitions a match may try at every length, because what comes after them may fail.

    Args:
        after: whether what follows this part of the pattern may fail.

    Raises:
        ValueError: the number of ways to match grows exponentially, or is not known.
    """
    tried, choices = 0, 0
    for kind, value in reversed(list(tree)):
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            least, most, inner = value
            shortest, longest = inner.getwidth()
            if most > 1 and (shortest != longest or shortest == 0 or _has_branch(inner)):
                raise ValueError("repeats what may itself be of several lengths")
            tried += _tried(inner, after) + (after and most > 8)
            choices += least != most
            after = after or (least > 0 and _may_fail(inner))
        elif kind in (sre.BRANCH, sre.SUBPATTERN, sre.ATOMIC_GROUP):
            branches = value[1] if kind is sre.BRANCH else [value[-1] if kind is sre.SUBPATTERN else value]
            choices += len(branches) > 1
            tried += max(_tried(branch, after) for branch in branches)
            after = after or all(map(_may_fail, branches))
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            tried += _tried(value[1], True)
            after = True
        elif kind in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN, sre.AT, sre.CATEGORY, sre.RANGE):
            after = True
        else:  # references to groups, conditions
            raise ValueError("has parts that are not known to end soon")
    if choices > _MOST_CHOICES:
        raise ValueError(f"has {choices} choices side by side, expected at most {_MOST_CHOICES}")
    return tried


def _written_out(tree: Any) -> int:
    """Characters of a pattern in which each `{n}` stands as n copies: what a library may make of it."""
    length = 0
    for kind, value in tree:
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            least, most, inner = value
            length += max(least if most == sre.MAXREPEAT else most, 1) * _written_out(inner)
        elif kind is sre.BRANCH:
            length += sum(map(_written_out, value[1]))
        elif kind in (sre.SUBPATTERN, sre.ATOMIC_GROUP):
            length += _written_out(value[-1] if kind is sre.SUBPATTERN else value)
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            length += _written_out(value[1])
        else:
            length += 1
    return length


def _has_branch(tree: Any) -> bool:
    return any(
        kind is sre.BRANCH or (kind is sre.SUBPATTERN and _has_branch(value[-1])) for kind, value in tree
    )


def _may_fail(tree: Any) -> bool:
    """Whether there is a text in front of which this part of a pattern does not match."""
    for kind, value in tree:
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            fails = value[0] > 0 and _may_fail(value[2])
        elif kind is sre.BRANCH:
            fails = all(map(_may_fail, value[1]))
        elif kind in (sre.SUBPATTERN, sre.ATOMIC_GROUP):
            fails = _may_fail(value[-1] if kind is sre.SUBPATTERN else value)
        else:
            fails = True
        if fails:
            return True
    return False
