"""A conversation written to a file: Markdown to read, or a line of JSON that `train.py --data` takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from data.inputs import TiledPicture
from inference.checkpoint import RequestError
from inference.conversation import Conversation
from inference.results import to_json


def save_transcript(conversation: Conversation, path: Path) -> None:
    """Write the turns so far to a new file.

    Args:
        path: ending in .md or .jsonl.

    Raises:
        RequestError: another ending, a file that is there already, nothing to save.
        OSError: it cannot be written.
    """
    written = {".md": as_markdown, ".jsonl": as_json_line}.get(path.suffix)
    if written is None:
        raise RequestError(f"{path}: expected a name that ends in .md or .jsonl, got {path.suffix or 'none'}")
    if not conversation.turns:
        raise RequestError("nothing to save: the conversation is empty")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(written(conversation))
    except FileExistsError as error:
        raise RequestError(f"{path}: exists already, nothing was saved; choose another name") from error


def as_json_line(conversation: Conversation) -> str:
    """The "messages" as the Hub's datasets have them, "images" in their order, and which model answered."""
    images: list[str] = []

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] != "image":
            return given
        images.append(place(given["image"]))
        return {"type": "image"}

    messages = [
        message | {"content": [part(given) for given in message["content"]]}
        for message in conversation.messages
    ]
    return to_json({"messages": messages, "images": images, "model": conversation.checkpoint.name}) + "\n"


def as_markdown(conversation: Conversation) -> str:
    """Who said what, with the pictures; that an answer did not come to its own end."""
    blocks = [f"# A conversation with {conversation.checkpoint.name}"]
    if conversation.system:
        blocks.append(f"**System:** {conversation.system}")
    for turn in conversation.turns:
        blocks += [f"![{Path(picture.name).name}](<{place(picture)}>)" for picture in turn.pictures]
        cut = "" if turn.answer.ended == "stop" else f" _(ended by: {turn.answer.ended})_"
        blocks += [f"**You:** {turn.question}", f"**Model:** {turn.answer.text}{cut}"]
    return "\n\n".join(blocks) + "\n"


def place(picture: TiledPicture) -> str:
    """Where a picture is: its URL, or its path from anywhere."""
    path = Path(picture.name).expanduser()
    return os.path.abspath(path) if path.is_file() else picture.name
