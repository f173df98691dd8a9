"""Files of quantized weights: what they stand for, to the last bit, and that their codes are what runs."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from generation.codes import CodedEmbedding, CodedLinear, Codes
from models.checkpoints.quantized import BLOCKS, codes_of_blocks, quantized_entries
from models.checkpoints.weights import read_header, read_tensor
from tests.quantized_files import SETTINGS, make
from tests.test_gguf import random_blocks

OPENED = ("nvfp4", "nf4", "nf4-nested", "gptq-act-order")  # which have no codes that can be kept


def block_sizes(kind: str) -> list[int]:
    return [256, 768] if kind.endswith("_K") else [32, 64, 96, 416]


@pytest.mark.parametrize("kind", BLOCKS)
def test_codes_of_blocks_are_the_numbers_of_the_gguf_library(kind):
    for columns in block_sizes(kind):
        raw = random_blocks(kind, 7, columns)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        codes = codes_of_blocks(torch.from_numpy(raw), kind)
        assert torch.equal(codes.numbers(), torch.from_numpy(expected).reshape(7, columns))


@pytest.mark.parametrize("columns", [64, 96, 160, 256])
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_folder_holds_the_numbers_of_its_format(tmp_path, kind, columns):
    rows, draw = 40, np.random.default_rng(0)
    tensors, numbers = make(kind, rows, columns, draw)
    file = tmp_path / "model.safetensors"
    bias = torch.ones(rows)
    save_file(
        {f"a.{name}": one for name, one in tensors.items()} | {"a.bias": bias, "b.weight": bias.clone()}, file
    )
    entries = quantized_entries(read_header(file), SETTINGS[kind])
    assert entries.keys() == {"a.weight", "a.bias", "b.weight"}
    entry = entries["a.weight"]
    assert entry.shape == (rows, columns) and entry.num_bytes == sum(one.nbytes for one in tensors.values())
    assert torch.equal(read_tensor(entry), numbers)
    assert torch.equal(
        read_tensor(entry, dtype=torch.bfloat16, shape=(20, columns), part=1, parts=2),
        numbers[20:].bfloat16(),
    )
    codes = entry.codes(1, 2)
    assert (codes is None) == (kind in OPENED)
    if codes is not None:
        assert torch.equal(codes.numbers(), numbers[20:])


def test_layers_of_codes_are_those_of_their_numbers():
    draw = np.random.default_rng(0)
    weight = torch.from_numpy(draw.normal(size=(48, 96))).float()
    codes = Codes.rounded(weight)
    numbers = codes.numbers()
    assert (numbers - weight).abs().max() < 0.51 / 127 * weight.abs().max()
    x, bias = torch.from_numpy(draw.normal(size=(2, 3, 96))).float(), torch.randn(48)
    layer = CodedLinear(codes, bias)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, numbers, bias), atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16 or bias is not None
    ids = torch.tensor([[3, 47], [0, 3]])
    assert torch.equal(CodedEmbedding(codes, torch.float32)(ids), numbers[ids])
