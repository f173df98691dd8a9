"""Quantized matrices of folders and GGUF files: how their codes and scales lie there.

Every reader is a function of the stored tensors. What has whole codes and a scale for each group of columns
is kept as such (`generation.codes`); a codebook (NF4), a scale of scales in 8-bit floats (NVFP4) and groups
whose columns lie apart (`act-order`) are opened. A matrix of a folder is several tensors there;
`quantized_entries` puts one in their place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from families import family_of
from families.keys import quantization, section
from generation.codes import BLOCK, Codes, Form, halves, packed, pair
from models.checkpoints.files import CheckpointError
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
    blocks = raw.view(torch.int16).unflatten(1, (-1, size // 2))
    return read(blocks, blocks.shape[1] * width)


def _typed(block: Tensor, begin: int, end: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Bytes [begin, end) of each block (R, n, B / 2) as numbers of a type (R, n, count)."""
    own = block[..., begin // 2 : end // 2]
    return own.flatten().view(dtype).view(*own.shape[:-1], -1)  # which has no odd strides, as one block may


def _units(words: Tensor, run: int) -> Tensor:
    """Words whose low halves are the codes of 4 · `run` columns, `run` at a time, and the high ones those of
    the next columns (R, n, W) -> as `packed` has them: (R, n, W / run, run)."""
    even, odd = words.unflatten(-1, (-1, run // 2, 2)).unbind(-1)
    return torch.cat((even & _LOW | (odd & _LOW) << 4, even >> 4 & _LOW | odd & ~_LOW), -1)


def _planes(words: Tensor, more: int) -> Tensor:
    """Words whose lowest bits of each byte belong to the first columns, the next ones to those that follow
    (…, W) -> the bits above the fourth as `packed` has them (…, W)."""
    rows = [*words.unflatten(-1, (-1, 8 // more)).unbind(-1)]
    # Rows and columns of little matrices change places (H. Warren, Hacker's Delight, 7-3).
    for bits, mask in ((4, _LOW), (2, 0x33333333), (1, 0x55555555))[: 4 - more]:
        for at, far in ((at, at + bits // more) for at in range(8 // more) if not at & bits // more):
            swap = (rows[at] >> bits ^ rows[far]) & mask
            rows[at], rows[far] = rows[at] ^ swap << bits, rows[far] ^ swap
    return torch.stack(rows, -2).flatten(-2)


def _of_32(block: Tensor, columns: int, bits: int, zero: int) -> Codes:
    """Blocks of a scale, a least weight (where no zero is given), fifth bits of all, and codes."""
    at = 2 if zero else 4
    words = halves(_typed(block, 0, 2, _HALF).flatten(1)) if zero else _typed(block, 0, 4).flatten(1)
    form, span = (Form.HALVES, 64) if zero else (Form.HALF_LEAST, 32)
    if bits == 8:
        units = _typed(block, 2, 34) ^ -0x7F7F7F80  # the highest bit of each
        units = packed(units.flatten(1), 8)
    elif bits == 4:
        units = _units(_typed(block, at, at + 16), 4).flatten(1)
        units = F.pad(units, (0, -units.shape[1] % 8))
    else:  # a word has the fifth bits of 32 columns, one after the other
        low, four = _typed(block, at + 4, at + 20), _typed(block, at, at + 4)
        four = (four >> torch.arange(0, 32, 4, dtype=torch.int32) & 15) * 0x204081 & _ONES
        units = packed((torch.cat((low & _LOW, low >> 4 & _LOW), -1) | four << 4).flatten(1), 5)
    return Codes(form, bits, columns, span, units, words)


def _of_256(block: Tensor, columns: int) -> Codes:
    """Q4_K and Q5_K: two scales of all, scales and mins of eight groups in 6 bits each, fifth bits, codes."""
    scale, least, rest = _typed(block, 4, 16).unbind(-1)
    scale = torch.stack((scale & 0x3F3F3F3F, rest & _LOW | scale >> 2 & 0x30303030), -1)
    least = torch.stack((least & 0x3F3F3F3F, rest >> 4 & _LOW | least >> 2 & 0x30303030), -1)
    words = torch.stack((scale.view(torch.uint8), least.view(torch.uint8)), -1).flatten(1).view(torch.int32)
    size, bits = 2 * block.shape[-1], 4
    units = _units(_typed(block, size - 128, size), 8)
    if size > 144:
        planes = _planes(_typed(block, 16, 48), 1)
        units, bits = torch.cat((units, planes.unflatten(-1, (4, 2))), -1), 5
    coarse = _typed(block, 0, 4).flatten(1)
    return Codes(Form.SUPER, bits, columns, 64, units.flatten(1), words, coarse)


def _q6_k(block: Tensor, columns: int) -> Codes:
    units = _units(_typed(block, 0, 128), 16).unflatten(-1, (2, 8)).flatten(2, 3)
    planes = _planes(_typed(block, 128, 192).unflatten(-1, (2, 8)), 2).unflatten(-1, (2, 4)).flatten(2, 3)
    scale = _typed(block, 208, 210, _HALF).flatten(1)
    words, coarse = _typed(block, 192, 208).flatten(1), pair(scale, torch.zeros_like(scale))
    units = torch.cat((units, planes), -1).flatten(1)
    return Codes(Form.SIXTEENTHS, 6, columns, 64, units, words, coarse)


# Bytes and columns of a block, and its reader.
BLOCKS: dict[str, tuple[int, int, Callable[[Tensor, int], Codes]]] = {
    "Q4_0": (18, 32, partial(_of_32, bits=4, zero=8)), "Q4_1": (20, 32, partial(_of_32, bits=4, zero=0)),
    "Q5_0": (22, 32, partial(_of_32, bits=5, zero=16)), "Q5_1": (24, 32, partial(_of_32, bits=5, zero=0)),
    "Q8_0": (34, 32, partial(_of_32, bits=8, zero=128)), "Q4_K": (144, 256, _of_256),
    "Q5_K": (176, 256, _of_256), "Q6_K": (210, 256, _q6_k),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------- folders
Parts = Mapping[str, Tensor]  # of a matrix, by the last part of their names


class Way(NamedTuple):
    """A way in which matrices lie, by a config.json. bits: of a code. span: columns of a group; below 1: all.
    block: rows and columns that share a scale. order: whether columns of a group lie apart. less_one: zeros
    are stored so."""

    bits: int = 8
    span: int = 0
    block: tuple[int, int] = (128, 128)
    order: bool | str = False
    less_one: bool = False

    @property
    def held(self) -> int:
        """The bits of a code in memory."""
        return max(self.bits, 4) if self.bits <= 6 else 8

    def counts(self, rows: int, columns: int, fp8: bool) -> set[int]:
        """The numbers of scales that a matrix may have."""
        grouped = rows * (-(-columns // self.span) if self.span > 0 else 1)
        blocks = -(-rows // self.block[0]) * -(-columns // self.block[1])
        return {1, rows, grouped, blocks} if fp8 else {grouped, grouped // rows}


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 (R, n) -> uint8 (R, n * 32 / bits): codes side by side, the lowest bits of a word first."""
    if bits == 4:  # four bytes at a time
        two = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), -1)
        two = (two | two << 8) & 0x00FF00FF
        return ((two | two << 4) & _LOW).flatten(-2).view(torch.uint8)
    eight = words.contiguous().view(torch.uint8).unflatten(-1, (-1, bits))  # bytes of eight codes
    codes = []
    for byte, shift in (divmod(bit, 8) for bit in range(0, 8 * bits, bits)):
        code = eight[..., byte] >> shift
        if shift + bits > 8:
            code = code | eight[..., byte + 1] << (8 - shift)
        codes.append(code & 2**bits - 1)
    return torch.stack(codes, -1).flatten(-2)


def _narrow(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """The tensors in 16 bits, all in one type, where that changes no number."""
    for kind in (_HALF, torch.bfloat16):
        found = tuple(one.to(kind) for one in tensors)
        if all(torch.equal(one.float(), own.float()) for one, own in zip(found, tensors)):
            return found
    return None


def _grouped(codes: Tensor, scale: Tensor, zero: Tensor | int, way: Way, group: Tensor | None = None):
    """Codes of bytes (R, C), scales (R, G) and zeros (R, G); floats where columns of a group lie apart, as
    `group` (C,), that of each column, has them, or where scales of 32 bits have zeros of their own."""
    (rows, columns), bits = codes.shape, way.held
    span = way.span if way.span > 0 else columns + -columns % BLOCK
    scale = scale.reshape(scale.shape[0] if scale.ndim else 1, -1).expand(rows, -1)
    zeros = (
        torch.full_like(scale, zero, dtype=torch.int16)
        if isinstance(zero, int)
        else zero.short().expand_as(scale)
    )
    own, narrow = torch.arange(columns) // span, _narrow(scale)
    apart = group is not None and group.numel() == columns and not torch.equal(group.long(), own)
    if not apart and narrow:
        form = Form.HALF_ZERO if narrow[0].dtype == _HALF else Form.BF16_ZERO
        return Codes(form, bits, columns, span, packed(codes, bits), pair(narrow[0], zeros))
    of = group.long() if apart and group is not None else own
    if apart or (bits == 8 and bool((zeros != 128).any())):
        return (codes.short() - zeros[:, of]) * scale.float()[:, of]
    codes = (codes + (128 - zeros)[:, of]).to(torch.uint8)
    return Codes(Form.FLOAT_ZERO, 8, columns, span, packed(codes, 8), _bits(scale.float()))


def _bits(scale: Tensor) -> Tensor:
    return scale.contiguous().view(torch.int32)


def _awq(parts: Parts, way: Way) -> Codes | Tensor:
    words = [parts[name].T.contiguous() for name in ("qweight", "qzeros")]
    places = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word has the codes of its eight outputs
    eight = ([(one >> 4 * place & 15).to(torch.uint8) for place in places] for one in words)
    codes, zeros = (torch.stack(one, 1).flatten(0, 1) for one in eight)
    return _grouped(codes, parts["scales"].T, zeros, way)


def _gptq(parts: Parts, way: Way) -> Codes | Tensor:
    codes = _unpacked(parts["qweight"].T, way.bits)
    zeros = _unpacked(parts["qzeros"], way.bits).T.short() + way.less_one
    return _grouped(codes, parts["scales"].T, zeros, way, parts.get("g_idx"))


def _fp8(parts: Parts, way: Way) -> Codes:
    """Scales of blocks, of groups in rows, of rows, or one of all."""
    weight, (name,) = parts["weight"], parts.keys() & {"weight_scale_inv", "weight_scale"}
    (rows, columns), scale = weight.shape, parts[name].float()
    scale = scale.reshape(len(scale) if scale.ndim else 1, -1)
    high, span = way.block if len(scale) != rows else (1, way.span)
    if scale.numel() == 1 or scale.shape == (rows, 1):
        high, span = rows, columns + -columns % BLOCK
        scale = scale.expand(rows, 1)
    else:
        scale = scale.repeat_interleave(high, 0)[:rows]
    return Codes(Form.FP8, 8, columns, span, packed(weight.view(torch.uint8), 8), _bits(scale))


def _packed_integers(parts: Parts, way: Way) -> Codes | Tensor:
    """compressed-tensors: four or eight bits in words, or bytes."""
    zero, middle = parts.get("weight_zero_point"), 2 ** (way.bits - 1)
    if (words := parts.get("weight_packed")) is None:
        codes, middle, way = parts["weight"].view(torch.uint8) ^ 128, 128, way._replace(bits=8)
    else:
        codes = _unpacked(words, way.bits)[:, : int(parts["weight_shape"][1])]
    if zero is None:
        zero = middle
    elif zero.dtype == torch.int32:
        zero = _unpacked(zero.T, way.bits).T[: len(codes)]
    else:
        zero = zero.reshape(len(zero), -1).short() + middle
    return _grouped(codes, parts["weight_scale"], zero, way, parts.get("weight_g_idx"))


def _bytes_of_rows(parts: Parts, way: Way) -> Codes | Tensor:
    """bitsandbytes in eight bits: SCB is what 127 stands for."""
    scale = parts["SCB"].float()[:, None] / 127
    return _grouped(parts["weight"].view(torch.uint8) ^ 128, scale, 128, way._replace(bits=8, span=0))


def _nf4(parts: Parts, way: Way) -> Tensor:
    """bitsandbytes in four bits: codes of a table, in blocks of a flat matrix."""
    state = _json(next(part for name, part in parts.items() if ".quant_state." in name))
    weight, largest = parts["weight"].flatten(), parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        fine = parts["weight.nested_quant_map"][largest.int()]
        outer = parts["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(largest)]
        largest = fine * outer + state["nested_offset"]
    codes = torch.stack((weight >> 4, weight & 15), -1).flatten()
    numbers = F.pad(parts["weight.quant_map"][codes.int()], (0, -len(codes) % state["blocksize"]))
    numbers = numbers.view(len(largest), -1) * largest[:, None].float()
    return numbers.flatten()[: math.prod(state["shape"])].view(state["shape"])


def _json(raw: Tensor) -> Any:
    return json.loads(bytes(raw.tolist()))


def _nvfp4(parts: Parts, way: Way) -> Tensor:
    weight = parts["weight_packed"]
    codes = torch.stack((weight & 15, weight >> 4), -1).flatten(1).int()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scale = parts["weight_scale"].float() / parts["weight_global_scale"].float()
    return torch.cat((table, -table))[codes] * scale.repeat_interleave(16, 1)


def _mlx(parts: Parts, way: Way) -> Codes | Tensor:
    codes, bits = _unpacked(parts["weight"], way.bits), way.held
    if narrow := _narrow(parts["scales"], parts["biases"]):
        form = Form.HALF_LEAST if narrow[0].dtype == _HALF else Form.BF16_LEAST
        return Codes(form, bits, codes.shape[1], way.span, packed(codes, bits), pair(*narrow))
    scale, least = (parts[name].float().repeat_interleave(way.span, 1) for name in ("scales", "biases"))
    return codes * scale + least


class Scheme(NamedTuple):
    """One way in which a matrix is stored: what it is called, with its bits; the type of its codes; its
    parts, the codes first and the scales last; its shape (R, C) by that of the codes; its reader; and whether
    there are codes to keep."""

    label: str
    dtype: str
    parts: tuple[str, ...]
    shape: Callable[[Shape, int], Shape]
    read: Callable[[Parts, Way], Codes | Tensor]
    kept: bool = True


def _same(shape: Shape, bits: int) -> Shape:
    return shape


def _words(shape: Shape, bits: int) -> Shape:
    return shape[0], shape[1] * 32 // bits


# The first that fits is taken.
SCHEMES = (
    Scheme("AWQ-{}", "I32", ("qweight", "qzeros", "scales"), lambda s, _: (s[1] * 8, s[0]), _awq),
    Scheme(
        "GPTQ-{}", "I32", ("qweight", "qzeros", "scales"), lambda s, n: (s[1], s[0] * 32 // n), _gptq
    ),
    Scheme("FP8", "F8_E4M3", ("weight", "weight_scale_inv"), _same, _fp8),
    Scheme("FP8", "F8_E4M3", ("weight", "weight_scale"), _same, _fp8),
    Scheme("INT8", "I8", ("weight", "weight_scale"), _same, _packed_integers),
    Scheme("INT{}", "I32", ("weight_packed", "weight_shape", "weight_scale"), _words, _packed_integers),
    Scheme(
        "NVFP4", "U8", ("weight_packed", "weight_global_scale"), lambda s, _: (s[0], s[1] * 2), _nvfp4,
        kept=False,
    ),
    Scheme("LLM.int8", "I8", ("weight", "SCB"), _same, _bytes_of_rows),
    # Its shape is in the file; a flat one stands for it where that is not here.
    Scheme(
        "bnb-4bit", "U8", ("weight", "weight.quant_map", "weight.absmax"),
        lambda s, _: (2 * math.prod(s),), _nf4, kept=False,
    ),
    Scheme("MLX-{}", "U32", ("weight", "biases", "scales"), _words, _mlx),
)  # fmt: skip


@dataclass(frozen=True)
class CodedEntry(Entry):
    """A matrix that is several tensors in the files."""

    scheme: Scheme
    parts: Mapping[str, Entry]
    way: Way

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    def opened(self) -> Codes | Tensor:
        parts = {name: part.stored().view(part.shape) for name, part in self.parts.items()}
        return self.scheme.read(parts, self.way)

    def read(self, dtype: torch.dtype | None, part: int, parts: int) -> Tensor:
        found, size = self.opened(), self.shape[0] // parts
        tensor, step = torch.empty(size, *self.shape[1:], dtype=dtype or torch.float32), 2048
        for at in range(0, size, step):
            rows = found[part * size + at : part * size + min(size, at + step)]
            tensor[at : at + step] = rows.numbers() if isinstance(rows, Codes) else rows
        return tensor

    def codes(self, part: int, parts: int) -> Codes | None:
        found, size = self.opened() if self.scheme.kept else None, self.shape[0] // parts
        if isinstance(found, Codes) and found.span % 32 == 0:
            return found[part * size : (part + 1) * size]
        return None


def keeps_codes(entry: Entry) -> bool:
    """Whether a matrix is opened with its codes, or else rounded to eight bits."""
    if isinstance(entry, CodedEntry):
        return entry.scheme.kept and entry.way.order not in (True, "group")
    return entry.dtype in BLOCKS and getattr(entry, "by_rows", True)


def kept_bytes(entry: Entry) -> int:
    """Bytes of a matrix in memory, as `keeps_codes` says."""
    numbers, bits = math.prod(entry.shape), 8
    if entry.dtype in BLOCKS and keeps_codes(entry):
        size, width, _ = BLOCKS[entry.dtype]
        some = torch.zeros(1, 256 // width * size, dtype=torch.uint8)
        return numbers * codes_of_blocks(some, entry.dtype).num_bytes // 256
    words = numbers // 64
    if isinstance(entry, CodedEntry) and keeps_codes(entry):
        bits = entry.way.held if "{}" in entry.scheme.label else 8
        scales = math.prod(entry.parts[entry.scheme.parts[-1]].shape)
        words = max(scales * (entry.way.block[0] if entry.scheme.label == "FP8" else 1), entry.shape[0])
    return numbers * bits // 8 + 4 * words


# --------------------------------------------------------------------------------------------- config.json
# Forms of each method that are read ("": where config.json names none), and its bits.
_READ: dict[str, tuple[str, tuple[int, ...]]] = {
    "awq": ("gemm", (4,)), "gptq": (" gptq gptq_v2", (2, 3, 4, 8)), "mlx": ("affine", (2, 3, 4, 5, 6, 8)),
    "fp8": ("", (8,)), "fbgemm_fp8": ("", (8,)), "modelopt": ("fp8", (8,)), "bitsandbytes": ("", (8,)),
    "auto-round": ("auto_round:auto_gptq auto_round:auto_awq", (2, 3, 4, 8, 16)),
    "compressed-tensors": (
        " dense pack-quantized int-quantized float-quantized naive-quantized nvfp4-pack-quantized"
        " mixed-precision",
        (4, 8),
    ),
}  # fmt: skip
_SPANS = {"awq": 128, "gptq": 128, "auto-round": 128, "mlx": 64}  # where none are named
# The key that names the form of a method's weights.
_FORM = {"awq": "version", "gptq": "checkpoint_format", "mlx": "mode", "auto-round": "packing_format",
         "modelopt": "quant_algo", "compressed-tensors": "format"}  # fmt: skip
_KEYS = {"bits": "bits", "w_bit": "bits", "num_bits": "bits", "group_size": "span", "q_group_size": "span",
         "weight_block_size": "block", "block_structure": "block", "desc_act": "order",
         "actorder": "order"}  # fmt: skip


def method_of(config: Mapping) -> tuple[dict, str, str]:
    """What a config.json says of how its weights are quantized: all, the method, and its form."""
    stored = quantization(config)
    if "quant_method" not in stored and "quantization" in config:
        stored = {"quant_method": "mlx", "mode": "affine"} | stored
    method = str(stored.get("quant_method") or stored.get("quant_algo") or "")
    form = stored.get(_FORM.get(method, "")) or ("gemm" if method == "awq" else "")
    return stored, method, str(form).lower()


def _ways(stored: Mapping, way: Way) -> Iterator[Way]:
    """The ways that a section and those inside it name."""
    found = {ours: stored[key] for key, ours in _KEYS.items() if stored.get(key) is not None}
    yield (way := way._replace(**found))
    for name, inner in stored.items():
        if isinstance(inner, dict) and "activations" not in name:
            yield from _ways(inner, way)


def unreadable(config: Mapping) -> str:
    """The words "quantized (aqlm) in a way …" for weights that nothing here reads, else ""."""
    stored, method, form = method_of(config)
    sparse = section(stored, "sparsity_config").get("format") or "dense"
    forms, bits = _READ.get(method, ("unknown", ()))
    how = form if sparse == "dense" else sparse
    # Turned weights meet activations that are turned alike: `apply` says where.
    turned = re.findall(r"'location': '(?!weight_)(\w+)", str(section(stored, "transform_config")))
    how = f"transform of {turned[0]}" if turned else how
    if how in forms.split(" "):
        other = {way.bits for way in _ways(stored, Way(bits[-1]))} - {*bits}
        if not other:
            return ""
        how = f"{other.pop()} bits"
    how = " ".join(filter(None, (method, how)))[:60]
    return f"quantized ({how}) in a way that nothing here reads: take the unquantized one, GGUF or AWQ"


# ------------------------------------------------------------------------------------------------- entries
# Scales of activations and of the cache, which nothing here uses.
_BESIDE = {f"{name}_{end}" for name in ("input", "output", "activation", "q", "k", "v", "prob")
           for end in ("scale", "zero_point", "global_scale")}  # fmt: skip


def quantized_entries(entries: Mapping[str, Entry], config: Mapping) -> dict[str, Entry]:
    """Stored tensors by the Hub's names, with the parts of each quantized matrix as one, X.weight, of the
    shape that it has."""
    family, (settings, method, form) = family_of(config), method_of(config)
    stems: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        stem, inside, leaf = name.partition(".weight.")
        stem, leaf = (stem, f"weight.{leaf}") if inside else (name.rpartition(".")[::2])
        if leaf not in _BESIDE:
            stems.setdefault(stem, {})[leaf] = entry
    made: dict[str, Entry] = {}
    base = Way(8, _SPANS.get(method, 0), less_one=form in ("", "gptq", "auto_round:auto_gptq"))
    for stem, parts in stems.items():
        if scheme := next((one for one in SCHEMES if _fits(one, parts, f"{method} {form}")), None):
            others = {"bias": parts.pop("bias")} if "bias" in parts else {}
            own = settings.get(stem, settings.get(stem.removeprefix("language_model.")))
            ways = [*(_ways(own, base) if isinstance(own, dict) else ()), *_ways(settings, base)]
            parts = {**others, "weight": _coded(stem, scheme, parts, ways)}
        made |= {f"{stem}.{leaf}".lstrip("."): entry for leaf, entry in parts.items()}
    return from_mlx(made, {} if family is None else family.MLX)


def _fits(scheme: Scheme, parts: Mapping[str, Entry], method: str) -> bool:
    if any(name not in parts for name in scheme.parts) or parts[scheme.parts[0]].dtype != scheme.dtype:
        return False
    return scheme.label != "AWQ-{}" or "awq" in method


def _coded(stem: str, scheme: Scheme, parts: Mapping[str, Entry], ways: list[Way]) -> CodedEntry:
    """The matrix of these parts, in the first of `ways` that fits their shapes. Two may, of other bits and
    widths: where the file tells columns, or bits of zeros, it must have those."""
    first, last = parts[scheme.parts[0]], parts[scheme.parts[-1]]
    told = [parts[name] for name in parts if name == "weight_shape" or ".quant_state." in name]
    shape = told[0].stored().tolist() if told and told[0].path.is_file() else None
    shape = json.loads(bytes(shape))["shape"] if shape and not scheme.kept else shape
    bits = parts["qzeros"].shape[1] * 32 // last.shape[1] if "qzeros" in parts else None
    for way in ways:
        own = tuple(shape or scheme.shape(first.shape, way.bits))
        words = -(-own[-1] * way.bits // 32) if "weight_packed" in parts and scheme.kept else first.shape[-1]
        fits = not scheme.kept or math.prod(last.shape) in way.counts(own[0], own[1], scheme.label == "FP8")
        if fits and words == first.shape[-1] and bits in (None, way.bits):
            break
    else:
        raise CheckpointError(f"{first.path}: {stem} has no groups of a width that config.json names")
    where = first.path, scheme.label.format(way.bits), own, first.begin, first.end
    return CodedEntry(*where, scheme, parts, way)


OF_MLX = re.compile(r"language_model\.(model|layers)\.").match  # names in its folders


def from_mlx(entries: Mapping[str, Entry], names: Mapping[str, str]) -> dict[str, Entry]:
    """Tensors by the Hub's names, of a folder that mlx-vlm has written; those of another as they are.

    names: beginnings of names there -> the Hub's, "" last; and "+1", an expression for the Hub's names of
    norms that are stored there as 1 + w. Convolutions have their inputs, which are few, last there.
    """
    if not names or not any(map(OF_MLX, entries)):
        return dict(entries)
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        name = rename(name, names)
        if len(entry.shape) > 2 and name.endswith("weight") and entry.shape[-1] < entry.shape[-2]:
            entry = joined(lambda kernel: kernel.movedim(-1, 1), entry)
        elif re.fullmatch(names.get("+1", ""), name):
            entry = joined(lambda norm: norm.float() - 1, entry)
        found[name] = entry
    return found
