"""Every broken checkpoint gives one clear sentence, before any weight is allocated."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import VisionLanguageModel
from models.checkpoints import CheckpointError, load
from tests import tiny

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path / "checkpoint")


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


def edit_tensors(folder, **changes):
    tensors = load_file(folder / WEIGHTS)
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_no_such_folder(tmp_path):
    assert f"there is no folder {tmp_path / 'nowhere'}" in complaint(tmp_path / "nowhere")
    assert "there is no folder ./nowhere" in complaint("./nowhere")
    assert "there is no folder ~nobody-of-this-name/x" in complaint("~nobody-of-this-name/x")


def test_a_file_for_a_folder(folder):
    assert "is a file: expected a checkpoint folder" in complaint(folder / "config.json")


def test_revision_of_a_folder(folder):
    assert "has no revision 'main'" in complaint(folder, revision="main")


def test_without_config(folder):
    (folder / "config.json").unlink()
    assert "has no config.json" in complaint(folder)


def test_meta_init(folder):
    (folder / WEIGHTS).unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in complaint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin must be converted to safetensors" in complaint(folder)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"text"', "\x00\x01", "{" * 100_000])
def test_config_that_is_no_object(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json: " in complaint(folder)


def test_config_that_is_not_utf8(folder):
    (folder / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    assert "not valid JSON" in complaint(folder)


def test_unknown_architecture(folder):
    edit_config(folder, model_type="qwen2_vl")
    text = complaint(folder)
    assert (
        "unsupported architecture (model_type 'qwen2_vl')" in text and "SmolVLM" in text and "nanoVLM" in text
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"text_config__model_type": "mamba"}, "text_config.model_type must be llama, got 'mamba'"),
        ({"text_config__hidden_size": 10**12}, "TextConfig.hidden_size: expected an integer from 1 to"),
        ({"text_config__hidden_size": "big"}, "config.json"),
        ({"text_config__num_hidden_layers": -1}, "TextConfig.num_hidden_layers: expected an integer"),
        ({"text_config__num_hidden_layers": 3}, "9 of 68 tensors that config.json calls for are missing"),
        ({"text_config__vocab_size": 2**40}, "TextConfig.vocab_size: expected an integer from 1 to"),
        ({"text_config__hidden_act": "relu"}, "hidden_act: expected silu, got 'relu'"),
        ({"text_config__rope_parameters": {"rope_type": "yarn"}}, "rotary scaling 'yarn' is not supported"),
        ({"text_config__rope_parameters": {"rope_type": "llama3"}}, "llama3 rotary scaling lacks factor"),
        ({"text_config__rope_parameters": 3}, "rope_parameters must be an object, got int"),
        ({"text_config__rope_parameters": {"rope_theta": "x"}}, "rope_theta: expected a positive number"),
        ({"text_config__partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"vision_config__patch_size": 0}, "VisionConfig.patch_size: expected an integer"),
        ({"vision_config__image_size": [32, 48]}, "VisionConfig.image_size: expected an integer"),
        ({"vision_config": [1]}, "vision_config must be an object, got list"),
        ({"scale_factor": 3}, "scale_factor (3) must divide the vision grid"),
        ({"image_token_id": 999}, "image_token_id: expected an integer from 0 to 159, got 999"),
        ({"eos_token_id": "stop"}, "a token id must be a whole number, got 'stop'"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
    ],
)
def test_bad_values(folder, changes, sentence):
    edit_config(folder, **changes)
    assert sentence in complaint(folder)


@pytest.mark.parametrize("device", ["toaster", "cuda:", "cuda:99"])
def test_unknown_device_argument(folder, device):
    assert f"device '{device}' cannot be used, expected cpu, cuda" in complaint(folder, device=device)


def test_unknown_dtype_argument(folder):
    assert "unknown dtype 'float7': expected auto, float32" in complaint(folder, dtype="float7")
    assert "unknown dtype torch.int8: expected auto, float32" in complaint(folder, dtype=torch.int8)


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_file_cut_short(folder, keep):
    path = folder / WEIGHTS
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: int(size * keep)])
    assert f"expected {size} bytes, got {int(size * keep)}: it was cut short" in complaint(folder)


@pytest.mark.parametrize("size", [0, 5])
def test_file_of_a_few_bytes(folder, size):
    (folder / WEIGHTS).write_bytes(bytes(size))
    assert f"not a safetensors file, it has {size} bytes" in complaint(folder)


@pytest.mark.parametrize("claimed", [2**63, 10**9])
def test_header_larger_than_the_file(folder, claimed):
    path = folder / WEIGHTS
    path.write_bytes(struct.pack("<Q", claimed) + path.read_bytes()[8:])
    assert f"the header claims {claimed} bytes but the file has {path.stat().st_size}" in complaint(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"no json",
        b"[" * 200_000,
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
    ],
)
def test_header_that_makes_no_sense(folder, header):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert "the safetensors header cannot be read" in complaint(folder)


def test_bytes_that_belong_to_nothing(folder):
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")
    assert "it has bytes that belong to no tensor" in complaint(folder)


def test_missing_tensor(folder):
    name = "model.text_model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, **{name: None})
    assert f"1 of 59 tensors that config.json calls for are missing: {name}" in complaint(folder)


def test_extra_tensor(folder):
    edit_tensors(folder, **{"model.text_model.layers.0.mlp.gate_proj.lora_A": torch.ones(2, 3)})
    assert "1 tensors have no place in the model" in complaint(folder)
    assert "gate_proj.lora_A" in complaint(folder)


def test_wrong_shape(folder):
    edit_tensors(folder, **{"model.text_model.norm.weight": torch.ones(47)})
    assert "tensor model.text_model.norm.weight has shape [47], expected [48]" in complaint(folder)


class TestIndex:
    @pytest.fixture
    def sharded(self, tmp_path):
        tiny.hf_model("idefics3-1-tile").save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
        return tmp_path / "sharded"

    def edit(self, folder, change):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    def test_missing_shard(self, sharded):
        shard = sorted(sharded.glob("model-*.safetensors"))[1]
        shard.unlink()
        assert f"has no {shard.name}, which its index names" in complaint(sharded)

    @pytest.mark.parametrize(
        "name", ["../secret.safetensors", "/etc/passwd", "..\\x.safetensors", 3, "x.bin"]
    )
    def test_shards_stay_in_the_folder(self, sharded, name):
        save_file({"lm_head.weight": torch.ones(1)}, sharded.parent / "secret.safetensors")
        self.edit(sharded, lambda index: index["weight_map"].update({"lm_head.weight": name}))
        assert f"expected shards named like model-00001-of-00002.safetensors, got {name!r}" in complaint(
            sharded
        )

    def test_no_weight_map(self, sharded):
        self.edit(sharded, lambda index: index.pop("weight_map"))
        assert "expected a weight_map" in complaint(sharded)

    def test_tensor_in_another_shard(self, sharded):
        first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
        name = next(iter(load_file(first)))
        self.edit(sharded, lambda index: index["weight_map"].update({name: second.name}))
        assert f"{first.name} holds {name}, which the index puts in {second.name}" in complaint(sharded)

    def test_tensor_in_no_shard(self, sharded):
        shard = sorted(sharded.glob("model-*.safetensors"))[0].name
        self.edit(sharded, lambda index: index["weight_map"].update({"lost": shard}))
        assert "the index names tensors that no shard holds: lost" in complaint(sharded)


def test_quantized_tensor(folder, monkeypatch):
    """Weights stored as integers have the right shape and are still no weights."""
    monkeypatch.undo()
    edit_tensors(folder, **{"lm_head.weight": torch.ones(160, 48, dtype=torch.int8)})
    assert "weights stored as I8 are not supported" in complaint(folder)
