"""The prompt of a request: its messages as the model's processor takes a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from data.conversation import GivenText
from data.images import NamedBytes
from data.processor import EncodedConversation
from generation.options import GenerationOptions
from inference.checkpoint import Checkpoint
from inference.coordinates import spoken_form
from inference.pixels import rescaled
from inference.thinking import Think
from web.media import Media
from web.protocol import ChatRequest


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
    count = sum(one.name.startswith("video") for one in shown)
    with ExitStack() as videos:
        for message in asked.messages:
            content: list[dict[str, Any]] = []
            for part in message.parts:
                kind = part.type.removesuffix("_url")
                value = (
                    media.open(next(left), count, processor, videos) if part.shown is not None else part.text
                )
                content.append({"type": kind, kind: value})
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
