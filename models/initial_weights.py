"""The weights of a new model, before any training."""

from __future__ import annotations

import math

import torch
from torch import nn

from models.config import VLMConfig
from models.language_model import ZeroCenteredRMSNorm

_INTO_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def init_weights(model: nn.Module, config: VLMConfig, generator: torch.Generator | None, prefix: str) -> None:
    """Initialise every weight whose name starts with `prefix`.

    Variance-preserving Normal(0, 1 / sqrt(fan_in)), the projections that write into the residual stream of
    the text scaled by 1 / sqrt(2 · layers) as in GPT-2; norms scale by one, biases are zero, bounds cut
    nothing, and decays of the gated delta rule are drawn as transformers draws them. Token embeddings have
    unit scale, so that a token is still known after the first block, unless the head shares them (0.02, as in
    Llama).
    """
    depth = 1 / math.sqrt(2 * config.text.num_hidden_layers)
    centred = {
        f"{name}.weight" for name, part in model.named_modules() if isinstance(part, ZeroCenteredRMSNorm)
    }
    for name, parameter in model.named_parameters():
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
        elif "embed_tokens" in name and not config.tie_word_embeddings:
            nn.init.normal_(parameter, std=1.0, generator=generator)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight", "position_embedding.weight")):
            nn.init.normal_(parameter, std=0.02, generator=generator)
        else:
            std = parameter[0].numel() ** -0.5
            if name.startswith("language_model") and name.endswith(_INTO_RESIDUAL):
                std *= depth
            nn.init.normal_(parameter, std=std, generator=generator)
