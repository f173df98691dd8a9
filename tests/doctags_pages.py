"""Tokenizers that spell DocTags in different ways, random documents in DocTags, and a reader of them that
knows nothing of the grammar in `inference.pages.doctags`."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

from docling_core.types.doc.base import BoundingBox, CoordOrigin, Size
from docling_core.types.doc.document import (
    DoclingDocument,
    GraphCell,
    GraphData,
    GraphLink,
    MoleculeMetaField,
    PictureClassificationMetaField,
    PictureClassificationPrediction,
    PictureMeta,
    ProvenanceItem,
    TableCell,
    TableData,
    TabularChartMetaField,
)
from docling_core.types.doc.labels import CodeLanguageLabel, DocItemLabel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from inference.forms import Forms

NAMES = ["title", "text", "page_header", "page_footer", "footnote", "formula", "caption", "paragraph"]
NAMES += [
    "otsl",
    "picture",
    "chart",
    "code",
    "list_item",
    "ordered_list",
    "unordered_list",
    "doctag",
    "smiles",
]
NAMES += ["key_value_region", "section_header_level_1"]
TAGS = [tag for name in NAMES for tag in (f"<{name}>", f"</{name}>")]
TAGS += ["<fcel>", "<ecel>", "<lcel>", "<ucel>", "<xcel>", "<ched>", "<rhed>", "<nl>", "<page_break>"]
TAGS += ["<key_", "</key_", "<link_"]
KINDS = {  # special tokens: as in granite-docling, with coordinates, and none
    "some": TAGS,
    "all": [*TAGS, *(f"<loc_{number}>" for number in range(501))],
    "none": [],
}
TEXTS = [
    "The quick brown fox jumps over 12 345 lazy dogs.\n",
    "<loc_1><loc_22>",
    "x < 3 > y",
    "<div> <b>",
    "....",
]


def tokenizer(kind: str) -> Tokenizer:
    """One of bytes, in which `><` is a token, as in those of GPT-4 and granite."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<eos>", "<image>", *KINDS[kind]]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 400, initial_alphabet=letters, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 5, trainer)
    return backend


def checkpoint(kind: str, context: int = 10**6) -> Any:
    """What `PageForm` needs of one, whose model has more ids than its tokenizer."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(kind), eos_token="<eos>")
    processor = SimpleNamespace(tokenizer=fast, plan=lambda size: SimpleNamespace(positions=100))
    size = len(fast) + 5
    forms = Forms(processor, None, size, (0,), True)
    return SimpleNamespace(processor=processor, forms=forms, context=context, vocab_size=size)


# ------------------------------------------------------------------------------------------------ documents
LANGUAGES = [CodeLanguageLabel.C_PLUS_PLUS, CodeLanguageLabel.PYTHON, CodeLanguageLabel.UNKNOWN]


def _cells(draw: random.Random) -> TableData:
    rows, columns = draw.randint(1, 6), draw.randint(1, 5)
    free, cells = {(row, column) for row in range(rows) for column in range(columns)}, []
    for row in range(rows):
        for column in range(columns):
            if (row, column) not in free:
                continue
            high, wide = draw.choice([(1, 1)] * 6 + [(2, 1), (1, 2), (2, 2), (3, 2)])
            area = {(row + y, column + x) for y in range(high) for x in range(wide)}
            if not area <= free:
                high = wide = 1
                area = {(row, column)}
            free -= area
            cells.append(
                TableCell(
                    text=draw.choice(["", "0", "a b", "p<0.05", "x > 2\ny", "µ ± 3"]),
                    column_header=row == 0,
                    row_header=column == 0 and draw.random() < 0.3,
                    row_section=draw.random() < 0.05,
                    row_span=high,
                    col_span=wide,
                    start_row_offset_idx=row,
                    end_row_offset_idx=row + high,
                    start_col_offset_idx=column,
                    end_col_offset_idx=column + wide,
                )
            )
    return TableData(num_rows=rows, num_cols=columns, table_cells=cells)


def document(seed: int) -> DoclingDocument:
    """A page with everything that docling-core's serializer writes."""
    draw, made = random.Random(seed), DoclingDocument(name="page")
    made.add_page(page_no=1, size=Size(width=800, height=1100))

    def prov() -> ProvenanceItem:
        left, top = draw.uniform(0, 790), draw.uniform(0, 1090)
        right, bottom = draw.uniform(left, 800), draw.uniform(top, 1100)
        box = BoundingBox(l=left, t=top, r=right, b=bottom, coord_origin=CoordOrigin.TOPLEFT)
        return ProvenanceItem(page_no=1, bbox=box, charspan=(0, 1))

    def words() -> str:
        some = [
            "a < b",
            "if x<<2 > y:",
            "<div>",
            "text",
            "....",
            "ünï ✓",
            "1 2 3",
            "a</b>c",
            "x<y<z",
            "C<T>",
            "_<",
        ]
        return " ".join(draw.choices(some, k=draw.randint(1, 6)))

    def caption() -> Any:
        return made.add_text(DocItemLabel.CAPTION, words(), prov=prov()) if draw.random() < 0.6 else None

    def listed(parent: Any, depth: int) -> None:
        group = made.add_list_group(parent=parent)
        for number in range(draw.randint(1, 4)):
            item = made.add_list_item(words(), enumerated=depth % 2 == 0, parent=group, prov=prov())
            if depth < 4 and draw.random() < 0.3:
                listed(draw.choice([item, group]), depth + 1)
            elif number == 0 and draw.random() < 0.3:
                inline(item)

    def inline(parent: Any = None) -> None:
        group = made.add_inline_group(parent=parent)
        made.add_text(DocItemLabel.TEXT, words(), parent=group, prov=prov())
        made.add_formula("x^2 < 4", parent=group)
        made.add_code("y", parent=group)

    def figure() -> None:
        drawn = made.add_picture(caption=caption(), prov=prov())
        name = draw.choice(["bar_chart", "pie_chart", "logo", "chemistry_structure", "table", "chart", None])
        if name is not None:
            guess = PictureClassificationPrediction(class_name=name, confidence=1.0)
            drawn.meta = PictureMeta(classification=PictureClassificationMetaField(predictions=[guess]))
            if "_chart" in name:
                drawn.meta.tabular_chart = TabularChartMetaField(title="t", chart_data=_cells(draw))
            if name == "chemistry_structure":
                drawn.meta.molecule = MoleculeMetaField(smi="CC(=O)O")

    def form() -> None:
        cells = [
            GraphCell(label=label, cell_id=number, text="v 1", orig="v 1", prov=prov())
            for number, label in enumerate(draw.choices(["key", "value", "checkbox", "unspecified"], k=5))
        ]
        links = [GraphLink(label="to_value", source_cell_id=0, target_cell_id=n) for n in range(1, 3)]
        made.add_key_values(GraphData(cells=cells, links=links), prov=prov())

    texts = [DocItemLabel.TEXT, DocItemLabel.FOOTNOTE, DocItemLabel.PAGE_HEADER, DocItemLabel.PAGE_FOOTER]
    texts += [DocItemLabel.CHECKBOX_SELECTED, DocItemLabel.REFERENCE, DocItemLabel.PARAGRAPH]
    code = "for (i=0; i<n; i++) { a<<=1; }\n<title>x</title>\n\treturn a<b;"
    ways = [
        lambda: made.add_title(words(), prov=prov()),
        lambda: made.add_heading(words(), level=draw.randint(1, 5), prov=prov()),
        lambda: made.add_text(draw.choice(texts), words(), prov=prov()),
        lambda: made.add_table(_cells(draw), caption=caption(), prov=prov()),
        lambda: made.add_formula(r"\frac{a}{b} < \sum_i", prov=prov()),
        lambda: made.add_code(code, code_language=draw.choice(LANGUAGES), prov=prov()),
        lambda: listed(None, 0),
        lambda: inline(made.add_text(DocItemLabel.TEXT, "", prov=prov())),
        inline,
        figure,
        form,
    ]
    for way in draw.choices(ways, k=draw.randint(3, 12)):
        way()
    return made


# --------------------------------------------------------------------------------------------------- reader
CELL = re.compile(r"<([efulx]cel|ched|rhed|srow)>")


def check(text: str) -> None:
    """Raises AssertionError for a page whose tags, tables or boxes do not fit together."""
    open_tags = list[str]()
    text = re.sub(r"<code>((?:<loc_\d+>)*).*?</code>", r"<code>\1</code>", text, flags=re.DOTALL)
    for closes, name in re.findall(r"<(/?)([a-z]+(?:_[a-z]+)*(?:_\d+)?)>", text):
        base = re.sub(r"_\d+$", "", name)
        if base not in (*NAMES, "section_header_level", "inline", "key", "value", "unspecified", "checkbox"):
            continue
        inside = open_tags[-1] if open_tags else ""
        if closes:
            assert name == open_tags.pop(), text
        elif name != "chart" or inside not in ("picture", "chart"):
            assert name != "list_item" or inside in ("ordered_list", "unordered_list")
            assert not inside.endswith("_list") or name == "list_item"
            open_tags.append(name)
    assert not open_tags, text
    for boxes in re.findall(r"(?:<loc_\d+>)+", text):
        numbers = [int(number) for number in re.findall(r"\d+", boxes)]
        assert len(numbers) % 4 == 0 and max(numbers) <= 500
        for left, top, right, bottom in zip(*(numbers[side::4] for side in range(4)), strict=True):
            assert left <= right and top <= bottom
    for table in re.findall(r"<otsl>(.*?)</otsl>", text, re.DOTALL):
        rows = [CELL.findall(row) for row in table.split("<nl>")]
        assert not rows.pop() and len({len(row) for row in rows}) <= 1, table
        assert not any(row[0] == "lcel" for row in rows) and not (rows and "ucel" in rows[0])
        for tag, said in re.findall(r"<(fcel|ched|rhed|srow)>(?:<loc_\d+>)*([^<]?)", table):
            assert said == "" or not said.isspace(), (tag, table)
