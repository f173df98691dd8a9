"""The grammar of DocTags, byte by byte, so that it holds for tokenizers that spell a tag with several tokens.

    state = run(START, "<doctag><otsl><loc_1><loc_2><loc_30><loc_40><fcel>a")   # None where it is no DocTags
    closing(state)                                          # "<nl></otsl></doctag>": the shortest end of it
    Tokens(texts, special).allowed(state)                   # (V,) bool: the tokens that may come next

It allows what the serializer of docling-core 2.104 writes, with boxes or without, indented or not, and what
its reader reads. Elements close in the order in which they were opened; a box is four `<loc_N>` of 0 to 500,
the first two not larger than the last two; all rows of a table are as wide as its first, and none begins
with `<lcel>`, nor the first with `<ucel>`. Between tags stands any text that forms none; in code, any.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

HEADERS = tuple(f"section_header_level_{level}" for level in range(1, 7))
WORDS = ("title", "text", "paragraph", "page_header", "page_footer", "footnote", "formula", "caption")
WORDS += (*HEADERS, "reference", "references", "handwritten_text", "document_index")
WORDS += ("checkbox_selected", "checkbox_unselected")
LISTS, FIGURES = ("ordered_list", "unordered_list"), ("picture", "chart")
TABLES = ("otsl", "chart", "document_index")
BLOCKS = (*WORDS, *LISTS, "otsl", *FIGURES, "code", "key_value_region", "inline")
HOLDS = {  # the elements in an element
    **dict.fromkeys(WORDS, ("inline",)),
    **dict.fromkeys(LISTS, ("list_item",)),
    **dict.fromkeys(FIGURES, ("caption", "smiles")),
    **dict.fromkeys(("", "doctag", "list_item"), BLOCKS),
    "otsl": ("caption",),
    "inline": (*WORDS, "code", "picture"),
}
TEXTS = {*WORDS, "list_item", "code", "smiles", "key"}  # those that have text
FULL = ["fcel", "ched", "rhed", "srow"]  # cells with text
CELLS = [*FULL, "ecel", "lcel", "ucel", "xcel"]
GRAPH = "key|value|unspecified|checkbox"  # cells of a key_value_region, which have numbers
SPACE, MOST_SPACES = " \t\r\n", 8  # between elements
MOST_OPEN, MOST_BOXES, MOST_COLUMNS, LARGEST = 24, 16, 128, 500
_KNOWN = re.compile(
    rf"</?(?:{'|'.join({*HOLDS, *BLOCKS, 'list_item', 'smiles'} - {''})}|(?:{GRAPH})_\d+)>"
    rf"|<(?:{'|'.join(CELLS)}|nl|page_break|loc_\d+|link_\d+)>"
)
_NUMBER = r"(?:0|[1-9]\d{0,3})>?"


class Open(NamedTuple):
    """An element that is open.

    box: the coordinates of the box that is being read. boxes: how many were. begun: more than boxes was.
    cell: a cell that has text is open, `blank` as long as it has none. width: of a table, 0 in its first row;
    column: how many cells the row has. spaces: between the elements in it, at this place.
    """

    tag: str
    box: tuple[int, ...] = ()
    boxes: int = 0
    begun: bool = False
    cell: bool = False
    blank: bool = False
    width: int = 0
    column: int = 0
    spaces: int = 0

    @property
    def name(self) -> str:
        return "key" if self.tag.split("_")[0] in GRAPH.split("|") and self.tag[-1].isdigit() else self.tag

    @property
    def takes_text(self) -> bool:
        return not self.box and (self.cell or (self.name in TEXTS and not self.column))


class State(NamedTuple):
    """The open elements, the first of which is the page, and what may be the beginning of a tag."""

    stack: tuple[Open, ...]
    tail: str = ""

    @property
    def may_end(self) -> bool:
        return len(self.stack) == 1 and not self.tail


START = State((Open(""),))


@lru_cache(4096)
def _marks(top: Open, deep: bool) -> tuple[dict[str, bool], list[tuple[str, str]]]:
    """The tags that may come next: whether each of their beginnings is all of it; and those of a kind, as
    their first characters and a pattern of all beginnings of what follows."""
    if top.box or top.tag == "end":
        return {}, [("<loc_", _NUMBER)] if top.box else []
    tags, kinds, name = list[str](), list[tuple[str, str]](), top.name
    if not (top.cell and top.blank):
        tags += [f"</{top.tag}>"] * (top.tag != "" and not top.column)
        if not (top.column or deep):
            tags += [f"<{held}>" for held in HOLDS.get(name, ())]
        tags += ["<page_break>"] * (name in ("", "doctag")) + ["<doctag>"] * (name == "" and not top.begun)
        if name in TABLES:
            column, first = top.column, not top.width
            banned = {"lcel": not column, "ucel": first, "xcel": first and not column}
            if column < (top.width or MOST_COLUMNS):
                tags += [f"<{cell}>" for cell in CELLS if not banned.get(cell)]
            tags += ["<nl>"] * (column > 0 and column in (column if first else 0, top.width))
    if not top.begun and name not in ("", "doctag", *LISTS) and (top.cell or not top.column):
        kinds += [("<loc_", _NUMBER)] * (top.boxes < MOST_BOXES)
        kinds += [("<", "[a-z_]+>?")] * (name in FIGURES) + [("<_", r"[\w#+]+(?:(?<=_)>)?")] * (
            name == "code"
        )
    if name == "key":
        kinds.append(("<link_", _NUMBER))
    if name == "key_value_region":
        kinds += [(f"<{kind}_", _NUMBER) for kind in GRAPH.split("|")]
    return {tag[:end]: end == len(tag) for tag in tags for end in range(1, len(tag) + 1)}, kinds


def _fits(state: State, tail: str) -> bool | None:
    """Whether this is all of a tag that may come here, or (False) its beginning; None for neither."""
    top = state.stack[-1]
    plain, kinds = _marks(top._replace(spaces=0), len(state.stack) >= MOST_OPEN)
    if tail in plain:
        return plain[tail]
    for head, pattern in kinds:
        rest = tail[len(head) :]
        if head.startswith(tail):
            return False
        if tail.startswith(head) and re.fullmatch(pattern, rest):
            if head == "<":  # a picture's class
                return tail[-1] == ">" if tail == "<chart>" or not _KNOWN.fullmatch(tail) else None
            if head != "<loc_":
                return tail[-1] == ">"
            least, value, whole = _least(top), int(rest.strip(">")), tail[-1] == ">"
            ends = [
                (value * size, value * size + size - 1)
                for size in ((1,) if whole or not value else (1, 10, 100))
            ]
            if any(least <= high and low <= LARGEST for low, high in ends):
                return whole
    return None


def _least(top: Open) -> int:
    """The least coordinate that may come next."""
    return top.box[len(top.box) - 2] if len(top.box) >= 2 else 0


def _after(stack: tuple[Open, ...], tag: str) -> tuple[Open, ...]:
    """The open elements after a tag that may come."""
    *below, top = stack
    name, top = tag.strip("</>"), top._replace(spaces=0)
    if tag.startswith("<loc_"):
        box = (*top.box, int(name[4:]))
        top = top._replace(box=box if len(box) < 4 else (), boxes=top.boxes + (len(box) == 4))
    elif tag.startswith("</"):
        last = below.pop()
        top = last._replace(begun=True, spaces=0) if name != "doctag" else Open("end")
    elif name in CELLS:
        full = name in FULL
        top = top._replace(column=top.column + 1, cell=full, blank=full, begun=not full, boxes=0)
    elif name == "nl":
        top = top._replace(column=0, width=top.width or top.column, cell=False)
    elif name in HOLDS.get(top.name, ()) or top.name == "key_value_region" or name == "doctag":
        below, top = [*below, top._replace(begun=True)], Open(name)
    else:
        top = top._replace(begun=True)
    return (*below, top)


def step(state: State, char: str, text: bool = True) -> State | None:
    """The state after one byte, a character of Latin-1; None where it may not come. text: False where it
    belongs to a special token, which is (a part of) a tag or nothing."""
    stack, top, tail = state.stack, state.stack[-1], state.tail + char
    if tail[0] == "<":
        if (fits := _fits(state, tail)) is not None:
            return State(_after(stack, tail)) if fits else State(stack, tail)
        if not (text and top.takes_text) or (top.tag != "code" and _KNOWN.fullmatch(tail)):
            return None
        tail = tail if re.fullmatch(r"</?\w{0,30}", tail) else "<" * (char == "<")
    elif not text:
        return None
    elif not top.takes_text:
        room = char in SPACE and not top.box and top.spaces < MOST_SPACES and top.tag != "end"
        return State((*stack[:-1], top._replace(spaces=top.spaces + 1))) if room else None
    elif char in SPACE or (top.begun and not top.blank):
        return None if top.cell and top.blank else state
    else:
        tail = ""
    return State((*stack[:-1], top._replace(begun=True, blank=False)), tail)


def run(state: State | None, text: str, plain: bool = True) -> State | None:
    """The state after these bytes, see `step`."""
    for char in text:
        state = state and step(state, char, plain)
    return state


@lru_cache(1024)
def closing(state: State, depth: int = 0) -> str:
    """A shortest way to close elements until at most `depth` are open: 0 ends the page."""
    said, place = "", state
    while len(place.stack) > max(depth, 1) or (place.tail and not depth):
        top, tail = place.stack[-1], place.tail
        more = f"</{top.tag}>"
        if len(tail) > 1 and more.startswith(tail) and _fits(place, more):
            more = more[len(tail) :]
        elif tail and not top.takes_text:
            plain, kinds = _marks(top._replace(spaces=0), len(place.stack) >= MOST_OPEN)
            numbers = [*range(LARGEST + 1), "other"]
            ends = [
                *plain,
                f"{tail}>",
                f"{tail}_>",
                *(f"{head}{number}>" for head, _ in kinds for number in numbers),
            ]
            more = min((end for end in ends if end.startswith(tail) and _fits(place, end)), key=len)[
                len(tail) :
            ]
        elif top.box:
            more = f"<loc_{_least(top)}>"
        elif top.cell and top.blank:
            more = "-"
        elif top.column:
            more = "<ecel>" if top.column < top.width else "<nl>"
        said, after = said + more, run(place, more)
        assert after is not None, f"{more!r} may come after {place}"
        place = after
    return said


class Tokens:
    """The tokens of a tokenizer, in the order of their bytes, for masks of what may come after a state.

    Args:
        texts: of each id, its bytes as characters of Latin-1; "" for one that never comes.
        special: ids that are tags (or parts of tags, as `<loc_`) if they may come at all.
    """

    def __init__(self, texts: Sequence[str], special: Sequence[int]):
        self.texts, self.special = texts, {*special}
        ids = sorted((one for one, text in enumerate(texts) if text), key=texts.__getitem__)
        self._kinds = [[one for one in ids if (one in self.special) != plain] for plain in (False, True)]
        self._sorted = [[texts[one] for one in kind] for kind in self._kinds]
        self._last = np.array([text.rfind("<") for text in self._sorted[True]], dtype=np.int64)
        self._plain = np.array(self._kinds[True], dtype=np.int64)
        self._longest = dict[str, list[tuple[str, int]]]()  # by first character, the longest token first
        for one, text in sorted(enumerate(texts), key=lambda pair: -len(pair[1])):
            if text:
                self._longest.setdefault(text[0], []).append((text, one))
        self.allowed = lru_cache(256)(self._allowed)
        self.spelled = lru_cache(1024)(self._spelled)

    def allows(self, state: State, token_id: int) -> bool:
        text = self.texts[token_id]
        return text != "" and run(state, text, token_id not in self.special) is not None

    def _spelled(self, text: str) -> tuple[int, ...]:
        """Ids of a text, each the longest token that goes on with it."""
        ids, place = list[int](), 0
        while place < len(text):
            fits = (one for said, one in self._longest[text[place]] if text.startswith(said, place))
            ids.append(next(fits))
            place += len(self.texts[ids[-1]])
        return tuple(ids)

    def _allowed(self, state: State) -> np.ndarray:
        """(V,) bool: the tokens that may come after a state."""
        found = np.zeros(len(self.texts), dtype=bool)
        for plain in (False, True):
            self._visit(state, plain, 0, len(self._kinds[plain]), 0, found)
        return found

    def _visit(self, state: State, plain: bool, low: int, high: int, depth: int, found: np.ndarray) -> None:
        """Note which tokens of a range may come, all of which begin with the same `depth` bytes, after which
        the state is this one."""
        top, texts, ids = state.stack[-1], self._sorted[plain], self._kinds[plain]
        if (
            plain and top.takes_text and not state.tail and not (top.cell and top.blank)
        ):  # but for < all goes on
            late = self._last[low:high] >= depth
            found[self._plain[low:high][~late]] = True
            for place in (low + late.nonzero()[0]).tolist():
                found[ids[place]] = run(state, texts[place][depth:]) is not None
            return
        while low < high:
            if len(text := texts[low]) == depth:
                found[ids[low]] = True
                low += 1
                continue
            end = bisect_left(texts, text[:depth] + chr(ord(text[depth]) + 1), low, high)
            if (after := step(state, text[depth], plain)) is not None:
                self._visit(after, plain, low, end, depth + 1, found)
            low = end
