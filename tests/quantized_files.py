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

DRAWN = ((Form.HALF_ZERO, 4), (Form.BF16_LEAST, 4), (Form.FLOAT_ZERO, 8), (Form.BF16_LEAST, 8), (Form.FP8, 8))


def _method(name: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name, **more}}


def _tensors(bits: int, group: int | None = None, **more: Any) -> dict[str, Any]:
    """compressed-tensors, where two groups of matrices have other bits and widths."""
    others = {"targets": ["re:.*other"], "weights": {"num_bits": 12 - bits, "group_size": 16}}
    weights = {"num_bits": bits, "group_size": group, **more}
    groups = {"group_0": others, "group_1": {"targets": ["Linear"], "weights": weights}}
    form = {"format": "pack-quantized", "version": "0.12.2"}
    return _method("compressed-tensors", config_groups=groups, ignore=["lm_head"], **form)


def _gptq(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return _method("gptq", bits=bits, group_size=group, **more)


def _mlx(bits: int) -> dict[str, Any]:
    named = {"model.embed_tokens": {"bits": 12 - bits, "group_size": 64}, "lm_head": False}
    return {"quantization": {"bits": bits, "group_size": 32, "mode": "affine", **named}}


# What config.json says, by the names of the makers; -… is what lies otherwise.
SETTINGS: dict[str, dict[str, Any]] = {
    "awq": _method("awq", bits=4, group_size=32, version="gemm"),
    "awq-rows": _method("awq", w_bit=4, q_group_size=-1, version="GEMM"),
    "gptq": _gptq(), "gptq-8": _gptq(8), "gptq-3": _gptq(3), "gptq-rows": _gptq(group=-1),
    "gptq-128": _gptq(group=128),
    "gptq-act-order": _gptq(desc_act=True), "gptq-v2": _gptq(checkpoint_format="gptq_v2"),
    "gptq-dynamic": _gptq(4, 128, dynamic={"-:.*b": {}, r"+:a\b": {"bits": 8, "group_size": 32}}),
    "gptq-auto-round": _method("auto-round", bits=4, group_size=32, packing_format="auto_round:auto_gptq"),
    "fp8": _method("fp8", weight_block_size=[128, 128], activation_scheme="dynamic"),
    "fp8-block": _tensors(8, strategy="block", block_structure=[16, 32]),
    "fp8-rows": _method("compressed-tensors", format="float-quantized"),
    "fp8-tensor": _method("fp8", activation_scheme="static"), "fp8-powers": _method("fp8"),
    "int8": _tensors(8), "int8-zeros": _tensors(8, symmetric=False),
    "int8-whole-zeros": _tensors(8, strategy="tensor", symmetric=False),
    "int4": _tensors(4, 32), "int4-zeros": _tensors(4, 32), "int4-rows": _tensors(4),
    "int4-act-order": _tensors(4, 32),
    "int4-8": _tensors(8, 32), "int4-float": _tensors(4, 32), "nvfp4": _method("compressed-tensors"),
    "llm-int8": _method("bitsandbytes", load_in_8bit=True), "nf4": _method("bitsandbytes", load_in_4bit=True),
    "nf4-nested": _method("bitsandbytes", _load_in_4bit=True),
    **{f"mlx-{bits}": _mlx(bits) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx-4-float": _mlx(4),
}  # fmt: skip


def _scales(draw: np.random.Generator, rows: int, groups: int, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(draw.uniform(0.001, 0.02, (rows, groups))).to(dtype)


def _words(codes: np.ndarray, bits: int, order: Sequence[int] = range(8)) -> Tensor:
    """(R, C) codes -> int32 (R, C · bits / 32), one number of a row's bits, lowest first: of eight columns
    order[p] is the p-th."""
    codes = codes.reshape(len(codes), -1, 8)[..., [*order]].reshape(codes.shape)
    numbers = (sum(int(code) << bits * at for at, code in enumerate(row)) for row in codes)
    raw = b"".join(number.to_bytes(codes.shape[1] * bits // 8, "little") for number in numbers)
    return torch.from_numpy(np.frombuffer(raw, np.int32).reshape(len(codes), -1).copy())


def make(kind: str, rows: int, columns: int, draw: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix by the ends of their names, and its numbers (rows, columns) in float32."""
    bits = {"2": 2, "3": 3, "5": 5, "6": 6, "8": 8, "dynamic": 8}.get(kind.rpartition("-")[2], 4)
    bits = 8 if kind.startswith("int8") else bits
    span = 128 if kind == "gptq-128" else columns if kind.endswith("-rows") else 32
    codes, groups = draw.integers(0, 2**bits, (rows, columns)), -(-columns // span)
    of = np.arange(columns) // span
    if kind.endswith("act-order"):
        of = draw.permutation(of)

    def each(numbers: Tensor | np.ndarray) -> Tensor:
        """(R, G) -> (R, C) of each column's group."""
        return torch.as_tensor(numbers).float()[:, of]

    whole = torch.from_numpy(codes).float()
    if kind.startswith(("awq", "gptq")):
        scale, zeros = _scales(draw, rows, groups, torch.float16), draw.integers(1, 2**bits, (rows, groups))
        numbers = (whole - each(zeros)) * each(scale)
        order = [0, 2, 4, 6, 1, 3, 5, 7] if kind.startswith("awq") else range(8)
        stored = zeros if kind.startswith("awq") or kind == "gptq-v2" else zeros - 1
        tensors = {"qzeros": _words(stored.T, bits, order), "scales": scale.T.contiguous()}
        if kind.startswith("awq"):
            return tensors | {"qweight": _words(codes.T, 4, order)}, numbers
        if kind != "gptq-auto-round":
            tensors["g_idx"] = torch.from_numpy(of.astype(np.int32))
        return tensors | {"qweight": _words(codes, bits).T.contiguous()}, numbers
    if kind.startswith("mlx"):
        dtype = torch.float32 if kind.endswith("float") else torch.bfloat16
        scale, least = (_scales(draw, rows, groups, dtype) for _ in range(2))
        words = _words(codes, bits).view(torch.uint32)
        return {"weight": words, "scales": scale, "biases": -least}, whole * each(scale) + each(-least)
    if kind.startswith("fp8"):
        floats = torch.from_numpy(draw.normal(0, 30, (rows, columns))).to(torch.float8_e4m3fn)
        high, wide = {"rows": (1, columns), "tensor": (rows, columns), "block": (16, 32)}.get(
            kind[4:], (128, 128)
        )
        scale = _scales(draw, -(-rows // high), -(-columns // wide), torch.float32)
        if kind == "fp8-powers":
            scale = (2.0 ** scale.log2().round()).to(torch.float8_e8m0fnu)
        all_scales = scale.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        name = "weight_scale_inv" if kind in ("fp8", "fp8-powers") else "weight_scale"
        scale = scale.view(()) if kind == "fp8-tensor" else scale
        more = {"input_scale": torch.ones(())} if kind == "fp8-tensor" else {}
        return {"weight": floats, name: scale, **more}, floats.float() * all_scales
    if kind.startswith("int8"):
        parts = 1 if "whole" in kind else rows
        scale, signed = _scales(draw, parts, 1, torch.float32), torch.from_numpy(codes - 128).to(torch.int8)
        zero = torch.from_numpy(draw.integers(1, 9, (parts, 1))).to(torch.int8) * kind.endswith("zeros")
        more = {"weight_zero_point": zero} if kind.endswith("zeros") else {}
        return {"weight": signed, "weight_scale": scale, **more}, (signed.float() - zero) * scale
    if kind.startswith("int4"):
        dtype = torch.float32 if kind.endswith("float") else torch.bfloat16
        scale, shape = _scales(draw, rows, groups, dtype), torch.tensor([rows, columns])
        tensors = {"weight_packed": _words(codes, bits), "weight_scale": scale, "weight_shape": shape}
        if kind.endswith("act-order"):
            tensors["weight_g_idx"] = torch.from_numpy(of.astype(np.int32))
        if not kind.endswith("zeros"):
            return tensors, (whole - 2 ** (bits - 1)) * each(scale)
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


# What mlx-vlm makes of names that begin so.
_QWEN = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
         "model.visual.": "vision_tower.", "visual.": "vision_tower.",
         "model.": "language_model.model."}  # fmt: skip
_OTHERS = {"model.language_model.": "language_model.model.", "model.": ""}
MLX = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), _QWEN), "gemma4": _OTHERS, "lfm2_vl": _OTHERS,
    "internvl": {},
    "paddleocr_vl": {"visual.vision_model.encoder.": "visual.", "visual.vision_model.": "visual.",
                     "mlp_AR.": "visual.projector.", "model.": "language_model.model.",
                     "lm_head.": "language_model.lm_head."},
    "smolvlm": {"lm_head.": "language_model.lm_head.", "model.text_model.": "language_model.", "model.": ""},
}  # fmt: skip
_AROUND_ONE = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight",
               "q_norm.weight", "k_norm.weight")  # fmt: skip


def to_mlx(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder of transformers' as mlx-vlm saves them: names, kernels, norms."""
    found = {}
    for name in [
        name for name in tensors if kind == "paddleocr_vl" and "visual" in name and ".q_proj." in name
    ]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace(".q_proj.", ".qkv.")] = torch.cat(parts)
    for name, tensor in tensors.items():
        front = next((front for front in MLX[kind] if name.startswith(front)), "")
        name = MLX[kind].get(front, "") + name.removeprefix(front)
        if tensor.ndim > 2 and name.endswith("weight"):
            tensor = tensor.movedim(1, -1).contiguous()
        found[name] = tensor + 1 if kind == "qwen3_5" and name.endswith(_AROUND_ONE) else tensor
    return found


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
