"""Score a model: on the built-in image world, on your own rows, on the official tasks of lmms-eval.

    python -m eval --tasks shapes --controls                    # the embedded model, held-out questions
    python -m eval --tasks shapes --model runs/shapes --limit 500
    python -m eval --data rows.jsonl --metric relaxed_accuracy --model HuggingFaceTB/SmolVLM-256M-Instruct
    python -m eval --data my/dataset --split test --columns question=query --metric anls
    python -m eval --tasks mmstar,docvqa_val --model runs/mine  # needs requirements-eval.txt
    torchrun --nproc-per-node 8 -m eval --tasks shapes --model runs/mine
    python -m eval compare runs/eval/a runs/eval/b              # the same questions, two models
    python -m eval card runs/mine runs/eval/a                   # results into the model's card

Prompts and scoring are printed and written beside the score. The output folder holds results.json,
samples.jsonl and report.html; started again, a run goes on where it stopped. Tasks of lmms-eval leave
results.json and samples.jsonl, when all of them are done; started again, they begin anew and replace these.
Exit status: 0, or 2 with one sentence on what was wrong, or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from data.errors import one_line
from data.files import check_rows_path
from inference.cli import DTYPES, Parser, check_model, device, dtype, log_if_slow, positive

# What imports torch is imported inside functions, after all that can be checked without it: --help and a
# mistake answer at once.

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = ROOT / "checkpoints" / "ocelli-shapes"
REFUSALS = (ValueError, OSError, RuntimeError)  # of which `expected` tells those of people
OF_DATA = (
    *("metric", "metric_option", "subset", "split", "data_revision", "columns"),
    *("prompt", "system", "max_new_tokens", "allow_urls", "allow_outside", "allow_text_only"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m eval", description=__doc__)
    group = parser.add_argument_group("what to ask")
    add = group.add_argument
    add("--tasks", metavar="NAMES", help="shapes, or tasks of lmms-eval; several with commas")
    add("--data", metavar="PATH", help="rows of your own: a Hub id, a folder, JSON lines, Parquet")
    add("--limit", type=positive, metavar="N", help="only the first N questions (shapes: default 2000)")
    add("--controls", action="store_true", help="also with images blanked, and the most common answer "
        "to the questions asked; not for lmms-eval's tasks")  # fmt: skip
    add("--seed", type=int, help="shapes: which held-out questions (default 0)")

    group = parser.add_argument_group("rows of your own")
    add = group.add_argument
    add("--metric", metavar="NAME", help="exact_match (default), vqa_accuracy, anls, relaxed_accuracy, ...")
    add("--metric-option", type=pair, action="append", default=[], metavar="NAME=VALUE", help="of the metric")
    add("--subset", help="configuration of a Hub dataset")
    add(
        "--split",
        default="",
        help="default: test of what is on the Hub, all of a file or folder here, train of folders for splits",
    )
    add("--data-revision", metavar="REV", help="branch, tag or commit of the dataset")
    add("--columns", metavar="OURS=THEIRS,...", default="", help="names of the columns, where they differ")
    add("--prompt", default="", metavar="TEXT", help="template with columns in braces; \\n is a new line")
    add("--system", default="", metavar="TEXT", help="system message in front of every question")
    add("--max-new-tokens", type=positive, metavar="N", help="of an answer (default 32)")
    add("--allow-urls", action="store_true", help="rows may name images by URL")
    add("--allow-outside", action="store_true", help="rows may name images outside of the data's folder")
    add("--allow-text-only", action="store_true", help="there need not be an image in the first rows")

    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", default=str(DEFAULT_MODEL), help="folder, or repository on the Hub")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--device", type=device, default="auto", help="auto (default: the best one here), cpu, cuda, mps")
    add("--dtype", type=dtype, default="float32", choices=DTYPES, help="of the weights (default float32: no "
        "score depends on --batch-size)")  # fmt: skip
    add("--compile", default="auto", choices=("auto", "off"), help="the decode step, once for this "
        "machine; auto (default): always, where this machine can")  # fmt: skip
    add("--batch-size", type=positive, default=32, metavar="N", help="answers at a time (default 32)")

    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, metavar="DIR", help="default runs/eval/TASK-MODEL")
    return parser


def pair(text: str) -> tuple[str, Any]:
    """ "years_exact=true" -> ("years_exact", True); what is no JSON stays a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    settings = parser.parse_args(arguments)
    if bool(settings.tasks) == bool(settings.data):
        parser.error("expected either --tasks or --data")
    of_data = [_flag(name) for name in OF_DATA if getattr(settings, name) not in (None, "", [], False)]
    if settings.tasks and of_data:
        parser.error(f"{', '.join(of_data)}: belong to --data, a task has its own")
    if settings.data and settings.seed is not None:
        parser.error("--seed: belongs to --tasks shapes, --data asks its rows as they are")
    columns = [part.partition("=") for part in settings.columns.split(",") if part]
    if not all(ours and equals and theirs for ours, equals, theirs in columns):
        parser.error(f"--columns: expected OURS=THEIRS,..., got {settings.columns!r}")
    settings.columns = {ours.strip(): theirs.strip() for ours, _, theirs in columns}
    names = [name.strip() for name in (settings.tasks or "").split(",") if name.strip()]
    if settings.tasks and not names:
        parser.error(f"--tasks: expected names, got {settings.tasks!r}")
    settings.tasks = list(dict.fromkeys(names))
    return settings


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_options(settings: argparse.Namespace, official: list[str]) -> None:
    """Raises TaskError where an option would be without effect on tasks of lmms-eval."""
    from eval.tasks import TaskError

    if official and settings.controls:
        raise TaskError(
            f"--controls: tasks of lmms-eval have none, leave it out or ask {', '.join(official)} apart"
        )
    if settings.tasks == official and settings.seed is not None:
        raise TaskError("--seed: belongs to --tasks shapes, tasks of lmms-eval ask what they hold")


def own_tasks(settings: argparse.Namespace) -> list:
    """The tasks that this runner runs: --data, and those of --tasks that are ours."""
    from eval.metrics import find_metric
    from eval.rows import MAX_NEW_TOKENS, DataConfig, data_task
    from eval.tasks import SHAPES_QUESTIONS, shapes_task

    if settings.data:
        metric = find_metric(settings.metric or "exact_match", **dict(settings.metric_option))
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
        return [data_task(config, metric)]
    return [
        shapes_task(settings.limit or SHAPES_QUESTIONS, settings.seed or 0)
        for name in settings.tasks
        if name == "shapes"
    ]


def check_names(settings: argparse.Namespace) -> None:
    """Whether there are such tasks, metrics, rows and models, before torch is imported.

    Raises:
        CheckpointError, DatasetError, MetricError, TaskError: there are not.
    """
    from eval.metrics import find_metric
    from eval.tasks import OWN, TaskError, check_official

    official = [name for name in settings.tasks if name not in OWN]
    check_official(official)
    check_options(settings, official)
    if settings.data:
        find_metric(settings.metric or "exact_match", **dict(settings.metric_option))
        check_rows_path(settings.data)
    check_model(settings.model, settings.revision)
    if settings.output is not None and settings.output.is_file():
        raise TaskError(f"--output: expected a folder, got the file {settings.output}")


def run_tasks(settings: argparse.Namespace) -> None:
    """Answer and score all that was asked for; prints each task, then its figures.

    Raises:
        TaskError: naming the rank, where something that a person can mend goes wrong on one of several.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if alone:  # else all ranks hear of what one of them lacks
        check_names(settings)
    from inference.checkpoint import pick_device
    from training.distributed import Ranks

    ranks = Ranks(pick_device(settings.device))
    try:
        with ranks.watching():
            if not alone:
                check_names(settings)
            _run_tasks(settings, ranks)
    except REFUSALS as error:
        if not (ranks.together and expected(error)):
            raise
        from eval.tasks import TaskError

        raise TaskError(ranks.reason(error)) from error
    finally:
        ranks.close()


def _run_tasks(settings: argparse.Namespace, ranks) -> None:
    from eval.tasks import OWN
    from inference.checkpoint import open_checkpoint

    official = [name for name in settings.tasks if name not in OWN]
    tasks = own_tasks(settings)
    for task in tasks:
        task.check()
    if tasks and official:  # a slip is found before ours are answered; alone, lmms-eval checks at once
        from eval.lmms import check_tasks

        check_tasks(official)
    with log_if_slow("python -m eval", settings.model) if ranks.is_first else nullcontext():
        checkpoint = open_checkpoint(settings.model, settings.revision, str(ranks.device), settings.dtype)
    if settings.compile != "off":
        checkpoint = checkpoint.compiled()
    for task in tasks:
        run_own(task, checkpoint, settings, ranks, alone=len(tasks) + len(official) == 1)
    if official:
        run_official(official, checkpoint, settings)


def run_own(task, checkpoint, settings: argparse.Namespace, ranks, alone: bool) -> None:
    """One of our tasks, to its end."""
    from tqdm import tqdm

    from eval.results import table_text
    from eval.run import evaluate

    name = f"{_plain(task.name)}-{_plain(settings.model)}"
    output = settings.output or Path("runs/eval") / name
    if settings.output and not alone:
        output = settings.output / _plain(task.name)
    say = print if ranks.is_first else (lambda *_: None)
    say(task)
    say(f"   model  {settings.model}, {checkpoint.dtype} on {ranks.device}, {checkpoint.decode_step_name}")
    plans = (lambda plan: tqdm.write(f"  memory  {plan}")) if ranks.is_first else (lambda _: None)
    results = evaluate(checkpoint, task, output, settings.batch_size, settings.controls, ranks, tell=plans)
    say(table_text(results["families"]))
    say(verdict(results, output))


def run_official(names: list[str], checkpoint, settings: argparse.Namespace) -> None:
    """Tasks of lmms-eval, each with the folder that `run_own` would give it."""
    from eval.lmms import run_lmms, table_text

    output = settings.output or Path("runs/eval") / _plain(settings.model)
    for result in run_lmms(
        names, checkpoint, limit=settings.limit, batch_size=settings.batch_size, output=output
    ):
        print(table_text(result))
        print(f"{result['n']} questions, {result['seconds']:.1f} s in all; {output / result['task']['name']}")


def verdict(results: dict, output: Path) -> str:
    """What the run did, in a line or two."""
    speed = results["samples_per_second"]
    errors = results["errors"]
    said = f"{results['n']} questions; {results['answered']} answered in {results['seconds']:.1f} s"
    said += f", {speed:.1f} samples/s" if speed else ""
    if errors["count"]:
        listed = "; ".join(f"{one['id']}: {one['error']}" for one in errors["samples"][:3])
        said += (
            f"\n{errors['count']} could not be answered and score 0 ({listed}; all of them in results.json)"
        )
    return f"{said}\n{output / 'report.html'}"


def _plain(name: str) -> str:
    """A name as part of a folder's."""
    tail = "/".join(Path(name).parts[-1:]) if Path(name).exists() else name
    return "".join(x if x.isalnum() or x in "-._" else "-" for x in tail).strip("-.") or "task"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["compare"]:
        from eval.compare import main as command
    elif arguments[:1] == ["card"]:
        from eval.card import main as command
    else:
        again = "; started again it goes on, but for tasks of lmms-eval, which begin anew"
        return guarded("python -m eval", lambda: run_tasks(parse_arguments(arguments)), again)
    return guarded(f"python -m eval {arguments[0]}", lambda: command(arguments[1:]))


def guarded(program: str, work, again: str = "") -> int:
    """Do it; what people get wrong ends in one sentence. Among several ranks, each that fails says its own.

    Args:
        again: what to say of the next start after Ctrl-C.
    """
    try:
        work()
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted{again}", file=sys.stderr)
        return 130
    except REFUSALS as error:
        if not expected(error):
            raise
        print(f"{program}: error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def expected(error: Exception) -> bool:
    """Whether an error is a person's to mend, or the machine's."""
    from data.errors import DatasetError
    from eval.metrics import MetricError
    from eval.tasks import TaskError
    from inference.errors import user_errors

    return isinstance(error, (TaskError, MetricError, DatasetError, *user_errors()))


if __name__ == "__main__":
    sys.exit(main())
