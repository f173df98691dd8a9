"""A first answer from a small picture of each image, while the images are still to be encoded.

    for reply in ask_each(checkpoint, [image], ["What is this?"], options):
        for piece in reply.draft():                   # as soon as the small picture is encoded
            ...
        for number, piece in reply:                   # then the answer
            ...

The two are ordinary requests to the same weights, one after the other. An image that is cut into tiles is
among them once more, as a whole: the short prompt has that tile only. Where images are never cut, it has the
same picture of fewer pixels. A tile that the draft has encoded is not encoded again.

A draft is made where it can help: of an answer whose small picture is not encoded yet, nor is the rest, and
whose prompt is much shorter with the small picture alone. It ends when it has taken a small share of the time
that the rest will take, which is estimated from the time that its own first token took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from data.processor import EncodedConversation, Processor
from data.tiles import Visual
from generation.draws import make_seeds
from generation.features import FeatureCache, digests_of
from generation.options import GenerationOptions
from generation.output import GenerationOutput
from generation.protocol import VisionLanguage
from generation.session import Session
from inference.answer import Reply, encode, inputs_of, read_answer, start
from inference.answer_text import AnswerText
from inference.checkpoint import Checkpoint
from inference.forms import for_choices
from inference.printing import Aside
from inference.thinking import Think

SHARE = 0.025  # of the time that the rest is expected to take: a draft goes on for so long
LEAST_WAIT = 0.3  # seconds that the rest is expected to take at least: less is no time to read in
MOST_PROMPT = 1 / 3  # length of the short prompt, as a share of the full one's


class Draft:
    """The ids of a draft: iterate once, before the answer. None come where no draft helps.

    token_ids: those so far. first_token_seconds, seconds: of work until the first one, and for all of them.
    over: set by whoever begins the answer, after which no more are made.
    """

    def __init__(
        self,
        session: Session,
        inputs: Mapping[str, Any],
        short_inputs: Mapping[str, Any] | None,
        options: GenerationOptions,
    ):
        self.token_ids: list[int] = []
        self.first_token_seconds = self.seconds = 0.0
        self.over = short_inputs is None or options.num_return_sequences > 1
        self._session, self._short = session, short_inputs or {}
        self._options = replace(options, confidence=False, logprobs=None, lookup="off")
        known = session.model, session.feature_cache
        self._left = 0.0 if self.over else parts_left(*known, inputs, self._short)

    def __iter__(self) -> Iterator[int]:
        if self.over or not self._left:
            return
        most, began = 0.0, time.perf_counter()
        for ids in self._session.generate_stream(**self._short, options=self._options):
            self.seconds += time.perf_counter() - began
            if not self.token_ids:
                self.first_token_seconds, wait = self.seconds, self._left * self.seconds
                if wait < LEAST_WAIT:
                    break
                most = self.seconds + SHARE * wait
            self.token_ids.append(int(ids))
            yield self.token_ids[-1]
            if self.over or self.seconds >= most:
                break
            began = time.perf_counter()
        self.over = True

    def accepted(self, answer: Sequence[int]) -> int:
        """With how many of its tokens this answer begins."""
        most = min(len(self.token_ids), len(answer))
        return next((n for n in range(most) if self.token_ids[n] != answer[n]), most)


class DraftedReply(Reply):
    """A reply that may have a draft.

    drafted: that, None where none was asked for; `short` is its prompt, without tiles.
    """

    drafted: Draft | None = None
    short: EncodedConversation | None = None

    def with_draft(
        self, inputs: Mapping[str, Any], short: EncodedConversation | None, session: Session
    ) -> DraftedReply:
        """This reply, with a draft of its answer to the `short` prompt; without one it has no token."""
        checkpoint, small = self.checkpoint, None
        options = for_choices(self.options, checkpoint.context - len(self.row.input_ids))
        options = replace(
            options, stop_token_ids=checkpoint.stop_token_ids, decode_step=checkpoint.decode_step
        )
        if short is not None:
            small, self.short = inputs_of(checkpoint, short), replace(short, parts=None)
        self.drafted = Draft(session, inputs, small, options)
        return self

    def _run(self) -> Generator[tuple[int, str], None, None]:
        if self.drafted is not None:
            self.drafted.over = True
        yield from super()._run()

    def draft(self) -> Iterator[str]:
        """The pieces of the draft's text, if this is iterated first: "" for a token that completes none; no
        pieces where no draft helps, or the answer has begun."""
        if self.drafted is not None and not self.drafted.over:
            self._times = self._times or [time.perf_counter()]
            text = AnswerText(self.checkpoint, self.options)
            for token_id in self.drafted:
                yield text.put(token_id)
            yield text.finish()

    def after_draft(self, shown: bool, always: bool = False) -> Iterator[tuple[int, str]]:
        """The pieces of the answer, after the draft was made, which is `shown` if stderr is a terminal. One
        that is not is not made, unless `always`."""
        aside = Aside("draft")
        if (shown := shown and sys.stderr.isatty()) or always:
            try:
                for piece in self.checkpoint.pixels(self.short or self.row).each(self.draft()):
                    aside.put(piece * shown)
            finally:
                aside.end()
        return iter(self)

    def describe(self, output: GenerationOutput | None) -> dict[str, Any]:
        """The fields of `Reply.finish`. Where there was to be a "draft": its text, how many tokens it has and
        with how many of them the answer begins, seconds of work until the first one and until the last; None
        if none was made."""
        if (made := self.drafted) is None:
            return super().describe(output)
        made.over = True
        described = {
            "text": read_answer(self.checkpoint, made.token_ids, self.options)[1],
            "tokens": len(made.token_ids),
            "accepted": made.accepted(self.ids[0]),
            "first_token_seconds": made.first_token_seconds,
            "draft_seconds": made.seconds,
        }
        return super().describe(output) | {"draft": described if made.token_ids else None}


def ask_each(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    questions: Sequence[str],
    options: GenerationOptions,
    system: str | None = None,
) -> Iterator[DraftedReply]:
    """`inference.answer.ask_each` with drafts, where one helps."""
    images = [visual for image in images for visual in checkpoint.processor.visuals(image)]
    session = Session(checkpoint.model, checkpoint.features, checkpoint.prefixes)
    small, options = wholes(checkpoint.processor, images), with_seed(options)
    for question in questions:
        began = time.perf_counter()
        checkpoint.check_images(len(images))
        row = encode(checkpoint, images, question, system, isinstance(options.constraint, Think))
        short = encode(checkpoint, small, question, system) if small else None
        stream, inputs = start(checkpoint, row, options, session), inputs_of(checkpoint, row)
        reply = DraftedReply(checkpoint, row, stream, options, time.perf_counter() - began)
        yield reply.with_draft(inputs, short, session)


def wholes(processor: Processor, images: Sequence[Visual]) -> list[Visual]:
    """A small picture of each image; [] if none of them is smaller, or an image has none."""
    found = [whole for image in images if (whole := processor.images.whole(image)) is not None]
    smaller = any(whole is not image for whole, image in zip(found, images))
    return found if smaller and len(found) == len(images) else []


def with_seed(options: GenerationOptions) -> GenerationOptions:
    """Options with one seed for draft and answer: the one that the answer would draw with."""
    drawn = not options.greedy and options.seed is None
    return replace(options, seed=make_seeds(None, 1, 1)[0]) if drawn else options


def parts_left(
    model: VisionLanguage, features: FeatureCache, inputs: Mapping[str, Any], short: Mapping[str, Any]
) -> float:
    """The positions to be encoded after a draft over those to be encoded for it. 0 where a draft
    does not help, or its pictures would be encoded twice."""
    full, small = _positions(model, inputs), _positions(model, short)
    too_long = short["input_ids"].shape[-1] > MOST_PROMPT * inputs["input_ids"].shape[-1]
    position_bytes = model.config.feature_width * model.language_model.norm.weight.itemsize
    first = features.missing([*small])
    if too_long or not first or sum(small.values()) * position_bytes > features.max_bytes:
        return 0.0
    rest = features.missing([*full]) - first
    return sum(full[digest] for digest in rest) / sum(small[digest] for digest in first)


def _positions(model: VisionLanguage, inputs: Mapping[str, Any]) -> dict[bytes, int]:
    """The positions of each part of the images, by its digest."""
    pixels = inputs.get("pixel_values")
    if pixels is None or not pixels.numel():
        return {}
    parts, _ = model.parts_of_rows(pixels, inputs.get("pixel_attention_mask"))
    return dict(zip(digests_of(parts), model.positions(parts)))
