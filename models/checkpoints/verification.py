"""Whether two checkpoints are one model: logits on the same pixels and words, in float32.

    probe = Probe.of(model.config)
    reference = our_logits(model, probe, around_zero=False)                # nanoVLM's pixels, 0 … 1
    theirs = transformers_logits(folder, converted.config, probe)
    print(compare("in transformers", reference, theirs, "float32"))        # a Check, with `passed`

Pixels are noise, words are drawn at random: an answer to a real question could not show more, and needs a
tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.checkpoints.errors import CheckpointError
from models.config import VLMConfig

if TYPE_CHECKING:
    from models.vision_language_model import VisionLanguageModel

_WORDS = 12
# Of the largest logit, 10 at least: 1e-4 then. float32 differs by the order of sums, the others by the
# rounding of every weight, which a misplaced tensor exceeds many times over.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


@dataclass(frozen=True)
class Probe:
    """An image of n tiles, pixels (n, 3, M, M) from 0 to 1, behind `lead` of the ids `words`."""

    pixels: Tensor
    words: tuple[int, ...]
    lead: int

    @classmethod
    def of(cls, config: VLMConfig, avoid: Collection[int | None] = ()) -> Probe:
        """For a model of this config: two tiles, or one where features stand in front of the text or the
        context is short. Words are none of `avoid`, nor the image's."""
        in_front = config.image_placement == "prefix"
        two_fit = 2 * config.tokens_per_tile + _WORDS <= config.text.max_position_embeddings
        generator = torch.Generator().manual_seed(0)
        size = config.vision.image_size
        tiles = 1 if in_front or not two_fit else 2
        pixels = torch.rand(tiles, config.vision.num_channels, size, size, generator=generator)
        words = torch.randint(config.text.vocab_size, (_WORDS,), generator=generator).tolist()
        allowed = [word for word in words if word not in (config.image_token_id, *avoid)]
        return cls(pixels, tuple(allowed), 0 if in_front else 3)

    def inputs(self, config: VLMConfig, around_zero: bool) -> dict[str, Tensor]:
        """For a model of any config that the probe's model became: input_ids (1, T), pixel_values
        (1, n, 3, M, M)."""
        ids = list(self.words)
        if config.image_placement == "placeholder":
            assert config.image_token_id is not None, "a placeholder config has an image token id"
            places = [config.image_token_id] * (len(self.pixels) * config.tokens_per_tile)
            ids[self.lead : self.lead] = places
        pixels = 2 * self.pixels - 1 if around_zero else self.pixels
        return {"input_ids": torch.tensor([ids]), "pixel_values": pixels[None]}


@torch.no_grad()
def our_logits(model: VisionLanguageModel, probe: Probe, around_zero: bool) -> Tensor:
    """Logits (T, V) of a model of ours, which takes pixels from -1 (`around_zero`) or from 0 to 1."""
    inputs = probe.inputs(model.config, around_zero)
    if not around_zero:  # no padding among them, black tiles or not: see generation.prompt.real_tiles
        inputs["pixel_values"] = inputs["pixel_values"][0]
    return model(**inputs).logits[0].float()


@torch.no_grad()
def transformers_logits(folder: Path, config: VLMConfig, probe: Probe, adapter: Path | None = None) -> Tensor:
    """Logits (T, V) of what transformers makes of a folder, and with `adapter` of what peft makes of that.

    Raises:
        CheckpointError: they do not open it.
    """
    from transformers import AutoModelForImageTextToText  # takes seconds to import
    from transformers.utils import logging as hf_logging

    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(adapter))
    except Exception as error:  # transformers and peft raise anything
        raise CheckpointError(
            f"transformers does not open {folder} ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]})"
        ) from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    return model.eval()(**probe.inputs(config, around_zero=True)).logits[0].float()


@dataclass(frozen=True)
class Check:
    """`difference` is the largest between logits, `agreement` the share of positions with the same likeliest
    token."""

    name: str
    difference: float
    tolerance: float
    agreement: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # NaN is not

    def __str__(self) -> str:
        return (
            f"{self.name}: largest difference of logits {self.difference:.1e}, "
            f"tolerance {self.tolerance:.1e}, same likeliest token {self.agreement:.0%}"
        )


def compare(name: str, reference: Tensor, logits: Tensor, dtype: str) -> Check:
    """Logits (T, V) held to reference ones (T, V or fewer), as closely as weights of `dtype` can.

    Raises:
        CheckpointError: they are not as many.
    """
    if len(logits) != len(reference) or logits.shape[1] < reference.shape[1]:
        raise CheckpointError(
            f"{name}: expected logits of {list(reference.shape)} positions and tokens, got "
            f"{list(logits.shape)}"
        )
    tolerance = TOLERANCE[dtype] * max(10.0, reference.abs().max().item())
    difference = (logits[:, : reference.shape[1]] - reference).abs().max().item()
    agreement = (logits.argmax(-1) == reference.argmax(-1)).double().mean().item()
    return Check(name, difference, tolerance, agreement)
