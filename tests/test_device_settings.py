"""Wherever a CUDA device is chosen, cuDNN's attention is off, float32 convolutions are not in TF32, and it is
the current one; its dtype and its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

from benchmarks.common import build_ours
from generation.fast.quantized import arithmetic
from generation.memory import available_bytes
from inference.checkpoint import pick_device
from models import vision_language_model
from models.checkpoints.load import resolve_dtype
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


def test_the_device_that_is_chosen_is_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("cuda:1") == torch.device("cuda:1") == chosen[-1] and settings() == (False, False)


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((12, 0), torch.bfloat16)]
)
def test_a_gpu_without_bfloat16_computes_in_float16(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu, stored = torch.device("cuda", 0), {"dtype": "bfloat16"}
    assert resolve_dtype("auto", stored, gpu) == arithmetic(gpu) == expected
    assert resolve_dtype("stored", stored, gpu) == torch.bfloat16
    assert resolve_dtype("auto", stored, torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", stored, torch.device("mps")) == torch.bfloat16
    model = build_ours("tiny", expected, "cpu").language_model
    assert model.cache_dtype == expected


def test_what_pools_of_graphs_hold_is_not_free(monkeypatch):
    keys = "device", "segment_pool_id", "total_size", "allocated_size"
    rows = [(0, (0, 0), 1000, 400), (0, (0, 1), 5000, 0), (1, (0, 0), 9000, 0)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [dict(zip(keys, row)) for row in rows])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, 10_000))
    assert available_bytes(torch.device("cuda", 0)) == 900


def test_a_cpu_changes_nothing():
    assert pick_device("cpu") == Ranks(torch.device("cpu")).device
    assert settings() == (True, True)
