"""The web page under load: clients that ask, break off and send garbage, all at once, for minutes.

    python -m tests.soak.load                              # 20 clients, 10 minutes
    python -m tests.soak.load --clients 4 --minutes 1

Starts `app.py` on the embedded model. Every client has an image of its own and knows what the model answers
about it when asked alone: an answer that is not this one has crossed from another client or is wrong. The
last line is JSON: requests of each kind, wrong answers, errors, median seconds of an answer, memory of the
page's process. Memory is flat where its median over the last quarter is within 5 % of that over the second
quarter: the first one warms up.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil

from generation.decoding import GenerationOptions
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from shapes import ask as ask_about
from shapes import render, sample_scene
from tests.waiting import free_port

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = str(ROOT / "checkpoints" / "ocelli-shapes")
FAMILIES = ("colour", "shape", "count", "position", "word", "digit", "describe")
WAITING = "…"  # what the page shows in the place of an answer that has not begun
LEAST_LOOKS = 8  # at the page's memory: two in a quarter
TOO_LARGE = 129 * 2**20  # bytes, of an upload: the page takes 128 MiB
KINDS = {"asked": 0.7, "broken_off": 0.15, "garbage": 0.1, "too_large": 0.05}


@dataclass
class Found:
    """What clients found out, from all their threads."""

    kinds: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of an answer
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `kinds`


def questions_of(client: int, checkpoint) -> tuple[bytes, dict[str, str]]:
    """An image (PNG) that no other client has, and questions about it with the model's own answers."""
    rng = random.Random(2**42 + client)
    scene, file, answers = sample_scene(rng, "heldout"), io.BytesIO(), {}
    image = render(scene, 192)
    image.save(file, "PNG")
    for family in FAMILIES:
        if (qa := ask_about(scene, rng, family)) is not None:
            reply = ask(checkpoint, [image], qa.question, GenerationOptions(max_new_tokens=64))
            (answers[qa.question],) = reply.finish()["answers"]
    return file.getvalue(), answers


class Visitor(threading.Thread):
    """One client: asks, breaks off, sends garbage, until the time is over."""

    def __init__(self, number: int, url: str, questions, until: float, found: Found, ask_id: int):
        super().__init__(daemon=True)
        self.number, self.api, self.until = number, url + "gradio_api/", until
        self.image, self.right = questions
        self.found, self.ask_id, self.rng = found, ask_id, random.Random(number)
        self.web = httpx.Client(timeout=300, trust_env=False)

    def run(self) -> None:
        kinds = ["too_large", "asked", "asked"]  # for certain, however slow the machine
        while kinds or time.monotonic() < self.until:
            kind = kinds.pop(0) if kinds else self.rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
            try:
                getattr(self, kind)()
            except Exception as error:  # one client's trouble is noted, and the others go on
                self.found.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            with self.found.lock:
                self.found.kinds[kind] += 1
        self.web.close()

    def asked(self) -> None:
        question, began, last = self.rng.choice(list(self.right)), time.monotonic(), ""
        for event in self._events(self.image, question):
            last = answer_in(event) or last
        self.found.seconds.append(time.monotonic() - began)
        if last.strip() != self.right[question]:
            self.found.wrong.append(f"{question!r}: expected {self.right[question]!r}, got {last!r}")

    def broken_off(self) -> None:
        """Leave at a random event, as a closed tab does."""
        leave = self.rng.randint(0, 4)
        for number, _ in enumerate(self._events(self.image, self.rng.choice(list(self.right)))):
            if number >= leave:
                break

    def garbage(self) -> None:
        noise = self.rng.randbytes(self.rng.choice((1, 100, 100_000)))
        for event in self._events(self.image[:60] + noise, "What is it?"):
            if text := answer_in(event):
                self.found.wrong.append(f"a broken image was answered: {text!r}")
        for answer in (
            self.web.post(self.api + "upload", files={"files": ("a.png", noise)}),
            self.web.post(self.api + "queue/join", content=noise),
            self.web.post(self.api + "queue/join", json={"data": [1], "fn_index": 999}),
        ):
            if answer.status_code >= 500:
                self.found.errors.append(f"garbage: status {answer.status_code}: {answer.text[:200]}")

    def too_large(self) -> None:
        answer = self.web.post(self.api + "upload", files={"files": ("a.png", bytes(TOO_LARGE))})
        if not 400 <= answer.status_code < 500:
            self.found.errors.append(f"an upload of {TOO_LARGE:,} bytes: status {answer.status_code}")

    def _events(self, image: bytes, question: str) -> Iterator[dict]:
        """Upload, ask, and what the page says until the answer is whole. A session of its own each time."""
        session = f"load-{self.number}-{self.rng.randrange(2**32)}"
        upload = self.web.post(self.api + "upload", files={"files": ("picture.png", image)})
        file = {"path": upload.raise_for_status().json()[0], "meta": {"_type": "gradio.FileData"}}
        data = [{"text": question, "files": [file]}, Path(EMBEDDED).name, 1, 0, 1, 0, 0, 64, -1, False, False]
        body = {"data": data, "fn_index": self.ask_id, "session_hash": session}
        self.web.post(self.api + "queue/join", json=body).raise_for_status()
        with self.web.stream("GET", self.api + f"queue/data?session_hash={session}") as stream:
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    event = json.loads(line[5:])
                    yield event
                    if event["msg"] in ("process_completed", "close_stream"):
                        return


def answer_in(event: dict) -> str:
    """What the last message of the chat says, where it is an answer."""
    output = event.get("output") or {}
    if event["msg"] not in ("process_generating", "process_completed") or not output.get("data"):
        return ""
    chat = output["data"][0]
    if isinstance(chat, list) and chat and isinstance(chat[0], dict) and chat[-1].get("role") == "assistant":
        text = "".join(part.get("text", "") for part in chat[-1]["content"])
        return "" if text == WAITING else text
    return ""


def start_page(folder: str) -> tuple[subprocess.Popen, str]:
    """In a process of its own, whose temporary files are in `folder`."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TMPDIR": folder}
    command = [sys.executable, str(ROOT / "app.py"), "--port", str(free_port()), "--no-browser"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://\S+", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[0].rstrip("/") + "/"
    raise RuntimeError("app.py ended without a page")


def run(clients: int, seconds: float) -> dict:
    """Load the page for so long; what came of it."""
    checkpoint = open_checkpoint(EMBEDDED, device="cpu", dtype="float32")
    questions = [questions_of(number, checkpoint) for number in range(clients)]
    with TemporaryDirectory() as folder:
        process, url = start_page(folder)
        return load(process, url, questions, seconds) | {"files_left": os.listdir(folder)}


def load(process: subprocess.Popen, url: str, questions: list, seconds: float) -> dict:
    """As many clients as there are questions; the page is then ended."""
    try:
        config = httpx.get(url + "config", timeout=300, trust_env=False).json()
        ask_id = next(one["id"] for one in config["dependencies"] if one["api_name"] == "ask")
        found, until, memory = Found(), time.monotonic() + seconds, []
        visitors = [Visitor(n, url, own, until, found, ask_id) for n, own in enumerate(questions)]
        for visitor in visitors:
            visitor.start()
        while time.monotonic() < until or len(memory) < LEAST_LOOKS:
            memory.append(psutil.Process(process.pid).memory_info().rss)
            time.sleep(min(1.0, seconds / 100))
        for visitor in visitors:
            visitor.join(300)
        stuck = sum(visitor.is_alive() for visitor in visitors)
        up = process.poll() is None and httpx.get(url, timeout=300, trust_env=False).status_code == 200
    finally:
        process.terminate()
        process.wait(300)
    quarter = len(memory) // 4
    second, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return {
        "clients": len(questions),
        "exit_status": process.returncode,
        **{kind: found.kinds[kind] for kind in KINDS},
        "wrong": found.wrong[:5],
        "errors": sorted(set(found.errors))[:5],
        "stuck_clients": stuck,
        "page_is_up": up,
        "answer_seconds": statistics.median(found.seconds),
        "memory_mebibytes": [round(second / 2**20, 1), round(last / 2**20, 1)],
        "memory_grew_by": round(last / second - 1, 4),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.load", description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args(arguments)
    found = run(options.clients, 60 * options.minutes)
    print(json.dumps(found, ensure_ascii=False))
    good = found["page_is_up"] and not (found["wrong"] or found["errors"] or found["stuck_clients"])
    return int(not good or found["memory_grew_by"] > 0.05)


if __name__ == "__main__":
    sys.exit(main())
