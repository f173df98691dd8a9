"""The model card, and the upload to the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard

from data.processor import Processor
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.card import model_card
from tests import tiny


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
def hub(monkeypatch) -> dict:
    """What an upload asks of the Hub; `hub["cards"]` are revisions that have a README.md there."""
    seen: dict = {"cards": []}

    class Commit:
        commit_url = "https://hub/commit/1"

    def create_repo(self, repo_id, private, exist_ok):
        seen["repo"] = (repo_id, private, exist_ok)

    def create_branch(self, repo_id, branch, exist_ok):
        seen["branch"] = (repo_id, branch, exist_ok)

    def file_exists(self, repo_id, filename, revision):
        return filename == "README.md" and revision in seen["cards"]

    def upload_folder(self, repo_id, folder_path, revision, commit_message):
        seen["files"] = content(Path(folder_path))
        return Commit()

    for call in (create_repo, create_branch, file_exists, upload_folder):
        monkeypatch.setattr(HfApi, call.__name__, call)
    return seen


def test_upload(model_folder, hub, tmp_path):
    ours = VisionLanguageModel.from_pretrained(model_folder)
    processor, seen = Processor.from_pretrained(model_folder), hub
    assert ours.push_to_hub("me/small", processor=processor, private=True) == "https://hub/commit/1"
    assert seen["repo"] == ("me/small", True, True)
    card = seen["files"].pop("README.md").decode()
    assert seen["files"] == content(ours.save_pretrained(tmp_path / "saved", processor))
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    assert f"{parameters:,}" in card and ModelCard(card).data.tags


def test_upload_without_a_processor(model, hub):
    model.push_to_hub("me/small")
    assert "pipeline(" not in hub["files"]["README.md"].decode() and "branch" not in hub


def test_upload_keeps_the_card_that_the_model_came_with(model, hub, tmp_path):
    folder = model.save_pretrained(tmp_path / "saved", card="# mine\n")
    hub["cards"] = [None]
    VisionLanguageModel.from_pretrained(folder).push_to_hub("me/small")
    assert hub["files"]["README.md"] == b"# mine\n"


def test_upload_keeps_the_card_of_the_repository(model, hub):
    hub["cards"] = ["v2"]
    model.push_to_hub("me/small", revision="v2")
    assert "README.md" not in hub["files"] and hub["branch"] == ("me/small", "v2", True)
    model.push_to_hub("me/small", revision="v2", card="# new\n")
    assert hub["files"]["README.md"] == b"# new\n"


def test_upload_without_network(model, monkeypatch):
    def create_repo(self, repo_id, private, exist_ok):
        raise ConnectionError("network is down")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    with pytest.raises(CheckpointError, match=r"the upload of me/small failed .*: network is down"):
        model.push_to_hub("me/small")
