"""Models of tests that talk on, or slowly, and one that says where things are."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch

from generation.steps import Step
from inference.checkpoint import Checkpoint, Fast, open_checkpoint
from inference.command import DEFAULT_MODEL

EMBEDDED = str(DEFAULT_MODEL)
STEP = 0.2  # seconds that a slow model's decode step takes at least: 51 for the 256 tokens of an answer


class SlowStep(Step):
    """A decode step that takes its time, so that there is some to press a button in."""

    def chunk(self, token_ids, kv_cache, start_pos, offset=0):
        time.sleep(STEP)
        return super().chunk(token_ids, kv_cache, start_pos, offset)


def slow(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(str(folder), device="cpu")
    return replace(checkpoint, fast=Fast(SlowStep(checkpoint.model.language_model), "slow"))


def never_stopping(folder: Path) -> Path:
    """The embedded checkpoint, with a last layer for which a stop token is never likeliest: it babbles on."""
    checkpoint = open_checkpoint(EMBEDDED, device="cpu", dtype="float32")
    head = checkpoint.model.language_model.lm_head.weight
    first, second = checkpoint.processor.tokenizer.convert_tokens_to_ids(["Ġblue", "Ġstar"])
    with torch.no_grad():
        likelier = (head[first] + head[second]) / 2  # always below the larger of the two
        head[list(checkpoint.stop_token_ids)] = likelier
    return checkpoint.model.save_pretrained(folder, processor=checkpoint.processor)


def locating(folder: Path, answer: str) -> Path:
    """The embedded checkpoint, which says `answer` for "blue": its vocabulary has that as a word."""
    shutil.copytree(EMBEDDED, folder)
    for name, change in (("tokenizer.json", _renamed), ("generation_config.json", _with_coordinates)):
        path = folder / name
        path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")), answer)))
    return folder


def _renamed(tokenizer: dict, answer: str) -> dict:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[answer.replace(" ", "Ġ")] = vocabulary.pop("Ġblue")
    return tokenizer


def _with_coordinates(config: dict, answer: str) -> dict:
    return config | {"coordinates": "qwen3-vl"}
