"""How fast a run is: tokens and images a second, and the share of the device's peak that it uses (MFU)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from data.packing import Batch
from data.samples import IGNORE_INDEX
from training.costs import Amounts, part_of, training_flops
from training.devices import peak_flops
from training.distributed import Ranks

if TYPE_CHECKING:
    from training.tasks import Task


def amounts_of(batch: Mapping[str, Tensor]) -> Amounts:
    """What a batch sends through the model, padding aside.

    Documents of a row are blind to each other; document 0, where there is one, is a prefix that all see.
    """
    segment_ids, pixels = batch["segment_ids"], batch.get("pixel_values")
    tiles = 0 if pixels is None else len(pixels)
    columns = int(segment_ids.max()) + 1
    if columns == 0:  # nothing but padding
        return Amounts(tiles=tiles, positions=0, pairs=0, labelled=0)
    rows = torch.arange(len(segment_ids))[:, None]
    cells = (rows * columns + segment_ids)[segment_ids >= 0]
    lengths = torch.bincount(cells, minlength=len(segment_ids) * columns).view(-1, columns)  # of segments
    pairs = (lengths**2).sum() + (lengths[:, :1] * lengths[:, 1:]).sum()
    labelled = (batch["labels"] != IGNORE_INDEX).sum()
    return Amounts(tiles, int(lengths.sum()), int(pairs), int(labelled))


class Throughput:
    """What passed since the last row, with evaluations and saves left aside; all ranks add theirs.

    Args:
        first: step that the run goes on from.
    """

    def __init__(self, task: Task, ranks: Ranks, dtype: torch.dtype, first: int):
        self.task, self.ranks = task, ranks
        self.learns, self.adapters = what_learns(task.model)
        self.peak = peak_flops(ranks.device, dtype)[0] * ranks.world_size if ranks.is_first else 0.0
        self.first, self._began = first, time.monotonic()
        self._forget()

    def _forget(self) -> None:
        self._tokens = self._images = 0
        self._flops = self._aside = 0.0
        self._since = time.monotonic()

    def add(self, batches: Sequence[Batch], step: int) -> None:
        """This rank's batches of a step."""
        for batch in batches:
            amounts = self.task.amounts(batch, step)
            self._tokens += int(amounts.positions)
            self._images += batch.images
            self._flops += training_flops(self.task.model.config, amounts, self.learns, self.adapters)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time that is not the steps'."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._aside += time.monotonic() - began

    def row(self, done: int) -> dict[str, float]:
        """What goes into metrics.jsonl after `done` steps; all ranks call it."""
        seconds = max(time.monotonic() - self._since - self._aside, 1e-9)
        tokens, images, flops = self.ranks.sum(self._tokens, self._images, self._flops)
        each = (time.monotonic() - self._began) / max(done - self.first, 1)
        self._forget()
        row = {"images_per_second": round(images / seconds, 2)}
        if tokens:  # the image world's first stage has none
            row = {"tokens_per_second": round(tokens / seconds, 1)} | row
        if self.peak:
            row["mfu"] = round(flops / seconds / self.peak, 4)
        return row | {"seconds_left": round(each * (self.task.steps - done))}


def what_learns(model: nn.Module) -> tuple[frozenset[str], int]:
    """Parts of the model whose own weights learn, and the number of weights in adapters."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    adapters = sum(p.numel() for name, p in named if "lora_" in name)
    return frozenset(part_of(name) for name, _ in named if "lora_" not in name), adapters
