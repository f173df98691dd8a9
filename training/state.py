"""What a run needs to go on: weights, their average, optimizers and the number of finished steps."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

STATE_NAME = "training_state.pt"


def save_state(output: Path, modules: nn.Module, optimizers, average: dict, config, step: int) -> None:
    """Write the state under a temporary name, then rename it: a crash leaves the old one whole."""
    state = {
        "modules": modules.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "average": average,
        "step": step,
        "config": config.to_dict(),
    }
    temporary = output / (STATE_NAME + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(output / STATE_NAME)


def load_state(output: Path, modules: nn.Module, optimizers, average: dict, config) -> int:
    """Restore a run in place and return its finished steps; 0 where there is nothing to restore."""
    path = output / STATE_NAME
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    modules.load_state_dict(state["modules"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for name, value in state["average"].items():
        average[name].copy_(value)
    return state["step"]
