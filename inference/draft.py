"""Questions whose answers are drafted from a small picture, while the image is still to be encoded.

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
from dataclasses import replace
from typing import Any

from data.processor import EncodedConversation, Processor
from data.tiles import Visual
from generation.decoding import GenerationOutput
from generation.draft import DraftStream
from generation.options import CacheMemoryError, GenerationOptions
from generation.session import Session
from inference.answer import AnswerText, Reply, answer_text, encode
from inference.checkpoint import Checkpoint, RequestError
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
    tiled = [visual for image in images for visual in processor.visuals(image)]
    alone = wholes(processor, tiled)
    for question in questions:
        row = encode(checkpoint, tiled, question, system)
        short = encode(checkpoint, alone, question, system) if alone else None
        stream = start_drafted(checkpoint, row, short, options, session)
        row = replace(row, parts=None)
        reply = DraftedReply(checkpoint, row, stream, options, time.perf_counter() - began)
        reply.short = short and replace(short, parts=None)
        yield reply
        began = time.perf_counter()


def wholes(processor: Processor, images: Sequence[Visual]) -> list[Visual]:
    """A small picture of each image; [] if none of them is smaller, or an image has none."""
    found = [whole for image in images if (whole := processor.images.whole(image)) is not None]
    smaller = any(whole is not image for whole, image in zip(found, images))
    return found if smaller and len(found) == len(images) else []


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


class DraftedReply(Reply):
    """A reply that may have a draft, if `draft` is iterated first: of the `short` prompt."""

    short: EncodedConversation | None = None

    def draft(self) -> Iterator[str]:
        """The pieces of the draft's text, "" for a token that completes none; no pieces where no draft helps,
        or the answer has begun."""
        if isinstance(self.stream, DraftStream):
            self._times = self._times or [time.perf_counter()]
            text = AnswerText(self.checkpoint, self.options)
            for ids in self.stream.draft():
                yield text.put(int(ids))
            yield text.finish()

    def after_draft(self, grey: GreyText, always: bool = False) -> Iterator[tuple[int, str]]:
        """What iterating gives, once the draft was made and shown; that goes when the answer comes.

        A draft that cannot be shown is not made, unless `always`. Ctrl-C leaves on the screen what is there.
        """
        if grey.possible or always:
            for piece in wrapped(self.checkpoint.pixels(self.short or self.row).each(self.draft())):
                grey.put(piece)

        def replacing() -> Iterator[tuple[int, str]]:
            try:
                for number, piece in self:
                    grey.clear()
                    yield number, piece
            except Exception:  # an answer that failed leaves no draft
                grey.clear()
                raise
            grey.clear()

        return replacing()

    def describe(self, output: GenerationOutput | None) -> dict[str, Any]:
        """`Reply.describe`, and "draft": its text, how many tokens it has and with how many of them the
        answer begins, seconds of work until the first one and until the last. None where none was made."""
        result = super().describe(output)
        if isinstance(self.stream, DraftStream):
            self.stream.end_draft()
            draft = self.stream.drafted
            result["draft"] = draft and {
                "text": answer_text(self.checkpoint, draft.token_ids, self.options),
                "tokens": len(draft.token_ids),
                "accepted": draft.accepted(self.ids[0]),
                "first_token_seconds": draft.first_token_seconds,
                "draft_seconds": draft.seconds,
            }
        return result
