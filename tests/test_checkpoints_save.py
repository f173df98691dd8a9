"""Saving whole folders and portable files; the model card; the upload to the Hub."""

from __future__ import annotations

import copy
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline

from data.processor import Processor
from models import TextConfig, VisionLanguageModel
from models.checkpoints import CheckpointError, save
from models.checkpoints.save import model_card, public_name
from tests import tiny
from tests.hub_server import HubServer, point_client_at
from tests.tiny import same_weights

load = VisionLanguageModel.from_pretrained
WRITTEN = {"config.json", "generation_config.json", "model.safetensors"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> VisionLanguageModel:
    return load(tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path_factory.mktemp("theirs")))


@pytest.fixture(scope="module")
def other(model) -> VisionLanguageModel:
    """The same with other weights."""
    other = VisionLanguageModel(model.config)
    other.init_weights(torch.Generator().manual_seed(1))
    return other


@pytest.fixture(scope="module")
def with_processor(tmp_path_factory):
    """(our model, our processor, the folder that both were saved to)."""
    processor, theirs = tiny.model_with_processor("smolvlm-1-tile")
    root = tmp_path_factory.mktemp("with-processor")
    ours = load(tiny.save(theirs, root / "theirs"))
    return ours, processor, ours.save_pretrained(root / "ours", processor=processor)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class TestWholeFolders:
    def test_replacing_drops_old_shards_and_keeps_what_is_not_ours(self, model, other, tmp_path):
        folder = model.save_pretrained(tmp_path / "deep" / "saved", max_shard_bytes=60_000, card="# old\n")
        (folder / "log.jsonl").write_text("{}")
        (folder / "state").mkdir()
        (folder / "state" / "optimizer.pt").write_text("moments")
        other.save_pretrained(folder)
        assert set(content(folder)) == {*WRITTEN, "README.md", "log.jsonl", "state/optimizer.pt"}
        assert all(stat.S_IMODE((folder / name).stat().st_mode) & 0o444 == 0o444 for name in WRITTEN)
        assert same_weights(load(folder), other)
        assert [path.name for path in folder.parent.iterdir()] == ["saved"]

    @pytest.mark.parametrize("stage", ["write_weights", "write_json"])
    def test_an_error_leaves_the_old_one(self, model, other, tmp_path, monkeypatch, stage):
        folder = model.save_pretrained(tmp_path / "saved")
        before = content(folder)

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(save, stage, full)
        with pytest.raises(CheckpointError):
            other.save_pretrained(folder)
        assert content(folder) == before
        assert [path.name for path in folder.parent.iterdir()] == ["saved"]

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
            assert str(place) in str(error.value)
        assert content(tmp_path) == {"photos/boat.jpg": b"pixels"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["homes", "in", "photos"]

    def test_two_who_save_to_one_folder(self, model, other, tmp_path):
        """One is refused while the other writes; in the end the folder holds one whole checkpoint."""
        target = tmp_path / "shared"

        def save_often(model: VisionLanguageModel) -> int:
            saved = 0
            for _ in range(10):
                try:
                    model.save_pretrained(target, max_shard_bytes=40_000)
                    saved += 1
                except CheckpointError as error:
                    assert str(target) in str(error)
            return saved

        with ThreadPoolExecutor() as pool:
            assert sum(pool.map(save_often, (model, other))) > 0
        found = load(target)
        assert same_weights(found, model) or same_weights(found, other)
        assert [path.name for path in tmp_path.iterdir()] == ["shared"]  # nobody's half is left


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "meta"),
        ({"projector_bias": True}, "projector_bias"),
        ({"image_token_id": 160, "family": "nanovlm"}, "beyond the vocabulary"),
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
    with pytest.raises(CheckpointError):
        model.save_pretrained(tmp_path / "saved", processor=with_processor[1])
    assert not (tmp_path / "saved").exists()


def test_what_generation_config_says_besides_ids_is_carried(model, tmp_path):
    folder = model.save_pretrained(tmp_path / "saved")
    path = folder / "generation_config.json"
    stored = json.loads(path.read_text())
    assert stored["do_sample"] is False
    own = {"do_sample": True, "temperature": 0.4, "max_new_tokens": 99, "some_key_of_2027": [1]}
    path.write_text(json.dumps(stored | own | {"eos_token_id": 7, "transformers_version": "4.1"}))
    again = load(folder)
    assert again.generation_config == {**model.generation_config, **own}
    assert again.config.eos_token_ids == (7,)
    again.save_pretrained(tmp_path / "again")
    kept = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert kept == stored | own | {"eos_token_id": 7}


class TestProcessor:
    """The saved folder in transformers: AutoProcessor, AutoModelForImageTextToText, pipeline."""

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
        assert theirs.generation_config.eos_token_id == processor.tokenizer.eos_token_id
        expected = theirs.generate(**inputs, max_new_tokens=12)[:, inputs["input_ids"].shape[1] :]
        got = load(folder).generate(**inputs, max_new_tokens=12)
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
        changed = copy.copy(ours)
        changed.config = replace(ours.config, eos_token_ids=(9,))
        folder = changed.save_pretrained(tmp_path / "saved", processor=processor)
        again, before = load(folder).config, content(folder)
        assert set(again.eos_token_ids) == {9, processor.tokenizer.eos_token_id}
        ours.save_pretrained(folder)
        assert content(folder).keys() == before.keys()


def test_card(model):
    told = {
        "summary": "Answers about shapes.",
        "training_data": "Drawn scenes.",
        "evaluation": "| a | 0.97 |",
    }
    card = ModelCard(model_card("me/small", model.config, 1234, **told, license="apache-2.0"))
    assert card.data.library_name == "transformers" and card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "image-text-to-text" and "ocelli" in card.data.tags
    commands = 'from_pretrained("me/small")', 'pipeline("image-text-to-text", model="me/small")'
    for part in (*told.values(), "1,234", *commands):
        assert part in card.content
    bare = model_card("me/small", model.config, 1234, with_processor=False)
    assert "pipeline(" not in bare and "generate.py" not in bare
    assert 'AutoModelForImageTextToText.from_pretrained("me/small")' in bare


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("owner/name", "owner/name"),
        ("/home/someone/models/base", "base"),
        ("~/models/base", "base"),
        ("here/base", "base"),
        ("hf://datasets/owner/rows", "hf://datasets/owner/rows"),
    ],
)
def test_cards_name_no_path_of_the_machine(tmp_path, monkeypatch, source, shown):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "base").mkdir(parents=True)
    assert public_name(source) == shown


OLD = (
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
OLD_PROCESSOR = (
    "chat_template.json", "additional_chat_templates/rag.jinja", "vocab.json", "special_tokens_map.json",
)  # fmt: skip
THEIRS = ("notes.md", "onnx/model.onnx", "eval/model.safetensors", "model_notes.json", "chat_templates.txt")


class TestUpload:
    @pytest.fixture
    def hub(self, monkeypatch, tmp_path):
        """An empty Hub; `held(hub)` is what has been uploaded to it."""
        with HubServer({}, uploads=tmp_path / "hub") as server:
            point_client_at(monkeypatch, server.url, tmp_path / "cache")
            yield server

    def held(self, hub: HubServer) -> dict[str, bytes]:
        return content(hub.repos["me/small"])

    def test_files_and_card(self, model_folder, hub, tmp_path):
        ours, processor = load(model_folder), Processor.from_pretrained(model_folder)
        address = ours.push_to_hub("me/small", processor=processor, private=True)
        assert address == f"{hub.url}/me/small/commit/{hub.commit('me/small')}"
        assert (hub.created[0]["name"], hub.created[0]["visibility"]) == ("small", "private")
        files = self.held(hub)
        card = files.pop("README.md").decode()
        assert files == content(ours.save_pretrained(tmp_path / "saved", processor))
        parameters = sum(parameter.numel() for parameter in ours.parameters())
        assert f"{parameters:,}" in card and ModelCard(card).data.tags
        assert same_weights(ours, load("me/small"))

    @pytest.mark.parametrize("with_processor", [False, True])
    def test_what_is_replaced_is_deleted_in_the_same_commit(self, model_folder, hub, with_processor):
        """The repository's other files stay."""
        model, processor = load(model_folder), Processor.from_pretrained(model_folder)
        model.push_to_hub("me/small", processor=processor)
        written = set(self.held(hub))
        for name in (*OLD, *OLD_PROCESSOR, *THEIRS):
            (hub.repos["me/small"] / name).parent.mkdir(exist_ok=True)
            (hub.repos["me/small"] / name).write_text("old")
        hub.commits.clear()
        model.push_to_hub("me/small", processor=processor if with_processor else None)
        assert set(self.held(hub)) == written | {*THEIRS} | (set() if with_processor else {*OLD_PROCESSOR})
        assert len(hub.commits) == 1

    def test_one_that_is_refused(self, model, hub, monkeypatch):
        hub.uploads = None
        for _ in range(2):  # by the Hub, which is then gone
            with pytest.raises(CheckpointError):
                model.push_to_hub("me/small")
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
