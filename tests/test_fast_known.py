"""What a fast step has no code for is answered by PyTorch: nothing crashes, and nothing is left out."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from generation.fast.native.step import NativeStep
from generation.fast.network import DECODER, GEMMA4, TOWER, decoder_of
from generation.fast.quantized import pack
from generation.fast.tower import FastTower
from inference.checkpoint import Fast
from inference.fast import fast_step, speed_up
from models import VisionLanguageModel
from models.language_model import MLP
from models.vision_transformer import ModalityProjector, VisionBlock
from tests.invariants import MODELS
from tests.prompts import ImageBlock, inputs_of, tiny_vlm
from tests.test_fast_decode import needs_compiler  # noqa: F401  (for every test here)


class OtherBlock(nn.Module):
    """No attention at all, as where a decoder begins with a convolution."""

    def __init__(self, width: int):
        super().__init__()
        self.conv, self.keeps = nn.Linear(width, width), {}

    def forward(self, x, *_):
        return x + self.conv(x).tanh()


class GeluMLP(MLP):
    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))


class ScaledBlock(VisionBlock):
    """The branches have a learnt scale."""

    def forward(self, x):
        x = x + 0.3 * self.self_attn(self.layer_norm1(x))
        return x + 0.3 * self.mlp(self.layer_norm2(x))


def other_first_layer(model: VisionLanguageModel) -> None:
    model.language_model.layers[0] = OtherBlock(model.config.text.hidden_size)


def other_activation(model: VisionLanguageModel) -> None:
    model.language_model.layers[1].mlp.__class__ = GeluMLP


def adapted(model: VisionLanguageModel) -> None:
    down = model.language_model.layers[1].mlp.down_proj
    model.language_model.layers[1].mlp.down_proj = nn.Sequential(down, nn.Tanh())


def parameter_in_a_block(model: VisionLanguageModel) -> None:
    model.language_model.layers[0].register_parameter("gamma", nn.Parameter(torch.ones(1)))


def hooked(model: VisionLanguageModel) -> None:
    model.language_model.layers[0].register_forward_hook(lambda module, given, out: out * 1.5)


def fewer_layers(model: VisionLanguageModel) -> None:
    model.language_model.layers = model.language_model.layers[:1]


def other_epsilon(model: VisionLanguageModel) -> None:
    model.language_model.norm.eps = 0.5


def mixed_types(model: VisionLanguageModel) -> None:
    pack(model.language_model.layers[0].mlp, "int8")


def other_config(model: VisionLanguageModel) -> None:
    class OtherConfig(type(model.config.text)):
        pass

    model.language_model.config = OtherConfig(**asdict(model.config.text))


def scaled_tower(model: VisionLanguageModel) -> None:
    for layer in model.vision_model.layers:
        layer.__class__ = ScaledBlock


def class_token(model: VisionLanguageModel) -> None:
    model.vision_model.class_embedding = nn.Parameter(torch.ones(model.config.vision.hidden_size))


def norms_without_biases(model: VisionLanguageModel) -> None:
    for layer in model.vision_model.layers:
        layer.layer_norm1 = nn.LayerNorm(model.config.vision.hidden_size, bias=False, eps=1e-6)


OF_DECODER = (
    *(other_first_layer, other_activation, adapted, parameter_in_a_block, hooked, fewer_layers),
    *(other_epsilon, mixed_types, other_config),
)
OF_TOWER = (scaled_tower, class_token, norms_without_biases)


@torch.no_grad()
def answer(model: VisionLanguageModel, step=None) -> tuple[torch.Tensor, torch.Tensor]:
    """What is seen of an image, and what is said of it."""
    given = inputs_of([7, ImageBlock(1), 9, 30])
    features = model.encode_images(given["pixel_values"]).float()
    options = {"max_new_tokens": 8, "stop_token_ids": (), "decode_step": step}
    return features, model.generate(**given, **options)


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("change", [*OF_DECODER, *OF_TOWER], ids=lambda change: change.__name__)
def test_a_strange_network_answers_as_pytorch_does(change):
    model = copy.deepcopy(tiny_vlm())
    change(model)
    features, ids = answer(model)
    fast = Fast(*speed_up(model))
    got_features, got = answer(model, fast.step)
    assert torch.equal(got, ids)
    torch.testing.assert_close(got_features, features, atol=1e-4, rtol=1e-4)
    strange = change in OF_DECODER
    assert (fast.step is None, isinstance(model.vision_model, FastTower)) == (strange, strange)
    told = fast.chosen if strange else fast.tower
    assert told.startswith("eager: ") and len(told) > len("eager: ")


def test_a_field_that_a_step_does_not_know_must_have_its_default(monkeypatch):
    """So whoever gives a network a new field need not think of the fast steps."""
    older = replace(DECODER, known=DECODER.known.replace("attention_bias", ""))
    monkeypatch.setattr("generation.fast.network.DECODER", older)
    from tests.test_fast_decode import make_model

    assert isinstance(fast_step(make_model().language_model)[0], NativeStep)
    step, how = fast_step(make_model(attention_bias=True).language_model)
    assert step is None and "attention_bias" in how


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_projector_is_pytorchs(dtype):
    model = copy.deepcopy(tiny_vlm()).to(dtype)
    own = model.projector

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.shuffle, self.norm = own, nn.LayerNorm(model.config.text.hidden_size, dtype=dtype)

        def forward(self, x):
            return self.norm(self.shuffle(x))

    model.projector = Normed()
    features, _ = answer(model)
    assert isinstance(speed_up(model)[0], NativeStep) and isinstance(model.vision_model, FastTower)
    assert type(model.projector.shuffle) is ModalityProjector
    got, _ = answer(model)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got, features, atol=tolerance, rtol=tolerance)


def test_what_ocelli_builds_is_known():
    """Else all would run eagerly, and slowly, without a failing test."""
    model = tiny_vlm(qk_norm=True)
    assert DECODER.unknown(model.language_model) is None
    gemma = tiny_vlm(**MODELS["Gemma 4"]).language_model
    assert decoder_of(gemma) is GEMMA4 and GEMMA4.unknown(gemma) is None
    assert TOWER.unknown(model.vision_model) is None
    assert type(model.projector) is ModalityProjector
