"""A new model from a bare SigLIP vision tower and a bare language model: Llama, Qwen2 or Qwen3."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipConfig,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from families.sections import TEXT_FAMILIES, TEXT_KEYS, text_config
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from tests.house import edit_json
from tests.invariants import new_cache
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


# Beyond TEXT. Qwen3 says its head_dim, which is not hidden_size / num_attention_heads.
QWENS = {
    "qwen2": {},
    "qwen3": {"head_dim": 20},
    "qwen3-biases": {"head_dim": 20, "attention_bias": True},
}


def qwen(folder, family: str, tied: bool = False, **changes) -> Qwen2ForCausalLM | Qwen3ForCausalLM:
    kinds = (Qwen2Config, Qwen2ForCausalLM) if family == "qwen2" else (Qwen3Config, Qwen3ForCausalLM)
    rope = {"rope_type": "default", "rope_theta": 5e4}
    more = {"tie_word_embeddings": tied, "rope_parameters": rope}
    model = kinds[1](kinds[0](**TEXT | QWENS[family] | more | changes))
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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", QWENS)
@torch.no_grad()
def test_qwen(tmp_path, family, tied):
    """Its logits in one pass, token by token through the cache, and in padded batches."""
    siglip(tmp_path / "vision", True)
    theirs = qwen(tmp_path / "text", family, tied)
    ours = VisionLanguageModel.from_backbones(tmp_path / "vision", tmp_path / "text", scale_factor=2).eval()
    assert ours.config.tie_word_embeddings == tied
    for name, parameter in theirs.named_parameters():
        if "layers" in name:
            found = ours.get_parameter(name.replace("model.", "language_model.", 1))
            assert torch.equal(found, parameter), name

    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = theirs(ids).logits
    assert (ours(ids).logits[..., :90] - expected).abs().max() <= 1e-4

    cache, start = new_cache(ours.language_model, 2, 40), 0
    for size in (9, *[1] * 31):
        hidden, _ = ours.hidden_states(ids[:, start : start + size], kv_cache=cache, start_pos=start)
        got = ours.language_model.logits(hidden)[..., :90]
        assert (got - expected[:, start : start + size]).abs().max() <= 1e-4, start
        start += size

    for padding in (slice(0, 13), slice(27, 40)):
        mask = torch.ones_like(ids)
        mask[1, padding] = 0
        got, expected = (model(ids, attention_mask=mask).logits[..., :90] for model in (ours, theirs))
        assert (got - expected)[mask.bool()].abs().max() <= 1e-4

    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = theirs.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), **asked)[:, 40:]
    assert torch.equal(ours.generate(ids[:1], max_new_tokens=12, stop_token_ids=()), answer)


@pytest.mark.parametrize("family", QWENS)
@torch.no_grad()
def test_qwen_is_saved_and_opened_here_and_by_transformers(tmp_path, family):
    siglip(tmp_path / "vision", True), qwen(tmp_path / "text", family)
    model = VisionLanguageModel.from_backbones(tmp_path / "vision", tmp_path / "text", scale_factor=2).eval()
    model.save_pretrained(tmp_path / "new")
    again = VisionLanguageModel.from_pretrained(tmp_path / "new").eval()
    assert again.config.text == model.config.text
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "new").eval()
    assert (theirs(ids).logits - model(ids).logits).abs().max() <= 1e-4
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("stored", [{}, {"num_attention_heads": 16, "num_key_value_heads": None}])
@pytest.mark.parametrize("kind", TEXT_FAMILIES)
def test_keys_that_are_absent_or_null(kind, stored):
    """transformers leaves out of a config.json what equals its defaults."""
    ours = text_config({"model_type": kind, **stored}, {})
    theirs = AutoConfig.for_model(kind, **stored)
    found = {name: getattr(theirs, name) for name in TEXT_KEYS if hasattr(theirs, name)}
    found = {name: value for name, value in found.items() if not name.startswith("rope_")}
    assert {name: getattr(ours, name) for name in found} == found
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "windows",
    [
        {"use_sliding_window": True, "layer_types": None},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_sliding_windows_are_refused(tmp_path, windows):
    siglip(tmp_path / "vision", True), qwen(tmp_path / "text", "qwen2")
    edit(tmp_path / "text", **windows)
    assert "sliding-window" in complaint(tmp_path / "vision", tmp_path / "text")


def test_the_family_says_what_its_blocks_have(tmp_path):
    """Keys that transformers does not look at change nothing; tensors must be those of the family."""
    vision, text = tmp_path / "vision", tmp_path / "text"
    siglip(vision, True)
    for make, keys in (
        (lambda: llama(text), {"qk_norm": True, "qkv_bias_only": True, "use_sliding_window": True}),
        (lambda: qwen(text, "qwen2"), {"attention_bias": False, "mlp_bias": True, "qk_norm": True}),
        (lambda: qwen(text, "qwen3"), {"qk_norm": False, "mlp_bias": True}),
    ):
        theirs = make()
        edit(text, **keys)
        model, ids = VisionLanguageModel.from_backbones(vision, text, scale_factor=2), torch.arange(30)[None]
        assert (model(ids).logits[..., :90] - theirs(ids).logits).abs().max() <= 1e-4
    qwen(text, "qwen3")
    edit(text, model_type="llama")
    assert "q_norm.weight" in complaint(vision, text)
    qwen(text, "qwen2")
    edit(text, model_type="qwen3", head_dim=12)
    assert "q_norm.weight" in complaint(vision, text)


def edit(folder, **changes) -> None:
    path = folder / "config.json"
    edit_json(path, **changes)


@pytest.fixture
def folders(tmp_path):
    siglip(tmp_path / "vision", True)
    llama(tmp_path / "text")
    return tmp_path / "vision", tmp_path / "text"


def complaint(vision, text, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        VisionLanguageModel.from_backbones(vision, text, **{"scale_factor": 2} | options)
    return str(caught.value)


def test_what_does_not_fit_together(folders):
    vision, text = folders
    assert "llama" in complaint(text, vision) and "siglip_vision_model" in complaint(vision, vision)
    for options in ({"extra_tokens": 0}, {"image_token_id": 91}, {"scale_factor": 3}):
        assert next(iter(options)) in complaint(*folders, **options)
    with pytest.raises(CheckpointError):
        VisionLanguageModel.from_pretrained(vision)


@pytest.mark.parametrize(("which", "end"), [(0, "layers.1.mlp.fc1.weight"), (1, "norm.weight")])
def test_missing_extra_and_misshapen_tensors(folders, which, end):
    path = folders[which] / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(end))
    weight = tensors.pop(name).clone()
    for changed, said in (({}, name), ({name: weight, f"{name}.lora": weight.clone()}, f"{name}.lora"),
                          ({name: weight[1:].clone()}, str(list(weight[1:].shape)))):  # fmt: skip
        save_file(tensors | changed, path, metadata={"format": "pt"})
        assert said in complaint(*folders)
