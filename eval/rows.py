"""Rows of your own as a task: a Hub id, a folder, JSON lines or Parquet with images, questions and answers.

    task = data_task(DataConfig("rows.jsonl", columns={"question": "query"}), find_metric("anls"))

| column | holds |
|---|---|
| `question` | a text |
| `answer` or `answers` | one or several accepted answers, `answers` first; with `choices`, an index from 0 |
| `image` or `images` | paths, bytes, data: URLs, or none |
| `choices` | options of a multiple-choice question, shown as A. B. C. |
| `family`, `id` | a kind to report separately; a name that does not depend on the row's place |

Rows of conversations (`messages`; `texts` of user and assistant) work, too: each turn is a question, and what
the assistant says is its answer. With the metric `boxes`, rows have `ref` and `bbox`, or `objects`, and an
image (see `data.box_rows`): each thing is a question in the words of the model's form. All other columns go
to the metric, and to the prompt by their names.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from string import Formatter, ascii_uppercase
from typing import Any

from data.box_rows import CATEGORIES, BoxRows, centre
from data.errors import BadRow, DatasetError
from data.files import ADDRESS
from data.row_schemas import COLUMNS as SCHEMA_COLUMNS
from data.row_schemas import RowSchema, find_images, find_schema, no_images
from data.sources import all_rows, class_names, columns_of, first_rows, open_rows
from eval.metrics import Metric
from eval.tasks import EvalSample, EvalTask

MAX_NEW_TOKENS = 32
BOX_TOKENS = 512  # a dozen boxes as JSON
CHOICES_PROMPT = "{question}\n{choices}\nAnswer with the option's letter from the given choices directly."
COLUMNS = ("question", "answer", "answers", "image", "images", "choices", "family", "id")
BOX_COLUMNS = ("ref", "bbox", "objects")

_bad = partial(BadRow, "bad row")


@dataclass(frozen=True)
class DataConfig:
    """Which rows, and how to ask them.

    path: Hub id, folder, file or pattern, as `data.sources.open_rows` takes it.
    split: "" is test on the Hub, and what `open_rows` makes of it for local files.
    columns: our column names -> the data's, where they differ.
    prompt: a template with columns in braces; "" is the question with its choices.
    limit: the first so many questions; None is all.
    boxes: rows are read as boxes, which are asked for, or with `points` a point in each of them.
    looked: see `EvalTask`.
    """

    path: str
    subset: str | None = None
    split: str = ""
    revision: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    prompt: str = ""
    system: str = ""
    max_new_tokens: int = MAX_NEW_TOKENS
    limit: int | None = None
    allow_urls: bool = False
    allow_outside: bool = False
    allow_text_only: bool = False
    boxes: BoxRows | None = None
    points: bool = False
    looked: bool = False


def data_task(config: DataConfig, metric: Metric) -> EvalTask:
    """Read and check all rows; images are opened when they are asked about. Raises DatasetError."""
    path = config.path
    is_here = Path(path).expanduser().exists() or "*" in path or path.startswith((".", "/", "~"))
    at_address = ADDRESS.match(path) is not None
    is_local = is_here or at_address  # files that are named themselves are all of one split
    split = config.split or ("" if is_local else "test")
    # Of a few questions about rows that lie elsewhere, no more is downloaded than these rows.
    streaming = config.limit is not None and (at_address or not is_here) and "[" not in split
    rows, folder = open_rows(path, config.subset, split, streaming, config.revision)
    if not any(True for _ in first_rows(rows)):
        raise DatasetError(f"{path}: split {split!r} has no rows")
    reader = _Reader(config, rows, folder)
    samples, problems, taken = list[EvalSample](), [], list[Any]()
    for number, row in enumerate(all_rows(rows) if streaming else rows):
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
    name, count = Counter(sample.id for sample in samples).most_common(1)[0]
    if count > 1:
        raise DatasetError(
            f"{path}: {count} questions have the id {name!r}; choose another: --columns id=..."
        )
    split = split or "train"  # as files without a split are called
    data: dict[str, Any] = {
        "path": path,
        "subset": config.subset,
        "split": split,
        "revision": config.revision,
    }
    data |= {"columns": dict(config.columns)}
    name = (Path(path).stem if is_local else path) + (f"/{config.subset}" if config.subset else "")
    asked = samples[: config.limit]
    return EvalTask(name, asked, metric, reader.prompt, data, config.system, config.looked)


class _Reader:
    """Samples of a dataset's rows."""

    def __init__(self, config: DataConfig, rows: Sequence[Any], folder: Path | None):
        self.config, self.rows, self.boxes = config, rows, config.boxes
        columns, path, renamed = columns_of(rows, config.path), config.path, config.columns
        has = f"it has {', '.join(columns) or 'none'}"
        if wrong := ({*renamed} - {*COLUMNS, *SCHEMA_COLUMNS}) | ({*renamed.values()} - {*columns}):
            raise DatasetError(
                f"{path}: no column {', '.join(sorted(wrong))}; {has}; ours are {', '.join(COLUMNS)}"
            )
        self.names = {name: renamed.get(name, name) for name in COLUMNS}
        have = {name for name in COLUMNS if self.names[name] in columns}
        if "file_name" in columns and not {"image", "images"} & have:
            self.names["image"] = "file_name"  # metadata of an image folder
        if (
            config.boxes is not None
            and "bbox" not in {*columns, *renamed}
            and "objects" not in {*columns, *renamed}
        ):
            raise DatasetError(f"{path}: no column bbox or objects; {has}")
        self.answers = [self.names[name] for name in ("answers", "answer") if name in have]
        self.is_plain = config.boxes is None and "question" in have and bool(self.answers)
        kind: tuple[str, ...] = ("question", "answer")
        schema_columns = {key: self.names[key] for key in ("image", "images")}
        if config.boxes is not None:
            self.box_names = {name: renamed.get(name, name) for name in BOX_COLUMNS}
            names = class_names(rows, [self.box_names[key] for key in CATEGORIES])
            self.boxes = replace(config.boxes, names=names)
            schema_columns |= {key: value for key, value in renamed.items() if key in SCHEMA_COLUMNS}
        elif not self.is_plain:
            if not {"messages", "texts", "completion"} & {*columns, *renamed}:
                missing = "answer or answers" if "question" in have else "question"
                raise DatasetError(
                    f"{path}: no column {missing}; {has}: name yours with --columns OURS=YOURS"
                )
            of_schema = {key: value for key, value in renamed.items() if key in SCHEMA_COLUMNS}
            schema_columns |= of_schema
            kind = find_schema(columns, of_schema, path)
        urls, outside = config.allow_urls, config.allow_outside
        schema = RowSchema(kind, schema_columns, folder=folder, allow_urls=urls, allow_outside=outside)
        self.schema = schema
        self.prompt = config.prompt or (CHOICES_PROMPT if "choices" in have else "{question}")
        named = _columns_in(self.prompt)
        known = [*columns, "question", "choices"] if self.is_plain else ["question"]
        if named is None or not {*named} <= {*known}:
            raise DatasetError(
                f"{path}: prompt {self.prompt!r}: expected columns out of {', '.join(dict.fromkeys(known))} "
                "in braces, and {{ for a brace"
            )
        self.in_prompt = named
        if not config.allow_text_only:
            by_column = self.is_plain or config.boxes is not None
            images_of = schema.column_images if by_column else schema.images
            how = "--columns image=COLUMN, or --allow-text-only"
            if not find_images(first_rows(rows), images_of, schema, path, how):
                raise no_images(path, columns, how)

    def samples(self, number: int, row: Any) -> Iterator[EvalSample]:
        """The questions of a row, counted from 0. Raises BadRow."""
        if not isinstance(row, Mapping):
            raise _bad(f"expected an object with columns, got {str(row)[:200]}")
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
                max_new_tokens=self.config.max_new_tokens,
                shows=shows,
                family=str(row.get(self.names["family"]) or ""),
                system=self.config.system,
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
                yield f"{number + 1}.{turn + 1}", {"question": question}, answer, opened, images
            return
        held = self.names["images"], self.names["image"]
        fields = {key: value for key, value in row.items() if key not in held and _is_plain(value)}
        fields["question"] = row.get(self.names["question"])
        if choices := row.get(self.names["choices"]):
            if not isinstance(choices, list | tuple) or len(choices) > len(ascii_uppercase):
                raise _bad(f"choices: expected a list of at most {len(ascii_uppercase)}, got {choices!r:.80}")
            fields["choices"] = [str(choice) for choice in choices]
        name = row.get(self.names["id"])
        given = [row[key] for key in self.answers if row.get(key) is not None]
        of_row = partial(self._images_of_row, number)
        shown = [row.get(column) for column in held]
        yield str(number + 1 if name is None else name), fields, (given or [None])[0], of_row, shown

    def _located(self, number: int, row: Mapping[str, Any], rows: BoxRows) -> Iterator[tuple]:
        """As `_asked`, one question for each thing in a row's boxes."""
        images = self.schema.column_images(row)
        if len(images) != 1:
            raise _bad(f"expected one image with its boxes, got {len(images)}")
        (size, _), form = rows.measure(images[0]), rows.coordinates
        own = {name: row[column] for name, column in self.box_names.items() if column in row}
        kind = "point" if self.config.points else "detect"
        given = row.get(self.names["id"])
        name = str(number + 1 if given is None else given)
        held = [row.get(self.names[key]) for key in ("images", "image")]
        groups = rows.groups(own, size)
        for place, (thing, boxes) in enumerate(groups.items(), 1):
            fields = {"question": form.question(kind, thing), "thing": thing, "size": size}
            fields["boxes"] = [box.box for box in boxes]
            things = [centre(box) for box in boxes] if self.config.points else boxes
            full = f"{name}.{place}" if len(groups) > 1 else name
            yield full, fields, form.write(things, size), partial(self._images_of_row, number), held

    def _images_of_row(self, number: int) -> list[Any]:
        return self.schema.column_images(self.rows[number])

    def _images_of_turn(self, number: int, turn: int) -> list[Any]:
        return [*self._turns(self.rows[number])][turn][2]

    def _turns(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Any]]]:
        """(question, answer, images so far) of each turn of a conversation."""
        images: list[Any] = []
        question = ""
        for message in self.schema.conversation(row) or ():
            text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
            if message["role"] == "user":
                question = text
                images = images + [part["image"] for part in message["content"] if part["type"] == "image"]
            elif message["role"] == "assistant":
                yield question, text, images


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


def _is_plain(value: Any) -> bool:
    """Whether a column's value is text and numbers, not an image in disguise."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)
