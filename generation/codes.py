"""Weights as quantized files hold them: small whole numbers, the codes, with the scales of their groups.

    codes = Codes.rounded(weight)                 # or as `models.checkpoints.quantized` reads them of a file
    layer = CodedLinear(codes, bias)              # y = x Wᵀ + b; nothing is ever inflated as a whole

No number of a file is rounded anew: a code keeps its bits, a scale its type. A weight is what the file's own
format makes of both in float32. C multiplies with the same numbers (`native/codes.h`); the layers here are
what that is held to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCK = 64  # columns that rows are padded to
SUPER = 256  # columns that share a word of `Codes.coarse`
PARTIAL_FLOATS = 4_194_304  # weights that are rounded or opened at a time: 16 MiB of float32


class Form(IntEnum):
    """The meaning of a group's word of 32 bits; `native/codes.h` has the same numbers. Low bits come first.

    ..._ZERO: a scale, and a whole zero: (code - zero) * scale. FLOAT_ZERO: a float32 scale; its zero is 128.
    ..._LEAST: a scale, and what code 0 stands for: code * scale + least.
    SUPER: for each of two groups of 32 a byte that is multiplied with the first half of `coarse`, its scale,
        and one that is multiplied with the second, which is subtracted.
    SIXTEENTHS: signed bytes, which multiplied with `coarse` are the scales of four groups of 16; their zero
        is the middle.
    FP8: a float32 scale of codes that are 8-bit floats (E4M3).
    HALVES: scales of two groups of 32; their zero is the middle, 2^(bits - 1).
    EIGHTHS: our own of four bits, in C alone: for each of two groups of 32 a scale in 9 bits, 4 of which are
        an exponent, and a zero in eighths of a code, (code - zero) * scale * the scale of the row.
    """

    HALF_ZERO = 1
    HALF_LEAST = 2
    BF16_ZERO = 3
    BF16_LEAST = 4
    FLOAT_ZERO = 5
    SUPER = 6
    SIXTEENTHS = 7
    FP8 = 8
    HALVES = 9
    EIGHTHS = 10


def pair(low: Tensor, high: Tensor) -> Tensor:
    """Two tensors of 16 bits each (R, G) -> words int32 (R, G): 16-bit types as they are, others as whole
    numbers."""
    both = (one if one.element_size() == 2 else one.to(torch.int16) for one in (low, high))
    return torch.stack([one.contiguous().view(torch.int16) for one in both], -1).view(torch.int32).squeeze(-1)


def halves(scale: Tensor) -> Tensor:
    """Scales (R, G) of groups of 32, float16 -> words of HALVES."""
    return F.pad(scale, (0, scale.shape[1] % 2)).contiguous().view(torch.int32)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes (R, C) of a byte each, or words of four, of 4, 5, 6 or 8 bits -> units (R, bits / 32 * C), as
    `native/codes.h` has them, padded with zeros to whole blocks."""
    if codes.dtype == torch.uint8:
        codes = F.pad(codes, (0, -codes.shape[-1] % BLOCK)).flatten().view(torch.int32).view(len(codes), -1)
    words = F.pad(codes, (0, -codes.shape[-1] % (BLOCK // 4)))
    if bits == 8:
        return words
    low = (words & 0x0F0F0F0F).unflatten(-1, (-1, BLOCK // 4))
    units, more = [low[..., ::2] | low[..., 1::2] << 4], bits - 4
    if more:
        high = (words >> 4 & (2**more - 1) * 0x01010101).unflatten(-1, (-1, 2 * more, 8 // more))
        shifts = torch.arange(0, 8, more, dtype=torch.int32, device=words.device)
        units.append((high << shifts).sum(-1, dtype=torch.int32))
    return torch.cat(units, -1).flatten(-2)


def unpacked(units: Tensor, bits: int) -> Tensor:
    """What was `packed`, a byte each: uint8 (R, C of whole blocks)."""
    if bits == 8:
        return units.contiguous().view(torch.uint8)
    blocks = units.unflatten(-1, (-1, 2 * bits))
    low, more = blocks[..., :8], bits - 4
    words = torch.stack((low & 0x0F0F0F0F, low >> 4 & 0x0F0F0F0F), -1).flatten(-2)
    if more:
        shifts = torch.arange(0, 8, more, dtype=torch.int32, device=units.device)
        high = blocks[..., 8:, None] >> shifts & (2**more - 1) * 0x01010101
        words = words | high.flatten(-2) << 4
    return words.flatten(-2).contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Codes:
    """A matrix (R, columns).

    codes: int32 (R, units), as `packed` makes them, of `bits` bits.
    words: int32 (R, W), one for each `span` columns, the last of which may reach beyond the matrix.
    coarse: int32 (R, columns / SUPER), two halves each; of SUPER and SIXTEENTHS.
    """

    form: Form
    bits: int
    columns: int
    span: int
    codes: Tensor
    words: Tensor
    coarse: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes, self.words) + (() if self.coarse is None else (self.coarse,))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.codes)

    def of(self, *tensors: Tensor) -> Codes:
        """A matrix of the same kind, made of these tensors."""
        return Codes(*self.kind, *tensors)

    def __getitem__(self, which: Tensor | slice) -> Codes:
        return self.of(*(tensor[which] for tensor in self.tensors))

    def to(self, device: torch.device | str) -> Codes:
        return self.of(*(tensor.to(device) for tensor in self.tensors))

    @property
    def kind(self) -> tuple[Form, int, int, int]:
        return self.form, self.bits, self.columns, self.span

    @classmethod
    def rounded(cls, weight: Tensor) -> Codes:
        """A float matrix in eight bits, in groups of 32 with a scale of 16 bits: as precise as C's products,
        whose other factor is rounded so, too."""
        if weight.numel() > PARTIAL_FLOATS and len(weight) > 1:
            parts = [cls.rounded(part) for part in weight.split(max(1, PARTIAL_FLOATS // weight.shape[1]))]
            return parts[0].of(*map(torch.cat, zip(*(part.tensors for part in parts))))
        x = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, 32))
        scale = (x.abs().amax(2).clamp_(1e-5, 8e6) / 127).half()
        codes = (x / scale[..., None].float()).round_().clamp_(-128, 127).add_(128).to(torch.uint8)
        return cls(Form.HALVES, 8, weight.shape[1], BLOCK, packed(codes.flatten(1), 8), halves(scale))

    def groups(self) -> tuple[Tensor, Tensor | int, Tensor | None]:
        """Scales of groups (R, G), zeros, and least weights: of `span` columns, or of 32 or 16."""
        words = self.words.contiguous()
        if self.form in (Form.FLOAT_ZERO, Form.FP8):
            return words.view(torch.float32), 128 if self.form == Form.FLOAT_ZERO else 0, None
        if self.form == Form.HALVES:
            return words.view(torch.float16).float(), 2 ** (self.bits - 1), None
        if self.coarse is None:
            kind = torch.float16 if self.form in (Form.HALF_ZERO, Form.HALF_LEAST) else torch.bfloat16
            low, high = words.view(kind).unflatten(-1, (-1, 2)).unbind(-1)
            if self.form in (Form.HALF_LEAST, Form.BF16_LEAST):
                return low.float(), 0, high.float()
            return low.float(), high.contiguous().view(torch.int16).float()[..., None], None
        coarse = self.coarse.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).float()
        if self.form == Form.SIXTEENTHS:
            fine = words.view(torch.int8).unflatten(-1, (-1, 16)) * coarse[..., :1]
            return fine.flatten(-2), 2 ** (self.bits - 1), None
        fine = words.view(torch.uint8).unflatten(-1, (-1, 8, 2)) * coarse[..., None, :]
        return fine[..., 0].flatten(-2), 0, -fine[..., 1].flatten(-2)

    def numbers(self) -> Tensor:
        """The weights (R, columns) in float32."""
        codes = unpacked(self.codes, self.bits)
        x = (codes.view(torch.float8_e4m3fn) if self.form == Form.FP8 else codes).float()
        scale, zero, least = self.groups()
        width = {Form.SUPER: 32, Form.HALVES: 32, Form.SIXTEENTHS: 16}.get(self.form, self.span)
        x = F.pad(x, (0, width * scale.shape[-1] - x.shape[-1])).unflatten(-1, (-1, width))
        x = (x - zero) * scale[..., None]
        x = x if least is None else x + least[..., None]
        return x.flatten(-2)[..., : self.columns]


class _Product(torch.autograd.Function):
    """See `product`."""

    @staticmethod
    def forward(ctx, x, opened):
        ctx.opened = opened
        parts = [F.linear(x, rows) for rows in opened(x.dtype)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        total, at = torch.zeros((), device=gradient.device), 0
        for rows in ctx.opened(gradient.dtype):
            part = gradient[..., at : at + len(rows)] @ rows
            total, at = total + part.float(), at + len(rows)
        return total.to(gradient.dtype), None


def product(x: Tensor, opened: Callable[[torch.dtype], Iterable[Tensor]]) -> Tensor:
    """x Wᵀ of a frozen matrix: (…, in) -> (…, out), under autocast in its type. `opened` gives the rows of W
    in a dtype, some at a time: again for the gradient of x, so that autograd keeps none of them, nor x."""
    kind = x.device.type
    known = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if known else x.dtype
    return _Product.apply(x.to(dtype), opened)


class CodedWeight(nn.Module):
    """A matrix of codes, with a bias or without."""

    weight: Tensor
    words: Tensor
    coarse: Tensor | None

    def __init__(self, codes: Codes, bias: Tensor | None = None):
        super().__init__()
        self.kind = codes.kind
        self.out_features, self.in_features = len(codes), codes.columns
        self.register_buffer("weight", codes.codes)
        self.register_buffer("words", codes.words)
        self.register_buffer("coarse", codes.coarse)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def codes(self) -> Codes:
        return Codes(*self.kind, self.weight, self.words, self.coarse)


class CodedLinear(CodedWeight):
    """y = x Wᵀ + b: (…, in) of any float type -> (…, out) of the same. `beside` are an adapter's factors A
    (r, in) and B (out, r), whose x Aᵀ Bᵀ comes on top."""

    low: Tensor | None
    high: Tensor | None

    def __init__(self, codes: Codes, bias: Tensor | None = None, beside: tuple[Tensor, Tensor] | None = None):
        super().__init__(codes, bias)
        for name, factor in zip(("low", "high"), beside or (None, None)):
            self.register_buffer(name, factor)

    def forward(self, x: Tensor) -> Tensor:
        step, codes = max(1, PARTIAL_FLOATS // self.in_features), self.codes
        starts = range(0, self.out_features, step)
        y = product(x, lambda dtype: (codes[at : at + step].numbers().to(dtype) for at in starts))
        if self.low is not None and self.high is not None:
            y = y + F.linear(F.linear(x, self.low.to(x.dtype)), self.high.to(x.dtype)).to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class CodedEmbedding(CodedWeight):
    """Rows of a table of codes: ids (…) -> (…, in) of `dtype`."""

    def __init__(self, codes: Codes, dtype: torch.dtype):
        super().__init__(codes)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.codes[ids.flatten()].numbers()
        return rows.view(*ids.shape, self.in_features).to(self.dtype)
