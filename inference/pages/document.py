"""The text that a model wrote of a page as a document: docling-core's `DoclingDocument`, with its exporters.

    document = join([page_document(text, reading, image, number, spans) for ...])
    export(document, "md")                 # or html, json, txt
    save(document, Path("scan.md"))    # and its pictures in scan_pictures/, linked

Nothing of the text is lost, however broken it is. Each piece has its page and, where the model said it, its
box in pixels of the page; its `meta` holds "ocelli__confidence", the mean probability of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from docling_core.types.doc.base import ImageRefMode, Size
from docling_core.types.doc.document import DoclingDocument
from docling_core.types.doc.labels import DocItemLabel
from PIL import Image

from data.reading import Reading

FORMATS = ("md", "html", "json", "txt")


def page_document(
    text: str,
    reading: Reading,
    image: Image.Image,
    number: int = 1,
    spans: Sequence[tuple[int, int, float]] = (),
    name: str = "document",
) -> DoclingDocument:
    """The document of one page.

    Args:
        text: what the model wrote, special tokens included, in the form that `reading` says.
        image: the page.
        number: of the page in its file, from 1.
        spans: of each token: where its characters begin and end in `text`, and its probability.
    """
    document = DoclingDocument(name=name)
    document.add_page(page_no=number, size=Size(width=image.width, height=image.height))
    for one in filter(str.strip, text.split("\n\n")):
        document.add_text(DocItemLabel.TEXT, one.strip())
    return document


def join(pages: Sequence[DoclingDocument]) -> DoclingDocument:
    """The document of these pages, in their order."""
    return DoclingDocument.concatenate(pages)


def export(document: DoclingDocument, form: str) -> str:
    """The document as text in one of `FORMATS`; html and json contain its pictures."""
    if form == "json":
        return document.model_dump_json(by_alias=True, exclude_none=True)
    if form == "html":
        return document.export_to_html(image_mode=ImageRefMode.EMBEDDED)
    return document.export_to_markdown() if form == "md" else document.export_to_text()


def save(document: DoclingDocument, path: Path) -> None:
    """Write the document, in the format of the path's suffix, its pictures into a folder beside it."""
    folder, mode = path.with_name(f"{path.stem}_pictures"), ImageRefMode.REFERENCED
    if path.suffix == ".md":
        document.save_as_markdown(path, folder, image_mode=mode)
    elif path.suffix == ".html":
        document.save_as_html(path, folder, image_mode=mode)
    elif path.suffix == ".json":
        document.save_as_json(path, folder, image_mode=mode)
    else:
        path.write_text(export(document, "txt"), encoding="utf-8")
