"""What the engine asks of the thing it trains on, and which one a config means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn

from data.packing import Batch
from data.processor import Processor
from models.vision_language_model import VisionLanguageModel
from shapes.training import ShapesWorldTask
from training.config import TrainConfig
from training.costs import Amounts
from training.distributed import Ranks
from training.rows import RowsTask
from training.samples import Question


class Task(Protocol):
    """Batches, their loss, and how the model does on held-out ones.

    steps: length of the run.
    second_stage: the step at which gradients are new and the rate warms up once more; 0 if never.
    best_by: the score that tells which evaluation was best, and whether more of it is better.
    """

    model: VisionLanguageModel
    processor: Processor
    steps: int
    second_stage: int
    best_by: tuple[str, bool]

    @property
    def module(self) -> nn.Module:
        """`module(**inputs(batch, step))` gives (summed loss, what to log); everything that trains is in it,
        the model as its `model`."""

    @property
    def summary(self) -> str:
        """A sentence for the model card."""

    def batches(self) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step, from where the state stands, until its data end."""

    def padding(self) -> list[Batch]:
        """A step's micro-batches for a rank whose data have ended before the others'."""

    def step_back(self) -> None:
        """Stand in front of the latest batches again, or of those that could not be completed."""

    def count(self, batches: list[Batch]) -> float:
        """What the summed loss of these is divided by, together with the other ranks' counts."""

    def inputs(self, batch: Batch, step: int) -> dict[str, Any]:
        """What the module is called with."""

    def amounts(self, batch: Batch, step: int) -> Amounts:
        """How much of what a batch of this rank sends through the model."""

    def matrix_peak(self, step: int) -> float | None:
        """A peak rate of Muon other than the config's."""

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's data stand; between steps."""

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Go on behind `step` finished steps, from the states of all the ranks that there were."""

    def check_rows(self) -> None:
        """Called by all ranks at the end of a run.

        Raises:
            DatasetError: too many of its rows could not be used; on all ranks.
        """

    def evaluate(self, wrapped: nn.Module, step: int) -> dict[str, float]:
        """Scores on held-out data; all ranks call it."""

    def questions(self, count: int) -> list[Question]:
        """Held-out questions for sample answers, always the same; fewer where there are no more."""

    def seen(self, step: int) -> dict[str, int]:
        """What has been trained on after `step` steps, for metrics.jsonl."""

    def training_data(self, step: int) -> str:
        """The same in words, for the model card."""


def open_task(config: TrainConfig, ranks: Ranks) -> Task:
    """The image world, or datasets."""
    return ShapesWorldTask(config, ranks) if config.is_shapes else RowsTask(config, ranks)
