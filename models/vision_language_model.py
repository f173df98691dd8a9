"""`VisionLanguageModel`: image features placed among token embeddings, and answers.

model = VisionLanguageModel.from_pretrained("HuggingFaceTB/SmolVLM-256M-Instruct")
new_ids = model.generate(**processor_output, max_new_tokens=64)      # (B, T_new)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families import FAMILIES
from generation import decoding
from generation.kv_cache import to_device
from generation.options import GenerationOptions, with_overrides
from generation.output import GenerationOutput, TokenStream
from generation.protocol import Pixels
from models.checkpoints.backbones import from_backbones
from models.checkpoints.files import Opened, Origin
from models.checkpoints.load import Put, load, prepare_device, put_parameter
from models.checkpoints.save import push, save
from models.config import VLMConfig
from models.whole_rows import WholeRows


def part_size(part: Any) -> tuple[int, int]:
    """Height and width in pixels of a part of an image, numbers (3, H, W) or still bytes."""
    height, width = (part if isinstance(part, Tensor) else part.pixels).shape[-2:]
    return height, width


class VisionLanguageModel(WholeRows, nn.Module):
    """A ViT, a projector and a decoder.

    Call names are transformers': a processor's output passes straight in as keyword arguments.

    origin: where it was loaded from, or None.
    generation_config: its generation_config.json without token ids. Saving writes it again; `generate` does
        not apply it, since options say everything.
    """

    origin: Origin | None = None
    generation_config: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, config: VLMConfig):
        super().__init__()
        self.config = config
        self.vision_model, self.projector, self.language_model = FAMILIES[config.family].build(config)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | Opened,
        revision: str | None = None,
        dtype: torch.dtype | str | None = "auto",
        device: torch.device | str | None = None,
        put: Put = put_parameter,
        adapter: str | Path | None = None,
    ) -> VisionLanguageModel:
        """Load a checkpoint from a folder or the Hub, in eval mode; see `models.checkpoints.load`."""
        model = load(cls, source, revision, dtype, device, put, adapter)
        prepare_device(model.device)
        return model

    @classmethod
    def from_backbones(cls, vision: str | Path, text: str | Path, **options) -> VisionLanguageModel:
        """A new model from a vision tower and a language model; see `models.checkpoints.backbones`."""
        model = from_backbones(cls, vision, text, **options)
        prepare_device(model.device)
        return model

    def save_pretrained(self, folder: str | Path, processor=None, card: str | None = None, **options) -> Path:
        """Write config, weights, and processor files and card where given; see `models.checkpoints.save`."""
        return save(self, folder, processor, card, **options)

    def push_to_hub(self, repo_id: str, processor=None, card: str | None = None, **options) -> str:
        """Upload to the Hub with a model card; returns the commit's address; see `push` there."""
        return push(self, repo_id, processor, card, **options)

    @property
    def device(self) -> torch.device:
        return self.language_model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations; packed weights (generation/fast/quantized.py) have fewer bits."""
        return self.language_model.norm.weight.dtype

    def to(self, *arguments, **named) -> VisionLanguageModel:
        moved = super().to(*arguments, **named)
        prepare_device(moved.device)
        return moved

    def cuda(self, device: int | torch.device | None = None) -> VisionLanguageModel:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def encode_images(self, pixel_values: Pixels) -> Sequence[Tensor]:
        """Pixels as `parts_of_rows` takes them -> features of each part, (its positions, D), or wider where
        there are some for further layers of the text part (DeepStack)."""
        parts, _ = self.parts_of_rows(pixel_values)
        numbers = parts if isinstance(parts, list) else parts.to(self.device, self.dtype)
        features = self.projector(self.vision_model(numbers))
        return features if features.dim() == 3 else features.split(self.positions(parts))

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Embeddings (B, T, D); a placeholder beyond the vocabulary gets another token's."""
        if self.config.image_token_id >= (vocab := self.config.text.vocab_size):
            input_ids = input_ids.clamp(max=vocab - 1)
        return self.language_model.embed(input_ids)

    def embed(
        self,
        input_ids: Tensor,
        pixel_values: Pixels | None = None,
        pixel_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Token embeddings with image features in their places: (B, T, D)."""
        features = None
        if pixel_values is None or not pixel_values.numel():
            self.check_placeholders(input_ids, [])
        else:
            parts, row_parts = self.parts_of_rows(pixel_values, pixel_attention_mask)
            self.check_placeholders(input_ids, self.positions(parts), row_parts)
            features = torch.cat(tuple(self.encode_images(parts)))
        if input_ids.device != self.device:  # not earlier: the checks above would wait for the device
            input_ids = to_device(input_ids, self.device)
        return self.place_features(input_ids, features)

    def place_features(
        self, input_ids: Tensor, features: Tensor | None, placeholders: Tensor | None = None
    ) -> Tensor:
        """Embeddings (B, T, D) of input_ids (B, T), with image features (P, D) in place of the P placeholders
        among them, whose indices (P,) in (B · T) may be known; where features are wider, so are they, with
        zeros for text."""
        x = self.embed_tokens(input_ids)
        if features is None:
            return x
        if (width := features.shape[1]) > x.shape[2]:
            x = F.pad(x, (0, width - x.shape[2]))
        x, rest = x[..., :width], x[..., width:]  # a token's numbers beside its embedding stay
        features = features.to(x.dtype)
        if placeholders is None:
            places = torch.eq(input_ids, self.config.image_token_id)
            x = x.masked_scatter(places[..., None], features)
        else:
            x = x.flatten(0, 1).index_copy(0, placeholders, features).view_as(x)
        return torch.cat((x, rest), dim=-1) if rest.shape[2] else x

    def positions(self, parts: Pixels) -> list[int]:
        """The number of positions of each part in a prompt; a ValueError for a part that does not fit the
        tower."""
        of = FAMILIES[self.config.family].positions
        return [of(self.config, *part_size(part)) for part in parts]

    def places(self, prompts: Sequence[Tensor], parts: Pixels | None) -> list[tuple[Tensor, int]] | None:
        """Of each prompt (T,), rotary places (3, T) of its tokens, and what is added to the slot of a token
        after it; None where places are slots. `parts` are those of all prompts, in order. Raises ValueError
        unless each has its placeholders, side by side."""
        if not self.config.text.rope_sections:
            return None
        parts = None if parts is None or not parts.numel() else self.parts_of_rows(parts)[0]
        self.check_placeholders(
            torch.cat(tuple(prompts))[None], [] if parts is None else self.positions(parts)
        )
        shown = ((*part_size(part), getattr(part, "time", None)) for part in (() if parts is None else parts))
        family = FAMILIES[self.config.family]
        return [family.places(self.config, ids.tolist(), shown) for ids in prompts]

    @staticmethod
    def parts_of_rows(
        pixel_values: Pixels, pixel_attention_mask: Tensor | None = None
    ) -> tuple[Pixels, list[int] | None]:
        """The real parts of a call, (N, 3, H, W) in order, and the number of each row's.

        Args:
            pixel_values: (N, 3, H, W), which does not say which tiles are whose (None for the rows), or the
                same still as bytes (`data.tiles`); or (B, n, 3, H, W) as processors pad them, where a tile
                of zeros is padding and is dropped.
            pixel_attention_mask: (N, H, W) or (B, n, H, W), as transformers' processors give it: 1 on all
                pixels of a real tile; or None.
        """
        if not isinstance(pixel_values, Tensor) and pixel_attention_mask is not None:
            raise ValueError("pixel_attention_mask: expected None for tiles as they were cut: all is real")
        if not isinstance(pixel_values, Tensor) or pixel_values.dim() == 4:
            parts, counts, mask = pixel_values, None, pixel_attention_mask
        elif pixel_values.dim() == 5:
            real = (pixel_values != 0).flatten(2).any(2)  # (B, n)
            counts = real.sum(1).tolist()  # waits for the device
            parts, mask, kept = pixel_values.flatten(0, 1), pixel_attention_mask, real.flatten()
            if sum(counts) < len(parts):
                parts = parts[kept]
            if mask is not None and mask.shape[:2] == real.shape:
                mask = mask.flatten(0, 1)[kept.to(mask.device)]
        else:
            raise ValueError(
                f"pixel_values: expected (N, 3, H, W) or (B, n, 3, H, W), got {tuple(pixel_values.shape)}"
            )
        if mask is not None and (mask.shape != (len(parts), *parts.shape[2:]) or not mask.all()):
            raise ValueError("pixel_attention_mask: expected tiles that are real to their last pixel")
        return parts, counts

    def check_placeholders(
        self, input_ids: Tensor, positions: list[int], row_parts: list[int] | None = None
    ) -> None:
        """Raise ValueError unless the images of a call fit their places in the prompts (B, T).

        `positions` are those that each part takes, of all rows together; `row_parts` how many parts each row
        has, where that is known: then every row must have its own.
        """
        # Waits for the device, if ids are there.
        places = torch.eq(input_ids, self.config.image_token_id).sum(1).tolist()
        if row_parts is None:
            places, row_parts = [sum(places)], [len(positions)]
        if len(row_parts) != len(places):
            raise ValueError(
                f"pixel_values: expected {len(places)} rows as in input_ids, got {len(row_parts)}"
            )
        rest = iter(positions)
        for row, (expected, count) in enumerate(zip(places, row_parts)):
            if expected != (got := sum(islice(rest, count))):
                raise ValueError(
                    f"{f'row {row}: ' if len(places) > 1 else ''}the prompt holds {expected} image "
                    f"placeholders but the images give {got} features: build both with the same processor"
                )

    def generate_stream(
        self,
        input_ids: Tensor,
        pixel_values: Pixels | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        options: GenerationOptions | None = None,
        **overrides,
    ) -> TokenStream:
        """An answer, token by token: iterate for (B · N,) ids, then read `.result`.

        Inputs are as in `forward`; padding may stand on either side, and every row gets what it gets alone.
        Options are a `GenerationOptions` (None: its defaults), single fields of it, or both. A ValueError
        says that they do not fit the inputs, the context or the memory, or that logits are not finite.
        """
        inputs = (input_ids, pixel_values, pixel_attention_mask, attention_mask)
        return decoding.generate_stream(self, *inputs, self.generation_options(options, **overrides))

    def generate_detailed(self, *inputs, **inputs_and_options) -> GenerationOutput:
        """The whole answer, with stop reasons, timings and sizes. Takes what `generate_stream` takes."""
        return self.generate_stream(*inputs, **inputs_and_options).drain()

    def generate(self, *inputs, **inputs_and_options) -> Tensor:
        """New token ids (B · N, T_new), stop tokens included, the pad id after a row's stop token. Takes the
        arguments of `generate_stream`."""
        return self.generate_detailed(*inputs, **inputs_and_options).token_ids

    def generation_options(self, options: GenerationOptions | None = None, **overrides) -> GenerationOptions:
        """Checked options, with this checkpoint's stop ids unless others are given."""
        return with_overrides(options, overrides, self.config.eos_token_ids)
