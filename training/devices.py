"""What a device can do at most, FLOP/s: by its name, or measured by a product of large matrices."""

from __future__ import annotations

import re
import time

import torch

from training.plan_options import PEAKS

_SIDES = {"cpu": 1024, "cuda": 8192, "mps": 2048}  # of the matrices that are multiplied to measure


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU by what it calls itself, None for one that is not in the table or another dtype."""
    column = {torch.bfloat16: 0, torch.float32: 1}.get(dtype)
    words = [known for known in PEAKS if re.search(rf"\b{known}\b", name, re.IGNORECASE)]
    # "NVIDIA H100 PCIe" is both H100 and H100 PCIe: the longer name says more.
    return None if column is None or not words else PEAKS[max(words, key=len)][column]


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that a product of two large matrices reaches here: the best of several, half a second in all."""
    side = _SIDES.get(device.type, 1024)
    a = torch.ones(side, side, device=device, dtype=dtype)  # no random numbers: those are the run's
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < 0.4 and len(seconds) < 50):
        _wait_for(device)
        start = time.perf_counter()
        a @ a
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds)


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of a device of this machine, and in words how that is known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = known_peak(name, dtype)
        if peak is not None:
            return peak, name
    return measured_peak(device, dtype), "as a product of large matrices reaches here"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
