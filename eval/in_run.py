"""Questions that a training run puts to its model now and then, through the same runner as `python -m eval`.

    held_out = held_out_tasks(config)                              # once
    scores = score_in_run(held_out, model, processor, ranks)       # {"eval_accuracy": ..., "eval_count": ...}

Nothing is drawn at random and nothing is kept of the model, so that a run learns the same with and without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data.datasets import DatasetConfig
from data.errors import DatasetError
from data.processor import Processor
from eval.answering import answers, by_image, record_of, share
from eval.metrics import find_metric
from eval.rows import DataConfig, data_task
from eval.tasks import EvalTask, shapes_task
from inference.checkpoint import Checkpoint
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig, dataset_entries
from training.distributed import Ranks

SLOTS = 32
SEED = 1  # other questions than those of `python -m eval --tasks shapes`, which a run must not be chosen by


def held_out_tasks(config: TrainConfig) -> list[EvalTask]:
    """What a run's model is asked: the image world's questions, or held-out rows where there is a metric.

    Raises:
        DatasetError, MetricError, TaskError: rows or a metric that cannot be.
    """
    if not config.eval_questions:
        return []
    if config.is_shapes:
        return [shapes_task(config.eval_questions, SEED)]
    if not config.eval_metric or not config.eval_data:
        return []
    entries = [DatasetConfig.from_dict(entry) for entry in dataset_entries(config.eval_data)]
    tasks = []
    for entry in entries:
        if entry.streaming:
            raise DatasetError(f"{entry.name}: --eval-metric: expected rows that are here, got a stream")
        rows = DataConfig(
            entry.path,
            subset=entry.subset,
            split=entry.split,
            revision=entry.revision,
            columns=entry.columns,
            limit=max(1, config.eval_questions // len(entries)),
            allow_urls=entry.allow_urls,
            allow_outside=entry.allow_outside,
            allow_text_only=entry.allow_text_only,
        )
        tasks.append(data_task(rows, find_metric(config.eval_metric)))
        tasks[-1].check()
    return tasks


@torch.no_grad()
def score_in_run(
    tasks: Sequence[EvalTask], model: VisionLanguageModel, processor: Processor, ranks: Ranks
) -> dict[str, float]:
    """Mean scores over all tasks and by family, on every rank; all ranks call it, each answers its share."""
    was_training = model.training
    model.eval()
    checkpoint = Checkpoint("in training", model, processor, 0.0)
    scores: list[tuple[str, float]] = []
    try:
        # Blocks compiled for training would be compiled once more for each shape that generation has.
        with torch.compiler.set_stance("force_eager"):
            for task in tasks:
                groups = share(by_image(task.samples), ranks.rank, ranks.world_size)
                for number, answer in answers(checkpoint, task.samples, SLOTS, groups) if groups else ():
                    sample = task.samples[number]
                    scores.append((sample.family, record_of(task, sample, answer)["score"]))
    finally:
        model.train(was_training)
    return _means([one for of_rank in ranks.gather(scores) for one in of_rank])


def _means(scores: Sequence[tuple[str, float]]) -> dict[str, float]:
    families = sorted({family for family, _ in scores if family})
    means = {"eval_accuracy": sum(score for _, score in scores) / max(1, len(scores))}
    for family in families:
        own = [score for name, score in scores if name == family]
        means[f"eval_{family}"] = round(sum(own) / len(own), 4)
    return means
