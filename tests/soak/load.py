"""The web page under load: clients that ask, break off and send garbage, all at once, for minutes.

    python -m tests.soak.load                              # 20 clients, 10 minutes
    python -m tests.soak.load --clients 4 --minutes 1

Starts `app.py` on the embedded model. Every client has images of its own and knows what the model answers
about them when asked alone: an answer that is not this one has crossed from another client or is wrong. The
last line is JSON: requests of each kind, wrong answers, errors, latencies, memory of the page's process.
Memory is flat where its median over the last quarter is within 5 % of that over the second quarter: the
first one warms up.
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

from generation.decoding import GenerationOptions
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from shapes import ask as ask_about
from shapes import render, sample_scene
from tests.waiting import free_port

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = str(ROOT / "checkpoints" / "ocelli-shapes")
FAMILIES = ("colour", "shape", "count", "position", "word", "digit", "describe")
IMAGES = 2  # of each client
WAITING = "…"  # what the page shows in the place of an answer that has not begun
LEAST_LOOKS = 8  # at the page's memory: two in a quarter
TOO_LARGE = 15 * 2**20  # bytes, of an upload: the page takes 10 MiB
KINDS = {"asked": 0.7, "broken off": 0.15, "garbage": 0.15}


@dataclass
class Told:
    """What clients found out, from all their threads."""

    kinds: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds from the question to its first words
    whole: list[float] = field(default_factory=list)  # and to the end of the answer
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `kinds`


@dataclass(frozen=True)
class Question:
    image: bytes  # PNG
    text: str
    answer: str  # of the model, asked alone


def questions_of(client: int, checkpoint) -> list[Question]:
    """Questions about images that no other client has, with the model's own answers."""
    options, made = GenerationOptions(max_new_tokens=64), []
    for number in range(IMAGES):
        rng = random.Random(2**42 + client * IMAGES + number)
        scene, file = sample_scene(rng, "heldout"), io.BytesIO()
        image = render(scene, 192)
        image.save(file, "PNG")
        for family in FAMILIES:
            if (qa := ask_about(scene, rng, family)) is not None:
                (answer,) = ask(checkpoint, [image], qa.question, options).finish()["answers"]
                made.append(Question(file.getvalue(), qa.question, answer))
    return made


class Visitor(threading.Thread):
    """One client: asks, breaks off, sends garbage, until the time is over."""

    def __init__(
        self, number: int, url: str, questions: list[Question], until: float, told: Told, ask_id: int
    ):
        super().__init__(daemon=True)
        self.number, self.api, self.questions, self.until = number, url + "gradio_api/", questions, until
        self.told, self.ask_id, self.rng = told, ask_id, random.Random(number)
        self.web = httpx.Client(timeout=300)

    def run(self) -> None:
        for kind in ("too large", "asked", "asked"):  # for certain, however slow the machine
            self._do(kind)
        while time.monotonic() < self.until:
            (kind,) = self.rng.choices(list(KINDS), weights=list(KINDS.values()))
            self._do(kind)
        self.web.close()

    def _do(self, kind: str) -> None:
        try:
            getattr(self, kind.replace(" ", "_"))()
        except Exception as error:  # one client's trouble is told, and the others go on
            self.told.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])
        with self.told.lock:
            self.told.kinds[kind] += 1

    def asked(self) -> None:
        question = self.rng.choice(self.questions)
        began, first, last = time.monotonic(), None, ""
        for event in self._events(question):
            text = answer_in(event)
            if text:
                first, last = first or time.monotonic() - began, text
        self.told.whole.append(time.monotonic() - began)
        if first is not None:
            self.told.first.append(first)
        if last.strip() != question.answer:
            wrong = f"client {self.number}, {question.text!r}: expected {question.answer!r}, got {last!r}"
            self.told.wrong.append(wrong)

    def broken_off(self) -> None:
        """Leave at a random event, as a closed tab does."""
        leave = self.rng.randint(0, 4)
        for number, _ in enumerate(self._events(self.rng.choice(self.questions))):
            if number >= leave:
                break

    def garbage(self) -> None:
        noise = self.rng.randbytes(self.rng.choice((1, 100, 100_000)))
        send = (
            lambda: self.web.post(self.api + "upload", files={"files": ("a.png", noise)}),
            self.too_large,
            lambda: self.web.post(self.api + "queue/join", content=noise),
            lambda: self.web.post(self.api + "queue/join", json={"data": [1], "fn_index": 999}),
            lambda: self._broken_image(noise),
        )
        answer = self.rng.choice(send)()
        if answer is not None and answer.status_code >= 500:
            self.told.errors.append(f"garbage: status {answer.status_code}: {answer.text[:200]}")

    def too_large(self) -> None:
        """An upload that must be refused."""
        answer = self.web.post(self.api + "upload", files={"files": ("a.png", bytes(TOO_LARGE))})
        if not 400 <= answer.status_code < 500:
            self.told.errors.append(f"an upload of {TOO_LARGE:,} bytes: status {answer.status_code}")

    def _broken_image(self, noise: bytes) -> None:
        """Must be told, and not answered."""
        question = self.questions[0]
        for event in self._events(Question(question.image[:60] + noise, question.text, "")):
            if text := answer_in(event):
                self.told.wrong.append(f"a broken image was answered: {text!r}")

    def _events(self, question: Question) -> Iterator[dict]:
        """Upload, ask, and what the page says until the answer is whole. A session of its own each time."""
        session = f"load-{self.number}-{self.rng.randrange(2**32)}"
        upload = self.web.post(self.api + "upload", files={"files": ("picture.png", question.image)})
        upload.raise_for_status()
        file = {"path": upload.json()[0], "meta": {"_type": "gradio.FileData"}}
        data = [{"text": question.text, "files": [file]}, EMBEDDED, 1, 0, 1, 0, 0, 64, -1, False]
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


# ---------------------------------------------------------------------------------------------- the page
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


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def percentiles(values: list[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{share}": round(cuts[share - 1], 3) for share in (50, 95, 99)}


def run(clients: int, seconds: float) -> dict:
    """Load the page for so long; what came of it."""
    checkpoint = open_checkpoint(EMBEDDED, device="cpu", dtype="float32")
    questions = [questions_of(number, checkpoint) for number in range(clients)]
    with TemporaryDirectory() as folder:
        process, url = start_page(folder)
        return load(process, url, questions, seconds) | {"files_left": os.listdir(folder)}


def load(process: subprocess.Popen, url: str, questions: list, seconds: float) -> dict:
    """As many clients as lists of questions; the page is then ended."""
    clients = len(questions)
    try:
        config = httpx.get(url + "config", timeout=300).json()
        ask_id = next(one["id"] for one in config["dependencies"] if one["api_name"] == "ask")
        told, until, memory = Told(), time.monotonic() + seconds, []
        visitors = [Visitor(n, url, questions[n], until, told, ask_id) for n in range(clients)]
        for visitor in visitors:
            visitor.start()
        while time.monotonic() < until or len(memory) < LEAST_LOOKS:
            memory.append(resident_bytes(process.pid))
            time.sleep(min(1.0, seconds / 100))
        for visitor in visitors:
            visitor.join(300)
        stuck = sum(visitor.is_alive() for visitor in visitors)
        up = process.poll() is None and httpx.get(url, timeout=300).status_code == 200
    finally:
        process.terminate()
        process.wait(300)
    quarter = len(memory) // 4
    second, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return {
        "clients": clients,
        "minutes": round(seconds / 60, 2),
        "exit_status": process.returncode,
        **{kind: told.kinds[kind] for kind in (*KINDS, "too large")},
        "wrong": len(told.wrong),
        "wrong_examples": told.wrong[:5],
        "errors": len(told.errors),
        "error_examples": sorted(set(told.errors))[:5],
        "stuck_clients": stuck,
        "page_is_up": up,
        "first_words_seconds": percentiles(told.first),
        "answer_seconds": percentiles(told.whole),
        "memory_mebibytes": [round(second / 2**20, 1), round(last / 2**20, 1)],
        "memory_grew_by": round(last / second - 1, 4),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.load", description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10)
    asked = parser.parse_args(arguments)
    told = run(asked.clients, 60 * asked.minutes)
    print(json.dumps(told, ensure_ascii=False))
    good = told["page_is_up"] and not (told["wrong"] or told["errors"] or told["stuck_clients"])
    return int(not good or told["memory_grew_by"] > 0.05)


if __name__ == "__main__":
    sys.exit(main())
