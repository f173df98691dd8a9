"""Inputs on their way to the device.

    feed = Feed(device)                                   # one for a run
    for inputs in feed({"batch": batch} for batch in batches):
        module(**inputs)

A GPU computes while the host goes on, and would wait for what is copied in the same stream. Here the copies
have a stream of their own: those of a micro-batch are made while the GPU computes with the one before it, or,
of a step's first, with the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from data.packing import on_device

Inputs = dict[str, Any]


class Feed:
    """Call it with the inputs of each micro-batch, on the host, for the same on the device; where that is no
    CUDA device, one after the other."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, inputs: Iterable[Inputs]) -> Iterator[Inputs]:
        if self.stream is None:
            yield from map(self._moved, inputs)
            return
        computing, waiting = torch.cuda.current_stream(self.device), iter(inputs)

        def copied(stream: torch.cuda.Stream) -> Inputs | None:
            if (following := next(waiting, None)) is None:
                return None
            # Memory that the host has let go of is written to again as soon as the GPU has done what it was
            # used for. All of that is in `computing` by now.
            stream.wait_stream(computing)
            with torch.cuda.stream(stream):
                return self._moved(following)

        ahead = copied(self.stream)
        while (current := ahead) is not None:
            computing.wait_stream(self.stream)  # for `current`, and not for what is copied from here on
            ahead = copied(self.stream)
            yield current

    def _moved(self, inputs: Inputs) -> Inputs:
        return {name: on_device(value, self.device) for name, value in inputs.items()}
