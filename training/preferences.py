"""Training on preferences: of two answers to a prompt, the chosen one gains on the rejected one (DPO,
arXiv:2305.18290).

A row is a pair: the prompt with its images once, and after it both answers, each blind to the other. What
they gain is measured against the model that the run starts from. That one shares every weight that the run
does not change: with LoRA all of them but a projector that learns beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.packing import Batch
from generation.options import SamplingParams
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig
from training.distributed import Ranks
from training.rows import ComparedLoss, RowsTask
from training.task import Score


class PreferencesLoss(ComparedLoss):
    """(loss summed over pairs, sums to log) of a micro-batch of rows that `data.packing.pack_answers` made of
    a chosen and a rejected answer. `beta`, `smoothing` and `sft` are as in `pair_losses`."""

    def __init__(self, model: VisionLanguageModel, blank: bool, config: TrainConfig):
        super().__init__(model, blank, config.learns)
        self.settings = config.dpo_beta, config.dpo_smoothing, config.dpo_sft

    def forward(  # type: ignore[override]
        self, segment_ids: Tensor, labelled: Tensor, **inputs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        rows, length = segment_ids.shape
        # Of each label the pair, and in it 0 for the chosen answer, 1 for the rejected one.
        place = 2 * (labelled // length) + segment_ids.flatten()[labelled] - 1
        inputs |= {"segment_ids": segment_ids, "labelled": labelled}
        seeing = (*self.model.vision_model.parameters(), *self.model.projector.parameters())
        if "pixel_values" in inputs and not (self.blank or any(p.requires_grad for p in seeing)):
            inputs["features"] = self.features(inputs.pop("pixel_values"))  # are the same for both
        (frozen,), every = self.references, (SamplingParams(temperature=1.0),)
        with torch.no_grad():
            (before,) = frozen(every=every, **inputs)
        (now,) = super().forward(every=every, **inputs)
        tokens, policy, reference = (
            one.new_zeros(2 * rows).index_add(0, place, one).view(rows, 2)
            for one in (torch.ones_like(before), now, before)
        )
        real = tokens.amin(1) > 0  # no rows of padding
        losses, gains = pair_losses(policy, reference, tokens.clamp(min=1), *self.settings)
        margins = gains[:, 0] - gains[:, 1]
        logged = {
            "loss": losses,
            "accuracy": (margins > 0).to(losses.dtype),
            "margin": margins,
            **dict(zip(("chosen_reward", "rejected_reward"), gains.T, strict=True)),
            **dict(zip(("chosen_logprob", "rejected_logprob"), policy.T, strict=True)),
        }
        sums = {name: (value * real).sum() for name, value in logged.items()}
        return sums["loss"], {name: value.detach() for name, value in sums.items()}


def pair_losses(
    policy: Tensor, reference: Tensor, tokens: Tensor, beta: float, smoothing: float = 0.0, sft: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses (N,) of pairs, and what their answers gain (N, 2), beta · log(policy / reference).

    Args:
        policy, reference: (N, 2) log-probabilities of the chosen and of the rejected answer.
        tokens: (N, 2), how many of which these are the sums.
        smoothing: share of pairs that are taken to be the wrong way round (arXiv:2305.18290's authors' cDPO).
        sft: weight of the chosen answer's negative log-likelihood per token (arXiv:2404.19733).
    """
    gains = beta * (policy - reference)
    margins = gains[:, 0] - gains[:, 1]
    losses = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
    return losses - sft * policy[:, 0] / tokens[:, 0], gains.detach()


class PreferencesTask(RowsTask):
    """See `training.task.Task`."""

    preferences = True
    called = "pairs of answers, each pair"
    logs_sums = True

    def __init__(self, config: TrainConfig, ranks: Ranks):
        if not config.init_from:
            raise ValueError(
                "--task preferences: expected --init-from, the model that answers are compared by"
            )
        super().__init__(config, ranks)

    def new_loss(self, blank: bool) -> PreferencesLoss:
        return PreferencesLoss(self.model, blank, self.config)

    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, Score]:
        """The scores of rows, with an interval of the accuracy, which counts pairs."""
        scores = super().evaluate(wrapped, step)
        if accuracy := scores.get("eval_accuracy"):
            right = round(accuracy.value * accuracy.n)
            scores["eval_accuracy"] = Score.of([1.0] * right + [0.0] * (accuracy.n - right))
        return scores

    def count(self, batches: Sequence[Batch]) -> float:
        """The number of pairs."""
        return float(sum(bool(ids) for batch in batches for ids in batch.sample_ids))
