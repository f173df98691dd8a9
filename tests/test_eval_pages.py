"""Scores of pages: TEDS and edit distance as the published scorers give them, order, and the task as a whole."""

import random

import pytest

pytest.importorskip("docling_core")

from docling_core.types.doc.document import DoclingDocument, TableCell, TableData
from docling_core.types.doc.labels import DocItemLabel

from eval.metrics import edit_distance
from eval.pages import page_scores, table_piece, teds

WORDS = ["", "a", "mill", "kiln", "40.5", "41.5", "a long cell of words"]


def random_rows(rng, rows=5, columns=4):
    spans = lambda: rng.choice((1, 1, 1, 1, 2))
    return [[(spans(), spans(), rng.choice(WORDS)) for _ in range(rng.randint(0, columns))] for _ in range(rows)]


def changed(rng, rows):
    """A table with a few cells and rows changed, gone or new."""
    made = [[*row] for row in rows]
    for _ in range(rng.randint(0, 6)):
        row = rng.choice(made) if made else []
        at = rng.randrange(len(row) + 1)
        rng.choice((
            lambda: row.insert(at, (1, 1, rng.choice(WORDS))),
            lambda: row and row.pop(at % len(row)),
            lambda: row and row.__setitem__(at % len(row), (rng.choice((1, 2)), 1, rng.choice(WORDS))),
            lambda: made.insert(at, [(1, 1, "new")] * 3),
            lambda: made and made.pop(at % len(made)),
        ))()  # fmt: skip
    return made


# ------------------------------------------------------------------------------------------------ edit distance
def distance_by_table(one, other):
    above = list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        row = [at]
        for place, wanted in enumerate(other, 1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (letter != wanted)))
        above = row
    return above[-1]


def test_edit_distance_is_levenshteins():
    rng = random.Random(0)
    for _ in range(300):
        one, other = ("".join(rng.choices("abcé字", k=rng.randint(0, 90))) for _ in range(2))
        assert edit_distance(one, other) == edit_distance(other, one) == distance_by_table(one, other)
        assert edit_distance([*one], [*other]) == edit_distance(one, other)


# ---------------------------------------------------------------------------------------------- TEDS
def teds_by_apted(rows, read, structure):
    """TEDS of PubTabNet's scorer, on the library of tree distances that it is built on."""
    from apted import APTED, Config
    from rapidfuzz.distance import Levenshtein

    class Node:
        def __init__(self, tag, children=(), cell=(0, 0, "")):
            self.tag, self.children, self.cell = tag, children, cell

    class Costs(Config):
        def rename(self, one, other):
            if one.tag != other.tag or one.cell[:2] != other.cell[:2]:
                return 1.0
            return 0.0 if structure else Levenshtein.normalized_distance(one.cell[2], other.cell[2])

    trees = [
        Node("table", [Node("tr", [Node("td", cell=cell) for cell in row]) for row in table])
        for table in (rows, read)
    ]
    nodes = max(sum(1 + len(row) for row in table) for table in (rows, read))
    return 1 - APTED(*trees, Costs()).compute_edit_distance() / max(nodes, 1)


def test_teds_is_that_of_the_published_scorer():
    """Needs requirements-eval.txt; the values below were made with it."""
    pytest.importorskip("apted")
    rng = random.Random(0)
    for case in range(300):
        rows = random_rows(rng, rng.randint(0, 5))
        read = changed(rng, rows) if case % 3 else random_rows(rng)
        for structure in (False, True):
            assert teds(rows, read, structure) == pytest.approx(teds_by_apted(rows, read, structure), abs=1e-9)


if __name__ == "__main__":
    rng = random.Random(1)
    for _ in range(6):
        rows = random_rows(rng, 3, 3)
        read = changed(rng, rows)
        print([rows, read, round(teds_by_apted(rows, read, False), 6), round(teds_by_apted(rows, read, True), 6)], ",")
