"""Quantized matrices as the folders of other programs hold them: tensors of random codes, and the numbers
that they stand for by arithmetic written apart from what reads them.

    tensors, numbers = make("awq", rows, columns, draw)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from generation.codes import CodedEmbedding, CodedLinear, Codes, Form, packed, pair

GROUP = 32
DRAWN = ((Form.HALF_ZERO, 4), (Form.BF16_LEAST, 4), (Form.FLOAT_ZERO, 8), (Form.BF16_LEAST, 8), (Form.FP8, 8))
# What config.json says, by the names of the makers.
SETTINGS: dict[str, dict[str, Any]] = {
    "awq": {
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    },
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP}},
    "gptq-8": {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": GROUP}},
    "gptq-act-order": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP}},
    "gptq-v2": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "fp8-rows": {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
    "int8": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
        }
    },
    "int4": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}},
        }
    },
    "int4-zeros": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}},
        }
    },
    "nvfp4": {"quantization_config": {"quant_method": "compressed-tensors"}},
    "llm-int8": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
    "nf4": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "nf4-nested": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "mlx-4": {"quantization": {"bits": 4, "group_size": GROUP}},
    "mlx-8": {"quantization": {"bits": 8, "group_size": GROUP}},
}


def _scales(draw: np.random.Generator, rows: int, groups: int, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(draw.uniform(0.001, 0.02, (rows, groups))).to(dtype)


def _words(codes: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """(R, C) codes -> int32 (R, C · bits / 32), number by number: column order[p] is the p-th of its word."""
    each = 32 // bits
    order = order or list(range(each))
    words = np.zeros((codes.shape[0], codes.shape[1] // each), np.uint32)
    for column in range(codes.shape[1]):
        place = order.index(column % each)
        words[:, column // each] |= codes[:, column].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32).copy())


def make(kind: str, rows: int, columns: int, draw: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix by the ends of their names, and its numbers (rows, columns) in float32."""
    bits = 8 if kind in ("gptq-8", "int8", "mlx-8") else 4
    codes, groups = draw.integers(0, 2**bits, (rows, columns)), columns // GROUP
    of = np.arange(columns) // GROUP
    if kind == "gptq-act-order":
        of = draw.permutation(of)

    def each(numbers: Tensor | np.ndarray) -> Tensor:
        """(R, G) -> (R, C) of each column's group."""
        return torch.as_tensor(numbers).float()[:, of]

    whole = torch.from_numpy(codes).float()
    if kind in ("awq", "gptq", "gptq-8", "gptq-v2", "gptq-act-order"):
        scale, zeros = _scales(draw, rows, groups, torch.float16), draw.integers(1, 2**bits, (rows, groups))
        numbers = (whole - each(zeros)) * each(scale)
        order = [0, 2, 4, 6, 1, 3, 5, 7] if kind == "awq" else None
        stored = zeros if kind in ("awq", "gptq-v2") else zeros - 1
        tensors = {"qzeros": _words(stored.T, bits, order), "scales": scale.T.contiguous()}
        if kind == "awq":
            return tensors | {"qweight": _words(codes.T, 4, order)}, numbers
        tensors["g_idx"] = torch.from_numpy(of.astype(np.int32))
        return tensors | {"qweight": _words(codes, bits).T.contiguous()}, numbers
    if kind.startswith("mlx"):
        scale, least = (_scales(draw, rows, groups, torch.bfloat16) for _ in range(2))
        words = _words(codes, bits).view(torch.uint32)
        return {"weight": words, "scales": scale, "biases": -least}, whole * each(scale) + each(-least)
    if kind.startswith("fp8"):
        floats = torch.from_numpy(draw.normal(0, 30, (rows, columns))).to(torch.float8_e4m3fn)
        if kind == "fp8-rows":
            scale = _scales(draw, rows, 1, torch.bfloat16)
            return {"weight": floats, "weight_scale": scale}, floats.float() * scale.float()
        scale = _scales(draw, -(-rows // 128), -(-columns // 128), torch.float32)
        all_scales = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return {"weight": floats, "weight_scale_inv": scale}, floats.float() * all_scales
    if kind == "int8":
        scale, signed = _scales(draw, rows, 1, torch.float32), torch.from_numpy(codes - 128).to(torch.int8)
        return {"weight": signed, "weight_scale": scale}, signed.float() * scale
    if kind.startswith("int4"):
        scale, shape = _scales(draw, rows, groups, torch.bfloat16), torch.tensor([rows, columns])
        tensors = {"weight_packed": _words(codes, 4), "weight_scale": scale, "weight_shape": shape}
        if kind == "int4":
            return tensors, (whole - 8) * each(scale)
        zeros = draw.integers(0, 16, (rows + -rows % 8, groups))
        tensors["weight_zero_point"] = _words(zeros.T, 4).T.contiguous()
        return tensors, (whole - each(zeros[:rows])) * each(scale)
    if kind == "nvfp4":
        scale = torch.from_numpy(draw.uniform(1, 200, (rows, columns // 16))).to(torch.float8_e4m3fn)
        whole_scale, packed = torch.tensor([900.0]), codes[:, ::2] | codes[:, 1::2] << 4
        sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(codes > 7, -1, 1)
        numbers = torch.from_numpy(sizes).float() * (scale.float() / whole_scale)[:, np.arange(columns) // 16]
        tensors = {"weight_packed": torch.from_numpy(packed.astype(np.uint8)), "weight_scale": scale}
        return tensors | {"weight_global_scale": whole_scale}, numbers
    if kind == "llm-int8":
        signed, largest = (
            torch.from_numpy(codes * 16 - 127).to(torch.int8),
            _scales(draw, 1, rows, torch.float32)[0],
        )
        extra = {"SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return {"weight": signed, **extra}, signed.float() * (largest / 127)[:, None]
    assert kind.startswith("nf4"), kind
    table = torch.sort(torch.from_numpy(draw.uniform(-1, 1, 16)).float()).values
    flat, count = codes.flatten(), rows * columns // 64
    tensors = {"weight": torch.from_numpy((flat[::2] << 4 | flat[1::2]).astype(np.uint8))[:, None]}
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [rows, columns],
    }
    if kind == "nf4-nested":
        inner = torch.from_numpy(draw.integers(0, 256, count).astype(np.uint8))
        fine, outer = torch.linspace(-1, 1, 256), _scales(draw, 1, -(-count // 256), torch.float32)[0]
        largest = fine[inner.int()] * outer[np.arange(count) // 256] + 0.04
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.04}
        tensors |= {"weight.absmax": inner, "weight.nested_absmax": outer, "weight.nested_quant_map": fine}
    else:
        largest = _scales(draw, 1, count, torch.float32)[0]
        tensors["weight.absmax"] = largest
    raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {"weight.quant_map": table, "weight.quant_state.bitsandbytes__nf4": raw}
    numbers = (table[flat] * largest[np.arange(len(flat)) // 64]).view(rows, columns)
    return tensors, numbers


def drawn(rows: int, columns: int, which: int) -> Codes:
    """Codes of a matrix of any size about as large as those of a layer, in one of several forms."""
    draw = torch.Generator().manual_seed(which)
    form, bits = DRAWN[which % len(DRAWN)]
    codes = torch.randint(0, 2**bits, (rows, columns), generator=draw, dtype=torch.uint8)
    codes = codes & 0xB7 if form == Form.FP8 else codes  # no larger than 1
    low = (0.5 + torch.rand(rows, -(-columns // 32), generator=draw)) * 0.7 / 2**bits
    high = {
        Form.BF16_LEAST: (-low * 2 ** (bits - 1)).bfloat16(),
        Form.HALF_ZERO: torch.full_like(low, 8),
    }.get(form)
    kind = torch.bfloat16 if form == Form.BF16_LEAST else torch.float16
    words = (low * 99).view(torch.int32) if form == Form.FP8 else low.view(torch.int32)
    words = words if high is None else pair(low.to(kind), high)
    return Codes(form, bits, columns, 32, packed(codes, bits), words)


def to_codes(precision: str, layer: nn.Module, names: Sequence[str], first: nn.Module | None) -> nn.Module:
    """A `Make` (generation/fast/quantized.py): layers of codes in all forms that fit any width."""
    codes = drawn(*layer.weight.shape, len("".join(names))) if first is None else first.codes
    if isinstance(layer, nn.Embedding):
        return CodedEmbedding(codes, torch.float32)
    return CodedLinear(codes, layer.bias)
