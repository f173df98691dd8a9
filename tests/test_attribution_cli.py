"""The contact sheet, and `generate.py --show-attention` as a person meets it."""

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
    random = np.random.default_rng(0)
    maps = [random.random((words, 4, 6), dtype=np.float32) for _ in images]
    found = AttentionMaps(images, maps, "all layers, all heads")
    return found, [Word(f"word{number}", (number,)) for number in range(words)]


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


@pytest.mark.parametrize("sizes", [[(40, 30)], [(300, 2)], [(1, 90)], [(40, 30), (30, 90)], [(9, 9)] * 15])
@pytest.mark.parametrize("words", [1, 2, 7, 40])
def test_a_sheet_has_room_for_all(sizes, words):
    found, named = attention([draw_image(*size) for size in sizes], words)
    sheet = draw_maps(found, named, "how many? " * 40)
    assert sheet.mode == "RGB" and 900 <= sheet.width <= 2000 and sheet.height < 12_000
    assert np.asarray(sheet)[-20:].min() > 200  # nothing hangs over the edge


def test_every_word_has_its_card_up_to_a_limit():
    one = attention([draw_image(20, 20)], MAX_WORDS + 30)
    other = attention([draw_image(20, 20)], MAX_WORDS)
    assert draw_maps(*one).size == draw_maps(*other).size
    with pytest.raises(ValueError, match="at least one"):
        draw_maps(one[0], [])


def test_small_falls_do_not_glow():
    """A word that falls by 1 % at most stays dark; one that falls by half does not."""
    regions = [Region(0, 0, 0, 1, 1), Region(0, 0, 1, 1, 2)]
    hidden = np.log([[0.98, 0.5], [0.99, 0.99]])
    found = OcclusionMaps(
        [Image.new("RGB", (80, 40), "black")], [(1, 2)], regions, np.log([0.99, 0.99]), hidden, ""
    )
    dark, lit = (np.asarray(draw_maps(found, [Word("a", (token,))])) for token in (0, 1))
    changed = np.abs(dark.astype(int) - lit).max(2)
    assert dark.shape == lit.shape and changed[200:400, 500:640].max() > 100  # left half of the second card


@pytest.mark.parametrize("text", ["x" * 300, "été", "日本", "\u200b", "<b>"])
def test_any_word_can_be_written(text):
    found, _ = attention([draw_image(20, 20)], 1)
    draw_maps(found, [Word(text, (0,))], text)


# ---------------------------------------------------------------------------------------------- generate.py
@pytest.mark.parametrize("how", [(), ("--method", "attention", "--layers", "0,1", "--heads", 3)])
def test_attention(cli, photo, tmp_path, how):
    out = tmp_path / "where.png"
    _, plain, _ = cli(photo, *ASK)
    status, answer, err = cli(photo, *ASK, "--show-attention", out, *how)
    assert (status, answer) == (0, plain) and err == f"generate.py: {out}: where it looked, word by word\n"
    with Image.open(out) as sheet:
        sheet.load()
        assert sheet.format == "PNG" and sheet.width > 800
    assert [path.name for path in tmp_path.iterdir()] == ["where.png"]


def test_occlusion_of_two_images_as_json(as_json, photo, tmp_path):
    out = tmp_path / "where.png"
    how = ("--show-attention", out, "--method", "occlusion", "--window", 0.8)
    (made,) = as_json(photo, photo, *ASK, *how)
    (plain,) = as_json(photo, photo, *ASK)
    assert made["token_ids"] == plain["token_ids"] and Image.open(out).width > 800


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_in_few_bits(cli, photo, tmp_path, dtype):
    for method in ("attention", "occlusion"):
        how = ("--method", method, "--dtype", dtype, *(["--window", 0.9] if method == "occlusion" else []))
        status, _, err = cli(photo, *ASK, "--show-attention", tmp_path / "where.png", *how)
        assert status == 0, err


def test_a_sheet_is_written_again_and_nothing_else_is(cli, complaint, photo, tmp_path):
    out, kept = tmp_path / "where.png", photo.read_bytes()
    assert cli(photo, *ASK, "--show-attention", out)[0] == 0
    first = out.read_bytes()
    assert cli(photo, *ASK[:-1], 4, "--show-attention", out)[0] == 0
    assert out.read_bytes() != first
    assert "is none of these maps" in complaint(photo, *ASK, "--show-attention", photo)
    (tmp_path / "text.png").write_text("mine")
    assert "is none of these maps" in complaint(photo, *ASK, "--show-attention", tmp_path / "text.png")
    assert photo.read_bytes() == kept and (tmp_path / "text.png").read_text() == "mine"


SHOW = ("--show-attention", "where.png")
BAD = [
    (("--show-attention", "no/where.png"), "expected a folder that can be written to, got 'no'"),
    (("--show-attention", "where.jpg"), "ends in .png, got 'where.jpg'"),
    ((*SHOW, "--no-image"), "needs an image"),
    ((*SHOW, "--num-answers", 2), "draws one answer, got --num-answers 2"),
    ((*SHOW, "-q", "how many?", "-q", "why?"), "draws one question, got 2 of them"),
    ((*SHOW, "--batch", "x.jsonl", "--out", "y.jsonl"), "draws one question, got --batch"),
    ((*SHOW, "--chat"), "draws one question, got --chat"),
    ((*SHOW, "--layers", 2), "layers: expected some of 0 to 1, got 2"),
    ((*SHOW, "--heads", "0,9"), "heads: expected some of 0 to 3, got 0, 9"),
    ((*SHOW, "--heads", "all"), "expected numbers such as 0,3"),
    ((*SHOW, "--window", 0.5), "--window belongs to --method occlusion"),
    ((*SHOW, "--method", "occlusion", "--layers", 1), "--layers belongs to --method attention"),
    ((*SHOW, "--method", "occlusion", "--window", 2), "--window: expected a share from 0.02 to 1, got 2"),
    ((*SHOW, "--method", "gradient"), "invalid choice"),
    (("--method", "occlusion"), "--method belongs to --show-attention"),
]


@pytest.mark.parametrize("arguments, expected", BAD, ids=lambda value: str(value)[:50])
def test_bad_request(complaint, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in complaint(*arguments)
    assert not list(tmp_path.iterdir())


def test_an_answer_without_a_word(cli, photo, tmp_path, monkeypatch):
    monkeypatch.setattr("inference.attribution.draw.answer_words", lambda *_: [])
    status, _, err = cli(photo, *ASK, "--show-attention", tmp_path / "where.png")
    assert status == 2 and "has no word to draw" in err and err.count("\n") == 1


def test_a_full_disk_leaves_what_was_there(cli, photo, tmp_path, monkeypatch):
    out = tmp_path / "where.png"
    assert cli(photo, *ASK, "--show-attention", out)[0] == 0
    kept = out.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device", str(out))

    monkeypatch.setattr("os.replace", full)
    status, _, err = cli(photo, *ASK[:-1], 4, "--show-attention", out)
    assert status == 2 and "No space left" in err
    assert out.read_bytes() == kept and [path.name for path in tmp_path.iterdir()] == ["where.png"]
