"""Quantized matrices of folders and GGUF files: how their codes and scales lie there.

Every reader is a function of the stored tensors. What has whole codes and a scale for each group of columns
is kept as such (`generation.codes`); a codebook (NF4) or a scale of scales in 8-bit floats (NVFP4) is opened.
A matrix of a folder is several tensors there; `quantized_entries` puts one in their place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from families.keys import quantization, section
from generation.codes import PARTIAL_FLOATS, Codes, Form, halves, packed, pair
from models.checkpoints.weights import Entry, Shape, rename

_HALF = torch.float16
_LOW, _ONES = 0x0F0F0F0F, 0x01010101  # of each byte of a word


@dataclass(frozen=True)
class JoinedEntry(Entry):
    """A tensor that is several in the file, or one that is arranged otherwise there; `join` makes ours.
    by_rows: it puts rows in another order or below one another, and no more."""

    join: Callable[..., Tensor]
    pieces: tuple[Entry, ...]
    by_rows: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def read(self, dtype: torch.dtype | None, part: int, parts: int) -> Tensor:
        pieces = (piece.read(dtype, 0, 1).view(piece.shape).to(dtype) for piece in self.pieces)
        return torch.atleast_1d(self.join(*pieces)).chunk(parts)[part].contiguous()

    def codes(self, part: int, parts: int) -> Codes | None:
        pieces = [codes for piece in self.pieces if self.by_rows and (codes := piece.codes(0, 1))]
        if len(pieces) < len(self.pieces) or len({piece.kind for piece in pieces}) > 1:
            return None
        joined = (self.join(*tensors) for tensors in zip(*(piece.tensors for piece in pieces)))
        return pieces[0].of(*(tensor.chunk(parts)[part].contiguous() for tensor in joined))


def joined(join: Callable[..., Tensor], *pieces: Entry, by_rows: bool = False) -> JoinedEntry:
    """What `join` makes of tensors of a file."""
    first, shape = pieces[0], join(*(torch.empty(piece.shape, device="meta") for piece in pieces)).shape
    return JoinedEntry(first.path, first.dtype, tuple(shape), first.begin, first.end, join, pieces, by_rows)


# ----------------------------------------------------------------------------------------------------- GGUF
def codes_of_blocks(raw: Tensor, kind: str) -> Codes:
    """Rows of bytes (R, B) of one of the types in BLOCKS."""
    size, width, read = BLOCKS[kind]
    blocks = raw.unflatten(1, (-1, size))
    return read(blocks, blocks.shape[1] * width)


def _typed(block: Tensor, begin: int, end: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Bytes [begin, end) of each block (R, n, B) as numbers of a type (R, n, count)."""
    own = block[..., begin:end]
    return own.flatten().view(dtype).view(*own.shape[:-1], -1)  # which has no odd strides, as one block may


def _halves(words: Tensor, run: int) -> Tensor:
    """The low halves of the bytes of `run` words, then the high ones, and so on: (R, n, 2 · words)."""
    words = words.unflatten(-1, (-1, 1, run))
    return torch.cat((words & _LOW, words >> 4 & _LOW), -2).flatten(-3)


def _spread(words: Tensor, bits: int) -> Tensor:
    """The lowest bits of each byte of words (…, n), then the next ones, and so on: (…, 8 / bits · n)."""
    return torch.cat([words >> at & (2**bits - 1) * _ONES for at in range(0, 8, bits)], -1)


def _of_32(block: Tensor, columns: int, bits: int, zero: int) -> Codes:
    """Blocks of a scale, a least weight (where no zero is given), fifth bits of all, and codes."""
    at = 2 if zero else 4
    words = halves(_typed(block, 0, 2, _HALF).flatten(1)) if zero else _typed(block, 0, 4).flatten(1)
    if bits == 8:
        codes = _typed(block, 2, 34) ^ -0x7F7F7F80  # the highest bit of each
    else:
        codes = _halves(_typed(block, at + 4 * (bits == 5), block.shape[-1]), 4)
    if bits == 5:  # a word has those of 32 columns, one after the other
        four = _typed(block, at, at + 4) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
        codes = codes | (four * 0x204081 & _ONES) << 4
    form, span = (Form.HALVES, 64) if zero else (Form.HALF_LEAST, 32)
    return Codes(form, bits, columns, span, packed(codes.flatten(1), bits), words)


def _of_256(block: Tensor, columns: int) -> Codes:
    """Q4_K and Q5_K: two scales of all, scales and mins of eight groups in 6 bits each, fifth bits, codes."""
    scale, least, rest = block[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat((scale & 63, (rest & 15) | (scale >> 2 & 48)), -1)
    least = torch.cat((least & 63, rest >> 4 | (least >> 2 & 48)), -1)
    words = torch.stack((scale, least), -1).flatten(1).view(torch.int32)
    codes, bits = _halves(_typed(block, block.shape[-1] - 128, block.shape[-1]), 8), 4
    if block.shape[-1] > 144:
        codes, bits = codes | _spread(_typed(block, 16, 48), 1) << 4, 5
    coarse = _typed(block, 0, 4).flatten(1)
    return Codes(Form.SUPER, bits, columns, 64, packed(codes.flatten(1), bits), words, coarse)


def _q6_k(block: Tensor, columns: int) -> Codes:
    high = _spread(_typed(block, 128, 192).unflatten(-1, (2, 8)), 2)
    codes = _halves(_typed(block, 0, 128), 16) | high.flatten(-2) << 4
    scale = _typed(block, 208, 210, _HALF).flatten(1)
    words, coarse = _typed(block, 192, 208).flatten(1), pair(scale, torch.zeros_like(scale))
    return Codes(Form.SIXTEENTHS, 6, columns, 64, packed(codes.flatten(1), 6), words, coarse)


# Bytes and columns of a block, and its reader.
BLOCKS: dict[str, tuple[int, int, Callable[[Tensor, int], Codes]]] = {
    "Q4_0": (18, 32, partial(_of_32, bits=4, zero=8)), "Q4_1": (20, 32, partial(_of_32, bits=4, zero=0)),
    "Q5_0": (22, 32, partial(_of_32, bits=5, zero=16)), "Q5_1": (24, 32, partial(_of_32, bits=5, zero=0)),
    "Q8_0": (34, 32, partial(_of_32, bits=8, zero=128)), "Q4_K": (144, 256, _of_256),
    "Q5_K": (176, 256, _of_256), "Q6_K": (210, 256, _q6_k),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------- folders
Parts = Mapping[str, Tensor]  # of a matrix, by the last part of their names


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 (R, n) -> uint8 (R, n * 32 / bits): the lowest bits of a word come first."""
    codes = [(words >> at & 2**bits - 1).to(torch.uint8) for at in range(0, 32, bits)]
    return torch.stack(codes, -1).flatten(-2)


def _grouped(codes: Tensor, scale: Tensor, zero: Tensor | int, bits: int) -> Codes:
    """Of uint8 codes (R, C), scales (R, G) and zeros (R, G)."""
    columns, groups, bits = codes.shape[1], scale.shape[1], max(bits, 4)
    span = columns // groups if groups > 1 else columns + -columns % 64
    form = {_HALF: Form.HALF_ZERO, torch.bfloat16: Form.BF16_ZERO}.get(scale.dtype, Form.FLOAT_ZERO)
    zeros = torch.full_like(scale, zero, dtype=torch.int16) if isinstance(zero, int) else zero.short()
    if form != Form.FLOAT_ZERO:
        return Codes(form, bits, columns, span, packed(codes, bits), pair(scale, zeros))
    codes = codes + (128 - zeros).repeat_interleave(span, 1)[:, :columns]
    return Codes(form, 8, columns, span, packed(codes.to(torch.uint8), 8), _bits(scale.float()))


def _bits(scale: Tensor) -> Tensor:
    return scale.contiguous().view(torch.int32)


def _awq(parts: Parts, settings: Mapping) -> Codes:
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where a word has the codes of its eight outputs
    words = (_unpacked(parts[name], 4).unflatten(-1, (-1, 8)) for name in ("qweight", "qzeros"))
    codes, zeros = (eight[..., order].flatten(-2).T for eight in words)
    return _grouped(codes, parts["scales"].T, zeros, 4)


def _gptq(parts: Parts, settings: Mapping) -> Codes | Tensor:
    bits, old = settings["bits"], settings.get("checkpoint_format", "gptq") == "gptq"
    codes, scale = _unpacked(parts["qweight"].T.contiguous(), bits), parts["scales"].T
    zeros = _unpacked(parts["qzeros"], bits).T.short() + old  # which are stored less one in the older format
    return _in_order(codes, scale, zeros, bits, parts.get("g_idx"))


def _in_order(codes: Tensor, scale: Tensor, zero: Tensor | int, bits: int, group: Tensor | None):
    """`_grouped`, where the columns of a group lie side by side; else floats. group: (C,), of each column."""
    columns = codes.shape[1]
    if group is None or torch.equal(group.long(), torch.arange(columns) * scale.shape[1] // columns):
        return _grouped(codes, scale, zero, bits)
    zeros = zero if isinstance(zero, int) else zero.short()[:, group.long()]
    return (codes.short() - zeros) * scale.float()[:, group.long()]


def _fp8(parts: Parts, settings: Mapping) -> Codes:
    """Scales of blocks, of rows, or one of all."""
    weight, (name,) = parts["weight"], parts.keys() & {"weight_scale_inv", "weight_scale"}
    (rows, columns), scale = weight.shape, parts[name].float()
    scale = scale.reshape(len(scale) if scale.ndim else 1, -1)
    span = columns + -columns % 64
    if scale.shape[1] > 1 or len(scale) not in (1, rows):
        high, span = settings.get("weight_block_size") or (128, 128)
        scale = scale.repeat_interleave(high, 0)[:rows]
    codes = packed(weight.view(torch.uint8), 8)
    return Codes(Form.FP8, 8, columns, span, codes, _bits(scale.expand(rows, -1)))


def _packed_integers(parts: Parts, settings: Mapping) -> Codes | Tensor:
    """compressed-tensors: four or eight bits in words, or bytes."""
    scale, zero = parts["weight_scale"], parts.get("weight_zero_point")
    if (words := parts.get("weight_packed")) is None:
        codes, bits = parts["weight"].view(torch.uint8) ^ 128, 8
    else:
        bits = settings["bits"]
        codes = _unpacked(words, bits)[:, : int(parts["weight_shape"][1])]
    middle: Tensor | int = 2 ** (bits - 1)
    if zero is not None:
        middle = (
            _unpacked(zero.T.contiguous(), bits).T if zero.dtype == torch.int32 else zero.short() + middle
        )
    return _in_order(codes, scale, middle, bits, parts.get("weight_g_idx"))


def _bytes_of_rows(parts: Parts, settings: Mapping) -> Codes:
    """bitsandbytes in eight bits: SCB is what 127 stands for."""
    return _grouped(parts["weight"].view(torch.uint8) ^ 128, parts["SCB"].float()[:, None] / 127, 128, 8)


def _nf4(parts: Parts, settings: Mapping) -> Tensor:
    """bitsandbytes in four bits: codes of a table, in blocks of a flat matrix."""
    state = _state(parts)
    weight, largest = parts["weight"].flatten(), parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        fine = parts["weight.nested_quant_map"][largest.int()]
        outer = parts["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(largest)]
        largest = fine * outer + state["nested_offset"]
    codes = torch.stack((weight >> 4, weight & 15), -1).flatten()
    numbers = parts["weight.quant_map"][codes.int()]
    return (numbers * largest.repeat_interleave(state["blocksize"])[: len(numbers)]).view(state["shape"])


def _state(parts: Parts) -> dict[str, Any]:
    (name,) = (name for name in parts if ".quant_state." in name)
    return json.loads(bytes(parts[name].tolist()))


def _nvfp4(parts: Parts, settings: Mapping) -> Tensor:
    weight = parts["weight_packed"]
    codes = torch.stack((weight & 15, weight >> 4), -1).flatten(1).int()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scale = parts["weight_scale"].float() / parts["weight_global_scale"].float()
    return torch.cat((table, -table))[codes] * scale.repeat_interleave(16, 1)


def _mlx(parts: Parts, settings: Mapping) -> Codes | Tensor:
    bits, scale, least = settings["bits"], parts["scales"], parts["biases"]
    codes = _unpacked(parts["weight"], bits)
    columns, span = codes.shape[1], codes.shape[1] // scale.shape[1]
    form = {_HALF: Form.HALF_LEAST, torch.bfloat16: Form.BF16_LEAST}.get(scale.dtype)
    if form is None:
        return codes * scale.repeat_interleave(span, 1) + least.repeat_interleave(span, 1)
    bits = max(bits, 4)
    return Codes(form, bits, columns, span, packed(codes, bits), pair(scale, least))


class Scheme(NamedTuple):
    """One way in which a matrix is stored: what it is called, with its bits; the type of its codes; its
    parts, the codes first and the scales last; its shape (R, C) by that of the codes; its reader."""

    label: str
    dtype: str
    parts: tuple[str, ...]
    shape: Callable[[Shape, int], Shape]
    read: Callable[[Parts, Mapping], Codes | Tensor]


def _same(shape: Shape, bits: int) -> Shape:
    return shape


def _words(shape: Shape, bits: int) -> Shape:
    return shape[0], shape[1] * 32 // bits


# The first that fits is taken.
SCHEMES = (
    Scheme("AWQ-{}", "I32", ("qweight", "qzeros", "scales"), lambda s, _: (s[1] * 8, s[0]), _awq),
    Scheme("GPTQ-{}", "I32", ("qweight", "qzeros", "scales"), lambda s, n: (s[1], s[0] * 32 // n), _gptq),
    Scheme("FP8", "F8_E4M3", ("weight", "weight_scale_inv"), _same, _fp8),
    Scheme("FP8", "F8_E4M3", ("weight", "weight_scale"), _same, _fp8),
    Scheme("INT-{}", "I8", ("weight", "weight_scale"), _same, _packed_integers),
    Scheme("INT-{}", "I32", ("weight_packed", "weight_shape", "weight_scale"), _words, _packed_integers),
    Scheme("NVFP4", "U8", ("weight_packed", "weight_global_scale"), lambda s, _: (s[0], s[1] * 2), _nvfp4),
    Scheme("LLM.int8", "I8", ("weight", "SCB"), _same, _bytes_of_rows),
    Scheme("NF4", "U8", ("weight", "weight.absmax", "weight.quant_map"), _same, _nf4),
    Scheme("MLX-{}", "U32", ("weight", "biases", "scales"), _words, _mlx),
)
_METHODS = {"awq", "gptq", "fp8", "compressed-tensors", "bitsandbytes", "mlx"}


@dataclass(frozen=True)
class CodedEntry(Entry):
    """A matrix that is several tensors in the files."""

    scheme: Scheme
    parts: Mapping[str, Entry]
    settings: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    def opened(self) -> Codes | Tensor:
        parts = {name: part.stored().view(part.shape) for name, part in self.parts.items()}
        return self.scheme.read(parts, self.settings)

    def read(self, dtype: torch.dtype | None, part: int, parts: int) -> Tensor:
        found = self.opened()
        size, step = len(found) // parts, max(1, PARTIAL_FLOATS // self.shape[1])
        tensor = torch.empty(size, self.shape[1], dtype=dtype or torch.float32)
        for at in range(0, size, step):
            mine = slice(part * size + at, part * size + min(size, at + step))
            rows = found[mine]
            tensor[at : at + step] = rows.numbers() if isinstance(rows, Codes) else rows
        return tensor

    def codes(self, part: int, parts: int) -> Codes | None:
        found = self.opened()
        size = len(found) // parts
        if isinstance(found, Codes) and found.span % 32 == 0:
            return found[part * size : (part + 1) * size]
        return None


def kept_bytes(entry: Entry) -> int:
    """Bytes of a matrix in memory, if it is opened with its codes; or rounded to eight bits."""
    numbers, bits = math.prod(entry.shape), 8
    if entry.dtype in BLOCKS:
        size, width, _ = BLOCKS[entry.dtype]
        some = torch.zeros(1, 256 // width * size, dtype=torch.uint8)
        return numbers * codes_of_blocks(some, entry.dtype).num_bytes // 256
    groups = numbers // 64
    if isinstance(entry, CodedEntry) and "{}" in entry.scheme.label:  # of 4 or 8 bits
        bits, groups = entry.settings["bits"], math.prod(entry.parts[entry.scheme.parts[-1]].shape)
    return numbers * bits // 8 + 4 * groups


def settings_of(config: Mapping) -> dict[str, Any]:
    """How the weights of a quantized checkpoint are, by its config.json: `quant_method` and `bits` in one
    form for all."""
    stored = quantization(config)
    if "quant_method" not in stored and (mlx := section(config, "quantization")):
        return {"quant_method": "mlx", **mlx}
    groups = [*section(stored, "config_groups").values()]
    weights = section(groups[0], "weights") if groups else {}
    bits = stored.get("bits") or stored.get("w_bit") or weights.get("num_bits") or 8
    return {**stored, "bits": bits}


def unreadable(config: Mapping) -> str:
    """The words "quantized (aqlm) in a way …" for weights that nothing here reads, else ""."""
    stored = settings_of(config)
    method, version = stored.get("quant_method"), stored.get("version") or "gemm"
    known = (
        method in _METHODS and stored.get("bits") in (2, 4, 8) and stored.get("mode", "affine") == "affine"
    )
    known = known and stored.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2")
    if known and (method != "awq" or version.lower() == "gemm"):
        return ""
    how = f" ({str(method or stored.get('quant_algo'))[:40]})" if method or stored.get("quant_algo") else ""
    return f"quantized{how} in a way that nothing here reads: take the unquantized one, GGUF or AWQ"


def quantized_entries(entries: Mapping[str, Entry], config: Mapping) -> dict[str, Entry]:
    """Stored tensors with the parts of each quantized matrix as one, X.weight, of the shape that it has."""
    settings = settings_of(config)
    stems: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        stem, inside, leaf = name.partition(".weight.")
        stem, leaf = (stem, f"weight.{leaf}") if inside else (name.rpartition(".")[::2])
        stems.setdefault(stem, {})[leaf] = entry
    found: dict[str, Entry] = {}
    for stem, parts in stems.items():
        own = {**settings, **section(settings, stem)} if isinstance(settings.get(stem), dict) else settings
        if scheme := next((one for one in SCHEMES if _fits(one, parts, own)), None):
            first, others = parts[scheme.parts[0]], {"bias": parts.pop("bias")} if "bias" in parts else {}
            shape = scheme.shape(first.shape, own["bits"])
            if scheme.label == "NF4":
                state = {name: part.stored() for name, part in parts.items() if ".quant_state." in name}
                shape = tuple(_state(state)["shape"])
            place = first.path, scheme.label.format(own["bits"]), shape, first.begin, first.end
            parts = {**others, "weight": CodedEntry(*place, scheme, parts, own)}
        found |= {f"{stem}.{leaf}".lstrip("."): entry for leaf, entry in parts.items()}
    return _from_mlx(found) if settings.get("quant_method") == "mlx" else found


def _fits(scheme: Scheme, parts: Mapping[str, Entry], settings: Mapping) -> bool:
    if any(name not in parts for name in scheme.parts) or parts[scheme.parts[0]].dtype != scheme.dtype:
        return False
    return scheme.label != "AWQ-{}" or settings.get("quant_method") == "awq"


# MLX's names -> the Hub's.
_MLX = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.visual.", "": ""}  # fmt: skip


def _from_mlx(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """MLX's tensors under the Hub's names; the kernels of its convolutions have their inputs last."""
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        turned = len(entry.shape) > 2 and name.endswith("weight")
        found[rename(name, _MLX)] = joined(lambda x: x.movedim(-1, 1), entry) if turned else entry
    return found
