"""The contact sheet, and `generate.py --show-attention` as a person meets it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inference.attribution.drawing import _NOTES, MOST_WORDS, _reading, draw_maps, overlay
from inference.attribution.maps import AttentionMaps, OcclusionMaps, Region
from inference.attribution.show import write_sheet
from inference.attribution.words import Word
from tests.processors import draw_image

ASK = ("-q", "how many?", "--max-new-tokens", 6)


def attention(images: list[Image.Image], words: int) -> tuple[AttentionMaps, list[Word]]:
    """Random maps of a made-up answer, a token a word."""
    random = np.random.default_rng(0)
    maps = [random.random((words, 4, 6), dtype=np.float32) for _ in images]
    found = AttentionMaps(images, list(range(words)), maps, "all layers, all heads")
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


def test_what_a_sheet_says_of_itself_is_said_to_its_end():
    """Also below one narrow card: broken into lines, not cut."""
    (found, named), least = attention([draw_image(40, 30)], 1), 0
    for setting in ("all layers", "layers 1, 2, 3, 4, 5, 6, 7 and 8, heads 0, 1 and 2 of " * 4):
        found = replace(found, setting=setting)
        said = _reading(found, 600)
        assert " ".join(said) == f"{' '.join(setting.split())} {_NOTES[AttentionMaps]}"
        height = draw_maps(found, named).height
        assert height > least
        least = height


def test_every_word_has_its_card_up_to_a_limit():
    one = attention([draw_image(20, 20)], MOST_WORDS + 30)
    other = attention([draw_image(20, 20)], MOST_WORDS)
    assert draw_maps(*one).size == draw_maps(*other).size
    with pytest.raises(ValueError, match="at least one"):
        draw_maps(one[0], [])


def test_small_falls_do_not_glow():
    """A word that falls by 1 % at most stays dark; one that falls by half does not."""
    regions = [Region(0, 0, 0, 1, 1), Region(0, 0, 1, 1, 2)]
    hidden = np.log([[0.98, 0.5], [0.99, 0.99]])
    found = OcclusionMaps(
        [Image.new("RGB", (80, 40), "black")], [0, 1], [(1, 2)], regions, np.log([0.99, 0.99]), hidden, ""
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
    assert cli(photo, *ASK[:-1], 1, "--show-attention", out)[0] == 0
    assert out.read_bytes() != first
    assert "is none of these maps" in complaint(photo, *ASK, "--show-attention", photo)
    (tmp_path / "text.png").write_text("mine")
    assert "is none of these maps" in complaint(photo, *ASK, "--show-attention", tmp_path / "text.png")
    assert photo.read_bytes() == kept and (tmp_path / "text.png").read_text() == "mine"


SHOW = ("--show-attention", "where.png")
BAD = [
    (("--show-attention", "no/where.png"), "expected a folder that exists, got 'no'"),
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
    monkeypatch.setattr("inference.attribution.show.answer_words", lambda *_: [])
    status, _, err = cli(photo, *ASK, "--show-attention", tmp_path / "where.png")
    assert status == 2 and "has no word to draw" in err and err.count("\n") == 1


def test_a_folder_that_takes_no_file_is_named():
    with pytest.raises(OSError, match=r"^\[Errno 2\] No such file or directory: '/proc/where.png'$"):
        write_sheet(draw_image(4, 4), Path("/proc/where.png"))


def test_a_full_disk_leaves_what_was_there(cli, photo, tmp_path, monkeypatch):
    out = tmp_path / "where.png"
    assert cli(photo, *ASK, "--show-attention", out)[0] == 0
    kept = out.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device", str(out))

    monkeypatch.setattr("os.replace", full)
    status, _, err = cli(photo, *ASK[:-1], 1, "--show-attention", out)
    assert status == 2 and "No space left" in err
    assert out.read_bytes() == kept and [path.name for path in tmp_path.iterdir()] == ["where.png"]
