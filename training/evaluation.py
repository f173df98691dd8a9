"""Looks at a run on a schedule: held-out scores, sample answers, and the best model so far.

output/samples/step-…/    # answers with their images, see training/metrics.py
output/best/              # the best model in the Hub's layout, with best.json: its step and score

Figures are printed and written with their number of rows and 95 % interval (`training.task.Score`).
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from models.vision_language_model import VisionLanguageModel
from training.distributed import reshard
from training.export import answering_model, save_model
from training.metrics import SAMPLES, Metrics, read_metrics
from training.optim import averaged
from training.task import Answered, Score, Task

BEST, SCORE = "best", "best.json"


class HeldOut(Protocol):
    """Held-out questions, and how they are answered: `eval.held_out.HeldOutQuestions`."""

    shared: bool  # all ranks answer together
    any: bool  # there are questions on some rank
    here: bool  # this rank has some

    def answer(self, model: VisionLanguageModel, whole: bool) -> tuple[dict[str, Score], list[Answered]]:
        """Scores, of the `whole` of the questions or of a few, and sample answers, on the first rank; ranks
        that share the questions call it together."""


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
        if task.ranks.is_first and not self.config.resume:
            for name in (BEST, SAMPLES):
                shutil.rmtree(self.output / name, ignore_errors=True)
        step, self.best = self._kept() if task.ranks.is_first else (0, None)
        if step > first:  # one of a step that is done again does not count
            self.best = None
        # Evaluations, none of which was better. The metrics of a resumed run end at the step it resumes from.
        since = 0 if self.best is None else sum(at > step for at in self._scored())
        self.since = task.ranks.gather(since)[0]
        self.whole = False  # whether the latest one asked all questions

    def _kept(self) -> tuple[int, float | None]:
        """Step and score of the model in best/; (0, None) without one."""
        with suppress(OSError, ValueError, KeyError, TypeError):  # none, or cut off
            kept = json.loads((self.output / BEST / SCORE).read_text(encoding="utf-8"))
            if kept["name"] == self.task.best_by[0]:
                return kept["step"], float(kept["value"])
        return 0, None

    def _scored(self) -> dict[int, float]:
        """The score that picks the best evaluation, by step, of all so far."""
        name, path = self.task.best_by[0], self.metrics.path
        rows = read_metrics(path) if path.exists() else []
        return {row["step"]: row[name] for row in rows if name in row}

    def _better(self, value: float, than: float) -> bool:
        return value > than if self.task.best_by[1] else value < than

    @property
    def stale(self) -> bool:
        """True if the run should stop early; the same on all ranks."""
        return 0 < self.config.patience <= self.since

    def run(self, wrapped: nn.Module, step: int, last: bool) -> dict[str, Score]:
        """Evaluate the model after `step` steps, with all of the questions if that is the `last` time. Ranks
        but the first get the scores that all know."""
        autocast = torch.autocast(self.ranks.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with averaged(self.task.module, self.average):
            with autocast:
                losses = self.task.evaluate(wrapped, step)
            reshard(wrapped)
            best = self._is_best(losses)
            self.whole = last or self.stale
            scores, answered = self._answers(step)
            best = self._is_best(scores) or best
        scores |= losses
        if scores:
            row: dict[str, Any] = {"step": step}
            for name, score in scores.items():
                row |= {name: score.value, f"{name}_n": score.n}
                row |= {f"{name}_interval": score.interval} if score.interval else {}
            self.metrics.write(row)
            said = ", ".join(f"{_shown(name)} {score}" for name, score in scores.items())
            self.metrics.say(f"step {step}: {said}")
        self.metrics.write_samples(step, answered)
        if best:
            self._keep_best(scores, step)
        return scores

    def _answers(self, step: int) -> tuple[dict[str, Score], list[Answered]]:
        if not self.held_out.any or step <= self.task.answers_after:
            return {}, []
        # Shards answer nothing, and float32 weights answer slower than what users load, and otherwise: each
        # rank that has questions puts together a model of its own, in what training computes in.
        model = answering_model(self.task, everywhere=self.held_out.shared)
        return self.held_out.answer(model, self.whole) if self.held_out.here else ({}, [])

    def _is_best(self, scores: dict[str, Score]) -> bool:
        """Whether these are better than all before, by the score that decides it, if it is one of them; all
        ranks call it."""
        name = self.task.best_by[0]
        value = scores[name].value if self.ranks.is_first and name in scores else math.nan
        better = not math.isnan(value) and (self.best is None or self._better(value, self.best))
        if not self.config.keep_best:
            return False
        self.best = value if better else self.best
        scored, best = self.ranks.sum(not math.isnan(value), better)
        self.since = 0 if best else self.since + int(scored > 0)
        return best > 0

    def _keep_best(self, scores: dict[str, Score], step: int) -> None:
        """Save the model to best/; all ranks call it."""
        problem = save_model(self.task, self.average, step, scores, self.output / BEST)
        if not self.ranks.is_first:
            return
        if problem:
            self.metrics.say(f"step {step}: the best model could not be saved, the run goes on: {problem}")
            return
        with suppress(OSError):
            score = json.dumps({"step": step, "name": self.task.best_by[0], "value": self.best})
            (self.output / BEST / SCORE).write_text(score + "\n", encoding="utf-8")

    def better_before(self, last: int) -> str:
        """On the first rank a sentence that best/ is better than the model after the `last` step, or ""."""
        step, best = self._kept()
        now, name = self._scored().get(last), _shown(self.task.best_by[0])
        if not self.config.keep_best or best is None or now is None or not self._better(best, now):
            return ""
        return (
            f"{self.output / BEST} (step {step}, {name} {best:.4g}) is better than the last checkpoint "
            f"(step {last}, {name} {now:.4g})"
        )


def _shown(name: str) -> str:
    return name.removeprefix("eval_")
