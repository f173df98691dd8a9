"""The model card, and the upload to the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from data.processor import Processor
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.card import model_card
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
    text = model_card(
        "me/small",
        model.config,
        1234,
        summary="Answers about shapes.",
        training_data="Drawn scenes.",
        evaluation=[
            {"questions": "how many", "accuracy": 0.97},
            {"questions": "colour", "accuracy": 0.9},
        ],
        license="apache-2.0",
    )
    card = ModelCard(text)
    assert card.data.library_name == "transformers" and card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "image-text-to-text" and "ocelli" in card.data.tags
    for part in (
        "Answers about shapes.",
        "Drawn scenes.",
        "| how many | 0.97 |",
        "1,234",
        'from_pretrained("me/small")',
        'pipeline("image-text-to-text", model="me/small")',
    ):
        assert part in card.content
    tables = [line for line in card.content.splitlines() if "|" in line]
    assert tables and all(line.startswith("|") and line.endswith("|") for line in tables)
    assert not any(line.startswith("tokens") for line in card.content.splitlines())
    assert "None yet." in model_card("me/small", model.config, 1234)
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
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_upload_without_a_processor(model, hub):
    model.push_to_hub("me/small")
    assert "pipeline(" not in held(hub)["README.md"].decode() and hub.branches == ["main"]


def test_upload_keeps_the_card_that_the_model_came_with(model, hub, tmp_path):
    folder = model.save_pretrained(tmp_path / "saved", card="# mine\n")
    model.push_to_hub("me/small")
    VisionLanguageModel.from_pretrained(folder).push_to_hub("me/small")
    assert held(hub)["README.md"] == b"# mine\n"


def test_upload_keeps_the_card_of_the_repository(model, hub):
    model.push_to_hub("me/small", card="# theirs\n")
    model.push_to_hub("me/small", revision="v2")
    assert held(hub)["README.md"] == b"# theirs\n" and hub.branches == ["main", "v2"]
    model.push_to_hub("me/small", revision="v2", card="# new\n")
    assert held(hub)["README.md"] == b"# new\n"


def test_upload_that_is_refused(model, hub):
    hub.uploads = None
    with pytest.raises(CheckpointError, match=r"the upload of me/small failed .*403") as refused:
        model.push_to_hub("me/small")
    assert "\n" not in str(refused.value)


def test_upload_without_network(model, monkeypatch, tmp_path):
    point_client_at(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    with pytest.raises(CheckpointError, match=r"the upload of me/small failed .*refused"):
        model.push_to_hub("me/small")
