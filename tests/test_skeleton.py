"""Networks without weights: what a real one has, at no cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.shapes import SHAPES
from models.checkpoints.load import meta_init
from models.vision_language_model import VisionLanguageModel

ROOT = Path(__file__).resolve().parent.parent


def test_shapes_and_names_are_those_of_the_network():
    with meta_init():
        skeleton = VisionLanguageModel(SHAPES["tiny"])
    real = VisionLanguageModel(SHAPES["tiny"])
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert not any(parameter.is_meta for parameter in real.parameters())
    for (name, ours), (other, theirs) in zip(
        skeleton.named_parameters(), real.named_parameters(), strict=True
    ):
        assert (name, ours.shape, ours.dtype) == (other, theirs.shape, theirs.dtype)
    assert torch.nn.init.ones_(torch.zeros(2)).tolist() == [1, 1]  # outside, weights are initialised


def test_the_compiler_is_not_imported_for_it():
    """In a process of its own, in which nothing else has imported it."""
    program = (
        "import sys, torch; before = 'torch._dynamo' in sys.modules;"
        "from benchmarks.shapes import build_ours;"
        "build_ours('tiny', torch.float32, 'cpu');"
        "assert before or 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=600)
