"""A batch whose questions are pages of documents: they are drawn, read, and become documents again.

A page is drawn when the scheduler has room for it, and once more where its document is written, so that
pictures can be cut out of it while no page waits in memory.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from PIL import Image

from data.errors import ImageError, replacing
from data.pages import Pages
from data.reading import Reading
from generation.requests import LazyRequest, Request
from inference.answer import encode
from inference.answer_text import TextStream
from inference.batch import Batch, Question, Summary, rounded
from inference.forms import requests_for
from inference.pages.document import export, page_document
from inference.pages.ending import PageForm
from messages import for_terminal, one_line

# What a document says of a page that is not whole.
NOTES = {
    "cut": "[The rest of page {number} is missing: it reached the limit of its tokens.]",
    "guard": "[On page {number} text that repeated itself was closed.]",
    "failed": "[Page {number} was not read: {error}]",
}


@dataclass(frozen=True)
class Reader(Batch):
    """A batch of pages.

    folder, format: where documents are written, and how (`inference.pages.document.FORMATS`).
    task: of `data.reading.TASKS`. max_new_tokens: of a page; None: by its size.
    """

    files: Any
    folder: Path = Path()
    format: str = "md"
    task: str = "page"
    max_new_tokens: int | None = None
    _left: Counter[str] = field(default_factory=Counter)  # how many pages of a document are to be read
    _read: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # results of those that lack pages
    _ended: Counter[str] = field(default_factory=Counter)
    _lost: list[str] = field(default_factory=list)  # why documents could not be written

    def run(self, log: Callable[[str], None]) -> Summary:
        self.checkpoint.processor.reading.prompt(self.task)  # is refused before anything is drawn
        self._left.update(value["image"] for _, value in self.files.missing)
        asked = {value["image"] for _, value in self.files.source.entries}
        for source, records in groupby(self.files.results, itemgetter("document")):
            if self._left[source]:
                self._read[source] = [*records]
                self._target(source).unlink(missing_ok=True)
            elif source in asked and not self._target(source).exists():
                self._write(source, records)
        summary = super().run(log)
        summary.failures += self._lost
        ended = sorted(self._ended.items(), reverse=True)
        log(f"pages: {', '.join(f'{count} {how}' for how, count in ended) or 'none read'}")
        return summary

    @cached_property
    def names(self) -> dict[str, str]:
        """The name of each document in the folder: as in earlier runs, or its own without the ending; with it
        where two would be the same."""
        named = {record["document"]: record["file"] for record in self.files.results if "file" in record}
        sources = {value["image"] for _, value in self.files.source.entries} - named.keys()
        whole = {source: os.path.abspath(self.folder / source) for source in sources}
        common = os.path.commonpath(map(os.path.dirname, whole.values())) if whole else ""
        forms = {source: os.path.relpath(path, common) for source, path in sorted(whole.items())}
        stems = Counter(os.path.splitext(form)[0].casefold() for form in forms.values())
        taken = {name.casefold() for name in named.values()}
        for source, form in forms.items():
            stem = os.path.splitext(form)[0]
            tries = chain([stem] * (stems[stem.casefold()] == 1), [form], (f"{form}-{n}" for n in count(2)))
            named[source] = next(one for one in tries if one.casefold() not in taken)
            taken.add(named[source].casefold())
        return named

    def _target(self, source: str) -> Path:
        return self.folder / f"{self.names[source]}.{self.format}"

    def written(self, record: dict[str, Any]) -> None:
        source = record["document"]
        self._ended[record["ended"]] += 1
        self._read.setdefault(source, []).append(record)
        self._left[source] -= 1
        if not self._left[source]:
            self._write(source, self._read.pop(source))

    def _requests(self) -> Iterator[LazyRequest]:
        for source, some in groupby(self.files.missing, lambda entry: entry[1]["image"]):
            with ExitStack() as end:
                opened = cache(lambda source=source, end=end: end.enter_context(self._open(source)))
                for key, value in some:
                    page = _Page(self, key, value, lambda *given, opened=opened: opened().draw(*given))
                    yield LazyRequest((page, 0), page.next_request)

    def _open(self, source: str) -> closing[Pages]:
        return closing(Pages(self.folder / source, source))

    def _write(self, source: str, records: Iterable[dict[str, Any]]) -> None:
        try:
            self._write_all(source, sorted(records, key=itemgetter("number")))
        except (ImageError, OSError) as error:  # the others are written all the same
            self._lost.append(f"not written: {one_line(error)}")

    def _write_all(self, source: str, records: Iterable[dict[str, Any]]) -> None:
        target, processor = self._target(source), self.checkpoint.processor
        made: Any = None  # of the pages so far
        with self._open(source) as pages:
            for record in records:
                number, image = record["number"], Image.new("RGB", (1, 1))
                if "error" not in record:
                    image, said = pages.draw(number, processor.images), record["answers"][0]
                    made = page_document(said, processor.reading, image, number, record["tokens"], made)
                if note := NOTES.get(record["ended"]):
                    made = page_document(note.format(**record), Reading(), image, number, document=made)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            pictures = target.with_name(f"{target.stem}_pictures")
            text = export(made, self.format, pictures)
            temporary.write_text(for_terminal(text), encoding="utf-8")


@dataclass(eq=False)
class _Page(Question):
    """A page on its way to its text; `tiled` draws it."""

    batch: Any
    value: Any
    tiled: Any
    size: tuple[int, int] = (0, 0)
    form: Any = None

    def next_request(self) -> Request:
        reader, checkpoint = self.batch, self.batch.checkpoint
        processor = checkpoint.processor
        image = self.tiled(self.value["page"], processor.images)
        row = encode(checkpoint, [image], processor.reading.prompt(reader.task), reader.system)
        size, limit, prompt = image.size, reader.max_new_tokens, len(row.input_ids)
        self.size, self.form = size, PageForm(checkpoint, processor.reading, size, limit, prompt)
        options = replace(reader.options, logprobs=0, constraint=self.form.constraint())
        return requests_for(checkpoint, row, self.form.limit, options)[0]

    def record(self) -> dict[str, Any]:
        """The result: of each token it has where in the text it stands, and its probability."""
        source, number = self.value["image"], self.value["page"]
        result = {"page": self.key, "document": source, "file": self.batch.names[source], "number": number}
        result |= {"stamp": self.batch.files.source.stamps[source], "images": [source]}
        if self.error is not None:
            return result | {"ended": "failed", "error": one_line(self.error)}
        checkpoint, files, output = self.batch.checkpoint, self.batch.files, self.done[0]
        ids = [one for one in output.token_ids if one not in checkpoint.stop_token_ids]
        skip = len(checkpoint.thinking.split(ids, False)[0]) if checkpoint.thinking else 0
        stream, text, tokens = TextStream(checkpoint.processor.tokenizer, False), "", list[Any]()
        for token_id, said in zip(ids[skip:], (output.logprobs or [])[skip:]):
            begin, text = len(text), text + stream.put(token_id)
            tokens.append((begin, len(text), rounded(math.exp(said.logprob or 0.0))))
        result |= {"model": files.model, "question": self.value["question"], "size": self.size}
        result |= {"answers": [text + stream.finish()], "ended": self.form.ended(output)}
        told = {"confidences": [rounded(output.confidence)], "tokens": tokens, "options": files.options}
        return result | told
