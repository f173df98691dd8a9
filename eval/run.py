"""Run a task: answer what has no answer yet, score it, and write what came of it.

    results = evaluate(checkpoint, shapes_task(500), Path("runs/eval/shapes"), controls=True)

| file | holds |
|---|---|
| `run.json` | task and model: what a later run must agree with to go on here |
| `samples.jsonl` | every question, answer, target and score; `samples-blind.jsonl`: images blanked |
| `results.json` | score, interval, controls, prompts, versions, revision, seconds, samples/s |
| `report.html` | the same to look at, with images; opens offline |

Under torchrun each rank answers its share of the images. A run that was killed goes on where it stopped,
on any number of ranks; a question whose image did not open scores 0, is listed, and is tried again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.files import replacing
from eval.answering import Answer, answers, by_image, share
from eval.records import RESULTS, RUN, SAMPLES, Records
from eval.report import write_report
from eval.results import describe_model, environment, summarise
from eval.tasks import Sample, Task, TaskError
from inference.checkpoint import Checkpoint, RequestError
from inference.locks import only_writer
from training.distributed import Ranks

BLIND, REPORT = "samples-blind.jsonl", "report.html"
_AGREES_ON = ("revision", "dtype")  # of the model


def evaluate(
    checkpoint: Checkpoint,
    task: Task,
    output: Path,
    batch_size: int = 32,
    controls: bool = False,
    ranks: Ranks | None = None,
    progress: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Answer, score and write; the content of results.json, on every rank.

    Args:
        output: folder, new or of an earlier run of the same task and model.
        batch_size: answers in work at the same time; no score depends on it (in float32).
        controls: also answer with images blanked, and score the majority answer.
        ranks: this process among others.
        tell: gets one line about the caches' memory before any work.

    Raises:
        TaskError: samples that cannot be scored, a folder of another run or that another process writes to.
        RequestError: not enough memory for so many answers at a time.
        OSError: the folder cannot be written.
    """
    ranks = Ranks(checkpoint.model.device) if ranks is None else ranks
    described = {"task": task.definition(), "model": describe_model(checkpoint)}
    files = {False: Records(output / SAMPLES)} | ({True: Records(output / BLIND)} if controls else {})
    with ExitStack() as held:  # the first rank holds the folder for all
        problem = _begin(task, output, described, files, held) if ranks.is_first else ""
        if problem := ranks.gather(problem)[0]:
            raise TaskError(problem)
        speeds = {
            blank: _answer(checkpoint, task, records, blank, batch_size, ranks, progress, tell)
            for blank, records in files.items()
        }
        ranks.sum()  # the others have written what they have
        results: dict[str, Any] = {}
        if ranks.is_first:
            for records in files.values():
                records.fold(again=False)
            seen, blind = files[False].read(), files[True].read() if controls else None
            results = described | summarise(task, seen, controls, blind)
            results |= _speed(output, speeds[False]) | {"batch_size": batch_size, "ranks": ranks.world_size}
            results |= environment(checkpoint)
            _write_json(output / RESULTS, results)
            write_report(output / REPORT, task, results, seen, blind)
        return ranks.gather(results)[0]


def _begin(
    task: Task,
    output: Path,
    described: Mapping[str, Any],
    files: Mapping[bool, Records],
    held: ExitStack,
) -> str:
    """Make the folder, or see that it is this run's, and mend its files; what is wrong, or "".

    Args:
        held: until it ends no other run gets the folder.
    """
    try:
        task.check()
        held.enter_context(only_writer(output, parents=True))
        output.mkdir(parents=True, exist_ok=True)
        if (output / RUN).exists():
            _check_same(output, described)
        elif any((output / name).exists() for name in (SAMPLES, BLIND)):
            raise TaskError(f"{output}: expected a new folder or an earlier run's, got samples without {RUN}")
        _write_json(output / RUN, described)
        known = {sample.id for sample in task.samples}
        for records in files.values():
            records.fold(again=True)
            if foreign := sorted(records.read().keys() - known):
                raise TaskError(f"{records.path}: has answers to questions of another task: {foreign[0]}")
            with records.appending():  # a place that cannot be written to shows now
                pass
    except (TaskError, RequestError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or output}: {error.strerror or error}"
    return ""


def _check_same(output: Path, described: Mapping[str, Any]) -> None:
    """Raises TaskError where a folder holds answers of another model or to another task."""
    try:
        earlier = json.loads((output / RUN).read_text(encoding="utf-8"))
        differs = [key for key, value in described["task"].items() if earlier["task"].get(key) != value]
        differs += [key for key in _AGREES_ON if earlier["model"].get(key) != described["model"][key]]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise TaskError(f"{output / RUN}: expected what an earlier run wrote, got something else") from None
    if differs:
        what = "; ".join(
            f"{key} {_value(earlier, key)} there, {_value(described, key)} now" for key in differs[:2]
        )
        raise TaskError(
            f"{output}: expected an earlier run of the same task and model, but they differ ({what}): choose "
            "another --output"
        )


def _value(run: Mapping[str, Any], key: str) -> str:
    return f"{run['model' if key in _AGREES_ON else 'task'].get(key)!r:.60}"


def _answer(
    checkpoint: Checkpoint,
    task: Task,
    records: Records,
    blank: bool,
    batch_size: int,
    ranks: Ranks,
    progress: bool,
    tell: Callable[[str], None],
) -> dict[str, float]:
    """Answer this rank's share of what is missing; seconds of the slowest rank, and answers of all."""
    done = records.read()
    left = [sample for sample in task.samples if sample.id not in done]
    ranks.gather(len(left))  # all have read before any writes
    groups = share(by_image(left), ranks.rank, ranks.world_size)
    count = sum(map(len, groups))
    label = f"{task.name}, images blanked" if blank else task.name
    began = time.perf_counter()
    bar = tqdm(total=count, desc=label, unit="sample", disable=not (progress and ranks.is_first and count))
    told = answers(checkpoint, left, batch_size, groups, blank, tell=tell) if count else ()
    with bar, records.appending(ranks.rank) as write:
        for number, answer in told:
            write(record_of(task, left[number], answer))
            bar.update()
    seconds = time.perf_counter() - began
    both = ranks.gather((seconds, count))
    return {"seconds": max(s for s, _ in both), "answered": sum(n for _, n in both)}


def record_of(task: Task, sample: Sample, answer: Answer) -> dict[str, Any]:
    """A line of samples.jsonl."""
    score = 0.0 if answer.error else task.metric.score(answer.text, sample.targets, sample.fields)
    record: dict[str, Any] = {"id": sample.id}
    if sample.family:
        record["family"] = sample.family
    record |= {"question": sample.question, "prompt": sample.prompt, "targets": list(sample.targets)}
    record |= {"answer": answer.text, "score": score, "tokens": answer.tokens}
    return record | ({"error": answer.error} if answer.error else {})


def _speed(output: Path, now: Mapping[str, float]) -> dict[str, float | None]:
    """Seconds of this run and samples/s; those of the run before where it left nothing to answer."""
    if not now["answered"] and (output / RESULTS).exists():
        earlier = json.loads((output / RESULTS).read_text(encoding="utf-8"))
        if {"seconds", "answered", "samples_per_second"} <= earlier.keys():
            return {key: earlier[key] for key in ("seconds", "answered", "samples_per_second")}
    speed = now["answered"] / now["seconds"] if now["answered"] else None
    return {**now, "samples_per_second": speed}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
