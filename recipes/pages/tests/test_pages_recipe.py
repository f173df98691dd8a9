"""Made pages: the same seed gives the same pages, their truth fits them, the ten that are kept are whole."""

import json
import random
from pathlib import Path

import pytest
from PIL import Image

LIBRARY = pytest.importorskip("latex2mathml")

from recipes.pages import words  # noqa: E402
from recipes.pages.layouts import KINDS, Page, html  # noqa: E402
from recipes.pages.make import main  # noqa: E402
from recipes.pages.tables import random_table  # noqa: E402

SAMPLE = Path(__file__).resolve().parent.parent / "sample"
CHROMIUM = Path("/usr/bin/chromium")


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_page(kind):
    first, again, other = (Page(random.Random(seed), kind) for seed in (1, 1, 2))
    assert html(first) == html(again) != html(other)
    assert first.pieces == again.pieces and len(first.pieces) > 4


def test_tables_cover_their_grid_once():
    for seed in range(200):
        table = random_table(random.Random(seed))
        rows = table.otsl().split("<nl>")[:-1]
        widths = {row.count("<") for row in rows}
        cells = sum(cell.rows * cell.columns for row in table.rows for cell in row)
        assert len(widths) == 1 and widths.pop() * len(rows) == cells, seed


def test_formulas_are_mathml():
    """Every form of formula has markup, which the browser draws."""
    from latex2mathml.converter import convert

    made = {words.formula(random.Random(seed)) for seed in range(100)}
    assert len(made) > 50 and all(convert(one).startswith("<math") for one in made)


def check_pages(folder, count):
    """Every page of a folder: its image, its kind, and boxes of pieces that lie on it and in order."""
    lines = [json.loads(line) for line in (folder / "pages.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines] == (list(KINDS) * count)[:count]
    for line in lines:
        with Image.open(folder / line["image"]) as image:
            assert list(image.size) == line["size"]
        width, height = line["size"]
        for piece in line["pieces"]:
            left, top, right, bottom = piece["box"]
            assert 0 <= left < right <= width and 0 <= top < bottom <= height, (line["image"], piece)
            assert piece["text"] in line["markdown"] and piece["text"] in line["doctags"]
        assert not any(piece["kind"] == "heading" for piece in line["pieces"][-1:])
    return lines


def test_the_ten_that_are_kept():
    lines = check_pages(SAMPLE, 10)
    assert any(line["scanned"] for line in lines) and not all(line["scanned"] for line in lines)
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) < 600_000


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
def test_pages_are_drawn_again_as_they_were(tmp_path):
    pytest.importorskip("playwright")
    made = [tmp_path / name for name in ("first", "again")]
    for out in made:
        main(["--out", str(out), "--count", "2", "--seed", "5", "--scale", "1", "--chromium", str(CHROMIUM)])
    check_pages(made[0], 2)
    first, again = ({path.name: path.read_bytes() for path in out.iterdir()} for out in made)
    assert first == again


def test_without_a_browser_there_is_a_sentence(tmp_path, capsys):
    pytest.importorskip("playwright")
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path), "--count", "1", "--chromium", str(tmp_path / "missing")])
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err.splitlines()[-1]
