"""Run a task: answer what has no answer yet, score it, and write what came of it into the run's folder.

    results = evaluate(checkpoint, shapes_task(500), Path("runs/eval/shapes"), controls=True)

Under torchrun each rank answers its share of the images. A run that was killed resumes where it stopped, on
any number of ranks. A question whose image does not open scores 0, is listed, and is tried again next time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.answers import by_image, records_of, share
from eval.report import write_report
from eval.results import (
    BLIND,
    REPORT,
    RESULTS,
    RUN,
    SAMPLES,
    describe_model,
    environment,
    read_samples,
    samples_file,
    summarise,
    write_json,
)
from eval.tasks import EvalTask, TaskError
from inference.checkpoint import Checkpoint, RequestError
from inference.results import only_writer
from training.distributed import Ranks


def evaluate(
    checkpoint: Checkpoint,
    task: EvalTask,
    output: Path,
    batch_size: int = 32,
    controls: bool = False,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Answer, score and write; returns the content of results.json, on every rank.

    Args:
        output: a folder, new or of an earlier run of the same task and model.
        batch_size: answers in work at the same time; no score depends on it (in float32).
        controls: also answer with images blanked, and score the most common answers.
    """
    ranks = Ranks(checkpoint.model.device) if ranks is None else ranks
    described = {"task": task.definition(), "model": describe_model(checkpoint)}
    paths = [output / SAMPLES, output / BLIND][: 1 + controls]
    with ExitStack() as stack:  # the first rank holds the folder for all of them
        problem = _begin(task, output, described, paths, stack) if ranks.is_first else ""
        if problem := ranks.gather(problem)[0]:
            raise TaskError(problem)
        speed, *_ = [_answer(checkpoint, task, path, batch_size, ranks) for path in paths]
        ranks.sum()  # the other ranks have written all that they answered
        results: dict[str, Any] = {}
        if ranks.is_first:
            for path in paths:
                samples_file(path).compact(errors=True)
            seen, *blind = map(read_samples, paths)
            results = described | summarise(task, seen, *blind) | _speed(output, *speed)
            results |= {"batch_size": batch_size, "ranks": ranks.world_size} | environment(checkpoint)
            write_json(output / RESULTS, results)
            write_report(output / REPORT, task, results, seen, *blind)
        return ranks.gather(results)[0]


def _begin(
    task: EvalTask, output: Path, described: Mapping[str, Any], paths: Sequence[Path], stack: ExitStack
) -> str:
    """Lock the folder, see that it is new or this run's, and mend its files; what is wrong, or ""."""
    try:
        task.check()
        stack.enter_context(only_writer(output, parents=True))
        output.mkdir(parents=True, exist_ok=True)
        if (output / RUN).exists():
            _check_same(output, described)
        elif any((output / name).exists() for name in (SAMPLES, BLIND)):
            raise TaskError(f"{output}: expected a new folder or an earlier run's, got samples without {RUN}")
        write_json(output / RUN, described)
        known = {sample.id for sample in task.samples}
        for path in paths:
            samples_file(path).compact(errors=False)
            if foreign := sorted(read_samples(path).keys() - known):
                raise TaskError(f"{path}: has answers to questions of another task: {foreign[0]}")
            with samples_file(path).appending():  # shows now whether it can be written
                pass
    except (TaskError, RequestError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or output}: {error.strerror or error}"
    return ""


def _check_same(output: Path, described: Mapping[str, Any]) -> None:
    """Raises TaskError where a folder holds answers of another model or to another task."""
    compared = [("task", key) for key in described["task"]]
    compared += [("model", key) for key in ("revision", "dtype", "max_pixels", "frames")]
    try:
        earlier = json.loads((output / RUN).read_text(encoding="utf-8"))
        earlier["model"].setdefault("frames", described["model"]["frames"])  # runs before videos have none
        pairs = {key: (earlier[part].get(key), described[part][key]) for part, key in compared}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise TaskError(f"{output / RUN} is not what an earlier run wrote: choose another --output") from None
    differ = [f"{key} {a!r:.60} there, {b!r:.60} now" for key, (a, b) in pairs.items() if a != b]
    if differ:
        raise TaskError(
            f"{output}: expected an earlier run of the same task and model, but they differ "
            f"({'; '.join(differ[:2])}): choose another --output"
        )


def _answer(
    checkpoint: Checkpoint, task: EvalTask, path: Path, batch_size: int, ranks: Ranks
) -> tuple[float, int]:
    """Answer this rank's share of what is missing; seconds of the slowest rank, and answers of all."""
    done, blank = read_samples(path), path.name == BLIND
    left = [sample for sample in task.samples if sample.id not in done]
    ranks.gather(len(left))  # every rank has read before any of them writes
    groups = share(by_image(left), ranks.rank, ranks.world_size)
    count = sum(map(len, groups))
    label = f"{task.name}, images blanked" if blank else task.name
    began = time.perf_counter()
    bar = tqdm(total=count, desc=label, unit="sample", disable=not (ranks.is_first and count))
    with bar, samples_file(path).appending(ranks.rank) as write:
        for record in records_of(checkpoint, task, left, batch_size, groups, blank):
            write(record)
            bar.update()
    both = ranks.gather((time.perf_counter() - began, count))
    return max(seconds for seconds, _ in both), sum(answered for _, answered in both)


def _speed(output: Path, seconds: float, answered: int) -> dict[str, float | None]:
    """Seconds and samples/s of this run, or of the earlier one where that left nothing to answer."""
    if not answered and (output / RESULTS).exists():
        with suppress(ValueError, KeyError, TypeError):  # a broken file is written anew
            earlier = json.loads((output / RESULTS).read_text(encoding="utf-8"))
            return {key: earlier[key] for key in ("seconds", "answered", "samples_per_second")}
    per_second = answered / seconds if answered else None
    return {"seconds": seconds, "answered": answered, "samples_per_second": per_second}
