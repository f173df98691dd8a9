"""Stop tokens of a loaded model: what its configs and its tokenizer's files call the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data.processor import Processor
from families import idefics3
from inference import checkpoint as opening
from models import VisionLanguageModel
from tests.hub_server import HubServer, point_client_at


@pytest.fixture
def folder(model_folder, tmp_path) -> Path:
    """A checkpoint whose configs name no end token."""
    copy = shutil.copytree(model_folder, tmp_path / "copy")
    (copy / "generation_config.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["eos_token_id"] = None
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def edit(path: Path, **changes) -> None:
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored = {name: value for name, value in (stored | changes).items() if value is not ...}
    path.write_text(json.dumps(stored))


def stops(folder) -> tuple[int, ...]:
    return VisionLanguageModel.from_pretrained(folder).config.eos_token_ids


def test_the_tokenizers_end_token(folder):
    assert stops(folder) == (Processor.from_pretrained(folder).tokenizer.eos_token_id,)
    edit(folder / "tokenizer_config.json", eos_token={"__type": "AddedToken", "content": "<|im_end|>"})
    expected = Processor.from_pretrained(folder).tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stops(folder) == (expected,)
    edit(folder / "config.json", eos_token_id=1)
    assert stops(folder) == tuple(sorted((1, expected)))


def test_old_files_that_tell_it(folder):
    edit(folder / "tokenizer_config.json", eos_token=...)
    edit(folder / "special_tokens_map.json", eos_token={"content": "two"})
    edit(folder / "tokenizer.json", added_tokens=[], model={"vocab": {"two": 9}})
    assert stops(folder) == (9,)
    edit(folder / "tokenizer_config.json", added_tokens_decoder={"8": {"content": "two"}})
    (folder / "tokenizer.json").unlink()
    assert stops(folder) == (8,)


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_ids_outside_of_the_vocabulary_are_as_good_as_absent(folder, token_id):
    decoder = {str(token_id): {"content": "</s>"}}
    edit(folder / "tokenizer_config.json", eos_token="</s>", added_tokens_decoder=decoder)
    edit(folder / "config.json", eos_token_id=[token_id], pad_token_id=token_id)
    text = json.loads((folder / "config.json").read_text())["text_config"] | {"pad_token_id": 3}
    edit(folder / "config.json", text_config=text)
    config = VisionLanguageModel.from_pretrained(folder).config
    assert (config.eos_token_ids, config.pad_token_id) == ((), 3)
    stored = json.loads((folder / "config.json").read_text()) | {"bos_token_id": token_id}
    assert idefics3.read_config(stored, {"pad_token_id": token_id}, {}).pad_token_id == 3


def test_the_processor_is_of_the_commit_of_the_weights(folder, tmp_path, monkeypatch):
    """A branch may move between the two."""
    asked, original = [], Processor.from_pretrained

    def noted(opened, **options):
        asked.append(opened.processor_folder.name)
        return original(opened, **options)

    monkeypatch.setattr(Processor, "from_pretrained", noted)
    with HubServer({"owner/tiny": folder}) as hub:
        point_client_at(monkeypatch, hub.url, tmp_path / "cache")
        opened = opening.open_checkpoint("owner/tiny", "main", "cpu")
        assert asked == [hub.commit("owner/tiny")]
        assert opened.model.origin.commit == hub.commit("owner/tiny")
        assert opened.model.config.eos_token_ids == stops(folder)
    assert opening.open_checkpoint(folder, device="cpu").model.origin.commit is None
