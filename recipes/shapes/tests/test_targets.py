"""Targets that training adds to answers: what each patch shows, what a question's nouns mean, and where its
tokens end them."""

import math
import random

import numpy as np
import pytest
import torch

from recipes.shapes.dense import DENSE, KINDS, dense_map
from recipes.shapes.questions import facts, mentions
from recipes.shapes.stream import ShapesStream, ShapesStreamConfig
from recipes.shapes.training import FactHead, chat_pieces
from shapes import COLOURS, RGB, Scene, Thing, ask, sample_scene
from tests.runs import shapes_processor


def shape(name, colour, x, y, size=0.2):
    return Thing("shape", name, colour, x, y, size, 0.0, RGB[colour])


SCENE = Scene(
    (
        shape("circle", "red", 0.25, 0.25, 0.3),
        shape("circle", "blue", 0.75, 0.25, 0.2),
        shape("star", "red", 0.5, 0.75, 0.2),
    )
)


def test_dense_targets_by_hand():
    scene = Scene((shape("square", "red", 0.25, 0.25, 0.25), shape("star", "blue", 0.80, 0.70, 0.3)))
    dense = dense_map(scene, 4, 4)
    assert dense.shape == (16, DENSE) and dense.dtype == np.float32
    assert len(KINDS) == 1 + 6 + 10 + 1
    assert dense[3].tolist() == [0, -1, *[0] * 11, -1]  # background
    centre = dense[5]  # row 1, column 1
    assert centre[:2].tolist() == [2, 0] and centre[5] == 1
    np.testing.assert_allclose(centre[2:5], [-0.5, -0.5, np.log(0.25)], atol=1e-6)
    half = 0.43 * 0.25 * 4  # of the square, in patches
    np.testing.assert_allclose(centre[9:13], np.array([-half, -half, half, half]) - 0.5, atol=1e-6)
    star = dense[2 * 4 + 3]  # row 2, column 3
    assert star[:2].tolist() == [5, 4] and star[5] == 1
    np.testing.assert_allclose(star[2:4], [0.8 * 4 - 3.5, 0.7 * 4 - 2.5], atol=1e-6)
    assert dense[:, 5].sum() == 2


def test_dense_counts_by_hand():
    things = (
        shape("circle", "red", 0.2, 0.2, 0.2),
        shape("circle", "red", 0.8, 0.2, 0.2),
        shape("circle", "blue", 0.2, 0.8, 0.2),
        shape("star", "red", 0.8, 0.8, 0.2),
    )
    dense = dense_map(Scene(things), 8, 8)
    counts = {(row[0], row[1]): row[6:9].tolist() for row in dense.astype(int) if row[0]}
    circle, star = KINDS.index("circle"), KINDS.index("star")
    assert counts == {(circle, 0): [3, 3, 2], (circle, 4): [3, 1, 1], (star, 0): [1, 3, 1]}
    assert (dense[dense[:, 0] == 0, 6:13] == 0).all()


@pytest.mark.parametrize("grid", [4, 8, 16])
def test_dense_offsets_point_at_centres(grid):
    for s in (sample_scene(random.Random(i)) for i in range(30)):
        dense = dense_map(s, grid, grid)
        patch = np.nonzero(dense[:, 0])[0]
        x = (patch % grid + 0.5 + dense[patch, 2]) / grid
        y = (patch // grid + 0.5 + dense[patch, 3]) / grid
        for row, px, py in zip(dense[patch], x, y):
            thing = min(s.things, key=lambda t: np.hypot(t.x - px, t.y - py))
            assert np.hypot(thing.x - px, thing.y - py) < 1e-5
            assert (
                KINDS[int(row[0])] == ("word" if thing.kind == "word" else thing.name)
                and COLOURS[int(row[1])] == thing.colour
            )
        homes = {int(t.y * grid) * grid + int(t.x * grid) for t in s.things}
        assert set(np.nonzero(dense[:, 5])[0]) == homes


def of(text, scene=SCENE):
    """{the noun's last word: its facts}"""
    return {text[: noun.end + 1].split()[-1]: facts(scene, noun) for noun in mentions(text)}


def test_nouns_by_hand():
    assert of("How many red shapes are there?")["shapes"][3] == 1.0
    more = of("Are there more circles than stars?")
    assert (more["circles"][3], more["stars"][3]) == (1.0, 0.5) and math.isnan(more["stars"][0])
    two = of("Is the red circle left of the star?")
    assert two["circle"][:2] == (-1.0, -1.0) and two["star"][:2] == (0.0, 1.0)
    assert two["circle"][2] == pytest.approx(math.log(0.3) + 1.3)
    assert all(math.isnan(v) for v in of("What colour is the circle?")["circle"])  # there are two of them
    assert of("Is there a red star?") == of("Describe the picture.") == {}  # "a star" may not be there
    assert of("How many crosses can you see?")["crosses"][3] == 0.0


def test_answers_follow_from_the_nouns():
    """Where two things are compared, their nouns are known and say what the answer says."""
    rng, seen = random.Random(5), set()
    for _ in range(300):
        scene = sample_scene(rng)
        for family in ("position", "size", "compare"):
            if (qa := ask(scene, rng, family)) is None:
                continue
            (_, first), (_, second) = sorted((noun.end, facts(scene, noun)) for noun in mentions(qa.question))
            known = slice(3, 4) if family == "compare" else slice(0, 3)
            assert not any(map(math.isnan, (*first[known], *second[known])))
            if "left or right" in qa.question:
                assert qa.answer == ("left" if first[0] < second[0] else "right")
                seen.add("side")
            elif family == "size" and qa.answer in ("yes", "no"):
                assert (qa.answer == "yes") == ((first[2] > second[2]) == ("bigger" in qa.question))
                seen.add("size")
            elif "as many" in qa.question:
                assert (qa.answer == "yes") == (first[3] == second[3])
                seen.add("equal")
    assert seen == {"side", "size", "equal"}


@pytest.fixture(scope="module")
def stream():
    tokenizer = shapes_processor(None).tokenizer
    config = ShapesStreamConfig(batch_size=3, curriculum_pictures=0)
    return ShapesStream(config, tokenizer, chat_pieces(tokenizer, 64))


def test_pairs_stand_where_the_answer_begins(stream):
    """First noun minus second, on the token that the answer's first one is predicted from."""
    batch = stream.batch(1)
    known = (~batch["pairs"].isnan()).any(-1)
    assert known.sum() > 5
    for row, place in known.nonzero().tolist():
        labels, nouns = batch["labels"][row], batch["nouns"][row]
        assert labels[place] == -100 and labels[place + 1] != -100
        first, second = nouns[:place][(~nouns[:place].isnan()).any(-1)][-2:]
        torch.testing.assert_close(batch["pairs"][row, place], first - second, equal_nan=True)


def test_stages_share_a_stream(stream):
    """The tower's own batches come first, then those with questions; no image twice."""
    config = ShapesStreamConfig(batch_size=2, vision_steps=3, vision_batch_size=4, curriculum_pictures=0)
    two = ShapesStream(config, stream.tokenizer, stream.pieces)
    assert [len(two.batch(i)["pixel_values"]) for i in range(5)] == [4, 4, 4, 2, 2]
    images = torch.cat([two.batch(i)["pixel_values"] for i in range(5)]).flatten(1)
    assert len({row.numpy().tobytes() for row in images}) == 16


def test_grounding_loss_reads_the_layer_and_skips_what_is_unknown():
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
    language_model = torch.nn.Module()
    language_model.layers = layers
    head = FactHead(8, depth=0.5)
    head.watch(language_model)
    targets = torch.full((1, 5, 4), math.nan)
    targets[0, 2, 3] = 0.5
    x = torch.randn(1, 5, 8, requires_grad=True)
    layers[1](layers[0](x))
    head.loss(targets, torch.tensor(1)).backward()
    assert x.grad[0, 2].abs().sum() > 0 and x.grad[0, [0, 1, 3, 4]].abs().sum() == 0
    layers[0](x)
    with torch.no_grad():
        assert head.loss(torch.full((1, 5, 4), math.nan), torch.tensor(0)) == 0
