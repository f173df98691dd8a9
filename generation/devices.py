"""What a device computes in."""

from __future__ import annotations

import torch


def suited(device: torch.device, other: torch.dtype = torch.float32) -> torch.dtype:
    """The type that a device computes fast and well in; `other` where that is not known. On a CPU float32 is
    exact, and bfloat16 no faster for one question; a GPU before Ampere has no bfloat16."""
    if device.type == "cuda":
        return torch.float16 if torch.cuda.get_device_capability(device) < (8, 0) else torch.bfloat16
    return torch.float32 if device.type == "cpu" else other
