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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from data.tools import Tool, ToolCall
from inference.markup import SCALARS, Layout, Markup, kinds_of, quoted


@dataclass(frozen=True)
class CallPiece:
    """More of one call of an answer. The first has the name, the last of a whole call is `ended`."""

    index: int
    id: str
    name: str = ""
    arguments: str = ""
    ended: bool = False


class ArgumentReader:
    """JSON of the arguments of one call, made while they come in a layout. `ended` is true at their end."""

    def __init__(self, layout: Layout):
        self.ended, self._layout = False, layout
        self._until = ""  # what ends the text that is being read; "" outside of texts
        # Of an object: how many are open, whether a string of JSON is, and a name or value that is not whole.
        self._depth, self._in_string, self._escaped, self._word = 0, False, False, ""
        # Of fields: how the JSON begins, what joins the next one to it, and the kinds of all parameters.
        self._begin, self._comma = "" if layout.named is None else "{", ""
        self._kinds = {one.name: kinds_of(one.schema) for one in layout.named or ()} if layout.ends else {}

    def put(self, text: str) -> tuple[str, str]:
        """(more of the JSON, what is left of `text` until more of it comes, or after the end)."""
        made, self._begin = self._begin, ""
        step = self._object if self._layout.named is None else self._field
        while not self.ended:
            read = self._text(text) if self._until else step(text)
            if read is None:
                break
            made, text = made + read[0], read[1]
        return made, text

    def _text(self, text: str) -> tuple[str, str] | None:
        """(more of the JSON, the rest) of a text in quotes; None until more of it comes. The next two methods
        do the same."""
        value, end, rest = text.partition(self._until)
        value = value if end else text[: 1 - len(self._until)]
        if not end and not value:
            return None
        self._until = "" if end else self._until
        return quoted(value)[1:-1] + '"' * bool(end), rest if end else text[len(value) :]

    def _field(self, text: str) -> tuple[str, str] | None:
        layout = self._layout
        if text.startswith(layout.tail):
            self.ended = True
            return "}", text
        if not (begun := layout.begins.match(text)):
            return None
        name, value = begun[1], text[begun.end() :]
        kinds, made = self._kinds.get(name, {"json"}), f"{self._comma}{quoted(name)}: "
        if kinds == {"text"}:
            self._comma, self._until = ", ", layout.ends
            return f'{made}"', value
        end = value.find(layout.ends) if layout.ends else _python_end(value)
        if end < 0:
            return None
        self._comma, value, rest = ", ", value[:end], value[end + len(layout.ends) :]
        is_scalar = any(re.fullmatch(SCALARS[kind], value) for kind in kinds & SCALARS.keys())
        return made + (quoted(value) if "text" in kinds and not is_scalar else literal(value)), rest

    def _object(self, text: str) -> tuple[str, str] | None:
        quote, made = self._layout.quote, ""
        if quote and not self._in_string:
            if text.startswith(quote):
                self._until = quote
                return '"', text[len(quote) :]
            if quote.startswith(text):
                return None
        for at, char in enumerate(text):
            if at and char == quote[:1] and not self._in_string:
                return made, text[at:]
            made += self._character(char)
            if self.ended:
                return made, text[at + 1 :]
        return (made, "") if text else None

    def _character(self, char: str) -> str:
        """The JSON that one character of an object completes."""
        if self._in_string:
            self._escaped, self._in_string = not self._escaped and char == "\\", self._escaped or char != '"'
            return char
        bare = self._layout.quote
        if bare and char not in '{}[]:,"':
            self._word += char
            return ""
        word, self._word = self._word.strip(), ""
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        self.ended = not self._depth and char in ("}" if bare else "}]")
        return (word and (quoted(word) if char == ":" else literal(word))) + char


def _python_end(text: str) -> int:
    """The end of the Python value that a text begins with; -1 where more of the text is needed."""
    depth, quote, escaped = 0, "", False
    for at, char in enumerate(text):
        if escaped:
            escaped = False
        elif quote:
            escaped, quote = char == "\\", "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif depth == 0 and char in ",)":
            return at
        elif char in ")]}":
            depth -= 1
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
        self._must, self._markup, self._held, self._count = must, markup, "", 0
        layouts = ((tool, markup.layout(tool)) for tool in tools)
        self._heads = {layout.head: (tool, layout) for tool, layout in layouts}
        self._call: tuple[str, str, ArgumentReader] | None = None  # its id, and what follows its arguments
        self._in_block = False

    def put(self, text: str, last: bool = False) -> tuple[str, list[CallPiece]]:
        """(more of the text, more of the calls). With the `last` of it, nothing is held back but a call that
        is not whole."""
        self._held, pieces = self._held + text, list[CallPiece]()
        shown = "".join(self._steps(pieces))
        if last and self._call is None:
            shown, self._held = shown + self._held * (not self._must), ""
        return shown, pieces

    def _steps(self, pieces: list[CallPiece]) -> Iterator[str]:
        opens = self._markup.marks.opens
        while self._held:
            if self._call is not None:
                if not self._read(*self._call, pieces):
                    return
                continue
            start = 0 if self._in_block else self._held.find(opens)
            if start < 0:  # the beginning of a mark, and space before it, may belong to a call
                yield self._shown(len(self._held) - begun(self._held, opens))
                return
            before = "" if self._in_block else opens + self._markup.before
            held = self._held[start:]
            heads = {before + head: head for head in self._heads}
            if any(head.startswith(held) and head != held for head in heads):
                yield self._shown(start)
                return
            if head := max(filter(held.startswith, heads), key=len, default=""):
                yield self._shown(start)
                tool, layout = self._heads[heads[head]]
                self._held = held[len(head) :]
                self._call = f"call_{secrets.token_hex(12)}", layout.tail, ArgumentReader(layout)
                self._count += 1
                pieces.append(CallPiece(self._count - 1, self._call[0], tool.name))
            else:
                self._in_block = False
                text, self._held = self._held[: start + len(opens)], self._held[start + len(opens) :]
                yield text

    def _shown(self, end: int) -> str:
        """The text up to here without space at its end, which is held back with what follows."""
        text = self._held[:end].rstrip()
        self._held = self._held[len(text) :]
        return text

    def _read(self, call_id: str, tail: str, arguments: ArgumentReader, pieces: list[CallPiece]) -> bool:
        """More of a call, and whether it has ended."""
        if not arguments.ended:
            made, self._held = arguments.put(self._held)
            if made:
                pieces.append(CallPiece(self._count - 1, call_id, "", made))
            if not arguments.ended:
                return False
        inner, closes = self._markup.inner, self._markup.after + self._markup.marks.closes
        self._in_block = bool(inner) and self._held.startswith(tail + inner)
        if not self._in_block and not self._held.startswith(tail + closes):
            return False
        pieces.append(CallPiece(self._count - 1, call_id, ended=True))
        self._call, self._held = None, self._held[len(tail + (inner if self._in_block else closes)) :]
        return True


def whole_calls(pieces: Sequence[CallPiece]) -> list[ToolCall]:
    calls = []
    for _, group in groupby(pieces, lambda piece: piece.index):
        parts = list(group)
        if parts[-1].ended:
            arguments = literal("".join(one.arguments for one in parts))
            calls.append(ToolCall(parts[0].id, parts[0].name, arguments))
    return calls
