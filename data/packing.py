"""Conversations -> samples -> packed sequences -> batches, and the masks that keep packed samples apart.

A sample's tokens and tiles are known from its text and the headers of its images. Pixels are decoded only
once its sequence is certain, so that many samples may wait at a few kilobytes each, or at the size of their
images where these came in the row or from the network.

Several samples share a sequence, each blind to the others and at the positions that it has alone. So nothing
is computed for padding, and nothing is learnt from a neighbour. A sequence is limited in tokens and in tiles;
which of the waiting samples go together is an exact knapsack.

`segment_ids` (B, T) number the samples of a sequence from 1. Two numbers are special: -1 is padding, which
sees only itself so that no softmax runs over nothing, and 0 is a prefix that all segments of the sequence
see, as plain drawings pack their questions (`shapes/stream.py`), and `pack_answers` packs answers to one
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from data.errors import BadRow, ImageError, ProcessorError, PromptError
from data.image_sizes import measure
from data.images import describe
from data.labels import check_written
from data.processor import Processor
from data.row_schemas import BAD_CONVERSATION, BROKEN_IMAGE, TOO_LONG, TOO_MANY_TILES
from data.tiles import Parts, Visual
from data.tools import Tool
from data.video import Clip
from families import FAMILIES
from models.config import VLMConfig

IGNORE_INDEX = -100  # label of a position that carries no loss
PADDING = -1  # segment id of positions that hold nothing
SampleId = tuple[str, int]  # name of the dataset, number of the row


# ----------------------------------------------------------------------------------------------- samples
@dataclass(frozen=True)
class Sample:
    """A conversation to train on.

    `labels` are the ids that the assistant says (its end of turn included), and IGNORE_INDEX elsewhere.
    `images` are what `load_image` takes, and clips, `image_shapes` what the parts of each are, (n, 3, H, W)
    or (n, 3, F, H, W), in order, and `times` those of each part (`data.tiles.Part`). `others` are other
    answers to its prompt, for `pack_answers`, which do not hold the images once more. `row` is what it comes
    from, for rewards: the columns without images, and its answer as `target`.
    """

    sample_id: SampleId
    input_ids: list[int]
    labels: list[int]
    images: tuple[Any, ...] = ()
    image_shapes: tuple[tuple[int, ...], ...] = ()
    times: tuple[int | None, ...] = ()
    others: tuple[Sample, ...] = ()
    row: Mapping[str, Any] | None = None

    @property
    def prompt(self) -> int:
        """Number of positions before the assistant's last message."""
        end = len(self.labels)
        while self.labels[end - 1] == IGNORE_INDEX:
            end -= 1
        while end and self.labels[end - 1] != IGNORE_INDEX:
            end -= 1
        return end

    @property
    def tokens(self) -> int:
        """Number of its positions in the language model."""
        return len(self.input_ids)

    @property
    def tiles(self) -> int:
        return sum(shape[0] for shape in self.image_shapes)

    @property
    def image_bytes(self) -> int:
        """Memory that its images take while it waits: nothing for files that are yet to be read."""
        return sum(
            len(image) if isinstance(image, bytes | str) else 3 * image.width * image.height
            for image in self.images
            if isinstance(image, bytes | str | Image)
        )


class SampleEncoder:
    """Makes samples of at most `max_tokens` positions and `max_tiles` tiles (None: as many as tokens allow).

    Nothing is ever cut off: a BadRow says why a conversation cannot be used. Of `questions` the last answer
    is not learnt, and does not count.
    """

    def __init__(
        self, processor: Processor, max_tokens: int, max_tiles: int | None = None, questions: bool = False
    ):
        self.processor, self.max_tokens, self.max_tiles = processor, max_tokens, max_tiles
        self.questions = questions
        if getattr(processor.images, "adapts", False):  # rows are packed by plans, which see no pixels
            self.processor, images = copy(processor), copy(processor.images)
            images.adapts = False  # type: ignore[attr-defined]
            self.processor.images = images
        if processor.images.own_sizes and processor.config is None:
            raise ValueError("images of their own sizes: expected a processor that was opened with a config")

    def encode(
        self, conversation: Sequence[Mapping[str, Any]], sample_id: SampleId, tools: Sequence[Tool] = ()
    ) -> Sample:
        """A sample of a conversation in the Hub's form, whose assistant can call these tools."""
        processor, name = self.processor, f"{sample_id[0]}, row {sample_id[1]}"
        with _counted_as(BAD_CONVERSATION, PromptError), _counted_as(BROKEN_IMAGE, ImageError):
            messages = processor.messages(conversation, name)
            check_written(messages, tools, processor.chat.marks, processor.chat.thoughts_key, name)
        sources = [source for message in messages for source in message.images]
        visuals, sources = self._plans(sources)
        with _counted_as(TOO_MANY_TILES, PromptError):
            prompts = [processor.images.prompt(visual, i, len(visuals)) for i, visual in enumerate(visuals)]
        with _counted_as(BAD_CONVERSATION, PromptError):
            encoded = processor.chat.encode(messages, prompts, False, name, tools=tools)
        said = zip(encoded.input_ids, encoded.assistant_mask)
        labels = [token if by_assistant else IGNORE_INDEX for token, by_assistant in said]
        shapes = tuple(visual.parts.shape for visual in visuals)
        times = tuple(part.time for visual in visuals for part in visual.parts)
        sample = Sample(sample_id, encoded.input_ids, labels, tuple(sources), shapes, times)
        tokens = sample.prompt if self.questions else sample.tokens
        if tokens > self.max_tokens:
            raise BadRow(TOO_LONG, f"expected at most {self.max_tokens} tokens, got {tokens}")
        return sample

    def encode_answers(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        sample_id: SampleId,
        tools: Sequence[Tool] = (),
    ) -> Sample:
        """A sample of the first conversation, with the others as its other answers. All are alike up to some
        message of the assistant, and have labels from that message on alone."""
        samples = [self.encode(conversation, sample_id, tools) for conversation in conversations]
        first, shapes = samples[0].labels, {sample.image_shapes for sample in samples}
        columns = enumerate(zip(*(sample.input_ids for sample in samples), strict=False))
        shortest = min(sample.tokens for sample in samples)
        begin = next((place for place, ids in columns if len({*ids}) > 1), shortest)
        parted = all(sample.labels[begin : begin + 1] not in ([], [IGNORE_INDEX]) for sample in samples)
        if not parted or len(shapes) > 1:
            raise BadRow(BAD_CONVERSATION, "expected different answers of the assistant to one prompt")
        while first[begin - 1] != IGNORE_INDEX:
            begin -= 1
        samples = [
            replace(sample, labels=[IGNORE_INDEX] * begin + sample.labels[begin:]) for sample in samples
        ]
        others = tuple(replace(sample, images=()) for sample in samples[1:])
        row = pack_answers(samples, None, self.processor.config)
        if (tokens := len(row.input_ids)) > self.max_tokens:
            raise BadRow(TOO_LONG, f"expected at most {self.max_tokens} tokens of all answers, got {tokens}")
        return replace(samples[0], others=others)

    def _plans(self, sources: list[Any]) -> tuple[list[Visual], list[Any]]:
        """Plans of how images and clips will be cut, made from headers, and the sources to open then."""
        plans, kept = list[Visual](), list[Any]()
        for source in sources:
            shown: Any = source
            if not isinstance(source, Clip):
                with _counted_as(BROKEN_IMAGE, ImageError):
                    shown, source = measure(source, self.processor.limits)
            kept.append(source)
            with _counted_as(TOO_MANY_TILES, ImageError), _counted_as(BROKEN_IMAGE, ProcessorError):
                plans.append(self.processor.plan(shown, describe(source)))
        tiles, positions = sum(len(one.parts) for one in plans), sum(one.positions for one in plans)
        most = tiles if self.max_tiles is None else self.max_tiles
        # Where the images alone do not fit, no prompt of all their placeholders is built.
        if tiles > most or positions > self.max_tokens:
            fitting = f"{'' if self.max_tiles is None else f'{most} tiles and '}{self.max_tokens} tokens"
            raise BadRow(TOO_MANY_TILES, f"expected at most {fitting}, got {tiles} tiles, {positions} tokens")
        return plans, kept

    def tiles(self, sample: Sample) -> Parts | None:
        """A sample's tiles in the order of its placeholders; None without images."""
        tiles = []
        for source, expected in zip(sample.images, sample.image_shapes, strict=True):
            name = describe(source)
            with _counted_as(BROKEN_IMAGE, ImageError, ProcessorError):
                cut = self.processor.cut(source).parts
            if cut.shape != expected:  # the header did not tell the size of the pixels
                raise BadRow(BROKEN_IMAGE, f"{name}: expected tiles {expected}, got {cut.shape}")
            tiles.append(cut)
        return Parts.cat(tiles) if tiles else None


@contextmanager
def _counted_as(reason: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds make the row a bad one."""
    try:
        yield
    except kinds as error:
        raise BadRow(reason, str(error)) from error


# ----------------------------------------------------------------------------------------------- packing
def pack_indices(
    tokens: Sequence[int], tiles: Sequence[int], max_tokens: int, max_tiles: int | None
) -> list[int]:
    """Indices of the samples that fill a sequence best, in rising order; the first sample is always taken.

    It has waited longest, so no sample waits forever. The others are those whose tokens fill the rest of the
    sequence as far as any choice can within both limits.

    Args:
        tokens, tiles: of each sample; the first must fit by itself.
    """
    room = max_tokens - tokens[0]
    most = max_tiles if max_tiles is not None else sum(tiles)
    if room < 0 or tiles[0] > most:
        raise ValueError(f"the first sample ({tokens[0]} tokens, {tiles[0]} tiles) does not fit by itself")
    never = np.iinfo(np.int64).max // 2
    fewest = np.full(room + 1, never)  # tiles that a sum of exactly so many tokens needs at least
    fewest[0] = tiles[0]
    improved = np.zeros((len(tokens), room + 1), dtype=bool)  # by taking sample i
    for i in range(1, len(tokens)):
        if tokens[i] > room:
            continue
        taken = fewest[: room + 1 - tokens[i]] + tiles[i]
        better = (taken < fewest[tokens[i] :]) & (taken <= most)
        improved[i, tokens[i] :] = better
        fewest[tokens[i] :][better] = taken[better]
    # From the best sum back: the last sample that improved a sum is part of it.
    total = int(np.flatnonzero(fewest <= most)[-1])
    chosen = []
    for i in range(len(tokens) - 1, 0, -1):
        if improved[i, total]:
            chosen.append(i)
            total -= tokens[i]
    return [0, *reversed(chosen)]


@dataclass(frozen=True)
class PackedSequence:
    """One sequence, not yet padded: `input_ids`, `labels`, `position_ids` and `segment_ids` (T,), but (3, T)
    `position_ids` of a model with rotary places; `pixel_values` n tiles or None.

    These are arrays, because tensors would pass between processes in shared memory, which may be scarce.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    segment_ids: np.ndarray
    pixel_values: Parts | None
    sample_ids: tuple[SampleId, ...]
    images: int = 0  # number of images that the tiles were cut from
    samples: tuple[Sample, ...] = ()  # those with rows


def pack(
    samples: Sequence[Sample], tiles: Sequence[Parts | None], config: VLMConfig | None = None
) -> PackedSequence:
    """Join at least one sample, and the tiles of each, or None; or one sample with its other answers.
    `config`: of a model whose family says where a sample's tokens have their rotary places."""
    if samples[0].others:
        assert len(samples) == 1, "other answers are packed by themselves"
        return pack_answers([replace(samples[0], others=()), *samples[0].others], tiles[0], config)
    # Nothing before a first token could predict it.
    labels = [label for sample in samples for label in (IGNORE_INDEX, *sample.labels[1:])]
    images = [image for image in tiles if image is not None]
    return PackedSequence(
        np.array([token for sample in samples for token in sample.input_ids]),
        np.array(labels),
        np.concatenate([_places(sample, config) for sample in samples], axis=-1),
        np.repeat(np.arange(1, len(samples) + 1), [sample.tokens for sample in samples]),
        Parts.cat(images) if images else None,
        tuple(sample.sample_id for sample in samples),
        sum(len(sample.images) for sample in samples),
        tuple(sample for sample in samples if sample.row is not None),
    )


def pack_answers(
    samples: Sequence[Sample], tiles: Parts | None, config: VLMConfig | None = None
) -> PackedSequence:
    """Join answers to one prompt: samples that are alike before their first labels, images included, which
    are not repeated. The prompt is segment 0, which all answers see, and answer k segment k. Each answer
    begins with the prompt's last token, at its place, so that here, too, a label is predicted from the
    position before it.

    Where layers keep states or windows, which no prefix can share, each answer has the prompt in its segment.
    """
    if config is not None and config.text.layer_types:
        return pack(samples, [tiles] * len(samples), config)
    prompt = min(next(i for i, label in enumerate(one.labels) if label != IGNORE_INDEX) for one in samples)
    shared, first = prompt - 1, samples[0].input_ids[:prompt]
    if shared < 0 or any(one.input_ids[:prompt] != first for one in samples):
        raise ValueError("answers: expected samples of one prompt of at least one token")
    places = [_places(sample, config) for sample in samples]
    answers = [sample.input_ids[shared:] for sample in samples]
    return PackedSequence(
        np.array([*first[:shared], *(token for answer in answers for token in answer)]),
        np.array([IGNORE_INDEX] * shared + [label for one in samples for label in one.labels[shared:]]),
        np.concatenate([places[0][..., :shared], *(one[..., shared:] for one in places)], axis=-1),
        np.repeat(np.arange(len(samples) + 1), [shared, *map(len, answers)]),
        tiles,
        tuple(dict.fromkeys(sample.sample_id for sample in samples)),
        len(samples[0].images),
    )


def _places(sample: Sample, config: VLMConfig | None) -> np.ndarray:
    """(T,), or (3, T) by time, row and column."""
    if config is None or not config.text.rope_sections:
        return np.arange(sample.tokens)
    sizes = (shape[-2:] for shape in sample.image_shapes for _ in range(shape[0]))
    shown = ((*size, time) for size, time in zip(sizes, sample.times, strict=True))
    # A placeholder that an answer says is text.
    ids = [one if label == IGNORE_INDEX else -1 for one, label in zip(sample.input_ids, sample.labels)]
    return FAMILIES[config.family].places(config, ids, shown)[0].numpy()


class Batch(dict):
    """A batch's tensors by name, and `sample_ids`: for each sequence, the ids of its samples in order.

    input_ids, labels, position_ids, segment_ids (B, T), with rotary places position_ids (3, B, T);
    pixel_values if there is an image: `Parts`, which `to` turns into float32 numbers on the device,
    (N, 3, M, M), or a list of (3, H, W) where sizes differ. Indices are found here, because the host would
    have to wait for a GPU that finds them: `labelled` (L,), those of labels in (B · T), and `placeholders`
    (K,), those of image placeholders.
    """

    sample_ids: list[tuple[SampleId, ...]]
    images: int = 0  # number of images that the tiles were cut from
    samples: tuple[Sample, ...] = ()  # those with rows

    def to(self, device: torch.device | str) -> Batch:
        moved = Batch({name: on_device(value, device) for name, value in self.items()})
        vars(moved).update(vars(self))
        return moved

    @property
    def num_labels(self) -> int:
        """Number of labelled tokens, each of which is predicted from the position before it."""
        return int((self["labels"] != IGNORE_INDEX).sum())


def on_device(value: Any, device: torch.device | str) -> Any:
    """A tensor, tiles or a batch on a device, anything else as it is. Copies to CUDA are made from pinned
    memory, and nobody waits for them."""
    if isinstance(value, Batch):
        return value.to(device)
    if not isinstance(value, Tensor | Parts):
        return value
    cuda = torch.device(device).type == "cuda"
    if cuda and isinstance(value, Tensor):
        value = value.pin_memory()
    return value.to(device, non_blocking=cuda)


def collate(
    rows: Sequence[PackedSequence | None],
    pad_token_id: int,
    length: int | None = None,
    image_token_id: int = -1,
) -> Batch:
    """Pad sequences on the right, and join their tiles in order.

    Args:
        rows: None is a sequence of nothing but padding, from a shard that has ended.
        length: what to pad to; by default the longest sequence's length.
        image_token_id: of placeholders.
    """
    real = [row for row in rows if row is not None]
    if length is None:
        length = max((len(row.input_ids) for row in real), default=1)
    padding = {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "position_ids": 0, "segment_ids": PADDING}
    batch = Batch({n: torch.full((len(rows), length), filler) for n, filler in padding.items()})
    if real and real[0].position_ids.ndim == 2:
        batch["position_ids"] = torch.zeros(3, len(rows), length, dtype=torch.int64)
    for i, row in enumerate(rows):
        if row is not None:
            for name, padded in batch.items():
                value = getattr(row, name)
                padded[..., i, : value.shape[-1]] = torch.from_numpy(value)
    labelled = batch["labels"] != IGNORE_INDEX
    labelled[:, 0] = False  # nothing predicts a first token
    batch["labelled"] = labelled.flatten().nonzero()[:, 0]
    batch["placeholders"] = (batch["input_ids"] == image_token_id).flatten().nonzero()[:, 0]
    images = [row.pixel_values for row in real if row.pixel_values is not None]
    if images:
        batch["pixel_values"] = Parts.cat(images)
    batch.sample_ids = [() if row is None else row.sample_ids for row in rows]
    batch.images = sum(row.images for row in real)
    batch.samples = tuple(sample for row in real for sample in row.samples)
    return batch


# ------------------------------------------------------------------------------------------------- masks
def segment_mask(segment_ids: Tensor) -> Tensor | BlockMask | None:
    """The attention mask of `LanguageModel.forward`: flex_attention's on CUDA, else SDPA's. None if plain
    causal attention would show every segment the same."""
    if segment_ids.is_cuda:  # there, finding out whether it is causal would make the GPU wait
        return block_mask(segment_ids)
    real = segment_ids >= 0
    one_segment = ((segment_ids == 1) | ~real).all()
    is_causal = one_segment and (real[:, :-1] >= real[:, 1:]).all()  # padding only at its end
    return None if is_causal else dense_mask(segment_ids)


def dense_mask(segment_ids: Tensor) -> Tensor:
    """(B, T) segment ids -> (B, T, T) bool, True where a query (dim 1) sees a key (dim 2)."""
    length = segment_ids.shape[1]
    query, key = segment_ids[:, :, None], segment_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=segment_ids.device)
    return causal & (key >= 0) & ((query == key) | (key == 0)) | itself


def block_mask(segment_ids: Tensor) -> BlockMask:
    """The same as `dense_mask`, in blocks: those that no query sees into are skipped."""

    def sees(batch, head, query, key):
        segment = segment_ids[batch, key]
        same = (segment_ids[batch, query] == segment) | (segment == 0)
        return ((query >= key) & (segment >= 0) & same) | (query == key)

    rows, length = segment_ids.shape
    # As it is, it makes all T² answers of `sees`, from as many numbers of segments.
    make = _compiled_create_block_mask() if segment_ids.is_cuda else create_block_mask
    return make(sees, rows, None, length, length, device=segment_ids.device)


@cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask)
