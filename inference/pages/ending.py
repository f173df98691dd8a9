"""How a page ends: its grammar, a guard for text that repeats, and a limit that follows from its size.

    form = page_form(checkpoint, checkpoint.processor.reading, image.size)
    options = GenerationOptions(max_new_tokens=form.limit, constraint=form.constraint())
    form.ended(output)                                # "whole", "guard" or "cut"

**Limit.** A character that can be read has some 6 x 10 pixels and a token is one to four of them, in a table
of numbers one and the tag of its cell: a token to PIXELS pixels. A position of an image in the prompt stands
for at most POSITION tokens (arXiv 2510.18234 finds that more cannot be read back). LEAST more are for the
boxes of a small image, MOST is the longest page, and all of it fits the context. Before the limit comes, what
is open is closed, so that a page that is cut is read like any other.

**Guard.** The same span of up to PERIOD tokens may follow itself REPEATS times, or until the run is TEXT
tokens long: a leader of dots and a line of a form are shorter. With a line break in it, as on a sheet of
labels, it may be twice as long; cells of a table may be equal in all of a row, and ROWS rows. An element of
DocTags that repeats its box as well has no excuse. Then the piece in which it repeats is closed, and the page
goes on; after PIECES of them, or where none is open, the page ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.reading import Reading
from generation.sampling import keep
from inference.checkpoint import Checkpoint
from inference.errors import RequestError
from inference.grammar import Form
from inference.pages.doctags import BLOCKS, COLUMNS, FIGURES, FORM, doctags_grammar

PIXELS, POSITION, LEAST, MOST, PROMPT = 128, 16, 256, 8192, 256
PERIOD, REPEATS, TEXT, ROWS, PIECES = 512, 4, 256, 50, 3
RESERVE = 100  # tokens that a tag may take before anything can be closed, where each byte is one, and its end
FAR = 12 * COLUMNS  # no page takes more tokens to close
_CELL, _ROW = re.compile(r"<(?:[efulx]cel|[cr]hed|srow)>|<t[dh]\b|\|"), re.compile(r"<nl>|</tr|\n")
_TAG = re.compile(r"<(/?)([a-z]\w*?)(_\d+)?(?:\s[^<>]*)?>|(^```|\$\$|\\[][()])", re.MULTILINE)
_MARKS = {"```": "\n```\n", "$$": "$$", "\\[": "\\]", "\\(": "\\)"}
_HTML = {*_MARKS, *"table thead tbody tfoot tr td th ul ol li div p b i sub sup".split()}
_TABLES = ("otsl", "chart", "document_index")
_DOCTAGS = {*BLOCKS, *FORM, "doctag", "list_item", "smiles", "section_header_level"}


class PageForm:
    """The form of one page's answers, of at most `limit` tokens: see `page_form`."""

    def __init__(self, checkpoint: Checkpoint, in_doctags: bool, limit: int):
        self.limit, self.in_doctags, self.begin = limit, in_doctags, None
        vocabulary = checkpoint.forms.constraints.vocabulary
        self.tokenizer, self.stop_ids = vocabulary.tokenizer, vocabulary.stop_ids
        if in_doctags:
            added = checkpoint.processor.tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
            grammar = doctags_grammar({token.content: one for one, token in added if token.special})
            self.begin = checkpoint.forms.constraint(grammar).constraint
        self._pages = list[PageEnd]()

    def constraint(self) -> Form:
        """`GenerationOptions.constraint`, with `limit` as max_new_tokens."""
        return Form(self._page)

    def _page(self) -> PageEnd:
        self._pages.append(PageEnd(self))
        return self._pages[-1]

    def page(self, output: Any) -> PageEnd:
        """The constraint of an answer of this form, a `RequestOutput`."""
        return next(one for one in self._pages if one.ids == output.token_ids)

    def ended(self, output: Any) -> str:
        """How the page ended: "whole" (the model ended it by itself), "guard" (pieces of it were closed
        because they repeated), or "cut" (its limit was near)."""
        page = self.page(output)
        return "cut" if page.cut or not page.over else "guard" if page.closed else "whole"


def page_form(
    checkpoint: Checkpoint,
    reading: Reading,
    size: tuple[int, int],
    limit: int | None = None,
    prompt: int | None = None,
) -> PageForm:
    """The form of the answer that is a page of `size` (width, height) in pixels.

    Args:
        limit: of its tokens, in place of the one that follows from the size.
        prompt: positions of the prompt with the image; None estimates them.

    Raises RequestError where there is no room for any page.
    """
    positions = checkpoint.processor.plan(size).positions
    own = LEAST + min(positions * POSITION, size[0] * size[1] // PIXELS)
    room = checkpoint.context - (positions + PROMPT if prompt is None else prompt)
    if (most := min(limit or min(own, MOST), room)) < LEAST // 2:
        raise RequestError(f"limit and context: expected {LEAST // 2} or more tokens for a page, got {most}")
    return PageForm(checkpoint, reading.form == "doctags", most)


class PageEnd:
    """The `generation.protocol.Constraint` of one page.

    over: it has ended. cut: because its limit was near. closed: how many pieces the guard has closed.
    """

    thinking = full = False
    choice = None

    def __init__(self, form: PageForm):
        self._form, self._held = form, None if form.begin is None else form.begin()
        self.over = self.cut = False
        self.closed, self.text, self.ids = 0, "", list[int]()
        self._forced, self._if_stopped = list[int](), list[int]()
        self._runs, self._periods = np.zeros(PERIOD, dtype=np.int64), np.arange(1, PERIOD + 1)
        self._last = np.full(PERIOD, -1)  # the latest tokens, the last one first

    def close(self, scores: Tensor) -> None:
        """Where the model would rather stop than go on, it closes the page."""
        stop, self._if_stopped = int(scores.argmax()), []
        if stop in self._form.stop_ids and not self.allows(stop) and not self._forced:
            if ends := self._ends():
                self._if_stopped = ends
                scores[ends[0]] = scores[stop].logaddexp(scores[ends[0]])
            scores[stop] = -torch.inf

    def allows(self, token_id: int) -> bool:
        if self._forced:
            return token_id == self._forced[0]
        return self._held is None or self._held.allows(token_id)

    def mask(self, scores: Tensor) -> None:
        if self._forced:
            keep(scores, self._forced[:1])
        elif self._held is not None:
            self._held.mask(scores)

    def forced(self) -> list[int]:
        return list(self._forced) if self._forced or self._held is None else self._held.forced()

    def accept(self, token_id: int) -> None:
        self.ids.append(token_id)
        if self._held is not None:
            self._held.accept(token_id)
        if token_id in self._form.stop_ids:
            self.over = True
            return
        self.text += self._form.tokenizer.decode_bytes([token_id]).decode("latin-1")
        self._runs = (self._runs + 1) * (self._last == token_id)  # tokens that equal those a period before
        self._last = np.concatenate(([token_id], self._last[:-1]))
        if self._if_stopped[:1] == [token_id]:
            self._forced = self._if_stopped
        self._forced = self._forced[1:]
        if self._forced or self.forced()[:1] == self._form.stop_ids[:1]:
            return
        left = self._form.limit - len(self.ids) - RESERVE
        if left < FAR and (ends := self._ends()) and left <= len(ends) + len(self._tokens(self._row)):
            self.cut, self._forced = True, ends
        elif span := self._repeated():
            self._close(span)

    def _tokens(self, text: str) -> list[int]:
        return self._form.tokenizer.tokenize_str(text)

    @property
    def _open(self) -> list[tuple[str, int]]:
        return open_pieces(self.text, _DOCTAGS if self._form.in_doctags else _HTML)

    @property
    def _row(self) -> str:
        """A row of empty cells, as the next token may begin one."""
        return "<ecel>" * self.text[self._open[-1][1] if self._open else 0 :].partition("<nl>")[0].count("<")

    def _ends(self, pieces: int | None = None) -> list[int]:
        """The tokens that close all but so many of the open pieces, and for None end the page; [] where
        nothing can be closed: in the middle of a tag or box, or in a cell that has no text yet."""
        ids = self._tokens(closing(self.text, self._open, pieces or 0))
        ids = ids + self._form.stop_ids[:1] if pieces is None else ids or self._tokens("\n\n")
        return ids if self._held is None or self._held.takes(ids) else []

    def _repeated(self) -> str:
        """The span at the end of the page that repeats too often, or ""."""
        seen = list[int]()
        for period in self._periods[self._runs >= REPEATS * self._periods].tolist():
            if any(period % one == 0 for one in seen):
                continue
            seen.append(period)
            said = (self._form.tokenizer.decode_bytes([one]) for one in self.ids[-period:])
            span = b"".join(said).decode("latin-1")
            most = max(REPEATS, (2 if "\n" in span else 1) * TEXT // period)
            if _CELL.search(2 * span):
                most = ROWS if _ROW.search(2 * span) else COLUMNS
            elif "<loc_" in 2 * span and "</" in 2 * span:
                most = REPEATS
            if self._runs[period - 1] >= most * period:
                return span
        return ""

    def _close(self, span: str) -> None:
        """Force the end of the piece in which a span repeats, or of the page."""
        pieces: int | None = sum(begin <= len(self.text) - len(span) for _, begin in self._open) - 1
        if self._open and self._open[-1][0] in _TABLES and not _CELL.search(2 * span):
            pieces = len(self._open)  # the text of a cell: its row ends
        ends = self._ends(None if self.closed == PIECES else max(0, pieces))
        if ends:
            self.closed, self._forced, self._runs[:] = self.closed + 1, ends, 0


def open_pieces(text: str, names: set[str]) -> list[tuple[str, int]]:
    """The elements, code and formulas that are open at the end of a text, and where each of them begins."""
    found = list[tuple[str, int]]()
    for tag in _TAG.finditer(text):
        top, name, closes = found[-1][0] if found else "", tag[2] or tag[4], bool(tag[1])
        if tag[4]:
            closes = name == top or _MARKS.get(top) == name
            name = top if closes else name
        full = name + (tag[3] or "")
        if name not in names or (top in ("code", *_MARKS) and not (closes and full == top)):
            continue
        if not closes and (name != "chart" or top not in FIGURES):  # where it is a class
            found.append((full, tag.end()))
        elif closes and (places := [place for place, (one, _) in enumerate(found) if one == full]):
            del found[places[-1] :]
    return found


def closing(text: str, found: Sequence[tuple[str, int]], pieces: int = 0) -> str:
    """What ends the row of a table in OTSL and closes all but so many of these open pieces of a text."""
    rows = text[found[-1][1] if found else text.rfind("\n\n") + 1 :].split("<nl>")
    cells = [len(re.findall("<(?:[efulx]cel|[cr]hed|srow)>", row)) for row in (rows[0], rows[-1])]
    row = "<ecel>" * (cells[0] - cells[1]) + "<nl>" if cells[1] else ""
    return row + "".join(_MARKS.get(name, f"</{name}>") for name, _ in reversed(found[pieces:]))
