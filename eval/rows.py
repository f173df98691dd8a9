"""Rows of your own as a task: a Hub id, a folder, JSON lines or Parquet with images, questions and answers.

    task = data_task(DataConfig("rows.jsonl", columns={"question": "query"}), find_metric("anls"))

| column | holds |
|---|---|
| `question` | a text |
| `answer` or `answers` | one or several accepted, `answers` first; with `choices`, an index from 0 |
| `image` or `images` | paths, bytes, data: URLs, or none |
| `choices` | options of a multiple-choice question, shown as A. B. C. |
| `family`, `id` | a kind to show figures for; a name that does not depend on the row's place |

Rows of conversations (`messages`; `texts` of user and assistant) are questions, too: each turn one, with the
assistant's text as its answer. All other columns go to the metric, and to the prompt by their names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any

from data.errors import BadRow, DatasetError
from data.row_schemas import COLUMNS as LAYOUT_COLUMNS
from data.row_schemas import RowSchema, find_images, find_schema, no_images
from data.sources import columns_of, first_rows, open_rows
from eval.metrics.base import Metric
from eval.tasks import Sample, Task

MAX_NEW_TOKENS = 32
PLAIN_PROMPT = "{question}"
CHOICES_PROMPT = "{question}\n{choices}\nAnswer with the option's letter from the given choices directly."
COLUMNS = ("question", "answer", "answers", "image", "images", "choices", "family", "id")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class DataConfig:
    """Which rows, and how to ask them.

    path: Hub id, folder, file or pattern; see `data.sources.open_rows`.
    split: "" is test for what is on the Hub, and for what is here see `open_rows`.
    columns: our column names -> the data's, where they differ.
    prompt: a template with columns in braces; "" is the question, with its choices where there are some.
    limit: the first so many questions; None is all.
    allow_urls, allow_outside, allow_text_only: as in `data.sources.DatasetConfig`.
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


def data_task(config: DataConfig, metric: Metric) -> Task:
    """Read and check all rows; images are left where they are.

    Raises:
        DatasetError: no such data, a column that is missing (names those there are), rows without a question
            or without answers, no images where text alone is not allowed, a template with an unknown column.
    """
    split = config.split or ("" if _is_here(config.path) else "test")
    rows, folder = open_rows(config.path, config.subset, split, False, config.revision)
    if not len(rows):
        raise DatasetError(f"{config.path}: split {split!r} has no rows")
    reader = _Reader(config, rows, folder)
    reader.check_images()
    samples: list[Sample] = []
    problems = []
    for number in range(len(rows)):
        if config.limit is not None and len(samples) >= config.limit:
            break
        try:
            samples += reader.samples(number)
        except BadRow as error:
            problems.append(f"row {number + 1}: {error}")
    if problems:
        more = f" (and {len(problems) - 1} more such rows)" if len(problems) > 1 else ""
        raise DatasetError(f"{config.path}: {problems[0]}{more}")
    data: dict[str, Any] = {
        "path": config.path,
        "subset": config.subset,
        "split": split or "train",  # as files without a split are called
        "revision": config.revision,
    }
    data |= {"columns": dict(config.columns)}
    name = Path(config.path).stem if _is_here(config.path) else config.path
    name = f"{name}/{config.subset}" if config.subset else name
    return Task(name, _named(samples, reader)[: config.limit], metric, reader.prompt, data, config.system)


class _Reader:
    """Samples of a dataset's rows."""

    def __init__(self, config: DataConfig, rows: Sequence[Any], folder: Path | None):
        self.config, self.rows = config, rows
        columns = columns_of(rows, config.path)
        _check_columns(config, columns)
        self.names = {name: config.columns.get(name, name) for name in COLUMNS}
        self.have = {name for name in COLUMNS if self.names[name] in columns}
        if "file_name" in columns and not {"image", "images"} & self.have:
            self.names["image"] = "file_name"  # an image folder's metadata
            self.have.add("image")
        self.answers = [self.names[name] for name in ("answers", "answer") if name in self.have]
        self.is_plain = "question" in self.have and bool(self.answers)
        named = {key: self.names[key] for key in ("image", "images")}
        kind: tuple[str, ...] = ("question", "answer")
        if not self.is_plain:
            _check_plain(config, columns, self.have)
            renamed = {key: value for key, value in config.columns.items() if key in LAYOUT_COLUMNS}
            kind = find_schema(columns, renamed, config.path)
            named |= renamed
        self.schema = RowSchema(
            kind, named, folder=folder, allow_urls=config.allow_urls, allow_outside=config.allow_outside
        )
        default = CHOICES_PROMPT if "choices" in self.have else PLAIN_PROMPT
        self.prompt = config.prompt or default
        known = [*columns, "question", "choices"] if self.is_plain else ["question"]
        self.in_prompt = _fields_of(self.prompt, config.path, known)

    def check_images(self) -> None:
        """Raises DatasetError where there are none in the first rows, and that was not asked for."""
        config, schema = self.config, self.schema
        if config.allow_text_only:
            return
        images_of = schema.column_images if self.is_plain else schema.images
        how = "--columns image=COLUMN, or --allow-text-only"
        if not find_images(first_rows(self.rows), images_of, schema, config.path, how):
            raise no_images(config.path, columns_of(self.rows, config.path), how)

    def samples(self, number: int) -> list[Sample]:
        """The questions of a row, which counts from 0.

        Raises:
            BadRow: what is wrong with it.
        """
        row = self.rows[number]
        if not isinstance(row, Mapping):
            raise BadRow("bad row", f"expected an object with columns, got {str(row)[:200]}")
        if not self.is_plain:
            return self._turns(number, row)
        question = row.get(self.names["question"])
        if not isinstance(question, str) or not question.strip():
            raise BadRow("bad row", f"expected a question, got {question!r}")
        options = self._choices(row)
        given = [row[name] for name in self.answers if row.get(name) is not None]
        targets = _targets(given[0] if given else None, options)
        fields = self._fields(row, question, options)
        asked = {**fields, "choices": "\n".join(f"{x}. {text}" for x, text in zip(LETTERS, options))}
        absent = [name for name in self.in_prompt if asked.get(name) is None]
        if absent:
            raise BadRow("bad row", f"the prompt needs {', '.join(absent)}, which the row does not have")
        shows = _keys([row.get(self.names[name]) for name in ("images", "image")])
        own = row.get(self.names["id"])
        sample = Sample(
            id=str(number + 1) if own is None else str(own),
            question=question,
            prompt=self.prompt.format(**{name: asked[name] for name in self.in_prompt}),
            targets=targets,
            images=partial(self._images, number),
            group=" ".join(shows) or f"row {number + 1}",
            shows=shows,
            max_new_tokens=self.config.max_new_tokens,
            family=str(row.get(self.names["family"]) or ""),
            system=self.config.system,
            fields=fields,
        )
        return [sample]

    def _images(self, number: int) -> list[Any]:
        return self.schema.column_images(self.rows[number])

    def _choices(self, row: Mapping[str, Any]) -> list[str]:
        options = row.get(self.names["choices"]) if "choices" in self.have else None
        if options is None:
            return []
        if not isinstance(options, Sequence) or isinstance(options, str) or len(options) > len(LETTERS):
            raise BadRow(
                "bad row", f"choices: expected a list of at most {len(LETTERS)}, got {options!r:.80}"
            )
        return [str(option) for option in options]

    def _fields(self, row: Mapping[str, Any], question: str, options: list[str]) -> dict[str, Any]:
        """Every column that is no image, under the data's name; question and choices also under ours."""
        images = {self.names["image"], self.names["images"]}
        fields = {key: value for key, value in row.items() if key not in images and _is_plain(value)}
        return fields | {"question": question} | ({"choices": options} if options else {})

    def _turns(self, number: int, row: Mapping[str, Any]) -> list[Sample]:
        """A conversation's turns, each a question of its own about the images shown so far."""
        made = []
        for turn, (question, answer, images) in enumerate(self._conversation(row)):
            if not question.strip() or not answer.strip():
                raise BadRow("bad row", f"turn {turn + 1}: expected a question and an answer")
            shows = _keys(images)
            made.append(
                Sample(
                    id=f"{number + 1}.{turn + 1}",
                    question=question,
                    prompt=self.prompt.format(question=question),
                    targets=(answer,),
                    images=partial(self._shown, number, turn),
                    group=" ".join(shows) or f"row {number + 1}",
                    shows=shows,
                    max_new_tokens=self.config.max_new_tokens,
                    family=str(row.get(self.names["family"]) or ""),
                    system=self.config.system,
                    fields={"question": question},
                )
            )
        return made

    def _shown(self, number: int, turn: int) -> list[Any]:
        return list(self._conversation(self.rows[number]))[turn][2]

    def _conversation(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Any]]]:
        """(question, answer, images so far) of each turn."""
        images: list[Any] = []
        question = ""
        for message in self.schema.conversation(row) or ():
            text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
            if message["role"] == "user":
                question = text
                images = images + [part["image"] for part in message["content"] if part["type"] == "image"]
            elif message["role"] == "assistant":
                yield question, text, images


def _named(samples: list[Sample], reader: _Reader) -> list[Sample]:
    """The samples, if the names that their rows give them differ."""
    seen: set[str] = set()
    for sample in samples:
        if sample.id in seen:
            raise DatasetError(
                f"{reader.config.path}: two questions have the id {sample.id!r}; expected a column of "
                "different ones: name another with --columns id=..."
            )
        seen.add(sample.id)
    return samples


def _is_here(path: str) -> bool:
    local = Path(path).expanduser()
    return local.exists() or "*" in path or path.startswith((".", "/", "~"))


def _check_columns(config: DataConfig, columns: Sequence[str]) -> None:
    has = f"it has {', '.join(columns) or 'none'}"
    unknown = sorted(set(config.columns) - {*COLUMNS, *LAYOUT_COLUMNS})
    if unknown:
        raise DatasetError(
            f"{config.path}: --columns: expected names out of {', '.join(COLUMNS)}, got {', '.join(unknown)}"
        )
    absent = sorted(set(config.columns.values()) - set(columns))
    if absent:
        raise DatasetError(f"{config.path}: no column {', '.join(absent)}; {has}")


def _check_plain(config: DataConfig, columns: Sequence[str], have: set[str]) -> None:
    """Raises DatasetError where rows are half of question and answer, and no conversations either."""
    if not {"messages", "texts", "completion"} & {*columns, *config.columns}:
        missing = "question" if "question" not in have else "answer or answers"
        raise DatasetError(
            f"{config.path}: no column {missing}; it has {', '.join(columns) or 'none'}: name yours with "
            f"--columns {missing.split()[0]}=..."
        )


def _fields_of(template: str, where: str, known: Sequence[str]) -> list[str]:
    """The columns that a prompt names."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise DatasetError(f"{where}: prompt {template!r}: {error}; write {{{{ for a brace") from error
    formatted = [name for _, name, layout, conversion in parts if name and (layout or conversion)]
    if formatted:
        raise DatasetError(
            f"{where}: prompt {template!r}: expected no more than a column's name in braces, got a format "
            f"or conversion of {', '.join(formatted)}"
        )
    names = [name for _, name, _, _ in parts if name is not None]
    unknown = sorted(set(names) - set(known))
    if unknown:
        shown = ", ".join(dict.fromkeys(known))
        raise DatasetError(f"{where}: prompt {template!r}: no column {', '.join(unknown)}; it has {shown}")
    return names


def _targets(value: Any, options: Sequence[str]) -> tuple[str, ...]:
    """Accepted answers: of a text, a number, a list, or the Hub's {"text": [...]} and [{"answer": ...}]."""
    if isinstance(value, Mapping):
        value = value.get("text", value.get("answer"))
    values = list(value) if isinstance(value, list | tuple) else [value]
    found = []
    for one in values:
        if isinstance(one, Mapping):
            one = one.get("answer", one.get("text"))
        if options and isinstance(one, float) and one.is_integer():
            one = int(one)  # a column of integers with a gap is one of floats
        if options and isinstance(one, int) and not isinstance(one, bool):
            if not 0 <= one < len(options):
                raise BadRow("bad row", f"answer {one}: expected an index of {len(options)} choices, from 0")
            one = LETTERS[one]
        if one is not None and str(one).strip():
            found.append(str(one))
    if not found:
        got = "none" if value is None else repr(value)
        raise BadRow("bad row", f"expected at least one answer, got {got}")
    return tuple(found)


def _keys(value: Any) -> tuple[str, ...]:
    """What tells each image of a column from others: its path, or a digest of its bytes."""
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
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)
