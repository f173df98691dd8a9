"""Boxes of answers: what generate.py asks, prints, writes as JSON and draws."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import generate
from data.boxes import COORDINATES, Box, Point, form_of
from data.processor import Processor
from generation.options import GenerationOptions
from inference import answer
from inference.attribution import is_sheet
from inference.boxes import draw_things
from inference.checkpoint import open_checkpoint
from inference.command import BOX_FORMATS
from inference.coordinates import OPEN_NOTE
from tests import lfm2_checkpoints, qwen_checkpoints
from tests.servers import message
from web.guard import ApiLimits
from web.media import Media, prompt_of
from web.protocol import check_request

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "checkpoints" / "ocelli-shapes"
IMAGE = ROOT / "assets" / "example.png"
SIZE = Image.open(IMAGE).size
RED = Box("red circle", (SIZE[0] * 0.1, SIZE[1] * 0.2, SIZE[0] * 0.5, SIZE[1] * 0.6))
STAR = Point("star", (SIZE[0] * 0.75, SIZE[1] * 0.25))
QWEN = COORDINATES["qwen3-vl"]


@pytest.fixture
def locating(tmp_path, monkeypatch):
    """A model that says in which form it writes boxes, and whose answers we choose."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    own = {"form": "qwen3-vl", "detect": "Where is the {thing}?", "describe": "Name all with boxes."}
    path.write_text(json.dumps(config | {"coordinates": own}))
    answers: list[str] = []
    monkeypatch.setattr(answer, "read_answer", lambda *_: ("", answers.pop(0)))
    return str(folder), answers


def run(*arguments: str) -> int:
    return generate.main([*arguments, "--compile", "off", "--max-new-tokens", "2"])


def test_json_holds_pixels_of_the_image(locating, capsys):
    model, answers = locating
    answers += [QWEN.write([RED], SIZE), QWEN.write([STAR], SIZE), "a broken " + '{"bbox_2d": [1, 2', "2"]
    asked = ["--detect", "red circle", "--point", "the star", "--detect", "a hat", "--describe"]
    assert run(str(IMAGE), "--model", model, *asked, "--json") == 0
    boxes, points, broken, everything = map(json.loads, capsys.readouterr().out.splitlines())
    assert boxes["question"] == "Where is the red circle?"
    assert "hat" in points["question"]  # boxes come first, whatever the order
    assert [one["label"] for one in boxes["boxes"]] == ["red circle"]
    assert np.allclose(boxes["boxes"][0]["box"], RED.box, atol=max(SIZE) / 1000)
    assert np.allclose(points["points"][0]["point"], STAR.point, atol=max(SIZE) / 1000)
    assert broken["malformed"] and not broken["boxes"] and not broken["points"]
    assert everything["question"] == "Name all with boxes." and not everything["malformed"]


@pytest.mark.slow
def test_a_plain_question_says_pixels_to_people_and_programs(cli, as_json, monkeypatch, tmp_path):
    """What the embedded model writes in thousandths: in a run, in a chat, and in a batch."""
    wide = tmp_path / "wide.png"
    Image.open(IMAGE).resize((1200, 300)).save(wide)
    where, plain = ("Where is the star?", "What colour is the star?"), {"model": MODEL}
    raw = answer_in_thousandths(wide, where[0])
    (star,) = QWEN.read(raw, (1200, 300)).boxes
    line = "star: box " + " ".join(f"{number:.0f}" for number in star.box)
    assert cli(wide, "-q", where[0], **plain)[1] == f"{line}\n"
    (made,) = as_json(wide, "-q", where[0], **plain)
    (box,), (said,) = made["boxes"], json.loads(made["answers"][0])
    assert said == {"bbox_2d": [round(one) for one in star.box], "label": "star"}
    assert box["form"] == "qwen3-vl" and tuple(box["raw"]) == star.raw
    assert np.allclose(box["box"], star.box, atol=0.01)

    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(where)))
    status, out, err = cli("chat", wide, **plain)
    assert status == 0 and out.splitlines()[0] == line, err

    asked, results = tmp_path / "asked.jsonl", tmp_path / "results.jsonl"
    asked.write_text("".join(json.dumps({"image": "wide.png", "question": one}) + "\n" for one in where))
    assert cli("batch", asked, "--out", results, **plain)[0] == 0
    located, coloured = map(json.loads, results.read_text().splitlines())
    assert located["answers"] == made["answers"] and located["boxes"] == made["boxes"]
    assert not coloured["boxes"] and coloured["answers"] == ["blue"]


def answer_in_thousandths(image: Path, question: str) -> str:
    opened = open_checkpoint(MODEL, device="cpu")
    return answer.ask(opened, [image], question, GenerationOptions()).finish()["answers"][0]


def test_json_of_a_schema_stays_json_with_pixels(cli, tmp_path):
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4}
    box = {"type": "object", "properties": {"bbox_2d": numbers, "label": {"type": "string"}}}
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "array", "items": box | {"required": ["bbox_2d", "label"]}}))
    wide = tmp_path / "wide.png"
    Image.open(IMAGE).resize((1200, 300)).save(wide)
    status, out, err = cli(wide, "-q", "Where is the star?", "--schema", schema, model=MODEL)
    (star,) = QWEN.read(answer_in_thousandths(wide, "Where is the star?"), (1200, 300)).boxes
    assert status == 0, err
    assert json.loads(out)[0] == {"bbox_2d": [round(one) for one in star.box], "label": "star"}


def test_several_images_of_one_size_have_one_pixel_and_of_different_sizes_none(cli, tmp_path):
    """Whose thousandths they are is not known."""
    small = tmp_path / "small.png"
    Image.open(IMAGE).resize((200, 200)).save(small)
    same, different = (
        cli(other, IMAGE, "-q", "Where is the star?", model=MODEL)[1] for other in (IMAGE, small)
    )
    assert same.startswith("star: box ") and different.startswith("[{")
    assert different.rstrip().endswith(OPEN_NOTE)


def test_text_for_a_person_and_a_drawing(locating, capsys, tmp_path):
    model, answers = locating
    answers += [QWEN.write([RED], SIZE), "[]"]
    drawn = tmp_path / "boxes.png"
    asked = ["--detect", "red circle", "--detect", "hat", "--show-boxes", str(drawn)]
    assert run(str(IMAGE), "--model", model, *asked) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("red circle: box ") for line in printed)
    assert any("hat" in line and "none" in line for line in printed)
    assert is_sheet(drawn)  # so that a second run may overwrite it
    changed = np.asarray(Image.open(drawn), dtype=int) != np.asarray(
        Image.open(IMAGE).convert("RGB"), dtype=int
    )
    assert changed.any() and not changed[int(SIZE[1] * 0.7) :].any()


@pytest.mark.parametrize("box", [(0, 0, 300, 200), (290, 190, 300, 200), (0, 0, 0, 0), (10, 90, 60, 120)])
@pytest.mark.parametrize("size", [(300, 200), (2000, 40), (12, 12)])
def test_whatever_is_drawn_stays_in_the_image(box, size):
    image = Image.new("RGB", size, "grey")
    shown = Box(
        "a red circle with a very long name, and a hat: 圆",
        tuple(min(a, size[at % 2]) for at, a in enumerate(box)),
    )
    drawn = draw_things(image, [shown], [Point("", (size[0], size[1])), Point("dot", (0, 0))])
    assert drawn.size == image.size and np.asarray(drawn).std() > 0
    assert np.asarray(image).std() == 0  # a copy was drawn on


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--point", "star", "--box-format", "doctags"], "boxes"),
        (["--detect", "star", "--no-image"], "--no-image"),
        (["--detect", "star", "--num-answers", "2"], "--num-answers"),
        (["--detect", " "], "--detect"),
        (["--detect", "star", "--show-boxes", "README.md"], ".png"),
        (["--detect", "star", "--show-boxes", str(IMAGE)], "example.png"),  # meant as the image
        (["--box-format", "qwen4"], "qwen3-vl"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments, named, capsys):
    try:
        status = run(*([] if "--no-image" in arguments else [str(IMAGE)]), *arguments)
    except SystemExit as stopped:
        status = stopped.code
    said = capsys.readouterr().err
    assert status == 2 and named in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--detect", "star"], "--box-format"),
        (["--describe", "--box-format", "lfm2.5-vl"], "-q"),  # no prompt of its own for this
    ],
)
def test_a_checkpoint_that_names_no_form_leaves_it_to_the_command(model_folder, arguments, named, capsys):
    assert run(str(IMAGE), "--model", str(model_folder), *arguments) == 2
    said = capsys.readouterr().err
    assert named in said and "Traceback" not in said


def test_the_form_that_a_checkpoint_names():
    assert form_of(None) is None and set(BOX_FORMATS) == set(COORDINATES)
    assert form_of("doctags") == COORDINATES["doctags"]
    own = form_of({"form": "qwen3-vl", "detect": "Find {thing}!"})
    assert own.question("detect", "it") == "Find it!" and own.point == QWEN.point
    assert form_of({"form": "qwen3-vl"}, "doctags").name == "doctags"
    for wrong in ("qwen9", 3, {"form": 3}, {"form": "doctags", "point": 3}, ["doctags"]):
        with pytest.raises(ValueError):
            form_of(wrong)


# -------------------------------------------------------------------------- families with their own form
LARGE, CAR = (1000, 600), (250, 150, 500, 450)  # the models see fewer pixels of it


@pytest.fixture(scope="module", params=[*qwen_checkpoints.QWEN, "lfm2_vl"])
def of_family(request, tmp_path_factory) -> tuple[str, Path, Callable[..., str]]:
    """A model, an image that is resized for it, and what such a model writes of boxes and points in it: in
    thousandths, in pixels of what it sees, or in shares of the image."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    if kind == "lfm2_vl":
        lfm2_checkpoints.save_hf(folder / "model")
    else:
        qwen_checkpoints.save_hf(kind, folder / "model")
    Image.new("RGB", LARGE, "grey").save(folder / "street.png")
    whole = Processor.from_pretrained(folder / "model").images.plan(*LARGE).parts.shape[:1:-1]
    assert whole != LARGE

    def written(*places: tuple[float, ...], seen: tuple[int, int] = whole) -> str:
        lines, steps = [], {"qwen2_5_vl": seen, "lfm2_vl": (1, 1)}.get(kind, (1000, 1000))
        for place in places:
            shares = [one * steps[at % 2] / LARGE[at % 2] for at, one in enumerate(place)]
            numbers = shares if kind == "lfm2_vl" else [*map(round, shares)]
            key = "bbox" if kind == "lfm2_vl" else "bbox_2d" if len(numbers) == 4 else "point_2d"
            lines.append({"label": "red car", key: numbers})
        return "```json\n[\n\t" + ",\n\t".join(map(json.dumps, lines)) + "\n]\n```"

    return str(folder / "model"), folder / "street.png", written


def near(found: list[float], place: tuple[float, ...]) -> bool:
    """Within half a step of either form: the models see at least 300 pixels of each side."""
    return np.allclose(found, place, atol=max(LARGE) / 300 / 2)


def test_a_family_is_asked_in_its_own_words_and_answers_in_pixels_of_the_image(
    of_family, monkeypatch, capsys, tmp_path
):
    model, image, written = of_family
    whole = written(CAR, (0, 0, *LARGE))
    said = [whole, whole[: whole.index("}") + 30], written((400, 300)), "```json\n[]\n```"]
    monkeypatch.setattr(answer, "read_answer", lambda *_: ("", said.pop(0)))
    drawn = tmp_path / "boxes.png"
    asked = ["--detect", "red car", "--detect", "hat"]
    more = [] if "bbox_2d" not in whole else ["--point", "red car", "--describe"]  # LFM2.5-VL has boxes alone
    assert run(str(image), "--model", model, *asked, *more, "--json", "--show-boxes", str(drawn)) == 0
    boxes, cut, *others = made = [*map(json.loads, capsys.readouterr().out.splitlines())]
    assert all("JSON" in one["question"] for one in made)
    car, everything = (one["box"] for one in boxes["boxes"])
    assert near(car, CAR) and near(everything, (0, 0, *LARGE))
    assert len(cut["boxes"]) == len(cut["malformed"]) == 1  # what is whole before it counts
    if more:
        points, nothing = others
        assert near(points["points"][0]["point"], (400, 300)) and not points["malformed"]
        assert not nothing["boxes"] and not nothing["malformed"]
    changed = np.asarray(Image.open(drawn).convert("RGB"), dtype=int) != 128
    assert changed.shape[:2] == LARGE[::-1] and changed[150, 300].any() and not changed[200, 300].any()


@pytest.mark.slow(but=2)
def test_a_family_says_pixels_in_batches_and_to_programs(of_family, tmp_path):
    """With an answer that a schema leaves no choice about."""
    model, image, written = of_family
    thing = json.loads(written(CAR).strip("`json\n"))
    key = [*thing[0]][-1]
    schema = {"const": thing}
    (tmp_path / "asked.jsonl").write_text(
        json.dumps({"image": str(image), "question": "Where?", "schema": schema, "max_new_tokens": 200})
    )
    out = tmp_path / "out.jsonl"
    assert run("batch", "--model", model, str(tmp_path / "asked.jsonl"), "--out", str(out)) == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert near(line["boxes"][0]["box"], CAR)
    assert near(json.loads(line["answers"][0])[0][key], CAR)

    checkpoint, shown = open_checkpoint(model, device="cpu"), json.dumps([{key: CAR}])
    sent = [message("Where?", image), {"role": "assistant", "content": shown}]
    asked = check_request({"model": "x", "messages": [*sent, {"role": "user", "content": "And?"}]})
    media = Media(ApiLimits())
    pictures = asyncio.run(media.read(asked, "", id))
    row, _ = prompt_of(asked, media, pictures, GenerationOptions(), checkpoint)
    assert str(thing[0][key]) in checkpoint.processor.decode(row.input_ids)  # its own numbers again
