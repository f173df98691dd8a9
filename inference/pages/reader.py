"""A batch whose questions are pages: they are drawn, read, and become documents.

A page is drawn when the scheduler has room for it, and again where its document is written, so that pictures
can be cut out of it and none waits in memory.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from PIL import Image

from data.errors import replacing
from data.pages import Pages
from data.reading import Reading
from generation.requests import LazyRequest, Request
from inference.answer import encode
from inference.answer_text import TextStream
from inference.batch import Batch, Question, Summary, rounded
from inference.forms import requests_for
from inference.pages.document import export, join, page_document
from inference.pages.ending import PageForm, page_form
from messages import one_line

# What a document says of a page that is not whole.
NOTES = {
    "cut": "[The rest of page {number} is missing: it reached the limit of its tokens.]",
    "guard": "[On page {number} text that repeated itself was closed.]",
    "failed": "[Page {number} was not read: {error}]",
}


@dataclass(frozen=True)
class Reader(Batch):
    """A batch of pages, and the documents that become of them.

    folder, form: where documents are written, and how: see `inference.pages.document.FORMATS`.
    task: what the model is asked, of `data.reading.TASKS`. limit: most tokens of a page; None: by its size.
    """

    folder: Path = Path()
    form: str = "md"
    task: str = "page"
    limit: int | None = None
    _left: Counter[str] = field(default_factory=Counter)  # pages that are to be read, of each document
    _read: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # of documents that lack one
    _ended: Counter[str] = field(default_factory=Counter)

    def run(self, log: Callable[[str], None]) -> Summary:
        self.checkpoint.processor.reading.prompt(self.task)  # is refused before anything is drawn
        self._left.update(value["image"] for _, value in self.files.missing)
        for source, records in groupby(self.files.results, lambda record: source_of(record)[0]):
            if self._left[source]:
                self._read[source] = [*records]
            elif source in self.targets and not self.targets[source].exists():
                self._write(source, records)
        for source in self._left:
            self.targets[source].unlink(missing_ok=True)  # it lacks a page
        summary = super().run(log)
        said = [f"{count} {name}" for name, count in sorted(self._ended.items(), reverse=True)]
        log(f"pages: {', '.join(said) or 'none'}")
        return summary

    @cached_property
    def targets(self) -> dict[str, Path]:
        """The file of each document, this run's and earlier ones': with the ending of the document's own name
        only where two would be the same."""
        sources = {source_of(record)[0] for record in self.files.results}
        sources |= {value["image"] for _, value in self.files.source.entries}
        paths = {source: os.path.abspath(source) for source in sources}
        common = os.path.commonpath([*map(os.path.dirname, paths.values())])
        names = {source: os.path.relpath(path, common) for source, path in paths.items()}
        stems = {source: os.path.splitext(name)[0] for source, name in names.items()}
        taken = Counter(form.casefold() for source in sources for form in {names[source], stems[source]})
        for source, stem in stems.items():
            names[source] = stem if taken[stem.casefold()] == 1 else names[source]
        return {source: self.folder / f"{name}.{self.form}" for source, name in names.items()}

    def written(self, record: dict[str, Any]) -> None:
        source, _ = source_of(record)
        self._ended[record["ended"]] += 1
        self._read.setdefault(source, []).append(record)
        self._left[source] -= 1
        if not self._left[source]:
            self._write(source, self._read.pop(source))

    def _requests(self) -> Iterator[LazyRequest]:
        for source, some in groupby(self.files.missing, lambda entry: entry[1]["image"]):
            with closing(Pages(Path(source), source)) as pages:
                for key, value in some:
                    page = _Page(self, key, value, pages=pages)
                    yield LazyRequest((page, 0), page.next_request)

    def _write(self, source: str, records: Iterable[dict[str, Any]]) -> None:
        target, made, processor = self.targets[source], list[Any](), self.checkpoint.processor
        with closing(Pages(Path(source), source)) as pages:
            for record in sorted(records, key=itemgetter("page")):
                _, number = source_of(record)
                image, begin, spans = Image.new("RGB", (1, 1)), 0, list[tuple[int, int, float]]()
                if "error" not in record:
                    image = pages.draw(number, processor.images)
                    for end, chance in record["tokens"]:
                        spans.append((begin, end, chance))
                        begin = end
                    made.append(page_document(record["answers"][0], processor.reading, image, number, spans))
                if note := NOTES.get(record["ended"]):
                    made.append(page_document(note.format(number=number, **record), Reading(), image, number))
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.write_text(export(join(made), self.form), encoding="utf-8")


@dataclass(eq=False)
class _Page(Question):
    """A page on its way to its text."""

    pages: Pages
    form: PageForm | None = None
    size: tuple[int, int] = (0, 0)

    def next_request(self) -> Request:
        reader, checkpoint = self.batch, self.batch.checkpoint
        reading = checkpoint.processor.reading
        image = self.pages.draw(source_of({"page": self.key})[1], checkpoint.processor.images)
        row, self.size = encode(checkpoint, [image], reading.prompt(reader.task), reader.system), image.size
        self.form = page_form(checkpoint, reading, image.size, reader.limit, len(row.input_ids))
        options = replace(reader.options, logprobs=0, constraint=self.form.constraint())
        return requests_for(checkpoint, row, self.form.limit, options)[0]

    def record(self) -> dict[str, Any]:
        """The result: the text, and of each token of it where it ends and its probability."""
        files, source = self.batch.files, self.value["image"]
        result = {"page": self.key}
        if self.error is not None:
            return result | {"ended": "failed", "error": one_line(self.error)}
        checkpoint, output = self.batch.checkpoint, self.done[0]
        ids = [one for one in output.token_ids if one not in checkpoint.stop_token_ids]
        thought = len(checkpoint.thinking.split(ids, False)[0]) if checkpoint.thinking else 0
        stream, text, tokens = TextStream(checkpoint.processor.tokenizer, False), "", list[list[Any]]()
        for token_id, said in zip(ids, output.logprobs or ()):
            text += stream.put(token_id)
            tokens.append([len(text), rounded(math.exp(said.logprob or 0.0))])
        result |= {"model": files.model, "images": [source], "question": self.value["question"]}
        told = {"answers": [text + stream.finish()], "ended": self.form.ended(output), "size": [*self.size]}
        told |= {"confidences": [rounded(output.confidence)], "tokens": tokens, "options": files.options}
        return result | told


def source_of(record: dict[str, Any]) -> tuple[str, int]:
    """The document and the number of a result's page."""
    source, _, number = record["page"].rpartition("#")
    return source, int(number)
