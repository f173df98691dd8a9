"""Scores of pages: edit distance and TEDS as the published scorers give them, reading order, and the task."""

import json
import random

import pytest
from PIL import Image

from data.errors import DatasetError
from data.reading import Reading
from eval.metrics import Scored, edit_distance
from eval.pages import NODES, page_scores, table_piece, teds
from inference.pages.document import page_document
from recipes.pages.evaluation import SAMPLE, pages_task
from tests.evaluations import run

WORDS = ["", "a", "mill", "kiln", "40.5", "41.5", "a long cell of words"]


def random_rows(rng, rows=5, columns=4):
    spans = lambda: rng.choice((1, 1, 1, 1, 2))
    return [
        [(spans(), spans(), rng.choice(WORDS)) for _ in range(rng.randint(0, columns))] for _ in range(rows)
    ]


def changed(rng, rows):
    """A table with a few cells and rows changed, gone or new."""
    made = [[*row] for row in rows] or [[]]
    for _ in range(rng.randint(0, 6)):
        row, cell = rng.choice(made), (rng.choice((1, 1, 2)), 1, rng.choice(WORDS))
        at = rng.randrange(len(row) + 1)
        row[at : at + rng.randint(0, 2)] = [cell] * rng.randint(0, 2)
        made[at : at + rng.randint(0, 1)] = [[cell]] * rng.randint(0, 1) or [row]
    return made


# ---------------------------------------------------------------------------------------------- edit distance
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
            assert teds(rows, read, structure) == pytest.approx(
                teds_by_apted(rows, read, structure), abs=1e-9
            )


# Rows of cells (columns and rows that each spans, text), what was read of them, and both kinds of TEDS.
PUBLISHED = [
    (
        [[(2, 1, "mill")], [(1, 1, "41.5"), (1, 1, "kiln")]],
        [[(1, 1, "mill"), (1, 1, "")], [(1, 1, "41.5"), (1, 1, "kiln")]],
        0.666667,
        0.666667,
    ),
    (
        [[(1, 2, "a"), (1, 1, "b")], [(1, 1, "c")]],
        [[(1, 1, "a"), (1, 1, "b")], [(1, 1, "a"), (1, 1, "c")]],
        0.666667,
        0.666667,
    ),
    (
        [[(1, 1, "a"), (1, 1, "b")], [(1, 1, "c"), (1, 1, "d")]],
        [[(1, 1, "a"), (1, 1, "b"), (1, 1, "c"), (1, 1, "d")]],
        0.5,
        0.5,
    ),
    (
        [[(1, 1, "40.5"), (1, 1, "41.5")], [(1, 1, ""), (1, 1, "kiln")], [(1, 1, "mill"), (1, 1, "weir")]],
        [[(1, 1, "40.5"), (1, 1, "47.5")], [(1, 1, "mill"), (1, 1, "well")]],
        0.583333,
        0.666667,
    ),
    ([[(3, 1, "a long cell of words")], []], [[]], 0.333333, 0.333333),
]


@pytest.mark.parametrize(("rows", "read", "whole", "structure"), PUBLISHED)
def test_teds_of_the_published_scorer(rows, read, whole, structure):
    assert teds(rows, read) == teds(read, rows) == pytest.approx(whole, abs=1e-6)
    assert teds(rows, read, structure=True) == pytest.approx(structure, abs=1e-6)


def test_teds_of_huge_tables_is_no_more_than_it_would_be():
    """A table that a model wrote without end takes no minutes, and scores no better for it."""
    rows = [[(1, 1, str(row * column)) for column in range(4)] for row in range(6)]
    assert teds(rows, rows * 3) == pytest.approx(30 / 90) and teds(rows, rows * 200) == pytest.approx(1 / 200)
    assert teds(rows, [[(1, 1, "x")] * 5 * NODES]) == teds(rows, []) == 0


# ---------------------------------------------------------------------------------------------- pages
def read(markdown):
    return page_document(markdown, Reading(), Image.new("1", (800, 1000)))


TABLE = "<table><tr><td colspan='2'>Mill</td></tr><tr><td>40</td><td>41</td></tr></table>"
PAGE = [
    ("page_header", "Corran Papers", None),
    ("title", "Weirs", None),
    ("text", "The miller closes the old sluice.", None),
    table_piece([[(2, 1, "Mill")], [(1, 1, "40"), (1, 1, "41")]]),
    ("text", "No clerk counts the copper wheels.", None),
]
BLOCKS = ["# Weirs", "The miller closes the old sluice.", TABLE, "No clerk counts the copper wheels."]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (BLOCKS, {"text": 1, "order": 1, "teds": 1, "teds_structure": 1}),
        (["Corran Papers", *BLOCKS], {"text": 1, "order": 1}),  # a header counts for nothing
        ([BLOCKS[0], BLOCKS[3], BLOCKS[2], BLOCKS[1]], {"order": 0.5, "teds": 1}),
        (BLOCKS[:2], {"order": 0.5, "teds": 0, "teds_structure": 0}),
        ([*BLOCKS[:2], TABLE.replace("41", "4I"), BLOCKS[3]], {"order": 1, "teds": 0.9, "teds_structure": 1}),
        ([*BLOCKS[:2], "Mill 40 41", BLOCKS[3]], {"order": 1, "teds": 0}),  # a table that is read as text
        ([], {"text": 0, "order": 0, "teds": 0, "teds_structure": 0}),
    ],
)
def test_scores_of_a_page(blocks, expected):
    scores = page_scores(PAGE, read("\n\n".join(blocks)))
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    assert all(0 <= score <= 1 for score in scores.values())


@pytest.mark.parametrize("form", ["markdown", "doctags"])
def test_the_truth_scores_full_marks(form):
    """Also a test of the document that becomes of Markdown and of DocTags."""
    task = pages_task(10, reading=Reading(form))
    lines = map(json.loads, (SAMPLE / "pages.jsonl").read_text(encoding="utf-8").splitlines())
    for sample, line in zip(task.samples, lines, strict=True):
        answers = [Scored(one, sample.targets, 0.0, sample.fields) for one in (line[form], "")]
        whole, blank = (
            {"text": [task.metric.score(one.answer, (), one.fields)]} | task.metric.parts([one])
            for one in answers
        )
        assert {score for each in whole.values() for score in each} == {1.0}, (sample.id, whole)
        assert {score for each in blank.values() for score in each} == {0.0}, (sample.id, blank)


def test_pages_from_command_to_report(tmp_path):
    out = tmp_path / "run"
    arguments = "--tasks", "pages", "--limit", 3, "--max-new-tokens", 200, "--controls", "--output", out
    assert run(*arguments) == 0
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert set(results["parts"]) == {"order", "teds", "teds_structure"} and results["parts"]["teds"]["n"] == 1
    low, high = results["parts"]["order"]["interval"]
    assert 0 <= low <= results["parts"]["order"]["score"] <= high <= 1
    assert sum(results["stop_reasons"].values()) >= 3 and set(results["controls"]) == {"blind"}
    assert "teds_structure" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    [
        None,
        "{",
        '{"image": "a.png"}',
        '{"image": "missing.png", "pieces": []}',
        '{"image": "a.png", "pieces": [{"kind": "table", "html": "<tr><td rowspan=x></td></tr>"}]}',
    ],
)
def test_a_folder_of_something_else_gets_a_sentence(tmp_path, capsys, line):
    Image.new("L", (40, 40)).save(tmp_path / "a.png")
    if line is not None:
        (tmp_path / "pages.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(DatasetError):
        pages_task(10, folder=tmp_path)
    assert run("--tasks", "pages", "--data", tmp_path) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
