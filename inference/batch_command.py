"""`generate.py --batch`: answers the lines of a file, or questions about each of many images, into a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from generation.options import SamplingParams
from inference.batch_files import BatchFiles, ImageQuestions, QuestionLines, are_images
from inference.cli import MOST_SHOWN, check_model, log_unused
from inference.locks import only_writer
from messages import counted

# What answers depend on as well, where it is given.
_IF_GIVEN = ("grammar", "box_format", "think", "think_tokens", "fps", "max_frames", "pick")


def answer_batch(args: argparse.Namespace, load: Callable, log: Callable[[str], None]) -> int:
    """Answer the lines of a file, or questions about each of many images. `load()` gives the checkpoint and
    the options of its answers. Returns the exit status."""
    # What answers depend on besides model, images and question; a seed that was drawn is not part of it.
    names = ["revision", "system", "max_new_tokens", "num_answers"]
    names += [field.name for field in fields(SamplingParams)]
    names += [name for name in _IF_GIVEN if vars(args)[name]]
    check_model(args.model, args.revision)
    log_unused(args, log)
    with only_writer(args.out, "--out"):
        source, unread = _source(args), list[str]()
        # Torch comes with it: no mistake above waits for that.
        from inference.batch import Summary, computed_with, run_batch

        options = {name: vars(args)[name] for name in names}
        options |= computed_with(args.model, args.revision, args.device, args.dtype, args.max_pixels)
        files = BatchFiles(source, args.out, args.model, options, args.shard)
        if isinstance(source, ImageQuestions):
            unread = source.unread
            left_out = f"; {source.said_left_out()}" if source.left_out else ""
            log(f"images: {len(source.images)}{left_out}")
        if args.shard:
            every = counted(files.all_shards, "question")
            log(f"shard {args.shard[0]}/{args.shard[1]}: {files.total} of {every}")
        summary, step = Summary(skipped=files.total), ""
        if files.missing:
            checkpoint, options = load()
            size = args.batch_size or 8
            summary = run_batch(
                files, checkpoint, options, args.system, size, log, args.box_format, args.pick
            )
            step = f"; decode step: {checkpoint.fast.name}"
    for line in [*(f"not read: {one}" for one in unread), *summary.failures[:MOST_SHOWN]]:
        log(line)
    if len(summary.failures) > MOST_SHOWN:
        log(f"and {len(summary.failures) - MOST_SHOWN} more, each with its error in {args.out}")
    log(f"{summary}: {args.out}")
    if summary.unused_keys:
        log(f"unknown keys, kept under 'other': {', '.join(sorted(summary.unused_keys))}")
    if args.stats:
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in summary.seconds.items())
        log(f"{counted(summary.new_tokens, 'new token')}; {seconds or 'nothing computed'}{step}")
    return 1 if summary.failed or unread else 0


def _source(args: argparse.Namespace) -> QuestionLines | ImageQuestions:
    """What the names after --batch mean, with the questions that stand beside them."""
    things = bool(args.detect or args.point or args.describe)
    if not are_images(args.batch, bool(args.questions) or things):
        return QuestionLines(Path(args.batch[0]))
    asked: dict[str, str] = {}
    if things:
        from inference.boxes import asked_for  # a second, which --help does without

        asked = dict(asked_for(args, True)[1])
    return ImageQuestions(args.batch, [*args.questions, *asked], asked)
