"""Targets for the inside of the language model: what a question's nouns mean, and how two of them compare.

Whether one thing is left of another is two look-ups and a comparison, and an answer of one word rewards none
of the three alone. A linear head on each noun's hidden state half way up learns to say where its thing is,
how large and how many there are (`shapes.questions.facts`); another, three quarters up, where the answer
begins, learns the difference between the question's two nouns. The heads exist in training only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FactHead(nn.Module):
    """(B, T, D) hidden states behind the share `depth` of the layers -> (B, T, 4) facts; see `facts`."""

    def __init__(self, width: int, depth: float):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.linear = nn.Linear(width, 4)
        self.depth = depth
        self._hidden: Tensor | None = None

    def watch(self, language_model) -> None:
        """Keep that layer's output of every pass, for `loss` to take."""
        layers = language_model.layers
        layers[max(1, round(self.depth * len(layers))) - 1].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs, output: Tensor) -> None:
        self._hidden = output if torch.is_grad_enabled() else None

    def loss(self, targets: Tensor, count: Tensor | None = None) -> Tensor:
        """Mean distance over the facts that are known.

        Args:
            targets: (B, T, 4), NaN where they are not known.
            count: what to divide by, where other ranks know facts as well; by default, how many these are.
        """
        assert self._hidden is not None, "the model runs first, with gradients"
        known = ~targets.isnan()
        hidden, self._hidden = self._hidden, None
        places = known.any(-1)
        said = self.linear(self.norm(hidden[places]))
        distance = F.smooth_l1_loss(said, targets[places].nan_to_num(), reduction="none")
        count = known.sum() if count is None else count
        return (distance * known[places]).sum() / count.clamp(min=1).float()
