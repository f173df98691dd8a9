"""The grammar of DocTags, in the language of llguidance, for `checkpoint.forms.constraint`.

    grammar = doctags_grammar({"<text>": 100260, ...})   # tags that are one token

It allows what docling-core 2.104 writes, with boxes or without, indented or not, and text that forms no tag
(in code, any but its end). Elements close in the order in which they were opened. A box is four `<loc_N>` of
0 to LARGEST, the last two not smaller than the first two. All rows of a table are as wide as its first; no
row begins with `<lcel>`, and the first has no `<ucel>`. Rules have one number as a parameter (`::`): how deep
a list is, the cells that a row must still have, the first two coordinates in nine bits each, the number of a
cell of a form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

LARGEST, COLUMNS, DEPTH, FORM_CELLS = 500, 128, 8, 256
WORDS = ("title", "text", "paragraph", "page_header", "page_footer", "footnote", "formula", "caption")
WORDS += ("reference", "references", "handwritten_text", "checkbox_selected", "checkbox_unselected")
WORDS += tuple(f"section_header_level_{level}" for level in range(1, 7))
LISTS, FIGURES = ("ordered_list", "unordered_list"), ("picture", "chart")
BLOCKS = (*WORDS, *LISTS, *FIGURES, "otsl", "document_index", "code", "inline", "key_value_region")
FULL = ("fcel", "ched", "rhed", "srow")  # cells that have text
FORM = ("key", "value", "unspecified", "checkbox")
_SPANS = "ecel", "lcel", "ucel", "xcel"
KNOWN = (
    rf"</?({'|'.join((*BLOCKS, 'doctag', 'list_item', 'smiles'))}|({'|'.join(FORM)})_\d+)>"
    rf"|<({'|'.join((*FULL, *_SPANS))}|nl|page_break|(loc|link)_\d+)>"
)


def doctags_grammar(marks: Mapping[str, int]) -> str:
    """Marks: special tokens with their ids, tags or beginnings of tags (`<key_`)."""

    def tag(text: str, number: int | str = "") -> str:
        if (head := text.removesuffix(">")) in marks and number != "":
            return f'<[{marks[head]}]> "{number}>"'
        text = f"{text}{number}>" if number != "" else text
        return f"<[{marks[text]}]>" if text in marks else json.dumps(text)

    def element(names: str | Iterable[str], body: str) -> str:
        names = [names] if isinstance(names, str) else names
        return "(" + " | ".join(f"{tag(f'<{one}>')} {body} {tag(f'</{one}>')}" for one in names) + ")"

    def rule(name: str, *ways: str) -> str:
        return f"{name}: " + "\n | ".join(ways)

    def cells(*spans: str) -> str:
        full = [f"{tag(f'<{one}>')} (x1::0)? cell::0" for one in FULL]
        return "(" + " | ".join([*full, *(tag(f"<{one}>") for one in ("ecel", *spans))]) + ")"

    def counted(name: str, count: int, way: Callable[[int], str]) -> str:
        return rule(f"{name}::_ ", *(way(number) for number in range(count)))

    def said(name: str, more: str = "", first: str = '""', less: str = "LESS") -> str:
        """Text with what may stand in it: no > follows BARE, with which it could form a tag."""
        bare, more = f"{name}_bare::_", f"{less} | {more}" if more else less
        start = f" | {less}" if first != '""' else ""
        return "\n".join(
            [
                f"{name}::_ : {name}_any::_ | {bare}",
                f"{name}_any::_ : {first}{start} | {name}_any::_ TEXT | ({name}_any::_ | {bare}) ({more})",
                f"{bare} : ({name}_any::_ | {bare}) BARE{' | BARE' if start else ''}",
            ]
        )

    known = KNOWN.replace("/", "\\/")
    loc = [tag(f"<loc_{number}>") for number in range(LARGEST + 1)]
    nl, words = f"{tag('<nl>')} SPACE?", element(WORDS, "boxes flat::0")
    return "\n".join(
        [
            "start: SPACE? (page | blocks)",
            f"page: {element('doctag', 'blocks SPACE?')}",
            f"blocks: (SPACE? (block::0 | {tag('<page_break>')}))*",
            rule("block::_ ", "words", "list::_", "table", "figure", "code", "form", "inline"),
            f"words: {element(WORDS, 'boxes text::0')} | index",
            f"index: {element('document_index', 'boxes (text::0 | SPACE? grid)')}",
            f"inline: {element('inline', f'boxes (SPACE? ({words} | code | figure))* SPACE?')}",
            *(said("text", "inline"), said("flat"), said("item", "block::_"), said("form_text", "link")),
            *(said("cell", first="FIRST"), said("code_text", less="LESS_IN_CODE")),
            f"list::_ : {element(LISTS, 'items::incr(_) SPACE?')} %if lt(_, {DEPTH})",
            rule("items::_ ", '""', f"items::_ SPACE? {element('list_item', 'boxes item::_')}"),
            f"code: {element('code', 'boxes code_text::0')}",
            f"captions: ({element('caption', 'boxes flat::0')} SPACE?)*",
            f"table: {element('otsl', 'boxes SPACE? captions grid? captions')}",
            f"figure: {element(FIGURES, 'boxes SPACE? (CLASS | chart)? smiles? grid? SPACE? captions')}",
            f"chart: {tag('<chart>')}",
            f"smiles: {element('smiles', 'flat::0')}",
            "grid: first::0",
            f"first::_ : {cells()} wider::incr(_)",
            rule(
                "wider::_ ", f"{cells('lcel', 'xcel')} wider::incr(_) %if lt(_, {COLUMNS})", f"{nl} rows::_"
            ),
            rule("rows::_ ", '""', f"rows::_ {cells('ucel', 'xcel')} rest::decr(_)"),
            rule("rest::_ ", f"{cells(*_SPANS[1:])} rest::decr(_) %if gt(_, 0)", f"{nl} %if eq(_, 0)"),
            "boxes: (x1::0){0,8}",
            counted("x1", LARGEST + 1, lambda k: f"{loc[k]} y1::bit_or({k})"),
            counted("y1", LARGEST + 1, lambda k: f"{loc[k]} x2::bit_or({k << 9})"),
            counted("x2", LARGEST + 1, lambda k: f"{loc[k]} y2::_ %if le([0:9], {k})"),
            counted("y2", LARGEST + 1, lambda k: f"{loc[k]} %if le([9:18], {k})"),
            f"form: {element('key_value_region', 'boxes (SPACE? form_cell)* SPACE? captions')}",
            rule(
                "form_cell",
                *(
                    f"{tag(f'<{one}_', n)} boxes form_text::0 {tag(f'</{one}_', n)}"
                    for one in FORM
                    for n in range(FORM_CELLS)
                ),
            ),
            f"link: {tag('<link_')} /[0-9]{{1,4}}>/" if "<link_" in marks else "link: /<link_[0-9]{1,4}>/",
            "SPACE: /[ \\t\\r\\n]{1,8}/",
            "TEXT: /[^<]+/",
            "FIRST: /[^< \\t\\r\\n][^<]*/",
            "BARE: /<\\/?[0-9A-Za-z_]*/",
            rf"LESS: /<\/?[0-9A-Za-z_]*[^<0-9A-Za-z_]/ & ~/{known}/",
            r"LESS_IN_CODE: /<\/?[0-9A-Za-z_]*[^<0-9A-Za-z_]/ & ~/<\/code>/",
            rf"CLASS: /<[a-z_]{{1,30}}>/ & ~/{known}/",
        ]
    )
