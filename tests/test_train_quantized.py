"""Adapters beside frozen weights in few bits: gradients, memory, runs, and what is saved."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText

import train
from generation.codes import CodedEmbedding, CodedLinear, Codes
from generation.fast.native.panels import round_layer, to_rows
from generation.fast.quantized import PackedEmbedding, PackedLinear, pack_layer, replace_layers
from inference import coded
from models.checkpoints.quantized import BLOCKS, codes_of_blocks
from models.checkpoints.save import written
from models.checkpoints.weights import StoredTensor
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from tests import qwen_checkpoints
from tests.quantized_files import drawn, to_codes
from tests.runs import SETTINGS, flags, named, prepared, settings_in, write_rows
from tests.test_fast_decode import needs_compiler  # noqa: F401  (for every test here)
from tests.test_gguf import parts, random_blocks, wide, with_blocks  # noqa: F401  (a fixture)
from tests.test_quantized import quantized
from tests.test_train_plan import TINY, batch_of, kept_by, loss_of, model_of, tiny_plan
from training.config import TrainConfig, parse_arguments
from training.distributed import prepare_blocks
from training.flops import PARTS
from training.lora import add_adapters, open_base
from training.optim import part_of
from training.plan import Plan, plan_of


def blocks_of(kind: str, rows: int, columns: int) -> Codes:
    codes = codes_of_blocks(torch.from_numpy(random_blocks(kind, rows, columns)), kind)
    assert codes.numbers().isfinite().all()
    return codes


def layer_in(kind: str, rows: int, columns: int) -> nn.Module:
    """A frozen layer with a bias, in one of the forms that there are."""
    given = nn.Linear(columns, rows)
    if kind.isdigit():
        return CodedLinear(drawn(rows, columns, int(kind)), given.bias.detach())
    if kind in BLOCKS:
        return CodedLinear(blocks_of(kind, rows, columns), given.bias.detach())
    model = nn.Sequential(given)
    make = round_layer if kind == "int4" else pack_layer
    replace_layers(model, lambda layer, names, first: make(kind, layer, ["language_model.x"], first))
    return (to_rows(model, torch.device("cpu")) if kind == "int4" else model)[0]


@pytest.mark.parametrize("columns", [96, 256])
@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16", *map(str, range(5)), "Q4_K", "Q6_K", "Q8_0"])
def test_gradients_are_those_of_the_opened_matrix(kind, columns, monkeypatch):
    if kind.endswith("_K") and columns % 256:
        pytest.skip("no whole blocks")
    for module in ("generation.codes", "generation.fast.quantized"):  # several parts
        monkeypatch.setattr(f"{module}.PARTIAL_FLOATS", 1000)
    layer = layer_in(kind, 40, columns)
    weight = layer(torch.eye(columns)).detach().T - layer.bias[:, None]
    x = torch.randn(2, 3, columns, requires_grad=True)
    y, saved = torch.randn(2, 3, 40), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: saved.append(one.numel()) or one, lambda one: one
    ):
        out = layer(x)
    assert max(saved, default=0) <= 40  # scales
    out.backward(y)
    torch.testing.assert_close(x.grad, y @ weight, atol=1e-5 * (y @ weight).abs().max().item(), rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    assert (low - out).norm() < 0.02 * out.norm()


SHAPE = replace(
    TINY,
    vision=replace(TINY.vision, hidden_size=128, intermediate_size=256),
    text=replace(TINY.text, hidden_size=128, intermediate_size=320),
)
LORA = {"lora_rank": 4, "lr": 1e-2, "projector_lr": 1e-2, "lora_vision_targets": "q_proj,fc2"}


def small(kind: str, shape: VLMConfig = SHAPE) -> VisionLanguageModel:
    """A model whose frozen matrices are in fewer bits: all but those of the projector."""
    model = model_of(shape)
    parts, make = (model.vision_model, model.language_model), round_layer if kind == "int4" else pack_layer
    for name, part in zip(("vision_model", "language_model"), parts):
        if kind == "codes":
            replace_layers(part, partial(to_codes, ""))
        else:
            replace_layers(part, lambda layer, own, first: make(kind, layer, [f"{name}.{own[0]}"], first))  # noqa: B023
        if kind == "int4":
            to_rows(part, torch.device("cpu"))
    return model


def adapted(model: VisionLanguageModel, **settings) -> VisionLanguageModel:
    config = TrainConfig(init_from="x", data="rows.jsonl", **LORA | settings)
    add_adapters(model, config, lambda name: StoredTensor(name))
    for name, one in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(one, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def opened(model: VisionLanguageModel) -> VisionLanguageModel:
    """A copy with the numbers of all matrices as floats."""
    copy = deepcopy(model)
    for name, one in model.named_modules():
        if isinstance(one, PackedLinear | CodedLinear):
            layer = nn.Linear(one.in_features, one.out_features, bias=one.bias is not None)
            bias = torch.zeros(()) if one.bias is None else one.bias
            layer.weight = nn.Parameter((one(torch.eye(one.in_features)) - bias).detach().T.contiguous())
            layer.bias = None if one.bias is None else nn.Parameter(one.bias.detach())
        elif isinstance(one, PackedEmbedding | CodedEmbedding):
            layer = nn.Embedding(SHAPE.text.vocab_size, SHAPE.text.hidden_size)
            layer.weight = nn.Parameter(one(torch.arange(SHAPE.text.vocab_size)).detach())
        else:
            continue
        copy.set_submodule(name, layer)
    return copy


@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16", "codes"])
def test_adapters_learn_as_beside_the_opened_base(kind):
    """Those of the text, those of the tower, and the projector."""
    model = small(kind)
    whole = adapted(opened(model))
    adapted(model)
    prepare_blocks(model, True, False)  # by and by, too
    batch = batch_of(SHAPE, segments=2)
    loss, expected = loss_of(model, batch), loss_of(whole, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    theirs = {name: one.grad for name, one in whole.named_parameters() if one.requires_grad}
    ours = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    assert ours.keys() == theirs.keys() and {part_of(name) for name in ours} == set(PARTS)
    largest = max(one.abs().max() for one in theirs.values())
    for name, one in theirs.items():
        torch.testing.assert_close(
            ours[name], one, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, n=name: n + m
        )


@cache
def plan_beside(precision: str, weights: str) -> Plan:
    more = LORA | {"weights": weights, "vision_lr": -1.0}
    return tiny_plan(("vision_model",), 1, precision, SHAPE, **more)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
def test_memory_is_what_is_planned(kind, precision):
    model = adapted(small(kind))
    plan = plan_beside(precision, kind)
    tensors = {id(one): one.nbytes for one in (*model.parameters(), *model.buffers())}  # a bias may be either
    planned = plan.memory["codes, on each rank"] + plan.memory["weights"]
    assert planned == pytest.approx(sum(tensors.values()), rel=0.03)
    measured = kept_by(model, precision == "bfloat16", **batch_of(SHAPE))
    assert plan.memory["activations"] == pytest.approx(measured, rel=0.05)
    assert sum(plan.trainable.values()) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert plan.flops == plan_beside(precision, "float32").flops


# ------------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_run(base, weights):
    """Its adapter fits transformers' model, and is merged into the whole base."""
    output = f"run-{weights}"
    train.main(flags(**settings_in(base, output, **LORA | {"steps": 4}, weights=weights)))
    start = AutoModelForImageTextToText.from_pretrained(base / "tiny").eval()
    merged = AutoModelForImageTextToText.from_pretrained(base / output).eval()
    ids = torch.arange(3, 40)[None]
    ids[:, 1:5] = start.config.image_token_id
    inputs = {"input_ids": ids, "pixel_values": torch.rand(1, 1, 3, 32, 32)}
    with torch.no_grad():
        plain, expected = start(**inputs).logits, merged(**inputs).logits
        adapted = PeftModel.from_pretrained(start, base / output / "adapter").eval()
        torch.testing.assert_close(adapted(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    assert (plain - expected).abs().max() > 1e-3


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["awq", "fp8", "nf4", "mlx-8", "gguf"])
def test_a_quantized_base_keeps_its_codes(tmp_path, kind, wide, monkeypatch):  # noqa: F811
    """And is planned so. What is saved is a checkpoint in floats."""
    monkeypatch.setattr(coded, "_LARGE", 0)  # as of a model that C would have in panels
    base, output = tmp_path / "base", tmp_path / "run"
    if kind == "gguf":
        shutil.copytree(wide, base)
        numbers = lambda *shape: 0.05 * np.random.default_rng(0).normal(size=shape).astype(np.float32)
        blocks = lambda kind, *shape: quantize(numbers(*shape), GGMLQuantizationType[kind])
        monkeypatch.setattr("tests.test_gguf.random_blocks", blocks)  # those would have no gradients
        with_blocks(parts(base)[0], {"ffn_down": "Q5_1", "_v": "Q4_1", "_o": "Q4_0", "": "Q8_0"})
    else:
        qwen_checkpoints.save_hf("qwen3_vl", base)
        quantized(base, kind)
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    more = LORA | {
        "lora_vision_targets": "out_proj,fc1",
        "sequence_length": 300,
        "steps": 2,
    }
    more |= {} if kind == "gguf" else {"max_pixels": 4096}
    arguments = flags(**SETTINGS | {"init_from": base, "data": named(rows), "output": output} | more)
    train.main(arguments)
    config, options = parse_arguments([*arguments, "--plan", "--plan-tiles", "0", "--plan-text", "9"])
    model = open_base(config, "cpu")
    layers = [name for name, one in model.named_modules() if isinstance(one, CodedLinear)]
    assert len(layers) > 10
    tensors = {id(one): one.nbytes for one in (*model.parameters(), *model.buffers())}
    memory = plan_of(config, options)[0].memory
    learnt = load_file(output / "adapter" / "adapter_model.safetensors")
    of_adapters = sum(one.nbytes for name, one in learnt.items() if "lora_" in name)
    planned = memory["codes, on each rank"] + memory["weights"] - of_adapters
    assert planned == pytest.approx(sum(tensors.values()), rel=0.03)
    before, after = (VisionLanguageModel.from_pretrained(one, dtype="float32") for one in (base, output))
    stored, whole, places = dict(after.named_parameters()), 0, written(after.config)[1]
    for name, one in before.named_parameters():
        stem = f"base_model.model.{places(name).name.removesuffix('weight')}lora_"
        factors = [learnt.get(f"{stem}{end}.weight") for end in "AB"]
        if part_of(name) == "language_model" and factors[0] is not None:
            whole, one = whole + 1, one + 4 * factors[1] @ factors[0]
        if part_of(name) == "language_model":
            torch.testing.assert_close(stored[name], one, rtol=2**-8 if kind == "gguf" else 1e-5, atol=1e-6)
    assert whole > 10
