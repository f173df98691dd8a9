"""A vocabulary that grows: old entries stay, new ones are whole words, and the folder trains on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from data.processor import Processor
from eval.tasks import DEFAULT_MODEL
from models import VisionLanguageModel
from models.checkpoints.files import CheckpointError
from recipes.world import grow
from tests.runs import flags, metrics
from training.config import parse_arguments

RECIPE = str(Path(grow.__file__).with_name("world.yaml"))
OLD, NEW = "what colour is the circle?", " ZEBRA"
TEXTS = [OLD, NEW, NEW, "gnu", "gnu", "gnu gnats", *["]]}} i"] * 9]  # a mark, a letter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The embedded model before and after the words of TEXTS came in."""
    folder = tmp_path_factory.mktemp("grown") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grow, "_texts_of_drawings", lambda rng: TEXTS)
        assert grow.main([str(DEFAULT_MODEL), str(folder), "--words", "2"]) == 0
    return DEFAULT_MODEL, folder


def test_the_most_frequent_words_come_last_and_the_rest_stays(folders):
    before, after = (json.loads((folder / "tokenizer.json").read_text()) for folder in folders)
    old, new = before["model"].pop("vocab"), after["model"].pop("vocab")
    assert [*new.items()] == [*old.items(), ("gnu", len(old)), ("ĠZEBRA", len(old) + 1)]
    assert before == after


def test_old_rows_are_the_same_bytes(folders):
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    grown = {name for name in before if before[name].shape != after[name].shape}
    assert len(grown) == 2 and all("embed_tokens" in name or "lm_head" in name for name in grown)
    for name, tensor in before.items():
        assert torch.equal(after[name][: len(tensor)].view(torch.int16), tensor.view(torch.int16))
        assert after[name].dtype == torch.bfloat16
        if name in grown:
            assert len(after[name]) == len(tensor) + 2


def test_only_new_words_are_read_otherwise_and_transformers_agrees(folders):
    from transformers import AutoTokenizer

    before, after = (Processor.from_pretrained(folder).tokenizer for folder in folders)
    theirs = AutoTokenizer.from_pretrained(folders[1])
    for text in (OLD, "gnus", "Gnu", " zebra", '"gnat": 12, 900', "<|im_start|>User:<image>"):
        assert after.encode(text, add_special_tokens=False) == before.encode(text, add_special_tokens=False)
    for text in (OLD, NEW, "the gnu gnu ZEBRA", "gnu", "<|im_start|>User:<image>gnu"):
        ids = after.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert theirs.decode(ids) == text
    assert len(after.encode(NEW, add_special_tokens=False)) == 1
    assert len(theirs) == len(before) + 2


def test_a_new_word_begins_as_its_likeness_and_is_not_said(folders):
    vocab = {"Ġhow": 0, "how": 1, "a": 2, "b": 3, "Ġ": 4, "BOX": 5}
    sources = {word: grow.sources_of(word, vocab) for word in ("ĠHOW", "How", "ĠBox", "Ġab", "ba")}
    assert sources == {"ĠHOW": [0], "How": [1], "ĠBox": [5], "Ġab": [4, 2, 3], "ba": [3, 2]}

    before, after = (VisionLanguageModel.from_pretrained(folder, dtype="float32") for folder in folders)
    ids = torch.randint(50, 1000, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        old, new = (model(ids).logits for model in (before, after))
    assert torch.equal(new[..., : old.shape[-1]], old)
    assert not (new.argmax(-1) >= old.shape[-1]).any()


def test_it_says_what_is_wrong(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grow, "_texts_of_drawings", lambda rng: [OLD])
    assert grow.main([str(DEFAULT_MODEL), str(tmp_path / "out")]) == 2
    assert "in its vocabulary already" in capsys.readouterr().err and not (tmp_path / "out").exists()
    described = json.loads((DEFAULT_MODEL / "tokenizer.json").read_text())
    with pytest.raises(CheckpointError, match="got merges"):
        grow.with_words(described | {"model": described["model"] | {"ignore_merges": False}}, ["gnu"])
    assert grow.main([str(tmp_path), str(tmp_path / "out")]) == 2


def test_it_trains_on_and_what_is_frozen_stays(folders, tmp_path):
    """With the tower as it is: no head says anything of patches, and those of words learn."""
    for name in ("resvg_py", "skimage", "matplotlib", "segno"):
        pytest.importorskip(name)
    settings = {"init_from": str(folders[1]), "output": str(tmp_path), "threads": 1, "device": "cpu"}
    settings |= {"pictures": 0, "vision_pictures": 0, "steps": 2, "batch_size": 2, "curriculum_pictures": 0}
    settings |= {"eval_questions": 0, "log_every": 1, "precision": "float32", "save_every": 1}
    settings |= {"frozen": "vision_model|mlp"}
    train.main([RECIPE, *flags(**settings)])
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[1], tmp_path))
    same = {name for name in before if torch.equal(before[name].float(), after[name])}
    assert same == {name for name in before if "vision_model" in name or ".mlp." in name}
    rows = metrics(tmp_path, "grad_norm")
    assert len(rows) == 2 and all("dense_loss" not in row and "place_loss" in row for row in rows)
    for wrong in ({"vision_lr": 0}, {"frozen": "("}, {"vision_pictures": 48, "pictures": 80}):
        with pytest.raises(SystemExit):
            parse_arguments([RECIPE, *flags(**settings | wrong)])
