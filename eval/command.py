"""`python -m eval` with PyTorch: answer and score what the command line asks for, and print it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from data.errors import DatasetError
from data.processor import Processor
from data.sources import DatasetConfig
from eval.metrics import find_metric
from eval.results import (
    REPORT,
    RESULTS,
    at_k_text,
    calibration_text,
    classes_text,
    cut_off_text,
    official_table,
    table_text,
)
from eval.rows import Asking, boxes_of, data_task
from eval.run import evaluate
from eval.tasks import OWN, Draws, EvalTask, TaskError, is_user_error, own_task
from inference.checkpoint import Checkpoint, open_checkpoint, pick_device, pixel_budget
from inference.flags import log_if_slow, machine
from inference.thinking import THINK_TOKENS
from messages import counted, for_terminal
from models.checkpoints.sources import last_name
from training.distributed import Ranks

FLAGS_OF_ENTRY = {name: name for name in ("subset", "split", "columns", "allow_urls", "allow_outside")}
FLAGS_OF_ENTRY |= {"allow_text_only": "allow_text_only", "data_revision": "revision"}


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
        tasks.append(_data_task(settings, ranks.device))
    for name in (name for name in OWN if name in settings.tasks):
        more = {} if name != "pages" else {"reading": _processor(settings, ranks.device).reading}
        tasks.append(own_task(name, settings.limit, settings.seed or 0, **more, **(more and settings.pages)))
    think = settings.think_tokens or THINK_TOKENS if settings.think else None
    draws = None
    if settings.samples:
        draws = Draws(settings.samples, settings.temperature, settings.sample_seed or 0)
    tasks = [replace(task, think=think, draws=draws) for task in tasks]
    for task in tasks:
        task.check()
    if official:
        from eval.lmms import check_tasks, run_lmms  # optional, and some seconds to import

        check_tasks(official)  # before our own tasks are answered
    with log_if_slow("python -m eval", settings.model) if ranks.is_first else nullcontext():
        own = machine(settings) | {"device": str(ranks.device)}
        checkpoint = open_checkpoint(settings.model, settings.revision, **own)
    if settings.think:
        checkpoint.processor.chat.check_thinking("--think")
    if settings.compile != "off":
        checkpoint = checkpoint.compiled()
    model = _as_folder(checkpoint.name)
    for task in tasks:
        output = settings.output or Path("runs/eval") / f"{_as_folder(task.name)}-{model}"
        if settings.output and len(settings.tasks) > 1:
            output = settings.output / _as_folder(task.name)
        _run_own(task, checkpoint, settings, ranks, output)
    output = settings.output or Path("runs/eval") / model
    size = settings.batch_size
    for result in (
        run_lmms(official, checkpoint, settings.limit, size, output, think=think) if official else ()
    ):
        print(for_terminal(official_table(result)))
        asked = counted(result["n"], "question")
        print(f"{asked}, {result['seconds']:.1f} s in all; {output / result['task']['name']}")


def _data_task(settings: argparse.Namespace, on: torch.device) -> EvalTask:
    given = {name: getattr(settings, flag) for flag, name in FLAGS_OF_ENTRY.items()}
    said = {"split": ""} | settings.data | {name: one for name, one in given.items() if one}
    entry = DatasetConfig.from_dict(said)
    idle = ["streaming", "weight", "language"] + ["boxes"] * (settings.metric != "boxes")
    if idle := [key for key in idle if said.get(key)]:
        needed = ", boxes without --metric boxes" if "boxes" in idle else ""
        raise DatasetError(f"--data: {', '.join(idle)}: without effect here{needed}; leave them out")
    asked = {name: getattr(settings, name) for name in ("system", "max_new_tokens", "limit", "holdout")}
    asking, options = Asking(settings.prompt.replace("\\n", "\n"), **asked), dict(settings.metric_option)
    if settings.metric == "boxes":
        form_for = _processor(settings, on).form
        boxes, of_boxes = boxes_of(entry, form_for, options)
        asking, options = replace(asking, boxes=boxes, form_for=form_for), options | of_boxes
    return data_task(entry, find_metric(settings.metric or "exact_match", **options), asking)


def _processor(settings: argparse.Namespace, on: torch.device) -> Processor:
    """That of the model, before its weights are read."""
    seen = {"revision": settings.revision, "max_pixels": pixel_budget(on, settings.max_pixels)}
    return Processor.from_pretrained(settings.model, **seen)


def _run_own(
    task: EvalTask, checkpoint: Checkpoint, settings: argparse.Namespace, ranks: Ranks, output: Path
) -> None:
    if ranks.is_first:
        step = f"{checkpoint.dtype} on {ranks.device}, {checkpoint.fast.name}"
        print(for_terminal(f"{task}\n   model  {checkpoint.name}, {step}"))
    results = evaluate(checkpoint, task, output, settings.batch_size, settings.controls, ranks)
    if not ranks.is_first:
        return
    print(for_terminal(table_text(results["families"])))
    if results["classes"]:
        print(for_terminal(f"\n{classes_text(results['classes'])}\n"))
    if results["at_k"]:
        print(f"\n{at_k_text(results)}\n")
    if calibrated := calibration_text(results):
        print(calibrated)
    if cut := cut_off_text(results):
        print(cut)
    speed, errors = results["samples_per_second"], results["errors"]
    per_second = f", {speed:.1f} samples/s" if speed else ""
    asked = counted(results["n"], "question")
    print(f"{asked}; {results['answered']} answered in {results['seconds']:.1f} s{per_second}")
    if errors["count"]:
        listed = "; ".join(f"{one['id']}: {one['error']}" for one in errors["samples"][:3])
        said = f"{errors['count']} could not be answered and score 0 ({listed}; all of them in {RESULTS})"
        print(for_terminal(said))
    print(output / REPORT)


def _as_folder(name: str) -> str:
    """A name as part of a folder's."""
    return "".join(x if x.isalnum() or x in "-._" else "-" for x in last_name(name)).strip("-.") or "task"
