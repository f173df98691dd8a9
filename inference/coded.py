"""Opening a quantized checkpoint with the codes that its files have: nothing is rounded anew, nor inflated.

    if formats := quantized_as(opened):                          # such as ("Q4_K", "Q6_K")
        model = load_codes(opened, torch.device("cpu"))

The language model's matrices keep their codes, on a CPU in the panels that C reads. What has none in the
file, because it has floats there (a head, say) or a format without whole codes (NF4, NVFP4, IQ types), is
rounded to eight bits in groups of 32, and a line says so. Tower and projector are bfloat16. Everything small
is in the device's arithmetic.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from generation.codes import CodedEmbedding, CodedLinear, Codes
from generation.fast.native.build import NoCompiler
from generation.fast.native.panels import load_panels, to_panel
from generation.fast.quantized import arithmetic, is_layer, pack_layer, put_layers
from messages import counted
from models.checkpoints.files import Opened
from models.checkpoints.quantized import method_of
from models.checkpoints.sources import GgufFiles
from models.checkpoints.weights import FLOATS, trim
from models.vision_language_model import VisionLanguageModel

logger = logging.getLogger(__name__)
_LARGE = 2**26  # bytes of weights from which on compiling, 3 to 8 seconds, pays


def quantized_as(opened: Opened) -> tuple[str, ...]:
    """The formats of the quantized matrices of a GGUF file, that of most weights first, () where it has none;
    or the method of a folder whose config names one."""
    if not isinstance(opened.files, GgufFiles):
        return (method_of(opened.config)[1],)
    sizes: Counter[str] = Counter()
    for place in opened.files.tensors[0].values():
        sizes[place.type] += (place.end - place.begin) * (place.type not in FLOATS)
    return tuple(kind for kind, size in sizes.most_common() if size)


def load_codes(opened: Opened, device: torch.device, panels: bool = True) -> VisionLanguageModel:
    """A model with the codes of its files on this device; a large one, unless it is to learn beside them, in
    C's `panels` at once."""
    rounded: Counter[str] = Counter()  # matrices by their formats
    in_panels = False
    if panels and device.type == "cpu" and sum(path.stat().st_size for path in opened.weights) >= _LARGE:
        with suppress(NoCompiler):
            in_panels = bool(load_panels(4))

    def pack_tower(layer: Any, own: Sequence[str], first: Any) -> nn.Module:
        if in_panels:
            return to_panel(pack_layer("bfloat16", layer, own, None), own, first)
        return pack_layer("bfloat16", layer, own, first)

    def put(model: nn.Module, names: Sequence[str], read: partial[Tensor]) -> None:
        if not (names[0].startswith("language_model.") and is_layer(model, names[0])):
            put_layers(model, names, read(), pack_tower)
            return
        entry, shape, _, _, part, parts = read.args
        beside = (change := read.keywords.get("change")) and change.beside  # an adapter's factors
        codes = entry.codes(part, parts) if beside or not change else None
        if codes is None:
            rounded[entry.dtype] += 1
            kind = FLOATS.get(entry.dtype, torch.float32)
            floats = read.func(entry, shape, kind, "cpu", part, parts, **read.keywords)
            codes, beside = Codes.rounded(floats), None
        first: Any = None
        codes = codes.to(device)
        beside = beside and tuple(factor.to(device) for factor in beside)
        for path in (name.removesuffix(".weight") for name in names):
            layer: Any = model.get_submodule(path)
            if isinstance(layer, nn.Embedding):
                made: Any = CodedEmbedding(codes, arithmetic(device))
            else:
                made = CodedLinear(codes, layer.bias, beside)
            first = to_panel(made, names, first) if in_panels else made
            model.set_submodule(path, first)
        if codes.num_bytes >= _LARGE:  # for each matrix, giving memory back takes as long as the rest
            trim()

    model = VisionLanguageModel.from_pretrained(opened, None, "stored", device, put)
    if rounded:
        kinds = ", ".join(f"{count} in {kind}" for kind, count in rounded.items())
        what = counted(rounded.total(), "matrix", "matrices")
        logger.warning(
            "%s: %s without codes to keep, %s: rounded to 8 bits (--dtype opens them)",
            opened.source,
            what,
            kinds,
        )
    return model
