"""What the embedded model is shown besides plain drawings: forms and angles, strangers' questions, two
images, both orders of text and image, short JSON, signs. Labels are checked by other code than the one that
made them."""

import json
import math
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from data.conversation import read_conversation
from data.packing import IGNORE_INDEX

LIBRARIES = [pytest.importorskip(name) for name in ("resvg_py", "skimage", "matplotlib", "segno")]

from recipes.shapes.dense import object_map  # noqa: E402
from recipes.shapes.training import chat_pieces  # noqa: E402
from recipes.world import asking, faces, forms, looks, signs  # noqa: E402
from recipes.world.drawings import one_thing, random_aspect, sample_drawing, sample_words  # noqa: E402
from recipes.world.painting import render  # noqa: E402
from recipes.world.scene import REFUSAL, Thing  # noqa: E402
from recipes.world.stream import WorldStream, WorldStreamConfig  # noqa: E402
from shapes.drawing import corners, scales_of  # noqa: E402
from shapes.questions import sample_questions  # noqa: E402
from shapes.world import COLOURS, QA, REACH, SHAPES, Scene  # noqa: E402


def scenes(count, start=0):
    for seed in range(start, start + count):
        rng = random.Random(seed)
        yield (
            (sample_words if seed % 5 == 0 else sample_drawing)(rng, "train", aspect=random_aspect(rng)),
            rng,
        )


# ------------------------------------------------------------------------------------------------ forms
@pytest.mark.parametrize("name", [shape for shape in SHAPES if shape != "circle"])
def test_every_form_lies_within_reach_and_turns_all_the_way(name):
    rng, turns = random.Random(name), set()
    for _ in range(600):
        outline, angle = forms.random_form(rng, name)
        assert max(math.hypot(x, y) for x, y in outline) == pytest.approx(REACH)
        turns.add(int(angle // 45))
    assert turns >= ({0, 7} if name == "square" else set(range(8)))


def test_what_has_two_names_is_not_drawn():
    """A square on its corner is a diamond: neither stands so that it could be the other."""
    for seed in range(600):
        rng = random.Random(seed)
        outline, angle = forms.random_form(rng, "square")
        off = (angle + 45) % 90 - 45  # from standing on a side
        assert abs(off) <= 33
        outline, angle = forms.random_form(rng, "diamond")
        if len(outline) == 4:
            wide = max(x for x, _ in outline) / max(y for _, y in outline)
            assert abs((angle + 45) % 90 - 45) <= 20 or wide <= 0.7


def test_crosses_stand_as_an_x_and_triangles_point_every_way():
    crosses = [forms.random_form(random.Random(seed), "cross")[1] for seed in range(300)]
    assert sum(30 < angle % 90 < 60 for angle in crosses) > 60
    ways = set()
    for seed in range(300):
        rng = random.Random(seed)
        outline, angle = forms.random_form(rng, "triangle")
        thing = Thing("shape", "triangle", "red", 0.5, 0.5, 0.5, angle, outline=outline)
        tip = min(corners(thing, scales_of((100, 100))), key=lambda c: abs(c[0] - 50))  # nearest the middle
        ways.add("down" if tip[1] > 60 else "up" if tip[1] < 40 else "aside")
    assert ways >= {"down", "up"}


def test_every_look_leaves_its_ink_where_the_shape_is():
    """Outlines, hatching, shadows and fades draw in the box, and something of them can be seen there."""
    dressed = set()
    for seed in range(150):
        rng = random.Random(seed)
        name = rng.choice(SHAPES)
        thing = Thing("shape", name, "red", 0.5, 0.5, 0.6, rgb=(220, 20, 20))
        scene = one_thing(thing, rng)
        shape = scene.things[0]
        dressed |= {
            look for look in ("hollow", "fill", "shadow", "tint", "wobble", "border") if getattr(shape, look)
        }
        ground = np.asarray(render(replace(scene, things=(replace(shape, size=0.001),)), 128), int)
        changed = np.abs(np.asarray(render(scene, 128), int) - ground).max(-1) > 60
        covered = object_map(scene, 128) > 0
        assert changed[covered].sum() > 30, shape
        far = np.abs(np.asarray(render(scene, 128), int) - ground).max(-1) > 120
        rows, columns = np.nonzero(covered)
        far[max(0, rows.min() - 8) : rows.max() + 9, max(0, columns.min() - 8) : columns.max() + 9] = False
        assert not far.any(), shape
    assert dressed == {"hollow", "fill", "shadow", "tint", "wobble", "border"}


# -------------------------------------------------------------------------------------------- questions
def named(scene, text):
    """How many shapes the phrase in a question means, found by its words alone; None where it has none."""
    text = text.lower()
    colour = next((one for one in COLOURS if re.search(rf"\b{one}\b", text)), None)
    noun = next((one for one in SHAPES if re.search(rf"\b{one}(e?s)?\b", text)), None)
    if colour is None and noun is None and not re.search(r"\bshapes?\b", text):
        return None
    return sum(
        t.kind == "shape" and (colour is None or t.colour == colour) and (noun is None or t.name == noun)
        for t in scene.things
    )


def test_counts_and_whether_there_are_any():
    seen: Counter[str] = Counter()
    for scene, rng in scenes(300):
        for _ in range(4):
            for qa in (asking.count_any(scene, rng), asking._any(scene, rng)):
                count = named(scene, qa.question)
                assert qa.answer == (str(count) if qa.family == "count" else "yes" if count else "no"), qa
                seen[qa.answer] += 1
    assert min(seen[one] for one in ("0", "1", "yes", "no")) > 300 and sum(seen[one] for one in "2345") > 100


def test_a_word_alone_is_no_shape():
    word = Scene((Thing("word", "tree", "red", 0.5, 0.5, 0.4, width=0.4, height=0.2),))
    rng, said = random.Random(0), set()
    for _ in range(600):
        for qa in asking.ask_more(word, rng, 6):
            said.add((qa.question, qa.answer))
    assert ("How many shapes are there?", "0") in said and ("Are there any shapes?", "no") in said
    assert ("How many words are there?", "1") in said and ("Is there any text?", "yes") in said
    assert not any(question.startswith("How many objects") for question, _ in said)  # a word may be one


def test_lists_name_every_shape_once():
    for scene, rng in scenes(200):
        if (qa := asking._list_shapes(scene, rng)) is not None:
            shapes = sorted(f"{t.colour} {t.name}" for t in scene.things if t.kind == "shape")
            assert sorted(qa.answer.split(", ")) == shapes
        if (qa := asking._list_colours(scene, rng)) is not None:
            assert set(qa.answer.split(", ")) == {t.colour for t in scene.things}


def test_is_it_asks_about_one_thing():
    seen = 0
    for scene, rng in scenes(300):
        qa = asking._is_it(scene, rng)
        if qa is None:
            continue
        words = re.findall(r"[a-z]+", qa.question.lower())
        subject = words[words.index("the") + 1 : words.index("the") + 3]
        if subject[1] == "shape":
            (thing,) = [t for t in scene.shapes() if t.colour == subject[0]]
            truth, others = thing.name, set(SHAPES)
        else:
            (thing,) = [t for t in scene.shapes() if t.name == subject[0]]
            truth, others = thing.colour, set(COLOURS)
        said = [word for word in words[words.index("the") + 2 :] if word in others]
        assert qa.answer == (truth if len(said) == 2 else "yes" if said == [truth] else "no"), qa
        seen += 1
    assert seen > 100


def test_short_json_says_the_same():
    kinds = set()
    for scene, rng in scenes(200):
        for qa in [*sample_questions(scene, rng, 6), *asking.ask_more(scene, rng, 4)]:
            made = asking.as_json(qa, rng)
            if made is None:
                continue
            value = json.loads(made.answer)
            if isinstance(value, dict):
                ((_, value),) = value.items()
            kinds.add(type(value))
            if isinstance(value, bool):
                value = "yes" if value else "no"
            elif isinstance(value, list):
                value = ", ".join(value)
            assert str(int(value)) == qa.answer if isinstance(value, float) else str(value) == qa.answer
            assert made.forced or "JSON" in made.question
    assert kinds == {int, float, str, bool, list}
    assert asking.as_json(QA("count", "?", REFUSAL), random.Random(0)) is None


def test_questions_about_two_images():
    """Counts over both are sums; "which" has one right answer; what is asked of one is true of it."""
    kinds = set()
    for (one, rng), (two, _) in zip(scenes(300), scenes(300, 1000), strict=True):
        qa = asking.ask_both((one, two), rng)
        if qa is None:
            continue
        counts = [named(scene, qa.question) for scene in (one, two)]
        if qa.family == "count":
            assert qa.answer == str(sum(counts))
        elif qa.answer in ("first", "second"):
            mine, other = counts if qa.answer == "first" else counts[::-1]
            assert mine < other if "fewer" in qa.question else mine > other, qa
        else:
            assert qa.answer == ("yes" if counts[0] == counts[1] else "no")
        kinds.add((qa.family, qa.answer in ("first", "second")))
    assert len(kinds) == 3
    said = {asking.of_one(QA("count", "How many stars are there?", "1"), i, random.Random(s)).question
            for i in (0, 1) for s in range(40)}  # fmt: skip
    assert {
        "How many stars are there in the first image?",
        "In the second picture, how many stars are there?",
    } <= said


# ------------------------------------------------------------------------------------------------- rows
def stream_of(processor, **settings):
    settings = {"batch_size": 4, "sequence_length": 500, "curriculum_pictures": 0} | settings
    config = WorldStreamConfig(image_size=32, patch_size=8, **settings)
    pieces = chat_pieces(processor.tokenizer, 4)
    return WorldStream(config, processor.tokenizer, pieces, images=processor.images)


def test_text_may_stand_before_the_image(processor):
    """Then the first question is answered in the prefix, and the others are asked after it."""
    stream, checked = stream_of(processor, text_first=1.0), 0
    tokenizer = processor.tokenizer
    for number in range(6):
        row = stream.drawing_row(number, 2, True)
        ids, segments = row["input_ids"], row["segment_ids"]
        opening = tokenizer.decode(ids[segments == 0])
        question, answer = re.fullmatch(
            r"<\|im_start\|>User: (.*?)<fake_token_around_image>.*<fake_token_around_image>"
            r"<end_of_utterance>\nAssistant: (.*)<end_of_utterance>", opening, re.DOTALL,
        ).groups()  # fmt: skip
        assert "<image>" not in question and "<image>" not in answer
        prompt = opening[len("<|im_start|>User: ") + len(question) :].partition("<end_of_utterance>")[0]
        parts = [{"type": "text", "text": question}, {"type": "image", "image": "x"}]
        said = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        whole = processor.chat.encode(read_conversation(said), [prompt], False, "test").input_ids
        assert whole[: (segments == 0).sum()] == ids[segments == 0].tolist()
        learnt = row["labels"][(segments == 0) & (row["labels"] != IGNORE_INDEX)]
        said = tokenizer.encode(f" {answer}<end_of_utterance>", add_special_tokens=False)
        assert {*learnt.tolist()} <= {*said}
        for document in set(segments[segments > 0].tolist()):
            assert tokenizer.decode(ids[segments == document]).startswith("\nUser: ")
            checked += 1
    assert checked > 10


def test_a_row_may_show_two_images(processor):
    stream = stream_of(processor, pairs=1.0, sequence_length=700, outside=0.0)
    batch = stream.batch(3)
    assert len(batch["input_ids"]) == 2  # of four images
    tiles = len(batch["pixel_values"]) // 2
    placed = (batch["input_ids"] == processor.image_token_id).sum(1)
    assert placed.tolist() == [4 * tiles] * 2 and len(batch["dense"]) == len(batch["places"]) == 2 * tiles
    text = processor.tokenizer.decode(batch["input_ids"][0])
    prefix = text.partition("<|im_start|>User:")[2]
    assert prefix.count("<global-img>") == 2 and re.search(r"first|second|both|image 1|image 2", text)


def test_what_a_grammar_would_force_is_not_learnt(processor):
    stream, qa = stream_of(processor), QA("count", "How many?", '{"count": 3}', forced=9)
    ids, labels = stream._answer(qa)
    forced = [label == IGNORE_INDEX for label in labels]
    assert forced == sorted(forced, reverse=True) and any(forced)
    decode = processor.tokenizer.decode
    assert decode([one for one, is_forced in zip(ids, forced) if is_forced]) == ' {"count":'
    assert decode(ids) == ' {"count": 3}<end_of_utterance>'


# ------------------------------------------------------------------------------------------------ signs
def test_signs_that_show_the_world_are_left_out():
    for name in (
        "star",
        "star-half",
        "circle",
        "plus",
        "x",
        "square-x",
        "play",
        "outlined/check-box-outline-blank",
    ):
        assert not signs._is_sign(name), name
    for name in ("camera", "user-circle", "house", "mail-plus"):
        assert signs._is_sign(name), name
    for shown in ("\u2b50", "\U0001f534", "\u274c", "\U0001f536", "\u2795", "\U0001f53a", "\u26ab"):
        assert not signs._allowed(ord(shown)), shown
    assert signs._allowed(0x1F600) and signs._allowed(0x1F697)


@pytest.mark.parametrize("split", [looks.TRAIN, looks.HELDOUT])
@pytest.mark.parametrize("draw", [signs.icons, signs.emoji, signs.code, signs.chart])
def test_signs_are_drawn_and_the_same_for_a_seed(draw, split):
    for seed in range(3):
        image = draw(random.Random(seed), (90, 70), split)
        assert image.size == (90, 70) and len(image.getcolors(90 * 70)) > 1
        assert image.tobytes() == draw(random.Random(seed), (90, 70), split).tobytes()


def test_words_are_printed_in_scripts_and_typewriters_as_well():
    rng = random.Random(0)
    used = {faces.face(rng, "train") for _ in range(2000)}
    for family in ("DancingScript", "Pacifico", "IBMPlexMono", "SpaceMono", "Caveat"):
        assert any(family in face for face in used), family
