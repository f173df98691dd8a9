"""Where it looked: attention against transformers', maps against images, and what is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from generation.options import GenerationOptions
from inference import draft
from inference.attribution import draw
from inference.attribution.attention import (
    AttentionMaps,
    Word,
    answer_words,
    attention_rows,
    attention_steps,
    drained,
    place_on_image,
)
from inference.checkpoint import RequestError, open_checkpoint
from inference.conversation import Conversation
from models import VisionLanguageModel
from tests import tiny
from tests.maps import attention_maps
from tests.processors import draw_image, embedded, processor

ANSWER = [40, 41, 9, 42]
SHORT = GenerationOptions(max_new_tokens=2)
CASES = ("smolvlm-2-tiles", "smolvlm-one-kv-head", "idefics3-own-head-dim", "idefics3-llama3-rope")


@pytest.fixture(scope="module")
def checkpoint(model_folder):
    return open_checkpoint(model_folder, device="cpu")


# ------------------------------------------------------------------------------------------------ attention
@pytest.mark.parametrize("name", CASES)
def test_weights_are_transformers_eager_ones(name, tmp_path):
    theirs, inputs = tiny.build(name)
    ours = VisionLanguageModel.from_pretrained(tiny.save(theirs, tmp_path))
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        layers = theirs(**inputs, output_attentions=True).attentions  # (B, H, T, T) each
        x = ours.embed(**{key: value for key, value in inputs.items() if key != "attention_mask"})
    length = x.shape[1]
    queries = [length - 1, 3, length // 2]
    expected = torch.stack(layers)[:, 0, :, queries]  # (L, H, Q, T)
    got = drained(attention_rows(ours.language_model, x, queries))
    assert (got - expected.mean((0, 1))).abs().max() <= 1e-5


def test_maps_are_the_attention_of_image_tokens(model_folder, checkpoint):
    """Two split images, against transformers on what the processor gives for prompt and answer."""
    from transformers import AutoModelForImageTextToText

    images = [draw_image(40, 30), draw_image(20, 60, seed=1)]
    found = attention_maps(checkpoint, images, "how many?", ANSWER)
    theirs = AutoModelForImageTextToText.from_pretrained(model_folder, attn_implementation="eager").eval()
    inputs = checkpoint.processor.ask(images, "how many?")
    prompt = inputs["input_ids"].shape[1]
    ids = torch.cat((inputs["input_ids"], torch.tensor([ANSWER])), 1)
    pixels = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
    with torch.no_grad():
        layers = theirs(ids, **pixels, output_attentions=True).attentions
    rows = torch.stack(layers)[:, 0, :, prompt - 1 : -1].mean((0, 1))  # (A, T)
    rows = rows[:, ids[0] == checkpoint.model.config.image_token_id]  # (A, n · S)
    counts = [len(checkpoint.processor.cut(image).parts) * 4 for image in images]
    for own, image, columns in zip(found.maps, images, rows.split(counts, dim=1), strict=True):
        rows, cols = checkpoint.processor.cut(image).grid
        assert own.shape == (len(ANSWER), rows * 2, cols * 2)
        assert np.allclose(own.sum((1, 2)), columns.sum(1), atol=1e-5)
        # The upper left cell: the first token of the first tile, and its part of the whole image's first.
        corner = columns[:, 0] + columns[:, -4] / (rows * cols)
        assert np.allclose(own[:, 0, 0], corner, atol=1e-6)


# ------------------------------------------------------------------------------------------------- geometry
SIZES = [(40, 30), (30, 80)]
IMAGES = {
    "split": lambda: embedded(split=True),
    "unsplit": embedded,
    "nanovlm-current": lambda: processor("nanovlm-current"),
    "nanovlm-v0.1": lambda: processor("nanovlm-v0.1"),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", IMAGES)
def test_a_token_lies_where_the_processor_took_it_from(kind, size):
    """White in one cell of a black image is brightest in one token of one tile; all weight on that token
    comes back to that cell, and all weight on the whole image's brightest one covers it."""
    own = IMAGES[kind]()
    side, whole_first = math.isqrt(own.images.tile_positions), kind.startswith("nanovlm")
    large = size[0] * 8, size[1] * 8  # so that a cell has pixels enough
    black = own.cut(Image.new("RGB", large))
    tiles = max(1, black.grid[0]) * max(1, black.grid[1])
    rows, columns = (max(1, cells) * side for cells in black.grid)
    has_whole = len(black.parts) > tiles

    def placed(token: int) -> torch.Tensor:
        weights = torch.zeros(1, len(black.parts) * side * side)
        weights[0, token] = 1
        return place_on_image(weights, black, own.images.cells(black))[0]

    for row, column in {(0, 0), (rows - 1, 0), (rows // 2, columns - 1), (rows // 3, columns // 2)}:
        image = Image.new("RGB", large)
        box = [column * large[0] / columns, row * large[1] / rows]
        box += [(column + 1) * large[0] / columns, (row + 1) * large[1] / rows]
        image.paste("white", tuple(map(round, box)))
        light = own.cut(image).parts.to("cpu").mean(1)  # (n, M, M)
        light = light.unflatten(1, (side, -1)).unflatten(3, (side, -1)).mean((2, 4))  # (n, side, side)
        first = int(has_whole and whole_first)
        expected = torch.zeros(rows, columns)
        expected[row, column] = 1
        token = first * side * side + int(light[first : first + tiles].argmax())
        assert torch.equal(placed(token), expected)
        if has_whole:
            whole = 0 if whole_first else tiles
            spread = placed(whole * side * side + int(light[whole].argmax()))
            assert spread[row, column] == spread.max() and spread.sum() == pytest.approx(1)
            assert (spread > 0).sum() == tiles


def asked_in_a_conversation(checkpoint, image) -> None:
    Conversation(checkpoint).send("how many?", [image], SHORT).finish()


def asked_with_a_draft(checkpoint, image) -> None:
    next(draft.ask_each(checkpoint, [image], ["how many?"], SHORT)).finish()


@pytest.mark.parametrize("door", [asked_in_a_conversation, asked_with_a_draft])
def test_what_the_answer_was_made_from_is_not_encoded_again(model_folder, monkeypatch, door):
    """And the maps are the same as of a model that was asked nothing before."""
    image = draw_image(40, 30)
    expected = attention_maps(open_checkpoint(model_folder, device="cpu"), [image], "how many?", ANSWER)
    checkpoint = open_checkpoint(model_folder, device="cpu")
    door(checkpoint, image)
    seen = []
    encode = checkpoint.model.encode_images
    monkeypatch.setattr(checkpoint.model, "encode_images", lambda t, *a: seen.append(len(t)) or encode(t, *a))
    found = attention_maps(checkpoint, [image], "how many?", ANSWER)
    assert not seen and np.allclose(found.maps[0], expected.maps[0], atol=1e-6)


def test_nobody_waits_for_more_than_a_tile_or_a_block(model_folder, monkeypatch):
    """Others are answered between two steps: what a step does at most is what they wait for."""
    checkpoint, work = open_checkpoint(model_folder, device="cpu"), []
    model = checkpoint.model
    encode = model.encode_images
    monkeypatch.setattr(model, "encode_images", lambda t, *a: work.append(len(t)) or encode(t, *a))
    for block in model.language_model.layers:
        block.register_forward_hook(lambda *_: work.append(1))
    steps, most = attention_steps(checkpoint, [draw_image(40, 30)], "how many?", ANSWER), 0
    for _ in steps:
        most = max(most, sum(work))
        work.clear()
    assert most == 1 >= sum(work)


@pytest.mark.parametrize(
    "images, answer, field",
    [
        ([], ANSWER, "image"),
        ([draw_image(8, 8)], [], "answer_ids"),
        ([draw_image(8, 8)], [1, 10**6], "answer_ids"),
        ([draw_image(8, 8)], [1] * 600, "context"),
    ],
)
def test_what_cannot_be_looked_at(checkpoint, images, answer, field):
    with pytest.raises(RequestError, match=field):
        attention_maps(checkpoint, images, "how many?", answer)


# ----------------------------------------------------------------------------------------------------- words
def test_words(checkpoint):
    tokenizer = checkpoint.processor.tokenizer
    ids = tokenizer.encode(" two red circles, ça", add_special_tokens=False)
    words = answer_words(checkpoint, [*ids, *checkpoint.stop_token_ids[:1], *ids])
    assert [word.text for word in words] == ["two", "red", "circles,", "ça"]
    places = [place for word in words for place in word.tokens]
    assert places == sorted(places) and set(places) <= set(range(len(ids)))
    for word in words:
        assert word.text in tokenizer.decode([ids[place] for place in word.tokens])
    assert len(words[-1].tokens) >= 2  # ç is two bytes, none of them a character
    assert answer_words(checkpoint, checkpoint.stop_token_ids[:1]) == []


# ------------------------------------------------------------------------------------------------- the sheet
@pytest.mark.parametrize(
    "sizes, words, text",
    [([(300, 2), (30, 90)], 3, "日本"), ([(1, 90)], 1, "\u200b"), ([(9, 9)] * 15, 2, "x" * 300)],
)
def test_a_sheet_has_room_for_all(monkeypatch, sizes, words, text):
    """Of so many words at most."""
    images = [draw_image(*size) for size in sizes]
    maps = [np.random.default_rng(0).random((words, 4, 6), dtype=np.float32) for _ in images]
    named = [Word(text, (number,)) for number in range(words)]
    monkeypatch.setattr(draw, "MAX_WORDS", 2)
    sheet = draw.draw_maps(AttentionMaps(images, maps), named, "how many? " * 40)
    assert sheet.mode == "RGB" and 900 <= sheet.width <= 2000 and sheet.height < 12_000
    pixels = np.asarray(sheet)
    assert pixels[-20:].min() > 200 and pixels[:, -20:].min() > 200  # nothing hangs over the edges


def test_the_hot_cell_glows():
    """Where there is heat the image is bright and yellow, elsewhere it is dark."""
    heat = np.zeros((4, 6))
    heat[1, 4] = 1
    image = np.asarray(draw.overlay(Image.new("RGB", (120, 80), "grey"), heat), dtype=int)
    red, _, blue = image[30, 90]  # the middle of the cell
    brightest = np.unravel_index(image.sum(2).argmax(), (80, 120))
    assert 20 <= brightest[0] < 40 and 80 <= brightest[1] < 100
    assert red > blue + 40 and image[70, 10].max() < 110


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("how", [("--dtype", "int8"), ("--dtype", "bfloat16")])
def test_the_answer_stays_and_the_sheet_is_written(cli, photo, tmp_path, monkeypatch, how):
    """A full disk leaves the earlier sheet as it was."""
    out, ask = tmp_path / "where.png", ("-q", "how many?", "--max-new-tokens", 4)
    _, plain, _ = cli(photo, photo, *ask, *how)
    status, answer, err = cli("where", photo, photo, *ask, "--out", out, *how)
    assert (status, answer) == (0, plain) and str(out) in err and err.count("\n") == 1
    with Image.open(out) as sheet:
        sheet.load()
        assert sheet.format == "PNG" and sheet.width > 800
    kept = out.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device", str(out))

    monkeypatch.setattr("os.replace", full)
    assert cli("where", photo, *ask, "--out", out)[0] == 2
    assert out.read_bytes() == kept and list(tmp_path.iterdir()) == [out]
