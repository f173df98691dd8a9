"""The one place where images and videos of strangers are opened: their bytes as a request comes in, and their
pixels where its prompt is made, both within the same limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from data.conversation import GivenText
from data.errors import ImageError
from data.image_sizes import image_size
from data.images import NamedBytes, load_image, read_bytes
from data.processor import EncodedConversation, Processor
from data.visuals import HEAD, container_of
from generation.options import GenerationOptions
from inference.checkpoint import Checkpoint
from inference.coordinates import rescaled, spoken_form
from inference.thinking import Think
from web.errors import Refused
from web.guard import ApiLimits, Turns
from web.protocol import ChatRequest
from web.videos import open_apart

FETCHES = 8  # images of the internet that are fetched at a time


class Media:
    """Threads that read what `image_url` and `video_url` name. Clients take turns."""

    def __init__(self, limits: ApiLimits):
        self.most = limits.max_images
        self._image = replace(limits.image, allow_urls=limits.allow_urls, allow_paths=False)
        self._video = replace(self._image, max_bytes=limits.max_body)
        self._reading = ThreadPoolExecutor(2, thread_name_prefix="images")
        self._fetching = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetches")  # waits, mostly
        self._turns = Turns(2)

    async def read(self, asked: ChatRequest, client: str, take: Callable[[int], None]) -> list[NamedBytes]:
        """The bytes of a request's images, whose headers are within the limits, and of its videos, in their
        order. `take` is called with the number of those that the request did not bring. Raises Refused and
        ImageError."""
        parts = [part for message in asked.messages for part in message.parts if part.shown is not None]
        if len(parts) > self.most:
            message = f"messages: expected at most {self.most} images, got {len(parts)}"
            raise Refused(400, message, "messages")
        turn = self._turns.of(client)

        async def one(number: int, kind: str, url: str) -> NamedBytes:
            scheme, name = url[:8].lower(), f"{kind.removesuffix('_url')} {number}"
            pool = self._fetching if scheme.startswith(("http://", "https://")) else self._reading
            async with turn:
                data = await asyncio.get_running_loop().run_in_executor(pool, self._read, url, name)
            if not scheme.startswith("data:"):
                take(len(data))
            return data

        try:  # where one fails, the others end with it: they would take room that is never given back
            async with asyncio.TaskGroup() as group:
                reading = [
                    group.create_task(one(number, part.type, part.shown or ""))
                    for number, part in enumerate(parts, start=1)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in reading]

    def _read(self, url: str, name: str) -> NamedBytes:
        limits = self._image if name.startswith("image") else self._video
        if not url[:8].lower().startswith(("data:", "http://", "https://")):
            raise ImageError(f"{name}: expected a data: URL with the {name.split()[0]} itself")
        data = NamedBytes(read_bytes(url, limits, name))
        data.name = name
        if limits is self._image:
            image_size(data, limits, name)
        return data

    def open(self, data: NamedBytes, videos: int, processor: Processor, end: ExitStack, room: int = 1) -> Any:
        """The pixels of what `read` gave: an image; one of so many `videos` and PDFs, which share the seconds
        that decoding may take, and end with `end`; or a list of a PDF's pages, for which there is `room`.
        Raises ImageError."""
        if data.name.startswith("image"):
            return load_image(data, self._image)
        if data.name.startswith("video"):
            processor.check_video(data.name, animated=container_of(data[:HEAD]) is None)
        limits = replace(self._video, max_seconds=self._video.max_seconds / videos)
        clip = end.enter_context(open_apart(data, limits, data.name))
        if data.name.startswith("video"):
            return clip
        if clip.count > room:
            most = f"at most {room} pages ({self.most} images in a request)"
            raise ImageError(f"{data.name}: expected {most}, got {clip.count:,}; send fewer")
        return list(clip.read(range(clip.count)))


def prompt_of(
    asked: ChatRequest,
    media: Media,
    shown: Sequence[NamedBytes],
    options: GenerationOptions,
    checkpoint: Checkpoint,
) -> tuple[EncodedConversation, GenerationOptions]:
    """The prompt of a request, and the options of its answers. `shown`: what `media` has read for it.

    Earlier answers say pixels, as they were shown (see `PixelText`), and are read by the model in its own
    numbers. Tools are in the prompt unless the model did not learn to write what calls hold."""
    processor, think = checkpoint.processor, isinstance(options.constraint, Think)
    if think:
        processor.chat.check_thinking(asked.thinks_by)
    tools = asked.shown_tools if checkpoint.knows_tools else ()
    left, size, conversation = iter(shown), None, list[dict[str, Any]]()
    count, room = sum(not one.name.startswith("image") for one in shown), media.most - len(shown) + 1
    with ExitStack() as videos:
        for message in asked.messages:
            content: list[dict[str, Any]] = []
            for part in message.parts:
                kind = "image" if part.type == "file" else part.type.removesuffix("_url")
                value = part.text
                if part.shown is not None:
                    value = media.open(next(left), count, processor, videos, room)
                values = value if isinstance(value, list) else [value]
                room -= len(values) - 1
                content += [{"type": kind, kind: value} for value in values]
            if sizes := {part["image"].size for part in content if part["type"] == "image"}:
                size = sizes.pop() if len(sizes) == 1 else None
            elif message.role == "assistant" and size is not None:
                form = spoken_form(processor.coordinates, processor.images.plan(*size).sizes)
                if form is not None:
                    texts = [rescaled(form, one["text"], size, back=True) for one in content]
                    content = [{"type": "text", "text": text} for text in texts]
            conversation.append({
                "role": "system" if message.role == "developer" else message.role,
                "content": GivenText(content) if isinstance(message.content, GivenText) else content,
                "tool_calls": message.tool_calls,
                "tool_call_id": message.tool_call_id or "",
                "reasoning_content": (message.role == "assistant" and message.reasoning_content) or "",
                "name": (message.role == "tool" and message.name) or "",
            })  # fmt: skip
        return processor.encode_conversation(conversation, True, think=think, tools=tools), options
