"""Samples to answers: grouped by image, longest first, through the scheduler's slots.

    for number, answer in answers(checkpoint, task.samples, slots=32):
        print(task.samples[number].question, answer.text)

All questions about an image stand one after another: it is opened, cut into tiles, encoded and prefilled
once, however many there are. In float32 each answer is the one that the model gives alone, whatever the
number of slots, the order and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from PIL import Image

from data.errors import one_line
from data.images import image_size
from data.inputs import TiledImage
from eval.tasks import Sample
from generation.decoding import GenerationOptions
from generation.prefix import FeatureCache, tile_digests
from generation.scheduler import LazyRequest, Request, Scheduler, Stats
from inference.answer import answer_text, encode
from inference.checkpoint import Checkpoint, RequestError

BLANK = (200, 200, 200)  # what a blanked image shows, everywhere
BLANK_FEATURES = 64 * 2**20  # bytes of features: blank tiles are alike, whatever the image's size


@dataclass(frozen=True)
class Answer:
    """What came of a sample: its answer and how many tokens that is, or "" and what was wrong."""

    text: str
    tokens: int = 0
    error: str = ""


def by_image(samples: Sequence[Sample]) -> list[list[int]]:
    """Numbers of the samples by image: the groups with the longest prompt first, inside them too, so that
    neighbours are of similar length and what does not fit shows early."""
    groups: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(number)
    for group in groups.values():
        group.sort(key=lambda number: (-len(samples[number].prompt), samples[number].prompt, number))
    return sorted(groups.values(), key=lambda group: -len(samples[group[0]].prompt))


def share(groups: Sequence[Sequence[int]], rank: int, world_size: int) -> list[list[int]]:
    """One rank's part of the groups: each goes to the rank that has least, too large ones in pieces."""
    largest = max(1, -(-sum(map(len, groups)) // world_size))
    pieces = [list(group[at : at + largest]) for group in groups for at in range(0, len(group), largest)]
    parts: list[list[list[int]]] = [[] for _ in range(world_size)]
    counts = [0] * world_size
    for piece in sorted(pieces, key=len, reverse=True):
        least = counts.index(min(counts))
        parts[least].append(piece)
        counts[least] += len(piece)
    order = {id(piece): place for place, piece in enumerate(pieces)}
    return sorted(parts[rank], key=lambda piece: order[id(piece)])


def answers(
    checkpoint: Checkpoint,
    samples: Sequence[Sample],
    slots: int = 32,
    groups: Sequence[Sequence[int]] | None = None,
    blank: bool = False,
    stats: Stats | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[int, Answer]]:
    """(number of the sample, its answer) as they are ready.

    Args:
        slots: answers in work at the same time.
        groups: which samples, as `by_image` gives them; all by default.
        blank: show a uniform image of the same size in place of each.
        stats: counts what the scheduler does.
        tell: gets one line about the caches' memory before any work.

    Raises:
        RequestError: the memory does not suffice for so many slots.
    """
    groups = by_image(samples) if groups is None else groups
    slots = max(1, min(slots, sum(map(len, groups))))
    features = FeatureCache(checkpoint.model, BLANK_FEATURES if blank else 0)
    try:
        scheduler = Scheduler(
            checkpoint.model, slots, decode_step=checkpoint.decode_step, feature_cache=features
        )
    except ValueError as error:
        raise RequestError(f"{error} (--batch-size)") from None
    tell(str(scheduler.plan()))
    if stats is not None:
        scheduler.stats = stats
    images = _Images(checkpoint, blank)
    requests = (
        LazyRequest(number, partial(_request, checkpoint, samples[number], images))
        for group in groups
        for number in group
    )
    for done in scheduler.run(requests):
        if done.error is not None:
            yield done.key, Answer("", error=one_line(done.error))
        else:
            yield done.key, Answer(answer_text(checkpoint, done.token_ids), len(done.token_ids))


def _request(checkpoint: Checkpoint, sample: Sample, images: _Images) -> Request:
    """Raises PromptError, ImageError, RequestError and what the sample's images raise."""
    tiled, digests = images.of(sample)
    row = encode(checkpoint, tiled, sample.prompt, sample.system or None)
    options = GenerationOptions(
        max_new_tokens=sample.max_new_tokens, stop_token_ids=checkpoint.stop_token_ids
    )
    return Request(torch.tensor(row.input_ids), row.tiles, options=options, digests=digests or None)


@dataclass
class _Images:
    """The images of the group in work, opened, cut and digested once."""

    checkpoint: Checkpoint
    blank: bool
    _group: str | None = None
    _held: tuple[list[TiledImage], list[bytes]] = ([], [])
    _blanks: dict[tuple[int, int], TiledImage] = field(default_factory=dict)

    def of(self, sample: Sample) -> tuple[list[TiledImage], list[bytes]]:
        if self._group != sample.group:
            self._group = None
            tiled = [self._tile(source) for source in sample.images()]
            self._held = tiled, [digest for one in tiled for digest in tile_digests(one.tiles)]
            self._group = sample.group
        return self._held

    def _tile(self, source: Any) -> TiledImage:
        processor = self.checkpoint.processor
        if not self.blank:
            return processor.tile(source)
        size = image_size(source, processor.limits)
        if size not in self._blanks:
            self._blanks = {size: processor.tile(Image.new("RGB", size, BLANK))}
        return self._blanks[size]
