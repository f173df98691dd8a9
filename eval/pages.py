"""Scores of a page that a model has read, from 0 to 1, which is best: `page_scores(pieces, document)`.

| score | is |
|---|---|
| `text` | 1 - the edit distance of all text, over the length of the longer one |
| `teds`, `teds_structure` | of its tables; structure: without the text in their cells |
| `order` | 1 - the edit distance of the order of pieces, over their number |

A piece is where at least half of its text is; one that is nowhere is missing in the order. Headers and
footers of a page count for nothing, whether they are read or not. Both are after OmniDocBench (Ouyang et al.
2024).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import scipy  # which imports scipy.optimize when it is first used
from docling_core.types.doc.common.content_layer import ContentLayer
from docling_core.types.doc.document import DoclingDocument, TableItem

from eval.boxes import matched
from eval.metrics import similarity

BESIDE = ("page_header", "page_footer")
MARKS = ("$", r"\(", r"\)", "[x]", "[ ]", "☐", "☑", "☒")  # of formulas among words, and of boxes to tick
FOUND = 0.5  # of a piece's text
NODES = 500  # of a table that is read that are compared; the others count as deleted

Cell = tuple[int, int, str]  # columns and rows that it spans, text
Piece = tuple[str, str, list[list[Cell]] | None]  # kind, text, rows of a table


def plain(text: str) -> str:
    """Text without MARKS, in single spaces, compatible letters made one (NFKC)."""
    for mark in MARKS:
        text = text.replace(mark, "")
    return " ".join(unicodedata.normalize("NFKC", text).split())


def table_piece(rows: list[list[Cell]]) -> Piece:
    """A table, whose text has a line a row."""
    return "table", "\n".join(" ".join(filter(None, (text for *_, text in row))) for row in rows), rows


def pieces_of(document: DoclingDocument) -> Iterator[Piece]:
    """The pieces of a document in reading order; a line with formulas in it is one of them."""

    def line(found: tuple[Any, int]) -> str:
        parent = found[0].parent.resolve(document)
        return parent.self_ref if getattr(parent, "label", "") == "inline" else found[0].self_ref

    for _, found in groupby(document.iterate_items(included_content_layers={*ContentLayer}), line):
        items = [item for item, _ in found]
        if isinstance(items[0], TableItem):
            rows: list[list[Cell]] = [[] for _ in range(items[0].data.num_rows)]
            for cell in items[0].data.table_cells:
                rows[cell.start_row_offset_idx].append((cell.col_span, cell.row_span, plain(cell.text)))
            yield table_piece(rows)
        elif text := plain(" ".join(getattr(item, "text", "") for item in items)):
            yield str(getattr(items[0], "label", "")), text, None


def page_scores(truth: Sequence[Piece], document: DoclingDocument) -> dict[str, float]:
    """The scores of a page by name; those of tables only where it has some."""
    found = list(pieces_of(document))
    alike = np.array([[_found(wanted, text) for _, text, _ in found] for _, wanted, _ in truth])
    places = {}  # in the document, of pieces
    if found:
        pairs = zip(*scipy.optimize.linear_sum_assignment(alike, maximize=True))
        places = {int(at): int(place) for at, place in pairs if alike[at, place]}
    left_out = {place for at, place in places.items() if truth[at][0] in BESIDE}
    body = [at for at, (kind, text, _) in enumerate(truth) if text and kind not in BESIDE]
    read = "\n".join(text for place, (_, text, _) in enumerate(found) if place not in left_out)
    scores = {"text": similarity("\n".join(truth[at][1] for at in body), read)}
    order = [at for at in sorted(places, key=places.__getitem__) if at in {*body}]
    scores["order"] = similarity(order, body)
    tables, others = ([rows for *_, rows in pieces if rows is not None] for pieces in (truth, found))
    for name in ("teds", "teds_structure") if tables else ():
        each = [[teds(one, other, name != "teds") for other in others] for one in tables]
        scores[name] = matched(np.reshape(each, (len(tables), len(others)))) / len(tables)
    return scores


@lru_cache(100_000)  # a model that repeats itself writes the same text again and again
def _found(wanted: str, text: str) -> float:
    """How alike two texts are, 0 where less than half of one is in the other."""
    if min(len(wanted), len(text)) < FOUND * max(len(wanted), len(text)):
        return 0.0
    return alike if (alike := similarity(wanted, text)) >= FOUND else 0.0


def teds(table: list[list[Cell]], read: list[list[Cell]], structure: bool = False) -> float:
    """Similarity of two tables by the edit distance of their trees of rows and cells (TEDS; Zhong et al.
    2020): 1 - distance / nodes of the larger one. Cells of equal spans differ by the edit distance of their
    texts over the longer one's length, for their structure not at all. After Zhang and Shasha (1989)."""

    @cache
    def cost(one: Cell | str, other: Cell | str) -> float:
        if isinstance(one, str) or isinstance(other, str) or one[:2] != other[:2]:
            return float(one != other)
        return 0.0 if structure else 1 - similarity(one[2], other[2])

    def tree(rows: list[list[Cell]]) -> tuple[list[Cell | str], list[int]]:
        """Nodes, children first, and the first leaf below each."""
        nodes, first = list[Cell | str](), list[int]()
        for row in rows:
            first += [*range(len(nodes), len(nodes) + len(row)), len(nodes)]
            nodes += [*row, "row"]
        return [*nodes, "table"], [*first, 0]

    sizes = np.cumsum([1 + len(row) for row in read] or [0]).tolist()
    shown = [row for row, so_far in zip(read, sizes) if so_far <= NODES]
    (a, first_a), (b, first_b) = tree(table), tree(shown)
    trees = np.zeros((len(a), len(b))).tolist()  # distances of the trees below two nodes
    # Of the trees that begin at one leaf the largest holds the others.
    for top_a in sorted({leaf: node for node, leaf in enumerate(first_a)}.values()):
        for top_b in sorted({leaf: node for node, leaf in enumerate(first_b)}.values()):
            low_a, low_b = first_a[top_a], first_b[top_b]
            if (low_a, low_b) == (top_a, top_b):  # two leaves, as most are
                trees[top_a][top_b] = cost(a[top_a], b[top_b])
                continue
            forests = [[float(count) for count in range(top_b - low_b + 2)]]
            for i in range(low_a, top_a + 1):
                row_ = [forests[-1][0] + 1]
                for j in range(low_b, top_b + 1):
                    least = 1 + min(row_[-1], forests[-1][j - low_b + 1])
                    if first_a[i] == low_a and first_b[j] == low_b:
                        least = trees[i][j] = min(least, forests[-1][j - low_b] + cost(a[i], b[j]))
                    else:
                        before = forests[first_a[i] - low_a][first_b[j] - low_b]
                        least = min(least, before + trees[i][j])
                    row_.append(least)
                forests.append(row_)
    distance = trees[-1][-1] + sizes[-1] - (len(b) - 1)
    return max(0.0, 1 - distance / max(len(a) - 1, sizes[-1], 1))
