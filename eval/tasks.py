"""Tasks of an evaluation: samples, a prompt and a metric.

`shapes_task(500)` has held-out questions about plain drawings; `eval.rows` makes tasks of rows of your own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from data.errors import DatasetError
from eval.metrics import Metric, MetricError
from inference.errors import user_errors
from inference.votes import normalised
from messages import counted, did_you_mean

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "checkpoints" / "ocelli-shapes"
IMAGE_SIZE = 256  # pixels a side of the drawn images; the processor reduces them
SHAPES_QUESTIONS = 2000
DESCRIBE_TOKENS, SHORT_TOKENS = 128, 16


class TaskError(ValueError):
    """A task that does not exist, or a run that cannot be done as requested; one sentence for a person."""


def is_user_error(error: BaseException) -> bool:
    """Whether an error is a person's to mend, so that its message is enough."""
    return isinstance(error, (TaskError, MetricError, DatasetError, *user_errors()))


@dataclass(frozen=True, eq=False)
class EvalSample:
    """One question about images.

    id: its name within the task, whatever the order.
    question: as the data have it; `prompt` is what the model is asked.
    targets: accepted answers, at least one.
    images: () -> what `load_image` takes, for each image, or a clip; may raise ValueError or OSError.
    group: equal for samples that show the same images.
    shows: a key of each of its images.
    earlier: the turns of the conversation before it, (question, expected answer) each.
    choices: what the likeliest one of is its answer; () for whatever a model says.
    family: what kind of question it is; "" where the data do not say.
    fields: the row's other columns, for the metric.
    page: where the answer is the whole text of a page: an open checkpoint -> its `PageForm`.
    """

    id: str
    question: str
    prompt: str
    targets: tuple[str, ...]
    images: Callable[[], Sequence[Any]]
    group: str
    max_new_tokens: int
    shows: tuple[str, ...] = ()
    earlier: tuple[tuple[str, str], ...] = ()
    choices: tuple[str, ...] = ()
    family: str = ""
    system: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    page: Callable[[Any], Any] | None = None

    @property
    def likeliest_target(self) -> str:
        """The target that was given most often; of equals, the first."""
        return Counter(self.targets).most_common(1)[0][0]


@dataclass(frozen=True)
class Draws:
    """So many answers to each question, which are sampled. A question's random numbers depend on its id and
    the seed, and on nothing else."""

    count: int
    temperature: float
    seed: int = 0

    def seed_of(self, sample: EvalSample) -> int:
        digest = hashlib.sha256(json.dumps([self.seed, sample.id]).encode()).digest()
        return int.from_bytes(digest[:6])

    def __str__(self) -> str:
        return f"{self.count} answers sampled at temperature {self.temperature:g} (seed {self.seed})"


@dataclass(frozen=True, eq=False)
class EvalTask:
    """Samples, and all that their score depends on besides the model.

    prompt: the template that the samples' prompts were made with.
    data: where the samples come from, in names and values that JSON can hold.
    think: tokens that the model may think before each answer; None for no thinking.
    draws: the answers to each question; None for the likeliest one.
    """

    name: str
    samples: Sequence[EvalSample]
    metric: Metric
    prompt: str
    data: Mapping[str, Any]
    system: str = ""
    think: int | None = None
    draws: Draws | None = None

    def definition(self) -> dict[str, Any]:
        """What makes this task a different one from others, as run.json and results.json keep it."""
        limits = sorted({one.max_new_tokens for one in self.samples})
        first = f", after at most {self.think} tokens of thinking" if self.think else ""
        digest = hashlib.sha256()
        for one in self.samples:
            key = [one.id, one.prompt, one.system, one.targets, one.group, *one.earlier, *one.choices]
            digest.update(json.dumps(key).encode())
        return {
            "name": self.name,
            "data": dict(self.data),
            "samples": len(self.samples),
            "samples_sha256": digest.hexdigest(),
            "prompt": self.prompt,
            "system": self.system,
            "max_new_tokens": limits[0] if len(limits) == 1 else limits,
            "decoding": f"{self.draws or 'greedy'}{first}; the answer is the text up to the end of the turn, "
            "without space at its ends",
            "metric": self.metric.name,
            "scoring": self.metric.description,
        }

    def __str__(self) -> str:
        definition = self.definition()
        images = len({shown for sample in self.samples for shown in sample.shows})
        needed = self.metric.targets_needed
        few = sum(len(sample.targets) < needed for sample in self.samples)
        warning = f"questions with fewer than the {needed} answers that a score of 1 needs: {few:,}"
        asked = counted(len(self.samples), "question")
        rows = {
            "task": f"{self.name}: {asked} about {counted(images, 'different image')}",
            "data": ", ".join(
                f"{key} {value}" for key, value in self.data.items() if value not in (None, "")
            ),
            "prompt": repr(self.prompt),
            "system": repr(self.system) if self.system else "",
            "answer": f"{definition['decoding']}; at most {definition['max_new_tokens']} tokens",
            "metric": self.metric.description,
            "warning": warning if few else "",
        }
        return "\n".join(f"{key:>8}  {value}" for key, value in rows.items() if value)

    def check(self) -> None:
        """Raises TaskError, before anything is answered, where a sample cannot be scored."""
        if not self.samples:
            raise TaskError(f"{self.name}: expected at least one question, got none")
        for sample in self.samples:
            try:
                self.metric.score("", sample.targets, sample.fields)
            except MetricError as error:
                raise TaskError(f"{self.name}: question {sample.id}: {error}") from error

    def same(self, sample: EvalSample) -> Callable[[str], Hashable]:
        """What is equal for answers to this question that are one in a vote."""
        same = self.metric.same
        return normalised if same is None else lambda answer: same(answer, sample.fields)

    def majority(self) -> dict[str, str]:
        """Family -> its most common answer: a control that never looks at the image. It is taken from the
        very questions that it is scored on, which flatters it where these are few."""
        counts: dict[str, Counter[str]] = {}
        for sample in self.samples:
            counts.setdefault(sample.family, Counter())[sample.likeliest_target] += 1
        return {family: count.most_common(1)[0][0] for family, count in counts.items()}


# ------------------------------------------------------------------------------------- plain drawings
def shapes_task(questions: int = SHAPES_QUESTIONS, seed: int = 0) -> EvalTask:
    """Held-out questions about plain drawings, one about each scene, families in turn. Training never
    draws these scenes and never sees their digits."""
    from shapes import heldout_questions, render, score  # with NumPy and Pillow, which --help does without

    metric = Metric(
        "shapes",
        'Exact match after lower-casing and dropping a final dot; for "describe", F1 over the things named '
        "(colour and shape, word, digit).",
        lambda answer, targets, fields: max(score(fields["family"], one, answer) for one in targets),
    )
    samples = [
        EvalSample(
            id=str(number),
            question=qa.question,
            prompt=qa.question,
            targets=(qa.answer, *qa.accept),
            images=partial(lambda scene: [render(scene, IMAGE_SIZE)], scene),
            group=f"scene {number}",
            shows=(f"scene {number}",),
            max_new_tokens=DESCRIBE_TOKENS if qa.family == "describe" else SHORT_TOKENS,
            family=qa.family,
            fields={"family": qa.family},
        )
        for number, (scene, qa) in enumerate(heldout_questions(questions, seed))
    ]
    # Kept word for word: run.json of earlier runs must agree with it.
    data = {"name": "Ocelli's picture world, held out", "seed": seed, "picture_size": IMAGE_SIZE}
    return EvalTask("shapes", samples, metric, "{question}", data)


# Tasks that are not lmms-eval's, each by the function that makes it: (number of questions, seed) -> EvalTask.
OWN = {"shapes": "eval.tasks:shapes_task", "pages": "recipes.pages.evaluation:pages_task"}
OWN |= {name: f"recipes.world.evaluation:{name}_task" for name in ("drawings", "strangers")}


def own_task(name: str, questions: int | None = None, seed: int = 0, **more: Any) -> EvalTask:
    """One of OWN; `more` is what it takes besides. Raises TaskError where what it needs is not installed."""
    try:
        make = resolve_name(OWN[name])
    except ImportError as error:
        folder = Path(*OWN[name].split(":")[0].split(".")[:-1])
        raise TaskError(f"{name}: needs {error.name}: pip install -r {folder}/requirements.txt") from None
    return make(questions or SHAPES_QUESTIONS, seed, **more)


# ------------------------------------------------------------------------------------ official tasks
# Tasks of lmms-eval whose definitions, prompts and scorers are tested here. Its other tasks that generate
# answers about images may work as well.
TRIED = (
    *("mmstar", "mmmu_val", "ai2d", "scienceqa_img", "textvqa_val", "docvqa_val"),
    *("chartqa", "infovqa_val", "ocrbench", "mme", "pope"),
)


def check_official(names: Sequence[str]) -> None:
    """Raises TaskError, before torch is imported, at a misspelt name, and where lmms-eval is not installed;
    where it is, it knows its own names."""
    installed, known = find_spec("lmms_eval") is not None, (*OWN, *TRIED)
    for name in names:
        near = did_you_mean(name, OWN if installed else known)
        if name not in known and (near or not installed):
            raise TaskError(f"unknown task {name!r}{near}; expected {' or '.join(known)}")
    if names and not installed:
        raise TaskError(f"{', '.join(names)}: needs lmms-eval: pip install -r requirements-eval.txt")
