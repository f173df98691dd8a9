"""The model card, and the upload to the Hub."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from data.processor import Processor
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.save import model_card, public_name
from tests import tiny
from tests.hub_server import HubServer, point_client_at


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> VisionLanguageModel:
    """One without a processor."""
    folder = tmp_path_factory.mktemp("theirs")
    return VisionLanguageModel.from_pretrained(tiny.save(tiny.hf_model("idefics3-1-tile"), folder))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_card(model):
    rows = [{"questions": "how many", "accuracy": 0.97}, {"questions": "colour", "accuracy": 0.9}]
    told = {"summary": "Answers about shapes.", "training_data": "Drawn scenes.", "evaluation": rows}
    card = ModelCard(model_card("me/small", model.config, 1234, **told, license="apache-2.0"))
    assert card.data.library_name == "transformers" and card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "image-text-to-text" and "ocelli" in card.data.tags
    commands = 'from_pretrained("me/small")', 'pipeline("image-text-to-text", model="me/small")'
    for part in ("Answers about shapes.", "Drawn scenes.", "| how many | 0.97 |", "1,234", *commands):
        assert part in card.content
    tables = [line for line in card.content.splitlines() if "|" in line]
    assert tables and all(line.startswith("|") and line.endswith("|") for line in tables)
    bare = model_card("me/small", model.config, 1234, with_processor=False)
    assert "pipeline(" not in bare and "generate.py" not in bare
    assert 'AutoModelForImageTextToText.from_pretrained("me/small")' in bare


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty Hub; `held(hub)` is what has been uploaded to it."""
    with HubServer({}, uploads=tmp_path / "hub") as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        yield server


def held(hub: HubServer) -> dict[str, bytes]:
    return content(hub.repos["me/small"])


def test_upload(model_folder, hub, tmp_path):
    ours = VisionLanguageModel.from_pretrained(model_folder)
    processor = Processor.from_pretrained(model_folder)
    address = ours.push_to_hub("me/small", processor=processor, private=True)
    assert address == f"{hub.url}/me/small/commit/{hub.commit('me/small')}"
    assert (hub.created[0]["name"], hub.created[0]["visibility"]) == ("small", "private")
    files = held(hub)
    card = files.pop("README.md").decode()
    assert files == content(ours.save_pretrained(tmp_path / "saved", processor))
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    assert f"{parameters:,}" in card and ModelCard(card).data.tags
    again = VisionLanguageModel.from_pretrained("me/small")
    assert tiny.same_weights(ours, again)


def test_the_card_of_an_upload(model, hub, tmp_path):
    """The one given; that of the folder, with the new name in its commands; the repository's; a new one."""
    card = lambda: held(hub)["README.md"].decode()
    model.push_to_hub("me/small")
    assert "AutoModelForImageTextToText" in card() and hub.branches == ["main"]
    model.push_to_hub("me/small", card="# theirs\n")
    model.push_to_hub("me/small", revision="v2")
    assert card() == "# theirs\n" and hub.branches == ["main", "v2"]
    made = model_card("them/base", model.config, 1, summary="Better than them/base.")
    folder = model.save_pretrained(tmp_path / "saved", card=made)
    VisionLanguageModel.from_pretrained(folder).push_to_hub("me/small")
    assert card() == model_card("me/small", model.config, 1, summary="Better than them/base.")


OLD = (
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
OLD_PROCESSOR = (
    "chat_template.json", "additional_chat_templates/rag.jinja", "vocab.json", "special_tokens_map.json",
)  # fmt: skip
THEIRS = ("notes.md", "onnx/model.onnx", "eval/model.safetensors", "model_notes.json", "chat_templates.txt")


@pytest.mark.parametrize("with_processor", [False, True])
def test_upload_deletes_what_it_replaces(model_folder, hub, with_processor):
    """In the same commit; the repository's other files stay."""
    model = VisionLanguageModel.from_pretrained(model_folder)
    processor = Processor.from_pretrained(model_folder)
    model.push_to_hub("me/small", processor=processor)
    written = set(held(hub))
    for name in (*OLD, *OLD_PROCESSOR, *THEIRS):
        (hub.repos["me/small"] / name).parent.mkdir(exist_ok=True)
        (hub.repos["me/small"] / name).write_text("old")
    hub.commits.clear()
    model.push_to_hub("me/small", processor=processor if with_processor else None)
    assert set(held(hub)) == written | {*THEIRS} | (set() if with_processor else {*OLD_PROCESSOR})
    assert len(hub.commits) == 1


def test_upload_of_shards_deletes_the_one_file(model, hub):
    """Which transformers and we would read in their place."""
    model.push_to_hub("me/small")
    with torch.no_grad():
        changed = copy.deepcopy(model)
        for parameter in changed.parameters():
            parameter.add_(1)
    changed.push_to_hub("me/small", max_shard_bytes=30_000)
    again = VisionLanguageModel.from_pretrained("me/small")
    assert tiny.same_weights(changed, again)
    model.push_to_hub("me/small")
    assert not any("-of-" in name or "index" in name for name in held(hub))


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("owner/name", "owner/name"),
        ("/home/someone/models/base", "base"),
        ("./base/", "base"),
        ("~/models/base", "base"),
        ("a/b/c", "c"),
        ("here/base", "base"),
        ("hf://datasets/owner/rows", "hf://datasets/owner/rows"),
    ],
)
def test_cards_name_no_path_of_the_machine(tmp_path, monkeypatch, source, shown):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "base").mkdir(parents=True)
    assert public_name(source) == shown


def test_upload_that_is_refused(model, hub, monkeypatch):
    hub.uploads = None
    for named in ("403", "cannot be reached"):
        with pytest.raises(CheckpointError, match=named) as refused:
            model.push_to_hub("me/small")
        assert "\n" not in str(refused.value)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
