"""The documents that `read` reads, and the folder with what it has read of them. Without torch.

    OUT/NAME.md             a document, whole: it is there once all pages are; its pictures in NAME_pictures/
    OUT/pages/NAME.jsonl    {"page": 3, ...}, a line for each page, from which a run that was killed goes on

NAME is that of the document's file without its ending, and with it where two would have the same.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import ImageError
from data.pages import open_pages
from inference.batch_files import Questions, questions_of_images
from inference.errors import RequestError
from inference.results import ResultsFile
from messages import counted, one_line


@dataclass(frozen=True)
class Document:
    """A document of which pages are to be read.

    source: its path, as the results name it. path: where it lies. target: the file to write.
    about: what a page's result depends on besides the page. missing: the pages that have no result yet, and
        total, how many are wanted.
    """

    source: str
    path: Path
    target: Path
    results: ResultsFile
    about: Mapping[str, Any]
    missing: list[int]
    total: int


def find(names: Sequence[str]) -> Questions:
    """The documents among files, and in folders with their subfolders. Raises RequestError for none."""
    return questions_of_images(names, [""], documents=(".pdf",))


def documents_of(
    found: Questions,
    out: Path,
    form: str,
    about: Mapping[str, Any],
    wanted: Sequence[tuple[int, int]],
    shard: tuple[int, int],
) -> tuple[list[Document], list[str]]:
    """The documents of a shard of what `find` has found, and why others cannot be read. `wanted`: the first
    and last of ranges of pages. Raises RequestError for results by another model or with other options."""
    sources = [source for source, _ in found.entries]
    called = _names(sources, out, bool(found.folder))
    documents, failures = list[Document](), list(found.unread)
    for source, _ in found.part(found.entries, *shard):
        try:
            documents.append(_document(found, source, called[source], out, form, about, wanted))
        except (ImageError, OSError) as error:
            failures.append(one_line(error))
    return documents, failures


def _document(
    found: Questions,
    source: str,
    name: str,
    out: Path,
    form: str,
    about: Mapping[str, Any],
    wanted: Sequence[tuple[int, int]],
) -> Document:
    path, results = Path(found.image_path(source)), _results(out, name)
    with closing(open_pages(path, source)) as pages:
        count = pages.count
    numbers = [n for n in range(1, count + 1) if any(first <= n <= last for first, last in wanted)]
    if not numbers:
        raise ImageError(f"{source}: it has {counted(count, 'page')}, none of those that --pages names")
    about = {**about, "options": {**about["options"], "bytes": path.stat().st_size}}
    done = set[int]()
    for record in results:
        if record["document"] != source or any(record.get(key) != one for key, one in about.items()):
            raise RequestError(
                f"{results.path}: page {record['page']} is of another document, by another model or with "
                "other options than this run; choose another --out"
            )
        done |= set() if "error" in record else {record["page"]}
    missing = [number for number in numbers if number not in done]
    return Document(source, path, out / f"{name}.{form}", results, about, missing, len(numbers))


def _results(out: Path, name: str) -> ResultsFile:
    return ResultsFile(out / "pages" / f"{name}.jsonl", "page", lambda record: "document" in record)


def _names(sources: Sequence[str], out: Path, tree: bool) -> dict[str, str]:
    """The name that each document has in the folder: the one that it has there already, or the shortest that
    no other may have. `tree`: with its folders."""
    folders = [os.path.dirname(os.path.abspath(source)) for source in sources]
    common = "" if tree else os.path.commonpath(folders)
    forms = dict[str, list[str]]()
    for source in sources:
        whole = source if tree else os.path.relpath(source, common)
        short = whole if tree else os.path.basename(source)
        forms[source] = [os.path.splitext(short)[0], short, os.path.splitext(whole)[0], whole]
    counts = Counter(form.casefold() for some in forms.values() for form in set(some))
    names = dict[str, str]()
    for source, some in forms.items():
        owners = [next((record["document"] for record in _results(out, form)), None) for form in some]
        free = [form for form, owner in zip(some, owners) if not owner and counts[form.casefold()] == 1]
        own = [form for form, owner in zip(some, owners) if owner == source]
        names[source] = [*own, *free, some[-1]][0]
    return names
