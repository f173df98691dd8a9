"""`generate.py batch`: answers the lines of a file, or questions about each of many images, into a file."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

from generation.options import SamplingParams
from inference import command
from inference.batch_files import BatchFiles, ImageQuestions, QuestionLines, are_images
from inference.command import log
from inference.flags import check_model, option, positive
from inference.locks import only_writer
from inference.positionals import is_question, lacks_quotes
from inference.printing import MOST_SHOWN
from messages import counted

# What answers depend on as well, where it is given.
_IF_GIVEN = ("grammar", "box_format", "think", "think_tokens", "fps", "max_frames", "pick")


@option
def shard(text: str) -> tuple[int, int]:
    """One part of several, such as 2/8."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"expected a part such as 2/8, from 1/8 to 8/8, got {text!r}")
    return int(found[1]), int(found[2])


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command.command_parser("batch", "Answer many questions into a file; run it again to resume.")
    add = parser.add_argument
    many = 'file of lines {"image": ..., "question": ...}; or folders with their subfolders, globs and '
    many += "images, to ask -q (or --detect, --point, --describe) about each image"
    add("batch", nargs="+", metavar="FILE.jsonl|FOLDER|IMAGE", help=many)
    command.add_questions(parser)
    command.add_several(parser)
    required = "file for the results, one line each"
    add("--out", type=Path, required=True, metavar="FILE.jsonl", help=required)
    add("--batch-size", type=positive, metavar="N", help="number of answers made at a time (default 8)")
    part = "answer the Kth of N parts of the questions, for N machines; together they are one run"
    add("--shard", type=shard, metavar="K/N", help=part)
    args = parser.parse_intermixed_args(arguments)
    command.refuse_several(parser, args)
    if message := _wrong(args):
        parser.error(message)
    return args


def _wrong(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, in a sentence, or None."""
    asked = [*filter(is_question, args.batch)]
    args.batch = [name for name in args.batch if name not in asked]
    if message := lacks_quotes(args.batch, asked):
        return message
    if not args.batch:
        return "expected a FILE.jsonl, a folder or images, got a question only"
    args.questions = [*asked, *args.questions]
    if not all(map(str.strip, args.questions)):
        return "-q: expected a question, got ''"
    things = args.detect or args.point or args.describe
    if things and args.num_answers > 1:
        return "--detect, --point and --describe cannot be combined with --num-answers"
    images = are_images(args.batch, bool(args.questions or things))
    if images and not (args.questions or things):
        return f"{args.batch[0]}: expected -q TEXT, a question about each image, or one FILE.jsonl alone"
    if not images and (args.questions or things or args.box_format):
        return f"{args.batch[0]}: its lines are the questions; -q and others are for folders and images"
    if args.shard and args.temperature > 0 and args.seed is None:
        return "--shard with a --temperature: expected a --seed, so that all shards are as one run"
    return None


def run(args: argparse.Namespace) -> int:
    """Answer the lines of a file, or questions about each of many images. Returns the exit status."""
    made = command.generation_options(args, confidence=True)
    # What answers depend on besides model, images and question; a seed that was drawn is not part of it.
    names = ["revision", "system", "max_new_tokens", "num_answers"]
    names += [field.name for field in fields(SamplingParams)]
    names += [name for name in _IF_GIVEN if vars(args)[name]]
    check_model(args.model, args.revision)
    command.log_unused(args)
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
            checkpoint, made = command.load(args, made, long=True)
            size = args.batch_size or 8
            summary = run_batch(files, checkpoint, made, args.system, size, log, args.box_format, args.pick)
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
    """What the names mean, with the questions that stand beside them."""
    things = bool(args.detect or args.point or args.describe)
    if not are_images(args.batch, bool(args.questions) or things):
        return QuestionLines(Path(args.batch[0]))
    asked: dict[str, str] = {}
    if things:
        from inference.boxes import asked_for  # a second, which --help does without

        asked = dict(asked_for(args, True)[1])
    return ImageQuestions(args.batch, [*args.questions, *asked], asked)
