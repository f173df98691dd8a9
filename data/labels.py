"""The tokens of a rendered conversation that its assistant says, end of turn included: what a row teaches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.conversation import Message
from data.errors import PromptError
from data.tools import CallMarks, Tool

NEAR = 8  # pieces in which the mark before a call's name is looked for
SPOKEN = ("assistant", "thoughts", "call")  # roles of pieces that the assistant says


class Piece(NamedTuple):
    """A piece of a conversation's final string.

    role: whose text it is; "thoughts" are the assistant's; "call" is empty and stands before the name of what
        is called; "special" is a special token with its `name`, "image" the tokens of an image; None is other
        text of the template.
    """

    text: str
    role: str | None = None
    name: str = ""


@dataclass(frozen=True)
class Labels:
    """Finds what the assistant says between the marks of one chat template.

    opens, closes, begin: the texts, as pieces have them, around calls and before thoughts that a model begins
        itself.
    call_ends: the name of `closes`. inside: names of marks around which an answer goes on.
    stops: names of what ends a turn.
    """

    opens: str
    closes: str
    begin: str
    call_ends: str
    inside: Collection[str]
    stops: Collection[str]

    def mask(self, pieces: Sequence[Piece], offsets: Sequence[tuple[int, int]]) -> list[bool]:
        """For each token with these (start, end) characters, whether the assistant says it."""
        mask, at, spans = [], 0, self._spans(pieces)
        for start, end in offsets:
            while at < len(spans) and spans[at][1] <= start:
                at += 1
            mask.append(at < len(spans) and start < end and end > spans[at][0])
        return mask

    def _spans(self, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
        """The (start, end) characters of what the assistant says, in order."""
        spans, start = list[tuple[int, int]](), 0
        answering = calling = False  # after words of the assistant; within one of its calls
        called = -1  # where its last call ends: what follows at once is the model's as well
        for number, (text, role, name) in enumerate(pieces):
            end, since = start + len(text), self._begin(pieces, number, start)
            if since is not None:  # what follows one another is one answer
                spans.append((spans.pop()[0] if answering else since, end))
                answering, calling = True, calling or role == "call"
            elif role == "special":
                ends_call, hands_over = calling and name == self.call_ends, start == called
                calling, called = calling and not ends_call, end if ends_call else called
                # After its thinking the answer goes on, and around its calls.
                goes_on = calling or name in self.inside
                if answering and (name in self.stops or ends_call or (hands_over and not goes_on)):
                    spans[-1] = (spans[-1][0], end)
                answering = answering and goes_on
            elif role not in (None, "image"):
                answering = answering and calling
            start = end
        return spans

    def _begin(self, pieces: Sequence[Piece], number: int, start: int) -> int | None:
        """The character from which on the assistant says a piece; None for a piece that is not the
        assistant's."""
        if (role := pieces[number].role) not in SPOKEN:
            return None
        near = "".join(piece.text for piece in pieces[max(0, number - NEAR) : number])
        if role == "call":  # else a result that names it
            at = near.rfind(self.opens)
            return start - len(near) + at if at > near.rfind(self.closes) else None
        if role == "thoughts" and self.begin and near.rstrip().endswith(self.begin):
            return start - len(near) + near.rindex(self.begin)
        # Spaces in front of its first word are one token with it, or its own.
        before = pieces[number - 1].text
        return start - len(before) + len(before.rstrip(" "))


def check_written(
    messages: Sequence[Message], tools: Sequence[Tool], marks: CallMarks, thoughts_key: str | None, label: str
) -> None:
    """Raises PromptError for what a chat template has no markup for: it would be learned in another form than
    the model is asked in."""
    plain = not marks.native
    for key, lost in (
        ("tools", plain and tools),
        ("tool_calls", plain and any(message.calls for message in messages)),
        ("a tool's result", plain and any(message.role == "tool" for message in messages)),
        ("reasoning_content", not thoughts_key and any(message.thoughts for message in messages)),
    ):
        if lost:
            raise PromptError(f"{label}: {key}: this model's chat template has no markup for it")
