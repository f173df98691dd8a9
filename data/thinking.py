"""The markers between which a reasoning model thinks before its answer, and how a prompt asks for thinking or
ends it. The thoughts of an answer are in `inference.thinking`.

A template writes `<think>` at the end of its prompt (Qwen3-VL-Thinking, Qwen3.5 with `enable_thinking`), an
empty block (Qwen3.5 without), or nothing, and then the model begins the block itself (Qwen3, Gemma 4). Here a
prompt always ends inside a block where thinking is wanted, and outside of one where it is not: a template
that has no switch is followed by the empty block that templates with a switch write. Earlier answers stand in
a prompt without their thinking, as in those templates.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class ThinkingMarks(NamedTuple):
    """The markers of a block of thinking, and the gap between it and the answer.

    in_template: the chat template speaks of them, so that the model can be asked to think.
    """

    begin: str
    end: str
    gap: str
    in_template: bool = False

    def prompt(self, rendered: str, wanted: bool) -> str:
        """A rendered prompt that ends inside a block if thinking is wanted, and outside of one if not."""
        written = rendered.rstrip()
        if wanted:
            closed = re.search(rf"{re.escape(self.begin)}\s*{re.escape(self.end)}$", written)
            written = written[: closed.start()] if closed else rendered
            return written if written.rstrip().endswith(self.begin) else f"{written}{self.begin}\n"
        return f"{written}\n\n{self.end}{self.gap}" if written.endswith(self.begin) else rendered

    def apart(self, text: str) -> tuple[str, str]:
        """The thoughts that a client has left in an earlier answer's text, and the answer without them."""
        thoughts, _, answer = text.rpartition(self.end)
        return thoughts.strip().removeprefix(self.begin).strip(), answer.lstrip()


THINKING = (
    ThinkingMarks("<think>", "</think>", "\n\n"),  # Qwen's and LFM2.5's
    ThinkingMarks("<|channel>thought", "<channel|>", ""),  # Gemma 4's
)
