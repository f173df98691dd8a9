"""A new model from a bare SigLIP vision tower and a bare Llama-family language model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SiglipConfig,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from tests.tiny import randomize

VISION = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def siglip(folder, alone: bool) -> SiglipVisionModel:
    """A vision tower stored alone, or inside a SigLIP pair whose text tower and heads nobody needs."""
    if alone:
        model = SiglipVisionModel(SiglipVisionConfig(**VISION))
        tower = model
    else:
        text = VISION | {"vocab_size": 40, "max_position_embeddings": 8}
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=VISION))
        tower = model.vision_model
    randomize(model, 3)
    model.save_pretrained(folder)
    return tower.eval()


def llama(folder, tied: bool = False) -> LlamaForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 5e4}
    model = LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=tied, rope_parameters=rope))
    randomize(model, 4)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(("alone", "tied"), [(True, True), (False, False)])
@torch.no_grad()
def test_joined(tmp_path, alone, tied):
    """Each half computes what it did; new rows are the mean of the old; images have a place."""
    vision, text = siglip(tmp_path / "vision", alone), llama(tmp_path / "text", tied)
    model = VisionLanguageModel.from_backbones(
        tmp_path / "vision", tmp_path / "text", scale_factor=2, extra_tokens=3
    )
    config = model.config
    assert model.training and config.text.vocab_size == 93 and config.image_token_id == 90
    assert config.tie_word_embeddings == tied and config.eos_token_ids == (2,)
    model.eval()
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert (model.vision_model(pixels) - vision(pixels).last_hidden_state).abs().max() <= 1e-5
    ids = torch.arange(3, 60)[None]
    assert (model(ids).logits[..., :90] - text(ids).logits).abs().max() <= 1e-4
    for weight in (model.language_model.embed_tokens.weight, model.language_model.lm_head.weight):
        mean = weight[:90].mean(0)
        assert all((row - mean).abs().max() <= 1e-6 for row in weight[90:])
    assert (model.language_model.lm_head.weight is model.language_model.embed_tokens.weight) == tied
    std = model.projector.proj.weight.std().item() * model.projector.proj.in_features**0.5
    assert std == pytest.approx(1, abs=0.1)
    prompt = torch.cat((torch.full((1, 4), 90), ids), 1)
    assert model(prompt, pixels[:1]).logits.isfinite().all()
    model.save_pretrained(tmp_path / "new")
    assert torch.equal(
        VisionLanguageModel.from_pretrained(tmp_path / "new")(prompt, pixels[:1]).logits,
        model(prompt, pixels[:1]).logits,
    )


@pytest.fixture
def folders(tmp_path):
    siglip(tmp_path / "vision", True)
    llama(tmp_path / "text")
    return tmp_path / "vision", tmp_path / "text"


def test_projector_follows_the_generator(folders):
    def projector(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        model = VisionLanguageModel.from_backbones(*folders, scale_factor=2, generator=generator, dtype=dtype)
        assert all(parameter.dtype == dtype for parameter in model.parameters())
        return model.projector.proj.weight

    assert torch.equal(projector(1), projector(1)) and not torch.equal(projector(1), projector(2))
    assert torch.equal(projector(1), projector(1, torch.float32).bfloat16())
    # A generator of the CPU cannot fill a tensor of another device; "meta" stands for a GPU here.
    model = VisionLanguageModel.from_backbones(
        *folders, scale_factor=2, generator=torch.Generator(), device="meta"
    )
    assert model.projector.proj.weight.is_meta


def test_own_image_token(folders):
    """A row that the vocabulary already has may be the placeholder."""
    model = VisionLanguageModel.from_backbones(*folders, scale_factor=4, extra_tokens=0, image_token_id=17)
    assert model.config.image_token_id == 17 and model.config.text.vocab_size == 90


def complaint(vision, text, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        VisionLanguageModel.from_backbones(vision, text, **{"scale_factor": 2} | options)
    return str(caught.value)


def test_what_does_not_fit_together(folders):
    vision, text = folders
    assert "llama" in complaint(text, vision) and "siglip_vision_model" in complaint(vision, vision)
    for options in ({"extra_tokens": 0}, {"image_token_id": 91}, {"scale_factor": 3}):
        assert next(iter(options)) in complaint(*folders, **options)
    with pytest.raises(CheckpointError, match="from_backbones"):
        VisionLanguageModel.from_pretrained(vision)


@pytest.mark.parametrize(("which", "end"), [(0, "layers.1.mlp.fc1.weight"), (1, "norm.weight")])
def test_missing_and_extra_tensors(folders, which, end):
    path = folders[which] / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(end))
    weight = tensors.pop(name).clone()
    save_file(tensors, path, metadata={"format": "pt"})
    assert name in complaint(*folders)
    save_file(tensors | {name: weight, f"{name}.lora": weight.clone()}, path, metadata={"format": "pt"})
    assert f"{name}.lora" in complaint(*folders)
