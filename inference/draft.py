"""Questions whose answers are drafted from the whole image, while its tiles are still to be encoded.

    reply = next(ask_each(checkpoint, ["photo.jpg"], ["How many boats are there?"], options))
    for piece in reply.draft():
        print(piece, end="", flush=True)           # as grey text, say
    for number, piece in reply:                    # the answer, as without a draft
        ...
    reply.finish()["draft"]["accepted"]

See `generation.draft` for what a draft is and when there is one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from data.processor import EncodedConversation, Processor
from data.tiles import Visual
from generation.draft import DraftStream
from generation.options import CacheMemoryError, GenerationOptions
from generation.session import Session
from inference.answer import AnswerText, Reply, answer_text, encode
from inference.checkpoint import Checkpoint, PixelText, RequestError
from inference.terminal import GreyText, wrapped


def ask_each(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    questions: Sequence[str],
    options: GenerationOptions,
    system: str | None = None,
) -> Iterator[DraftedReply]:
    """`inference.answer.ask_each` with a draft before the first answer, where one helps; for the others the
    images are encoded. Raises RequestError where there is to be no cache."""
    began, processor = time.perf_counter(), checkpoint.processor
    session = Session(checkpoint.model, checkpoint.features, checkpoint.prefixes, slots=2)
    checkpoint.check_images(len(images))
    tiled = [processor.cut(image) for image in images]
    alone = wholes(processor, tiled)
    for question in questions:
        row = encode(checkpoint, tiled, question, system)
        short = encode(checkpoint, alone, question, system) if alone else None
        stream = start_drafted(checkpoint, row, short, options, session)
        row = replace(row, parts=None)
        yield DraftedReply(checkpoint, row, stream, options, time.perf_counter() - began)
        began = time.perf_counter()


def wholes(processor: Processor, images: Sequence[Visual]) -> list[Visual]:
    """Each image as if it were not cut; [] if none was cut, or one has no part that shows all of it."""
    found = [whole for image in images if (whole := processor.images.whole(image)) is not None]
    cut = any(len(image.parts) > 1 for image in images)
    return found if cut and len(found) == len(images) else []


def start_drafted(
    checkpoint: Checkpoint,
    row: EncodedConversation,
    short: EncodedConversation | None,
    options: GenerationOptions,
    session: Session,
) -> DraftStream:
    """`inference.answer.start` with a draft from a `short` prompt, whose images are `wholes`."""
    step = checkpoint.decode_step
    options = replace(options, stop_token_ids=checkpoint.stop_token_ids, decode_step=step)

    def inputs(row: EncodedConversation) -> dict[str, Any]:
        return checkpoint.processor.collate([replace(row, parts=None)]) | {"pixel_values": row.parts}

    try:
        alone = None if short is None else inputs(short)
        return session.draft_stream(inputs(row), alone, options)
    except CacheMemoryError:
        raise
    except ValueError as error:
        raise RequestError(error) from error


def draft_text(checkpoint: Checkpoint, stream: DraftStream, options: GenerationOptions) -> Iterator[str]:
    """The text of a draft while it is made, "" for a token that completes none."""
    text = AnswerText(checkpoint, options)
    for ids in stream.draft():
        yield text.put(int(ids))
    yield text.finish()


def draft_result(
    checkpoint: Checkpoint, stream: DraftStream, answer: Sequence[int], options: GenerationOptions
) -> dict[str, Any] | None:
    """What a result says about a draft: its text, how many tokens it has and with how many of them the answer
    begins, seconds of work until the first one and until the last. None where none was made."""
    if (draft := stream.drafted) is None:
        return None
    return {
        "text": answer_text(checkpoint, draft.token_ids, options),
        "tokens": len(draft.token_ids),
        "accepted": draft.accepted(answer),
        "first_token_seconds": draft.first_token_seconds,
        "draft_seconds": draft.seconds,
    }


@dataclass
class DraftedReply(Reply):
    """A reply that may have a draft, if `draft` is iterated first."""

    stream: DraftStream

    def draft(self) -> Iterator[str]:
        """The pieces of the draft's text; none where no draft helps."""
        return draft_text(self.checkpoint, self.stream, self.options)

    def after_draft(self, shown: bool, always: bool) -> Iterator[tuple[int, str]]:
        """`after_draft` with grey text if it is to be `shown`."""
        return after_draft(self, GreyText(shown), self.checkpoint.pixels(self.row), always)

    def finish(self) -> dict[str, Any]:
        """`Reply.finish`, and "draft", see `draft_result`."""
        result = super().finish()
        draft = draft_result(self.checkpoint, self.stream, result["token_ids"][0], self.options)
        return result | {"draft": draft}


# ------------------------------------------------------------------------------------------ the terminal
class MayHaveDraft(Protocol):
    """A `DraftedReply`, or the reply to a turn of a conversation."""

    def draft(self) -> Iterator[str]: ...
    def __iter__(self) -> Iterator[tuple[int, str]]: ...


def after_draft(
    reply: MayHaveDraft, grey: GreyText, pixels: PixelText, always: bool = False
) -> Iterator[tuple[int, str]]:
    """What iterating a reply gives, once its draft was made and shown; that goes when the answer comes.

    A draft that cannot be shown is not made, unless `always`. Ctrl-C leaves on the screen what is there.
    """
    if grey.possible or always:
        for piece in wrapped(pixels.each(reply.draft())):
            grey.put(piece)
    return _replacing(grey, reply)


def _replacing(grey: GreyText, reply: MayHaveDraft) -> Iterator[tuple[int, str]]:
    try:
        for number, piece in reply:
            grey.clear()
            yield number, piece
    except Exception:  # an answer that failed leaves no draft
        grey.clear()
        raise
    grey.clear()
