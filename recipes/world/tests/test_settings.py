"""The recipe by its name: its own flags, what it makes, and a run of it."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

import train
from data.new_processor import SPECIAL_TOKENS
from data.templates import IMAGES_FIRST
from eval.tasks import DEFAULT_MODEL
from models.vision_language_model import VisionLanguageModel
from recipes.shapes.training import model_config
from recipes.world import looks
from recipes.world import training as recipe
from recipes.world.settings import WorldConfig
from recipes.world.vocabulary import build_tokenizer
from tests.runs import SMALL_SHAPES, flags, metrics, refused, shapes_processor
from training.config import TrainConfig, flag, parse_arguments

RECIPE = str(Path(__file__).resolve().parent.parent / "world.yaml")
OWN = {item.name for item in fields(WorldConfig)} - {item.name for item in fields(TrainConfig)}


def test_its_flags_are_shown_to_those_who_name_it(capsys):
    shown = {}
    for named in ([], [RECIPE]):
        with pytest.raises(SystemExit):
            parse_arguments([*named, "--help"])
        shown[bool(named)] = capsys.readouterr().out
    assert {"tiles_per_side", "curriculum_pictures", "dense_weight", "fact_weight"} <= OWN
    for name in OWN:
        assert flag(name) in shown[True] and flag(name) not in shown[False]
    assert parse_arguments([RECIPE, "--fact-weight", "0.25"])[0].fact_weight == 0.25


@pytest.mark.parametrize("arguments", [["--data", "recipes.world"], [RECIPE, "--data", "rows.jsonl"]])
def test_its_data_and_its_settings_go_together(arguments, capsys):
    assert "--data" in refused(capsys, arguments, parse_arguments)


def test_a_run_is_the_same_run_by_its_run_yaml(tmp_path):
    config, _ = parse_arguments([RECIPE, "--dense-weight", "0.5", "--output", str(tmp_path)])
    train.write_run(config, tmp_path)
    assert parse_arguments([str(tmp_path / "run.yaml")])[0] == config


def test_it_makes_the_model_that_comes_with_ocelli():
    config, _ = parse_arguments([RECIPE])
    shape = model_config(config, shapes_processor(None).tokenizer)  # how many words it has is not compared
    comes = VisionLanguageModel.from_pretrained(DEFAULT_MODEL).config
    assert shape.vision == comes.vision and shape.scale_factor == comes.scale_factor
    # The weights that are there were made with fewer words.
    assert replace(shape.text, vocab_size=comes.text.vocab_size) == comes.text


def test_fonts_that_are_not_installed_are_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "families", lambda split: looks.package_file("nothing/Sans.ttf"))
    said = refused(capsys, [RECIPE, "--output", str(tmp_path / "run")])
    assert "recipes/world/requirements.txt" in said


def test_a_run_of_both_stages_and_on(tmp_path, monkeypatch):
    """With its heads and their losses, saved and resumed."""
    for name in ("resvg_py", "skimage", "matplotlib", "segno"):
        pytest.importorskip(name)
    embedded = shapes_processor(None).tokenizer
    monkeypatch.setattr(recipe, "build_tokenizer", lambda texts, size: embedded)
    settings = SMALL_SHAPES | {"pictures": 24, "output": str(tmp_path), "threads": 1}
    settings |= {"sequence_length": 512, "image_size": 64, "scale_factor": 2, "curriculum_pictures": 0}
    train.main([RECIPE, *flags(**settings)])
    train.main([RECIPE, *flags(**settings | {"pictures": 26})])
    rows = metrics(tmp_path, "grad_norm")
    assert [row["step"] for row in rows] == [*range(1, 11)]
    assert "place_loss" not in rows[2] and rows[2]["grid_loss"] > 0
    assert all(row["place_loss"] > 0 and row["noun_place_loss"] > 0 for row in rows[3:])
    assert (tmp_path / "chat_template.jinja").read_text() == IMAGES_FIRST
    config = VisionLanguageModel.from_pretrained(tmp_path).generation_config
    assert config["coordinates"]["form"] and config["most_images"] == 2


def test_a_tokenizer_of_whole_words_spells_the_others():
    tokenizer = build_tokenizer(["How many red stars?", "many stars", "[4, 2]"], 1400)
    said = "How many stars are small? ünï 2024, [42, 1000, 7]"
    ids = tokenizer.encode(said, add_special_tokens=False)
    assert tokenizer.decode(ids) == said
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[:6] == ["How", "Ġmany", "Ġstars", "Ġ", "a", "r"]
    assert tokens[-13:] == ["2", "0", "2", "4", ",", "Ġ", "[", "42", ",Ġ", "1000", ",Ġ", "7", "]"]
    with pytest.raises(ValueError, match="vocab_size"):
        build_tokenizer(["many stars"], 400)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
