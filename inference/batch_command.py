"""generate.py --batch: from its arguments to its exit status. torch is imported after the checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from data.boxes import form_of, questions_about
from inference.batch_files import BatchFiles, QuestionLines
from inference.batch_images import ImageQuestions, are_images
from inference.cli import check_model, constrained, generation_options, log_unused
from inference.errors import RequestError
from inference.locks import only_writer
from models.checkpoints.hub import describe

MOST_SHOWN = 5  # failures on stderr; the results have all


def answer_batch(args: argparse.Namespace, load: Callable, log: Callable[[str], None]) -> int:
    """Answer the lines of a file, or questions about each of many images. `load(args, answers, images)` opens
    the model. Returns the exit status."""
    with only_writer(args.out, "--out"):
        return _answer(args, load, log)


def _answer(args: argparse.Namespace, load: Callable, log: Callable[[str], None]) -> int:
    check_model(args.model, args.revision)
    options, batch_size = generation_options(args), args.batch_size or 8
    # What answers depend on besides model, images and question; a seed that was drawn is not part of it.
    names = ["revision", "system", "max_new_tokens", "num_answers", "temperature", "top_k", "top_p", "min_p",
             "repetition_penalty", "seed"]  # fmt: skip
    names += [name for name in ("grammar", "box_format") if vars(args)[name]]
    source, unread = _source(args), list[str]()
    files = BatchFiles(source, args.out, args.model, {name: vars(args)[name] for name in names}, args.shard)
    if isinstance(source, ImageQuestions):
        unread = source.unread
        log(f"images: {len(source.images)}" + (f"; {source.said_left_out()}" if source.left_out else ""))
    if args.shard:
        log(f"shard {args.shard[0]}/{args.shard[1]}: {files.total} of {files.all_shards} questions")
    log_unused(args, log)
    from inference.batch import Summary, run_batch

    summary, step = Summary(skipped=files.total), ""
    if files.missing:
        checkpoint = load(args, -(-len(files.missing) * args.num_answers // batch_size), len(files.missing))
        options = constrained(options, args.grammar, checkpoint)
        summary = run_batch(files, checkpoint, options, args.system, batch_size, log, args.box_format)
        step = f"; decode step: {checkpoint.decode_step_name}"
    for said in [*(f"not read: {one}" for one in unread), *summary.failures[:MOST_SHOWN]]:
        log(said)
    if len(summary.failures) > MOST_SHOWN:
        log(f"and {len(summary.failures) - MOST_SHOWN} more, each with its error in {args.out}")
    log(f"{summary}: {args.out}")
    if summary.unused_keys:
        log(f"unknown keys, kept under 'other': {', '.join(sorted(summary.unused_keys))}")
    if args.stats:
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in summary.seconds.items())
        log(f"{summary.new_tokens} new tokens; {seconds or 'nothing computed'}{step}")
    return 1 if summary.failed or unread else 0


def _source(args: argparse.Namespace) -> QuestionLines | ImageQuestions:
    """What the names after --batch mean, with the questions that stand beside them."""
    things = bool(args.detect or args.point or args.describe)
    if not are_images(args.batch, bool(args.questions) or things):
        return QuestionLines(Path(args.batch[0]))
    try:
        said = describe(args.model, args.revision).generation_config if things else {}
        form = form_of(said, args.box_format)
        asked = dict(questions_about(form, args.detect, args.point, args.describe, things))
    except ValueError as error:
        raise RequestError(error) from error
    return ImageQuestions(args.batch, [*args.questions, *asked], asked)
