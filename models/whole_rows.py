"""Whole rows through a model at once, as a training step takes them: logits, and the loss; and the weights of
a new model, before any training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from generation.kv_cache import KVCache, to_device
from generation.protocol import Pixels
from models.language_model import ZeroCenteredRMSNorm
from models.losses import summed_cross_entropy

_INTO_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
IGNORE_INDEX = -100  # label of a position that carries no loss, as in cross_entropy


@dataclass
class VLMOutput:
    """`logits` (B, T, V); `loss`, a mean over labelled tokens, where labels were given."""

    logits: Tensor
    loss: Tensor | None = None


class WholeRows:
    """The part of `VisionLanguageModel` that no answer needs."""

    def init_weights(self: Any, generator: torch.Generator | None = None, prefix: str = "") -> None:
        """Initialise every weight whose name starts with `prefix`.

        Variance-preserving Normal(0, 1 / sqrt(fan_in)), the projections that write into the residual stream
        of the text scaled by 1 / sqrt(2 · layers) as in GPT-2; norms scale by one, biases are zero, bounds
        cut nothing, and decays of the gated delta rule are drawn as transformers draws them. Token embeddings
        have unit scale, so that a token is still known after the first block, unless the head shares them
        (0.02, as in Llama).
        """
        depth = 1 / math.sqrt(2 * self.config.text.num_hidden_layers)
        centred = {
            f"{name}.weight" for name, part in self.named_modules() if isinstance(part, ZeroCenteredRMSNorm)
        }
        for name, parameter in self.named_parameters():
            if not name.startswith(prefix):
                continue
            if parameter.dim() == 0:
                nn.init.constant_(parameter, -math.inf if name.endswith("_min") else math.inf)
            elif name.endswith("A_log"):
                parameter.data.uniform_(0.01, 16, generator=generator).log_()
            elif name in centred or name.endswith((".bias", ".std_bias")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            elif "embed_tokens" in name and not self.config.tie_word_embeddings:
                nn.init.normal_(parameter, std=1.0, generator=generator)
            elif name.endswith(("embed_tokens.weight", "lm_head.weight", "position_embedding.weight")):
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                std = parameter[0].numel() ** -0.5
                if name.startswith("language_model") and name.endswith(_INTO_RESIDUAL):
                    std *= depth
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(
        self: Any,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> VLMOutput:
        """Logits of every position, and the mean next-token loss.

        Args:
            input_ids: (B, T) int64.
            pixel_values: (B, n, 3, H, W) or (N, 3, H, W), or None.
            pixel_attention_mask: (B, n, H, W) or (N, H, W), or None.
            attention_mask: (B, T), 0 on padding, or (B, T, T) bool for packed segments.
            labels: (B, T), the ids themselves, -100 where there is no loss; shifted here.
            position_ids: (B, T), or (3, B, T) of a family with rotary places of its own, for packed segments.
            logits_to_keep: compute logits of only the last so many positions; 0 means all.
        """
        hidden, _ = self.hidden_states(
            input_ids, pixel_values, pixel_attention_mask, attention_mask, position_ids=position_ids
        )
        loss = None
        if labels is not None:
            total, count = self.summed_loss(hidden, labels)
            loss = total / count.clamp(min=1)
        return VLMOutput(logits=self.language_model.logits(hidden[:, -logits_to_keep:]), loss=loss)

    def hidden_states(
        self: Any,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        start_pos: int | Tensor = 0,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """Everything up to the head: (hidden (B, T, D), kv_cache). See `LanguageModel.forward`."""
        x = self.embed(input_ids, pixel_values, pixel_attention_mask)
        if position_ids is None and self.config.text.rope_sections:
            if kv_cache is not None and not (isinstance(start_pos, int) and start_pos == 0):
                raise ValueError("position_ids: expected those of a prompt that goes on, got None")
            position_ids = self.position_ids(input_ids, pixel_values, attention_mask)
        return self.language_model(x, attention_mask, kv_cache, start_pos, position_ids)

    def position_ids(
        self: Any, input_ids: Tensor, pixel_values: Pixels | None, attention_mask: Tensor | None
    ) -> Tensor:
        """Rotary places (3, B, T) of whole prompts (B, T), 0 on padding."""
        real = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError("packed segments need the position_ids (3, B, T) of each")
            real = attention_mask.bool()
        places = self.places([ids[own] for ids, own in zip(input_ids, real)], pixel_values)
        out = torch.zeros(3, *input_ids.shape, dtype=torch.int64)
        out[:, real.cpu()] = torch.cat([own for own, _ in places or ()], 1)
        return to_device(out, self.device)

    def summed_loss(self: Any, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(summed cross-entropy, number of labelled tokens) from hidden states (B, T, D) on; the head runs on
        those that predict a labelled token. A training step divides by the number of labelled tokens of the
        whole global batch, which no single call knows: hence the sum."""
        hidden, targets = hidden[:, :-1], labels[:, 1:]
        chosen = targets != IGNORE_INDEX
        head = self.language_model.loss_head
        return summed_cross_entropy(hidden[chosen], targets[chosen], head), chosen.sum()
