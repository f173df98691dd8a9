"""Looks at a run on a schedule: held-out scores, sample answers, a plot, and the best model so far.

output/samples/step-…/    # answers with their images, see training/metrics.py
output/plot.svg
output/best/              # the best model in the Hub's layout, with best.json: its step and score
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from models.vision_language_model import VisionLanguageModel
from training.distributed import reshard
from training.export import answering_model, save_model
from training.metrics import SAMPLES, Metrics, read_metrics
from training.optim import averaged
from training.plot import write_plot
from training.task import Answered, Task

BEST, SCORE = "best", "best.json"


class HeldOut(Protocol):
    """Held-out questions, and how they are answered: `eval.run.HeldOutQuestions`."""

    scored: bool  # answers are scored, by all ranks together
    any: bool  # there are questions on some rank
    here: bool  # this rank has some

    def answer(self, model: VisionLanguageModel) -> tuple[dict[str, float], list[Answered]]:
        """Scores, on every rank, and sample answers, on the first; ranks that score call it together."""


class Evaluation:
    """All ranks make one, and call `run` together. `average` is what is evaluated, if it has parameters;
    `first` is the step that the run resumes from."""

    def __init__(
        self,
        task: Task,
        held_out: HeldOut,
        average: dict[str, Tensor],
        metrics: Metrics,
        dtype: torch.dtype,
        first: int,
    ):
        self.config, self.ranks, self.task, self.held_out = task.config, task.ranks, task, held_out
        self.average, self.metrics, self.dtype = average, metrics, dtype
        self.output = Path(task.config.output)
        self.best, since = self._best_before(first) if task.ranks.is_first else (None, 0)
        self.since = task.ranks.gather(since)[0]  # evaluations, none of which was better

    def _best_before(self, step: int) -> tuple[float | None, int]:
        """The best score so far of a resumed run, and how many evaluations came after it; one of a step that
        is done again does not count."""
        if not self.config.resume:
            for name in (BEST, SAMPLES):
                shutil.rmtree(self.output / name, ignore_errors=True)
        try:
            row = json.loads((self.output / BEST / SCORE).read_text(encoding="utf-8"))
            name, at, best = row["name"], row["step"], float(row["value"])
            if name != self.task.best_by[0] or at > step:
                return None, 0
        except (OSError, ValueError, KeyError, TypeError):  # none, or cut off
            return None, 0
        # The metrics of a resumed run end at the step that it resumes from.
        rows = read_metrics(self.metrics.path) if self.metrics.path.exists() else []
        return best, sum(name in row and row["step"] > at for row in rows)

    @property
    def stale(self) -> bool:
        """Whether to stop early; the same on all ranks."""
        return 0 < self.config.patience <= self.since

    def run(self, wrapped: nn.Module, step: int) -> dict[str, float]:
        """Evaluate the model after `step` steps. Ranks but the first get the scores that all know."""
        autocast = torch.autocast(self.ranks.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with averaged(self.task.module, self.average):
            with autocast:
                losses = self.task.evaluate(wrapped, step)
            reshard(wrapped)
            scores, answered = self._answers(step)
        scores |= losses
        if answered and "eval_accuracy" not in scores:  # which counts all held-out answers
            scores["eval_exact_match"] = sum(one.right for one in answered) / len(answered)
        if scores:
            self.metrics.write({"step": step, **self.task.seen(step), **scores})
            self.metrics.say(f"step {step}: " + ", ".join(f"{k[5:]} {v:.3f}" for k, v in scores.items()))
        self.metrics.write_samples(step, answered)
        self._keep_best(scores, step)
        if self.ranks.is_first and self.metrics.path.exists():
            try:
                write_plot(self.output)
            except OSError as error:
                self.metrics.say(f"step {step}: the plot could not be written, the run goes on: {error}")
        return scores

    def _answers(self, step: int) -> tuple[dict[str, float], list[Answered]]:
        # The first stage on shapes has no language model yet.
        if not self.held_out.any or step <= self.task.second_stage:
            return {}, []
        # Shards answer nothing, and float32 weights answer slower than what users load, and otherwise: each
        # rank that has questions puts together a model of its own, in what training computes in.
        model = answering_model(self.task, everywhere=self.held_out.scored)
        return self.held_out.answer(model) if self.held_out.here else ({}, [])

    def _keep_best(self, scores: dict[str, float], step: int) -> None:
        """Save the model to best/ if none before scored better; all ranks call it."""
        name, higher = self.task.best_by
        value = scores.get(name, math.nan) if self.ranks.is_first else math.nan
        better = not math.isnan(value) and (
            self.best is None or (value > self.best if higher else value < self.best)
        )
        if not self.config.keep_best:
            return
        scored, kept = self.ranks.sum(not math.isnan(value), better)
        self.since = 0 if kept else self.since + int(scored > 0)
        if not kept:
            return
        problem = save_model(self.task, self.average, step, scores, self.output / BEST)
        if not self.ranks.is_first:
            return
        self.best = value
        if problem:
            self.metrics.say(f"step {step}: the best model could not be saved, the run goes on: {problem}")
            return
        with suppress(OSError):
            score = json.dumps({"step": step, "name": name, "value": value})
            (self.output / BEST / SCORE).write_text(score + "\n", encoding="utf-8")
