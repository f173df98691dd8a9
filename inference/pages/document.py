"""The text that a model wrote of a page as a document: docling-core's `DoclingDocument`, with its exporters.

    document = page_document(text, reading, image, 1, spans)
    document = page_document(text_of_the_next, reading, image, 2, spans, document)
    export(document, "md", Path("scan_pictures"))    # or html, json, txt

Nothing of the text is lost, however broken it is. (docling-core's own reader of DocTags loses what stands
outside of tags or in one that is not closed, lists in lists, and pictures without a box.)
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from docling_core.transforms.serializer import html, markdown, plain_text
from docling_core.types.doc.base import BoundingBox, ImageRefMode, Size
from docling_core.types.doc.common.content_layer import ContentLayer
from docling_core.types.doc.document import DoclingDocument, ImageRef, ListGroup, ProvenanceItem, TableData
from docling_core.types.doc.labels import CodeLanguageLabel, DocItemLabel
from docling_core.types.doc.utils import parse_otsl_table_content
from lxml import etree
from PIL import Image

from data.reading import Reading

_WRITERS: dict[str, Any] = {
    "md": (markdown.MarkdownDocSerializer, markdown.MarkdownParams),
    "html": (html.HTMLDocSerializer, html.HTMLParams),
    "txt": (plain_text.PlainTextDocSerializer, plain_text.PlainTextParams),
}
FORMATS = (*_WRITERS, "json")
_LANGUAGES = {label.value.lower(): label for label in CodeLanguageLabel}
_GROUPS, _PICTURES = ("ordered_list", "unordered_list", "inline"), ("picture", "chart")
_HOLDERS = ("otsl", "document_index", "code", *_PICTURES)  # in which captions stand
_TAGS = (
    *("list_item", "text", "formula", "title", "caption", "footnote", "page_header", "page_footer"),
    *("checkbox_selected", "checkbox_unselected", *(f"section_header_level_{n}" for n in range(1, 7))),
)
_MARK = re.compile(  # "at" is none of DocTags': it says where what follows stands in Markdown
    rf"(</?(?:{'|'.join((*_GROUPS, *_HOLDERS, *_TAGS))}|doctag|page_break|(?:key|value|link)_\w+)>"
    r"|<loc_\d{1,9}(?:\.5)?>|<at_\d{1,9}>|<_[\w+#.)-]+_>|<(?:[feluxn]cel|[cr]hed|srow|nl)>)"
)
_CELL = re.compile(r"<([felux]cel|[cr]hed|srow)>")
_BARE = ("ecel", "lcel", "ucel", "xcel")
_LESS = "\ue000"  # stands for < where that begins no mark
_ATTRIBUTES = r"""(?:\s+[\w-]+\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s<>"']+))*\s*/?>"""
_NO_TABLE = re.compile(rf"<(?!/?(?:table|thead|tbody|tfoot|tr|td|th|br|b|i|p|em|strong|su[bp]){_ATTRIBUTES})")
_SIGN = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})(?P<language>[^\n`]*)\n(?P<code>.*?)(?:^[ \t]*(?P=fence)[ \t]*$|\Z)"
    r"|(?P<table><table\b.*?(?:</table>|\Z))"
    r"|^(?P<bars>[^\n|]*\|[^\n]*\n[ \t]*\|?[ \t:]*-[ \t:|-]*(?:\n[^\n|]*\|[^\n]*)*)"
    r"|\$\$(?P<dollars>(?:(?!\$\$).)+)\$\$|\\\[(?P<formula>(?:(?!\\\[).)+?)\\\]"
    r"|!\[(?P<picture>[^\]\n]{0,500}\]\([^)\s]{0,500})\)"
    r"|^[ \t]*(?P<sharps>#{1,6})[ \t]+(?P<heading>[^\n]*)"
    r"|^(?P<space>[ \t]*)(?P<item>[-*+•]|\d{1,9}[.)])[ \t]+(?=\S)"
    r"|(?P<box><box>[\d\s,.()\[\]]{0,99}</box>|(?:<\|?(?:LOC|COORD)_\d+\|?>){4,8})"
    r"|(?P<rest>\n[ \t]*\n(?=\S)(?![-*+•]|\d+[.)])|^[-*_=]{3,}[ \t]*$)"
    rf"|(?P<style></?(?:b|i|u|em|strong|su[bp]|div|span|p|center|ref){_ATTRIBUTES}|(?<!\S)\*\*|\*\*(?!\S))",
    re.DOTALL | re.MULTILINE,
)
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass
class Piece:
    """A part of a page: its tag in DocTags, where it begins in the text, the groups that it stands in (each a
    tag and a place), what is written in it, its corners in parts of the page, and a number or a language."""

    tag: str
    at: int
    groups: tuple[tuple[str, int], ...] = ()
    said: list[str] = field(default_factory=list)
    box: list[float] = field(default_factory=list)
    mark: str = ""
    captions: list[Piece] = field(default_factory=list)


def page_document(
    text: str,
    reading: Reading,
    image: Image.Image,
    number: int = 1,
    spans: Sequence[tuple[int, int, float]] = (),
    document: DoclingDocument | None = None,
) -> DoclingDocument:
    """The document of a page, or that of the pages before with this one, too.

    Each piece has its page, and its box in pixels of the image, which is empty where the model said none;
    `meta` holds "ocelli__confidence", the mean probability of its tokens.

    Args:
        text: what the model wrote, in the form that `reading` says, with the marks of that form.
        number: of the page in its file, from 1.
        spans: of each token in their order: where its characters begin and end in `text`, its probability.
        document: that of the pages before, which is changed.
    """
    text = _UNSEEN.sub("\ufffd", text.replace("\r\n", " \n").replace("\r", "\n"))
    pieces, groups = _pieces(text if reading.form == "doctags" else _marked(text)), list[list[Any]]()
    document = document or DoclingDocument(name="document")
    document.add_page(page_no=number, size=Size(width=image.width, height=image.height))
    for piece, end in zip(pieces, [*(one.at for one in pieces[1:]), len(text)]):
        if not ("".join(piece.said).strip() or piece.captions or piece.tag in ("list_item", *_PICTURES)):
            continue
        while groups and groups[-1][0] not in piece.groups:
            groups.pop()
        for key in piece.groups[len(groups) :]:
            add = document.add_inline_group if key[0] == "inline" else document.add_list_group
            groups.append([key, add(parent=groups[-1][2] if groups else None), None])  # and its last item
        item = _add(document, piece, groups[-1][1] if groups else None, image, number)
        first, last = (bisect_left(spans, at, key=lambda span: span[0]) for at in (piece.at, end))
        if first < last:
            item.meta = get_args(type(item).model_fields["meta"].annotation)[0]()  # FloatingMeta of a table
            item.meta.set_custom_field("ocelli", "confidence", fmean(one[2] for one in spans[first:last]))
        if groups:
            groups[-1][2] = item
    return document


def _add(document: DoclingDocument, piece: Piece, parent: Any, image: Image.Image, number: int) -> Any:
    """The item of a piece, with its captions, in the document."""
    written, tag, (wide, high) = "".join(piece.said), piece.tag, image.size
    text = written.strip().replace(_LESS, "<")
    xs, ys = ([min(one, 1) for one in piece.box[at::2]] or [0] for at in (0, 1))
    box = BoundingBox(l=min(xs) * wide, t=min(ys) * high, r=max(xs) * wide, b=max(ys) * high)
    prov = ProvenanceItem(page_no=number, bbox=box, charspan=(0, len(text)))
    about: dict[str, Any] = {"parent": parent, "prov": prov}
    if isinstance(parent, ListGroup):
        return document.add_list_item(text, piece.mark[:1].isdigit(), piece.mark or "-", **about)
    if tag in _PICTURES:
        cut = image.crop((int(box.l), int(box.t), int(box.r), int(box.b)))
        item = document.add_picture(image=ImageRef.from_pil(cut, dpi=72) if all(cut.size) else None, **about)
        if _CELL.search(text):
            _add(document, replace(piece, tag="otsl", captions=[]), parent, image, number)
        elif text := re.sub(r"<[a-z_]+>", "", text):  # its kind, such as <bar_chart>
            piece.captions.append(Piece("caption", piece.at, said=[text]))
    elif tag in _HOLDERS and tag != "code" and (table := _table(written)):
        item = document.add_table(table, **about)
    else:
        layer = ContentLayer.FURNITURE if tag.startswith("page") else None
        label = DocItemLabel(re.sub(r"_level_\d", "", tag)) if tag in (*_TAGS, "code") else DocItemLabel.TEXT
        if tag == "code" and piece.mark.lower() not in ("", *_LANGUAGES):
            text = f"{piece.mark}\n{text}"
        item = document.add_text(label, text, content_layer=layer, **about)
        if tag == "code":
            item.code_language = _LANGUAGES.get(piece.mark.lower(), CodeLanguageLabel.UNKNOWN)
        elif tag.startswith("section"):
            item.level = int(tag[-1])
    for one in piece.captions:
        floats = tag in _HOLDERS and tag != "code"  # whose captions HTML leaves out
        said = _add(document, one, item if floats else parent, image, number)
        if floats:
            item.captions.append(said.get_ref())
    return item


def _table(otsl: str) -> TableData | None:
    """The cells of OTSL, ragged or not; None of too many."""
    rows = []
    for line in otsl.split("<nl>"):
        loose, *marks = (one.strip().replace("<", _LESS) for one in _CELL.split(line))
        cells = [("fcel", loose)] * bool(loose) + [*zip(marks[::2], marks[1::2])]
        # docling-core wants text in every cell of a kind with text, and none in the others.
        cells = [("fcel" if text and kind in _BARE else kind, text) for kind, text in cells]
        rows.append([f"<{kind if text or kind in _BARE else 'ecel'}>{text}" for kind, text in cells])
    rows, width = [row for row in rows if row], max(map(len, rows))
    if len(rows) * width > 200_000:
        return None
    lines = ("".join(row) + "<ecel>" * (width - len(row)) for row in rows)
    table = parse_otsl_table_content("<nl>".join(lines))
    for cell in table.table_cells:
        cell.text = cell.text.replace(_LESS, "<")
    return table


def _pieces(text: str) -> list[Piece]:
    """The pieces of DocTags, and of what stands between them."""
    pieces, groups, holder, at = [now := Piece("text", 0)], list[tuple[str, int]](), None, 0
    for number, part in enumerate(_MARK.split(text)):
        tag, ends, cell = part.strip("</>_"), part.startswith("</"), part == "<nl>" or _CELL.match(part)
        if number % 2 and tag.startswith("at_"):
            at = int(tag[3:])
            continue
        if number % 2 == 0 or (cell and now.tag in _HOLDERS):
            now.said.append(part)
        elif tag.startswith("loc_"):
            now.box.append(float(tag[4:]) / 500)
        elif part.startswith("<_"):
            now.mark = tag
        elif tag == "caption" and (holder or now.tag in _HOLDERS):
            holder, now = (None, holder) if holder else (now, Piece("caption", at))
            if holder:
                holder.captions.append(now)
        else:
            inside = tag in ("list_item", "text") or (
                tag == "formula" and groups and groups[-1][0] == "inline"
            )
            if tag in _GROUPS:
                groups = groups[:-1] if ends else [*groups[:20], (tag, at)]
            elif tag == "list_item" and not any("list" in key for key, _ in groups):
                groups = [("unordered_list", at)]
            elif not (ends or inside):
                groups = []  # which were not closed
            tag = "otsl" if cell else "text" if ends or tag not in (*_HOLDERS, *_TAGS) else tag
            pieces.append(now := Piece(tag, at, tuple(groups), [part] if cell else []))
            holder = None
        at += len(part)
    return pieces


def _marked(text: str) -> str:
    """Markdown with marks of DocTags in place of its signs."""
    if whole := re.fullmatch(r"(\s*```(?:markdown|md|html)\s*\n)((?:(?!```).)*)(```\s*)?", text, re.DOTALL):
        text = " " * len(whole[1]) + whole[2]
    depths = list[int]()

    def mark(found: re.Match) -> str:
        kind, at, begin = found.lastgroup or "", f"<at_{found.start()}>", ""
        said = {"table": _html, "bars": _bars}.get(kind, lambda text: text.replace("<", _LESS))(found[kind])
        if kind == "style":
            return ""
        if kind == "box":
            return "".join(f"<loc_{int(one[:6]) / 2:g}>" for one in re.findall(r"\d+", said))
        if kind == "item":
            indent = len(found["space"].expandtabs(4))
            while depths and depths[-1] > indent:
                depths.pop()
                begin += "</unordered_list>"
            if not depths or depths[-1] < indent:
                depths.append(indent)
                begin += f"{at}<unordered_list>"
            return f"{begin}{at}<list_item><_{said}_>"
        depths.clear()
        tag = {"table": "otsl", "bars": "otsl", "rest": "page_break"}.get(
            kind, kind.replace("dollars", "formula")
        )
        if kind == "code":
            language = found["language"].strip()
            said = (f"<_{language}_>" if re.fullmatch(r"[\w+#.-]+", language) else f"{language}\n") + said
        elif kind == "picture":
            said = f"<caption>{said.replace('](', ' ')}</caption>"
        elif kind == "heading":
            level = len(found["sharps"]) - 1
            tag = f"section_header_level_{level}" if level else "title"
        return f"{at}<{tag}>{said}</{tag}>"

    return _SIGN.sub(mark, text)


def _html(source: str) -> str:
    """A table of HTML in OTSL."""
    tree = etree.HTML(_NO_TABLE.sub("&lt;", source), etree.HTMLParser(huge_tree=True))
    loose = "".join(tree.xpath(".//text()[not(ancestor::*[self::td or self::th][parent::tr])]"))
    rows, taken = [loose.replace("<", _LESS)], Counter[int]()  # rows that cells above still take of a column
    for line in tree.iter("tr"):
        row, column = "", 0
        for cell in (*line.iterchildren("td", "th"), None):
            while taken[column]:
                taken[column], column, row = taken[column] - 1, column + 1, f"{row}<ucel>"
            if cell is not None:
                spans = (re.sub(r"\D", "", cell.get(name, ""))[:3] for name in ("rowspan", "colspan"))
                high, wide = (max(int(one or 1), 1) for one in spans)
                taken.update({column + more: high - 1 - taken[column + more] for more in range(wide)})
                text = " ".join(cell.itertext()).replace("<", _LESS)
                row += f"<{'fcel' if cell.tag == 'td' else 'ched'}>{text}" + "<lcel>" * (wide - 1)
                column += wide
        rows.append(row)
    return "<nl>".join(rows)


def _bars(text: str) -> str:
    """A table between bars in OTSL."""
    rows = [re.sub(r"^\s*\|?|\|?\s*$", "", line) for line in text.replace("<", _LESS).split("\n")]
    return "<nl>".join("<fcel>" + re.sub(r"(?<!\\)\|", "<fcel>", row) for row in rows[:1] + rows[2:])


def export(document: DoclingDocument, form: str, pictures: Path | None = None) -> str:
    """The document as text in one of `FORMATS`. Its pictures are in HTML and JSON; where a folder beside the
    document is named, they are written there and linked."""
    images = ImageRefMode.EMBEDDED if form == "html" else ImageRefMode.PLACEHOLDER
    if pictures and document.pictures and form != "txt":
        document, images = document.model_copy(deep=True), ImageRefMode.REFERENCED
        for number, one in enumerate(document.pictures, 1):
            if one.image and one.image.pil_image:
                pictures.mkdir(parents=True, exist_ok=True)
                one.image.pil_image.save(pictures / f"{number}.png")
                one.image.uri = Path(pictures.name, f"{number}.png")
    if form == "json":
        return document.model_dump_json(by_alias=True, exclude_none=True)
    writer, params = _WRITERS[form]
    layers = {ContentLayer.BODY, ContentLayer.FURNITURE}  # headers and footers of pages are text, too
    hidden = {"ocelli__confidence"}
    about = params(layers=layers, blocked_meta_names=hidden, image_mode=images, escape_underscores=False)
    return writer(doc=document, params=about).serialize().text
