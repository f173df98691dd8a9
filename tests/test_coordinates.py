"""Boxes and points as text: what is written is read, and what is broken is never read as something else."""

from __future__ import annotations

import json
import random

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from data.boxes import COORDINATES, Box, Located, Point
from data.processor import Processor, coordinates_of
from families.qwen_images import QwenImages
from inference.coordinates import PixelText, rescaled
from tests import qwen_checkpoints


def numbers(thing: Box | Point) -> tuple[float, ...]:
    return thing.box if isinstance(thing, Box) else thing.point


def error_allowed(name: str, length: int, at: float) -> float:
    """Half a step of a form along a side of `length` pixels, at least half a pixel. Location tokens end one
    step before the far edge."""
    step = length / {"qwen3-vl": 1000, "doctags": 500, "lfm2.5-vl": 1000}.get(name, length)
    return max(step if name == "doctags" and at > length - step else step / 2, 0.5) + 1e-6


def random_things(random_: random.Random, size: tuple[int, int], boxes: bool) -> list[Box | Point]:
    (x1, x2), (y1, y2) = (sorted(random_.uniform(0, side) for _ in range(2)) for side in size)
    edges = random_.random() < 0.2
    if boxes:
        return [Box("a red star", (0, 0, *size) if edges else (x1, y1, x2, y2))]
    return [Point("a red star", size if edges else (x1, y1)), Point("a red star", (x2, y2))]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", COORDINATES)
def test_what_is_written_is_read(name):
    form, random_ = COORDINATES[name], random.Random(name)
    for _ in range(1500):
        width = int(2 ** random_.uniform(0, 13))
        size = width, max(1, min(8192, int(width * 2 ** random_.uniform(-5, 5))))
        things = random_things(random_, size, boxes=not form.point or random_.random() < 0.5)
        found = form.read(f"Here:\n```json\n{form.write(things, size)}\n```", size)
        assert not found.malformed
        assert [one.label for one in (*found.boxes, *found.points)] == [one.label for one in things]
        for one, wanted in zip((*found.boxes, *found.points), things, strict=True):
            assert one.raw  # the model's own numbers
            for at, (a, b) in enumerate(zip(numbers(one), numbers(wanted), strict=True)):
                assert abs(a - b) <= error_allowed(name, size[at % 2], b), (size, wanted)


BROKEN = {
    "qwen3-vl": [
        '{"bbox_2d": [60, 20, 10, 80], "label": "corners swapped"}',
        '{"bbox_2d": [10, 20, 60, 1080], "label": "outside"}',
        '{"bbox_2d": [-1, 20, 60, 80], "label": "outside"}',
        '{"bbox_2d": [10, 20, NaN, 80], "label": "no number"}',
        '{"bbox_2d": [10, 20, 60], "label": "three"}',
        '{"bbox_2d": ["10", 20, 60, 80], "label": "a text"}',
        '{"bbox_2d": [true, 20, 60, 80], "label": "a truth"}',
        '{"bbox_2d": null, "label": "none"}',
        '{"bbox_2d": [10, 20, 60, 80], "label": 3}',
        '{"bbox_2d": [10, 20, 60, 80} "label": "broken"}',
        '{"bbox_2d": [1' + "0" * 400 + ", 20, 60, 80]}",
        '{"point_2d": [10, 2000], "label": "outside"}',
    ],
    "lfm2.5-vl": [
        '{"label": "outside", "bbox": [0.1, 0.2, 0.6, 1.01]}',
        '{"label": "of another form", "bbox": [10, 20, 60, 80]}',
    ],
    "doctags": [
        "<text><loc_60><loc_21><loc_47><loc_83>swapped</text>",
        "<text><loc_8><loc_21><loc_501><loc_83>outside</text>",
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_no_box_and_takes_none_with_it(name):
    good = '{"bbox_2d": [10, 20, 60, 80], "label": "star"}'
    for text in BROKEN[name]:
        found = COORDINATES[name].read(text, (640, 480))
        assert found.malformed and not found.boxes and not found.points, text
        if name == "qwen3-vl":
            beside = COORDINATES[name].read(f"[{good}, {text}, {good}]", (640, 480))
            assert len(beside.malformed) == 1 and len(beside.boxes) == 2 and not beside.points, text


@pytest.mark.parametrize("name", COORDINATES)
def test_a_cut_answer_keeps_what_is_complete(name):
    """Cut at any letter, an answer gives the first things, and never one that was not written."""
    form, size = COORDINATES[name], (640, 480)
    places = ((100, 200, 300, 400), (111, 222, 333, 444), (50, 60, 70, 80))
    things = [Box("star", place) for place in places]
    text = form.write(things, size)
    whole = form.read(text, size)
    for cut in range(len(text)):
        found = form.read(text[:cut], size)
        got = [*found.boxes, *found.points]
        wanted = [*whole.boxes, *whole.points][: len(got)]
        assert [*map(numbers, got)] == [*map(numbers, wanted)]
        assert len(got) <= 2 or name == "doctags" or cut > len(text) - 40
    if name != "doctags":
        assert form.read(text[: len(text) // 2], size).malformed


@pytest.mark.parametrize("name", COORDINATES)
@pytest.mark.parametrize(
    "text", ["", "A red star.", "[]", "There is none.", "{}", "[1, 2, 3, 4]", "a < b ; c"]
)
def test_words_are_no_coordinates(name, text):
    assert COORDINATES[name].read(text, (640, 480)) == Located()


def test_json_is_found_in_any_wrapping():
    form, size = COORDINATES["qwen3-vl"], (1000, 1000)
    star = {"bbox_2d": [1, 2, 3, 4], "label": "star"}
    expected = (Box("star", (1, 2, 3, 4)),)
    for text in (
        json.dumps(star),
        json.dumps([star]),
        json.dumps({"objects": [star]}),
        f"It is {json.dumps(star)}.",
    ):
        assert form.read(text, size) == Located(expected)
    both = form.read(json.dumps([star, {"point_2d": [5, 6]}]), size, label="dot")
    assert both == Located(expected, (Point("dot", (5, 6)),))


def test_known_answers():
    """Answers as the models' own documentation shows them."""
    page = COORDINATES["doctags"].read(
        "<section_header_level_1><loc_50><loc_100><loc_250><loc_150></section_header_level_1>", (500, 1000)
    )
    assert page.boxes == (Box("section_header_level_1", (50, 200, 250, 300)),)
    ship = COORDINATES["lfm2.5-vl"].read('[{"label": "ship", "bbox": [0.37, 0.00, 0.80, 0.99]}]', (1000, 200))
    assert ship.boxes == (Box("ship", (370, 0, 800, 198)),)
    fenced = '```json\n[\n\t{"bbox_2d": [10, 20, 60, 80], "label": "a car", "color": "red"},\n'
    fenced += '\t{"bbox_2d": [10, 20, 60, 81], "text_content": "STOP"}\n]\n```'
    cars = COORDINATES["qwen3-vl"].read(fenced, (2000, 500))
    assert cars.boxes == (Box("a car", (20, 10, 120, 40)), Box("STOP", (20, 10, 120, 40.5)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", qwen_checkpoints.QWEN)
def test_a_click_lands_where_it_should_whatever_was_resized(kind):
    """What a model writes about the image as it sees it, for any size and budget of pixels, is read at most
    half a step, of its pixels or of a thousandth, from the place in the image itself."""
    random_, settings = random.Random(kind), qwen_checkpoints.image_settings(kind)
    said, tokenizer = coordinates_of({"model_type": kind}, {}), qwen_checkpoints.tokenizer()
    processor = Processor(QwenImages(settings), tokenizer, qwen_checkpoints.TEMPLATE, coordinates=said)
    factor = 2 * settings["patch_size"]
    for _ in range(2000):
        width = round(2 ** random_.uniform(3, 13))
        size = width, min(8192, max(8, round(width * 2 ** random_.uniform(-6, 6))))
        most = round(2 ** random_.uniform(14, 24))
        processor.images = QwenImages(settings | {"size": {"shortest_edge": 4096, "longest_edge": most}})
        seen = smart_resize(size[1], size[0], factor, 4096, most)[::-1]
        steps = seen if kind == "qwen2_5_vl" else (1000, 1000)
        (x1, x2), (y1, y2) = (sorted(random_.uniform(0, side) for _ in range(2)) for side in size)
        box, click = (x1, y1, x2, y2), (x2, y1)
        raw = [round(place * steps[at % 2] / size[at % 2]) for at, place in enumerate((*box, *click))]
        form = processor.form(size)
        for text in (
            f'[{{"bbox_2d": {raw[:4]}, "label": "it"}}, {{"point_2d": {raw[4:]}, "label": "it"}}]',
            form.write([Box("it", box), Point("it", click)], size),
        ):
            found = form.read(text, size)
            assert not found.malformed and found.boxes[0].raw + found.points[0].raw == tuple(raw)
            got = (*found.boxes[0].box, *found.points[0].point)
            for at, (place, wanted) in enumerate(zip(got, (*box, *click), strict=True)):
                assert abs(place - wanted) <= size[at % 2] / steps[at % 2] / 2 + 1e-6, (size, most)


@pytest.mark.parametrize("name", COORDINATES)
def test_hostile_text_ends(name):
    """Whatever an answer holds, it is read without an error."""
    alphabet = ['{"bbox_2d": [', "1e999", "<loc_1>", "NaN", *'{[]}", <9']
    random_ = random.Random(0)
    texts = ["".join(random_.choices(alphabet, k=60)) for _ in range(100)]
    texts += [part * 3000 for part in alphabet]
    for text in [*texts, '{"a":' * 5000, "[" * 50_000 + "{", '{"bbox": [' + "9" * 9000 + "]}"]:
        found = COORDINATES[name].read(text, (64, 48))
        for box in found.boxes:
            assert 0 <= box.box[0] <= box.box[2] <= 64 and 0 <= box.box[1] <= box.box[3] <= 48


@pytest.mark.slow
def test_what_is_found_in_broken_json_is_what_can_be_decoded():
    """Around it and within it are all ways to begin, to end and to break off."""
    form, random_ = COORDINATES["qwen3-vl"], random.Random(5)
    good, parts = (
        '{"bbox_2d": [1, 2, 3, 4]}',
        [*'{}[]:,"\\', '"a"', "1", "-", '{"a":', '[{"b": 2}, ', "NaN", "01"],
    )
    found = 0
    for _ in range(3000):
        pieces = [good if random_.random() < 0.2 else random_.choice(parts) for _ in range(12)]
        text, at, wanted = "".join(pieces), 0, 0
        while (at := text.find("{", at)) >= 0:
            try:
                value, at = json.JSONDecoder().raw_decode(text, at)
                wanted += json.dumps(value).count('"bbox_2d"')
            except ValueError:
                at += 1
        found += wanted
        assert len(form.read(text, (64, 48)).boxes) == wanted, text
    assert found > 1000


# ------------------------------------------------------------------------------------------- for readers
STAR, DOT = '{"bbox_2d": [500, 250, 1000, 750], "label": "star"}', '{"label": "d}o{t", "point_2d": [500, 0]}'
STAR_JSON, STAR_LINE = (
    STAR.replace("[500, 250, 1000, 750]", "[200, 50, 400, 150]"),
    "star: box 200 50 400 150",
)
DOT_JSON, DOT_LINE = DOT.replace("[500, 0]", "[200, 0]"), "d}o{t: point 200 0"
# What a model writes about an image of 400 x 200 pixels -> JSON for a program, text for a person where that
# is another.
READ = {
    "There is none.": ("There is none.", "There is none."),
    f"[{STAR}]": (f"[{STAR_JSON}]", STAR_LINE),
    f"[{STAR}, {DOT}]": (f"[{STAR_JSON}, {DOT_JSON}]", f"{STAR_LINE}\n{DOT_LINE}"),
    f"{DOT}\n{STAR}": (f"{DOT_JSON}\n{STAR_JSON}", f"{DOT_LINE}\n{STAR_LINE}"),
    f"Here:\n```json\n[\n  {STAR}\n]\n```\nIt is [red].": (
        f"Here:\n```json\n[\n  {STAR_JSON}\n]\n```\nIt is [red].",
    ),
    f"```json\n[\n  {STAR},\n  {DOT}\n]\n```": (
        f"```json\n[\n  {STAR_JSON},\n  {DOT_JSON}\n]\n```",
        f"{STAR_LINE}\n{DOT_LINE}",
    ),
    f"[{STAR}] and [{DOT}]": (f"[{STAR_JSON}] and [{DOT_JSON}]",),
    'It is [{"label": "star", "bbox": [0.5, 0.25, 1.0, 0.75]}].': (
        'It is [{"label": "star", "bbox": [200, 50, 400, 150]}].',
    ),
    '[{"label": "star", "bbox": [0.5, 0.25, 1.0, 0.75]}]': (
        '[{"label": "star", "bbox": [200, 50, 400, 150]}]',
        STAR_LINE,
    ),
    # Within other JSON or among words, a thing is no line.
    f'{{"count": 1, "shapes": [{STAR}]}}': (f'{{"count": 1, "shapes": [{STAR_JSON}]}}',),
    f'{{"id": 7, {STAR[1:]}': (f'{{"id": 7, {STAR_JSON[1:]}',),
    # What is no box is in the same unit as what is one, and is said to be none.
    '{"bbox_2d": [1000, 0, 500, 10]}': (
        '{"bbox_2d": [400, 0, 200, 2]}',
        'malformed: corners in the wrong order: {"bbox_2d": [1000, 0, 500, 10]}',
    ),
    f'[{STAR}, {{"bbox_2d": [5': (
        f'[{STAR_JSON}, {{"bbox_2d": [5',
    ),
    '{"bbox_2d": [], "label": "x"}': ('{"bbox_2d": [], "label": "x"}', 'malformed: expected 4 numbers: '
                                      '{"bbox_2d": [], "label": "x"}'),
    r'\frac{1}{2} "bbox_2d" `x` [{"a": "bbox': (r'\frac{1}{2} "bbox_2d" `x` [{"a": "bbox',),
    "if (x) {\n  y = {\"b\": [1]}\n}\n\n": ("if (x) {\n  y = {\"b\": [1]}\n}\n\n",),
}  # fmt: skip


@pytest.mark.parametrize("answer", READ)
@pytest.mark.parametrize("lines", [False, True])
def test_a_reader_gets_pixels_however_the_answer_is_cut_into_pieces(answer, lines):
    form, random_ = "lfm2.5-vl" if '"bbox"' in answer else "qwen3-vl", random.Random(answer)
    for number in range(60):
        pixels, shown, at = PixelText(form, ((400, 200), (400, 200)), lines), "", 0
        cuts = [] if number == 0 else sorted(random_.choices(range(len(answer)), k=random_.randint(1, 40)))
        for cut in [*cuts, len(answer)]:
            shown += pixels.put(answer[at:cut])
            at = cut
        assert shown + pixels.finish() == READ[answer][-1 if lines else 0]


def test_text_comes_as_it_is_written_where_it_holds_no_coordinates():
    pixels = PixelText("qwen3-vl", ((400, 200), (400, 200)))
    shown = "".join(map(pixels.put, ['{"caption": "A boat', " on the", ' sea", "n', '": 3']))
    assert len(shown) > 30  # and not only when the object ends


@pytest.mark.parametrize("name", COORDINATES)
def test_what_a_client_sends_back_is_what_the_model_wrote(name):
    form, size = COORDINATES[name], (1920, 1080)
    things = [Box("a", (12, 40, 1900, 800))]
    written = form.write(things, size)
    assert rescaled(form, rescaled(form, written, size), size, back=True) == written
