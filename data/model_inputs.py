"""Encoded conversations as the tensors that `model.generate(**inputs)` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.tiles import Parts, Sizes


class ModelInputs(dict):
    """Tensors for the model, by argument name; `image_tokens[i]` positions of row i are images."""

    image_tokens: list[int]

    def to(self, *args, **kwargs) -> ModelInputs:
        """The same on another device; as `Tensor.to`, but a dtype reaches only the pixels. `Parts` stay: the
        model moves them when it needs numbers."""
        device = self["input_ids"].to(*args, **kwargs).device

        def moved(value: Tensor | Parts) -> Tensor | Parts:
            if isinstance(value, Parts):
                return value
            return value.to(*args, **kwargs) if value.is_floating_point() else value.to(device)

        inputs = ModelInputs((name, moved(value)) for name, value in self.items())
        inputs.image_tokens = self.image_tokens
        return inputs


@dataclass(frozen=True)
class EncodedConversation:
    """One conversation, unpadded.

    `parts` are those of its images, still bytes, or None; `assistant_mask` marks what the assistant says, end
    of turn included; `image_tokens` counts the positions that images take.
    `sizes` is what an answer's coordinates are of: those of the images of the last message that has some, or
    None where there is none or they differ.
    """

    input_ids: list[int]
    assistant_mask: list[bool]
    parts: Parts | None
    image_tokens: int
    sizes: Sizes | None = None


def collate(
    rows: Sequence[EncodedConversation],
    pad_token_id: int,
    padding_side: str,
    assistant_mask: bool,
    flat: bool,
    own_sizes: bool,
) -> ModelInputs:
    """Pad encoded conversations to one length; see `Processor.prepare`, and `data.image_rules.Images` for the
    last two."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side: expected left or right, got {padding_side!r}")
    length = max(len(row.input_ids) for row in rows)

    def padded(values: Sequence[list], filler: int | bool) -> Tensor:
        missing = [[filler] * (length - len(one)) for one in values]
        left = padding_side == "left"
        return torch.tensor([more + one if left else one + more for one, more in zip(values, missing)])

    inputs = ModelInputs(
        input_ids=padded([row.input_ids for row in rows], pad_token_id),
        attention_mask=padded([[1] * len(row.input_ids) for row in rows], 0),
    )
    if assistant_mask:
        inputs["assistant_mask"] = padded([row.assistant_mask for row in rows], False)
    parts = [row.parts for row in rows]
    real = [one for one in parts if one is not None]
    if real and flat:
        together = Parts.cat(real)
        inputs["pixel_values"] = together if own_sizes else together.to("cpu")  # (N, 3, M, M)
    elif real:
        most = max(map(len, real))
        # (B, n, 3, M, M), and a mask (B, n, M, M); a row with fewer tiles ends in zeros.
        pixels = inputs["pixel_values"] = torch.zeros(len(rows), most, *real[0].shape[1:])
        mask = torch.zeros(len(rows), most, *real[0].shape[2:], dtype=torch.int64)
        for i, own in enumerate(parts):
            for n, part in enumerate(own or ()):
                part.write(pixels[i, n])
                mask[i, n] = 1
        inputs["pixel_attention_mask"] = mask
    inputs.image_tokens = [row.image_tokens for row in rows]
    return inputs
