"""How a page ends: its grammar, a guard for text that repeats, and a limit that follows from its size.

    form = PageForm(checkpoint, checkpoint.processor.reading, image.size)
    options = GenerationOptions(max_new_tokens=form.limit, constraint=form.constraint())
    form.ended(output)                                # "whole", "guard" or "cut"

**Limit.** A character that can be read has some 6 x 10 pixels, and a token is one to four of them: PIXELS for
a token. A position of an image stands for at most POSITION tokens (arXiv 2510.18234: more are not read back).
LEAST more are for boxes, MOST is the longest page. Before the limit comes, what is open is closed.

**Guard.** A span of up to PERIOD tokens may repeat REPEATS times, or until the run has TEXT tokens: a leader
of dots is shorter. With a line break (labels on a sheet) it may be twice as long; cells of a table may be
equal in a whole row, and ROWS rows; an element of DocTags with its box REPEATS times. Then the piece in which
it repeats is closed. The page goes on, but after PIECES of them, or where none is open, it ends.
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
from inference.grammar import Form
from inference.pages.doctags import CELL, COLUMNS, ELEMENTS, FIGURES, FORM, doctags_grammar

PIXELS, POSITION, LEAST, MOST, PROMPT = 128, 16, 256, 8192, 256
PERIOD, REPEATS, TEXT, ROWS, PIECES = 512, 4, 256, 50, 3
FAR = 12 * COLUMNS  # no page takes more tokens to close
RESERVE = 128  # tokens that a tag may take, and its end, where each byte is one
_CELL, _ROW = re.compile(rf"{CELL}|<t[dh]\b|\|"), re.compile(r"<nl>|</tr|\n")
_TAG = re.compile(r"<(/?)(([a-z]\w*?)(?:_\d+)?)(?: [^<>]*)?>")
_HTML = {"table", "thead", "tbody", "tr", "td", "th", "ul", "ol", "li", "div", "p"}
_DOCTAGS = {*ELEMENTS, *FORM, "section_header_level"}


class PageForm:
    """The form of the answers that are a page.

    Args:
        size: (width, height) of the page in pixels.
        limit: of its tokens, in place of the one that follows from the size.
        prompt: positions of the prompt with the image; None estimates them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        reading: Reading,
        size: tuple[int, int],
        limit: int | None = None,
        prompt: int | None = None,
    ):
        positions = checkpoint.processor.plan(size).positions
        own = LEAST + min(positions * POSITION, size[0] * size[1] // PIXELS, MOST - LEAST)
        room = checkpoint.context - (positions + PROMPT if prompt is None else prompt)
        self.limit = min(limit or own, room)
        self.reserve = min(RESERVE, self.limit // 2)
        vocabulary, self.pages = checkpoint.forms.constraints.vocabulary, list[PageEnd]()
        self.tokenizer, self.stop_ids, self.names = vocabulary.tokenizer, vocabulary.stop_ids, _HTML
        self.begin: Any = None  # makes the constraint of the grammar
        self.cell = len(self.tokenizer.tokenize_str("<ecel>"))
        if reading.form == "doctags":
            self.names = _DOCTAGS
            added = checkpoint.processor.tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
            grammar = doctags_grammar({token.content: one for one, token in added if token.special})
            self.begin = checkpoint.forms.constraint(grammar).constraint

    def constraint(self) -> Form:
        """`GenerationOptions.constraint`, with `limit` as max_new_tokens."""
        return Form(lambda: PageEnd(self))

    def said(self, ids: Sequence[int]) -> str:
        """The bytes of tokens, as characters of Latin-1."""
        return b"".join(self.tokenizer.decode_bytes([one]) for one in ids).decode("latin-1")

    def ended(self, output: Any) -> str:
        """How the page of a `RequestOutput` ended: "whole" (the model ended it by itself), "guard" (pieces of
        it repeated and were closed), or "cut" (its limit was near)."""
        page = next(one for one in self.pages if one.ids == output.token_ids[-len(one.ids) :])
        return "cut" if page.cut or not page.over else "guard" if page.closed else "whole"


class PageEnd:
    """The `generation.protocol.Constraint` of one page. closed: how many pieces the guard has closed."""

    thinking = full = over = cut = False
    choice = None

    def __init__(self, form: PageForm):
        self._form, self._held = form, form.begin and form.begin()
        self.closed, self.ids, self._text, self._place = 0, list[int](), "", 0
        self._forced, self._if_stopped = list[int](), list[int]()
        self._open = list[tuple[str, int]]()  # elements, and where in the text they begin
        self._runs, self._periods = np.zeros(PERIOD, dtype=np.int64), np.arange(1, PERIOD + 1)
        self._last = np.full(PERIOD, -1)  # the latest tokens, the last one first
        form.pages.append(self)

    def close(self, scores: Tensor) -> None:
        """Where the model would rather stop than go on, it closes the page."""
        stop, self._if_stopped = int(scores.argmax()), []
        if stop in self._form.stop_ids and not self._forced and not self.allows(stop):
            if ends := self._ends():
                self._if_stopped = ends
                scores[ends[0]] = scores[stop].logaddexp(scores[ends[0]])
            scores[stop] = -torch.inf

    def allows(self, token_id: int) -> bool:
        return token_id == self._forced[0] if self._forced else not self._held or self._held.allows(token_id)

    def mask(self, scores: Tensor) -> None:
        if self._forced:
            keep(scores, self._forced[:1])
        elif self._held is not None:
            self._held.mask(scores)

    def forced(self) -> list[int]:
        return self._forced[:] if self._forced or not self._held else self._held.forced()

    def accept(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.over = token_id in self._form.stop_ids
        if self._held is not None:
            self._held.accept(token_id)
        self._read(self._form.said([token_id]))
        self._runs = (self._runs + 1) * (self._last == token_id)  # tokens that equal those a period before
        self._last = np.concatenate(([token_id], self._last[:-1]))
        self._forced = (self._if_stopped if self._if_stopped[:1] == [token_id] else self._forced)[1:]
        if self.over or self._forced or self.forced()[:1] == self._form.stop_ids[:1]:
            return
        left = self._form.limit - len(self.ids) - self._form.reserve
        if left < FAR and (ends := self._ends()) and left <= len(ends) + self._cells()[0] * self._form.cell:
            self.cut, self._forced = True, ends
        elif span := self._repeated():
            self._close(span)

    def _read(self, text: str) -> None:
        """Note the elements that a text opens and closes."""
        self._text += text
        for tag in _TAG.finditer(self._text, self._place):
            self._place, (closes, name, kind) = tag.end(), tag.groups()
            names = ["", *(one for one, _ in self._open)]
            if names[-1] == "code" and (closes, name) != ("/", "code"):
                continue
            if closes and name in names:
                del self._open[len(names) - 2 - names[::-1].index(name) :]
            elif not closes and kind in self._form.names and (name != "chart" or names[-1] not in FIGURES):
                self._open.append((name, tag.end()))  # a chart in a figure is its class

    def _cells(self) -> tuple[int, int]:
        """How many cells the first and the last row of a table in OTSL have, if it is open."""
        begin = self._open[-1][1] if self._open else self._text.rfind("\n\n") + 1
        rows = self._text[begin:].split("<nl>")
        return len(re.findall(CELL, rows[0])), len(re.findall(CELL, rows[-1]))

    def _ends(self, pieces: int | None = None) -> list[int]:
        """The tokens that close all but so many elements, and for None end the page; [] where nothing can be
        closed: in the middle of a tag or box, or in a cell that has no text yet."""
        first, last = self._cells()
        row = "<ecel>" * (first - last) + "<nl>" if last else ""
        said = row + "".join(f"</{name}>" for name, _ in reversed(self._open[pieces or 0 :]))
        said, begun = said if pieces is None else said or "\n\n", re.search("<[^<>]*$", self._text)
        ways = [said, *([said[len(begun[0]) :]] if begun and said.startswith(begun[0]) else [])]
        for ids in map(self._form.tokenizer.tokenize_str, ways):
            ids += self._form.stop_ids[:1] if pieces is None else []
            if self._held is None or self._held.takes(ids):
                return ids
        return []

    def _repeated(self) -> str:
        """The span at the end of the page that repeats too often, or ""."""
        for period in self._periods[self._runs >= REPEATS * self._periods].tolist():
            span = 2 * self._form.said(self.ids[-period:])
            most = max(REPEATS, (2 if "\n" in span else 1) * TEXT // period)
            if _CELL.search(span):
                most = ROWS if _ROW.search(span) else COLUMNS
            elif "<loc_" in span and "</" in span:
                most = REPEATS
            if self._runs[period - 1] >= most * period:
                return span[: len(span) // 2]
        return ""

    def _close(self, span: str) -> None:
        """Force the end of the innermost element in which a span repeats; of a cell, where it is its text."""
        pieces: int | None = max(0, sum(begin <= len(self._text) - len(span) for _, begin in self._open) - 1)
        if self._cells()[1] and not _CELL.search(2 * span):
            pieces = len(self._open)
        if ends := self._ends(None if self.closed == PIECES else pieces):
            self.closed, self._forced, self._runs[:] = self.closed + 1, ends, 0
