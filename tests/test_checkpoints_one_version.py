"""A folder that others write to while it is read: one version of it, or a refusal."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from data.processor import Processor
from inference.checkpoint import open_checkpoint
from models import VisionLanguageModel
from models.checkpoints import CheckpointError, load, sources
from tests.tiny import randomize


@pytest.fixture(scope="module")
def versions(model_folder, tmp_path_factory) -> tuple[Path, Path]:
    """Two checkpoints that differ in every weight, in generation_config.json and in the chat template."""
    root, model = tmp_path_factory.mktemp("versions"), VisionLanguageModel.from_pretrained(model_folder)
    processor = Processor.from_pretrained(model_folder).hf_processor
    template = processor.chat_template
    for seed in (1, 2):
        randomize(model, seed)
        model.generation_config = {"top_k": seed}
        processor.chat_template = f"{{# {seed} #}}{template}"
        model.save_pretrained(root / str(seed), processor, max_shard_bytes=100_000)
    return root / "1", root / "2"


def exchanged(new: Path, folder: Path) -> None:
    """As `save_pretrained` here does it."""
    model = VisionLanguageModel.from_pretrained(new)
    model.save_pretrained(folder, Processor.from_pretrained(new), max_shard_bytes=100_000)


def renamed_over(new: Path, folder: Path) -> None:
    for path in new.iterdir():
        shutil.copy2(path, folder / ".draft")
        (folder / ".draft").rename(folder / path.name)


def written_where_it_lies(new: Path, folder: Path) -> None:
    """Of the same length and, by name, of the same time as before."""
    for path in new.iterdir():
        old = folder / path.name
        stat = old.stat()
        old.write_bytes(path.read_bytes())
        os.utime(old, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def removed_and_copied(new: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(new, folder)


def template_of(processor: Processor) -> str:
    return processor.hf_processor.chat_template


def same(model: VisionLanguageModel, folder: Path) -> bool:
    other = VisionLanguageModel.from_pretrained(folder)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return model.generation_config == other.generation_config and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("write", "at"),
    [(exchanged, "fill"), (renamed_over, "stored_entries"), (written_where_it_lies, "fill"),
     (removed_and_copied, "stored_entries")],
)  # fmt: skip
def test_a_model_that_is_saved_anew_while_it_is_read(versions, tmp_path, monkeypatch, write, at):
    first, second = versions
    folder = shutil.copytree(first, tmp_path / "model")
    original, left = getattr(load, at), [None]

    def meanwhile(*arguments):
        if left:
            left.clear()
            write(second, folder)
        return original(*arguments)

    monkeypatch.setattr(load, at, meanwhile)
    assert same(VisionLanguageModel.from_pretrained(folder), second) and not left


def test_model_and_processor_are_of_one_version(versions, tmp_path, monkeypatch):
    first, second = versions
    folder = shutil.copytree(first, tmp_path / "model")
    original, left = Processor.from_pretrained, [None]

    def meanwhile(*arguments, **options):
        if left:
            left.clear()
            renamed_over(second, folder)
        return original(*arguments, **options)

    monkeypatch.setattr(Processor, "from_pretrained", meanwhile)
    checkpoint = open_checkpoint(folder, device="cpu")
    assert same(checkpoint.model, second) and not left
    assert template_of(checkpoint.processor) == template_of(original(second))


@pytest.mark.parametrize(
    ("opening", "name"),
    [
        (VisionLanguageModel.from_pretrained, ".{}.a1B2c3"),
        (open_checkpoint, ".cache/huggingface/download/x1=.9f8e.incomplete"),
    ],
)
def test_a_folder_in_which_files_still_grow(versions, tmp_path, monkeypatch, opening, name):
    """As rsync and `hf download --local-dir` leave it while a shard is on its way, and as others write it."""
    folder = shutil.copytree(versions[0], tmp_path / "model")
    original, calls = load.fill, []
    draft = folder / name.format("tokenizer_config.json")
    draft.parent.mkdir(parents=True, exist_ok=True)

    def meanwhile(*arguments):
        with draft.open("ab") as file:
            calls.append(file.write(b" "))
        return original(*arguments)

    monkeypatch.setattr(load, "fill", meanwhile)
    monkeypatch.setattr(sources, "_PAUSE", 0)
    with pytest.raises(CheckpointError, match="changed each time"):
        opening(folder)
    assert 1 < len(calls) < 10
