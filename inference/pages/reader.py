"""The pages of documents through a scheduler, and the documents that become of them.

    documents, failures = documents_of(["scans"], Path("read"), "md", about, [(1, 20)], (1, 1))
    reader = Reader(open_checkpoint("granite-docling-258m"), "page", GenerationOptions(), None)
    summary = reader.run(documents, log)

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
from inference.batch import open_scheduler, rounded
from inference.checkpoint import Checkpoint
from inference.forms import requests_for
from inference.pages.document import export, join, page_document
from inference.pages.files import Document
from messages import one_line


@dataclass(eq=False)
class Page:
    """A page on its way: `number`, from 1, of a document, and what the model is shown."""

    document: Document
    number: int
    size: tuple[int, int] = (0, 0)
    ended: Callable[[RequestOutput], str] = lambda output: ""


@dataclass(frozen=True)
class Reader:
    """A checkpoint that reads pages; each `batch_size` of them at a time.

    limit: most tokens of a page, where it is not what the page's size makes it.
    """

    checkpoint: Checkpoint
    task: str
    options: GenerationOptions
    system: str | None = None
    limit: int | None = None
    batch_size: int = 8

    def run(self, documents: Sequence[Document], log: Callable[[str], None]) -> Summary:
        """Read the pages that have no result yet, and write each document once it has all of them."""
        summary = Summary()
        total, missing = (sum(each) for each in zip(*((one.total, len(one.missing)) for one in documents)))
        scheduler = open_scheduler(self.checkpoint, self.batch_size)
        log(str(scheduler.cache))
        left = {one.source: len(one.missing) for one in documents}
        with tqdm(total=total, initial=total - missing, unit="page") as bar:
            for done in scheduler.run(self._requests(documents, summary)):
                page = done.key
                record = self._record(page, done)
                with page.document.results.appending() as write:
                    write(record)
                summary.ended[record.get("ended", "failed")] += 1
                if "error" in record:
                    summary.failures.append(f"{page.document.source}: page {page.number}: {record['error']}")
                bar.update()
                left[page.document.source] -= 1
                if not left[page.document.source]:
                    self.write(page.document)
        summary.skipped = total - missing
        return summary

    def _requests(self, documents: Sequence[Document], summary: Summary) -> Iterator[LazyRequest]:
        for document in (one for one in documents if one.missing):
            document.target.unlink(missing_ok=True)  # it lacks a page
            document.results.path.parent.mkdir(parents=True, exist_ok=True)
            document.results.compact(errors=False)
            try:
                pages = open_pages(document.path, document.source)
            except (ImageError, OSError) as error:
                summary.failures.append(one_line(error))
                continue
            with closing(pages):
                for number in document.missing:
                    page = Page(document, number)
                    yield LazyRequest(page, partial(self._request, page, pages))

    def _request(self, page: Page, pages: Pages) -> Request:
        checkpoint = self.checkpoint
        image = pages.draw(page.number, checkpoint.processor.images)
        row = encode(checkpoint, [image], checkpoint.processor.reading.prompt(self.task), self.system)
        page.size = image.size
        limit = min(self.limit or 8192, checkpoint.context - len(row.input_ids))
        page.ended = lambda output: "whole" if output.stop_reason == "stop" else "cut"
        options = replace(self.options, confidence=True, logprobs=0)
        return requests_for(checkpoint, row, limit, options)[0]

    def _record(self, page: Page, done: RequestOutput) -> dict[str, Any]:
        about = {"page": page.number, "document": page.document.source, **page.document.about}
        if done.error is not None:
            return about | {"error": one_line(done.error)}
        stops, thinking = self.checkpoint.stop_token_ids, self.checkpoint.thinking
        ids = done.token_ids[:-1] if done.token_ids[-1] in stops else done.token_ids
        thought = len(thinking.split(ids, False)[0]) if thinking else 0
        text, ends = text_and_ends(self.checkpoint.processor.tokenizer, ids[thought:])
        chances = [math.exp(one.logprob or 0) for one in (done.logprobs or ())[thought:]]
        confidence = rounded(done.confidence)
        told = {"ended": page.ended(done), "confidence": confidence, "size": [*page.size], "text": text}
        return about | told | {"tokens": [[end, rounded(chance)] for end, chance in zip(ends, chances)]}

    def write(self, document: Document) -> None:
        """Write a document of the pages that were read so far."""
        document.results.compact(errors=True, ordered=True)
        reading, images = self.checkpoint.processor.reading, self.checkpoint.processor.images
        made = []
        with closing(open_pages(document.path, document.source)) as pages:
            for record in document.results:
                number, text, spans, begin = record["page"], record.get("text"), list[Any](), 0
                if text is None:
                    image = Image.new("RGB", (1, 1))
                    failed = f"*Page {number} could not be read: {record['error']}*"
                    made.append(page_document(failed, Reading(), image, number))
                    continue
                for end, chance in record["tokens"]:
                    spans.append((begin, end, chance))
                    begin = end
                made.append(page_document(text, reading, pages.draw(number, images), number, spans))
        document.target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(document.target) as temporary:
            temporary.write_text(export(join(made), document.target.suffix[1:]), encoding="utf-8")


@dataclass
class Summary:
    """Counts of a run: how pages ended, how many had been read before, and what failed."""

    ended: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        said = [f"{count} {name}" for name, count in sorted(self.ended.items())]
        return f"pages: {', '.join([*said, f'{self.skipped} read before'])}"


def text_and_ends(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[int]]:
    """The text of tokens, special ones included, and where in it each of them ends."""
    stream, text, ends = TextStream(tokenizer, skip_special_tokens=False), "", list[int]()
    for token_id in ids:
        text += stream.put(token_id)
        ends.append(len(text))
    return text + stream.finish(), ends
