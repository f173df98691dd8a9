"""Samples to scored answers: grouped by image, longest prompt first, many at a time in the scheduler.

    for number, answer in answers(checkpoint, task.samples, slots=32):
        print(task.samples[number].question, answer.text)

All questions about an image stand one after another. It is opened, cut into tiles, encoded and prefilled
once, however many there are. In float32 each answer is the one that the model gives alone, whatever the
number of slots, the order and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image

from data.images import TiledImage, image_size
from data.processor import EncodedConversation, Processor
from eval.tasks import EvalSample, EvalTask
from generation.decoding import GenerationOptions
from generation.requests import LazyRequest, Request, Stats
from generation.scheduler import Scheduler
from inference.answer import answer_text
from inference.attribution.agreement import looked_at
from inference.checkpoint import Checkpoint, RequestError
from inference.conversation import Turn, messages_of
from messages import one_line

BLANK = (200, 200, 200)  # the colour that a blanked image shows everywhere


@dataclass(frozen=True)
class EvalAnswer:
    """The answer to a sample with its length in tokens, its confidence and, if that is measured, whether
    the model looked there (`inference.attribution.agreement`); or "" and what was wrong."""

    text: str
    tokens: int = 0
    confidence: float | None = None
    looked: Mapping[str, float] | None = None
    error: str = ""


def record_of(task: EvalTask, sample: EvalSample, answer: EvalAnswer) -> dict[str, Any]:
    """A line of samples.jsonl: the question, its answer and its score."""
    score = 0.0 if answer.error else task.metric.score(answer.text, sample.targets, sample.fields)
    record: dict[str, Any] = {"id": sample.id} | ({"family": sample.family} if sample.family else {})
    record |= {"earlier": sample.earlier} if sample.earlier else {}
    record |= {"question": sample.question, "prompt": sample.prompt, "targets": list(sample.targets)}
    record |= {"answer": answer.text, "score": score, "tokens": answer.tokens}
    record |= {} if answer.confidence is None else {"confidence": round(answer.confidence, 6)}
    record |= {"looked": answer.looked} if answer.looked else {}
    return record | ({"error": answer.error} if answer.error else {})


def by_image(samples: Sequence[EvalSample]) -> list[list[int]]:
    """Numbers of the samples by image, the longest prompt first among groups and inside them: neighbours are
    of similar length, and what does not fit into memory shows early."""
    groups: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(number)
    for group in groups.values():
        group.sort(key=lambda number: (-len(samples[number].prompt), samples[number].prompt, number))
    return sorted(groups.values(), key=lambda group: -len(samples[group[0]].prompt))


def share(groups: Sequence[Sequence[int]], rank: int, world_size: int) -> list[list[int]]:
    """One rank's part of the groups. Each group goes to the rank that has least; too large ones are split."""
    largest = max(1, -(-sum(map(len, groups)) // world_size))
    pieces = [list(group[at : at + largest]) for group in groups for at in range(0, len(group), largest)]
    counts, own = [0] * world_size, []
    for place in sorted(range(len(pieces)), key=lambda place: -len(pieces[place])):
        least = counts.index(min(counts))
        counts[least] += len(pieces[place])
        if least == rank:
            own.append(place)
    return [pieces[place] for place in sorted(own)]


def open_scheduler(checkpoint: Checkpoint, slots: int, count: int) -> Scheduler:
    """A scheduler for `count` requests, which encodes tiles that images have in common once. Raises
    RequestError where memory does not suffice for the slots."""
    slots, step = max(1, min(slots, count)), checkpoint.decode_step
    try:
        return Scheduler(checkpoint.model, slots, step, checkpoint.features)
    except ValueError as error:
        raise RequestError(f"{error} (--batch-size)") from None


def answers(
    checkpoint: Checkpoint,
    samples: Sequence[EvalSample],
    slots: int = 32,
    groups: Sequence[Sequence[int]] | None = None,
    blank: bool = False,
    looked: bool = False,
    stats: Stats | None = None,
) -> Iterator[tuple[int, EvalAnswer]]:
    """(number of the sample, its answer), as they are ready.

    Args:
        slots: answers in work at the same time.
        groups: which samples, as `by_image` groups them; default: all.
        blank: show a uniform image of the same size in place of each.
        looked: see `EvalTask`; not of blank images.
        stats: counts what the scheduler does.
    """
    groups = by_image(samples) if groups is None else groups
    scheduler = open_scheduler(checkpoint, slots, sum(map(len, groups)))
    scheduler.stats = scheduler.stats if stats is None else stats
    held: dict[str, list[TiledImage]] = {}  # of the group in work: opened and cut once

    def request(sample: EvalSample) -> Request:
        if sample.group not in held:
            held.clear()
            held[sample.group] = [_tiled(checkpoint, source, blank) for source in sample.images()]
        row = _encode(checkpoint.processor, held[sample.group], sample)
        stops = checkpoint.stop_token_ids
        limit = sample.max_new_tokens
        options = GenerationOptions(max_new_tokens=limit, stop_token_ids=stops, confidence=True)
        return Request(torch.tensor(row.input_ids), row.tiles, options=options)

    numbers = (number for group in groups for number in group)
    for done in scheduler.run(LazyRequest(number, partial(request, samples[number])) for number in numbers):
        if done.error is not None:
            yield done.key, EvalAnswer("", error=one_line(done.error))
        else:
            text, length = answer_text(checkpoint, done.token_ids), len(done.token_ids)
            seen = _looked(checkpoint, samples[done.key], done.token_ids) if looked and not blank else None
            yield done.key, EvalAnswer(text, length, done.confidence, seen)


def _encode(processor: Processor, images: list[TiledImage], sample: EvalSample) -> EncodedConversation:
    """The sample's question, after the turns before it."""
    shown = [tuple(images), *[()] * len(sample.earlier)]  # with the first question
    turns = [Turn(question, own, ()) for (question, _), own in zip(sample.earlier, shown)]
    messages = messages_of(processor, sample.system or None, turns, [answer for _, answer in sample.earlier])
    messages += processor.conversation(list(shown[len(turns)]), sample.prompt)
    return processor.encode_conversation(messages, True, label="question")


def _looked(checkpoint: Checkpoint, sample: EvalSample, ids: list[int]) -> Mapping[str, float] | None:
    """How the attention of an answer agrees with the box that was asked for; None unless that is one."""
    if len(boxes := sample.fields["boxes"]) != 1:
        return None
    (image,) = sample.images()
    return looked_at(checkpoint, image, sample.prompt, ids, boxes, system=sample.system or None)[0]


def _tiled(checkpoint: Checkpoint, source: Any, blank: bool) -> TiledImage:
    processor = checkpoint.processor
    if blank:
        source = Image.new("RGB", image_size(source, processor.limits), BLANK)
    return processor.tile(source)
