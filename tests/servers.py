"""Servers in this process, and the bodies that programs send them.

with running(slots=1) as served:                # of the embedded model, or another folder or checkpoint
    answer = served.ask("What colour is the star?", EXAMPLE, stream=True)
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai

from inference.checkpoint import Checkpoint, open_checkpoint
from inference.command import DEFAULT_MODEL
from tests.documents import ROOT
from tests.house import data_url
from tests.waiting import PATIENCE, wait_for
from web.door import Hosts
from web.engine import Engine, EngineLimits
from web.guard import ApiLimits
from web.server import Server

FOLDER, EXAMPLE, CUP = DEFAULT_MODEL, ROOT / "assets/example.png", ROOT / "assets/cup.png"
NAME = FOLDER.name
CHAT, RESPONSES, MESSAGES = "v1/chat/completions", "v1/responses", "v1/messages"
STAR, SHAPES = "What colour is the star?", "How many shapes are there?"


@dataclass
class Running:
    """A server that answers at `url`."""

    url: str
    server: Server
    engine: Engine

    def send(self, method: str, path: str = CHAT, **more: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=PATIENCE, trust_env=False, **more)

    def ask(self, question: str = STAR, *images: Path, **fields: Any) -> httpx.Response:
        return self.send("POST", json=body(question, *images, **fields))

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}v1", api_key=key, max_retries=0, timeout=PATIENCE)


@cache
def embedded() -> Checkpoint:
    return open_checkpoint(str(FOLDER), device="cpu").compiled()


@contextmanager
def running(
    model: Checkpoint | Path | None = None, slots: int = 4, queue: int = 64, api_key: str | None = None,
    proxies: list[str] = [], origins: list[str] = [], **limits: Any,  # noqa: B006
) -> Iterator[Running]:  # fmt: skip
    """A server in this process for as long as the block lasts."""
    if isinstance(model, Path):
        model = open_checkpoint(str(model), device="cpu").compiled()
    engine = Engine(model or embedded(), EngineLimits(slots, queue))
    hosts = Hosts("127.0.0.1", ["api.example"], origins)
    server = Server(engine, hosts, ApiLimits(**limits), api_key, drain=1, proxies=proxies)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    assert wait_for(lambda: server.started or not thread.is_alive()) and server.started
    try:
        yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}/", server, engine)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive()


def message(question: str, *images: Path | bytes | str) -> dict:
    urls = [image if isinstance(image, str) else data_url(image) for image in images]
    content: list[dict] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*content, {"type": "text", "text": question}]}


def body(question: str = STAR, *images: Path | bytes | str, **fields: Any) -> dict:
    return {"model": NAME, "messages": [message(question, *(images or (EXAMPLE,)))]} | fields


def refused(response: httpx.Response, status: int) -> dict:
    """The error of a response, which must be one JSON object of OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert "Traceback" not in error["message"] and "\n" not in error["message"]
    return error


def events(response: httpx.Response) -> list[dict]:
    """Those of a stream, which must end as the protocol says."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Several:
    """Servers of several models, of which each request goes to the one that it names, or to the first."""

    def __init__(self, servers: dict[str, Running]):
        self.servers, first = servers, next(iter(servers.values()))
        self.url, self.server, self.engine, self.ask = first.url, first.server, first.engine, first.ask

    def of(self, model: Any) -> Running:
        return self.servers.get(model) or next(iter(self.servers.values()))

    def send(self, method: str, path: str = CHAT, **more: Any) -> httpx.Response:
        return self.of((more.get("json") or {}).get("model")).send(method, path, **more)

    def client(self) -> Any:
        """OpenAI's, of which chat completions go to the model that they name."""
        first = self.of(None).client()

        def routed(method: str) -> Any:
            return lambda **asked: getattr(self.of(asked["model"]).client().chat.completions, method)(**asked)

        chat = SimpleNamespace(completions=SimpleNamespace(create=routed("create"), parse=routed("parse")))
        return SimpleNamespace(chat=chat, responses=first.responses, models=first.models)


@contextmanager
def several(*models: Path, **more: Any) -> Iterator[Several]:
    with ExitStack() as stack:
        yield Several({one.name: stack.enter_context(running(one, **more)) for one in models})
