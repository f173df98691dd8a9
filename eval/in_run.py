"""Held-out questions that a training run asks its model now and then, through the runner of `python -m eval`.

    held_out = HeldOutQuestions(config, task, ranks)   # once
    scores, answered = held_out.answer(model)          # {"eval_accuracy": ...}, answers with their images

Answers are greedy and nothing is kept of the model, so a run learns the same with and without.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from data.box_rows import BoxRows
from data.errors import DatasetError
from data.sources import DatasetConfig
from eval.answering import answers, by_image, record_of, share
from eval.metrics import find_metric
from eval.rows import BOX_TOKENS, DataConfig, data_task
from eval.tasks import EvalSample, EvalTask, shapes_task
from inference.checkpoint import Checkpoint
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig, dataset_entries
from training.distributed import Ranks
from training.task import Answered, Question
from training.task import Task as TrainingTask

SLOTS = 32
SEED = 1  # other questions than `python -m eval --tasks shapes` asks: its score must not pick a model
SAMPLE_TOKENS = 64  # of an answer that is kept


class HeldOutQuestions:
    """Questions whose answers are scored, shared among all ranks, and a few whose answers are kept, on the
    first rank."""

    def __init__(self, config: TrainConfig, task: TrainingTask, ranks: Ranks):
        self.ranks, self.processor = ranks, task.processor
        self.tasks = scored_tasks(config)
        keeps = ranks.is_first and config.eval_samples
        self.questions: list[Question] = task.questions(config.eval_samples) if keeps else []
        self.scored = bool(self.tasks)
        self.here = self.scored or bool(self.questions)
        self.any = ranks.sum(self.here)[0] > 0

    @torch.no_grad()
    def answer(self, model: VisionLanguageModel) -> tuple[dict[str, float], list[Answered]]:
        """Mean scores over all tasks and by family, on every rank, and the answers that are kept; all ranks
        with questions call it."""
        was_training = model.training
        model.eval()
        checkpoint = Checkpoint("in training", model, self.processor, 0.0)
        try:
            # Blocks compiled for training would be compiled again for each shape that generation has.
            with torch.compiler.set_stance("force_eager"):
                scores = self._scores(checkpoint) if self.scored else {}
                return scores, self._answered(checkpoint)
        finally:
            model.train(was_training)

    def _scores(self, checkpoint: Checkpoint) -> dict[str, float]:
        scores: list[tuple[str, float]] = []
        for task in self.tasks:
            groups = share(by_image(task.samples), self.ranks.rank, self.ranks.world_size)
            for number, answer in answers(checkpoint, task.samples, SLOTS, groups) if groups else ():
                sample = task.samples[number]
                scores.append((sample.family, record_of(task, sample, answer)["score"]))
        scores = [one for of_rank in self.ranks.gather(scores) for one in of_rank]
        means = {"eval_accuracy": sum(score for _, score in scores) / max(1, len(scores))}
        for family in sorted({family for family, _ in scores if family}):
            own = [score for name, score in scores if name == family]
            means[f"eval_{family}"] = round(sum(own) / len(own), 4)
        return means

    def _answered(self, checkpoint: Checkpoint) -> list[Answered]:
        """In the order of the questions, without those that do not fit into the model's context."""
        samples = [
            EvalSample(
                id=str(number),
                question=one.text,
                prompt=one.text,
                targets=(one.target,),
                images=partial(getattr, one, "images"),
                group=str(number),
                max_new_tokens=SAMPLE_TOKENS,
                system=one.system,
            )
            for number, one in enumerate(self.questions)
        ]
        found = dict(answers(checkpoint, samples, SLOTS)) if samples else {}
        given = [(one, found[number]) for number, one in enumerate(self.questions)]
        return [Answered(one, answer.text.strip()) for one, answer in given if not answer.error]


def scored_tasks(config: TrainConfig) -> list[EvalTask]:
    """Held-out questions about shapes, or held-out rows if there is a metric."""
    if config.eval_questions and config.is_drawn:
        return [shapes_task(config.eval_questions, SEED)]
    if not config.eval_questions or not config.eval_metric:
        return []
    entries = [DatasetConfig.from_dict(entry) for entry in dataset_entries(config.eval_data)]
    tasks = []
    for entry in entries:
        if entry.streaming:
            raise DatasetError(f"{entry.name}: --eval-metric: expected rows on this machine, got a stream")
        same = ("subset", "split", "revision", "columns", "allow_urls", "allow_outside", "allow_text_only")
        options: dict[str, Any] = {name: getattr(entry, name) for name in same}
        of_metric: dict[str, Any] = {}
        if config.eval_metric == "boxes":  # asked for as in training, in images as they are
            boxes = BoxRows(**{**entry.boxes, "augment": False, "flip": False})
            options |= {"boxes": boxes, "max_new_tokens": BOX_TOKENS}
            points = not boxes.coordinates.detect  # a form that has no boxes is asked for points
            options["points"] = points
            of_metric = {"form": boxes.form, "corners": boxes.corners, "points": points}
        rows = DataConfig(entry.path, limit=max(1, config.eval_questions // len(entries)), **options)
        tasks.append(data_task(rows, find_metric(config.eval_metric, **of_metric)))
        tasks[-1].check()
    return tasks
