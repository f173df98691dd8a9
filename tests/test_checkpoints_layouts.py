"""Folders that are not as today's transformers writes them: other names, other formats, half a clone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.processor import Processor
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.sources import open_files
from tests import qwen_checkpoints, tiny
from tests.hub_server import HubServer, point_client_at
from tests.test_checkpoints_backbones import llama, siglip
from tools.inspect import inspect

WEIGHTS = "model.safetensors"


def renamed(folder: Path, names: dict[str, str]) -> None:
    """The folder's tensors whose names begin with a key, with its value there."""
    tensors = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        front = next((front for front in names if name.startswith(front)), "")
        tensors[names.get(front, "") + name.removeprefix(front)] = tensor
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def complaint(ask, *args) -> str:
    with pytest.raises((CheckpointError, ValueError)) as caught:
        ask(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        {"model.visual.": "model.language_model.visual."},  # 5.5.2 and 5.5.3
        {
            "model.visual.": "model.language_model.visual.",  # 5.5.0 and 5.5.1
            "model.language_model.": "model.language_model.language_model.language_model.",
        },
        {"model.language_model.": "model.language_model.language_model."},
    ],
)
def test_qwen3_5_as_transformers_5_5_saved_it(tmp_path, names):
    qwen_checkpoints.save_hf("qwen3_5", tmp_path, seed=2)
    expected = VisionLanguageModel.from_pretrained(tmp_path)
    renamed(tmp_path, names)
    assert inspect(str(tmp_path))["fits"] == "yes" and not inspect(str(tmp_path))["left_out"]
    assert tiny.same_weights(VisionLanguageModel.from_pretrained(tmp_path), expected)


def test_what_the_file_has_instead_of_missing_tensors_is_said(tmp_path):
    qwen_checkpoints.save_hf("qwen3_vl", tmp_path)
    renamed(tmp_path, {"model.visual.blocks.": "student.blocks."})
    said = complaint(VisionLanguageModel.from_pretrained, tmp_path)
    assert ": model.visual.blocks.0" in said and ": student.blocks.0" in said


@pytest.mark.parametrize("name", ["model.lm_head.weight", "language_model.lm_head.weight", "output.weight"])
def test_a_head_of_another_name_is_no_tied_one(tmp_path, name):
    tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path)
    renamed(tmp_path, {"lm_head.weight": name})
    said = complaint(VisionLanguageModel.from_pretrained, tmp_path)
    assert ": lm_head.weight" in said and name in said and "tie_word_embeddings" not in said


# ----------------------------------------------------------------------------------------- half a clone
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234567\n"


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "config.json"])
def test_a_git_lfs_pointer_says_what_to_run(tmp_path, name):
    qwen_checkpoints.save_hf("qwen3_vl", tmp_path)
    (tmp_path / name).write_bytes(POINTER)
    asks = [VisionLanguageModel.from_pretrained]
    asks += [lambda folder: inspect(str(folder))] if name != "tokenizer.json" else []
    asks += [Processor.from_pretrained] if name != WEIGHTS else []
    for ask in asks:
        said = complaint(ask, tmp_path)
        assert name in said and "git lfs pull" in said


def test_a_shard_and_a_backbone_may_be_pointers(tmp_path):
    tiny.hf_model("idefics3-1-tile").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    shard = sorted((tmp_path / "model").glob("*00002-of*"))[0]
    shard.write_bytes(POINTER)
    assert shard.name in complaint(VisionLanguageModel.from_pretrained, tmp_path / "model")
    siglip(tmp_path / "vision", alone=True)
    llama(tmp_path / "text")
    (tmp_path / "text" / WEIGHTS).write_bytes(POINTER)
    said = complaint(VisionLanguageModel.from_backbones, tmp_path / "vision", tmp_path / "text")
    assert "git lfs pull" in said


# ---------------------------------------------------------------------------------------- other formats
@pytest.mark.parametrize(
    ("files", "format"),
    [
        (("openvino_language_model.xml", "openvino_vision_embeddings_model.bin"), "OpenVINO"),
        (("onnx/vision_encoder_fp16.onnx", "onnx/decoder_model_merged.onnx"), "ONNX"),
        (("pytorch_model-00001-of-00002.bin",), "PyTorch"),
    ],
)
@pytest.mark.parametrize("described", [True, False])
def test_folders_of_other_formats_are_named_as_such(tmp_path, files, format, described):
    folder = tmp_path / "model"
    qwen_checkpoints.save_hf("qwen3_vl", folder)
    (folder / WEIGHTS).unlink()
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"?")
    if not described:
        (folder / "config.json").unlink()
    assert format in complaint(VisionLanguageModel.from_pretrained, folder)
    if described:
        assert format in inspect(str(folder))["fits"]


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "awq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "gptq"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "mlx mxfp4"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "FP8"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}},
                }
            },
            "transform of input",
        ),
        ({"quantization_config": {"load_in_8bit": True}}, "no: quantized"),
        ({"quantization_config": {"config_groups": {"group_0": {}}}}, "no: quantized"),
    ],
)
def test_folders_quantized_in_other_ways_are_called_so(tmp_path, config, how):
    qwen_checkpoints.save_hf("qwen3_vl", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    tensors |= {name: torch.zeros(96, 8, dtype=torch.uint8), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    described = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert "quantized" in inspect(str(tmp_path))["fits"] and how in inspect(str(tmp_path))["fits"]
    said = complaint(VisionLanguageModel.from_pretrained, tmp_path)
    assert "quantized" in said and "None" not in said


def test_a_repository_that_is_called_gguf_and_holds_safetensors(tmp_path, monkeypatch):
    qwen_checkpoints.save_hf("qwen3_vl", tmp_path / "repo")
    here, name = VisionLanguageModel.from_pretrained(tmp_path / "repo"), "someone/not-for-gguf"
    with HubServer({name: tmp_path / "repo"}) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        assert inspect(name)["fits"] == "yes"
        assert tiny.same_weights(VisionLanguageModel.from_pretrained(name), here)
        assert Processor.from_pretrained(name).ask(None, "how many?")
    point_client_at(monkeypatch, server.url, tmp_path / "cache", offline=True)
    assert tiny.same_weights(VisionLanguageModel.from_pretrained(name), here)
    assert open_files(name).weights
