"""Samples → rows full of documents, → batches.

Several documents share a row, each blind to the others (`data/document_masks.py`) and at the positions that
it has alone, so that nothing is computed for padding and nothing is learnt from a neighbour. A row is limited
in tokens and in tiles; which samples go together is an exact knapsack over those that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.inputs import ByteTiles
from data.samples import IGNORE_INDEX, Sample, SampleId

PADDING = -1  # document number of positions that hold nothing


def choose(tokens: Sequence[int], tiles: Sequence[int], max_tokens: int, max_tiles: int | None) -> list[int]:
    """Which samples fill a row best: indices in rising order, the first sample always among them.

    The first is the one that has waited longest: nothing waits for ever. The others are those whose tokens
    fill the rest of the row as far as any choice of them can within both limits.

    Args:
        tokens, tiles: of each sample; the first must fit by itself.
    """
    room = max_tokens - tokens[0]
    most = max_tiles if max_tiles is not None else sum(tiles)
    if room < 0 or tiles[0] > most:
        raise ValueError(f"the first sample ({tokens[0]} tokens, {tiles[0]} tiles) does not fit into a row")
    never = np.iinfo(np.int64).max // 2
    fewest = np.full(room + 1, never)  # tiles that a sum of exactly so many tokens takes at least
    fewest[0] = tiles[0]
    improved = np.zeros((len(tokens), room + 1), dtype=bool)  # by taking sample i
    for i in range(1, len(tokens)):
        if tokens[i] > room:
            continue
        taken = fewest[: room + 1 - tokens[i]] + tiles[i]
        better = (taken < fewest[tokens[i] :]) & (taken <= most)
        improved[i, tokens[i] :] = better
        fewest[tokens[i] :][better] = taken[better]
    total = int(np.flatnonzero(fewest <= most)[-1])
    chosen = []
    for i in range(len(tokens) - 1, 0, -1):
        if improved[i, total]:
            chosen.append(i)
            total -= tokens[i]
    return [0, *reversed(chosen)]


@dataclass(frozen=True)
class PackedRow:
    """One row, not yet padded: `input_ids` and `labels` (T,), `position_ids` and `documents` (F + T,), with F
    image positions in front for models that place them there; `pixel_values` n tiles or None.

    Arrays, not tensors: between processes these would take shared memory, of which there may be none."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    documents: np.ndarray
    pixel_values: ByteTiles | None
    sample_ids: tuple[SampleId, ...]
    images: int = 0  # that the tiles were cut from


def pack_row(samples: Sequence[Sample], tiles: Sequence[Tensor | None]) -> PackedRow:
    """Put documents behind each other, with their tiles in the same order.

    Args:
        samples: at least one.
        tiles: of each sample, (n, 3, M, M) float32 or None.
    """
    if any(sample.front for sample in samples) and len(samples) > 1:
        raise ValueError("a model with images in front of the row takes one document a row; turn packing off")
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    documents: list[int] = []
    for number, sample in enumerate(samples, 1):
        ids += sample.input_ids
        labels += [IGNORE_INDEX, *sample.labels[1:]]  # a first token has nothing in front that could tell it
        positions += range(sample.tokens)
        documents += [number] * sample.tokens
    if samples[0].front:  # there, the position in front of the first id is an image's
        labels = list(samples[0].labels)
    images = [ByteTiles.of(image) for image in tiles if image is not None]
    return PackedRow(
        np.array(ids),
        np.array(labels),
        np.array(positions),
        np.array(documents),
        ByteTiles.cat(images) if images else None,
        tuple(sample.sample_id for sample in samples),
        sum(len(sample.images) for sample in samples),
    )


class Batch(dict):
    """A batch's tensors, by name, and `sample_ids`: for each row, the ids of its documents in order.

    input_ids, labels (B, T); position_ids, documents (B, F + T); pixel_values where any row shows an image:
    `ByteTiles`, of which `to` makes tiles (N, 3, M, M) float32 on the device. `images` is how many these
    were cut from, `fill` the share of positions that is not padding.
    """

    sample_ids: list[tuple[SampleId, ...]]
    images: int = 0

    def to(self, device, non_blocking: bool = False) -> Batch:
        moved = Batch({name: value.to(device, non_blocking=non_blocking) for name, value in self.items()})
        moved.sample_ids, moved.images = self.sample_ids, self.images
        return moved

    def pin_memory(self) -> Batch:
        pinned = Batch({name: value.pin_memory() for name, value in self.items()})
        pinned.sample_ids, pinned.images = self.sample_ids, self.images
        return pinned

    @property
    def fill(self) -> float:
        return (self["documents"] != PADDING).double().mean().item()

    @property
    def num_labels(self) -> int:
        """Labelled tokens, each of which is predicted from the position in front of it."""
        return int((self["labels"] != IGNORE_INDEX).sum())


def collate(rows: Sequence[PackedRow | None], pad_token_id: int, length: int | None = None) -> Batch:
    """Pad rows on the right, and put their tiles behind each other in the order of the rows.

    Args:
        rows: None is a row of nothing but padding, for a lane that has come to its end.
        length: what to pad to; the longest row's by default.
    """
    real = [row for row in rows if row is not None]
    front = max((len(row.documents) - len(row.input_ids) for row in real), default=0)
    if length is None:
        length = max((len(row.documents) for row in real), default=front + 1)
    batch = Batch(
        input_ids=torch.full((len(rows), length - front), pad_token_id, dtype=torch.int64),
        labels=torch.full((len(rows), length - front), IGNORE_INDEX, dtype=torch.int64),
        position_ids=torch.zeros(len(rows), length, dtype=torch.int64),
        documents=torch.full((len(rows), length), PADDING, dtype=torch.int64),
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
