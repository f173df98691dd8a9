"""What a run trains on: batches, their loss, and questions to ask. Its two kinds are in `training/rows.py`
and `shapes/training.py`; a recipe may bring one of its own (`training.config.settings_class`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor, nn

from data.packing import Batch
from data.processor import Processor
from data.video import Clip
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig
from training.distributed import Ranks, compute_dtype
from training.flops import Amounts, amounts_of
from training.rewards import plain


@dataclass(frozen=True)
class Question:
    """A held-out question, its answer, and other answers that are as good."""

    images: tuple[Image.Image | Clip, ...]
    text: str
    target: str
    accept: tuple[str, ...] = ()
    system: str = ""


@dataclass(frozen=True)
class Answered:
    """A question with the model's answer, and its reward if one was given."""

    question: Question
    answer: str
    reward: float | None = None

    @property
    def right(self) -> bool:
        """Whether the answer is a target but for case, space and a final dot."""
        targets = (self.question.target, *self.question.accept)
        return plain(self.answer) in {plain(target) for target in targets}

    @property
    def caption(self) -> str:
        reward = "" if self.reward is None else f", reward {self.reward:g}"
        return f"{self.question.text} -> {self.answer} (expected: {self.question.target}{reward})"


class Task:
    """What the engine asks of the data and of the loss.

    module: everything that trains, the model as its `model`; `module(**inputs(batch, step))` returns (summed
        loss, what to log).
    steps: length of the run; `is_estimate` says that it is about what was asked for.
    second_stage: the step at which a stage with new gradients begins and the rate warms up again; 0: none.
    best_by: the score that picks the best evaluation, and whether more of it is better.
    logs_sums: what is logged are sums, to be divided by `count`; else each micro-batch has its mean.
    summary: a sentence for the model card; license: of the weights, if the data decides it.
    """

    model: VisionLanguageModel
    processor: Processor
    module: nn.Module
    steps: int
    summary: str
    is_estimate = False
    second_stage = 0
    best_by = ("eval_loss", False)
    logs_sums = False
    license: str | None = None

    def __init__(self, config: TrainConfig, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.dtype = compute_dtype(config, ranks.device.type)

    def check_context(self) -> None:
        context, length = self.model.config.text.max_position_embeddings, self.config.sequence_length
        if length > context:
            raise ValueError(f"--sequence-length: expected at most {context}, the context, got {length}")

    def batches(self) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step, from where the state stands to the end of its data."""
        raise NotImplementedError

    def padding(self) -> list[Batch]:
        """A step's micro-batches for a rank whose data ended before the others'."""
        raise NotImplementedError

    def step_back(self) -> None:
        """Return to before the latest batches, or to before those that failed."""
        raise NotImplementedError

    def count(self, batches: list[Batch]) -> float:
        """What the summed loss is divided by, together with the other ranks' counts."""
        raise NotImplementedError

    def inputs(self, batch: Batch, step: int) -> dict[str, Any]:
        return dict(batch)

    def amounts(self, batch: Batch, step: int) -> Amounts:
        """How much of what the batch sends through the model, for FLOPs."""
        return amounts_of(batch, self.model.config.vision)

    def matrix_peak(self, step: int) -> float | None:
        """A peak rate for Muon other than the config's."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's data stands between two steps."""
        raise NotImplementedError

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Resume after `step` steps, from the states of all ranks that there were."""
        raise NotImplementedError

    def check_rows(self) -> None:
        """Raises DatasetError, on all ranks, at the end of a run of which too many rows were unusable."""

    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, float]:
        """Scores on held-out data; all ranks call it."""
        raise NotImplementedError

    def questions(self, count: int) -> list[Question]:
        """Held-out questions for sample answers, always the same; fewer where there are no more."""
        raise NotImplementedError

    def note(self, parts: list[dict[str, Tensor]]) -> None:
        """See what a step's micro-batches have to log, once the device has ended it. A ValueError stops the
        run."""

    def row(self, parts: list[dict[str, Tensor]], loss: float, labels: float) -> dict[str, float]:
        """What metrics.jsonl says of the latest step, whose summed loss and labels these are; all ranks call
        it."""
        if not parts[0]:
            return {"loss": loss / max(labels, 1.0), "labels": int(labels)}
        count = max(labels, 1.0) if self.logs_sums else self.ranks.world_size * len(parts)
        sums = self.ranks.sum(*(sum(part[name].item() for part in parts) for name in parts[0]))
        return {name: round(one / count, 5) for name, one in zip(parts[0], sums, strict=True)}

    def answered(self) -> list[Answered]:
        """Some answers of the latest step's, with their rewards, to look at; the first rank asks."""
        return []

    def seen(self, step: int) -> dict[str, int]:
        """What was trained on after `step` steps, for metrics.jsonl."""
        return {}

    def training_data(self, step: int) -> str:
        """The same in words, for the model card."""
        raise NotImplementedError
