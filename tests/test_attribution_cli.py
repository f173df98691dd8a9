"""The sheet of maps, and `generate.py --show-attention` as a person meets it."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from inference.attribution.attention import AttentionMaps
from inference.attribution.draw import MAX_WORDS, draw_maps, overlay
from inference.attribution.occlusion import OcclusionMaps, Region
from inference.attribution.teacher_forcing import Word
from tests.processors import draw_image

ASK = ("-q", "how many?", "--max-new-tokens", 6)


def attention(images: list[Image.Image], words: int) -> tuple[AttentionMaps, list[Word]]:
    """Random maps of a made-up answer, a token a word."""
    maps = [np.random.default_rng(0).random((words, 4, 6), dtype=np.float32) for _ in images]
    named = [Word(f"word{number}", (number,)) for number in range(words)]
    return AttentionMaps(images, maps, "all layers, all heads"), named


# ------------------------------------------------------------------------------------------------- the sheet
def test_the_hot_cell_glows():
    """Where there is heat the image is bright and yellow, elsewhere it is dark."""
    heat = np.zeros((4, 6))
    heat[1, 4] = 1
    image = np.asarray(overlay(Image.new("RGB", (120, 80), "grey"), heat), dtype=int)
    red, _, blue = image[30, 90]  # the middle of the cell
    brightest = np.unravel_index(image.sum(2).argmax(), (80, 120))
    assert 20 <= brightest[0] < 40 and 80 <= brightest[1] < 100
    assert red > blue + 40 and image[70, 10].max() < 110


@pytest.mark.parametrize(
    "sizes, words, text",
    [
        ([(40, 30)], 1, "été"),
        ([(300, 2)], 7, "日本"),
        ([(1, 90)], 1, "\u200b"),
        ([(40, 30), (30, 90)], 7, "x" * 300),
        ([(9, 9)] * 15, 2, "<b>"),
    ],
)
def test_a_sheet_has_room_for_all(sizes, words, text):
    found, named = attention([draw_image(*size) for size in sizes], words)
    named[0] = Word(text, (0,))
    sheet = draw_maps(found, named, "how many? " * 40)
    assert sheet.mode == "RGB" and 900 <= sheet.width <= 2000 and sheet.height < 12_000
    pixels = np.asarray(sheet)
    assert pixels[-20:].min() > 200 and pixels[:, -20:].min() > 200  # nothing hangs over the edges


def test_only_so_many_words_have_a_place():
    images = [draw_image(20, 20)] * 6
    at_most, more = (draw_maps(*attention(images, count)).size for count in (MAX_WORDS, MAX_WORDS + 5))
    assert at_most == more


def test_small_falls_do_not_glow():
    """A word that falls by 1 % at most stays dark; one that falls by half does not."""
    regions = [Region(0, 0, 0, 1, 1), Region(0, 0, 1, 1, 2)]
    occluded, base = np.log([[0.98, 0.5], [0.99, 0.99]]), np.log([0.99, 0.99])
    found = OcclusionMaps([Image.new("RGB", (80, 40), "black")], [(1, 2)], regions, base, occluded, "")
    dark, lit = (np.asarray(draw_maps(found, [Word("a", (token,))])) for token in (0, 1))
    changed = np.abs(dark.astype(int) - lit).max(2)
    assert dark.shape == lit.shape and changed[200:300, 500:640].max() > 100  # left half of the second image


# ---------------------------------------------------------------------------------------------- generate.py
@pytest.mark.parametrize(
    "how",
    [
        ("--layers", "0,1", "--heads", 3, "--dtype", "int8"),
        ("--method", "occlusion", "--window", 0.8, "--dtype", "bfloat16"),
    ],
)
def test_the_answer_stays_and_the_sheet_is_written(cli, photo, tmp_path, how):
    out = tmp_path / "where.png"
    _, plain, _ = cli(photo, photo, *ASK, *how[-2:])
    status, answer, err = cli(photo, photo, *ASK, "--show-attention", out, *how)
    assert (status, answer) == (0, plain) and str(out) in err and err.count("\n") == 1
    with Image.open(out) as sheet:
        sheet.load()
        assert sheet.format == "PNG" and sheet.width > 800
    assert list(tmp_path.iterdir()) == [out]


def test_a_sheet_is_overwritten_and_nothing_else_is(cli, complaint, photo, tmp_path, monkeypatch):
    out, kept = tmp_path / "where.png", photo.read_bytes()
    assert cli(photo, *ASK, "--show-attention", out)[0] == 0
    first = out.read_bytes()
    assert cli(photo, *ASK[:-1], 4, "--show-attention", out)[0] == 0
    second = out.read_bytes()
    assert first != second
    (tmp_path / "text.png").write_text("mine")
    for other in (photo, tmp_path / "text.png"):
        assert str(other) in complaint(photo, *ASK, "--show-attention", other)
    assert photo.read_bytes() == kept and (tmp_path / "text.png").read_text() == "mine"

    def full(*_):
        raise OSError(28, "No space left on device", str(out))

    monkeypatch.setattr("os.replace", full)
    status, _, err = cli(photo, *ASK, "--show-attention", out)
    assert status == 2 and "No space left" in err and out.read_bytes() == second
    assert {path.name for path in tmp_path.iterdir()} == {"where.png", "text.png"}


SHOW = ("--show-attention", "where.png")
BAD = [
    (("--show-attention", "no/where.png"), "'no'"),
    (("--show-attention", "where.jpg"), ".png"),
    ((*SHOW, "--no-image"), "--no-image"),
    ((*SHOW, "--num-answers", 2), "--num-answers"),
    ((*SHOW, "-q", "how many?", "-q", "why?"), "one question"),
    ((*SHOW, "--batch", "x.jsonl", "--out", "y.jsonl"), "--batch"),
    ((*SHOW, "--chat"), "--chat"),
    ((*SHOW, "--layers", 2), "layers"),
    ((*SHOW, "--heads", "0,9"), "heads"),
    ((*SHOW, "--heads", "all"), "--heads"),
    ((*SHOW, "--window", 0.5), "--window"),
    ((*SHOW, "--method", "occlusion", "--layers", 1), "--layers"),
    ((*SHOW, "--method", "occlusion", "--window", 2), "--window"),
    ((*SHOW, "--method", "gradient"), "--method"),
    (("--method", "occlusion"), "--show-attention"),
]


@pytest.mark.parametrize("arguments, field", BAD, ids=lambda value: str(value)[:50])
def test_bad_request(complaint, tmp_path, monkeypatch, arguments, field):
    monkeypatch.chdir(tmp_path)
    assert field in complaint(*arguments)
    assert not list(tmp_path.iterdir())


def test_an_answer_without_a_word(cli, photo, tmp_path, monkeypatch):
    monkeypatch.setattr("inference.attribution.draw.answer_words", lambda *_: [])
    status, _, err = cli(photo, *ASK, "--show-attention", tmp_path / "where.png")
    assert status == 2 and "word" in err and err.count("\n") == 1
