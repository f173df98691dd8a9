"""What an evaluation asks and how it scores: a task holds its samples, its prompt and its metric.

    shapes_task(500)                                    # plain drawings, held out
    data_task(DataConfig("rows.jsonl", columns={"question": "query"}), find_metric("anls"))

Rows of your own are a Hub id, a folder, JSON lines or Parquet:

| column | holds |
|---|---|
| `question` | a text |
| `answer` or `answers` | one or several accepted answers, `answers` first; with `choices`, an index from 0 |
| `image` or `images`, `video` or `videos` | paths, bytes, data: URLs, or none; images come first |
| `choices` | options of a multiple-choice question, shown as A. B. C. |
| `family`, `id` | a kind to report separately; a name that does not depend on the row's place |

Rows of conversations (`messages`; `texts` of user and assistant) work, too: each turn is a question, and what
the assistant says is its answer. With the metric `boxes`, rows have `ref` and `bbox`, or `objects`, and an
image (see `data.box_rows`): each thing is a question in the words of the model's form. All other columns go
to the metric, and to the prompt by their names.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from string import Formatter, ascii_uppercase
from typing import Any

from data.box_rows import CATEGORIES, SIZES, BoxRows, FormFor, by_name
from data.errors import ADDRESS, BadRow, DatasetError
from data.held_out import Share
from data.row_schemas import COLUMNS as SCHEMA_COLUMNS
from data.row_schemas import SHOWN, RowSchema, find_images, find_schema, is_plain, no_images
from data.sources import TRAIN, class_names, columns_of, first_rows, known_columns, open_rows
from data.visuals import open_video
from eval.metrics import Metric, MetricError
from inference.errors import user_errors
from inference.votes import normalised
from messages import counted

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "checkpoints" / "ocelli-shapes"
IMAGE_SIZE = 256  # pixels a side of the drawn images; the processor reduces them
SHAPES_QUESTIONS = 2000
DESCRIBE_TOKENS, SHORT_TOKENS = 128, 16
MAX_NEW_TOKENS, BOX_TOKENS = 32, 512  # of an answer about rows; a dozen boxes as JSON
CHOICES_PROMPT = "{question}\n{choices}\nAnswer with the option's letter from the given choices directly."
COLUMNS = ("question", "answer", "answers", *SHOWN, "choices", "family", "id")
BOX_COLUMNS = ("ref", "bbox", "objects", *SIZES)
_bad = partial(BadRow, "bad row")


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
OWN = {"shapes": "eval.tasks:shapes_task", "drawings": "recipes.world.evaluation:drawings_task"}


def own_task(name: str, questions: int | None = None, seed: int = 0) -> EvalTask:
    """One of OWN. Raises TaskError where what it needs is not installed."""
    try:
        make = resolve_name(OWN[name])
    except ImportError as error:
        folder = Path(*OWN[name].split(":")[0].split(".")[:-1])
        raise TaskError(f"{name}: needs {error.name}: pip install -r {folder}/requirements.txt") from None
    return make(questions or SHAPES_QUESTIONS, seed)


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
    installed = find_spec("lmms_eval") is not None
    for name in names:
        near = difflib.get_close_matches(name, OWN if installed else (*OWN, *TRIED))
        if name not in TRIED and (near or not installed):
            raise TaskError(f"unknown task {name!r}; expected {' or '.join(near or (*OWN, *TRIED))}")
    if names and not installed:
        raise TaskError(f"{', '.join(names)}: needs lmms-eval: pip install -r requirements-eval.txt")


# ----------------------------------------------------------------------------------------- rows of your own
@dataclass(frozen=True)
class DataConfig:
    """Which rows, and how to ask them.

    name: what the task is called; by default as its data.
    path: Hub id, folder, file or pattern, as `data.sources.open_rows` takes it.
    split: "" is test on the Hub, and what `open_rows` makes of it for local files.
    columns, constants, names, image_folder, min_ratings: as in `data.sources.DatasetConfig`.
    prompt: a template with columns in braces; "" is the question with its choices.
    max_new_tokens: None is 32, and of boxes 512.
    limit: the first so many questions; None is all.
    holdout: of the rows that a training run reads, the share that `train.py --holdout` leaves out.
    boxes: rows are read as boxes, which are asked for, or points in them.
    form_for: `Processor.form` of the model that they are asked of.
    download: all rows, though `limit` needs few: a training run has downloaded them already.
    """

    path: str
    name: str = ""
    subset: str | None = None
    split: str = ""
    revision: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    image_folder: str = ""
    min_ratings: Mapping[str, float] = field(default_factory=dict)
    prompt: str = ""
    system: str = ""
    max_new_tokens: int | None = None
    limit: int | None = None
    holdout: float = 0.0
    allow_urls: bool = False
    allow_outside: bool = False
    allow_text_only: bool = False
    boxes: BoxRows | None = None
    form_for: FormFor = by_name
    download: bool = False


def data_task(config: DataConfig, metric: Metric) -> EvalTask:
    """Read and check all rows; images are opened when they are asked about. Raises DatasetError."""
    path = config.path
    is_here = Path(path).expanduser().exists() or "*" in path or path.startswith((".", "/", "~"))
    at_address = ADDRESS.match(path) is not None
    is_local = is_here or at_address  # files that are named themselves are all of one split
    split = config.split or (TRAIN if config.holdout else "" if is_local else "test")
    # Of a few questions about rows that lie elsewhere, no more is downloaded than these rows.
    few = config.limit is not None and not config.download and not config.holdout
    streaming = few and (at_address or not is_here) and "[" not in split
    rows, folder = open_rows(path, config.subset, split, streaming, config.revision)
    rows = Share(config.holdout, True).of(rows, path) if config.holdout else rows
    folder = Path(config.image_folder).expanduser() if config.image_folder else folder
    reader = _Reader(config, rows, folder, metric.chooses)
    samples, problems, taken = list[EvalSample](), [], list[Any]()
    for number, row in enumerate(rows):
        if streaming:
            taken.append(row)
        try:
            samples += reader.samples(number, row)
        except BadRow as error:
            problems.append(f"row {number + 1}: {error}")
        if config.limit is not None and len(samples) >= config.limit:
            break
    if streaming:
        reader.rows = taken
    if problems:
        more = f" (and {len(problems) - 1} more such rows)" if len(problems) > 1 else ""
        raise DatasetError(f"{path}: {problems[0]}{more}")
    if not samples:
        raise DatasetError(f"{path}: no row has the ratings that min_ratings asks for")
    name, count = Counter(sample.id for sample in samples).most_common(1)[0]
    if count > 1:
        raise DatasetError(
            f"{path}: {count} questions have the id {name!r}; choose another: --columns id=..."
        )
    split = split or "train"  # as files without a split are called
    data: dict[str, Any] = {"path": path, "subset": config.subset, "split": split}
    data |= {"revision": config.revision, "columns": dict(config.columns)}
    numbered = {str(number): one for number, one in config.names.items()}  # as JSON will have them
    read = {key: getattr(config, key) for key in ("constants", "image_folder", "min_ratings", "holdout")}
    data |= {key: value for key, value in (read | {"names": numbered}).items() if value}  # older runs: none
    name = (Path(path).stem if is_local else path) + (f"/{config.subset}" if config.subset else "")
    name = config.name or name
    samples = samples[: config.limit]
    return EvalTask(name, samples, metric, reader.prompt, data, config.system)


class _Reader:
    """Samples of a dataset's rows."""

    def __init__(self, config: DataConfig, rows: Sequence[Any], folder: Path | None, chooses: bool):
        self.config, self.rows, self.boxes = config, rows, config.boxes
        self.max_new_tokens = config.max_new_tokens or (BOX_TOKENS if config.boxes else MAX_NEW_TOKENS)
        path, constants = config.path, config.constants
        if not (first := list(first_rows(rows))):
            raise DatasetError(f"{path}: split {config.split!r} has no rows")
        columns, ours = columns_of(rows, path, first), dict.fromkeys((*COLUMNS, *SCHEMA_COLUMNS))
        answered = "answer" in (*columns, *config.columns, *constants)  # then not from within a column json
        seen = [one for one in ours if not (answered and one == "answers")]
        known, renamed, by_ending = known_columns(first, columns, config.columns, constants, seen)
        has = f"it has {', '.join(columns) or 'none'}"
        if wrong := ({*renamed, *constants} - {*ours}) | (
            {*renamed.values(), *config.min_ratings} - {*known}
        ):
            raise DatasetError(
                f"{path}: no column {', '.join(sorted(wrong))}; {has}; ours are {', '.join(COLUMNS)}"
            )
        have = {name for name in ours if name in constants or renamed.get(name, name) in known}
        if config.boxes is not None and not {"bbox", "objects"} & have:
            raise DatasetError(f"{path}: no column bbox or objects; {has}")
        self.answers = [name for name in ("answers", "answer") if name in have]
        self.is_plain = config.boxes is None and "question" in have and bool(self.answers)
        kind: tuple[str, ...] = ("question", "answer")
        numbered = self.answers if config.boxes is None else CATEGORIES
        self.numbers = config.names or class_names(rows, [renamed.get(name, name) for name in numbered])
        if config.boxes is not None:
            self.boxes = replace(config.boxes, names=self.numbers)
        elif not self.is_plain:
            if not {"messages", "conversations", "texts", "completion"} & have:
                missing = "answer or answers" if "question" in have else "question"
                raise DatasetError(
                    f"{path}: no column {missing}; {has}: name yours with --columns OURS=YOURS"
                )
            of_schema = {key: value for key, value in renamed.items() if key in SCHEMA_COLUMNS}
            kind = find_schema(known, of_schema, path, {*constants} & {*SCHEMA_COLUMNS})
        may: dict[str, Any] = {"allow_urls": config.allow_urls, "allow_outside": config.allow_outside}
        may |= {"folder": folder, "min_ratings": config.min_ratings, "by_ending": by_ending}
        self.schema = schema = RowSchema(kind, renamed, constants, **may)
        self.prompt = config.prompt or (CHOICES_PROMPT if "choices" in have else "{question}")
        named = _columns_in(self.prompt)
        can = [*columns, "question", "choices"] if self.is_plain else ["question"]
        if named is None or not {*named} <= {*can}:
            raise DatasetError(
                f"{path}: prompt {self.prompt!r}: expected columns out of {', '.join(dict.fromkeys(can))} "
                "in braces, and {{ for a brace"
            )
        self.in_prompt = named
        self.chooses = chooses and "choices" in named  # by the letters that the prompt gives them
        if not config.allow_text_only:
            by_column = self.is_plain or config.boxes is not None
            images_of = schema.shown if by_column else schema.images
            how = "--columns image=COLUMN, or --allow-text-only"
            if not find_images(first, images_of, schema, path, how):
                raise no_images(path, columns, how)

    def samples(self, number: int, row: Any) -> Iterator[EvalSample]:
        """The questions of a row, counted from 0. Raises BadRow."""
        if not isinstance(row, Mapping):
            raise _bad(f"expected an object with columns, got {str(row)[:200]}")
        if self.schema.turns_kept(row) is None:
            return
        for name, fields, answer, images, shown in self._asked(number, row):
            question, choices = fields["question"], fields.get("choices") or ()
            if not isinstance(question, str) or not question.strip():
                raise _bad(f"expected a question, got {question!r}")
            lettered = "\n".join(f"{letter}. {text}" for letter, text in zip(ascii_uppercase, choices))
            prompted = {key: (fields | {"choices": lettered}).get(key) for key in self.in_prompt}
            if absent := [key for key, value in prompted.items() if value is None]:
                raise _bad(f"the prompt needs {', '.join(absent)}, which the row does not have")
            shows = _keys(shown)
            yield EvalSample(
                id=name,
                question=question,
                prompt=self.prompt.format(**prompted),
                targets=_targets(answer, choices) if self.config.boxes is None else (answer,),
                images=images,
                group=" ".join(shows) or f"row {number + 1}",
                max_new_tokens=self.max_new_tokens,
                shows=shows,
                choices=tuple(ascii_uppercase[: len(choices)]) if self.chooses else (),
                family=str(self.schema.get(row, "family") or ""),
                system=self.config.system or str(self.schema.get(row, "system") or ""),
                fields=fields,
            )

    def _asked(self, number: int, row: Mapping[str, Any]) -> Iterator[tuple]:
        """(id, fields, answer, () -> images, images as the row holds them) of each question of a row."""
        if self.boxes is not None:
            yield from self._located(number, row, self.boxes)
            return
        if not self.is_plain:
            for turn, (question, answer, images) in enumerate(self._turns(row)):
                opened = partial(self._images_of_turn, number, turn)
                held = [value for _, value in images]
                yield f"{number + 1}.{turn + 1}", {"question": question}, answer, opened, held
            return
        get, held = partial(self.schema.get, row), [self.schema.columns.get(key, key) for key in SHOWN]
        fields = {key: value for key, value in row.items() if key not in held and is_plain(value)}
        fields["question"] = get("question")
        if choices := get("choices"):
            if not isinstance(choices, list | tuple) or len(choices) > len(ascii_uppercase):
                raise _bad(f"choices: expected a list of at most {len(ascii_uppercase)}, got {choices!r:.80}")
            fields["choices"] = [str(choice) for choice in choices]
        name, given = get("id"), next((one for one in map(get, self.answers) if one is not None), None)
        if type(given) is int and not choices:
            given = self.numbers.get(given, given)
        of_row = partial(self._images_of_row, number)
        yield str(number + 1 if name is None else name), fields, given, of_row, self._held(row)

    def _located(self, number: int, row: Mapping[str, Any], rows: BoxRows) -> Iterator[tuple]:
        """As `_asked`, one question for each thing in a row's boxes."""
        shown = self.schema.shown(row)
        if [kind for kind, _ in shown] != ["image"]:
            raise _bad(f"expected one image with its boxes, got {len(shown)} images and videos")
        theirs = {name: self.schema.columns.get(name, name) for name in BOX_COLUMNS}
        own = {name: self.schema.get(row, name) for name in BOX_COLUMNS}
        own = {name: one for name, one in own.items() if one is not None or theirs[name] in row}
        given = self.schema.get(row, "id")
        name = str(number + 1 if given is None else given)
        groups, size, _ = rows.read(own, shown[0][1])
        asked = [*rows.asked(groups, size, self.config.form_for)]
        for place, (fields, target) in enumerate(asked, 1):
            full = f"{name}.{place}" if len(asked) > 1 else name
            yield full, fields, target, partial(self._images_of_row, number), self._held(row)

    def _held(self, row: Mapping[str, Any]) -> list[Any]:
        return [value for kind in ("image", "video") for value in self.schema.held(row, kind)]

    def _images_of_row(self, number: int) -> list[Any]:
        return _opened(self.schema.shown(self.rows[number]))

    def _images_of_turn(self, number: int, turn: int) -> list[Any]:
        return _opened([*self._turns(self.rows[number])][turn][2])

    def _turns(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str, list[tuple[str, Any]]]]:
        """(question, answer, images and videos so far) of each turn of a conversation."""
        images = list[tuple[str, Any]]()
        question = ""
        for message in self.schema.in_words(row) or ():
            text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
            if message["role"] == "user":
                question = text
                shown = (part for part in message["content"] if part["type"] != "text")
                images = images + [(part["type"], part[part["type"]]) for part in shown]
            elif message["role"] == "assistant":
                yield question, text, images


def _opened(shown: Sequence[tuple[str, Any]]) -> list[Any]:
    """What `load_image` takes, and clips."""
    return [value if kind == "image" else open_video(value) for kind, value in shown]


def _columns_in(template: str) -> list[str] | None:
    """The columns that a prompt names in braces; None where it is no template."""
    try:
        parts = [part[1:] for part in Formatter().parse(template)]
    except ValueError:
        return None
    if any(form or conversion for _, form, conversion in parts):
        return None
    return [name for name, *_ in parts if name is not None]


def _targets(value: Any, choices: Sequence[str]) -> tuple[str, ...]:
    """Accepted answers: of a text, a number, a list, or the Hub's {"text": [...]} and [{"answer": ...}]."""
    if isinstance(value, Mapping):
        value = value.get("text", value.get("answer"))
    found = []
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Mapping):
            one = one.get("answer", one.get("text"))
        if choices and isinstance(one, float) and one.is_integer():
            one = int(one)  # a column of integers with a gap is one of floats
        if choices and type(one) is int:
            if not 0 <= one < len(choices):
                raise _bad(f"answer {one}: expected an index of {len(choices)} choices, from 0")
            one = ascii_uppercase[one]
        if one is not None and str(one).strip():
            found.append(str(one))
    if not found:
        raise _bad(f"expected at least one answer, got {value!r}")
    return tuple(found)


def _keys(value: Any) -> tuple[str, ...]:
    """A key of each image in a column: its path, or a digest of its bytes."""
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, list | tuple):
        return tuple(key for one in value for key in _keys(one))
    if isinstance(value, bytes):
        return (hashlib.sha256(value).hexdigest(),)
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        return (text if len(text) <= 200 else hashlib.sha256(text.encode()).hexdigest(),)
    return ()
