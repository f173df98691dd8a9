"""`generate.py read`: PDFs, scans and folders of them become Markdown, HTML, JSON or text.

OUT/NAME.md        a document; it is there once all of its pages are, with its pictures in NAME_pictures/
OUT/pages.jsonl    a result for each page, as of a batch: a run that was killed goes on from them
"""

from __future__ import annotations

import argparse
import os
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import ImageError, optional
from data.pages import Pages
from data.reading import TASKS
from inference import batch_command, command
from inference.batch_files import ENDINGS, Questions, questions_of_images
from inference.flags import option
from messages import one_line

MODEL = "granite-docling-258m"
FORMATS = ("md", "html", "json", "txt")
ADVICE = "to read pages, install docling-core and pypdfium2: pip install -r requirements-read.txt"


@option
def ranges(text: str) -> list[tuple[int, int]]:
    """The first and the last of each range of pages, such as 1-20 or 3,5-7."""
    found = [re.fullmatch(r"([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?", one.strip()) for one in text.split(",")]
    made = [(int(one[1]), int(one[2] or one[1])) for one in found if one]
    if len(made) < len(found) or any(first > last for first, last in made):
        raise ValueError(f"expected pages such as 1-20 or 3,5-7, got {text!r}")
    return made


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command.command_parser("read", "Read documents; run it again to resume.")
    # Small writing on a page wants more pixels than a CPU has of an image by default.
    parser.set_defaults(model=MODEL, max_new_tokens=None, max_pixels=2**21)
    add = parser.add_argument
    named = "PDFs, images, TIFFs of many pages, and folders of them with their subfolders"
    add("names", nargs="+", metavar="FILE|FOLDER", help=named)
    add("--out", type=Path, default="read", metavar="FOLDER", help="folder for the documents (default: read)")
    add("--format", choices=FORMATS, default="md", help="form of the documents (default: md, Markdown)")
    some = "pages to read of each, such as 1-20 or 3,5-7 (default: all)"
    add("--pages", type=ranges, default="1-999999999", metavar="RANGES", help=some)
    add("--task", choices=TASKS, default="page", help="what is to be read (default: page)")
    batch_command.add_many(add)
    own = ("folder", "format", "task", "max_new_tokens")
    parser.set_defaults(source=pages_of, kind="inference.pages.reader:Reader", how=own)
    args = parser.parse_args(arguments)
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: expected a folder, got a file")
    part = "" if args.shard is None else "-{}-of-{}".format(*args.shard)
    args.folder, args.out = args.out, args.out / f"pages{part}.jsonl"
    return args


def run(args: argparse.Namespace) -> int:
    """Read documents into a folder. Returns the exit status."""
    for package in ("docling_core", "pypdfium2"):
        optional(package, ADVICE)
    args.folder.mkdir(parents=True, exist_ok=True)
    return batch_command.run(args)


def pages_of(args: argparse.Namespace) -> Questions:
    """The pages of documents, as questions about each. Raises RequestError where there is no document."""
    found = questions_of_images(args.names, [""], endings=ENDINGS | {".pdf"})
    entries, unread, stamps = list[tuple[Any, Any]](), [*found.unread], dict[str, str]()
    own, *named = (os.path.join(os.path.realpath(one), "") for one in (args.folder, *args.names))
    for source, _ in found.entries:
        if os.path.realpath(source).startswith(own) and not any(one.startswith(own) for one in named):
            continue  # pictures of documents that were written in a folder of documents
        try:
            with closing(Pages(Path(source), source)) as pages:
                count, file = pages.count, os.stat(source)
            wanted = [n for n in range(1, count + 1) if any(first <= n <= last for first, last in args.pages)]
            if not wanted:
                raise ImageError(f"{source}: expected one of its {count} pages among --pages")
            # Wherever the command runs, a document is the same beside the same results.
            document = os.path.relpath(source, args.folder)
            stamps[document] = f"{file.st_size} bytes of {file.st_mtime_ns}"
            about = {"image": document, "question": f"one of {count} pages"}
            entries += [(f"{document}#{number:05}", {**about, "page": number}) for number in wanted]
        except (ImageError, OSError) as error:
            unread.append(one_line(error))
    return replace(found, key="page", noun="page", entries=entries, unread=unread, stamps=stamps)
