"""What a model wrote of a page as a document: as docling-core has it where it is whole, and nothing lost."""

import random
import re
from collections import Counter

import pytest
from docling_core.types.doc.base import BoundingBox, Size
from docling_core.types.doc.doctags import DocTagsDocument
from docling_core.types.doc.document import DoclingDocument, ProvenanceItem, TableCell, TableData
from docling_core.types.doc.labels import CodeLanguageLabel, DocItemLabel
from PIL import Image

from data.reading import Reading
from inference.pages.document import FORMATS, export, page_document

PAGE = Image.effect_noise((640, 900), 90).convert("RGB")
MARKDOWN, DOCTAGS = Reading(), Reading("doctags")
LABELS = [
    DocItemLabel(name)
    for name in ("title", "section_header", "text", "footnote", "formula", "page_footer", "code", "list_item")
]


def whole(draw: random.Random) -> DoclingDocument:
    """A document of one page with everything that DocTags writes."""
    document = DoclingDocument(name="whole")
    document.add_page(page_no=1, size=Size(width=500, height=500))

    def place() -> ProvenanceItem:
        left, right = sorted(draw.sample(range(500), 2))
        top, bottom = sorted(draw.sample(range(500), 2))
        return ProvenanceItem(page_no=1, bbox=BoundingBox(l=left, t=top, r=right, b=bottom), charspan=(0, 0))

    for number in range(draw.randint(1, 12)):
        label, text = draw.choice(LABELS), f"text {number} of P < 0.05 & more"
        if label == DocItemLabel.LIST_ITEM:
            group = document.add_list_group()
            for _ in range(3):
                document.add_list_item(text, draw.random() < 0.5, prov=place(), parent=group)
        elif label == DocItemLabel.CODE:
            document.add_code(text, CodeLanguageLabel.PYTHON, prov=place())
        else:
            document.add_text(label, text, prov=place())
    rows, columns = draw.randint(1, 4), draw.randint(2, 5)
    cells = [(0, 0, 1, 2), *((r, c, 1, 1) for r in range(rows) for c in range(columns) if r or c > 1)]
    made = [
        TableCell(
            text=f"cell {r} {c}", row_span=high, start_row_offset_idx=r, end_row_offset_idx=r + high,
            col_span=wide, start_col_offset_idx=c, end_col_offset_idx=c + wide,
        )
        for r, c, high, wide in cells
    ]  # fmt: skip
    document.add_table(TableData(table_cells=made, num_rows=rows, num_cols=columns), prov=place())
    document.add_picture(prov=place())
    return document


def seen(document: DoclingDocument) -> list:
    texts = [(one.label, one.text, getattr(one, "level", 0), one.prov[0].bbox) for one in document.texts]
    tables = [[cell.model_dump() for cell in one.data.table_cells] for one in document.tables]
    pictures = [(one.prov[0].bbox, one.image.pil_image.tobytes()) for one in document.pictures]
    return [texts, tables, [one.prov[0].bbox for one in document.tables], pictures]


@pytest.mark.parametrize("seed", range(4))
def test_whole_doctags_are_read_as_docling_core_reads_them(seed):
    tags = whole(random.Random(seed)).export_to_doctags()
    theirs = DoclingDocument.load_from_doctags(DocTagsDocument.from_doctags_and_image_pairs([tags], [PAGE]))
    assert seen(page_document(tags, DOCTAGS, PAGE)) == seen(theirs)


MARKS = r"""<text> </text> <otsl> </otsl> <fcel> <lcel> <ucel> <nl> <ched> <loc_1> <loc_999> <picture>
</picture> <chart> <caption> </caption> <list_item> </list_item> <ordered_list> </unordered_list> <inline>
</inline> <code> </code> <_Python_> <formula> <title> <page_header> <doctag> <key_0> ``` $ $$ \( \) \[ \] | **
<table> </table> <tr> <td> </td> <th> <tr <td <b> </b> <box> </box> <!-- --> & < > \ ` # <a> * _ ![ ]( )"""
SPACED = (
    '<td rowspan="3">',
    '<td colspan="99999">',
    "\n",
    "\n\n",
    "\r\n",
    "\n- ",
    "\n  1. ",
    "<at_1.5>",
    "\n|---|\n",
    " ",
    "\0",
)
PIECES = [*re.findall(r"\S+", MARKS), *SPACED]


@pytest.mark.parametrize("reading", [MARKDOWN, DOCTAGS], ids=lambda reading: reading.form)
def test_no_word_is_lost(reading):
    draw = random.Random(7)
    for length in [*range(2, 80, 3), 5_000]:
        words, kinds = (f"w{number}x" for number in range(length)), draw.sample(PIECES, draw.randint(1, 12))
        text = "".join(
            draw.choice((next(words), draw.choice(kinds if length % 2 else PIECES))) for _ in range(length)
        )
        expected = Counter(re.findall(r"w\d+x", text))
        document = page_document(text, reading, PAGE.crop((0, 0, 40, 60)))
        for form in FORMATS if length < 80 else ("json",):
            assert not expected - Counter(re.findall(r"w\d+x", export(document, form))), (length, form, text)


def test_markdown(tmp_path):
    text = """# Report

Some **bold** text of a_b, $x_1$ and
more

- one
  1. deep $y$
- two

```python
if a < b: pass
```

\\[
a
+ b
\\]

| h | k |
|---|---|
| 1 | 2 | 3 |

<table><tr><td rowspan=2>A<td colspan="2">B &amp; C</tr><tr><td>D</td><td>E</td></tr>"""
    at = text.index("one")
    document = page_document(
        text, MARKDOWN, PAGE, 4, [(i, i + 1, 0.5 if i < at else 1) for i in range(len(text))]
    )
    kinds = [item.label.value for item, _ in document.iterate_items()]
    assert kinds == ["title", "text", *["list_item"] * 3, "code", "formula", "table", "table"]
    assert [one.text for one in document.texts[:5]] == [
        "Report", "Some bold text of a_b, $x_1$ and\nmore", "one", "deep $y$", "two",
    ]  # fmt: skip
    assert document.texts[5].code_language == CodeLanguageLabel.PYTHON and document.texts[6].text == "a\n+ b"
    assert document.texts[3].parent.resolve(document).parent == document.texts[2].get_ref()
    spans = [(cell.text, cell.row_span, cell.col_span) for cell in document.tables[1].data.table_cells]
    assert spans == [("A", 2, 1), ("B & C", 1, 2), ("D", 1, 1), ("E", 1, 1)]
    assert document.tables[0].data.num_cols == 3
    assert [one.prov[0].page_no for one in document.texts] == [4] * 7
    sure = [
        one.meta.get_custom_part()["ocelli__confidence"] for one in (document.texts[0], document.texts[4])
    ]
    assert sure == [0.5, 1]


def test_pages_follow_one_another_and_pictures_are_linked(tmp_path):
    tags = "<picture><loc_100><loc_0><loc_200><loc_250><logo><caption>Fig 1</caption></picture>lost <text>cut"
    document = page_document(tags, DOCTAGS, PAGE, 3)
    document = page_document("page five", MARKDOWN, PAGE, 5, document=document)
    assert [*document.pages] == [3, 5] and [one.text for one in document.texts] == [
        "Fig 1",
        "lost",
        "cut",
        "page five",
    ]
    assert "scan_pictures/1.png" in export(document, "md", tmp_path / "scan_pictures")
    assert Image.open(tmp_path / "scan_pictures" / "1.png").size == (128, 450)
    again = DoclingDocument.model_validate_json(export(document, "json"))
    assert [one.prov[0].page_no for one in again.texts] == [3, 3, 3, 5]
