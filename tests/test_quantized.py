"""Files of quantized weights: what they stand for, to the last bit, and that their codes are what runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from generation import kv_cache as kv
from generation.codes import CodedEmbedding, CodedLinear, Codes, Form
from generation.fast.native.panels import PanelEmbedding, PanelLinear
from generation.fast.native.step import NativeStep
from generation.fast.quantized import pack
from generation.steps import Step
from inference import coded
from inference.checkpoint import open_checkpoint
from inference.coded import quantized_as
from models import VisionLanguageModel
from models.checkpoints.files import WEIGHTS
from models.checkpoints.quantized import BLOCKS, codes_of_blocks, quantized_entries
from models.checkpoints.sources import open_files
from models.checkpoints.weights import read_header, read_tensor
from tests import gemma4_checkpoints, lfm2_checkpoints, qwen_checkpoints, test_internvl, tiny
from tests.quantized_files import DRAWN, MLX, SETTINGS, drawn, make, to_codes, to_mlx
from tests.test_fast_decode import make_model, needs_compiler, walk  # noqa: F401  (for every test here)
from tests.test_gguf import random_blocks
from tools.inspect import inspect

# Which have no codes that can be kept.
OPENED = ("nvfp4", "nf4", "nf4-nested", "gptq-act-order", "int4-act-order", "int8-zeros", "int8-whole-zeros",
          "mlx-4-float")  # fmt: skip


def block_sizes(kind: str) -> list[int]:
    return [256, 768] if kind.endswith("_K") else [32, 64, 96, 416]


@pytest.mark.parametrize("kind", BLOCKS)
def test_codes_of_blocks_are_the_numbers_of_the_gguf_library(kind):
    for columns in block_sizes(kind):
        raw = random_blocks(kind, 7, columns)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        codes = codes_of_blocks(torch.from_numpy(raw), kind)
        assert torch.equal(codes.numbers(), torch.from_numpy(expected).reshape(7, columns))


@pytest.mark.parametrize("columns", [64, 96, 160, 576])
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_folder_holds_the_numbers_of_its_format(tmp_path, kind, columns):
    draw, half = np.random.default_rng(0), 48 if kind.startswith(("awq", "gptq")) else 19
    rows = 2 * half
    tensors, numbers = make(kind, rows, columns, draw)
    file = tmp_path / "model.safetensors"
    bias = torch.ones(rows)
    save_file(
        {f"a.{name}": one for name, one in tensors.items()} | {"a.bias": bias, "b.weight": bias.clone()}, file
    )
    entries = quantized_entries(read_header(file), SETTINGS[kind])
    assert entries.keys() == {"a.weight", "a.bias", "b.weight"}
    entry = entries["a.weight"]
    assert entry.shape == (rows, columns)
    assert entry.num_bytes == sum(one.nbytes for name, one in tensors.items() if name != "input_scale")
    assert torch.equal(read_tensor(entry, (rows, columns)), numbers)
    assert torch.equal(
        read_tensor(entry, dtype=torch.bfloat16, shape=(half, columns), part=1, parts=2),
        numbers[half:].bfloat16(),
    )
    codes = entry.codes(1, 2)
    assert (codes is None) == (kind in OPENED)
    if codes is not None:
        assert torch.equal(codes.numbers(), numbers[half:])


def test_layers_of_codes_are_those_of_their_numbers():
    draw = np.random.default_rng(0)
    weight = torch.from_numpy(draw.normal(size=(48, 96))).float()
    codes = Codes.rounded(weight)
    numbers = codes.numbers()
    assert (numbers - weight).abs().max() < 0.51 / 127 * weight.abs().max()
    x, bias = torch.from_numpy(draw.normal(size=(2, 3, 96))).float(), torch.randn(48)
    layer = CodedLinear(codes, bias)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, numbers, bias), atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    ids = torch.tensor([[3, 47], [0, 3]])
    assert torch.equal(CodedEmbedding(codes, torch.float32)(ids), numbers[ids])


def check_products(codes: Codes) -> None:
    """C's of some rows are those of the numbers, but that activations are rounded to bytes; and a row's have
    the same bits whatever is beside it."""
    draw, weight = torch.Generator().manual_seed(0), codes.numbers()
    x = torch.randn(131, codes.columns, generator=draw)
    layer = PanelLinear.of_codes(CodedLinear(codes))
    whole, expected = layer(x), x.double() @ weight.double().T
    assert (whole - expected).norm() < 0.008 * expected.norm()
    for count in (1, 2, 3, 4, 5, 16):
        assert torch.equal(layer(x[:count]), whole[:count])
    x[2, 5] = torch.inf
    assert layer(x)[2].isnan().all() and torch.equal(layer(x)[3], whole[3])
    ids = torch.tensor([0, len(weight) - 1, 2])
    rows = PanelEmbedding.of_codes(CodedEmbedding(codes, torch.float32))(ids)
    torch.testing.assert_close(rows, weight[ids], atol=1e-6 * weight.abs().max().item(), rtol=0)


@pytest.mark.parametrize("kind", BLOCKS)
def test_products_in_c_of_blocks(kind):
    raw = torch.from_numpy(random_blocks(kind, 37, 512 if kind.endswith("_K") else 416))
    codes = codes_of_blocks(raw, kind)
    scales = codes.words if codes.coarse is None else codes.coarse
    halves = scales.view(torch.int16)
    halves.copy_((halves & 0x83FF) | 0x1C00 if codes.form != Form.HALF_ZERO else halves)
    if codes.form == Form.HALF_ZERO:  # the scale alone, not the zero
        scales.copy_((scales & ~0x7C00) | 0x1C00)
    check_products(codes)


@pytest.mark.parametrize("which", range(len(DRAWN)))
def test_products_in_c_at_odd_widths(which):
    for columns in (8, 33, 96, 200):
        check_products(drawn(21, columns, which))


@torch.no_grad()
def test_a_step_in_c_runs_codes():
    """Of several forms in one model, tied head and all; alone as beside others."""
    lm = pack(make_model(tied=True), "codes", to_codes).language_model
    expected, _ = walk(Step(lm), lm, 16, 8, lm.cache_dtype)
    step = NativeStep(lm)
    got, _ = walk(step, lm, 16, 8, lm.cache_dtype)
    assert (got - expected).norm() < 0.05 * expected.norm()
    cache = kv.allocate_for(lm, 1, 16)
    tokens = torch.randint(0, lm.config.vocab_size, (16, 1), generator=torch.Generator().manual_seed(0))
    for row in (0, 7):
        assert torch.equal(step(tokens[row : row + 1], cache, 0)[0], got[0, row])


def quantized(folder: Path, kind: str) -> None:
    """Give a folder's text part the matrices of a format, all but its head and its table."""
    tensors, draw = load_file(folder / WEIGHTS), np.random.default_rng(0)
    for name in [name for name in tensors if "language_model" in name and name.endswith("proj.weight")]:
        parts, _ = make(kind, *tensors.pop(name).shape, draw)
        tensors |= {f"{name.removesuffix('.weight')}.{end}": one.contiguous() for end, one in parts.items()}
    if kind.startswith("mlx"):
        tensors = to_mlx("qwen3_vl", tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | SETTINGS[kind]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("kind", [*reversed(MLX)])
def test_a_folder_of_mlx_is_the_one_that_it_was_made_of(tmp_path, kind):
    """In floats, as people hold it in bfloat16."""
    if kind == "smolvlm":
        tiny.save(tiny.model_with_processor("smolvlm-1-tile")[1], tmp_path)
    elif kind in qwen_checkpoints.KINDS:
        qwen_checkpoints.save_hf(kind, tmp_path)
    elif kind == "internvl":
        test_internvl.save_hf("qwen3", tmp_path)
    else:
        {"gemma4": gemma4_checkpoints, "lfm2_vl": lfm2_checkpoints}[kind].save_hf(tmp_path)
    before = VisionLanguageModel.from_pretrained(tmp_path, dtype="float32").state_dict()
    save_file(to_mlx(kind, load_file(tmp_path / WEIGHTS)), tmp_path / WEIGHTS, {"format": "mlx"})
    after = VisionLanguageModel.from_pretrained(tmp_path, dtype="float32").state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=0)
    assert inspect(str(tmp_path))["fits"] == "yes"


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> Path:
    """A checkpoint of which each matrix is whole groups."""
    folder = tmp_path_factory.mktemp("floats") / "model"
    qwen_checkpoints.save_hf("qwen3_vl", folder)
    return folder


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("kind", ["awq", "mlx-8", "gptq", "fp8", "int8", "int4", "nf4", "gptq-act-order"])
@torch.no_grad()
def test_what_is_opened_has_the_codes_of_the_file(floats, tmp_path, kind, caplog, monkeypatch):
    shutil.copytree(floats, tmp_path / kind)
    quantized(tmp_path / kind, kind)
    whole = VisionLanguageModel.from_pretrained(tmp_path / kind, dtype="float32").language_model
    checkpoint = open_checkpoint(tmp_path / kind)
    found = {name: one for name, one in checkpoint.model.named_modules() if hasattr(one, "codes")}
    assert checkpoint.dtype == ", ".join(quantized_as(open_files(tmp_path / kind)))
    kept = 0
    for name, layer in found.items():
        own = whole.get_submodule(name.removeprefix("language_model."))
        kept += torch.equal(own.weight, layer.codes.numbers())
        own.weight = torch.nn.Parameter(layer.codes.numbers())
    assert kept == (0 if kind in OPENED else len(found) - 2) and caplog.records  # all but table and head
    ids = torch.tensor([[5, 6, 7, 8]])
    ours, theirs = (lm.logits(lm(lm.embed(ids))[0]) for lm in (checkpoint.model.language_model, whole))
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    told = inspect(str(tmp_path / kind))
    size = sum({one.data_ptr(): one.nbytes for one in checkpoint.model.state_dict().values()}.values())
    assert told["fits"] == "yes" and abs(told["memory"]["codes"]["weights"] / size - 1) < 0.02
    assert checkpoint.compiled().fast.chosen == "native C step"
    lm = checkpoint.model.language_model
    assert (lm.logits(lm(lm.embed(ids))[0]) - theirs).norm() < 0.05 * theirs.norm()
    assert open_checkpoint(tmp_path / kind, dtype="float32").dtype == "float32"
    monkeypatch.setattr(coded, "_LARGE", 0)  # in panels from the beginning, biases and tower too
    other = open_checkpoint(tmp_path / kind).compiled().model.language_model
    assert torch.equal(other.logits(other(other.embed(ids))[0]), lm.logits(lm(lm.embed(ids))[0]))
