"""`generate.py batch`: answers the lines of a file, or questions about each of many images, into a file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from generation.options import SamplingParams
from inference import command
from inference.batch_files import (
    KEYS,
    BatchFiles,
    Questions,
    is_lines,
    questions_of_images,
    questions_of_lines,
)
from inference.command import log
from inference.errors import RequestError
from inference.flags import check_model, option, positive
from inference.printing import MOST_SHOWN
from inference.results import only_writer
from messages import counted, some

# What answers depend on as well, where it is given.
_IF_GIVEN = ("grammar", "box_format", "think", "think_tokens", "fps", "max_frames", "adapter", "task")


@option
def shard(text: str) -> tuple[int, int]:
    """One part of several, such as 2/8."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"expected a part such as 2/8, from 1/8 to 8/8, got {text!r}")
    return int(found[1]), int(found[2])


def add_many(add: Callable[..., Any]) -> None:
    """The options of a run of many questions or pages."""
    at_a_time = "number of answers made at a time (default 8)"
    add("--batch-size", type=positive, metavar="N", default=8, help=at_a_time)
    part = "answer the Kth of N parts of the questions, for N machines; together they are one run"
    add("--shard", type=shard, metavar="K/N", help=part)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command.command_parser("batch", "Answer many questions into a file; run it again to resume.")
    add = parser.add_argument
    many = 'file of lines {"image": ..., "question": ...}; or folders with their subfolders and '
    many += "images, to ask -q (or --detect, --point, --describe) about each image"
    add("batch", nargs="+", metavar="FILE.jsonl|FOLDER|IMAGE", help=many)
    command.add_questions(parser)
    command.add_several(parser)
    required = "file for the results, one line each"
    add("--out", type=Path, required=True, metavar="FILE.jsonl", help=required)
    add_many(add)
    parser.set_defaults(source=_source, kind="inference.batch:Batch", how=("box_format",))
    args = command.parse_words(parser, arguments, "batch")
    args.things = bool(args.detect or args.point or args.describe)
    lines, asked = bool(args.batch) and is_lines(args.batch), bool(args.questions) or args.things
    if not args.batch:
        parser.error("expected a FILE.jsonl, a folder or images, got a question only")
    if lines and (asked or args.box_format):
        parser.error(
            f"{args.batch[0]}: its lines are the questions; -q and others are for folders and images"
        )
    if not (lines or asked):
        parser.error(f"{args.batch[0]}: expected -q TEXT, a question in quotes, or one FILE.jsonl alone")
    parser.refuse_together(args, *(f"{one}, --num-answers" for one in ("--detect", "--point", "--describe")))
    return args


def run(args: argparse.Namespace) -> int:
    """Answer the lines of a file, or questions about each of many images. Returns the exit status."""
    if args.shard and args.temperature > 0 and args.seed is None:
        raise RequestError(
            "--shard with a --temperature: expected a --seed, so that all shards are as one run"
        )
    made = command.generation_options(args, confidence=True)
    # What answers depend on besides model, images and question; a seed that was drawn is not part of it.
    names = ["revision", "system", "max_new_tokens", "num_answers"]
    names += [field.name for field in fields(SamplingParams)]
    names += [name for name in _IF_GIVEN if vars(args).get(name)]
    check_model(args.model, args.revision)
    with only_writer(args.out, "--out"):
        source = args.source(args)
        # Torch comes with it: no mistake above waits for that.
        from inference.batch import Summary, computed_with

        options = {name: vars(args)[name] for name in names}
        options |= computed_with(args.model, args.revision, args.device, args.dtype, args.max_pixels)
        files = BatchFiles(source, args.out, args.model, options, args.shard)
        if source.key != "line":
            of = "of" if source.key == "page" else "about images of"
            log(f"{counted(len(source.entries), source.noun)} {of} {source.name}")
        given = {key for _, value in source.entries if isinstance(value, dict) for key in value}
        if unknown := given - {*KEYS}:
            log(f"keys without a meaning here, which results keep under other: {some(unknown)}")
        if args.shard:
            every = counted(files.all_shards, source.noun)
            log(f"shard {args.shard[0]}/{args.shard[1]}: {files.total} of {every}")
        summary, step = Summary(skipped=files.total), ""
        if files.missing or source.key == "page":
            checkpoint, made = command.load(args, made, long=True)
            own = {name: vars(args)[name] for name in ("system", "batch_size", *args.how)}
            summary = resolve_name(args.kind)(files, checkpoint, made, **own).run(log)
            step = f"; decode step: {checkpoint.fast.name}"
    for line in [*(f"not read: {one}" for one in source.unread), *summary.failures[:MOST_SHOWN]]:
        log(line)
    if len(summary.failures) > MOST_SHOWN:
        log(f"and {len(summary.failures) - MOST_SHOWN} more, each with its error in {args.out}")
    log(f"{summary}: {args.out}")
    if args.stats:
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in summary.seconds.items())
        log(f"{counted(summary.new_tokens, 'new token')}; {seconds or 'nothing computed'}{step}")
    return 1 if summary.failures or source.unread else 0


def _source(args: argparse.Namespace) -> Questions:
    """What the names mean, with the questions that stand beside them."""
    if is_lines(args.batch):
        return questions_of_lines(Path(args.batch[0]))
    asked: dict[str, str] = {}
    if args.things:
        from inference.boxes import asked_for  # a second, which --help does without

        asked = dict(asked_for(args, True)[1])
    return replace(questions_of_images(args.batch, [*args.questions, *asked]), things=asked)
