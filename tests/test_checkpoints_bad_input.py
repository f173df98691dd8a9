"""Every broken checkpoint gives one clear sentence, before any weight is allocated."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import VisionLanguageModel
from models.checkpoints import CheckpointError, load
from tests import tiny

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path / "checkpoint")


@pytest.fixture
def sharded(tmp_path):
    tiny.hf_model("idefics3-1-tile").save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    return tmp_path / "sharded"


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch):
    """No weight may be read into memory before the checks are through."""

    def refuse(*args):
        raise AssertionError("a weight was read before the checkpoint was checked")

    monkeypatch.setattr(load, "read_tensor", refuse)


def complaint(source, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        VisionLanguageModel.from_pretrained(source, **options)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        (config[section] if section else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, name: str, value: torch.Tensor | None):
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(name, None)
    save_file(tensors | ({} if value is None else {name: value}), folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model_type", "qwen2_vl", "model_type"),
        ("text_config__model_type", "mamba", "mamba"),
        ("text_config__hidden_size", 10**12, "hidden_size"),
        ("text_config__hidden_size", "big", "hidden_size"),
        ("text_config__num_hidden_layers", -1, "num_hidden_layers"),
        ("text_config__num_hidden_layers", 3, "9 of 68 tensors"),
        ("text_config__vocab_size", 2**40, "vocab_size"),
        ("text_config__hidden_act", "relu", "hidden_act"),
        ("text_config__rope_parameters", {"rope_type": "yarn"}, "yarn"),
        ("text_config__rope_parameters", {"rope_type": "llama3"}, "low_freq_factor"),
        ("text_config__rope_parameters", 3, "rope_parameters"),
        ("text_config__rope_parameters", {"rope_theta": "x"}, "rope_theta"),
        ("text_config__partial_rotary_factor", 0.5, "partial_rotary_factor"),
        ("vision_config__patch_size", 0, "patch_size"),
        ("vision_config__image_size", [32, 48], "image_size"),
        ("vision_config", [1], "vision_config"),
        ("scale_factor", 3, "scale_factor"),
        ("image_token_id", 999, "image_token_id"),
        ("eos_token_id", "stop", "token id"),
        ("quantization_config", {"bits": 4}, "quantized"),
        ("dtype", "int4", "int4"),
    ],
)
def test_values_that_no_model_has(folder, field, value, named):
    edit_config(folder, **{field: value})
    assert named in complaint(folder)


def test_weights_in_another_format(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in complaint(folder)


@pytest.mark.parametrize("device", ["toaster", "cuda:", "cuda:99"])
def test_devices_and_dtypes_that_are_none(folder, device):
    assert device in complaint(folder, device=device)
    assert "float7" in complaint(folder, dtype="float7") and "int8" in complaint(folder, dtype=torch.int8)


@pytest.mark.parametrize(
    "change",
    [
        *(lambda raw, keep=keep: raw[: int(len(raw) * keep)] for keep in (0.5, 0.999)),
        *(lambda raw, size=size: bytes(size) for size in (0, 5, 100)),
        *(lambda raw, claimed=claimed: struct.pack("<Q", claimed) + raw[8:] for claimed in (2**63, 10**9)),
        lambda raw: raw + b"more",
    ],
)
def test_files_that_are_cut_short_or_no_safetensors(folder, change: Callable[[bytes], bytes]):
    path: Path = folder / WEIGHTS
    path.write_bytes(change(path.read_bytes()))
    text = complaint(folder)
    assert str(path) in text and "download it again" in text


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("model.text_model.layers.1.mlp.up_proj.weight", None, None),
        ("model.text_model.layers.0.mlp.gate_proj.lora_A", torch.ones(2, 3), None),
        ("model.text_model.norm.weight", torch.ones(47), None),
        ("lm_head.weight", torch.ones(160, 48, dtype=torch.int8), "I8"),
    ],
)
def test_missing_extra_misshapen_and_quantized_tensors(folder, monkeypatch, name, value, named):
    if named:  # the right shape, and still no weights
        monkeypatch.undo()
    edit_tensors(folder, name, value)
    assert (named or name) in complaint(folder)


class TestIndex:
    def edit(self, folder, change):
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    def test_index_and_shards_belong_together(self, sharded):
        first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
        name = next(iter(load_file(first)))
        self.edit(sharded, lambda index: index["weight_map"].update({name: second.name}))
        assert name in complaint(sharded)
        self.edit(sharded, lambda index: index["weight_map"].update({name: first.name, "lost": first.name}))
        assert "lost" in complaint(sharded)
        second.unlink()
        assert second.name in complaint(sharded)
        self.edit(sharded, lambda index: index.pop("weight_map"))
        assert "weight_map" in complaint(sharded)
