"""Held-out questions of a training run: what it asks its model now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from data.errors import DatasetError
from data.processor import Processor
from data.sources import DatasetConfig
from eval.answers import by_image, records_of, share
from eval.metrics import find_metric
from eval.rows import Asking, boxes_of, data_task
from eval.tasks import EvalSample, EvalTask, shapes_task
from inference.checkpoint import Checkpoint
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig, dataset_entries
from training.distributed import Ranks
from training.task import Answered, Question, Score
from training.task import Task as TrainingTask

# Other questions than `python -m eval --tasks shapes` asks, since its score must not pick a model; answers in
# work at the same time; tokens of an answer that is kept.
HELD_OUT_SEED, SLOTS, SAMPLE_TOKENS = 1, 32, 64


class HeldOutQuestions:
    """Held-out questions that a training run asks its model now and then: those whose answers are scored,
    shared among all ranks, and a few whose answers are kept, on the first rank. Rows without a metric are
    scored by exact match, and the kept answers are the first of them. Answers are greedy and nothing is kept
    of the model, so a run learns the same with and without."""

    def __init__(self, config: TrainConfig, task: TrainingTask, ranks: Ranks):
        self.ranks, self.processor, self.kept = ranks, task.processor, config.eval_samples
        self.tasks = ranks.first_then_others(lambda: scored_tasks(config, task.processor))
        self.exact = not self.tasks and config.task == "answers" and config.eval_questions > 0
        # Of a model in shards, only who asks for a metric wants a whole one on each rank.
        self.shared = bool(self.tasks) or (self.exact and config.parallel != "fsdp")
        count = max(config.eval_samples, config.eval_questions * self.exact)
        asks = count and (ranks.is_first or (self.exact and self.shared))
        self.questions: list[Question] = task.questions(count) if asks else []
        self.here = bool(self.tasks or self.questions)
        self.any = ranks.sum(self.here)[0] > 0

    @torch.no_grad()
    def answer(self, model: VisionLanguageModel, whole: bool) -> tuple[dict[str, Score], list[Answered]]:
        """Mean scores over all tasks and by family, on every rank that answers, and the answers that are
        kept; all ranks with questions call it. Of questions that are scored by exact match, one batch is
        asked, or the `whole`."""
        was_training = model.training
        model.eval()
        checkpoint = Checkpoint("in training", model, self.processor, 0.0)
        try:
            # Blocks compiled for training would be compiled again for each shape that generation has.
            with torch.compiler.set_stance("force_eager"):
                found = [one for task in self.tasks for one in self._records(checkpoint, task, True)]
                scores = _scores("eval_accuracy", found)
                count = max(self.kept, 0 if not self.exact else len(self.questions) if whole else SLOTS)
                asked = self.questions[:count]
                task = EvalTask("held out", _samples(asked), find_metric("exact_match"), "{question}", {})
                found = self._records(checkpoint, task, self.exact and self.shared)
                if self.exact:
                    scores = _scores("eval_exact_match", found)
        finally:
            model.train(was_training)
        answered = [
            Answered(asked[int(one["id"])], one["answer"].strip(), stop_reason=one["stop_reason"])
            for one in sorted(found, key=lambda one: int(one["id"]))
            if "error" not in one  # as of those that do not fit into the model's context
        ]
        return scores, answered[: self.kept] if self.ranks.is_first else []

    def _records(self, checkpoint: Checkpoint, task: EvalTask, together: bool) -> list[dict[str, Any]]:
        """As `records_of`; of what ranks answer `together`, on each of them."""
        rank, size = (self.ranks.rank, self.ranks.world_size) if together else (0, 1)
        groups = share(by_image(task.samples), rank, size)
        found = list(records_of(checkpoint, task, task.samples, SLOTS, groups))
        return [one for of_rank in self.ranks.gather(found) for one in of_rank] if together else found


def _samples(questions: Sequence[Question]) -> list[EvalSample]:
    return [
        EvalSample(
            id=str(number),
            question=one.text,
            prompt=one.text,
            targets=(one.target, *one.accept),
            images=partial(getattr, one, "images"),
            group=str(number),
            max_new_tokens=SAMPLE_TOKENS,
            system=one.system,
        )
        for number, one in enumerate(questions)
    ]


def _scores(name: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Score]:
    """The mean score of all records, under its name, and by family, and the share that was cut off."""
    if not records:
        return {}
    scores = {name: Score.of([one["score"] for one in records])}
    for family in sorted({one["family"] for one in records if one.get("family")}):
        scores[f"eval_{family}"] = Score.of([one["score"] for one in records if one.get("family") == family])
    return scores | {"eval_cut_off": Score.of([one["stop_reason"] == "length" for one in records])}


def scored_tasks(config: TrainConfig, processor: Processor) -> list[EvalTask]:
    """Held-out questions about shapes, or held-out rows if there is a metric."""
    if config.eval_questions and config.is_drawn:
        return [shapes_task(config.eval_questions, HELD_OUT_SEED)]
    if not config.eval_questions or not config.eval_metric:
        return []
    entries = [DatasetConfig.from_dict(entry) for entry in dataset_entries(config.held_out_data)]
    tasks = []
    for entry in entries:
        if entry.streaming:
            raise DatasetError(f"{entry.name}: --eval-metric: expected rows on this machine, got a stream")
        asking = Asking(
            limit=max(1, config.eval_questions // len(entries)), holdout=config.holdout, download=True
        )
        of_metric: dict[str, Any] = {}
        if config.eval_metric == "boxes":  # asked for as in training
            boxes, of_metric = boxes_of(entry, processor.form)
            asking = replace(asking, boxes=boxes, form_for=processor.form)
        tasks.append(data_task(entry, find_metric(config.eval_metric, **of_metric), asking))
        tasks[-1].check()
    return tasks
