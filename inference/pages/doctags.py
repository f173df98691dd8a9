"""The grammar of DocTags, in the language of llguidance, for `checkpoint.forms.constraint`.

    grammar = doctags_grammar({"<text>": 100260, "<key_": 100307})  # tags that are tokens, or begin with one

It allows what docling-core 2.104 writes (headings of 6 levels, tables of COLUMNS), with boxes or without,
indented or not, and text that forms no tag (in code, any but its end). The element opened last closes first.
A box is four `<loc_N>` of 0 to LARGEST, the last two not below the first two. Rows of a table are as wide as
its first; none begins with `<lcel>`, the first has no `<ucel>`. Rules have a number (`::`): how deep a list
is, how many cells the row must still have, or the first coordinates of a box, of nine bits each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

LARGEST, COLUMNS, DEPTH, FORM_CELLS = 500, 128, 8, 256
WORDS = (
    *("title", "text", "paragraph", "page_header", "page_footer", "footnote", "formula", "caption"),
    *("reference", "references", "handwritten_text", "checkbox_selected", "checkbox_unselected"),
    *(f"section_header_level_{level}" for level in range(1, 7)),
)
LISTS, FIGURES = ("ordered_list", "unordered_list"), ("picture", "chart")
BLOCKS = (*WORDS, *LISTS, *FIGURES, "otsl", "code", "inline", "key_value_region")
ELEMENTS = (*BLOCKS, "doctag", "list_item", "smiles")
FORM = ("key", "value", "unspecified", "checkbox")
CELL = "<(?:[efulx]cel|[cr]hed|srow)>"
_FULL = ("fcel", "ched", "rhed", "srow")  # cells that have text
_KNOWN = (
    rf"(<\/?({'|'.join(ELEMENTS)}|({'|'.join(FORM)})_\d+)>"
    rf"|<({'|'.join(_FULL)}|[elux]cel|nl|page_break|(loc|link)_\d+)>)"
)


def doctags_grammar(marks: Mapping[str, int]) -> str:
    """`marks`: special tokens with their ids."""

    def spelled(found: re.Match) -> str:
        if found[2] in marks:
            return f'<[{marks[found[2]]}]> "{found[3]}"'
        return f"<[{marks[found[1]]}]>" if found[1] in marks else found[0]

    tags = [str(one) for text, one in marks.items() if re.fullmatch(rf"(?!</code>|<loc){_KNOWN}", text)]
    return re.sub(r'"((</?[a-z]+_)(\d+>)|</?\w+>)"', spelled, _grammar(",".join(tags)))


def _elements(names: Iterable[str], body: str) -> str:
    return "(" + " | ".join(f'"<{name}>" {body} "</{name}>"' for name in names) + ")"


def _grammar(tags: str) -> str:
    in_code = f"(LESS_IN_CODE | BARE{f' | <[{tags}]> TEXT?' if tags else ''})*"
    full = " | ".join(f'"<{name}>" box? cell' for name in _FULL)
    places = [(f'"<loc_{number}>"', number) for number in range(LARGEST + 1)]
    numbers = [f"{name}_{number}" for name in FORM for number in range(FORM_CELLS)]
    coordinates = (
        ("x1", [f"{tag} y1::bit_or({number})" for tag, number in places]),
        ("y1", [f"{tag} x2::bit_or({number << 9})" for tag, number in places]),
        ("x2", [f"{tag} y2::_ %if le([0:9], {number})" for tag, number in places]),
        ("y2", [f"{tag} %if le([9:18], {number})" for tag, number in places]),
    )
    return rf"""
start: SPACE? ("<doctag>" blocks SPACE? "</doctag>" | blocks)
blocks: (SPACE? (block::0 | "<page_break>"))*
block::_ : words | list::_ | table | figure | code | form | inline
boxes: box{{0,8}}
box: x1::0
words: {_elements(WORDS, "boxes text")}
flat: TEXT? (LESS | BARE)*
text: flat (inline flat)*
inline: "<inline>" boxes (SPACE? (plain | code))* SPACE? "</inline>"
plain: {_elements(WORDS, "boxes flat")}
list::_ : {_elements(LISTS, "items::incr(_) SPACE?")} %if lt(_, {DEPTH})
items::_ : "" | items::_ SPACE? "<list_item>" boxes item::_ "</list_item>"
item::_ : flat | item::_ block::_ flat
code: "<code>" boxes TEXT? {in_code} "</code>"
captions: ("<caption>" boxes flat "</caption>" SPACE?)*
table: "<otsl>" boxes SPACE? captions grid? captions "</otsl>"
figure: {_elements(FIGURES, "boxes SPACE? kind? SPACE? grid? SPACE? captions")}
kind: (CLASS | "<chart>") | (CLASS | "<chart>")? "<smiles>" flat "</smiles>"
form: "<key_value_region>" boxes (SPACE? numbered)* SPACE? captions "</key_value_region>"
numbered: {_elements(numbers, "boxes flat (link flat)*")}
link: {" | ".join(f'"<link_{number}>"' for number in range(FORM_CELLS))}
grid: first::0
first::_ : ({full} | "<ecel>") wider::incr(_)
wider::_ : ({full} | "<ecel>" | "<lcel>" | "<xcel>") wider::incr(_) %if lt(_, {COLUMNS})
  | "<nl>" SPACE? rows::_
rows::_ : "" | rows::_ ({full} | "<ecel>" | "<ucel>" | "<xcel>") rest::decr(_)
rest::_ : ({full} | "<ecel>" | "<lcel>" | "<ucel>" | "<xcel>") rest::decr(_) %if gt(_, 0)
  | "<nl>" SPACE? %if eq(_, 0)
cell: (FIRST | LESS | BARE) (LESS | BARE)*
SPACE: /[ \t\r\n]{{1,8}}/
TEXT: /[^<]+/
FIRST: /[^<\s\x1c-\x1f][^<]*/
BARE: /<\/?[0-9A-Za-z_]*/
LESS: /<\/?[0-9A-Za-z_]*[^<0-9A-Za-z_][^<]*/ & ~/{_KNOWN}[^<]*/
LESS_IN_CODE: /<\/?[0-9A-Za-z_]*[^<0-9A-Za-z_][^<]*/ & ~/<\/code>[^<]*/
CLASS: /<[a-z_]{{1,30}}>/ & ~/{_KNOWN}/
""" + "\n".join(f"{name}::_ : " + "\n | ".join(ways) for name, ways in coordinates)
