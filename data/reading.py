"""How a checkpoint is asked to read a page, and the form of what it answers: a `Reading`.

    processor.reading.form             # "doctags", or "markdown"
    processor.reading.prompt("table")  # "Convert table to OTSL."

A family says how its models read in `READING`, by model_type. A tokenizer with the tokens of DocTags is that
of SmolDocling, granite-docling or a model like them, whatever its family. Others are asked for Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data.errors import PromptError

TASKS = ("page", "ocr", "table", "formula", "chart")
_MARKDOWN = (
    "Convert this page to Markdown, with tables in HTML and formulas in LaTeX.",
    "Write down all text in this image.",
    "Convert this table to HTML.",
    "Convert this formula to LaTeX.",
    "Convert this chart to a table in Markdown.",
)
_PAGE = "Convert this page to docling."  # prompts of the cards of SmolDocling and granite-docling
_DOCTAGS = _PAGE, _PAGE, "Convert table to OTSL.", "Convert formula to LaTeX.", "Convert chart to table."


@dataclass(frozen=True)
class Reading:
    """The form of a page's text, "markdown" or "doctags", and by task what the model is asked."""

    form: str = "markdown"
    prompts: Mapping[str, str] = field(default_factory=lambda: dict(zip(TASKS, _MARKDOWN)))

    def prompt(self, task: str) -> str:
        """What the model is asked for a task; PromptError for one that it has not learnt."""
        if task not in self.prompts:
            raise PromptError(f"task: expected {', '.join(self.prompts)} for this model, got {task!r}")
        return self.prompts[task]


def reading_of(processor: Any) -> Reading:
    """That of a checkpoint's Processor."""
    if {"<doctag>", "<fcel>"} <= processor.tokenizer.get_vocab().keys():  # of coordinates, not all
        return Reading("doctags", dict(zip(TASKS, _DOCTAGS)))
    return processor.said_reading or Reading()
