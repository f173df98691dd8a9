"""Checkpoints of transformers' Idefics3 and SmolVLM opened here, and ours opened there."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from tests import tiny

BAR = 1e-4


def logits(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.slow(but=7)
@pytest.mark.parametrize("name", tiny.CASES)
def test_logits_and_round_trip(name, tmp_path):
    """Theirs opened here gives their logits; saved here and opened there, the same; all weights bitwise."""
    theirs, inputs = tiny.build(name)
    ours = VisionLanguageModel.from_pretrained(tiny.save(theirs, tmp_path / "theirs"))
    expected = logits(theirs, inputs)
    assert not ours.training and ours.dtype == torch.float32
    assert (logits(ours, inputs) - expected).abs().max() <= BAR

    ours.save_pretrained(tmp_path / "ours")
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)

    again = VisionLanguageModel.from_pretrained(tmp_path / "ours")
    assert again.config == ours.config
    back = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(logits(back, inputs), expected)


@pytest.mark.parametrize("name", ["idefics3-1-tile", "smolvlm-2-images-tied", "idefics3-scale-3"])
def test_ragged_batch(name, tmp_path):
    """Rows of different length, images and tiles, one with none, left-padded."""
    theirs = tiny.hf_model(name)
    inputs = tiny.make_inputs(tiny.CASES[name], rows=((1,), (), (2, 1), (3,)))
    ours = VisionLanguageModel.from_pretrained(tiny.save(theirs, tmp_path))
    real = inputs["attention_mask"].bool()
    assert (logits(ours, inputs)[real] - logits(theirs, inputs)[real]).abs().max() <= BAR


def test_bfloat16_is_kept_and_converted(tmp_path):
    theirs = tiny.hf_model("smolvlm-1-tile").to(torch.bfloat16)
    tiny.save(theirs, tmp_path / "theirs")
    kept = VisionLanguageModel.from_pretrained(tmp_path / "theirs", dtype="stored")
    assert kept.dtype == torch.bfloat16
    wide = VisionLanguageModel.from_pretrained(tmp_path / "theirs", dtype="float32")
    for (name, narrow), parameter in zip(kept.named_parameters(), wide.parameters(), strict=True):
        assert parameter.dtype == torch.float32, name
        assert torch.equal(narrow.float(), parameter), name
    kept.save_pretrained(tmp_path / "ours")
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


def test_sharded_both_ways(tmp_path):
    theirs, inputs = tiny.build("idefics3-2-tiles-tied")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    ours = VisionLanguageModel.from_pretrained(tmp_path / "theirs")
    assert (logits(ours, inputs) - logits(theirs, inputs)).abs().max() <= BAR
    ours.save_pretrained(tmp_path / "ours", max_shard_bytes=60_000)
    shards = sorted((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "ours" / "model.safetensors").exists()
    assert all(shard.stat().st_size < 70_000 for shard in shards)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    stored = {key: path.name for path in shards for key in load_file(path)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in ours.parameters())
    back = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(logits(back, inputs), logits(theirs, inputs))


def test_old_names_and_keys(tmp_path):
    """An older checkpoint: no leading `model.`, stored rotary buffers, rope_theta beside, a llama3
    rope_scaling.
    """
    theirs, inputs = tiny.build("idefics3-llama3-rope")
    tiny.save(theirs, tmp_path)
    tensors = {
        name.removeprefix("model."): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["text_model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    tensors["vision_model.embeddings.position_ids"] = torch.arange(16)[None]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"]["rope_theta"] = rope.pop("rope_theta")
    config["text_config"]["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    assert (logits(ours, inputs) - logits(theirs, inputs)).abs().max() <= BAR


class TestTying:
    """Only the top-level flag counts; a head of its own is kept; a head that is claimed must be there."""

    def edit(self, folder, tied=None, head=None, drop_head=False):
        config = json.loads((folder / "config.json").read_text())
        config.pop("tie_word_embeddings", None)
        if tied is not None:
            config["tie_word_embeddings"] = tied
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        if drop_head:
            tensors.pop("lm_head.weight", None)
        if head is not None:
            tensors["lm_head.weight"] = head
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def test_claimed_with_a_different_head_keeps_both(self, tmp_path):
        theirs, inputs = tiny.build("idefics3-1-tile")
        tiny.save(theirs, tmp_path)
        self.edit(tmp_path, tied=True)
        ours = VisionLanguageModel.from_pretrained(tmp_path)
        assert not ours.config.tie_word_embeddings
        assert (logits(ours, inputs) - logits(theirs, inputs)).abs().max() <= BAR

    def test_claimed_with_the_same_head_is_tied(self, tmp_path):
        theirs = tiny.hf_model("idefics3-2-tiles-tied")
        tiny.save(theirs, tmp_path)
        self.edit(tmp_path, tied=True, head=theirs.model.text_model.embed_tokens.weight.detach().clone())
        ours = VisionLanguageModel.from_pretrained(tmp_path)
        assert ours.config.tie_word_embeddings
        assert ours.language_model.lm_head.weight is ours.language_model.embed_tokens.weight

    @pytest.mark.parametrize("flag", [False, None])
    def test_not_claimed_and_no_head_is_refused(self, tmp_path, flag):
        tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path)
        self.edit(tmp_path, tied=flag, drop_head=True)
        with pytest.raises(CheckpointError):
            VisionLanguageModel.from_pretrained(tmp_path)


def test_stop_tokens_are_a_set_from_both_files(tmp_path):
    tiny.save(tiny.hf_model("smolvlm-1-tile"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 9], "pad_token_id": 5}))
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    assert ours.config.eos_token_ids == (7, 9, 11) and ours.config.pad_token_id == 5
    ours.save_pretrained(tmp_path / "again")
    assert VisionLanguageModel.from_pretrained(tmp_path / "again").config.eos_token_ids == (7, 9, 11)
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "again").generation_config.eos_token_id == [
        7,
        9,
        11,
    ]


def test_loaded_weights_live_apart_from_the_file(tmp_path):
    """No mapping is kept: overwriting the file does not change the model."""
    tiny.save(tiny.hf_model("smolvlm-1-tile"), tmp_path)
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    before = ours.language_model.embed_tokens.weight.detach().clone()
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(ours.language_model.embed_tokens.weight, before)
