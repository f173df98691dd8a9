"""A page on a checkpoint, served from this process for tests."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gradio_client import Client

import app
from generation.steps import Step
from inference.checkpoint import Checkpoint, open_checkpoint
from inference.fast import Fast
from tests.waiting import PATIENCE, wait_for
from web.engine import OPENERS, Engine
from web.guard import Hosts
from web.models import Models
from web.page import Server
from web.service import Service, ServiceLimits

EMBEDDED = str(app.DEFAULT_MODEL)
EXAMPLE, CUP, THREE, WOLF = (
    str(app.ROOT / "assets" / f"{name}.png") for name in ("example", "cup", "three", "wolf")
)
NAME = "page.example"  # that pages have besides
STEP = 0.2  # seconds that a slow model's decode step takes at least: 51 for the 256 tokens of an answer


class SlowModels(Models):
    """Models whose decode steps take their time, so that there is some to press a button in."""

    def _load(self, name: str) -> Checkpoint:
        checkpoint = super()._load(name)
        step = Step(checkpoint.model.language_model)

        def slowly(token_ids, kv_cache, start_pos):
            time.sleep(STEP)
            return step(token_ids, kv_cache, start_pos)

        return replace(checkpoint, fast=Fast(slowly, "slow"))


@dataclass
class Served:
    """A page that answers at `url`, and what is behind it."""

    url: str
    service: Service
    thread: threading.Thread


def make_service(*names: str | Path, slow: bool = False, any_model: bool = False, **limits) -> Service:
    """A service with these models (the embedded one)."""
    kind = SlowModels if slow else Models
    models = kind([str(name) for name in names] or [EMBEDDED], any_model, "cpu")
    return Service(Engine(models), ServiceLimits(**limits))


@contextmanager
def served(service: Service) -> Iterator[Served]:
    """Serve a page for as long as the block lasts; it ends with its service."""
    service.models.open(service.models.default)
    server = Server(service, Hosts("127.0.0.1", [NAME]))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    assert wait_for(lambda: server.started or not thread.is_alive()) and server.started
    try:
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}/", service, thread)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


def client_of(page: Served) -> Client:
    """A new visitor, who waits."""
    return Client(page.url, verbose=False, httpx_kwargs={"timeout": PATIENCE})


@contextmanager
def full(service: Service) -> Iterator[None]:
    """The engine has its hands full: no answer has a first word before the block's end."""
    gate = threading.Event()
    tasks = [service.engine._openers.submit(gate.wait, PATIENCE) for _ in range(OPENERS)]
    try:
        yield
    finally:
        gate.set()
        for task in tasks:
            task.result(PATIENCE)


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
