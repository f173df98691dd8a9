"""What is asked and how it is scored: a task holds its samples, its prompt and its metric.

task = shapes_task(500)                                    # the built-in image world
task = data_task(DataConfig("rows.jsonl"), find_metric("relaxed_accuracy"))  # rows of your own
print(task)                                                # prompt and post-processing in words
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eval.metrics.base import Metric, MetricError, Scored, mean_score
from shapes import heldout_questions, render
from shapes import score as shapes_score

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "checkpoints" / "ocelli-shapes"
IMAGE_SIZE = 256  # pixels a side of the drawn images; the processor reduces them
SHAPES_QUESTIONS = 2000
DESCRIBE_TOKENS, SHORT_TOKENS = 128, 16


class TaskError(ValueError):
    """A task that does not exist, or a run that cannot be done as asked; one sentence to show to a person."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One question about images.

    id: names it within its task, whatever the order.
    question: as the data have it.
    prompt: what the model is asked.
    targets: accepted answers, at least one.
    images: () -> what `load_image` takes, for each image; may raise ValueError or OSError.
    group: equal for samples that show the same images.
    shows: what tells each of its images from others.
    max_new_tokens: of the answer.
    family: what kind of question it is; "" where the data do not say.
    fields: the sample's other columns, for the metric.
    """

    id: str
    question: str
    prompt: str
    targets: tuple[str, ...]
    images: Callable[[], Sequence[Any]]
    group: str
    max_new_tokens: int
    shows: tuple[str, ...] = ()
    family: str = ""
    system: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def likeliest_target(self) -> str:
        """The target given most often; of equals, the first."""
        return Counter(self.targets).most_common(1)[0][0]


@dataclass(frozen=True, eq=False)
class Task:
    """Samples and all that their score depends on besides the model.

    prompt: the template that the samples' prompts were made with.
    data: where the samples come from, in names and values that JSON can hold.
    """

    name: str
    samples: Sequence[Sample]
    metric: Metric
    prompt: str
    data: Mapping[str, Any]
    system: str = ""

    def definition(self) -> dict[str, Any]:
        """What tells this task from another one; in JSON."""
        limits = sorted({sample.max_new_tokens for sample in self.samples})
        digest = hashlib.sha256()
        for sample in self.samples:
            line = [sample.id, sample.prompt, sample.system, sample.targets, sample.group]
            digest.update(json.dumps(line).encode())
        return {
            "name": self.name,
            "data": dict(self.data),
            "samples": len(self.samples),
            "samples_sha256": digest.hexdigest(),
            "prompt": self.prompt,
            "system": self.system,
            "max_new_tokens": limits[0] if len(limits) == 1 else limits,
            "decoding": "greedy; the answer is the text up to the end of the turn, without space at its ends",
            "metric": self.metric.name,
            "scoring": self.metric.description,
        }

    def __str__(self) -> str:
        said = self.definition()
        images = len({shown for sample in self.samples for shown in sample.shows})
        rows = {
            "task": f"{self.name}: {len(self.samples):,} questions about {images:,} different images",
            "data": ", ".join(
                f"{key} {value}" for key, value in self.data.items() if value not in (None, "")
            ),
            "prompt": repr(self.prompt),
            "system": repr(self.system) if self.system else "",
            "answer": f"{said['decoding']}; at most {said['max_new_tokens']} tokens",
            "metric": self.metric.description,
            "warning": self.warning(),
        }
        return "\n".join(f"{key:>8}  {value}" for key, value in rows.items() if value)

    def warning(self) -> str:
        """What the metric cannot do with these samples: they have too few targets for it; "" where it can."""
        needed = self.metric.targets_needed
        few = [len(sample.targets) for sample in self.samples if len(sample.targets) < needed]
        if not few:
            return ""
        return (
            f"{len(few):,} questions have fewer than {needed} answers (some have {min(few)}): whatever the "
            f"model says, {self.metric.name} scores them below 1; choose another metric if that is not meant"
        )

    def check(self) -> None:
        """Whether every sample can be scored, before any is answered.

        Raises:
            TaskError: naming the first that cannot.
        """
        if not self.samples:
            raise TaskError(f"{self.name}: expected at least one question, got none")
        for sample in self.samples:
            try:
                self.metric.score("", sample.targets, sample.fields)
            except MetricError as error:
                raise TaskError(f"{self.name}: question {sample.id}: {error}") from error

    def scored(self, answers: Mapping[str, str], scores: Mapping[str, float]) -> list[Scored]:
        """Answers and scores by sample id, as metrics take them, in the samples' order."""
        return [
            Scored(answers[sample.id], sample.targets, scores[sample.id], sample.fields)
            for sample in self.samples
        ]

    def majority(self) -> dict[str, str]:
        """Family -> the answer given most often in it: a control that never looks at the image. It is
        taken from the very questions that it is scored on, which flatters it where these are few."""
        counts: dict[str, Counter[str]] = {}
        for sample in self.samples:
            counts.setdefault(sample.family, Counter())[sample.likeliest_target] += 1
        return {family: count.most_common(1)[0][0] for family, count in counts.items()}


# ------------------------------------------------------------------------------------- the image world
def _score_shapes(answer: str, targets: Sequence[str], fields: Mapping[str, Any]) -> float:
    family = fields["family"]
    return max(shapes_score(family, target, answer) for target in targets)


SHAPES_METRIC = Metric(
    "shapes",
    'Exact match after lower-casing and dropping a final dot; for "describe", F1 over the things named '
    "(colour and shape, word, digit); shapes/scoring.py.",
    _score_shapes,
    mean_score,
)


def shapes_task(questions: int = SHAPES_QUESTIONS, seed: int = 0) -> Task:
    """Held-out questions about the built-in image world: scenes that training never draws, with digits that
    training never sees, a scene for each question, families in turn."""
    samples = []
    for number, (scene, qa) in enumerate(heldout_questions(questions, seed)):
        samples.append(
            Sample(
                id=str(number),
                question=qa.question,
                prompt=qa.question,
                targets=(qa.answer, *qa.accept),
                images=partial(_drawn, scene),
                group=f"scene {number}",
                shows=(f"scene {number}",),
                max_new_tokens=DESCRIBE_TOKENS if qa.family == "describe" else SHORT_TOKENS,
                family=qa.family,
                fields={"family": qa.family},
            )
        )
    data = {"name": "Ocelli's picture world, held out", "seed": seed, "picture_size": IMAGE_SIZE}
    return Task("shapes", samples, SHAPES_METRIC, "{question}", data)


def _drawn(scene) -> list[Any]:
    return [render(scene, IMAGE_SIZE)]


# --------------------------------------------------------------------------------- tasks of other people
OWN = ("shapes",)
# Tasks of lmms-eval whose definitions, prompts and scorers are tried here; every other one of its tasks that
# generates answers about images may do as well.
TRIED = (
    *("mmstar", "mmmu_val", "ai2d", "scienceqa_img", "textvqa_val", "docvqa_val"),
    *("chartqa", "infovqa_val", "ocrbench", "mme", "pope"),
)


def check_official(names: Sequence[str]) -> None:
    """Whether tasks that are not ours may be lmms-eval's; where it is installed, it knows best.

    Raises:
        TaskError: a name that looks like a slip (it names the nearest), or lmms-eval is not installed.
    """
    here = find_spec("lmms_eval") is not None
    for name in names:
        near = difflib.get_close_matches(name, OWN if here else [*OWN, *TRIED], cutoff=0.7 if here else 0.5)
        if name not in TRIED and (near or not here):
            some = " or ".join(near or [*OWN, *TRIED])
            raise TaskError(f"unknown task {name!r}; expected {some}, or another of lmms-eval's")
    if names and not here:
        raise TaskError(
            f"{', '.join(names)}: needs lmms-eval, which is not installed: "
            "pip install -r requirements-eval.txt"
        )
