"""Drawings in any look: what is held out, boxes that fit, conversations as a processor writes them."""

import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.conversation import read_conversation
from data.new_processor import make_processor
from data.packing import dense_mask
from data.processor import Processor
from eval.tasks import DEFAULT_MODEL

LIBRARIES = [pytest.importorskip(name) for name in ("resvg_py", "skimage", "matplotlib")]

from recipes.shapes.dense import (  # noqa: E402
    DENSE,
    box_of,
    dense_map,
    object_map,
)
from recipes.shapes.training import chat_pieces  # noqa: E402
from recipes.world import faces, heldout, looks, outside, places, renderers, unanswerable, wording  # noqa: E402
from recipes.world.__main__ import main  # noqa: E402
from recipes.world.asking import ask_words  # noqa: E402
from recipes.world.drawings import paint, random_aspect, sample_drawing, sample_rows, sample_words  # noqa: E402
from recipes.world.evaluation import score_drawing  # noqa: E402
from recipes.world.painting import render, stroke_mask  # noqa: E402
from recipes.world.scene import ABSENT, NO_IMAGE, REFUSAL, Thing  # noqa: E402
from recipes.world.stream import ALONE, WorldStream, WorldStreamConfig, branch_mask, place_of  # noqa: E402
from recipes.world.training import number_loss, spread  # noqa: E402
from recipes.world.vocabulary import build_tokenizer  # noqa: E402
from shapes.questions import ask, reading_order, sample_questions  # noqa: E402
from shapes.world import COLOURS, DIGITS, MAX_THINGS, QA, SHAPES, Background, Scene  # noqa: E402

_NOUNS = rf"\b({'|'.join((*COLOURS, *SHAPES))})(?:e?s)?\b"


def drawings(count, split="train"):
    for seed in range(count):
        rng = random.Random(seed)
        yield sample_drawing(rng, split, 1.0, random_aspect(rng)), rng


def test_what_is_held_out_is_not_trained_on():
    families = {
        split: {Path(each[0]).name for each in faces.families(split)} for split in ("train", "heldout")
    }
    assert not families["train"] & families["heldout"]
    assert len(families["train"]) >= 40 and all(each for split in families for each in faces.families(split))
    train, held = outside._PHOTOGRAPHS["train"], outside._PHOTOGRAPHS["heldout"]
    assert not set(train) & set(held) and all(looks.package_file(name) for name in (*train, *held))
    assert not set(unanswerable.QUESTIONS["train"]) & set(unanswerable.QUESTIONS["heldout"])
    strokes = {split: set() for split in ("train", "heldout")}
    for split, seen in strokes.items():
        for scene, _ in drawings(60, split):
            seen |= {t.strokes % 2 for t in scene.things if t.strokes >= 0}
            assert {t.font for t in scene.things if t.font} <= {*itertools.chain(*faces.families(split))}
    assert strokes == {"train": {0}, "heldout": {1}}


def test_other_wordings_ask_the_same():
    """The nouns stay, and with them what is asked for."""
    rng, changed = random.Random(0), 0
    for _ in range(300):
        scene = sample_drawing(rng)
        for qa in filter(None, [*sample_questions(scene, rng, 4), places.ask_place(scene, rng)]):
            said = wording.reword(qa.question, rng)
            changed += said != qa.question
            nouns = [sorted(set(re.findall(_NOUNS, text.lower()))) for text in (qa.question, said)]
            offered = re.search(r"\bor what\b", said) and {*nouns[0]} < {*nouns[1]}
            assert nouns[0] == nouns[1] or offered, (qa.question, said)
            for word in ("box", "picture|image|drawing"):  # whether a place is asked for; once at most
                counts = [len(re.findall(word, text)) for text in (qa.question, said)]
                assert counts[0] or not counts[1] or word != "box" or qa.family in ("place", "absent"), (
                    qa.question,
                    said,
                )
                assert word == "box" or counts[1] <= max(counts[0], 1), (qa.question, said)
    assert changed > 500


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_colour_and_digit_can_be_drawn(split):
    rng = random.Random(0)
    assert all(len(looks.colour(rng, name, split)) == 3 for name in COLOURS)
    assert all(stroke_mask(digit, 1).getbbox() for digit in DIGITS)


def test_the_same_seed_draws_the_same():
    for draw in (
        lambda rng: paint(sample_drawing(rng), rng),
        lambda rng: paint(sample_words(rng), rng),
        lambda rng: outside.outside_image(rng, "heldout", 0.5),
    ):
        assert draw(random.Random(3)).tobytes() == draw(random.Random(3)).tobytes()


def test_boxes_hold_their_things():
    """Each thing drawn alone lies in its box, and touches all four of its edges within two pixels."""
    side = 200
    for scene, _ in drawings(60):
        for thing in scene.things:
            alone = type(scene)((thing,), aspect=scene.aspect)
            rows, columns = np.nonzero(object_map(alone, side, side))
            box = np.array(box_of(thing, scene.aspect)) * side
            seen = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            assert np.abs(box - seen).max() <= 2, thing


def test_images_have_the_scene_s_shape():
    for scene, _ in drawings(20):
        width, height = render(scene, 60).size
        assert min(width, height) == 60 and abs(width / height / scene.aspect - 1) < 0.02


def test_rows_of_shapes_lie_apart_and_inside():
    """Each is drawn whole: none covers another; in one row they go along the longer side."""
    counts = set()
    for seed in range(60):
        rng = random.Random(seed)
        scene = sample_rows(rng, aspect=random_aspect(rng))
        drawn = object_map(scene, 200, 200)
        for i, thing in enumerate(scene.things, 1):
            alone = object_map(Scene((thing,), aspect=scene.aspect), 200, 200) == 1
            assert (alone == (drawn == i)).all()
        x, y = (np.ptp([getattr(t, way) for t in scene.things]) for way in "xy")
        assert scene.aspect == 1 or min(x, y) > 0.4 or (x > y) == (scene.aspect > 1)
        assert all(0 < edge < 1 for t in scene.things for edge in (t.x, t.y))
        counts.add(len(scene.things))
    assert counts == set(range(2, MAX_THINGS + 1))


def test_edges_and_letters_of_tiles():
    """Edges seen from a patch lead to the box, cut at the patch's tile; letters are those of the word."""
    for seed in range(20):
        rng = random.Random(seed)
        scene, tile = sample_words(rng), 16
        dense = dense_map(scene, 32, 32, tile)
        assert dense.shape == (32 * 32, DENSE)
        for patch in np.nonzero(dense[:, 13] >= 0)[0][:50]:
            letter = chr(ord("a") + int(dense[patch, 13]))
            x, y = patch % 32 + 0.5 + dense[patch, 2], patch // 32 + 0.5 + dense[patch, 3]
            word = min(scene.things, key=lambda t: abs(t.x * 32 - x) + abs(t.y * 32 - y))
            assert letter in word.name
            left = dense[patch, 9] + patch % 32 + 0.5
            assert left == pytest.approx(max(box_of(word)[0] * 32, patch % 32 // tile * tile), abs=1e-4)


def test_answers_about_places():
    asked = 0
    for scene, rng in drawings(200):
        qa = places.ask_place(scene, rng)
        if qa is None or qa.answer == ABSENT:
            continue
        for found in json.loads(qa.answer):
            label = found["label"]
            things = places.matching(scene, label)
            assert things and (label in qa.question or qa.question in places._ALL)
            if "bbox_2d" in found:
                boxes = [np.array(box_of(t, scene.aspect)) * 1000 for t in things]
                assert min(np.abs(box - found["bbox_2d"]).max() for box in boxes) <= 0.5
            else:
                assert any(np.hypot(*(np.array((t.x, t.y)) * 1000 - found["point_2d"])) < 1 for t in things)
            asked += 1
    assert asked > 100


def test_all_things_of_a_drawing_are_asked_for(processor):
    """Up to eight, and in training as well: an answer to `--describe` ends where no longer one was shown."""
    longest = 0
    for scene, rng in drawings(400):
        qa = places.ask_place(scene, rng, most=MAX_THINGS)
        if qa is not None and qa.question in places._ALL:
            assert len(qa.things) == len(scene.things) == qa.answer.count("bbox_2d")
            longest = max(longest, len(qa.things))
    assert longest == MAX_THINGS
    stream, longest = stream_of(processor, outside=0.0, only_words=0.0, sequence_length=4096), 0
    for number in range(60):
        asked = processor.tokenizer.decode(stream.drawing_row(number, 2, True)["input_ids"]).split("User:")
        lists = [one.count("bbox_2d") for one in asked if any(every in one for every in places._ALL)]
        longest = max(longest, *lists, 0)
    assert longest > places.MOST_PLACES


def _two_words(first, second):
    """A scene of two words, and a processor that spells them."""
    scene = Scene(tuple(
        Thing("word", name, colour, 0.5, y, 0.4, width=0.4, height=0.2)
        for name, colour, y in ((first, "red", 0.25), (second, "blue", 0.75))
    ))  # fmt: skip
    tokenizer = build_tokenizer(["Read the red word. Read the blue word."], 1400)
    processor = make_processor(tokenizer, image_size=64, image_seq_len=16, split=True, longest_edge=128)
    return scene, processor


def test_letters_are_those_of_the_word_that_is_asked_for():
    """Not of another that says the same."""
    scene, processor = _two_words("cup", "cup")
    for word in scene.things:
        (qa,) = (qa for qa in ask_words(scene, random.Random(0)) if qa.things == (word,))
        row = stream_of(processor)._conversations((), [[qa]], scene)
        marked = row["noun_places"][row["noun_places"][:, 0] >= 0]
        assert len(marked) > 3 and (abs(marked[:, 5] - 1000 * word.y) < 5).all()


def test_letters_of_a_word_that_begins_another():
    """Each letter of both is marked, one after the other."""
    scene, processor = _two_words("song", "son")
    qa = QA("list", "Name all.", "word song, word son", things=scene.things)
    row = stream_of(processor)._conversations((), [[qa]], scene)
    answer = row["labels"] >= 0
    tokens = processor.tokenizer.convert_ids_to_tokens(np.roll(row["input_ids"], -1).tolist())
    letters = [i for i in np.nonzero(answer)[0] if "a" <= tokens[i] <= "z"]
    assert [tokens[i] for i in letters] == [*"songson"]
    at = row["noun_places"][letters]
    assert (at[:4, 5] == 250).all() and (at[4:, 5] == 750).all()
    for word in (at[:4], at[4:]):
        assert (word[1:, 0] == word[:-1, 2]).all() and (word[:, 0] < word[:, 2]).all()


def test_all_words_of_an_image_of_words_are_asked_for_with_boxes():
    _, processor = _two_words("cup", "cup")
    stream = stream_of(processor, outside=0.0, only_words=1.0, sequence_length=4096)
    for number in range(10):
        row = stream.drawing_row(number, 2, True)
        text = processor.tokenizer.decode(row["input_ids"])
        words = {tuple(place[:4]) for place in row["places"].reshape(-1, 6).tolist()} - {(-1,) * 4}
        assert text.count("bbox_2d") >= len(words)


def test_it_is_the_thing_that_was_asked_for():
    """The first turn does not say what the second asks for."""
    asked = set()
    for scene, rng in drawings(60):
        for first, second in filter(None, [places.ask_of_it(scene, rng)]):
            (thing,) = (t for t in scene.shapes() if t.name in first.question or t.colour in first.question)
            known = {"shape": thing.name, "colour": thing.colour}
            assert first.answer == "yes" and second.answer == known[second.family]
            assert second.answer not in first.question
            asked.add(second.family)
    assert asked == {"colour", "shape"}


def test_words_are_asked_for_by_their_colour():
    asked = 0
    for seed in range(20):
        rng = random.Random(seed)
        scene = sample_words(rng)
        for qa in ask_words(scene, rng):
            (word,) = (thing for thing in scene.things if thing.colour in qa.question.split())
            assert qa.answer == word.name and qa.things == (word,)
            asked += 1
    assert asked > 20


def test_places_are_written_as_they_always_were():
    """To the byte: a training run goes on with the same rows."""
    for scene, _ in drawings(60):
        things = reading_order(scene.things)
        corners = [[round(1000 * one) for one in box_of(thing, scene.aspect)] for thing in things]
        written = [{"bbox_2d": box, "label": "it"} for box in corners]
        assert places.boxes(scene, list(scene.things), "it") == json.dumps(written)
        centres = [[round(1000 * thing.x), round(1000 * thing.y)] for thing in things]
        written = [{"point_2d": one, "label": places.name(t)} for one, t in zip(centres, things)]
        assert places.points(scene, list(scene.things)) == json.dumps(written)
        assert places.boxes(scene, []) == places.points(scene, []) == ABSENT


def test_what_is_absent_is_absent():
    for scene, rng in drawings(200):
        qa = places.ask_absent_place(scene, rng)
        phrase = next(p for p in phrases() if f" {p}" in qa.question or f'"{p}"' in qa.question)
        assert qa.answer == ABSENT and not places.matching(scene, phrase)


def phrases():
    """Everything that may be asked for, the longest first."""
    nouns = ("circle", "square", "triangle", "diamond", "star", "cross", "shape")
    pairs = [f"{colour} {noun}" for colour in COLOURS for noun in nouns]
    return [*pairs, *nouns[:-1], "word", "digit"]


# ----------------------------------------------------------------------------------------------- held out
def test_held_out_questions():
    """Families in turn, the same for a seed; each right answer scores 1, and another answer less."""
    asked = heldout.drawing_questions(2 * len(heldout.DRAWING_FAMILIES))
    again = heldout.drawing_questions(3)
    assert [one.qa for one in asked[:3]] == [one.qa for one in again]
    assert asked[0].image().tobytes() == again[0].image().tobytes()
    assert asked[0].qa != heldout.drawing_questions(1, seed=1)[0].qa
    for one in asked:
        right = score_drawing(one, one.qa.answer)
        assert right == 1.0 if one.family != "box" else right > 0.9  # an answer is rounded to thousandths
        assert score_drawing(one, "nonsense") == 0.0


def test_turns_of_a_conversation():
    """The three are about one drawing, the third also stands first, and each is asked after those before."""
    families = heldout.DRAWING_FAMILIES
    asked = heldout.drawing_questions(8 * len(families))
    each = {one: asked[families.index(one) :: len(families)] for one in heldout.TURNS}
    for first, second, third in zip(*each.values(), strict=True):
        assert first.seed == second.seed == third.seed and first.qa == third.qa
        assert (len(first.earlier), len(second.earlier)) == (0, 1)
        assert third.earlier == (*second.earlier, second.qa)
        assert re.search(r"\b(it|its)\b", second.qa.question)
        assert second.qa.answer not in f"{second.earlier[0].question} {second.earlier[0].answer}"
    assert len({second.qa.family for second in each["second question"]}) > 1


def test_scores_of_boxes_by_hand():
    def said(*boxes):
        return json.dumps([{"bbox_2d": box, "label": "star"} for box in boxes])

    def score(family, answer, *boxes):
        qa = QA("place", "", "point_2d" if family == "point" else "bbox_2d")
        return score_drawing(heldout.DrawingQuestion(family, qa, Image.Image, 0, (), boxes), answer)

    one, half = (0, 0, 100, 100), said([0, 0, 100, 50])
    assert score("box", half, one) == 0.5
    assert score("box at 0.5", half, one) == 1.0
    assert score("box at 0.5", said([0, 0, 100, 49]), one) == 0.0
    assert score("box", said([0, 0, 9, 9], [0, 0, 100, 100]), one) == 0.0081  # the first one counts
    assert score("box at 0.5", said([0, 0, 9, 9], [0, 0, 100, 100]), one) == 0.0
    for malformed in ("[", "[1]", '[{"bbox_2d": [1, 2]}]', '{"bbox_2d": 3}', '[{"label": "star"}]'):
        assert score("box", malformed, one) == 0.0
        assert score("boxes", malformed, one) == 0.0
    two = (200, 0, 300, 100)
    cases = ((one, two), 1), ((two, one), 1), ((one, one), 0.5), ((one,), 2 / 3), (((0, 0, 100, 49),), 0)
    for given, f1 in cases:
        assert score("boxes", said(*map(list, given)), one, two) == pytest.approx(f1)
    inside, beside = (json.dumps([{"point_2d": [x, 10], "label": "star"}]) for x in (100, 101))
    assert [score("point", answer, one) for answer in (inside, beside)] == [1.0, 0.0]
    wrong = ('{"n": 5}', '{"n": 4, "m": 4}', "[4]", "4", "{")
    for asked, right in (("Answer in JSON.", '{"k": 4.0}'), ('with the key "n".', '{"n": "4"}')):
        count = heldout.DrawingQuestion("in JSON", QA("count", asked, '{"n": 4}'), Image.Image, 0)
        assert [score_drawing(count, said) for said in (right, *wrong)] == [1, 0, 0, 0, 0, 0]
    assert not score_drawing(count, '{"k": 4}'), "another key than the one that is named"


@pytest.mark.parametrize("draw", [renderers.render_svg, renderers.render_matplotlib])
def test_other_programs_draw_the_same_scene(draw):
    """What is drawn differs little from Pillow's drawing."""
    seen = 0
    for scene, _ in drawings(40):
        if not renderers.drawable(scene):
            continue
        flat = Background("plain", scene.background.first, scene.background.first)
        # Lines are put differently, and what is below them is not drawn.
        plain = {"hollow": 0.0, "border": None, "fill": (), "shadow": 0.0, "tint": None, "wobble": 0.0}
        filled = [replace(t, font=t.font.partition("@")[0], **plain) for t in scene.things]
        scene = replace(scene, things=tuple(filled), background=flat)
        image = draw(scene, 120)
        own = render(scene, 120)
        assert image.size == own.size
        difference = np.abs(np.asarray(image, float) - np.asarray(own, float)).max(-1)
        assert (difference > 60).mean() < 0.03
        seen += 1
    assert seen > 8


# ----------------------------------------------------------------------------------------------- streams
def stream_of(processor, **settings):
    settings = {"batch_size": 3, "sequence_length": 400, "curriculum_pictures": 0} | settings
    config = WorldStreamConfig(image_size=32, patch_size=8, **settings)
    pieces = chat_pieces(processor.tokenizer, 4)
    return WorldStream(config, processor.tokenizer, pieces, images=processor.images)


def test_batches_of_tiles(processor):
    stream = stream_of(processor, vision_steps=1, vision_batch_size=2)
    first = stream.batch(0)
    assert first["pixel_values"].shape == (4, 3, 32, 32) and first["dense"].shape == (4, 16, DENSE)
    counts = set()
    for index in range(1, 12):
        batch = stream.batch(index)
        tiles = len(batch["pixel_values"]) // 3
        placed = (batch["input_ids"] == processor.image_token_id).sum(1)
        assert placed.tolist() == [4 * tiles] * 3 and len(batch["dense"]) == 3 * tiles
        counts.add(tiles)
    assert counts == {3, 5}  # 1 x 2 or 2 x 1 parts and the whole; 2 x 2 and the whole


def test_a_part_does_not_show_how_many_there_are_in_the_whole(processor):
    scene = Scene(tuple(Thing("shape", "circle", "red", x, 0.3, 0.2) for x in (0.2, 0.8)))
    *parts, whole = stream_of(processor)._dense_tiles(scene, 2, 2)[..., 6:9]
    assert len(parts) == 4 and not any(part.any() for part in parts)
    assert (whole[whole.any(-1)] == 2).all() and whole.any()


def test_conversations_are_as_the_processor_writes_them(processor):
    """A row's prefix with each branch is what the processor makes of that conversation."""
    stream, checked = stream_of(processor, outside=0.3), 0
    for index in range(4):
        batch = stream.batch(index)
        for ids, segments in zip(batch["input_ids"], batch["segment_ids"]):
            text = processor.tokenizer.decode(ids[segments == 0])
            for document in set(segments[segments > 0].tolist()):
                branch = ids[segments == document]
                blind = document >= ALONE
                said = processor.tokenizer.decode(branch)
                turns = (
                    said.replace("<|im_start|>", "").removeprefix("User: ").split("<end_of_utterance>")[:-1]
                )
                messages = []
                for i, turn in enumerate(turns):
                    words = turn.removeprefix("\nAssistant:" if i % 2 else "\nUser:").strip()
                    content = [{"type": "text", "text": words}]
                    if i == 0 and not blind and system_of(text):
                        system = [{"type": "text", "text": system_of(text)}]
                        messages.append({"role": "system", "content": system})
                    if i == 0 and not blind:
                        content.insert(0, {"type": "image"})
                    messages.append({"role": "assistant" if i % 2 else "user", "content": content})
                whole = processor.chat.encode(
                    processor_messages(messages), [] if blind else [prompt_of(text)], False, "test"
                ).input_ids
                expected = branch.tolist() if blind else [*ids[segments == 0].tolist(), *branch.tolist()]
                assert whole[: len(expected)] == expected
                checked += 1
    assert checked > 30


def system_of(prefix):
    """The system prompt of a row's prefix, or ""."""
    found = re.match(r"<\|im_start\|>System: (.*?)<end_of_utterance>", prefix, re.DOTALL)
    return found[1] if found else ""


def prompt_of(prefix):
    return re.split(r"^<\|im_start\|>(?:System: .*?<end_of_utterance>\n)?User:", prefix, flags=re.DOTALL)[1]


def processor_messages(messages):
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = "x"
    return read_conversation(messages, "test")


def test_a_word_thinner_than_a_pixel_of_the_map_is_on_it():
    thing = Thing("word", "ill", "red", 0.52, 0.48, 0.004, width=0.004, height=0.003)
    assert object_map(Scene((thing,)), 16).sum() == 1


def test_tokens_know_whose_box_they_show(processor):
    """Tokens that show a thing lie in its box, and that box is the answer's."""
    stream, seen = stream_of(processor, outside=0.0, only_words=0.0, sequence_length=800), 0
    for number in range(60):
        row = stream.drawing_row(number, 2, True)
        side = stream.config.tokens_per_side
        whole = row["places"][-1].reshape(side, side, 6)
        down, across = np.nonzero(whole[..., 0] >= 0)
        x1, y1, x2, y2, x, y = whole[down, across].T
        for place, low, high, centre in ((across, x1, x2, x), (down, y1, y2, y)):
            middle = (place + 0.5) / side * 1000
            assert (low - 500 / side <= middle).all() and (middle <= high + 500 / side).all()
            assert (abs(low + high - 2 * centre) <= 150).all()
        text = processor.tokenizer.decode(row["input_ids"][row["segment_ids"] > 0])
        said = {tuple(map(int, one.split(", "))) for one in re.findall(r"bbox_2d\": \[([\d, ]+)\]", text)}
        known = {tuple(place[:4]) for place in row["places"].reshape(-1, 6).tolist()}
        named = row["noun_places"][(row["noun_places"][:, 0] >= 0) & (row["labels"] < 0)]
        assert {tuple(place[:4]) for place in named.tolist()} <= said | known
        seen += len(said & known)
        assert len(said - known) <= 1, said - known  # what is covered, or at the edge of 999
    assert seen > 20


def test_answers_know_which_thing_comes_next():
    """Where the answer begins; where a separator comes next, or the end; before each item's first token or
    coordinate; in a later turn as well."""
    rng = random.Random(0)
    scenes = [sample_drawing(rng) for _ in range(200)]
    texts = [" " + ask(scene, rng, "describe").answer for scene in scenes]
    texts += [" " + places.boxes(scene, list(scene.things)) for scene in scenes]
    tokenizer = build_tokenizer(texts, 1600)
    processor = make_processor(tokenizer, image_size=64, image_seq_len=16, split=True, longest_edge=128)
    stream = stream_of(processor, sequence_length=1024)
    for scene in scenes[:40]:
        things = tuple(reading_order(scene.shapes()))
        if not things:
            continue
        described = QA("list", "Name all.", ", ".join(f"{t.colour} {t.name}" for t in things), things=things)
        boxes = QA("place", "Detect all.", places.boxes(scene, list(things)), things=things)
        row = stream._conversations((), [[described, boxes]], scene)
        ids, answers = row["input_ids"], np.split(*_runs(row["labels"] >= 0))
        for answer, separator in zip(answers, (",", '"},'), strict=True):
            tokens = tokenizer.convert_ids_to_tokens(ids[answer].tolist())
            expected, which = {int(answer[0]) - 1: 0}, 0
            for i, token in enumerate(tokens):
                if token == separator:
                    which += 1
                    expected |= {int(answer[i]) - 1: which, int(answer[i]): which}
                elif token == "Ġ[":
                    expected[int(answer[i])] = which
            assert which == len(things) - 1
            span = range(answer[0] - 1, answer[-1] + 1)
            marked = {i: row["noun_places"][i].tolist() for i in span if row["noun_places"][i, 0] >= 0}
            assert marked == {i: place_of(things[which], scene) for i, which in expected.items()}


def _runs(where):
    """Its places, and where a run of them ends."""
    found = np.nonzero(where)[0]
    return found, np.nonzero(np.diff(found) > 1)[0] + 1


def test_letters_of_an_answer_know_where_they_are_printed():
    """Side by side, from edge to edge of a word's box."""
    tokenizer = build_tokenizer(["Read the word."], 1400)
    processor = make_processor(tokenizer, image_size=64, image_seq_len=16, split=True, longest_edge=128)
    stream, seen = stream_of(processor, outside=0.0, only_words=1.0), 0
    for number in range(10):
        row = stream.drawing_row(number, 2, True)
        boxes = {tuple(place[:4]) for place in row["places"].reshape(-1, 6).tolist()}
        after = tokenizer.convert_ids_to_tokens(np.roll(row["input_ids"], -1).tolist())
        next_is_a_letter = np.array([len(token) == 1 and token.isalpha() for token in after])
        tokens, marked = np.roll(after, 1), (row["noun_places"][:, 0] >= 0) & (row["labels"] >= 0)
        between_items = (tokens == ",") | (np.array(after) == ",")
        assert (next_is_a_letter | between_items)[marked].all()
        spelled = marked & next_is_a_letter
        for run in np.split(*_runs(spelled)) if spelled.any() else ():
            places = row["noun_places"][run]
            assert (places[1:, 0] == places[:-1, 2]).all()
            seen += (*places[0, :2], *places[-1, 2:4]) in boxes
    assert seen > 20


def test_a_number_that_is_near_costs_less():
    values, numbers = torch.tensor([3, 40, 1000]), torch.arange(7, 7 + 1001)
    logits = torch.full((3, 1200), -9.0)
    costs = []
    for off in (0, 2, 30):
        given = logits.clone()
        given[torch.arange(3), numbers[(values - off).abs()]] = 9.0
        costs.append(number_loss(given, numbers, values).item())
    assert costs[0] < costs[1] < costs[2]
    soft = torch.zeros(3, 1200)
    soft[:, 7 : 7 + 1001] = spread(values, 1001, 4.0)
    expected = torch.nn.functional.cross_entropy(given, soft, reduction="sum").item()
    assert costs[2] == pytest.approx(expected)


def test_what_is_outside_is_refused(processor):
    stream = stream_of(processor, outside=1.0)
    batch = stream.batch(0)
    answers = processor.tokenizer.decode(batch["input_ids"][batch["labels"] >= 0])
    said = {one.strip() for one in answers.split("<end_of_utterance>") if one.strip()}
    assert said == {REFUSAL} and (batch["dense"][..., 0] == 0).all()


def test_alone_sees_no_image(processor):
    segments = torch.tensor([[0, 0, 1, 1, ALONE + 2, ALONE + 2, -1]])
    mask, seen = branch_mask(segments), dense_mask(segments)
    assert torch.equal(mask[0, :4], seen[0, :4])
    assert mask[0, 5].tolist() == [False] * 4 + [True, True, False]
    for index in range(12):
        batch = stream_of(processor).batch(index)
        alone = batch["segment_ids"] >= ALONE
        for row in alone.any(1).nonzero()[:, 0]:
            ids, positions = batch["input_ids"][row][alone[row]], batch["position_ids"][row][alone[row]]
            assert positions.tolist() == list(range(len(ids))) and NO_IMAGE in processor.tokenizer.decode(ids)
            return
    raise AssertionError("expected a question without an image")


def test_the_command_shows_drawings(tmp_path, capsys):
    main(["--n", "12", "--out", str(tmp_path)])
    families = {
        line.split("]")[0].strip(" [") for line in capsys.readouterr().out.splitlines() if "]" in line
    }
    assert {"count", "place", "absent"} <= families
    assert len({Image.open(path).size for path in tmp_path.glob("*.png")}) > 3


def test_a_spelled_word_reads_the_same_and_keeps_its_marks():
    """One token of a question becomes its letters; what its noun means is known at the last of them."""
    known = Processor.from_pretrained(DEFAULT_MODEL)
    stream, rng = stream_of(known, spelled=1.0), random.Random(0)
    thing = Thing("shape", "circle", "red", 0.2, 0.2, 0.2)
    question, longer = "What colour is the circle?", 0
    for _ in range(60):
        ids, _, more = stream._spelled(question, rng)
        assert known.tokenizer.decode(ids) == question and len(ids) == len(stream.encode(question)) + more
        row = stream._conversations((0,), [[QA("colour", question, "red")]], Scene((thing,)), rng=rng)
        (at,) = [i for i, facts in enumerate(row["nouns"]) if not np.isnan(facts).all()]
        read = known.tokenizer.decode(row["input_ids"][1 : at + 1])
        assert read == question.removesuffix("?")
        assert row["noun_places"][at].tolist() == place_of(thing, Scene((thing,)))
        longer += at + 1 > len(stream.encode(read)) + 1
    assert longer > 30
