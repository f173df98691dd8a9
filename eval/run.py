"""Run tasks: answer what has no answer yet, score it, and write what came of it into the run's folder.

    results = evaluate(checkpoint, shapes_task(500), Path("runs/eval/shapes"), controls=True)

Under torchrun each rank answers its share of the images. A run that was killed resumes where it stopped, on
any number of ranks. A question whose image does not open scores 0, is listed, and is tried again next time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.answering import answers, by_image, record_of, share
from eval.environment import describe_model, environment
from eval.metrics import find_metric
from eval.report import write_report
from eval.results import (
    BLIND,
    REPORT,
    RESULTS,
    RUN,
    SAMPLES,
    official_table,
    read_samples,
    samples_file,
    summarise,
    table_text,
    write_json,
)
from eval.rows import MAX_NEW_TOKENS, DataConfig, data_task
from eval.tasks import OWN, SHAPES_QUESTIONS, EvalTask, TaskError, is_user_error, shapes_task
from inference.checkpoint import Checkpoint, RequestError, open_checkpoint, pick_device
from inference.cli import log_if_slow
from inference.locks import only_writer
from training.distributed import Ranks

_MODEL_KEYS = ("revision", "dtype")  # with which a later run must agree, besides the task


# --------------------------------------------------------------------------------------------- one task
def evaluate(
    checkpoint: Checkpoint,
    task: EvalTask,
    output: Path,
    batch_size: int = 32,
    controls: bool = False,
    ranks: Ranks | None = None,
    progress: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Answer, score and write; returns the content of results.json, on every rank.

    Args:
        output: a folder, new or of an earlier run of the same task and model.
        batch_size: answers in work at the same time; no score depends on it (in float32).
        controls: also answer with images blanked, and score the most common answers.
        tell: gets one line about the caches' memory before any work.
    """
    ranks = Ranks(checkpoint.model.device) if ranks is None else ranks
    described = {"task": task.definition(), "model": describe_model(checkpoint)}
    paths = {False: output / SAMPLES} | ({True: output / BLIND} if controls else {})
    with ExitStack() as stack:  # the first rank holds the folder for all of them
        problem = _begin(task, output, described, paths, stack) if ranks.is_first else ""
        if problem := ranks.gather(problem)[0]:
            raise TaskError(problem)
        speeds = {
            blank: _answer(checkpoint, task, path, blank, batch_size, ranks, progress, tell)
            for blank, path in paths.items()
        }
        ranks.sum()  # the other ranks have written all that they answered
        results: dict[str, Any] = {}
        if ranks.is_first:
            for path in paths.values():
                samples_file(path).compact(errors=True)
            seen, blind = read_samples(paths[False]), read_samples(paths[True]) if controls else None
            results = described | summarise(task, seen, controls, blind)
            results |= _speed(output, speeds[False]) | {"batch_size": batch_size, "ranks": ranks.world_size}
            results |= environment(checkpoint)
            write_json(output / RESULTS, results)
            write_report(output / REPORT, task, results, seen, blind)
        return ranks.gather(results)[0]


def _begin(
    task: EvalTask,
    output: Path,
    described: Mapping[str, Any],
    paths: Mapping[bool, Path],
    stack: ExitStack,
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
        for path in paths.values():
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
    earlier = json.loads((output / RUN).read_text(encoding="utf-8"))
    pairs = {key: (earlier["task"].get(key), value) for key, value in described["task"].items()}
    pairs |= {key: (earlier["model"].get(key), described["model"][key]) for key in _MODEL_KEYS}
    differ = [f"{key} {a!r:.60} there, {b!r:.60} now" for key, (a, b) in pairs.items() if a != b]
    if differ:
        raise TaskError(
            f"{output}: expected an earlier run of the same task and model, but they differ "
            f"({'; '.join(differ[:2])}): choose another --output"
        )


def _answer(
    checkpoint: Checkpoint,
    task: EvalTask,
    path: Path,
    blank: bool,
    batch_size: int,
    ranks: Ranks,
    progress: bool,
    tell: Callable[[str], None],
) -> dict[str, float]:
    """Answer this rank's share of what is missing; seconds of the slowest rank, and answers of all."""
    done = read_samples(path)
    left = [sample for sample in task.samples if sample.id not in done]
    ranks.gather(len(left))  # every rank has read before any of them writes
    groups = share(by_image(left), ranks.rank, ranks.world_size)
    count = sum(map(len, groups))
    label = f"{task.name}, images blanked" if blank else task.name
    began = time.perf_counter()
    bar = tqdm(total=count, desc=label, unit="sample", disable=not (progress and ranks.is_first and count))
    answered = answers(checkpoint, left, batch_size, groups, blank, tell=tell) if count else ()
    with bar, samples_file(path).appending(ranks.rank) as write:
        for number, answer in answered:
            write(record_of(task, left[number], answer))
            bar.update()
    both = ranks.gather((time.perf_counter() - began, count))
    return {"seconds": max(s for s, _ in both), "answered": sum(n for _, n in both)}


def _speed(output: Path, now: Mapping[str, float]) -> dict[str, float | None]:
    """Seconds and samples/s of this run, or of the earlier one where that left nothing to answer."""
    if not now["answered"] and (output / RESULTS).exists():
        earlier = json.loads((output / RESULTS).read_text(encoding="utf-8"))
        return {key: earlier[key] for key in ("seconds", "answered", "samples_per_second")}
    speed = now["answered"] / now["seconds"] if now["answered"] else None
    return {**now, "samples_per_second": speed}


# -------------------------------------------------------------------------------------- the command line
def run_command(settings: argparse.Namespace, check_names: Callable[[], None] | None) -> None:
    """Answer and score everything that the command line asks for; prints each task, then its figures. What
    one rank of several finds wrong all of them must hear, so `check_names` is called in here."""
    ranks = Ranks(pick_device(settings.device))
    try:
        with ranks.watching():
            if check_names is not None:
                check_names()
            _run_tasks(settings, ranks)
    except (ValueError, OSError, RuntimeError) as error:
        if not (ranks.together and is_user_error(error)):
            raise
        raise TaskError(ranks.reason(error)) from error
    finally:
        ranks.close()


def _run_tasks(settings: argparse.Namespace, ranks: Ranks) -> None:
    official = [name for name in settings.tasks if name not in OWN]
    if settings.data:
        tasks = [_data_task(settings)]
    else:
        count, seed = settings.limit or SHAPES_QUESTIONS, settings.seed or 0
        tasks = [shapes_task(count, seed) for name in settings.tasks if name in OWN]
    for task in tasks:
        task.check()
    if official:
        from eval.lmms import check_tasks, run_lmms  # optional, and some seconds to import

        check_tasks(official)  # before our own tasks are answered
    with log_if_slow("python -m eval", settings.model) if ranks.is_first else nullcontext():
        checkpoint = open_checkpoint(settings.model, settings.revision, str(ranks.device), settings.dtype)
    if settings.compile != "off":
        checkpoint = checkpoint.compiled()
    for task in tasks:
        _run_own(task, checkpoint, settings, ranks, alone=len(tasks) + len(official) == 1)
    if not official:
        return
    output = settings.output or Path("runs/eval") / _as_folder(settings.model)
    for result in run_lmms(official, checkpoint, settings.limit, settings.batch_size, output):
        print(official_table(result))
        print(f"{result['n']} questions, {result['seconds']:.1f} s in all; {output / result['task']['name']}")


def _data_task(settings: argparse.Namespace) -> EvalTask:
    config = DataConfig(
        settings.data,
        subset=settings.subset,
        split=settings.split,
        revision=settings.data_revision,
        columns=settings.columns,
        prompt=settings.prompt.replace("\\n", "\n"),
        system=settings.system,
        max_new_tokens=settings.max_new_tokens or MAX_NEW_TOKENS,
        limit=settings.limit,
        allow_urls=settings.allow_urls,
        allow_outside=settings.allow_outside,
        allow_text_only=settings.allow_text_only,
    )
    return data_task(config, find_metric(settings.metric or "exact_match", **dict(settings.metric_option)))


def _run_own(
    task: EvalTask, checkpoint: Checkpoint, settings: argparse.Namespace, ranks: Ranks, alone: bool
) -> None:
    output = settings.output or Path("runs/eval") / f"{_as_folder(task.name)}-{_as_folder(settings.model)}"
    if settings.output and not alone:
        output = settings.output / _as_folder(task.name)
    say = print if ranks.is_first else (lambda *_: None)
    tell = (lambda plan: tqdm.write(f"  memory  {plan}")) if ranks.is_first else (lambda _: None)
    say(task)
    say(f"   model  {settings.model}, {checkpoint.dtype} on {ranks.device}, {checkpoint.decode_step_name}")
    results = evaluate(checkpoint, task, output, settings.batch_size, settings.controls, ranks, tell=tell)
    say(table_text(results["families"]))
    speed, errors = results["samples_per_second"], results["errors"]
    say(
        f"{results['n']} questions; {results['answered']} answered in {results['seconds']:.1f} s"
        + (f", {speed:.1f} samples/s" if speed else "")
    )
    if errors["count"]:
        listed = "; ".join(f"{one['id']}: {one['error']}" for one in errors["samples"][:3])
        say(f"{errors['count']} could not be answered and score 0 ({listed}; all of them in {RESULTS})")
    say(output / REPORT)


def _as_folder(name: str) -> str:
    """A name as part of a folder's."""
    tail = "/".join(Path(name).parts[-1:]) if Path(name).exists() else name
    return "".join(x if x.isalnum() or x in "-._" else "-" for x in tail).strip("-.") or "task"
