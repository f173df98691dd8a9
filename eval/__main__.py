"""Score a model: on plain drawings, on rows of your own, on the official tasks of lmms-eval.

    python -m eval --tasks shapes --controls                    # the embedded model, held-out questions
    python -m eval --tasks shapes --model runs/shapes --limit 500
    python -m eval --tasks shapes --samples 8 --temperature 0.8   # pass@k and majority@k of 8 answers
    python -m eval --tasks drawings --model runs/world          # in varied styles: recipes/world
    python -m eval --tasks pages --controls                     # ten pages, or those of --data: recipes/pages
    python -m eval --data rows.jsonl --metric relaxed_accuracy --model HuggingFaceTB/SmolVLM-256M-Instruct
    python -m eval --data my/dataset --split test --columns question=query --metric anls
    python -m eval --tasks mmstar,docvqa_val --model runs/mine  # needs requirements-eval.txt
    torchrun --nproc-per-node 8 -m eval --tasks shapes --model runs/mine
    python -m eval compare runs/eval/a runs/eval/b              # the same questions, two models
    python -m eval card runs/mine runs/eval/a                   # results into the model's card
    python -m eval prove MODEL                                  # every way gives the same tokens

Each run prints its prompt and its scoring and keeps them beside the score. Its folder holds results.json,
samples.jsonl and report.html; the same command again resumes a run that was stopped. Tasks of lmms-eval
leave results.json and samples.jsonl when all of them are done; they always begin anew and replace these.
Exit status: 0, 1 if `prove` finds a difference, 2 with one sentence on what was wrong, or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from data.errors import check_rows_path
from eval.metrics import find_metric
from eval.tasks import DEFAULT_MODEL, OWN, TaskError, check_official, is_user_error
from inference.flags import (
    DTYPES,
    MODEL,
    Parser,
    add_machine,
    add_think,
    check_model,
    device,
    dtype,
    model,
    option,
    positive,
)
from messages import named, one_line
from training.config import dataset_entries, read_datasets

# Nothing here imports torch before everything is checked that can be: --help and refusals answer at once.

COMMANDS = {"compare": "eval.compare", "card": "eval.card", "prove": "eval.prove"}
OF_DATA = (
    *("metric", "metric_option", "subset", "split", "data_revision", "columns"),
    *("holdout", "prompt", "system", "max_new_tokens", "allow_urls", "allow_outside", "allow_text_only"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m eval", description=__doc__)
    add = parser.add_argument_group("what to ask").add_argument
    tasks = "shapes, drawings, strangers, pages, or tasks of lmms-eval, by commas"
    add("--tasks", type=names, metavar="NAMES", help=tasks)
    rows = "rows of your own: a Hub id, folder or file, or an entry as train.py takes it, [{path: ...}]; "
    rows += "with --tasks pages, a folder of pages (recipes/pages)"
    add("--data", type=dataset, metavar="PATH", help=rows)
    most = "maximum number of questions (shapes, drawings, strangers, pages: default 2000)"
    add("--limit", type=positive, metavar="N", help=most)
    controls = "also score answers to blanked images, and the most common answer; not for lmms-eval's tasks"
    add("--controls", action="store_true", help=controls)
    add_think(add)
    several = "sample N answers to each question from one prefill: pass@k (the best of k, where scores lie "
    several += "between 0 and 1) and majority@k for k = 1, 2, 4, ... N; the score is the mean of all answers"
    add("--samples", type=partial(positive, least=2), metavar="N", help=several)
    add("--temperature", type=option(above_zero), metavar="T", help="temperature of --samples")
    add("--sample-seed", type=partial(positive, least=0), metavar="S", help="seed of --samples (default 0)")
    add("--seed", type=int, help="seed of the questions of shapes, drawings and strangers (default 0)")

    add = parser.add_argument_group("rows of your own").add_argument
    add("--metric", metavar="NAME", help="exact_match (default), vqa_accuracy, anls, relaxed_accuracy, ...")
    one = "option of the metric, such as years_exact=true; may be repeated"
    add("--metric-option", type=pair, action="append", default=[], metavar="NAME=VALUE", help=one)
    add("--subset", help="configuration of a Hub dataset")
    split = "dataset split (default: test for Hub datasets, everything for a local file or folder, train if "
    add("--split", default="", help=split + "the folder has split subfolders)")
    held_out = "score what train.py --holdout SHARE left out of these rows"
    add("--holdout", type=option(partial(above_zero, most=1)), default=0.0, metavar="SHARE", help=held_out)
    add("--data-revision", metavar="REV", help="branch, tag or commit of the dataset")
    theirs = "names of the data's columns, where they differ from ours"
    add("--columns", type=columns, metavar="OURS=THEIRS,...", default={}, help=theirs)
    prompt = "prompt template with column names in braces; \\n is a new line"
    add("--prompt", default="", metavar="TEXT", help=prompt)
    add("--system", default="", metavar="TEXT", help="system message before every question")
    tokens = "maximum tokens to generate (default 32; of a page, by its size)"
    add("--max-new-tokens", type=positive, metavar="N", help=tokens)
    add("--allow-urls", action="store_true", help="fetch images that rows name by URL")
    add("--allow-outside", action="store_true", help="open images outside of the data's folder")
    add("--allow-text-only", action="store_true", help="accept rows without any image")

    add = parser.add_argument_group("model").add_argument
    add("--model", type=model, default=str(DEFAULT_MODEL), help=MODEL)
    add("--revision", help="branch, tag or commit of the model on the Hub")
    add("--device", type=device, default="auto", help="auto (default: the best available), cpu, cuda, mps")
    weights = "dtype of the weights (default float32, in which no score depends on --batch-size)"
    add("--dtype", type=dtype, default="float32", choices=DTYPES, help=weights)
    compiled = "compile the decode step (auto, the default: if this machine can)"
    add("--compile", default="auto", choices=("auto", "off"), help=compiled)
    add("--batch-size", type=positive, default=32, metavar="N", help="answers in parallel (default 32)")
    add_machine(add)

    add = parser.add_argument_group("output").add_argument
    add("--output", type=Path, metavar="DIR", help="folder of the run (default runs/eval/TASK-MODEL)")
    return parser


@option
def dataset(text: str) -> dict[str, Any]:
    """A path, or an entry as in a recipe's list of datasets."""
    entries = dataset_entries(read_datasets(text))
    if len(entries) != 1:
        raise ValueError(f"expected one dataset, got {len(entries)}: run each by itself")
    return dict(entries[0])


def above_zero(text: str, most: float = math.inf) -> float:
    if not 0 < float(text) < most:
        raise ValueError(f"expected a number above 0 and below {most}, got {text!r}")
    return float(text)


def names(text: str) -> list[str]:
    """ "shapes, mmstar" -> ["shapes", "mmstar"]."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


@option
def columns(text: str) -> dict[str, str]:
    """ "question=query,answer=label" -> {"question": "query", "answer": "label"}."""
    return dict(_sides(part) for part in text.split(",") if part)


@option
def pair(text: str) -> tuple[str, Any]:
    """ "years_exact=true" -> ("years_exact", True); a value that is no JSON stays a text."""
    name, value = _sides(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _sides(text: str) -> tuple[str, str]:
    left, _, right = (part.strip() for part in text.partition("="))
    if not left or not right:
        raise ValueError(f"expected NAME=VALUE, got {text!r}")
    return left, right


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = build_parser()
    settings = parser.parse_args(arguments)
    settings.pages = {}
    if settings.tasks == ["pages"]:  # which have a folder, and may have a limit
        settings.pages = {"folder": settings.data and settings.data["path"], "limit": settings.max_new_tokens}
        settings.data = settings.max_new_tokens = None
        settings.max_pixels = settings.max_pixels or 2**21  # as `generate.py read` has it
    if bool(settings.tasks) == bool(settings.data):
        parser.error("expected either --tasks or --data")
    of_data = ["--" + name.replace("_", "-") for name in OF_DATA if getattr(settings, name)]
    if settings.tasks and of_data:
        parser.error(f"{', '.join(of_data)}: expected with --data, a task has its own")
    settings.tasks = settings.tasks or []
    if settings.think_tokens and not settings.think:
        parser.error("--think-tokens: expected with --think")
    if settings.samples and settings.temperature is None:
        parser.error("--samples: expected with a --temperature, such as 0.8")
    if not settings.samples and (settings.temperature is not None or settings.sample_seed is not None):
        parser.error("--temperature, --sample-seed: expected with --samples")
    if settings.seed is not None and not ({*OWN} - {"pages"}) & {*settings.tasks}:
        parser.error("--seed: belongs to --tasks shapes, drawings and strangers")
    return settings


def check_names(settings: argparse.Namespace) -> None:
    """Whether the tasks, metric, rows and model exist. Raises what `is_user_error` knows."""
    official = [name for name in settings.tasks if name not in OWN]
    check_official(official)
    if official and (settings.controls or settings.samples):
        flag = "--controls" if settings.controls else "--samples"
        raise TaskError(f"{flag}: tasks of lmms-eval have none; run {', '.join(official)} without it")
    if settings.data:
        find_metric(settings.metric or "exact_match", **dict(settings.metric_option))
        check_rows_path(str(settings.data.get("path", "")))
    check_model(settings.model, settings.revision)
    if settings.output is not None and settings.output.is_file():
        raise TaskError(f"--output: expected a folder, got the file {settings.output}")


def run(arguments: list[str]) -> None:
    settings = parse_arguments(arguments)
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if alone:
        check_names(settings)
    from eval.command import run_command  # imports torch

    run_command(settings, None if alone else partial(check_names, settings))


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        command = importlib.import_module(COMMANDS[arguments[0]]).main  # one takes SciPy, another httpx
        return guarded(f"python -m eval {arguments[0]}", partial(command, arguments[1:]))
    again = "; the same command resumes, except for tasks of lmms-eval, which begin anew"
    return guarded("python -m eval", partial(run, arguments), again)


def guarded(program: str, work: Callable[[], int | None], again: str = "") -> int:
    """Do it and return the exit status; a user's error is printed as one sentence. `again` is what to say
    about the next start after Ctrl-C."""
    try:
        return work() or 0
    except KeyboardInterrupt:
        print(named(f"\n{program}: interrupted{again}"), file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        if not is_user_error(error):
            raise
        print(named(f"{program}: error: {one_line(error)}"), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
