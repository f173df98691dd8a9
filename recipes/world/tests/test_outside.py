"""Formulas, sentences and numbers as images to refuse."""

import random

import numpy as np
import pytest

LIBRARIES = [pytest.importorskip(name) for name in ("matplotlib", "xkcdpass", "fontpkg_lato")]

from recipes.world import looks, outside  # noqa: E402

ALONE = ("formula", "sentence", "paragraph", "numbers")
SPLITS = (looks.TRAIN, looks.HELDOUT)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ALONE)
def test_each_shows_something_at_any_size_and_the_same_again(kind, split):
    draw = dict(outside.KINDS_OUTSIDE)[kind]
    for seed, size in enumerate([(64, 22), (22, 64), (64, 64), (300, 200), (200, 600), (1200, 900)]):
        image = draw(random.Random(seed), size, split)
        assert image.size == size and image.mode == "RGB"
        assert np.ptp(np.asarray(image.convert("L"), int)) > 20  # ink stands out from its ground
        assert image.tobytes() == draw(random.Random(seed), size, split).tobytes()


@pytest.mark.parametrize("split", SPLITS)
def test_every_formula_can_be_set(split, caplog):
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser

    parse, rng = MathTextParser("agg").parse, random.Random(0)
    for form in outside._FORMULAS[split]:
        for family in set(outside._MATH_FONTS[split]):
            font = FontProperties(math_fontfamily=family)
            assert parse(f"${outside._tex(rng, form)}$", 72, font).image.max()
    assert not caplog.records  # no font lacks a sign
    assert not set(outside._FORMULAS[looks.TRAIN]) & set(outside._FORMULAS[looks.HELDOUT])
    assert not set(outside._MATH_FONTS[looks.TRAIN]) & set(outside._MATH_FONTS[looks.HELDOUT])


@pytest.mark.parametrize("split", SPLITS)
def test_sentences_have_three_words(split):
    """Drawings of the world show one word or two, and more only apart from each other."""
    rng = random.Random(0)
    assert all(len(outside._english(rng, split).split()) >= 3 for _ in range(500))


def test_a_quarter_of_training_images_are_formulas_or_text():
    kinds = [kind for kind, _ in outside.KINDS_OUTSIDE + outside._MORE_OFTEN]
    assert 0.2 < sum(kinds.count(kind) for kind in ("formula", "sentence", "paragraph")) / len(kinds) < 0.3
    assert set(ALONE) <= {kind for kind, _ in outside.KINDS_OUTSIDE}  # held out, too
