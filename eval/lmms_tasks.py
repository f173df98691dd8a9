"""Tasks of lmms-eval in our terms: their settings of generation, and what is reported. Without lmms-eval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from eval.results import (
    ENDED,
    ERRORS_LISTED,
    RESULTS,
    SAMPLES,
    describe_model,
    environment,
    stop_reasons,
    write_json,
)
from eval.statistics import score_interval
from eval.tasks import TRIED
from generation.options import GenerationOptions, SamplingParams
from inference.checkpoint import Checkpoint, RequestError
from messages import did_you_mean

MAX_NEW_TOKENS = 1024  # where a task sets none
_READ = ("until", "max_new_tokens", "do_sample", "temperature", "num_beams")
_SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name not in ("temperature", "seed"))
_NOT_SCORES = {  # of a sample, what is written under other names or not at all
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "token_counts", "doc_hash"),
    "input_media",
}

Task = str | Mapping[str, Any]  # a name, or {"task": name, ...} with settings that replace the task's own
Error = tuple[str, int, str]  # (task, document, what was wrong)
Ended = tuple[str, int, str, str]  # (task, document, why an answer ended, and its thinking, "" without one)


class LmmsError(RequestError):
    """A task of lmms-eval that cannot be run."""


def check_known(tasks: Sequence[Task], known: Sequence[str]) -> None:
    """Raises LmmsError, with the nearest names, where lmms-eval does not know a task."""
    for task in tasks:
        name = task if isinstance(task, str) else task["task"]
        if name not in known:
            near = did_you_mean(name, {*TRIED, *known})
            expected = f"expected one such as {', '.join(TRIED[:4])}"
            raise LmmsError(f"lmms-eval has no task {name!r}{near}; {expected}")


# --------------------------------------------------------------------------------- generation settings
def read_settings(task: str, settings: Mapping[str, Any]) -> tuple[GenerationOptions, tuple[str, ...]]:
    """A task's generation_kwargs as options, and the texts that an answer ends before. `do_sample` decides
    whether a temperature is used; without it, a temperature above 0 does. Raises RequestError."""
    given = {name: value for name, value in settings.items() if value is not None}
    temperature = given.get("temperature", 1.0 if given.get("do_sample") else 0.0)
    wrong = sorted(given.keys() - {*_READ, *_SAMPLING})
    wrong += ["num_beams"] if given.get("num_beams", 1) != 1 else []
    wrong += ["temperature"] if given.get("do_sample") and not temperature else []
    if wrong:
        raise RequestError(
            f"task {task}: generation setting {wrong[0]}={given[wrong[0]]!r} is not supported; expected "
            f"{', '.join((*_READ, *_SAMPLING))}, one beam, and a temperature above 0 with do_sample"
        )
    until = given.get("until", ())
    until = tuple(filter(None, (until,) if isinstance(until, str) else until))  # "" would end all of them
    if not given.get("do_sample", True):
        temperature = 0.0
    try:
        options = GenerationOptions(
            max_new_tokens=given.get("max_new_tokens", MAX_NEW_TOKENS),
            temperature=temperature,
            **{name: given[name] for name in _SAMPLING if name in given},
        )
    except ValueError as error:
        raise RequestError(f"task {task}: generation setting {error}") from None
    return options, until


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of the texts that end an answer."""
    ends = [at for end in until if (at := text.find(end)) >= 0]
    return text[: min(ends)].rstrip() if ends else text


# -------------------------------------------------------------------------------------------- results
def task_result(
    name: str,
    report: Mapping[str, Any],
    errors: Sequence[Error],
    checkpoint: Checkpoint,
    ended: Sequence[Ended] = (),
) -> dict[str, Any]:
    """What lmms-eval reports about a task, with intervals where a figure is the mean of samples' scores, and
    how many answers ended for which reason, where they are `ended` and not choices. Samples get the reason of
    theirs, or of several answers the worst."""
    samples, config = report["samples"][name], report["configs"][name]
    own = [{"id": document, "error": message} for task, document, message in errors if task == name]
    if own and len(own) >= len(samples):
        raise LmmsError(f"task {name}: none of {len(own)} questions could be answered: {own[0]['error']}")
    reasons = {document: found for task, document, *found in sorted(ended, reverse=True) if task == name}
    for sample in samples:  # of several answers the last stays: "length" is before "stop"
        sample |= zip(ENDED, reasons.get(sample["doc_id"], ()))
    figures = {
        metric.removesuffix(",none"): number
        for metric, value in report["results"][name].items()
        if (number := _number(value)) is not None and "_stderr" not in metric
    }
    return {
        "task": {
            "name": name,
            "harness": f"lmms-eval {version('lmms_eval')}",
            "version": report["versions"].get(name),
            "generation": config.get("generation_kwargs"),
            "prompts": config.get("lmms_eval_specific_kwargs"),
            "example": samples[0]["arguments"][0] if samples and samples[0]["arguments"] else None,
        },
        "model": describe_model(checkpoint),
        "figures": figures,
        "intervals": _intervals(figures, samples),
        "n": len(samples),
        "errors": {"count": len(own), "samples": own[:ERRORS_LISTED]},
        **{f"{one}s": stop_reasons(samples, one) for one in ENDED},
        **environment(checkpoint, "lmms_eval"),
    }


def _intervals(figures: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Intervals of the figures that are the mean of their samples' scores. Scores that came with one figure
    are not taken for another's: POPE's five figures all come with the same."""
    intervals: dict[str, list[float]] = {}
    seen: list[list[float]] = []
    for metric, figure in figures.items():
        values = [sample.get(metric.partition(",")[0]) for sample in samples]
        numbers = [_number(value.get("score") if isinstance(value, Mapping) else value) for value in values]
        scores = [number for number in numbers if number is not None]
        is_mean = scores and len(scores) == len(samples) and abs(sum(scores) / len(scores) - figure) < 1e-9
        if is_mean and scores not in seen:
            seen.append(scores)
            intervals[metric] = list(score_interval(scores))
    return intervals


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | np.integer | np.floating) else None


def write_result(folder: Path, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SAMPLES).open("w", encoding="utf-8") as file:
        for sample in samples:
            record = {
                "id": sample["doc_id"],
                "prompt": sample["arguments"][0] if sample["arguments"] else None,
                "targets": sample["target"],
                "answer": sample["resps"][0],
                "scored": sample["filtered_resps"][0],
                "doc": sample["doc"],
            }
            record |= {key: value for key, value in sample.items() if key not in _NOT_SCORES}
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
    write_json(folder / RESULTS, result)
