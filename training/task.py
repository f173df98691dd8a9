"""What a run trains on: batches, their loss, and questions to ask. Those of rows are in `training/rows.py`,
`preferences.py` and `rollouts.py`; a recipe may bring one of its own (`training.config.settings_class`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from data.packing import Batch
from data.processor import Processor
from eval.statistics import CONFIDENCE, Interval, score_interval
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig
from training.distributed import Ranks, compute_dtype
from training.flops import Amounts, amounts_of
from training.optim import decay_fraction, schedule, set_rates
from training.rewards import plain


class Score(NamedTuple):
    """A held-out figure: the mean over `n` rows, questions or pairs, and its interval where each of them has
    a value of its own (a loss per token has none)."""

    value: float
    n: int
    interval: Interval | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """The mean of these; of equal values there is an interval where they are shares, from 0 to 1."""
        spread = max(values) > min(values) or all(0 <= value <= 1 for value in values)
        return cls(math.fsum(values) / len(values), len(values), score_interval(values) if spread else None)

    @property
    def interval_text(self) -> str:
        return "" if self.interval is None else "{:.3f} to {:.3f}".format(*self.interval)

    def __str__(self) -> str:
        interval = f"{CONFIDENCE:.0%} interval {self.interval_text}, " if self.interval else ""
        return f"{self.value:.3f} ({interval}n {self.n:,})"


@dataclass(frozen=True)
class Question:
    """A held-out question, its answer, and other answers that are as good. `images` are what `load_image`
    takes, or clips."""

    images: tuple[Any, ...]
    text: str
    target: str
    accept: tuple[str, ...] = ()
    system: str = ""


@dataclass(frozen=True)
class Answered:
    """A question with the model's answer, its reward if one was given, and why it ended: "stop", or "length"
    where it was cut off."""

    question: Question
    answer: str
    reward: float | None = None
    stop_reason: str = "stop"

    @property
    def right(self) -> bool:
        """True if the answer is a target but for case, space and a final dot."""
        targets = (self.question.target, *self.question.accept)
        return plain(self.answer) in {plain(target) for target in targets}


class Task:
    """What the engine asks of the data and of the loss.

    module: everything that trains, the model as its `model`; `module(**inputs(batch, step))` returns (summed
        loss, what to log).
    steps: length of the run; `is_estimate` says that it is about what was asked for.
    answers_after: held-out questions are asked after more steps than that.
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
    answers_after = -1
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
        """This rank's share of the number that the summed loss is divided by."""
        raise NotImplementedError

    def inputs(self, batch: Batch, step: int) -> dict[str, Any]:
        return dict(batch)

    def amounts(self, batch: Batch, step: int) -> Amounts:
        """The amounts of work of a batch, for FLOPs."""
        return amounts_of(batch, self.model.config.vision)

    def set_rates(self, optimizers: list[Optimizer], step: int) -> None:
        """Set the learning rates of a step."""
        c = self.config
        set_rates(optimizers, schedule(step, self.steps, c.warmup_steps, decay_fraction(c), c.lr_floor))

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank in its data, between two steps."""
        raise NotImplementedError

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Resume after `step` steps, from the states of all ranks that there were."""
        raise NotImplementedError

    def check_rows(self) -> None:
        """Raises DatasetError, on all ranks, at the end of a run of which too many rows were unusable."""

    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, Score]:
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

    def training_data(self, step: int) -> str:
        """A description of the data of `step` steps, for the model card."""
        raise NotImplementedError
