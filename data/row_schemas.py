"""Rows as datasets lay them out -> conversations in the Hub's form, with each image and video in its place.

| columns | known from |
|---|---|
| `messages`, `images` | TRL; {"type": "image"} parts take `images` in order |
| `conversations` of {"from", "value"}, `image` | LLaVA, ShareGPT; `<image>` in a text takes the next image |
| `prompt` and `completion`, `images` | TRL; messages as above, or the user's and the assistant's text |
| `texts` of {"user", "assistant"}, `images` | the_cauldron, FineVision |
| `ref` and `bbox`, or `objects`, with an image; `width`, `height` | RefCOCO, COCO, LVIS: `data.box_rows` |
| `question`, `answer`, `image` or `images` | everything else |
| `chosen`, `rejected`, after a `prompt`, `question` or conversation, or whole | TRL; see `find_pairs` |

Messages may have `tool_calls`, `tool_call_id` and `reasoning_content`, a conversation a column `tools`: lists
as chat templates take them, or JSON of these. LLaMA-Factory's roles `function_call` (a text with JSON) and
`observation` are calls of the assistant and their results.

Texts of the user in any layout may hold `<image>` and `<video>`, once for each that the row has; where none
does, images come first. A column `system` holds the text before a conversation.

A column `video` or `videos` stands wherever `image` and `images` do, or beside them: then after these.

Rows may lack images, but if none of the first rows has one, the recipe must say so (`find_images`). Numbers
are written out where a text is expected; NaN and infinity count as no text.
"""

from __future__ import annotations

import json
import math
import mimetypes
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.box_rows import SIZES, BoxRows, FormFor, by_name
from data.conversation import THOUGHTS, GivenText
from data.errors import BadRow, DatasetError
from data.tools import Tool, ToolCall
from messages import one_line

# Why a row was left out. States of runs hold these words.
BROKEN_IMAGE, EMPTY_TEXT, BAD_CONVERSATION = "broken image", "empty text", "bad conversation"
PLACEHOLDERS, TOO_MANY_TILES, TOO_LONG = "images and placeholders differ", "too many tiles", "too long"
OUTSIDE = "image outside of the dataset's folder"

PAIR = ("chosen", "rejected")
SHOWN = ("images", "image", "videos", "video")
OF_BOXES = (("ref", "bbox"), ("objects",))
_TALKS = (("messages",), ("conversations",), ("prompt", "completion"))  # columns of messages
_TEXT_COLUMNS = (*_TALKS, ("texts",), OF_BOXES[0], ("question", "answer"), OF_BOXES[1])
COLUMNS = (*(name for names in _TEXT_COLUMNS for name in names), "system", "tools", *SHOWN, *SIZES, *PAIR)
_PROMPTS = ("prompt", "question", "conversations", "messages")  # before what was chosen and rejected
_ROLES = {"prompt": "user", "completion": "assistant"}  # of a column that holds text instead of messages
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_SPEAKERS |= {"observation": "tool", "function_response": "tool", "function": "tool"}
_BESIDE = ("tool_calls", "tool_call_id", "name", *THOUGHTS)  # a message's content
_CALLS = ("tools", "functions", "tool_calls", "function_call")  # keys that are not ignored anywhere
_SHOWN_HERE = re.compile(r"\n*<(image|video)>\n*")  # LLaVA has it in a line of its own


@dataclass(frozen=True)
class RowSchema:
    """The layout of the rows of one dataset.

    Args:
        text_columns: the columns that hold the text, one of `_TEXT_COLUMNS`.
        columns: our name of a column -> the dataset's, where they differ; `json.question` is the question in
            a column `json`.
        constants: our name of a column -> what every row has in it.
        folder: where relative image paths start; None refuses paths.
        allow_urls: images may be fetched from the network.
        allow_outside: paths may leave `folder`.
        boxes: how rows with boxes are read.
    """

    text_columns: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    allow_urls: bool = False
    allow_outside: bool = False
    boxes: BoxRows = field(default_factory=BoxRows)

    def conversation(self, row: Any, form_for: FormFor = by_name) -> list[dict[str, Any]]:
        """A row's messages, each with a list of parts. Raises BadRow. `form_for` (`Processor.form`) says how
        boxes are written."""
        if not isinstance(row, Mapping):  # a line that could not be read
            raise BadRow(BAD_CONVERSATION, f"expected an object with columns, got {str(row)[:200]}")
        if lost := _lost(row, (self.columns.get("tools", "tools"),) * (self.text_columns in _TALKS)):
            raise BadRow(BAD_CONVERSATION, f"{lost}: expected tools beside messages, and calls in them")
        shown = self.shown(row)
        images = [value for kind, value in shown if kind == "image"]
        beside: tuple[str, ...] = _BESIDE
        if self.text_columns in OF_BOXES:
            if len(images) != 1:
                raise BadRow(PLACEHOLDERS, f"expected one image with its boxes, got {len(images)}")
            own = {name: self.get(row, name) for name in (*self.text_columns, *SIZES)}
            given, image = self.boxes.turns(own, images[0], form_for)
            beside, shown = (*_BESIDE, "asked"), [("image", image)]
        else:
            given = self._given(row)
        if system := self.get(row, "system"):
            given = [{"role": "system", "content": system}, *given]
        as_text = all(isinstance(message.get("content"), str) for message in given)
        # In rows without images a mark is text, but for LLaVA's, in which it is nothing else.
        may = as_text and (shown or "conversations" in self.text_columns)
        asks = [may and message.get("role") != "assistant" for message in given]
        marked = any(its and _SHOWN_HERE.search(one["content"]) for its, one in zip(asks, given))
        unplaced = {kind: iter([value for one, value in shown if one == kind]) for kind in ("image", "video")}
        messages = list[dict[str, Any]]()
        for message, may_mark in zip(given, asks):
            content: Any = message.get("content")
            parts = list(self._parts(_cut(content) if marked and may_mark else content, unplaced))
            if isinstance(content, str) and all(part["type"] == "text" for part in parts):
                parts = GivenText(parts)
            own = {key: message[key] for key in beside if key in message}
            messages.append({"role": message.get("role"), "content": parts, **own})
        if as_text and not marked:
            _put_images_first(messages, shown)
        elif left := sum(1 for values in unplaced.values() for _ in values):
            raise BadRow(PLACEHOLDERS, f"{len(shown)} images and videos, of which texts place all but {left}")
        _check_texts(messages)
        return messages

    def tools(self, row: Mapping[str, Any]) -> list[Tool]:
        """The tools that the assistant of a row can call, of columns that hold messages. Raises BadRow."""
        given = self.get(row, "tools") if self.text_columns in _TALKS else None
        try:
            return [Tool.read(one) for one in _listed(given)]
        except ValueError as error:
            raise BadRow(BAD_CONVERSATION, one_line(error)) from None

    def in_words(self, row: Mapping[str, Any], form_for: FormFor = by_name) -> list[dict[str, Any]]:
        """The `conversation` of a row that is scored. Raises BadRow for one with tools, calls or results."""
        messages = self.conversation(row, form_for)
        if self.tools(row) or any("tool_calls" in one or one["role"] == "tool" for one in messages):
            raise BadRow(BAD_CONVERSATION, "tools, tool_calls: expected questions and answers in words")
        return messages

    def accepted(self, row: Any) -> dict[str, list[str]]:
        """`accept`, the answers beside the first, of a row with a list of them."""
        given = self.get(row, "answer") if self.text_columns == ("question", "answer") else None
        if not isinstance(given, list | tuple):
            return {}
        return {"accept": [str(one) for one in given[1:] if one is not None and str(one).strip()]}

    def images(self, row: Any) -> list[Any]:
        """The images and videos of the conversation as `open_visual` takes them."""
        parts = (part for message in self.conversation(row) for part in message["content"])
        return [part[part["type"]] for part in parts if part["type"] != "text"]

    def shown(self, row: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """("image" or "video", a value for `open_visual`) of the columns, images first."""
        return [(kind, self._image(one)) for kind in ("image", "video") for one in self.held(row, kind)]

    def held(self, row: Mapping[str, Any], kind: str) -> Sequence[Any]:
        """Its images, or videos, as the row has them."""
        value = self.get(row, f"{kind}s")
        value = self.get(row, kind) if value is None else value
        return value if isinstance(value, list | tuple) else [] if value in (None, "") else [value]

    def get(self, row: Mapping[str, Any], name: str) -> Any:
        """The value of a row in one of our columns, None without."""
        return self.constants[name] if name in self.constants else held(row, self.columns.get(name, name))

    def _image(self, value: Any) -> Any:
        """An image as a row holds it, made a value for `load_image`."""
        if isinstance(value, Mapping):
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if value is None:
            raise BadRow(BROKEN_IMAGE, "expected an image, got none")
        if not isinstance(value, str | os.PathLike):
            return value
        text = os.fspath(value)
        shown = repr(text[:200])
        is_url = text.startswith(("http://", "https://"))
        if text.startswith("data:") or (is_url and self.allow_urls):
            return text
        if is_url:
            raise BadRow(BROKEN_IMAGE, f"{shown}: images are not downloaded; set allow_urls")
        if self.folder is None:
            raise BadRow(BROKEN_IMAGE, f"{shown}: expected the image itself, got a path")
        try:
            path = (self.folder / text).resolve()
            path.exists()  # raises for what is too long for a name
        except (OSError, ValueError, RuntimeError) as error:  # or a NUL in it, or links in a circle
            raise BadRow(BROKEN_IMAGE, f"{shown}: expected a path ({one_line(error)})") from error
        # Rows are often downloaded, and what a path names is shown to a model and kept in reports.
        if not (self.allow_outside or path.is_relative_to(_own_folder(self.folder))):
            advice = "move the image into it, or set allow_outside if you trust these rows"
            raise BadRow(OUTSIDE, f"{shown} is outside of the dataset's folder: {advice}")
        return path

    def _given(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """A row's messages, as the row holds them."""
        values = [self.get(row, name) for name in self.text_columns]
        if self.text_columns == ("question", "answer"):
            question, answer = values
            return _turn(question, self.boxes.names.get(answer, answer) if type(answer) is int else answer)
        if self.text_columns == ("texts",):
            return _turns(values[0])
        given: list[Any] = []
        for name, value in zip(self.text_columns, values):
            if name in _ROLES and isinstance(value, str | int | float):
                value = {"role": _ROLES[name], "content": _text(value)}
            if isinstance(value, Mapping):
                value = [value]
            if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
                raise BadRow(BAD_CONVERSATION, f"{name}: expected a list of messages, got {_kind(value)}")
            try:
                given += map(_message, value)
            except ValueError as error:
                raise BadRow(BAD_CONVERSATION, f"{name}: {one_line(error)}") from None
        return given

    def _parts(self, content: Any, unplaced: Mapping[str, Iterator[Any]]) -> Iterator[dict[str, Any]]:
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
            raise BadRow(BAD_CONVERSATION, f"expected content as text or parts, got {_kind(content)}")
        for part in content:
            if part.get("type") == "text":
                yield {"type": "text", "text": part.get("text")}
            elif (kind := str(part.get("type")).removesuffix("_url")) in ("image", "video"):
                held = [part[key] for key in (kind, "url", "path", "base64") if part.get(key) is not None]
                shown = self._image(held[0]) if held else next(unplaced[kind], None)
                if shown is None:
                    raise BadRow(PLACEHOLDERS, f"more {kind} parts than {kind}s")
                yield {"type": kind, kind: shown}
            else:
                raise BadRow(
                    BAD_CONVERSATION, f"expected a text, image or video part, got {part.get('type')!r}"
                )


# ------------------------------------------------------------------------------------------- the columns
def held(row: Mapping[str, Any], column: str) -> Any:
    """The value of a row in a column, or within: `json.turns.0` is the first turn in `json`. None without."""
    if column in row:
        return row[column]
    head, dot, rest = column.rpartition(".")
    value = held(row, head) if dot else None
    if isinstance(value, list | tuple):
        value = {str(at): one for at, one in enumerate(value)}
    return value.get(rest) if isinstance(value, Mapping) else None


def _check_names(
    columns: Sequence[str], renamed: Mapping[str, str], name: str, constants: Iterable[str]
) -> str:
    """Refuse names that are none of ours, and columns that are not there. Says which ones are."""
    if unknown := sorted({*renamed, *constants} - set(COLUMNS)):
        known = ", ".join(COLUMNS)
        raise DatasetError(f"{name}: columns: expected names out of {known}, got {', '.join(unknown)}")
    has = f"it has {', '.join(columns) or 'none'}"
    if absent := sorted(set(renamed.values()) - set(columns)):
        raise DatasetError(f"{name}: no column {', '.join(absent)}; {has}")
    return has


def find_schema(
    columns: Sequence[str], renamed: Mapping[str, str], name: str, constants: Iterable[str] = ()
) -> tuple[str, ...]:
    """The columns of a dataset that hold its text."""
    has = _check_names(columns, renamed, name, constants)
    have = {*renamed, *constants} | (set(columns) - set(renamed.values()))
    for needed in _TEXT_COLUMNS:
        if have.issuperset(needed):
            return needed
    if have.issuperset(PAIR):
        raise DatasetError(f"{name}: its chosen and rejected answers need --task preferences")
    raise DatasetError(
        f"{name}: expected a column messages, conversations or texts, or question and answer; {has}: name "
        "yours under columns, and what all rows have in common under constants"
    )


def find_pairs(
    columns: Sequence[str], renamed: Mapping[str, str], first: Any, name: str, constants: Iterable[str] = ()
) -> tuple[tuple[str, ...], dict[str, str], dict[str, str]]:
    """Text columns of rows of preferences, of which `first` is one, and the names of columns for the chosen
    answer, and for the rejected one. Both are texts or messages that follow the prompt, or hold it too."""
    have, has = {*renamed, *columns}, _check_names(columns, renamed, name, constants)
    pair = [renamed.get(key, key) for key in PAIR]
    if not {*pair} <= {*columns}:
        raise DatasetError(
            f"{name}: preferences need columns chosen and rejected; {has}: name yours under columns"
        )
    prompt = next((column for column in _PROMPTS if column in have), None)
    said = first.get(pair[0]) if isinstance(first, Mapping) else None
    begins = said[0] if isinstance(said, list) and said and isinstance(said[0], Mapping) else {}
    others = {key: value for key, value in renamed.items() if key not in (*PAIR, *_PROMPTS)}
    goes_on = prompt is not None and _role(begins) not in ("user", "system")
    text_columns = ("prompt", "completion") if goes_on else ("messages",)
    names = others | ({"prompt": renamed.get(prompt, prompt)} if goes_on and prompt else {})
    chosen, rejected = (names | {text_columns[-1]: column} for column in pair)
    return text_columns, chosen, rejected


def find_images(
    rows: Iterable[Any],
    images_of: Callable[[Any], Sequence[Any]],
    schema: RowSchema,
    name: str,
    how: str,
) -> bool:
    """True if one of the first rows has an image, or if none of them can be used for another reason, which is
    counted and reported elsewhere. DatasetError if none has one, and a column that is not read looks like
    images or all images are refused.

    Args:
        images_of: a row -> its images; may raise BadRow.
        how: see `no_images`.
    """
    read = {schema.columns.get(column, column) for column in (*schema.text_columns, *SHOWN)}
    usable, refused, alike = False, "", dict[str, None]()
    columns: dict[str, None] = {}
    for row in (row for row in rows if isinstance(row, Mapping)):  # others could not be read
        try:
            for _, one in schema.shown(row):
                if isinstance(one, Path) and not one.exists():
                    where = "image_folder in the dataset's entry says where paths start"
                    raise BadRow(BROKEN_IMAGE, f"{one}: no such file; {where}")
            if images_of(row):
                return True
            usable = True
        except BadRow as error:
            if error.reason in (BROKEN_IMAGE, OUTSIDE, PLACEHOLDERS):
                refused = refused or str(error)
        columns |= dict.fromkeys(row)
        alike |= {key: None for key, value in row.items() if key not in read and looks_like_image(value)}
    if alike:
        raise no_images(name, columns, how.replace("COLUMN", next(iter(alike))))
    if refused:
        raise DatasetError(f"{name}: none of the first rows has an image that can be used: {refused}")
    return not usable


def no_images(name: str, columns: Iterable[str], how: str) -> DatasetError:
    """The error about first rows without an image; `how` to name their column, or to allow text alone."""
    return DatasetError(
        f"{name}: the first rows have no image in a column image or images; their columns are "
        f"{', '.join(columns)}: write {how}"
    )


def looks_like_image(value: Any) -> bool:
    """True for values that may be an image: bytes, or the name of an image file."""
    if isinstance(value, list | tuple):
        return bool(value) and looks_like_image(value[0])
    if isinstance(value, Mapping):
        return looks_like_image(value.get("path") if value.get("path") is not None else value.get("bytes"))
    if isinstance(value, str):
        kind, _ = mimetypes.guess_type(value[:4096].partition("?")[0], strict=False)
        return (kind or "").startswith("image/") and "\n" not in value
    return isinstance(value, bytes)


def plain_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row that hold words, numbers, and lists and mappings of these: no images, no bytes."""
    return {key: value for key, value in row.items() if is_plain(value) and not looks_like_image(value)}


def is_plain(value: Any) -> bool:
    """True for words, numbers, and lists and mappings of these."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_plain, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, str | int | float)


def _own_folder(folder: Path) -> Path:
    """The folder that a dataset's files lie in. Those of a snapshot in the Hub's cache link to its blobs."""
    folder = folder.resolve()
    for parent in folder.parents:
        if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
            return parent.parent
    return folder


# ---------------------------------------------------------------------------------------------- messages
def _turns(texts: Any) -> list[Mapping[str, Any]]:
    if not isinstance(texts, Sequence) or not all(isinstance(turn, Mapping) for turn in texts):
        raise BadRow(BAD_CONVERSATION, f"texts: expected a list of user and assistant, got {_kind(texts)}")
    if not texts:
        raise BadRow(EMPTY_TEXT, "texts: expected at least one turn, got none")
    return [message for turn in texts for message in _turn(turn.get("user"), turn.get("assistant"))]


def _turn(question: Any, answer: Any) -> list[Mapping[str, Any]]:
    question, answer = _text(question), _text(answer)
    for name, text in (("question", question), ("answer", answer)):
        if text is None or isinstance(text, float) or (isinstance(text, str) and not text.strip()):
            raise BadRow(EMPTY_TEXT, f"{name}: expected some text, got {text!r}")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _role(message: Mapping[str, Any]) -> Any:
    role = message.get("from") if message.get("role") is None else message["role"]
    return _SPEAKERS.get(str(role), role)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """One with a role and content, also of {"from", "value"}, and what stands beside these. ValueError for
    calls that are no JSON, and for tools and calls of others than the assistant."""
    content = message.get("value") if message.get("content") is None else message["content"]
    role = _role(message)
    if lost := _lost(message, ("tool_calls", "function_call") if role == "assistant" else ()):
        raise ValueError(f"{lost}: expected calls of the assistant, and a column of tools; got a {role}'s")
    beside = {key: message[key] for key in _BESIDE if message.get(key)}
    calls = _listed(beside.get("tool_calls") or message.get("function_call"))
    if role == "function_call":
        role, content, calls = "assistant", "", _listed(content)
    if calls:
        content, beside["tool_calls"] = content or "", [ToolCall.read(one) for one in calls]
    return {"role": role, "content": content, **beside}


def _lost(given: Mapping[str, Any], read: tuple[str, ...]) -> str | None:
    """A key with tools or calls that is not `read` here."""
    for key in _CALLS:
        with suppress(ValueError):  # a text about something else
            if key not in read and any(isinstance(one, Mapping) for one in _listed(given.get(key))):
                return key
    return None


def _listed(value: Any) -> list[Any]:
    """A list, also of one thing, and of JSON, whose nulls stay. ValueError for a text that is none."""
    try:
        value = json.loads(value) if isinstance(value, str) and value.strip() else _without_nulls(value)
    except ValueError:
        raise ValueError(f"tools or calls: expected a list or JSON of one, got {value[:80]!r}") from None
    return value if isinstance(value, list) else [value] if value else []


def _without_nulls(value: Any) -> Any:
    """Tables give each object of a column the keys that only others have, with null in them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list | tuple) else value


def _cut(text: str) -> list[dict[str, Any]]:
    """Parts of a text that marks where images and videos stand."""
    pieces = enumerate(_SHOWN_HERE.split(text))  # text, kind, text, ...
    return [{"type": one} if at % 2 else {"type": "text", "text": one} for at, one in pieces if one]


def _put_images_first(messages: list[dict[str, Any]], shown: list[tuple[str, Any]]) -> None:
    """All images and videos stand before the first text of the user."""
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is not None and shown:
        first["content"] = [*({"type": kind, kind: value} for kind, value in shown), *first["content"]]
    elif shown:
        raise BadRow(PLACEHOLDERS, f"{len(shown)} images and no message of a user to show them in")


def _check_texts(messages: list[dict[str, Any]]) -> None:
    """Every user's message has text or an image, every assistant's has text, and there is one."""
    for message in messages:
        parts, role = message["content"], message["role"]
        has_text = any(part["type"] == "text" and str(part["text"] or "").strip() for part in parts)
        has_image = role == "user" and any(part["type"] != "text" for part in parts)
        if role in ("user", "assistant") and not (has_text or has_image or message.get("tool_calls")):
            raise BadRow(EMPTY_TEXT, f"a message of the {role}: expected some text, got none")
    if all(message["role"] != "assistant" for message in messages):
        raise BadRow(EMPTY_TEXT, "expected an assistant's message to learn from, got none")


def _text(value: Any) -> Any:
    """A text column's value: numbers are written out, and the first of several answers counts. NaN and
    infinity stay floats: they are a gap in a table, not a text."""
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return str(value) if is_number else value


def _kind(value: Any) -> str:
    return "none" if value is None else type(value).__name__
