"""The loss of learning from rewards: policy gradients with clipped ratios, for answers that share a prompt.

| loss | clips | sums over an answer's tokens | advantage |
|---|---|---|---|
| `grpo` (arXiv:2402.03300) | 1 - clip to 1 + clip | mean over tokens, then over answers | (r - mean) / std |
| `dr_grpo` (arXiv:2503.20783) | the same | divided by the longest that an answer may be | r - mean |
| `dapo` (arXiv:2503.14476) | up to 1 + 0.28 | mean over all tokens of the step | (r - mean) / std |

A token's ratio is its probability now over the one that it was drawn by, temperature and filters included in
both; the KL divergence is that under temperature alone. The formulas are those of TRL's GRPOTrainer
(loss_type "grpo", "dr_grpo", "dapo"; beta for `kl`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from generation.options import SamplingParams
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig
from training.rows import ComparedLoss

_LITTLE = 1e-4  # beside a standard deviation
_DAPO_HIGH = 0.28


def advantages(rewards: Tensor, loss: str) -> Tensor:
    """Advantages (Q, G) of answers over their groups, from rewards (Q, G) of G answers to Q questions."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred if loss == "dr_grpo" else centred / (rewards.std(1, keepdim=True) + _LITTLE)


def token_weights(lengths: Sequence[int], config: TrainConfig) -> list[float]:
    """The weight of a token of each answer in a sum that is divided by `step_weight`."""
    if config.policy_loss == "grpo":
        return [1 / length for length in lengths]
    return [1 / config.answer_tokens if config.policy_loss == "dr_grpo" else 1.0] * len(lengths)


def step_weight(lengths: Sequence[int], config: TrainConfig) -> float:
    """The divisor of the sum over a step, from the lengths of all its answers."""
    return float(sum(lengths) if config.policy_loss == "dapo" else len(lengths))


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(now, reference) by each drawn token that is never negative (Schulman's k3)."""
    return (reference - logprobs).exp() - (reference - logprobs) - 1


class PolicyLoss(ComparedLoss):
    """(summed loss, what to log) of a micro-batch of answers: a `data.packing.Batch`, and for each label
    `drawn`, its log-probability when it was sampled, `advantage`, `weight` and, with `kl`, `reference`.

    A token at the edge of a filter, which training drops where sampling did not, counts as a constant.
    """

    def __init__(self, model: VisionLanguageModel, blank: bool, config: TrainConfig):
        super().__init__(model, blank, config.learns if config.kl else None)
        self.kl, self.low = config.kl, config.clip
        self.unfiltered = SamplingParams(temperature=config.temperature)
        self.params = replace(self.unfiltered, top_k=config.top_k, top_p=config.top_p)
        high = _DAPO_HIGH if config.policy_loss == "dapo" else config.clip
        self.high = high if config.clip_high < 0 else config.clip_high

    def forward(  # type: ignore[override]
        self,
        drawn: Tensor,
        advantage: Tensor,
        weight: Tensor,
        reference: Tensor | None = None,
        **inputs: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # A filter would make the KL divergence infinite wherever the reference would not draw the token.
        apart = reference is not None and self.params != self.unfiltered
        every = (self.params, self.unfiltered) if apart else (self.params,)
        logprobs, *unfiltered = super().forward(every=every, **inputs)
        logprobs = torch.where(logprobs == -math.inf, drawn, logprobs)
        ratio = (logprobs - drawn).exp()
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        losses = -torch.minimum(ratio * advantage, clipped * advantage)
        if reference is not None:
            divergences = divergence(unfiltered[0] if unfiltered else logprobs, reference)
            losses = losses + self.kl * divergences
        with torch.no_grad():
            off = (torch.cat((ratio, ratio.new_ones(1))) - 1).abs()  # of a micro-batch of padding as well
            seen = {"tokens": ratio.new_tensor(len(ratio)), "most": off.amax(), "off": off.sum()}
            seen["clipped"] = (ratio * advantage > clipped * advantage).sum()
            if reference is not None:
                seen["kl"] = divergences.sum()
        return (weight * losses).sum(), seen
