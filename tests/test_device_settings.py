"""Wherever a CUDA device is chosen, cuDNN's attention is off, and float32 convolutions are not in TF32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

from benchmarks.common import build_ours
from inference.checkpoint import pick_device
from models import vision_language_model
from models.vision_language_model import VisionLanguageModel
from training.distributed import Ranks

ENTRANCES: dict[str, Callable[[str], object]] = {
    "generate, page, batch, eval": lambda device: pick_device("auto"),
    "train, on every rank": lambda device: Ranks(torch.device(device)),
    "from_pretrained": lambda device: VisionLanguageModel.from_pretrained("checkpoint"),
    "benchmarks": lambda device: build_ours("tiny", torch.float32, device),
}


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    """A machine that has a CUDA device, and PyTorch's own settings."""
    kept = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.allow_tf32
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.allow_tf32 = True
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    yield
    torch.backends.cuda.enable_cudnn_sdp(kept[0])
    torch.backends.cudnn.allow_tf32 = kept[1]


def settings() -> tuple[bool, bool]:
    return torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("move", [lambda model: model.to("cuda"), lambda model: model.cuda()])
def test_a_model_that_is_moved_to_cuda_prepares_it(move, monkeypatch):
    monkeypatch.setattr(nn.Module, "to", lambda self, *arguments: self)
    monkeypatch.setattr(VisionLanguageModel, "device", torch.device("cuda"))
    move(build_ours("tiny", torch.float32, "cpu"))
    assert settings() == (False, False)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_cuda_is_prepared(entrance, monkeypatch):
    if entrance == "from_pretrained":
        monkeypatch.setattr(VisionLanguageModel, "device", torch.device("cuda"))
        monkeypatch.setattr(
            vision_language_model, "load", lambda cls, *arguments: build_ours("tiny", torch.float32, "cpu")
        )
    with suppress(RuntimeError, AssertionError):  # the device is not really there
        ENTRANCES[entrance]("cuda")
    assert settings() == (False, False)


def test_a_cpu_changes_nothing():
    assert pick_device("cpu") == Ranks(torch.device("cpu")).device
    assert settings() == (True, True)
