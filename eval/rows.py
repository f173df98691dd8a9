"""Rows of your own as a task: a Hub id, a folder, JSON lines or Parquet.

    data_task(DatasetConfig("rows.jsonl", columns={"question": "query"}), find_metric("anls"))

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

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Formatter, ascii_uppercase
from types import MappingProxyType
from typing import Any

from data.box_rows import CATEGORIES, SIZES, BoxRows, FormFor, by_name
from data.errors import ADDRESS, BadRow, DatasetError
from data.row_schemas import COLUMNS as SCHEMA_COLUMNS
from data.row_schemas import SHOWN, RowSchema, find_images, find_schema, is_plain, no_images
from data.sources import (
    TRAIN,
    DatasetConfig,
    Share,
    class_names,
    columns_of,
    first_rows,
    known_columns,
    open_rows,
)
from data.visuals import open_video
from eval.metrics import Metric
from eval.tasks import EvalSample, EvalTask
from inference.coordinates import ANY_SIZE

MAX_NEW_TOKENS, BOX_TOKENS = 32, 512  # of an answer about rows; a dozen boxes as JSON
CHOICES_PROMPT = "{question}\n{choices}\nAnswer with the option's letter from the given choices directly."
COLUMNS = ("question", "answer", "answers", *SHOWN, "choices", "family", "id")
BOX_COLUMNS = ("ref", "bbox", "objects", *SIZES)
_bad = partial(BadRow, "bad row")


@dataclass(frozen=True)
class Asking:
    """How rows are asked.

    prompt: a template with columns in braces; "" is the question with its choices.
    max_new_tokens: None is 32, and of boxes 512.
    limit: the first so many questions; None is all.
    holdout: of the rows that a training run reads, the share that `train.py --holdout` leaves out.
    boxes: rows are read as boxes, which are asked for, or points in them.
    form_for: `Processor.form` of the model that they are asked of.
    download: all rows, though `limit` needs few: a training run has downloaded them already.
    """

    prompt: str = ""
    system: str = ""
    max_new_tokens: int | None = None
    limit: int | None = None
    holdout: float = 0.0
    boxes: BoxRows | None = None
    form_for: FormFor = by_name
    download: bool = False


def data_task(entry: DatasetConfig, metric: Metric, asking: Asking = Asking()) -> EvalTask:
    """Read and check all rows; images are opened when they are asked about. A split of "" is test on the Hub,
    and what `open_rows` makes of it for local files. Raises DatasetError."""
    path, limit, holdout = entry.path, asking.limit, asking.holdout
    is_here = Path(path).expanduser().exists() or "*" in path or path.startswith((".", "/", "~"))
    at_address = ADDRESS.match(path) is not None
    is_local = is_here or at_address  # files that are named themselves are all of one split
    split = entry.split or (TRAIN if holdout else "" if is_local else "test")
    # Of a few questions about rows that lie elsewhere, no more is downloaded than these rows.
    few = limit is not None and not asking.download and not holdout
    streaming = few and (at_address or not is_here) and "[" not in split
    rows, folder = open_rows(path, entry.subset, split, streaming, entry.revision)
    rows = Share(holdout, True).of(rows, path, entry.columns.get("answer", "answer")) if holdout else rows
    folder = Path(entry.image_folder).expanduser() if entry.image_folder else folder
    reader = _Reader(entry, asking, rows, folder, metric.chooses)
    samples, problems, taken = list[EvalSample](), [], list[Any]()
    for number, row in enumerate(rows):
        if streaming:
            taken.append(row)
        try:
            samples += reader.samples(number, row)
        except BadRow as error:
            problems.append(f"row {number + 1}: {error}")
        if limit is not None and len(samples) >= limit:
            break
    if streaming:
        reader.rows = taken
    if problems:
        more = f" (and {len(problems) - 1} more such rows)" if len(problems) > 1 else ""
        raise DatasetError(f"{path}: {problems[0]}{more}")
    if not samples:
        raise DatasetError(f"{path}: no row has a question")
    name, count = Counter(sample.id for sample in samples).most_common(1)[0]
    if count > 1:
        raise DatasetError(
            f"{path}: {count} questions have the id {name!r}; choose another: --columns id=..."
        )
    data: dict[str, Any] = {"path": path, "subset": entry.subset, "split": split or TRAIN}
    data |= {"revision": entry.revision, "columns": dict(entry.columns)}
    read = {key: getattr(entry, key) for key in ("constants", "image_folder")}
    read |= {"holdout": holdout, "names": {str(number): one for number, one in dict(entry.names).items()}}
    data |= {key: value for key, value in read.items() if value}  # older runs have none of them
    name = entry.name
    if is_local and name == DatasetConfig(path, subset=entry.subset).name:
        name = Path(path).stem + (f"/{entry.subset}" if entry.subset else "")
    return EvalTask(name, samples[:limit], metric, reader.prompt, data, asking.system)


class _Reader:
    """Samples of a dataset's rows."""

    def __init__(
        self, entry: DatasetConfig, asking: Asking, rows: Sequence[Any], folder: Path | None, chooses: bool
    ):
        self.asking, self.rows, self.boxes = asking, rows, asking.boxes
        self.max_new_tokens = asking.max_new_tokens or (BOX_TOKENS if asking.boxes else MAX_NEW_TOKENS)
        path, constants = entry.path, entry.constants
        if not (first := list(first_rows(rows))):
            raise DatasetError(f"{path}: split {entry.split!r} has no rows")
        columns, ours = columns_of(rows, path, first), dict.fromkeys((*COLUMNS, *SCHEMA_COLUMNS))
        answered = "answer" in (*columns, *entry.columns, *constants)  # then not from within a column json
        seen = [one for one in ours if not (answered and one == "answers")]
        known, renamed = known_columns(first, columns, entry.columns, constants, seen)
        has = f"it has {', '.join(columns) or 'none'}"
        if wrong := ({*renamed, *constants} - {*ours}) | ({*renamed.values()} - {*known}):
            raise DatasetError(
                f"{path}: no column {', '.join(sorted(wrong))}; {has}; ours are {', '.join(COLUMNS)}"
            )
        have = {name for name in ours if name in constants or renamed.get(name, name) in known}
        if asking.boxes is not None and not {"bbox", "objects"} & have:
            raise DatasetError(f"{path}: no column bbox or objects; {has}")
        self.answers = [name for name in ("answers", "answer") if name in have]
        self.is_plain = asking.boxes is None and "question" in have and bool(self.answers)
        kind: tuple[str, ...] = ("question", "answer")
        numbered = self.answers if asking.boxes is None else CATEGORIES
        self.numbers = entry.names or class_names(rows, [renamed.get(name, name) for name in numbered])
        if asking.boxes is not None:
            self.boxes = replace(asking.boxes, names=self.numbers)
        elif not self.is_plain:
            if not {"messages", "conversations", "texts", "completion"} & have:
                missing = "answer or answers" if "question" in have else "question"
                raise DatasetError(
                    f"{path}: no column {missing}; {has}: name yours with --columns OURS=YOURS"
                )
            of_schema = {key: value for key, value in renamed.items() if key in SCHEMA_COLUMNS}
            kind = find_schema(known, of_schema, path, {*constants} & {*SCHEMA_COLUMNS})
        may = entry.allow_urls, entry.allow_outside
        self.schema = schema = RowSchema(kind, renamed, constants, folder, *may)
        self.prompt = asking.prompt or (CHOICES_PROMPT if "choices" in have else "{question}")
        named = _columns_in(self.prompt)
        can = [*columns, "question", "choices"] if self.is_plain else ["question"]
        if named is None or not {*named} <= {*can}:
            raise DatasetError(
                f"{path}: prompt {self.prompt!r}: expected columns out of {', '.join(dict.fromkeys(can))} "
                "in braces, and {{ for a brace"
            )
        self.in_prompt = named
        self.chooses = chooses and "choices" in named  # by the letters that the prompt gives them
        if not entry.allow_text_only:
            by_column = self.is_plain or asking.boxes is not None
            images_of = schema.shown if by_column else schema.images
            how = "--columns image=COLUMN, or --allow-text-only"
            if not find_images(first, images_of, schema, path, how):
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
                targets=_targets(answer, choices) if self.asking.boxes is None else (answer,),
                images=images,
                group=" ".join(shows) or f"row {number + 1}",
                max_new_tokens=self.max_new_tokens,
                shows=shows,
                choices=tuple(ascii_uppercase[: len(choices)]) if self.chooses else (),
                family=str(self.schema.get(row, "family") or ""),
                system=self.asking.system or str(self.schema.get(row, "system") or ""),
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
        asked = [*rows.asked(groups, size, self.asking.form_for)]
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
        for message in self.schema.in_words(row):
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


def boxes_of(
    entry: DatasetConfig, form_for: FormFor, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[BoxRows, dict[str, Any]]:
    """How a dataset's boxes are asked for, and the options of the metric that say so;
    `options` of the metric go before the dataset's own."""
    given = {key: options[key] for key in ("form", "corners", "points") if key in options}
    boxes = BoxRows(**{**entry.boxes, **given})
    form = boxes.coordinates(ANY_SIZE, form_for)
    return boxes, {"form": form.name, "corners": boxes.corners, "points": boxes.points}
