"""`POST /v1/attribution`, beside OpenAI's protocol: where the model looked for each word of an answer.

    {"model": ..., "messages": [one question with its images], "method": "attention" or "occlusion"}
    -> {"answer": ..., "image": a data: URL of the sheet that `inference.attribution.draw` draws}

The maps are computed in short steps between those of other answers.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from data.chat import Message
from data.errors import ImageError
from data.images import ImageLimits, load_image
from generation.options import GenerationOptions
from inference.answer import answer_text, encode
from inference.attribution import METHODS
from inference.attribution.attention import AttentionMaps, check_attention
from inference.attribution.draw import STEPS, draw_maps
from inference.attribution.occlusion import OcclusionMaps
from inference.attribution.teacher_forcing import ForcedAnswer, Word, answer_words
from inference.checkpoint import Checkpoint, RequestError
from web.engine import OF_STRANGERS, Prepared, Ticket
from web.errors import Refused

MAX_NEW_TOKENS = 64  # of an answer: every word gets a map


class Maps(NamedTuple):
    """The maps of an answer with its words."""

    answer: str
    found: AttentionMaps | OcclusionMaps
    words: tuple[Word, ...]


def read_method(asked: dict[str, Any]) -> str:
    """The method that a body names. Raises Refused."""
    if (method := asked.pop("method", METHODS[0])) not in METHODS:
        raise Refused(400, f"method: expected {' or '.join(METHODS)}, got {str(method)[:40]!r}", "method")
    return method


def question_of(messages: list[Message]) -> str:
    return "\n".join(str(value) for kind, value in messages[-1].parts if kind == "text")


def prepare(messages: list[Message], method: str, checkpoint: Checkpoint) -> Prepared:
    """The one question of a conversation, and after its answer the maps as `Piece.made`."""
    sources = [value for kind, value in messages[-1].parts if kind == "image"]
    question = question_of(messages)
    if len(messages) > 1 or not sources or len(messages[0].parts) > len(sources) + 1 or not question.strip():
        raise ImageError("messages: expected one message, of images and a question")
    if method == "occlusion" and len(sources) > 1:
        raise ImageError("messages: expected one image, as its windows are greyed one after another")
    if method == "attention":
        check_attention(checkpoint)
    limits = replace(OF_STRANGERS, max_bytes=ImageLimits.max_bytes, max_pixels=ImageLimits.max_pixels)
    images = [load_image(source, limits) for source in sources]
    tiled = [one for image in images for one in checkpoint.processor.visuals(image)]
    row = encode(checkpoint, tiled, question)

    def steps(ids: list[int]) -> Iterator[Maps | None]:
        words = tuple(answer_words(checkpoint, ids))
        if not words:
            raise RequestError("the answer has no word to draw a map for")
        found = yield from STEPS[method](ForcedAnswer(checkpoint, images, question, ids, tiled=tiled))
        yield Maps(checkpoint.pixels(row).whole(answer_text(checkpoint, ids)), found, words)

    return Prepared(row, GenerationOptions(max_new_tokens=MAX_NEW_TOKENS), then=steps)


async def drawn(ticket: Ticket, question: str) -> dict[str, str]:
    """The answer and the sheet of its maps. Drawing takes a second: in another thread than the models'."""

    def sheet(maps: Maps) -> str:
        draw_maps(maps.found, maps.words, question).save(png := io.BytesIO(), "PNG")
        return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"

    maps = [piece.made async for piece in ticket if piece.made is not None][-1]
    return {"answer": maps.answer, "image": await asyncio.to_thread(sheet, maps)}
