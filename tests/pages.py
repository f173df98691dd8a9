"""A page on a checkpoint, served from this process for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from gradio import http_server
from gradio_client import Client

import app
from generation.decoding import eager_step
from inference.checkpoint import Checkpoint, open_checkpoint
from tests.waiting import PATIENCE, free_port, wait_for
from web.asking import Desk
from web.limits import PageLimits
from web.model_thread import ModelThread
from web.models import Models
from web.page import build, close, serve
from web.visitors import Visitors

EMBEDDED = str(app.DEFAULT_MODEL)
NAME = "page.example"  # that pages have besides
STEP = 0.2  # seconds that a slow model's decode step takes at least: 51 for the 256 tokens of an answer


class SlowModels(Models):
    """Models whose decode steps take their time, so that there is some to press a button in."""

    def _load(self, name: str) -> Checkpoint:
        checkpoint = super()._load(name)
        step = eager_step(checkpoint.model.language_model)

        def slowly(token_ids, kv_cache, start_pos):
            time.sleep(STEP)
            return step(token_ids, kv_cache, start_pos)

        return replace(checkpoint, decode_step=slowly, decode_step_chosen="slow")


@dataclass
class Served:
    """A page that answers at `url`, and what is behind it."""

    url: str
    desk: Desk
    server: http_server.Server


def make_desk(*names: str | Path, slow: bool = False, any_model: bool = False, **visitors) -> Desk:
    """A desk on these models (the embedded one)."""
    people = Visitors(**visitors)
    kind = SlowModels if slow else Models
    models = kind([str(name) for name in names] or [EMBEDDED], any_model, "cpu", closed=people.close_model)
    return Desk(models, ModelThread(), people, PageLimits())


@contextmanager
def served(desk: Desk) -> Iterator[Served]:
    """Serve a page for as long as the block lasts."""
    desk.models.open(desk.models.default)
    page = build(desk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server.Server, "run_in_thread", run_in_thread)
        # Not of the ports that app.py tries: one that is being started beside these tests counts on its own.
        url = serve(page, desk, "127.0.0.1", free_port(), allowed_hosts=[NAME])
    try:
        yield Served(url, desk, page.server)
    finally:
        close(page, PATIENCE)


def run_in_thread(server: http_server.Server) -> None:
    """Gradio's own, which gives up after five seconds, with more patience."""
    server.thread = threading.Thread(target=server.run, daemon=True)
    server.thread.start()
    wait_for(lambda: server.started or not server.thread.is_alive())
    assert server.started, "the page's server did not begin"


def client_of(page: Served) -> Client:
    """A new visitor, who waits."""
    return Client(page.url, verbose=False, httpx_kwargs={"timeout": PATIENCE})


@contextmanager
def full(thread: ModelThread) -> Iterator[None]:
    """The thread of the models has its hands full: what is asked has no first word before the block's end."""
    began, gate = threading.Event(), threading.Event()

    def waits():
        began.set()
        gate.wait(PATIENCE)
        yield

    task = thread.begin(waits)
    assert began.wait(PATIENCE)
    try:
        yield
    finally:
        gate.set()
        task.wait(PATIENCE)


def never_stopping(folder: Path) -> Path:
    """The embedded checkpoint, with a last layer for which a stop token is never likeliest: it babbles on."""
    checkpoint = open_checkpoint(EMBEDDED, device="cpu", dtype="float32")
    head = checkpoint.model.language_model.lm_head.weight
    first, second = checkpoint.processor.tokenizer.convert_tokens_to_ids(["Ġblue", "Ġstar"])
    with torch.no_grad():
        head[list(checkpoint.stop_token_ids)] = (
            head[first] + head[second]
        ) / 2  # below the larger of the two
    return checkpoint.model.save_pretrained(folder, processor=checkpoint.processor)
