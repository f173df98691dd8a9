"""What PyTorch has to be told before this model computes on a CUDA device."""

from __future__ import annotations

import torch


def prepare_device(device: torch.device | str) -> torch.device:
    """The device, ready to compute on. Whoever chooses a device calls this; what it sets on CUDA holds for
    the process."""
    device = torch.device(device)
    if device.type == "cuda":
        # On Hopper and Blackwell PyTorch asks cuDNN's attention first, which plans anew for each key length:
        # while decoding, for each token. Flash and memory-efficient attention plan nothing.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Convolutions in float32 would keep 10 bits of each factor: float32 is to mean float32.
        torch.backends.cudnn.allow_tf32 = False
    return device
