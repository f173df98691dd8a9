"""The pages of documents through a scheduler, and the documents that become of them.

    documents, unread = documents_of(find(["scans"]), Path("read"), "md", about, [(1, 20)], (1, 1))
    reader = Reader(open_checkpoint("granite-docling-258m"), "page", GenerationOptions())
    print(reader.run(documents, print))

A page is drawn when the scheduler has room for it, and again where its document is written, so that pictures
can be cut out of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from PIL import Image
from tqdm import tqdm

from data.errors import ImageError, replacing
from data.pages import Pages, open_pages
from data.reading import Reading
from generation.options import GenerationOptions
from generation.requests import LazyRequest, Request, RequestOutput
from inference.answer import encode
from inference.answer_text import TextStream
from inference.batch import Summary, open_scheduler, rounded
from inference.checkpoint import Checkpoint
from inference.forms import requests_for
from inference.pages.document import export, join, page_document
from inference.pages.files import Document
from messages import one_line

# What a document says of a page that is not whole.
NOTES = {
    "cut": "[The rest of page {page} is missing: it reached the limit of its tokens.]",
    "guard": "[On page {page} text that repeated itself was closed.]",
    "failed": "[Page {page} was not read: {error}]",
}


@dataclass
class PageSummary(Summary):
    """And how pages ended: "whole", "cut", "guard" or "failed"."""

    ended: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        said = [f"{count} {name}" for name, count in sorted(self.ended.items(), reverse=True)]
        return f"pages: {', '.join([*said, f'{self.skipped} read before'])}"


@dataclass(eq=False)
class Page:
    """A page on its way: `number`, from 1, of a document, and what of it the model is shown."""

    document: Document
    number: int
    size: tuple[int, int] = (0, 0)
    ended: Callable[[RequestOutput], str] = lambda output: ""


@dataclass(frozen=True)
class Reader:
    """A checkpoint that reads pages for a task, `batch_size` of them at a time, within `limit` tokens
    each (None: by its size)."""

    checkpoint: Checkpoint
    task: str
    options: GenerationOptions
    system: str | None = None
    limit: int | None = None
    batch_size: int = 8

    def run(self, documents: Sequence[Document], log: Callable[[str], None]) -> PageSummary:
        """Read the pages that have no result yet, and write each document that lacks none any more."""
        self.checkpoint.processor.reading.prompt(self.task)  # refused before any page is drawn
        scheduler = open_scheduler(self.checkpoint, self.batch_size)
        log(str(scheduler.cache))
        left = {one.source: len(one.missing) for one in documents}
        total = sum(one.total for one in documents)
        summary = PageSummary(skipped=total - sum(left.values()))
        for document in documents:
            if not document.missing and not document.target.exists():
                self._write(document, summary)
        with tqdm(total=total, initial=summary.skipped, unit="page") as bar:
            for done in scheduler.run(self._requests(documents, summary)):
                page, record = done.key, self._record(done.key, done)
                with page.document.results.appending() as write:
                    write(record)
                summary.ended[record["ended"]] += 1
                if "error" in record:
                    summary.failures.append(f"{page.document.source}: page {page.number}: {record['error']}")
                bar.update()
                left[page.document.source] -= 1
                if not left[page.document.source]:
                    self._write(page.document, summary)
        summary.new_tokens, summary.seconds = scheduler.stats.new_tokens, scheduler.stats.seconds
        return summary

    def _requests(self, documents: Sequence[Document], summary: Summary) -> Iterator[LazyRequest]:
        for document in (one for one in documents if one.missing):
            try:
                pages = open_pages(document.path, document.source)
            except (ImageError, OSError) as error:  # it has been there a moment ago
                summary.failures.append(one_line(error))
                continue
            with closing(pages):
                document.target.unlink(missing_ok=True)  # it lacks a page
                document.results.path.parent.mkdir(parents=True, exist_ok=True)
                document.results.compact(errors=False)
                for number in document.missing:
                    page = Page(document, number)
                    yield LazyRequest(page, partial(self._request, page, pages))

    def _request(self, page: Page, pages: Pages) -> Request:
        checkpoint, reading = self.checkpoint, self.checkpoint.processor.reading
        image = pages.draw(page.number, checkpoint.processor.images)
        row = encode(checkpoint, [image], reading.prompt(self.task), self.system)
        page.size = image.size
        limit = min(self.limit or 8192, checkpoint.context - len(row.input_ids))
        page.ended = lambda output: "whole" if output.stop_reason == "stop" else "cut"
        options = replace(self.options, confidence=True, logprobs=0)
        return requests_for(checkpoint, row, limit, options)[0]

    def _record(self, page: Page, done: RequestOutput) -> dict[str, Any]:
        """The result of a page: its text, and of each token of that where it ends and its probability."""
        about = {"page": page.number, "document": page.document.source, **page.document.about}
        if done.error is not None:
            return about | {"ended": "failed", "error": one_line(done.error)}
        stops, thinking = self.checkpoint.stop_token_ids, self.checkpoint.thinking
        ids = [one for one in done.token_ids if one not in stops]
        thought = len(ids) - len(thinking.split(ids, False)[1]) if thinking else 0
        text, ends = text_and_ends(self.checkpoint.processor.tokenizer, ids[thought:])
        logprobs = [one.logprob for one in (done.logprobs or ())[thought:]]
        tokens = [[end, rounded(math.exp(one or 0.0))] for end, one in zip(ends, logprobs)]
        told = {"ended": page.ended(done), "confidence": rounded(done.confidence), "size": [*page.size]}
        return about | told | {"text": text, "tokens": tokens}

    def _write(self, document: Document, summary: Summary) -> None:
        """Write a document of its pages that were read so far."""
        document.results.compact(errors=True, ordered=True)
        made, images = list[Any](), self.checkpoint.processor.images
        try:
            with closing(open_pages(document.path, document.source)) as pages:
                for record in document.results:
                    failed = "error" in record
                    image = Image.new("RGB", (1, 1)) if failed else pages.draw(record["page"], images)
                    made += self._made(record, image)
        except (ImageError, OSError) as error:  # it could be drawn when it was read
            summary.failures.append(one_line(error))
            return
        document.target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(document.target) as temporary:
            temporary.write_text(export(join(made), document.target.suffix[1:]), encoding="utf-8")

    def _made(self, record: dict[str, Any], image: Image.Image) -> Iterator[Any]:
        """The document of one page, and one of what is to be said about it."""
        number, begin, spans = record["page"], 0, list[tuple[int, int, float]]()
        for end, chance in record.get("tokens", ()):
            spans.append((begin, end, chance))
            begin = end
        if "text" in record:
            yield page_document(record["text"], self.checkpoint.processor.reading, image, number, spans)
        if note := NOTES.get(record["ended"]):
            yield page_document(note.format(**record), Reading(), image, number)


def text_and_ends(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of tokens, special ones included, and where in it each of them ends."""
    stream, text, ends = TextStream(tokenizer, skip_special_tokens=False), "", list[int]()
    for token_id in ids:
        text += stream.put(token_id)
        ends.append(len(text))
    return text + stream.finish(), ends
