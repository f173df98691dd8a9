"""Opening a quantized checkpoint with the codes that its files have: nothing is rounded anew, nor inflated.

    if formats := quantized_as(opened):                          # such as ("Q4_K", "Q6_K")
        model = load_codes(opened, torch.device("cpu"))

The language model's matrices keep their codes. What has none there, because the file leaves it in floats (a
head, say) or in a format without whole codes (NF4, NVFP4, IQ types), is rounded to eight bits in groups of
32, and a line says so. Tower and projector are bfloat16. Everything small is in the device's arithmetic.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from generation.codes import CodedEmbedding, CodedLinear, Codes
from generation.fast.quantized import ARITHMETIC, is_layer, pack_layer, put_layers
from messages import counted
from models.checkpoints.files import Opened
from models.checkpoints.quantized import settings_of
from models.checkpoints.sources import GgufFiles
from models.checkpoints.weights import FLOATS, trim
from models.vision_language_model import VisionLanguageModel

logger = logging.getLogger(__name__)


def quantized_as(opened: Opened) -> tuple[str, ...]:
    """The formats of the quantized matrices of a GGUF file, that of most weights first, () where it has none;
    or the method of a folder whose config names one."""
    if not isinstance(opened.files, GgufFiles):
        return (str(settings_of(opened.config).get("quant_method")),)
    sizes: Counter[str] = Counter()
    for place in opened.files.tensors[0].values():
        sizes[place.type] += (place.end - place.begin) * (place.type not in FLOATS)
    return tuple(kind for kind, size in sizes.most_common() if size)


def load_codes(opened: Opened, device: torch.device) -> VisionLanguageModel:
    """A model with the codes of its files on this device."""
    rounded: Counter[str] = Counter()  # matrices by their formats

    def put(model: nn.Module, names: Sequence[str], read: partial[Tensor]) -> None:
        if not (names[0].startswith("language_model.") and is_layer(model, names[0])):
            put_layers(model, names, read(), lambda *given: pack_layer("bfloat16", *given))
            return
        entry, _, _, _, part, parts = read.args
        codes = entry.codes(part, parts)
        if codes is None:
            rounded[entry.dtype] += 1
            codes = Codes.rounded(read())
        codes = codes.to(device)
        for path in (name.removesuffix(".weight") for name in names):
            layer: Any = model.get_submodule(path)
            if isinstance(layer, nn.Embedding):
                model.set_submodule(path, CodedEmbedding(codes, ARITHMETIC[device.type]))
            else:
                model.set_submodule(path, CodedLinear(codes, layer.bias))
        trim()

    model = VisionLanguageModel.from_pretrained(opened, None, "stored", device, put)
    if rounded:
        kinds = ", ".join(f"{count} in {kind}" for kind, count in rounded.items())
        what = counted(rounded.total(), "matrix", "matrices")
        logger.warning("%s: %s without codes to keep, %s: rounded to 8 bits", opened.source, what, kinds)
    return model
