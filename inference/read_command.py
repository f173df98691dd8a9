"""`generate.py read`: PDFs, scans and folders of them become Markdown, HTML, JSON or text."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

from data.errors import optional
from data.reading import TASKS
from generation.options import SamplingParams
from inference import command
from inference.batch_command import report, shard
from inference.command import log
from inference.flags import check_model, option, positive
from inference.pages.files import documents_of, find
from inference.results import only_writer
from messages import counted

MODEL = "granite-docling-258m"
FORMATS = ("md", "html", "json", "txt")
ADVICE = "to read pages, install docling-core and pypdfium2: pip install -r requirements-read.txt"
_IF_GIVEN = ("system", "adapter")


@option
def pages(text: str) -> list[tuple[int, int]]:
    """The first and the last of each range of pages, such as 1-20 or 3,5-7."""
    found = [re.fullmatch(r"([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?", one.strip()) for one in text.split(",")]
    ranges = [(int(one[1]), int(one[2] or one[1])) for one in found if one]
    if len(ranges) < len(found) or any(first > last for first, last in ranges):
        raise ValueError(f"expected pages such as 1-20 or 3,5-7, got {text!r}")
    return ranges


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command.command_parser("read", "Read documents; run it again to resume.")
    parser.set_defaults(model=MODEL, max_new_tokens=None)
    add = parser.add_argument
    add(
        "names",
        nargs="+",
        metavar="FILE|FOLDER",
        help="PDFs, images, TIFFs, and folders with their subfolders",
    )
    written = "folder for the documents (default: read, where the command runs)"
    add("--out", type=Path, default=Path("read"), metavar="FOLDER", help=written)
    add("--format", choices=FORMATS, default="md", help="of the documents (default md, which is Markdown)")
    add(
        "--pages",
        type=pages,
        default=[(1, 10**9)],
        metavar="1-20",
        help="pages of each, such as 3,5-7 (default all)",
    )
    add("--task", choices=TASKS, default="page", help="what each page is (default page)")
    at_a_time = "number of pages read at a time (default 8)"
    add("--batch-size", type=positive, metavar="N", default=8, help=at_a_time)
    part = "read the Kth of N parts of the documents, for N machines"
    add("--shard", type=shard, metavar="K/N", default=(1, 1), help=part)
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> int:
    """Read documents into a folder. Returns the exit status."""
    names = ["revision", "task", "max_new_tokens", *(own.name for own in fields(SamplingParams))]
    names += [name for name in _IF_GIVEN if vars(args)[name]]
    options, limit = {name: vars(args)[name] for name in names}, args.max_new_tokens
    args.max_new_tokens = 1  # each page has a limit of its own
    made = command.generation_options(args, confidence=True)
    for package in ("docling_core", "pypdfium2"):
        optional(package, ADVICE)
    found = find(args.names)
    check_model(args.model, args.revision)
    part = "" if args.shard == (1, 1) else f"-{args.shard[0]}-of-{args.shard[1]}"
    with only_writer(args.out / f"pages{part}", "--out", parents=True):
        # Torch comes with it: no mistake above waits for that.
        from inference.batch import computed_with
        from inference.pages.reader import PageSummary, Reader

        options |= computed_with(args.model, args.revision, args.device, args.dtype, args.max_pixels)
        about = {"model": args.model, "options": options}
        documents, unread = documents_of(found, args.out, args.format, about, args.pages, args.shard)
        summary, step = PageSummary(skipped=sum(one.total for one in documents)), ""
        log(f"{counted(len(documents), 'document')}, {counted(summary.skipped, 'page')}")
        if any(one.missing or not one.target.exists() for one in documents):
            checkpoint, made = command.load(args, made, long=True)
            reader = Reader(checkpoint, args.task, made, args.system, limit, args.batch_size)
            summary, step = reader.run(documents, log), f"; decode step: {checkpoint.fast.name}"
    return report(args, summary, unread, step)
