"""Calls of tools in an answer, read while it is made.

reader = CallReader(MARKUPS["hermes"], tools)
text, pieces = reader.put(piece)     # text beside calls, and more of the calls
calls = whole_calls(pieces)
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from data.tools import Tool, ToolCall
from inference.markup import SCALARS, Layout, Markup, kinds_of, quoted

_STRING = r'"(?:[^"\\]|\\.)*+"?'  # of JSON, which may not have ended
_MARKS = re.compile(rf"{_STRING}|'(?:[^'\\]|\\.)*+'?|[(){{}}\[\],]", re.DOTALL)


@dataclass(frozen=True)
class CallPiece:
    """More of one call of an answer. The first has the name, the last of a whole call is `ended`."""

    index: int
    id: str
    name: str = ""
    arguments: str = ""
    ended: bool = False


@dataclass
class Kept:
    """What is certain of a call's arguments, however they go on: the JSON `made` of the text up to `at`; and
    up to `seen`, within a value or an object, its `depth` and the bare `word` before the next mark. Reading
    goes on there, so that a piece of long arguments takes no longer than one of short ones."""

    made: str = ""
    at: int = 0
    seen: int = 0
    depth: int = 0
    word: str = ""


def arguments_in(layout: Layout, text: str, kept: Kept) -> tuple[str, int]:
    """The JSON of the arguments that a text begins with, as far as it is certain while more of the text may
    come; and their end in it, -1 before that. `kept` is of an earlier beginning of the text."""
    if layout.named is not None:
        return _fields(layout, text, kept)
    if layout.quote:
        return _bare_object(layout.quote, text, kept)
    end = _value_end(text, kept)
    return text if end < 0 else text[:end], end


def _fields(layout: Layout, text: str, kept: Kept) -> tuple[str, int]:
    schemas = {one.name: one.schema for one in layout.named or () if layout.ends}
    kept.made = kept.made or "{"
    while not text.startswith(layout.tail, kept.at):
        if not (begun := layout.begins.match(text, kept.at)):
            return kept.made, -1
        known, at = kinds_of(schemas.get(begun[1], {})), begun.end()
        kept.seen = max(kept.seen, at)
        made = f"{kept.made}{', ' * (kept.made != '{')}{quoted(begun[1])}: "
        end = text.find(layout.ends, at) if layout.ends else _value_end(text, kept)
        if known == {"text"}:
            certain = len(text) - len(layout.ends) + 1 if end < 0 else end
            made += quoted(text[at:certain])[: -1 if end < 0 else None]
        elif end >= 0:
            value = text[at:end]
            is_scalar = any(re.fullmatch(SCALARS[kind], value) for kind in known & SCALARS.keys())
            made += quoted(value) if "text" in known and not is_scalar else literal(value)
        if end < 0:
            return made, -1
        kept.made, kept.at, kept.depth = made, end + len(layout.ends), 0
        kept.seen = kept.at
    return kept.made + "}", kept.at


def _bare_object(quote: str, text: str, kept: Kept) -> tuple[str, int]:
    """`arguments_in` of an object with bare names and words, and texts in quotes of their own."""
    mark, end = re.escape(quote), len(text) - begun(text, quote)
    token = rf'{mark}(?P<text>.*?)(?P<ends>{mark}|\Z)|{_STRING}|[{{}}\[\]:,]|(?:(?!{mark})[^{{}}\[\]:,"])+'
    made, word, depth = kept.made, kept.word, kept.depth
    for found in re.compile(token, re.DOTALL).finditer(text, kept.seen, end):
        said = found[0]
        if (inner := found["text"]) is not None:
            made += quoted(inner)[: None if found["ends"] else -1]
        elif said[0] == '"':
            made += said
        elif said not in "{}[]:,":
            word = said.strip()
        else:
            made += (word and (quoted(word) if said == ":" else literal(word))) + said
            word, depth = "", depth + (said in "{[") - (said in "}]")
            if depth == 0 and said in "}]":
                return made, found.end()
        if found.end() < end:  # it goes on no more
            kept.made, kept.word, kept.depth, kept.seen = made, word, depth, found.end()
    return made, -1


def _value_end(text: str, kept: Kept) -> int:
    """The end of the value of JSON or Python that is read at `kept.seen`; -1 where more of the text is
    needed."""
    for found in _MARKS.finditer(text, kept.seen):
        if kept.depth == 0 and found[0] in ",)":
            return found.start()
        closes = found[0] in ")]}"
        depth = kept.depth + (found[0] in "([{") - closes
        if depth == 0 and closes:
            return found.end()
        if found.end() < len(text) or found[0] in "()[]{},":
            kept.depth, kept.seen = depth, found.end()
    return -1


def no_constant(name: str) -> None:
    """`parse_constant` of json.loads, which takes NaN and Infinity else. Raises ValueError."""
    raise ValueError(f"{name} is no JSON")


def literal(text: str) -> str:
    """JSON of a value that is written as JSON or as Python; of a text that is neither, as a string. A number
    that no double holds becomes the largest."""
    beyond, most = False, sys.float_info.max

    def number(digits: str) -> int | float:
        nonlocal beyond
        nearest = max(-most, min(value := float(digits), most))
        beyond |= value != nearest
        return int(digits) if value == nearest and digits.lstrip("-").isdecimal() else nearest

    try:
        value = json.loads(text, parse_float=number, parse_int=number, parse_constant=no_constant)
        return json.dumps(value, ensure_ascii=False) if beyond else text
    except ValueError:
        try:
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return quoted(text)


def begun(text: str, mark: str) -> int:
    """The number of characters at the end of a text that may begin a mark."""
    return max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


class CallReader:
    """Separates calls from the text beside them while both come. Whatever is no call of these tools is text;
    the space before a call is neither. must: the answer has no text, so that its cut end is one of a call."""

    def __init__(self, markup: Markup, tools: Sequence[Tool], must: bool = False):
        self._must, self._markup, self._held, self._in_block = must, markup, "", False
        layouts = ((tool, markup.layout(tool)) for tool in tools)
        self._heads = {layout.head: (tool.name, layout) for tool, layout in layouts}
        self._layout: Layout | None = None  # of the call whose arguments are `_held`
        self._index, self._id, self._made = -1, "", 0  # of it, and how much of its JSON was given
        self._kept = Kept()

    def put(self, text: str, last: bool = False) -> tuple[str, list[CallPiece]]:
        """(more of the text, more of the calls). With the `last` of it, nothing is held back but a call that
        is not whole."""
        self._held, shown, pieces, goes_on = self._held + text, "", list[CallPiece](), True
        while goes_on:
            if self._layout is None:
                more, goes_on = self._beside(pieces)
                shown += more
            else:
                goes_on = self._read(self._layout, pieces)
        if last and self._layout is None:
            shown, self._held = shown + self._held * (not self._must), ""
        return shown, pieces

    def _beside(self, pieces: list[CallPiece]) -> tuple[str, bool]:
        """(more of the text up to the next call, whether there is more to read)."""
        opens = self._markup.marks.opens
        start = 0 if self._in_block else self._held.find(opens)
        if start < 0:  # the beginning of a mark, and space before it, may belong to a call
            return self._shown(len(self._held) - begun(self._held, opens)), False
        before = "" if self._in_block else opens + self._markup.before
        held = self._held[start:]
        heads = {before + head: known for head, known in self._heads.items()}
        if any(head.startswith(held) and head != held for head in heads):
            return self._shown(start), False
        if head := max(filter(held.startswith, heads), key=len, default=""):
            text = self._shown(start)
            name, self._layout = heads[head]
            self._index, self._id, self._made = self._index + 1, f"call_{secrets.token_hex(12)}", 0
            self._kept = Kept()
            pieces.append(CallPiece(self._index, self._id, name))
            self._held = held[len(head) :]
            return text, True
        self._in_block, end = False, start + len(opens)
        text, self._held = self._held[:end], self._held[end:]
        return text, bool(self._held)

    def _shown(self, end: int) -> str:
        """The text up to here without space at its end, which is held back with what follows."""
        text = self._held[:end].rstrip()
        self._held = self._held[len(text) :]
        return text

    def _read(self, layout: Layout, pieces: list[CallPiece]) -> bool:
        """More of a call, and whether it has ended."""
        made, end = arguments_in(layout, self._held, self._kept)
        if len(made) > self._made:
            pieces.append(CallPiece(self._index, self._id, "", made[self._made :]))
            self._made = len(made)
        rest, inner = self._held[end:] if end >= 0 else "", layout.tail + self._markup.inner
        closes = layout.tail + self._markup.after + self._markup.marks.closes
        self._in_block = bool(self._markup.inner) and rest.startswith(inner)
        if not self._in_block and not rest.startswith(closes):
            return False
        pieces.append(CallPiece(self._index, self._id, ended=True))
        self._layout, self._held = None, rest[len(inner if self._in_block else closes) :]
        return True


def whole_calls(pieces: Sequence[CallPiece]) -> list[ToolCall]:
    calls = []
    for _, group in groupby(pieces, lambda piece: piece.index):
        parts = list(group)
        if parts[-1].ended:
            arguments = literal("".join(one.arguments for one in parts))
            calls.append(ToolCall(parts[0].id, parts[0].name, arguments))
    return calls
