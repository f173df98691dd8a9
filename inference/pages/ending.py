"""How a page ends: its grammar, a guard for text that repeats, and a limit that follows from its size.

    form = page_form(checkpoint, checkpoint.processor.reading, image.size)
    options = GenerationOptions(max_new_tokens=form.limit, constraint=form.constraint())
    form.ended(output)                                # "whole", "guard" or "cut"
    form.replayed(output.token_ids).closed            # how many pieces the guard has closed

**Limit.** A character that can be read has some 6 x 10 pixels and a token is one to four of them, in a table
of numbers one and the tag of its cell: a token to PIXELS pixels. A position of an image in the prompt stands
for at most POSITION tokens (arXiv 2510.18234 finds that more cannot be read back). LEAST more are for the
boxes of a small image, MOST is the longest page, and all of it fits the context. Before the limit comes, what
is open is closed, so that a page that is cut is read like any other.

**Guard.** The same span of up to PERIOD tokens may follow itself REPEATS times, or until the run is TEXT
tokens long: a leader of dots and a line of a form are shorter. With a line break in it, as on a sheet of
labels, it may be twice as long; cells of a table may be equal in all COLUMNS of a row, and ROWS rows. An
element of DocTags that repeats its box as well has no excuse. Then the piece that repeats is closed, and the
page goes on; after PIECES of them it ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.reading import Reading
from generation.kv_cache import to_device
from generation.options import ConstraintError
from generation.sampling import keep
from inference.checkpoint import Checkpoint
from inference.errors import RequestError
from inference.forms import Forms
from inference.grammar import Form
from inference.pages import doctags
from inference.pages.doctags import Tokens

PIXELS, POSITION, LEAST, MOST, PROMPT = 128, 16, 256, 8192, 256
PERIOD, REPEATS, TEXT, ROWS, COLUMNS, PIECES = 512, 4, 256, 50, 128, 3
_CELL, _ROW = re.compile(r"<[fe]cel>|<t[dh]\b|\|"), re.compile(r"<nl>|</tr|\n")
_VOID = {"br", "hr", "img", "input", "col"}


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
    most = min(limit or min(own, MOST), room)
    if most < LEAST // 2:
        raise RequestError(
            f"a page needs {LEAST // 2} new tokens: expected a larger limit or context, got {most}"
        )
    return PageForm(_tokens(checkpoint.forms), reading.form == "doctags", most, checkpoint.stop_token_ids)


@lru_cache(4)
def _tokens(forms: Forms) -> Tokens:
    return Tokens(*forms.texts)


@dataclass(frozen=True, eq=False)
class PageForm:
    """The form of one page's answer: see `page_form`."""

    tokens: Tokens
    in_doctags: bool
    limit: int
    stop_ids: tuple[int, ...]

    def constraint(self) -> Form:
        """`GenerationOptions.constraint`, with `limit` as max_new_tokens."""
        return Form(lambda: PageEnd(self))

    def replayed(self, token_ids: Sequence[int]) -> PageEnd:
        """The constraint as it was after these tokens."""
        end = PageEnd(self)
        for token_id in token_ids:
            end.accept(token_id)
        return end

    def ended(self, output: Any) -> str:
        """How the page of a `RequestOutput` ended: "whole" (the model ended it by itself), "guard" (pieces of
        it were closed because they repeated), or "cut" (its limit was near)."""
        end = self.replayed(output.token_ids)
        return "cut" if end.cut or not end.over else "guard" if end.closed else "whole"


class PageEnd:
    """The `generation.protocol.Constraint` of one page.

    over: it has ended. cut: because its limit was near. closed: how many pieces the guard has closed.
    """

    thinking = full = False
    choice = None

    def __init__(self, form: PageForm):
        self._form, self._tokens, self._stops = form, form.tokens, list(form.stop_ids)
        self._state: Any = doctags.START if form.in_doctags else ""
        self.over = self.cut = False
        self.closed, self._count = 0, 0
        self._forced, self._if_ended = list[int](), list[int]()
        self._ids, self._depths = np.zeros(form.limit + 1, dtype=np.int64), list[int]()
        self._runs, self._periods = np.zeros(PERIOD, dtype=np.int64), np.arange(1, PERIOD + 1)
        # What one more token may add to the way to the end: a tag that is open, and half of one.
        self._reserve = 16 + 2 * len(self._tokens.spelled("</checkbox_unselected>"))

    def close(self, scores: Tensor) -> None:
        self._if_ended = []
        if self.over or self._forced or not self._form.in_doctags or self._state.may_end:
            return
        ends = self._tokens.spelled(doctags.closing(self._state))
        stop, first = scores[self._stops].float().logsumexp(0), scores[ends[0]].float()
        if not self._needs_text:
            self._if_ended = [*ends, self._stops[0]] if stop > first else []
            scores[ends[0]] = stop.logaddexp(first).to(scores.dtype)
        scores[self._stops] = -torch.inf

    def allows(self, token_id: int) -> bool:
        if self.over or self._forced:
            return token_id in (self._stops if self.over else self._forced[:1])
        if token_id in self._stops or not self._form.in_doctags:
            return not self._form.in_doctags or self._state.may_end
        return self._tokens.allows(self._state, token_id)

    def mask(self, scores: Tensor) -> None:
        if self.over or self._forced:
            keep(scores, self._stops if self.over else self._forced[:1])
        elif self._form.in_doctags:
            found = torch.from_numpy(self._tokens.allowed(self._state).copy())
            found[self._stops] = self._state.may_end
            if not found.any():
                raise ConstraintError("this model's tokenizer cannot write DocTags")
            scores.masked_fill_(to_device(~found, scores.device), -torch.inf)

    def forced(self) -> list[int]:
        return list(self._forced)

    def accept(self, token_id: int) -> None:
        if self.over or token_id in self._stops:
            self.over, self._forced = True, []
            return
        form, text = self._form, self._tokens.texts[token_id]
        self._state = doctags.run(self._state, text) if form.in_doctags else self._state + text
        self._depths.append(len(self._state.stack) if form.in_doctags else 1)
        self._note(token_id)
        if self._forced:
            del self._forced[0]
        elif self._if_ended[:1] == [token_id]:
            self._forced = self._if_ended[1:]
        if self._forced:
            return
        ends = self._tokens.spelled(self._closing(0))
        left = form.limit - self._count - len(ends) - 1
        if form.in_doctags and self._state.stack[-1].tag == "end":
            self._forced = self._stops[:1]
        elif left <= 0 or (left < self._reserve + self._row and not self._needs_text):
            self.cut, self._forced = True, [*ends, self._stops[0]]
        elif period := self._repeats():
            self._close(period)

    @property
    def _needs_text(self) -> bool:
        return self._form.in_doctags and self._state.stack[-1].blank

    @property
    def _row(self) -> int:
        """Tokens of the row that the next one may begin."""
        top = self._state.stack[-1] if self._form.in_doctags else None
        return 0 if top is None or top.column else top.width * len(self._tokens.spelled("<ecel>"))

    def _closing(self, depth: int) -> str:
        return (doctags.closing if self._form.in_doctags else markdown_closing)(self._state, depth)

    def _note(self, token_id: int) -> None:
        """Count how many tokens before this one are equal to those so many places before them."""
        ids, count = self._ids, self._count
        ids[count], known = token_id, min(count, PERIOD)
        same = ids[count - known : count][::-1] == token_id
        self._runs[:known] = (self._runs[:known] + 1) * same
        self._count += 1

    def _repeats(self) -> int:
        """The period of the span that repeats too often at the end of the page, or 0."""
        found = list[int]()
        for period in self._periods[self._runs >= REPEATS * self._periods].tolist():
            if any(period % one == 0 for one in found):
                continue
            found.append(period)
            span = 2 * self._span(period)
            most = max(REPEATS, (2 if "\n" in span else 1) * TEXT // period)
            if _CELL.search(span):
                most = ROWS if _ROW.search(span) else COLUMNS
            elif "<loc_" in span and "</" in span:
                most = REPEATS
            if self._runs[period - 1] >= most * period:
                return period
        return 0

    def _span(self, period: int) -> str:
        return "".join(self._tokens.texts[one] for one in self._ids[self._count - period : self._count])

    def _close(self, period: int) -> None:
        """Force the end of the piece that repeats, or of the page."""
        self.closed += 1
        self._runs[:] = 0
        depth = 0 if self.closed > PIECES else min(self._depths[-period:]) - 1
        said = self._closing(depth)
        if (
            depth
            and self._form.in_doctags
            and self._state.stack[-1].cell
            and not _CELL.search(2 * self._span(period))
        ):
            said = said[: said.index("<nl>") + 4]  # the text of a cell: its row ends
        self._forced = [*self._tokens.spelled(said), *(() if depth else self._stops[:1])]


def markdown_closing(text: str, depth: int = 0) -> str:
    """What closes the code, formula, or table of HTML or OTSL in which Markdown ends, and the line."""
    open_tags, ends = list[str](), ""
    if len(re.findall("^```", text, re.MULTILINE)) % 2:
        return "\n```\n"
    rows = re.split("<nl>", text[text.rfind("\n\n") + 1 :])
    cells, last = rows[0].count("cel>"), rows[-1].count("cel>")
    ends = "<ecel>" * (cells - last) + "<nl>" if last else ""
    for mark, end in (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)")):
        ends += end * (text.count(mark) % 2 if mark == end else text.count(mark) > text.count(end))
    for close, name, whole in re.findall(r"<(/?)([a-z]\w*)[^<>]*(>|$)", text):
        if close and name in open_tags:
            del open_tags[open_tags.index(name) :]
        elif not close and name not in _VOID and whole:
            open_tags.append(name)
    return ends + "".join(f"</{name}>" for name in reversed(open_tags)) + ("" if depth else "\n\n")
