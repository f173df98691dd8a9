"""`POST /v1/attribution`, beside OpenAI's protocol: where the model looked for each word of an answer.

    {"model": ..., "messages": [one question with its images], "method": "attention" or "occlusion"}
    -> {"answer": ..., "image": a data: URL of the sheet that `inference.attribution.draw` draws}

The maps are computed in short steps between those of other answers.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from data.errors import ImageError
from data.images import NamedBytes
from data.processor import EncodedConversation
from generation.options import GenerationOptions
from inference.answer import encode, read_answer
from inference.attribution import METHODS
from inference.attribution.attention import check_attention
from inference.attribution.draw import STEPS, draw_maps
from inference.attribution.teacher_forcing import ForcedAnswer, answer_words
from inference.checkpoint import Checkpoint, RequestError
from web.engine import Ticket
from web.errors import Refused
from web.media import Media
from web.protocol import ChatRequest

MAX_NEW_TOKENS = 64  # of an answer: every word gets a map


def read_method(asked: dict[str, Any]) -> str:
    """The method that a body names. Raises Refused."""
    if (method := asked.pop("method", METHODS[0])) not in METHODS:
        raise Refused(400, f"method: expected {' or '.join(METHODS)}, got {str(method)[:40]!r}", "method")
    return method


class Maps:
    """The maps of one question, whose images are `shown`: what a `Ticket` prepares, and does after its
    answer. Raises ImageError for what is not one question with its images."""

    def __init__(self, asked: ChatRequest, media: Media, shown: Sequence[NamedBytes], method: str):
        message = asked.messages[-1]
        self._question = "\n".join(part.text for part in message.parts if part.text)
        one = len(asked.messages) == 1 and len(message.parts) <= len(shown) + 1 and self._question.strip()
        if not (one and shown) or any(part.video_url for part in message.parts):
            raise ImageError("messages: expected one message, of images and a question")
        if method == "occlusion" and len(shown) > 1:
            raise ImageError("messages: expected one image, as its windows are greyed one after another")
        self._media, self._shown, self._method = media, shown, method

    def prepare(self, checkpoint: Checkpoint) -> tuple[EncodedConversation, GenerationOptions]:
        if self._method == "attention":
            check_attention(checkpoint)
        with ExitStack() as stack:
            opened = (self._media.open(one, 0, checkpoint.processor, stack) for one in self._shown)
            self._images = list(opened)
        self._tiled = [one for image in self._images for one in checkpoint.processor.visuals(image)]
        self._row = encode(checkpoint, self._tiled, self._question)
        return self._row, GenerationOptions(max_new_tokens=MAX_NEW_TOKENS)

    def steps(self, checkpoint: Checkpoint, ids: list[int]) -> Iterator[Any]:
        """None after each step, and at last the answer with its maps and words."""
        if not (words := tuple(answer_words(checkpoint, ids))):
            raise RequestError("the answer has no word to draw a map for")
        forced = ForcedAnswer(checkpoint, self._images, self._question, ids, tiled=self._tiled)
        maps = yield from STEPS[self._method](forced)
        _, text = read_answer(checkpoint, ids, GenerationOptions())
        yield checkpoint.pixels(self._row).whole(text), maps, words

    async def drawn(self, ticket: Ticket) -> dict[str, str]:
        """The answer and the sheet of its maps, which takes a second to draw: not in the model's thread."""
        answer, maps, words = [piece.made async for piece in ticket if piece.made is not None][-1]

        def sheet() -> str:
            draw_maps(maps, words, self._question).save(png := io.BytesIO(), "PNG")
            return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"

        return {"answer": answer, "image": await asyncio.to_thread(sheet)}
