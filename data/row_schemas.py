"""Rows as the Hub lays them out → conversations in the Hub's form, pictures in their places.

| columns | known from |
|---|---|
| `messages`, `images` | TRL; {"type": "image"} parts take `images` in order |
| `prompt` and `completion`, `images` | TRL; messages as above, or what a user and an assistant say as text |
| `texts` of {"user", "assistant"}, `images`, rating columns | the_cauldron, FineVision |
| `question`, `answer`, `image` or `images` | everything else |

A row without pictures is text; where the first rows have none at all, that must be meant (`find_images`).
Numbers are written out where a text is wanted; NaN and infinity are none.
"""

from __future__ import annotations

import math
import mimetypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import BadRow, DatasetError

BROKEN_IMAGE, EMPTY_TEXT, BAD_CONVERSATION = "broken image", "empty text", "bad conversation"
PLACEHOLDERS, TOO_MANY_TILES, TOO_LONG = "images and placeholders differ", "too many tiles", "too long"
BAD_RATING, OUTSIDE = "bad rating", "image outside of the dataset's folder"

COLUMNS = ("messages", "prompt", "completion", "texts", "question", "answer", "images", "image")
_LONGEST_NAME = 4_096  # characters of a path or URL
_NEEDED = (("messages",), ("prompt", "completion"), ("texts",), ("question", "answer"))
_SAID_BY = {"prompt": "user", "completion": "assistant"}  # where the column is text


@dataclass(frozen=True)
class Layout:
    """How the rows of one dataset are read.

    Args:
        kind: the columns that hold the text, one of `_NEEDED`.
        columns: our name of a column → the dataset's, where they differ.
        min_ratings: rating column → the least that is trained on. A column with one number a row leaves out
            rows; one with a number for each of `texts` leaves out turns. What has no rating is kept.
        folder: where relative paths of pictures start; None refuses paths.
        allow_urls: pictures may be fetched from the network.
        allow_outside: paths may leave `folder`.
    """

    kind: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    min_ratings: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None
    allow_urls: bool = False
    allow_outside: bool = False

    def conversation(self, row: Any) -> list[dict[str, Any]] | None:
        """A row's messages, each with a list of parts; None where its ratings are too low.

        Raises:
            BadRow: the row cannot be used.
        """
        if not isinstance(row, Mapping):  # a line that could not be read
            raise BadRow(BAD_CONVERSATION, f"expected an object with columns, got {str(row)[:200]}")
        kept = self._turns_kept(row)
        if kept is None:
            return None
        images = self.pictures(row)
        if self.kind == ("texts",):
            messages = _in_front(_turns(self._get(row, "texts"), kept), images)
        elif self.kind == ("question", "answer"):
            question, answer = _text(self._get(row, "question")), _text(self._get(row, "answer"))
            _check_turn(question, answer)
            messages = _in_front([_said("user", question), _said("assistant", answer)], images)
        else:
            messages = self._messages(row, images)
        _check_texts(messages)
        return messages

    def images(self, row: Any) -> list[Any] | None:
        """What `load_image` takes, for each picture of a row's messages; None where its ratings are too low.

        Raises:
            BadRow: the row cannot be used.
        """
        messages = self.conversation(row)
        if messages is None:
            return None
        parts = (part for message in messages for part in message["content"])
        return [part["image"] for part in parts if part["type"] == "image"]

    def pictures(self, row: Mapping[str, Any]) -> list[Any]:
        """What `load_image` takes, for each picture in a row's picture columns.

        Raises:
            BadRow: one is missing, or lies where this dataset may not reach.
        """
        return [picture for value in self._pictures(row) for picture in self._source(value)]

    def _get(self, row: Mapping[str, Any], name: str) -> Any:
        return row.get(self.columns.get(name, name))

    # --------------------------------------------------------------------------------------- ratings
    def _turns_kept(self, row: Mapping[str, Any]) -> list[bool] | None:
        """Which of a row's turns have the ratings they need, None where the row has not."""
        texts = self._get(row, "texts") if self.kind == ("texts",) else None
        kept = [True] * (len(texts) if isinstance(texts, Sequence) else 0)
        for column, least in self.min_ratings.items():
            rating = row.get(column)
            if isinstance(rating, Sequence) and not isinstance(rating, str) and len(rating) == len(kept):
                kept = [keep and _reaches(value, least) for keep, value in zip(kept, rating)]
            else:
                values = rating if isinstance(rating, list | tuple) else [rating]
                if not all(_reaches(value, least) for value in values):
                    return None
        return kept if any(kept) or not kept else None

    # -------------------------------------------------------------------------------------- pictures
    def _pictures(self, row: Mapping[str, Any]) -> list[Any]:
        for name in ("images", "image"):
            value = self._get(row, name)
            if value is not None:
                return list(value) if isinstance(value, list | tuple) else [value]
        return []

    def _source(self, value: Any) -> Iterator[Any]:
        """What `load_image` takes, from what a row holds.

        Raises:
            BadRow: the picture is missing, or lies where this dataset may not reach.
        """
        if isinstance(value, Mapping):
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if value is None:
            raise BadRow(BROKEN_IMAGE, "expected a picture, got none")
        if not isinstance(value, str | os.PathLike):
            yield value
            return
        text = os.fspath(value)
        if text.startswith(("http://", "https://")):
            if not self.allow_urls:
                raise BadRow(
                    BROKEN_IMAGE, f"{text[:200]!r}: pictures are not fetched from URLs; set allow_urls"
                )
            yield text
        elif text.startswith("data:"):
            yield text
        elif self.folder is None:
            raise BadRow(BROKEN_IMAGE, f"{text[:200]!r}: expected the picture itself, got a path")
        else:
            yield self._path(text, self.folder)

    def _path(self, text: str, folder: Path) -> Path:
        """Where a row's path leads, links followed: rows come from strangers, and what a path names is shown
        to a model and kept in reports."""
        try:
            path = (folder / text).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # NUL in it, or links in a circle
            raise BadRow(
                BROKEN_IMAGE, f"{text[:200]!r}: expected a path, got {type(error).__name__}"
            ) from error
        if not (self.allow_outside or path.is_relative_to(_own(folder))):
            raise BadRow(
                OUTSIDE,
                f"{text[:200]!r} is outside of the dataset's folder: move the image into it, or set "
                "allow_outside if you trust these rows",
            )
        return path

    # -------------------------------------------------------------------------------------- messages
    def _messages(self, row: Mapping[str, Any], images: list[Any]) -> list[dict[str, Any]]:
        """Chat messages, their {"type": "image"} parts filled from `images` in order."""
        given: list[Any] = []
        for name in self.kind:
            value = self._get(row, name)
            if name in _SAID_BY and isinstance(value, str | int | float):
                value = {"role": _SAID_BY[name], "content": _text(value)}
            if isinstance(value, Mapping):
                value = [value]
            if not isinstance(value, Sequence) or isinstance(value, str):
                either = "text or a list" if name in _SAID_BY else "a list"
                raise BadRow(BAD_CONVERSATION, f"{name}: expected {either} of messages, got {_kind(value)}")
            given += value
        if not all(isinstance(message, Mapping) for message in given):
            raise BadRow(BAD_CONVERSATION, "expected messages with role and content")
        if images and all(isinstance(message.get("content"), str) for message in given):
            return _in_front([_said(m.get("role"), m["content"]) for m in given], images)
        waiting = iter(images)
        messages = [
            {"role": message.get("role"), "content": list(self._parts(message.get("content"), waiting))}
            for message in given
        ]
        left = sum(1 for _ in waiting)
        if left:
            raise BadRow(PLACEHOLDERS, f"{len(images)} pictures for {len(images) - left} image parts")
        return messages

    def _parts(self, content: Any, waiting: Iterator[Any]) -> Iterator[dict[str, Any]]:
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
            raise BadRow(BAD_CONVERSATION, f"expected content as text or parts, got {_kind(content)}")
        for part in content:
            if part.get("type") == "text":
                yield {"type": "text", "text": part.get("text")}
            elif part.get("type") in ("image", "image_url"):
                held = [part[key] for key in ("image", "url", "path", "base64") if part.get(key) is not None]
                source = next(self._source(held[0])) if held else next(waiting, None)
                if source is None:
                    raise BadRow(PLACEHOLDERS, "more image parts than pictures")
                yield {"type": "image", "image": source}
            else:
                raise BadRow(BAD_CONVERSATION, f"expected a text or image part, got {part.get('type')!r}")


def find_layout(columns: Sequence[str], renamed: Mapping[str, str], where: str) -> tuple[str, ...]:
    """Which columns of a dataset hold its text.

    Raises:
        DatasetError: none that are known; names those there are.
    """
    unknown = sorted(set(renamed) - set(COLUMNS))
    if unknown:
        raise DatasetError(
            f"{where}: columns: expected names out of {', '.join(COLUMNS)}, got {', '.join(unknown)}"
        )
    absent = sorted(set(renamed.values()) - set(columns))
    if absent:
        raise DatasetError(f"{where}: no column {', '.join(absent)}; it has {', '.join(columns)}")
    have = set(renamed) | (set(columns) - set(renamed.values()))
    for needed in _NEEDED:
        if have.issuperset(needed):
            return needed
    raise DatasetError(
        f"{where}: expected a column messages, or texts, or question and answer; it has "
        f"{', '.join(columns) or 'none'}: name yours under columns"
    )


def find_images(
    rows: Iterable[Any],
    images_of: Callable[[Any], Sequence[Any] | None],
    layout: Layout,
    where: str,
    how: str,
) -> bool:
    """Whether one of these rows has an image, as a model that sees expects. True, too, where no row can be
    used for another reason, which is counted and said elsewhere.

    Args:
        rows: the first ones.
        images_of: a row -> its images, None where it is filtered; may raise BadRow.
        how: see `no_images`.

    Raises:
        DatasetError: none has, and a column that is not read looks like images, or their images are refused.
    """
    read = {layout.columns.get(name, name) for name in (*layout.kind, "images", "image")}
    usable, refused = 0, ""
    columns, alike = dict[str, None](), dict[str, None]()
    for row in rows:
        if not isinstance(row, Mapping):  # a line that could not be read
            continue
        try:
            images = images_of(row)
        except BadRow as error:
            if error.reason in (BROKEN_IMAGE, OUTSIDE, PLACEHOLDERS):
                refused = refused or str(error)
            images = None
        if images:
            return True
        usable += images is not None
        for name, value in row.items():
            columns[name] = None
            if name not in read and looks_like_image(value):
                alike[name] = None
    if alike:
        raise no_images(where, columns, how, alike)
    if refused:
        raise DatasetError(f"{where}: none of the first rows has an image that can be used: {refused}")
    return not usable


def no_images(where: str, columns: Iterable[str], how: str, alike: Iterable[str] = ()) -> DatasetError:
    """The first rows have none.

    Args:
        how: a column is named, with COLUMN for its name, or text alone is allowed.
        alike: columns that look like images.
    """
    seen = list(alike)
    looks = f", of which {' and '.join(seen)} may hold images" if seen else ""
    return DatasetError(
        f"{where}: the first rows have no image in a column image or images; their columns are "
        f"{', '.join(columns)}{looks}: write {how.replace('COLUMN', (seen or ['COLUMN'])[0])}"
    )


def looks_like_image(value: Any) -> bool:
    """Whether a column's value may be an image: bytes, their place, or the name of a file of a picture."""
    if isinstance(value, list | tuple):
        return bool(value) and looks_like_image(value[0])
    if isinstance(value, Mapping):
        held = value.get("path") if value.get("path") is not None else value.get("bytes")
        return looks_like_image(held)
    if isinstance(value, str):
        kind, _ = mimetypes.guess_type(value[:_LONGEST_NAME].partition("?")[0], strict=False)
        return (kind or "").startswith("image/") and "\n" not in value
    return isinstance(value, bytes) or (hasattr(value, "size") and hasattr(value, "mode"))


def check_ratings(columns: Sequence[str], min_ratings: Mapping[str, float], where: str) -> None:
    """Raises DatasetError unless every rating column exists."""
    absent = sorted(set(min_ratings) - set(columns))
    if absent:
        raise DatasetError(
            f"{where}: no rating column {', '.join(absent)}; it has {', '.join(columns)}: correct min_ratings"
        )


def _own(folder: Path) -> Path:
    """The folder of a dataset's files. Those of a snapshot in the Hub's cache are links to its blobs."""
    folder = folder.resolve()
    for parent in folder.parents:
        if parent.name == "snapshots" and (parent.parent / "blobs").is_dir():
            return parent.parent
    return folder


def _turns(texts: Any, kept: list[bool]) -> list[dict[str, Any]]:
    if not isinstance(texts, Sequence) or not all(isinstance(turn, Mapping) for turn in texts):
        raise BadRow(BAD_CONVERSATION, f"texts: expected a list of user and assistant, got {_kind(texts)}")
    if not texts:
        raise BadRow(EMPTY_TEXT, "texts: expected at least one turn, got none")
    messages = []
    for turn in (turn for turn, keep in zip(texts, kept) if keep):
        user, assistant = _text(turn.get("user")), _text(turn.get("assistant"))
        _check_turn(user, assistant)
        messages += [_said("user", user), _said("assistant", assistant)]
    return messages


def _check_turn(user: Any, assistant: Any) -> None:
    for name, text in (("question", user), ("answer", assistant)):
        if text is None or isinstance(text, float) or (isinstance(text, str) and not text.strip()):
            raise BadRow(EMPTY_TEXT, f"{name}: expected some text, got {text!r}")


def _check_texts(messages: list[dict[str, Any]]) -> None:
    """A user says or shows something, an assistant says something, and there is an assistant."""
    answers = 0
    for message in messages:
        parts, role = message["content"], message["role"]
        said = any(part["type"] == "text" and str(part["text"] or "").strip() for part in parts)
        shown = role == "user" and any(part["type"] == "image" for part in parts)
        if role in ("user", "assistant") and not (said or shown):
            raise BadRow(EMPTY_TEXT, f"a message of the {role}: expected some text, got none")
        answers += role == "assistant"
    if not answers:
        raise BadRow(EMPTY_TEXT, "expected an assistant's message to learn from, got none")


def _in_front(messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """All pictures in front of the first thing the user says."""
    first = next((message for message in messages if message["role"] == "user"), None)
    if images and first is None:
        raise BadRow(PLACEHOLDERS, f"{len(images)} pictures and no message of a user to show them in")
    if images and first is not None:
        first["content"] = [*({"type": "image", "image": image} for image in images), *first["content"]]
    return messages


def _said(role: Any, text: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _text(value: Any) -> Any:
    """A text column's value: numbers are written out, of several answers the first counts.

    Of floats only NaN and infinities come back as they are: a gap in a table, and no answer.
    """
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return str(value) if is_number else value


def _reaches(rating: Any, least: float) -> bool:
    """Raises BadRow for a rating that is no number."""
    if rating is None:
        return True
    if not isinstance(rating, int | float):
        raise BadRow(BAD_RATING, f"expected a rating as a number, got {_kind(rating)}")
    return rating >= least


def _kind(value: Any) -> str:
    return "none" if value is None else type(value).__name__
