"""Weights in panels, as C reads them: linear layers and token embeddings of a model, replaced in place.

    to_panels(model.language_model)
    put_layers(model, names, tensor, partial(round_layer, "int4"))    # as a checkpoint is read

C multiplies weights in panels with one row or with thousands, with the same bits for each. A panel holds the
weights of a few outputs (32 with AVX-512, else 16) in 32-bit units along the inner dimension: 1 float,
2 bfloat16, 4 int8 or 8 of four bits, padded with zeros; see panels.h. Eager code runs on such layers as well.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation.codes import BLOCK, CodedEmbedding, CodedLinear, CodedWeight, Codes, Form
from generation.fast.native.build import load_library, structure
from generation.fast.native.passes import run_pass
from generation.fast.quantized import (
    LAYERS,
    PARTIAL_FLOATS,
    UNPACKED,
    PackedEmbedding,
    PackedLinear,
    arithmetic,
    has_four_bits,
    pack_layer,
    replace_layers,
)

BITS = {torch.float32: 32, torch.bfloat16: 16, torch.int8: 8, torch.int32: 4}  # int32: eight weights
PARTS = ("weight", "scale", "sum", "bias", "words", "coarse")  # tensors of a layer, as C's Matrix has them
_SUMMED = 4_096  # rows
SHARED_BYTES = 2**23  # that small matrices share: they stay while any of them does
BY_ROW = "embed_tokens_per_layer.weight"  # the name of `table_of_rows`
NOTED = 256  # tokens by which second moments are known


Matrix = structure("Matrix")


def load_panels(weight_bits: int) -> ctypes.CDLL:
    """The functions of linear.h, for one weight type. Raises NoCompiler."""
    return load_library("decode.c", weight_bits)


class Memory:
    """Memory of weights in pages of 2 MB, where the system has them: a processor finds its way in few large
    pages sooner than in many small ones. Small matrices share some."""

    def __init__(self) -> None:
        self._lock, self._chunk, self._used = Lock(), mmap.mmap(-1, 1), 1

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor whose numbers are not set; it begins at a line of the cache."""
        count, size = math.prod(shape), math.prod(shape) * dtype.itemsize
        if size >= SHARED_BYTES:  # goes with its tensor
            return torch.frombuffer(_pages(size), dtype=dtype, count=count).view(shape)
        with self._lock:
            begin = -(-self._used // 64) * 64
            if begin + size > len(self._chunk):
                self._chunk, begin = _pages(SHARED_BYTES), 0
            self._used = begin + size
            return torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=begin).view(shape)


def _pages(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {size:,} bytes for weights: {error.strerror}") from error
    with suppress(AttributeError, OSError):  # a system that has no such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_memory = Memory()


def refuse_change(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise RuntimeError if this would move weights or change their type: C has their addresses."""
    before = torch.empty(0)
    after = fn(before)
    if (after.dtype, after.device) != (before.dtype, before.device):
        raise RuntimeError(
            "the model's weights are in panels, which stay on the CPU and in their type: load the checkpoint "
            "again for another device or dtype"
        )


class PanelWeight(nn.Module):
    """A matrix (out, in) of float32, bfloat16, int8 with one float32 scale an output row, or four bits, in
    panels.

    Args:
        bits: 4 rounds a float matrix, part by part (`quantize.h`); None leaves it as it is.
        moments: (in,) mean squares of its inputs (`second_moments`), by which errors of four bits count.
    """

    weight: Tensor  # (panels, units, weights of a unit of each output)
    scale: Tensor | None
    sum: Tensor | None
    bias: Tensor | None
    words: Tensor | None  # of codes (native/codes.h), as `coarse`
    coarse: Tensor | None
    kind: tuple[int, int, int] = (Form.EIGHTHS, 4, BLOCK)  # form, bits and span of codes

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        bits: int | None = None,
        moments: Tensor | None = None,
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        library = load_panels(bits or BITS[weight.dtype])
        panel, units = library.ocelli_panel(), library.ocelli_units(self.in_features)
        padding = -self.out_features % panel
        weight, count, words = weight.detach(), (self.out_features + padding) // panel, None
        if bits == 4:
            panels, words = (_memory.take(count, n, panel, dtype=torch.int32) for n in (units, units // 8))
            scale = torch.empty(self.out_features + padding)
            importance = _importance(moments, self.in_features)
            at = 0
            for rows in weight.split(max(1, PARTIAL_FLOATS // self.in_features // panel) * panel):
                part = rows.float().contiguous()
                own = (panels[at // panel :], words[at // panel :], scale[at:])
                given = part.data_ptr(), importance.data_ptr()
                arguments = (*given, *part.shape, *(one.data_ptr() for one in own))
                run_pass(partial(library.ocelli_quantize, *arguments), 64 * part.numel())
                at += len(part)
        else:
            weight = weight.contiguous()
            panels = _memory.take(count, units, panel * 4 // weight.itemsize, dtype=weight.dtype)
            where, to = weight.data_ptr(), panels.data_ptr()
            run_pass(lambda made: library.ocelli_pack(where, *weight.shape, to, made), weight.numel())
        # As long as the panels are, because C reads whole vectors of them.
        sums = None  # of rows, a few at a time: PyTorch widens them all first
        if scale is not None and bits is None:
            scale = F.pad(scale.detach().float(), (0, padding))
            counted = [rows.sum(1, dtype=torch.int32) for rows in weight.split(_SUMMED)]
            sums = F.pad(torch.cat(counted), (0, padding))
        bias = None if bias is None else F.pad(bias.detach().float(), (0, padding))
        self._hold(weight=panels, scale=scale, sum=sums, bias=bias, words=words)

    @classmethod
    def of(cls, shape: tuple[int, int], **parts: Tensor | None) -> PanelWeight:
        """A layer made of weight, scale, sum, bias and words as another one had them, or of codes."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.out_features, made.in_features = shape
        made._hold(**parts)
        return made

    def _hold(self, **parts: Tensor | None) -> None:
        for name in PARTS:
            self.register_buffer(name, parts.get(name))

    @classmethod
    def of_codes(cls, layer: CodedWeight) -> PanelWeight:
        """A layer with the codes of another one; with an adapter beside them, their sum in eight bits."""
        panel, codes = load_panels(4).ocelli_panel(), layer.codes
        if isinstance(layer, CodedLinear) and layer.low is not None and layer.high is not None:
            codes = Codes.rounded(codes.numbers().addmm_(layer.high, layer.low))
        padding = -layer.out_features % panel

        def panels(rows: Tensor) -> Tensor:
            """int32 (R, n) -> (panels, n, outputs of a panel)"""
            rows = F.pad(rows, (0, 0, 0, padding)) if padding else rows
            rows = rows.unflatten(0, (-1, panel)).transpose(1, 2)
            return _memory.take(*rows.shape, dtype=rows.dtype).copy_(rows)

        bias = None if layer.bias is None else F.pad(layer.bias.detach().float(), (0, padding))
        parts = {name: panels(rows) for name, rows in zip(("weight", "words", "coarse"), codes.tensors)}
        made = cls.of((layer.out_features, layer.in_features), **parts, bias=bias)
        made.kind = codes.form, codes.bits, codes.span
        return made

    @classmethod
    def sharing(cls, other: PanelWeight) -> PanelWeight:
        """A layer with the weights of another one, and no bias."""
        parts = {name: getattr(other, name) for name in PARTS}
        made = cls.of((other.out_features, other.in_features), **parts | {"bias": None})
        made.kind = other.kind
        return made

    def _apply(self, fn, recurse: bool = True):
        """Called by `.to()`, `.half()` and the like."""
        refuse_change(fn)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Called by `state_dict`: float weights are saved as the layer had them that this one replaced."""
        if not self.weight.is_floating_point():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        destination[f"{prefix}weight"] = self.unpacked()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias[: self.out_features].clone()

    def unpacked(self) -> Tensor:
        """The matrix (out, in) that was put into panels; of int8 without its scale. Of four bits it is what
        they stand for, float32."""
        if self.weight.dtype == torch.int32:
            return PanelEmbedding.sharing(self)(torch.arange(self.out_features))
        panels, units, length = self.weight.shape
        unit = 32 // BITS[self.weight.dtype]
        rows = self.weight.view(panels, units, length // unit, unit).transpose(1, 2)
        return rows.reshape(-1, units * unit)[: self.out_features, : self.in_features].contiguous()

    def rows(self, device: torch.device) -> Tensor:
        """Its weights as rows on a device, without the rows' scales: int8, or units of four bits."""
        if self.words is None:
            return self.unpacked().to(device)
        parts = (part.to(device).transpose(1, 2).flatten(0, 1) for part in (self.weight, self.words))
        rows = torch.cat([*parts], 1)[: self.out_features]
        return F.pad(rows, (0, -rows.shape[1] % 4))

    @property
    def matrix(self) -> ctypes.Structure:
        """Its addresses, which hold as long as this module is where it is."""
        parts = (getattr(self, name) for name in PARTS)
        addresses = [None if part is None else part.data_ptr() for part in parts]
        return Matrix(*addresses[:4], self.out_features, self.in_features, *addresses[4:], *self.kind)


class PanelLinear(PanelWeight):
    """y = x Wᵀ + b: (…, in) of any float type -> (…, out) float32; without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"expected inputs (…, {self.in_features}), got {tuple(x.shape)}")
        rows = x.detach().float().reshape(-1, self.in_features).contiguous()
        y = torch.empty(len(rows), self.out_features)
        library, matrix = load_panels(BITS[self.weight.dtype]), self.matrix
        room = torch.empty(library.ocelli_linear_floats(matrix, len(rows)))
        from_, to, count = rows.data_ptr(), y.data_ptr(), len(rows)
        products, call = count * self.in_features * self.out_features, library.ocelli_linear
        run_pass(lambda made: call(matrix, from_, count, made, room.data_ptr(), to), products)
        return y.view(*x.shape[:-1], self.out_features)


class PanelEmbedding(PanelWeight):
    """Rows of a table in panels: ids (…) -> (…, in) float32."""

    def forward(self, ids: Tensor) -> Tensor:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"ids: expected 0 to {self.out_features - 1}, got {ids.min()} to {ids.max()}")
        x, flat = torch.empty(*ids.shape, self.in_features), ids.long().contiguous()
        load_panels(BITS[self.weight.dtype]).ocelli_embed(
            self.matrix, flat.data_ptr(), flat.numel(), x.data_ptr()
        )
        return x


# ------------------------------------------------------------------------------------- replacing layers


def table_of_rows(layer: Any, bits: int | None) -> nn.Module:
    """A table in rows, in the type that it is stored in, or rounded to four bits: it is no matrix, and a few
    rows are read. In a panel the units of a row lie far apart."""
    if bits == 4:
        made: list[Tensor] = []  # of the whole table, of which a part is in panels at a time
        for first in range(0, len(layer.weight), _SUMMED):
            part: Any = PanelEmbedding(layer.weight.detach()[first : first + _SUMMED], bits=4)
            for number, rows in enumerate((part.rows(layer.weight.device), part.scale[: part.out_features])):
                if not first:
                    made.append(rows.new_empty(len(layer.weight), *rows.shape[1:]))
                made[number][first : first + _SUMMED] = rows
        return PackedEmbedding(made[0], made[1], torch.float32, layer.weight.shape[1])
    if isinstance(layer, CodedEmbedding):
        layer.dtype = torch.float32
    elif isinstance(layer, nn.Embedding) and layer.weight.dtype != torch.float32:
        return pack_layer("bfloat16", layer, (), None)
    return layer


def to_panel(
    layer: Any, names: Sequence[str], first: Any, bits: int | None = None, moments: Tensor | None = None
) -> nn.Module:
    """The replacement of a layer in panels: a `Make`. bits, moments: see `PanelWeight`."""
    if names[0].endswith(BY_ROW):
        return table_of_rows(layer, bits)
    kind = PanelLinear if isinstance(layer, nn.Linear | PackedLinear | CodedLinear) else PanelEmbedding
    bias = getattr(layer, "bias", None)
    if first is not None and bias is None:
        return kind.sharing(first)
    if isinstance(layer, CodedWeight):
        return kind.of_codes(layer)
    return kind(layer.weight, getattr(layer, "scale", None), bias, bits, moments)


def round_layer(
    precision: str,
    layer: Any,
    names: Sequence[str],
    first: Any,
    moments: Mapping[str, Tensor] = MappingProxyType({}),
) -> nn.Module:
    """`pack_layer`, and for int4 the replacement of a layer in panels: with four bits in the language model
    (moments: of the inputs of matrices, by name), with eight elsewhere. Raises NoCompiler."""
    if precision != "int4":
        return pack_layer(precision, layer, names, first)
    if has_four_bits(precision, names[0]):
        known = next((moments[name] for name in names if name in moments), None)
        return to_panel(layer, names, first, 4, known)
    return to_panel(pack_layer("int8", layer, names, None), names, first)


def to_panels(model: nn.Module) -> nn.Module:
    """Put the weights of every linear layer and token embedding into panels, in place. Everything small, and
    with it all arithmetic, becomes float32. Layers that are in panels already stay. Raises NoCompiler."""
    replace_layers(model, to_panel, (*LAYERS, PackedLinear, PackedEmbedding, CodedWeight))
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def to_rows(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device where others than C read its weights, in place: int8 and four bits that are in
    panels as rows (`quantized.py`), and everything small in the device's arithmetic."""
    dtype = arithmetic(device)

    def make(layer: Any, names: Sequence[str], first: Any) -> nn.Module:
        if isinstance(layer, PackedEmbedding):
            scale: Any = layer.scale
            return PackedEmbedding(layer.weight.to(device), scale.to(device), dtype, layer.columns)
        count = layer.out_features
        weight = layer.rows(device) if first is None else first.weight
        scale = layer.scale[:count].to(device) if first is None else first.scale
        if isinstance(layer, PanelEmbedding):
            return PackedEmbedding(weight, scale, dtype, layer.in_features)
        bias = None if layer.bias is None else layer.bias[:count].to(device, dtype)
        return PackedLinear(weight, scale, bias, layer.in_features)

    replace_layers(model, make, (PanelWeight, PackedEmbedding))
    for name, parameter in [*model.named_parameters()]:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(parameter.to(device, dtype)))
    return model


def unreadable(network: nn.Module) -> str | None:
    """The reason why C cannot read the weights of a network that a `Network` knows, or None."""
    devices = {tensor.device.type for tensor in (*network.parameters(), *network.buffers())}
    if devices != {"cpu"}:
        return f"the weights are on {' and '.join(sorted(devices))}"
    kinds = (nn.Linear, nn.Embedding, PackedLinear, PackedEmbedding, PanelWeight, CodedWeight)
    modules = (module for name, module in network.named_modules() if name != UNPACKED)
    types = {str(module.weight.dtype) for module in modules if isinstance(module, kinds)}
    if len(types) > 1 or not types <= set(map(str, BITS)):
        return f"{' and '.join(sorted(types))} weights (float32, bfloat16, int8 or four bits are supported)"
    return None


# ---------------------------------------------------------------------------- importance for four bits


@torch.no_grad()
def second_moments(language_model) -> dict[str, Tensor]:
    """The mean square of each input of the linear layers of a language model, by their names in a whole
    model: (in,) each, over tokens drawn at random. Some channels are hundreds of times as large as others,
    whatever the text."""
    moments: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        moments[f"language_model.{name}.weight"] = x.float().square().flatten(0, -2).mean(0)

    kinds = nn.Linear, PackedLinear, PanelLinear
    layers = [(name, one) for name, one in language_model.named_modules() if isinstance(one, kinds)]
    hooks = [one.register_forward_pre_hook(lambda _, x, name=name: note(name, x[0])) for name, one in layers]
    config = language_model.config
    count, generator = min(NOTED, config.max_position_embeddings), torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, count), generator=generator)
    try:
        hidden, _ = language_model(language_model.embed(ids))
    finally:
        for hook in hooks:
            hook.remove()
    note("lm_head", hidden)
    return moments


def _importance(moments: Tensor | None, columns: int) -> Tensor:
    """(columns,) mean squares, padded to whole blocks and divided by the mean of their group of 32. What is
    never used, and what is not a number, is as good as any other."""
    if moments is None:
        return torch.ones(-(-columns // 64) * 64)
    groups = F.pad(moments, (0, -columns % 64)).view(-1, 32)
    groups = groups / groups.mean(1, keepdim=True)
    return groups.nan_to_num(1.0, 1.0).clamp_(min=1e-4).flatten()
