"""Samples -> packed sequences -> batches, and the masks that keep packed samples apart.

Several samples share a sequence, each blind to the others and at the positions that it has alone. So nothing
is computed for padding, and nothing is learnt from a neighbour. A sequence is limited in tokens and in tiles;
which of the waiting samples go together is an exact knapsack.

`segment_ids` (B, T) number the samples of a sequence from 1. Two numbers are special: -1 is padding, which
sees only itself so that no softmax runs over nothing, and 0 is a prefix that all segments of the sequence
see, as the shapes world packs its questions (`shapes/stream.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from data.inputs import ByteTiles
from data.samples import IGNORE_INDEX, Sample, SampleId

PADDING = -1  # segment id of positions that hold nothing


def pack_indices(
    tokens: Sequence[int], tiles: Sequence[int], max_tokens: int, max_tiles: int | None
) -> list[int]:
    """Which samples fill a sequence best: indices in rising order, always with the first sample.

    The first one has waited longest, so no sample waits forever. The others are those whose tokens fill the
    rest of the sequence as far as any choice can within both limits.

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
    """One sequence, not yet padded: `input_ids` and `labels` (T,), `position_ids` and `segment_ids` (F + T,),
    with F image positions in front for models that place them there; `pixel_values` n tiles or None.

    These are arrays, because tensors would pass between processes in shared memory, which may be scarce.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    segment_ids: np.ndarray
    pixel_values: ByteTiles | None
    sample_ids: tuple[SampleId, ...]
    images: int = 0  # number of images that the tiles were cut from


def pack(samples: Sequence[Sample], tiles: Sequence[Tensor | None]) -> PackedSequence:
    """Join samples, and their tiles in the same order.

    Args:
        samples: at least one.
        tiles: of each sample, (n, 3, M, M) float32 or None.
    """
    if any(sample.front for sample in samples) and len(samples) > 1:
        raise ValueError(
            "a model with images in front of the text takes one sample per sequence; turn packing off"
        )
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    for number, sample in enumerate(samples, 1):
        ids += sample.input_ids
        labels += [IGNORE_INDEX, *sample.labels[1:]]  # nothing before a first token could predict it
        positions += range(sample.tokens)
        segments += [number] * sample.tokens
    if samples[0].front:  # here the position before the first id is an image's
        labels = list(samples[0].labels)
    images = [ByteTiles.of(image) for image in tiles if image is not None]
    return PackedSequence(
        np.array(ids),
        np.array(labels),
        np.array(positions),
        np.array(segments),
        ByteTiles.cat(images) if images else None,
        tuple(sample.sample_id for sample in samples),
        sum(len(sample.images) for sample in samples),
    )


class Batch(dict):
    """A batch's tensors by name, and `sample_ids`: for each sequence, the ids of its samples in order.

    input_ids, labels (B, T); position_ids, segment_ids (B, F + T); pixel_values if there is an image:
    `ByteTiles`, which `to` turns into tiles (N, 3, M, M) float32 on the device.
    """

    sample_ids: list[tuple[SampleId, ...]]
    images: int = 0  # number of images that the tiles were cut from

    def to(self, device, non_blocking: bool = False) -> Batch:
        moved = Batch({name: value.to(device, non_blocking=non_blocking) for name, value in self.items()})
        moved.sample_ids, moved.images = self.sample_ids, self.images
        return moved

    @property
    def packing_efficiency(self) -> float:
        """The share of positions that are not padding."""
        return (self["segment_ids"] != PADDING).double().mean().item()

    @property
    def num_labels(self) -> int:
        """Number of labelled tokens, each of which is predicted from the position before it."""
        return int((self["labels"] != IGNORE_INDEX).sum())


def collate(rows: Sequence[PackedSequence | None], pad_token_id: int, length: int | None = None) -> Batch:
    """Pad sequences on the right, and join their tiles in order.

    Args:
        rows: None is a sequence of nothing but padding, from a shard that has ended.
        length: what to pad to; by default the longest sequence's length.
    """
    real = [row for row in rows if row is not None]
    front = max((len(row.segment_ids) - len(row.input_ids) for row in real), default=0)
    if length is None:
        length = max((len(row.segment_ids) for row in real), default=front + 1)
    batch = Batch(
        input_ids=torch.full((len(rows), length - front), pad_token_id, dtype=torch.int64),
        labels=torch.full((len(rows), length - front), IGNORE_INDEX, dtype=torch.int64),
        position_ids=torch.zeros(len(rows), length, dtype=torch.int64),
        segment_ids=torch.full((len(rows), length), PADDING, dtype=torch.int64),
    )
    for i, row in enumerate(rows):
        if row is not None:
            for name, padded in batch.items():
                value = getattr(row, name)
                padded[i, : len(value)] = torch.from_numpy(value)
    images = [row.pixel_values for row in real if row.pixel_values is not None]
    if images:
        batch["pixel_values"] = ByteTiles.cat(images)
    batch.sample_ids = [() if row is None else row.sample_ids for row in rows]
    batch.images = sum(row.images for row in real)
    return batch


# ------------------------------------------------------------------------------------------------- masks
def segment_mask(segment_ids: Tensor) -> Tensor | BlockMask | None:
    """What `LanguageModel.forward` takes as its attention mask: flex_attention's on CUDA, else SDPA's. None
    if plain causal attention would show every segment the same."""
    if segment_ids.is_cuda:  # there, finding out whether it is causal would make the GPU wait
        return block_mask(segment_ids)
    return None if _is_causal(segment_ids) else dense_mask(segment_ids)


def _is_causal(segment_ids: Tensor) -> bool:
    """Whether each sequence is one segment, followed by padding at most."""
    real = segment_ids >= 0
    one = (segment_ids == 1) | ~real
    return bool(one.all() and (real[:, :-1] >= real[:, 1:]).all())


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
    return create_block_mask(sees, rows, None, length, length, device=segment_ids.device)
