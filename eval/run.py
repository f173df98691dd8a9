"""Run tasks: answer what has no answer yet, score it, and write what came of it into the run's folder.

    results = evaluate(checkpoint, shapes_task(500), Path("runs/eval/shapes"), controls=True)

Under torchrun each rank answers its share of the images. A run that was killed resumes where it stopped, on
any number of ranks. A question whose image does not open scores 0, is listed, and is tried again next time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.box_rows import BoxRows
from data.coordinates import COORDINATES, form_of
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
    calibration_text,
    official_table,
    read_samples,
    samples_file,
    summarise,
    table_text,
    write_json,
)
from eval.rows import BOX_TOKENS, MAX_NEW_TOKENS, DataConfig, data_task
from eval.tasks import OWN, EvalTask, TaskError, is_user_error, own_task
from inference.checkpoint import Checkpoint, RequestError, open_checkpoint, pick_device
from inference.cli import log_if_slow
from inference.locks import only_writer
from models.checkpoints.hub import describe, for_terminal
from training.distributed import Ranks


# --------------------------------------------------------------------------------------------- one task
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
    compared = [("task", key) for key in described["task"]] + [("model", "revision"), ("model", "dtype")]
    try:
        earlier = json.loads((output / RUN).read_text(encoding="utf-8"))
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
    answered = answers(checkpoint, left, batch_size, groups, blank, task.looked) if count else ()
    with bar, samples_file(path).appending(ranks.rank) as write:
        for number, answer in answered:
            write(record_of(task, left[number], answer))
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
    tasks = []
    if settings.data:
        tasks.append(_data_task(settings))
    tasks += [own_task(name, settings.limit, settings.seed or 0) for name in OWN if name in settings.tasks]
    for task in tasks:
        task.check()
    if official:
        from eval.lmms import check_tasks, run_lmms  # optional, and some seconds to import

        check_tasks(official)  # before our own tasks are answered
    with log_if_slow("python -m eval", settings.model) if ranks.is_first else nullcontext():
        checkpoint = open_checkpoint(
            settings.model, settings.revision, str(ranks.device), settings.dtype, settings.threads
        )
    if settings.compile != "off":
        checkpoint = checkpoint.compiled()
    model = _as_folder(settings.model)
    for task in tasks:
        output = settings.output or Path("runs/eval") / f"{_as_folder(task.name)}-{model}"
        if settings.output and len(settings.tasks) > 1:
            output = settings.output / _as_folder(task.name)
        _run_own(task, checkpoint, settings, ranks, output)
    output = settings.output or Path("runs/eval") / model
    size = settings.batch_size
    for result in run_lmms(official, checkpoint, settings.limit, size, output) if official else ():
        print(for_terminal(official_table(result)))
        print(f"{result['n']} questions, {result['seconds']:.1f} s in all; {output / result['task']['name']}")


def _data_task(settings: argparse.Namespace) -> EvalTask:
    names = (
        "subset",
        "split",
        "columns",
        "system",
        "limit",
        "allow_urls",
        "allow_outside",
        "allow_text_only",
    )
    options, boxes = dict(settings.metric_option), None
    if settings.metric == "boxes":
        said = describe(settings.model, settings.revision).generation_config
        form = form_of(said, options.get("form")) or COORDINATES["qwen3-vl"]
        options["form"] = form.name
        boxes = BoxRows(form.name, bool(options.get("corners")), detect=form.detect, point=form.point)
    config = DataConfig(
        settings.data,
        revision=settings.data_revision,
        prompt=settings.prompt.replace("\\n", "\n"),
        max_new_tokens=settings.max_new_tokens or (BOX_TOKENS if boxes else MAX_NEW_TOKENS),
        boxes=boxes,
        points=bool(options.get("points", False)),
        looked=bool(options.get("looked", False)),
        **{name: getattr(settings, name) for name in names},
    )
    return data_task(config, find_metric(settings.metric or "exact_match", **options))


def _run_own(
    task: EvalTask, checkpoint: Checkpoint, settings: argparse.Namespace, ranks: Ranks, output: Path
) -> None:
    if ranks.is_first:
        step = f"{checkpoint.dtype} on {ranks.device}, {checkpoint.decode_step_name}"
        print(for_terminal(f"{task}\n   model  {settings.model}, {step}"))
    results = evaluate(checkpoint, task, output, settings.batch_size, settings.controls, ranks)
    if not ranks.is_first:
        return
    print(for_terminal(table_text(results["families"])))
    if calibrated := calibration_text(results):
        print(calibrated)
    speed, errors = results["samples_per_second"], results["errors"]
    per_second = f", {speed:.1f} samples/s" if speed else ""
    print(
        f"{results['n']} questions; {results['answered']} answered in {results['seconds']:.1f} s{per_second}"
    )
    if errors["count"]:
        listed = "; ".join(f"{one['id']}: {one['error']}" for one in errors["samples"][:3])
        said = f"{errors['count']} could not be answered and score 0 ({listed}; all of them in {RESULTS})"
        print(for_terminal(said))
    print(output / REPORT)


def _as_folder(name: str) -> str:
    """A name as part of a folder's."""
    tail = Path(name).name if Path(name).exists() else name
    return "".join(x if x.isalnum() or x in "-._" else "-" for x in tail).strip("-.") or "task"
