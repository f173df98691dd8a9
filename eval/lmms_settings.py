"""What tasks of lmms-eval ask of generation, as our options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from generation.decoding import GenerationOptions
from inference.checkpoint import RequestError

MAX_NEW_TOKENS = 1024  # where a task sets none
_READ = ("until", "max_new_tokens", "do_sample", "temperature", "num_beams")
_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")


def read_settings(task: str, settings: Mapping[str, Any]) -> tuple[GenerationOptions, tuple[str, ...]]:
    """A task's generation_kwargs as options, and the texts that an answer ends before.

    `do_sample` decides whether a temperature is used; without it, a temperature above 0 does.

    Raises:
        RequestError: a setting that is not here, or a value that it cannot have.
    """
    asked = {name: value for name, value in settings.items() if value is not None}
    if unknown := sorted(asked.keys() - {*_READ, *_SAMPLING}):
        raise RequestError(
            f"task {task}: its generation setting {unknown[0]}={asked[unknown[0]]!r} is not known here; "
            f"expected {', '.join((*_READ, *_SAMPLING))}"
        )
    if asked.get("num_beams", 1) != 1:
        raise RequestError(f"task {task}: expected num_beams 1, got {asked['num_beams']!r}")
    until = asked.get("until", ())
    until = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(text, str) and text for text in until):
        raise RequestError(f"task {task}: expected until as texts, got {until!r}")
    temperature = asked.get("temperature", 1.0 if asked.get("do_sample") else 0.0)
    if asked.get("do_sample") and not temperature:
        raise RequestError(f"task {task}: expected a temperature above 0 with do_sample, got {temperature!r}")
    if not asked.get("do_sample", True):
        temperature = 0.0
    try:
        options = GenerationOptions(
            max_new_tokens=asked.get("max_new_tokens", MAX_NEW_TOKENS),
            temperature=temperature,
            **{name: asked[name] for name in _SAMPLING if name in asked},
        )
    except ValueError as error:
        raise RequestError(f"task {task}: generation setting {error}") from None
    return options, until


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of the texts that end an answer."""
    ends = [at for end in until if (at := text.find(end)) >= 0]
    return text[: min(ends)].rstrip() if ends else text
