"""`POST /v1/attribution`, beside OpenAI's protocol: where the model looked for each word of an answer.

    {"model": ..., "messages": [one question with its images]}
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
from inference.attribution.attention import answer_words, attention_steps, check_attention
from inference.attribution.draw import draw_maps
from inference.checkpoint import Checkpoint, RequestError
from web.engine import Ticket
from web.media import Media
from web.protocol import ChatRequest

MAX_NEW_TOKENS = 64  # of an answer: every word gets a map


class Maps:
    """The maps of one question, whose images are `shown`: what a `Ticket` prepares, and does after its
    answer. Raises ImageError for what is not one question with its images."""

    def __init__(self, asked: ChatRequest, media: Media, shown: Sequence[NamedBytes]):
        message = asked.messages[-1]
        self._question = "\n".join(part.text for part in message.parts if part.text)
        one = len(asked.messages) == 1 and len(message.parts) <= len(shown) + 1 and self._question.strip()
        if not (one and shown) or any(part.video_url or part.file for part in message.parts):
            raise ImageError("messages: expected one message, of images and a question")
        self._media, self._shown = media, shown

    def prepare(self, checkpoint: Checkpoint) -> tuple[EncodedConversation, GenerationOptions]:
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
        asked = checkpoint, self._images, self._question, ids
        maps = yield from attention_steps(*asked, tiled=self._tiled)
        _, text = read_answer(checkpoint, ids, GenerationOptions())
        yield checkpoint.pixels(self._row).whole(text), maps, words

    async def drawn(self, ticket: Ticket) -> dict[str, str]:
        """The answer and the sheet of its maps, which takes a second to draw: not in the model's thread."""
        answer, maps, words = [piece.made async for piece in ticket if piece.made is not None][-1]

        def sheet() -> str:
            draw_maps(maps, words, self._question).save(png := io.BytesIO(), "PNG")
            return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"

        return {"answer": answer, "image": await asyncio.to_thread(sheet)}
