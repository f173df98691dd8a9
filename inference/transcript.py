"""A conversation written to a file: Markdown to read, or a line of JSON that `train.py --data` takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from data.files import expanded, naming
from data.inputs import TiledImage
from inference.checkpoint import RequestError
from inference.conversation import Conversation
from inference.results import to_json


def save_transcript(conversation: Conversation, path: Path) -> None:
    """Write the turns so far to a new file.

    Args:
        path: ending in .md or .jsonl.

    Raises:
        RequestError: another ending, a file that is there already, no name that a file can have, nothing to
            save.
        OSError: it cannot be written; nothing is left of it.
    """
    written = {".md": as_markdown, ".jsonl": as_json_line}.get(path.suffix)
    if written is None:
        raise RequestError(f"{path}: expected a name that ends in .md or .jsonl, got {path.suffix or 'none'}")
    if not conversation.turns:
        raise RequestError("nothing to save: the conversation is empty")
    # Names of files may hold bytes that are no text; they are written as \udc..: JSON reads that as it was.
    content = written(conversation).encode("utf-8", "backslashreplace")
    try:
        file = path.open("xb")
    except FileExistsError as error:
        raise RequestError(f"{path}: exists already, nothing was saved; choose another name") from error
    except ValueError as error:  # a NUL
        raise RequestError(f"{str(path)!r}: expected the name of a file, got one with {error}") from error
    try:
        with naming(path), file:
            file.write(content)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def as_json_line(conversation: Conversation) -> str:
    """The "messages" as the Hub's datasets have them, "images" in their order, and which model answered; a
    line for each of `Conversation.threads`."""
    return "".join(_row(messages, conversation.checkpoint.name) for messages in conversation.threads)


def _row(messages: list[dict[str, Any]], model: str) -> str:
    images: list[str] = []

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] != "image":
            return given
        images.append(place(given["image"]))
        return {"type": "image"}

    told = [message | {"content": [part(given) for given in message["content"]]} for message in messages]
    return to_json({"messages": told, "images": images, "model": model}) + "\n"


def as_markdown(conversation: Conversation) -> str:
    """Who said what, with the images; that an answer did not come to its own end."""
    blocks = [f"# A conversation with {conversation.checkpoint.name}"]
    if conversation.system:
        blocks.append(f"**System:** {conversation.system}")
    for turn in conversation.turns:
        blocks += [f"![{Path(image.name).name}](<{place(image)}>)" for image in turn.images]
        cut = "" if turn.answer.ended == "stop" else f" _(ended by: {turn.answer.ended})_"
        blocks += [f"**You:** {turn.question}", f"**Model:** {turn.answer.text}{cut}"]
    return "\n\n".join(blocks) + "\n"


def place(image: TiledImage) -> str:
    """Where an image is: its URL, or its path from anywhere."""
    path = expanded(image.name)
    return os.path.abspath(path) if os.path.isfile(path) else image.name
