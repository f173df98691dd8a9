"""Saving: whole folders, portable files, the processor."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline

from models import TextConfig, VisionLanguageModel
from models.checkpoints import CheckpointError, save
from models.checkpoints import folder as folder_module
from tests import tiny
from tests.tiny import same_weights


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> VisionLanguageModel:
    folder = tmp_path_factory.mktemp("theirs")
    return VisionLanguageModel.from_pretrained(tiny.save(tiny.hf_model("idefics3-1-tile"), folder))


@pytest.fixture(scope="module")
def with_processor(tmp_path_factory):
    """(our model, our processor, the folder that both were saved to)."""
    processor, theirs = tiny.model_with_processor("smolvlm-1-tile")
    root = tmp_path_factory.mktemp("with-processor")
    ours = VisionLanguageModel.from_pretrained(tiny.save(theirs, root / "theirs"))
    return ours, processor, ours.save_pretrained(root / "ours", processor=processor)


def other_weights(model: VisionLanguageModel) -> VisionLanguageModel:
    other = VisionLanguageModel(model.config)
    other.init_weights(torch.Generator().manual_seed(1))
    return other


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class TestWholeFolders:
    def test_replacing_drops_old_shards_and_keeps_what_is_not_ours(self, model, tmp_path):
        folder = model.save_pretrained(tmp_path / "deep" / "saved", max_shard_bytes=60_000, card="# old\n")
        (folder / "log.jsonl").write_text("{}")
        (folder / "state").mkdir()
        (folder / "state" / "optimizer.pt").write_text("moments")
        other = other_weights(model)
        other.save_pretrained(folder)
        written = {"config.json", "generation_config.json", "model.safetensors"}
        assert set(content(folder)) == {*written, "README.md", "log.jsonl", "state/optimizer.pt"}
        assert all(stat.S_IMODE((folder / name).stat().st_mode) & 0o444 == 0o444 for name in written)
        assert same_weights(VisionLanguageModel.from_pretrained(folder), other)
        assert [path.name for path in folder.parent.iterdir()] == ["saved"]

    @pytest.mark.parametrize("stage", ["write_weights", "write_json"])
    def test_an_error_leaves_the_old_one(self, model, tmp_path, monkeypatch, stage):
        folder = model.save_pretrained(tmp_path / "saved")
        before = content(folder)

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(save, stage, full)
        with pytest.raises(CheckpointError, match="No space left"):
            other_weights(model).save_pretrained(folder)
        assert content(folder) == before
        assert [path.name for path in folder.parent.iterdir()] == ["saved"]

    def test_a_kill_leaves_the_old_one_and_the_next_save_works(self, model, tmp_path, monkeypatch):
        """The process ends, without any clean-up, when all but the exchange is done."""
        folder = model.save_pretrained(tmp_path / "saved")
        before = content(folder)
        other = other_weights(model)

        def save_and_die():
            folder_module._exchange = lambda *paths: os._exit(9)
            other.save_pretrained(folder)

        child = multiprocessing.get_context("fork").Process(target=save_and_die)
        child.start()
        child.join(600)
        assert child.exitcode == 9
        assert content(folder) == before
        assert (tmp_path / ".saved.saving" / "model.safetensors").exists()
        other.save_pretrained(folder)
        assert same_weights(VisionLanguageModel.from_pretrained(folder), other)
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]

    def test_through_a_link_and_without_an_exchange_in_the_kernel(self, model, tmp_path, monkeypatch):
        folder = model.save_pretrained(tmp_path / "saved")
        (tmp_path / "link").symlink_to("saved")
        monkeypatch.setattr(folder_module, "_exchange", lambda *paths: False)
        other = other_weights(model)
        other.save_pretrained(tmp_path / "link")
        assert same_weights(VisionLanguageModel.from_pretrained(folder), other)
        assert {path.name for path in tmp_path.iterdir()} == {"saved", "link"}

    def test_places_that_are_somebody_elses(self, model, tmp_path, monkeypatch):
        home, foreign, here = tmp_path / "homes" / "me", tmp_path / "photos", tmp_path / "in" / "here"
        for folder in (home, foreign, here):
            folder.mkdir(parents=True)
        (foreign / "boat.jpg").write_text("pixels")
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.chdir(here)
        boat = foreign / "boat.jpg"
        for place in ("~nobody-of-this-name/x", "~", home.parent, "/proc", foreign, boat, ".", here.parent):
            with pytest.raises(CheckpointError) as error:
                model.save_pretrained(place)
            assert str(place) in str(error.value) and "\n" not in str(error.value)
        assert content(tmp_path) == {"photos/boat.jpg": b"pixels"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["homes", "in", "photos"]

    @pytest.mark.parametrize("mark", [None, "metrics.jsonl", "training_state.pt"])
    def test_an_empty_folder_and_that_of_a_run_are_taken(self, model, tmp_path, mark):
        (tmp_path / "run").mkdir()
        if mark is not None:
            (tmp_path / "run" / mark).write_text("kept")
        assert (model.save_pretrained(tmp_path / "run") / "model.safetensors").exists()
        assert mark is None or (tmp_path / "run" / mark).read_text() == "kept"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "meta"),
        ({"projector_bias": True}, "projector_bias"),
        ({"image_placement": "prefix"}, "in front of the text"),
        (
            {
                "text": TextConfig(vocab_size=160, hidden_size=50, num_attention_heads=4, head_dim=8),
                "image_token_id": 5,
            },
            "num_attention_heads",
        ),
    ],
)
def test_models_that_cannot_be_saved(model, tmp_path, changes, named):
    """Without weights; and what transformers cannot express."""
    with torch.device("meta"):
        empty = VisionLanguageModel(replace(model.config, **changes))
    with pytest.raises(CheckpointError, match=named):
        empty.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_processor_that_does_not_fit(model, with_processor, tmp_path):
    with pytest.raises(CheckpointError, match="image token id"):
        model.save_pretrained(tmp_path / "saved", processor=with_processor[1])
    assert not (tmp_path / "saved").exists()


def test_what_generation_config_says_besides_ids_is_carried(model, tmp_path):
    folder = model.save_pretrained(tmp_path / "saved")
    path = folder / "generation_config.json"
    stored = json.loads(path.read_text())
    assert stored["do_sample"] is False
    own = {"do_sample": True, "temperature": 0.4, "max_new_tokens": 99, "some_key_of_2027": [1]}
    path.write_text(json.dumps(stored | own | {"eos_token_id": 7, "transformers_version": "4.1"}))
    again = VisionLanguageModel.from_pretrained(folder)
    assert again.generation_config == {**model.generation_config, **own}
    assert again.config.eos_token_ids == (7,)
    again.save_pretrained(tmp_path / "again")
    kept = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert kept == stored | own | {"eos_token_id": 7}


class TestProcessor:
    """The saved folder in transformers: AutoProcessor, AutoModelForImageTextToText, pipeline."""

    def test_portable_files(self, with_processor):
        """In the forms that 4.57 reads, too."""
        folder = with_processor[2]
        read = lambda name: json.loads((folder / name).read_text())
        tokenizer, config = read("tokenizer_config.json"), read("config.json")
        assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert tokenizer["extra_special_tokens"]["image_token"] == "<image>"
        for name in ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
            assert read(name)["processor_class"] == "Idefics3Processor"
        text = config["text_config"]
        assert text["rope_theta"] == text["rope_parameters"]["rope_theta"] == 100_000.0
        assert config["dtype"] == config["torch_dtype"] == text["dtype"] == text["torch_dtype"] == "float32"

    def test_same_inputs_and_same_answer(self, with_processor):
        _, processor, folder = with_processor
        opened = AutoProcessor.from_pretrained(folder)
        image = Image.effect_noise((70, 50), 80).convert("RGB")
        question = {"type": "text", "text": "how many circles are there?"}
        messages = [{"role": "user", "content": [{"type": "image"}, question]}]
        prompt = opened.apply_chat_template(messages, add_generation_prompt=True)
        inputs = opened(text=prompt, images=[image], return_tensors="pt")
        before = processor.hf_processor(text=prompt, images=[image], return_tensors="pt")
        assert inputs.keys() == before.keys()
        assert all(torch.equal(inputs[name], before[name]) for name in inputs)
        theirs = AutoModelForImageTextToText.from_pretrained(folder)
        stops = theirs.generation_config.eos_token_id
        assert stops == processor.tokenizer.eos_token_id
        expected = theirs.generate(**inputs, max_new_tokens=12)[:, inputs["input_ids"].shape[1] :]
        got = VisionLanguageModel.from_pretrained(folder).generate(**inputs, max_new_tokens=12)
        assert torch.equal(got, expected)
        shown = [{"role": "user", "content": [{"type": "image", "image": image}, question]}]
        answer = pipeline("image-text-to-text", model=str(folder))(
            text=shown, max_new_tokens=12, return_full_text=False
        )
        text = opened.decode(got[0], skip_special_tokens=True)
        assert answer[0]["generated_text"].strip() == text.strip()

    def test_saving_again_without_one_keeps_it(self, with_processor, tmp_path):
        """And the tokenizer's end token joins the stop tokens."""
        ours, processor, _ = with_processor
        other = other_weights(ours)
        other.config = replace(ours.config, eos_token_ids=(9,))
        folder = other.save_pretrained(tmp_path / "saved", processor=processor)
        again, before = VisionLanguageModel.from_pretrained(folder).config, content(folder)
        assert set(again.eos_token_ids) == {9, processor.tokenizer.eos_token_id}
        ours.save_pretrained(folder)
        assert content(folder).keys() == before.keys()
