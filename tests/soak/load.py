"""The server under load: clients that ask, leave, read slowly and send garbage, all at once.

    python -m tests.soak.load                              # both, 10 minutes each
    python -m tests.soak.load server --clients 8 --minutes 1

Starts `serve.py` (64 clients) on the embedded model. Every client has an image of its own
and knows what the model answers about it when asked alone: an answer that is not this one has crossed from
another client or is wrong. Prints JSON: requests of each kind, wrong answers, errors, refusals, seconds
of an answer and memory of the process, which is flat where its median over the last quarter is within 5 % of
that over the second quarter: the first one warms up.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import httpx
import psutil

from generation.options import GenerationOptions
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from shapes import ask as ask_about
from shapes import render, sample_scene
from tests.waiting import free_port

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = str(ROOT / "checkpoints" / "ocelli-shapes")
FAMILIES = ("colour", "shape", "count", "position", "word", "digit", "describe")
LEAST_LOOKS = 8  # at the process's memory: two in a quarter
JSON = {"Content-Type": "application/json"}


@dataclass
class Found:
    """What clients found out, from all their threads."""

    kinds: Counter = field(default_factory=Counter)  # of requests; "busy": refusals with status 429
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of an answer
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `kinds`

    def count(self, kind: str) -> None:
        with self.lock:
            self.kinds[kind] += 1


class Client(threading.Thread):
    """One client: until the time is over, what `KINDS` names, with these shares; each once for certain."""

    KINDS: ClassVar[dict[str, float]]

    def __init__(self, number: int, url: str, questions, until: float, found: Found):
        super().__init__(daemon=True)
        self.number, self.url, self.until, self.found = number, url, until, found
        self.image, self.right = questions
        self.rng = random.Random(number)
        self.web = httpx.Client(timeout=300, trust_env=False, headers={"X-Client": str(number)})
        self.prepare()

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        kinds = list(self.KINDS)
        while kinds or time.monotonic() < self.until:
            kind = kinds.pop() if kinds else self.rng.choices([*self.KINDS], [*self.KINDS.values()])[0]
            try:
                getattr(self, kind)()
            except Exception as error:  # one client's trouble is noted, and the others go on
                self.found.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            self.found.count(kind)
        self.web.close()

    def answered(self, question: str, text: str, began: float) -> None:
        self.found.seconds.append(time.monotonic() - began)
        if text.strip() != self.right[question]:
            self.found.wrong.append(f"{question!r}: expected {self.right[question]!r}, got {text!r}")


class Program(Client):
    """A program that speaks OpenAI's protocol to the server."""

    KINDS: ClassVar = {
        "asked": 0.5, "streamed": 0.2, "left": 0.12, "read_slowly": 0.05, "garbage": 0.1, "too_large": 0.03,
    }  # fmt: skip

    def prepare(self) -> None:
        self.api = self.url + "/v1/chat/completions"

    def body(self, question: str, image: bytes | None = None, **more) -> dict[str, Any]:
        url = "data:image/png;base64," + base64.b64encode(image or self.image).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        return {"model": Path(EMBEDDED).name, "messages": messages, "max_tokens": 64} | more

    def refused(self, answer: httpx.Response) -> bool:
        """Whether a request was refused, in OpenAI's form."""
        if answer.status_code == 200:
            return False
        error = answer.json()["error"]
        assert answer.status_code < 500 and "Traceback" not in answer.text, answer.text[:200]
        assert set(error) == {"message", "type", "param", "code"}, answer.text[:200]
        if answer.status_code == 429:
            self.found.count("busy")
            time.sleep(min(1.0, float(answer.headers["Retry-After"])))
        return True

    def asked(self) -> None:
        question, began = self.rng.choice(list(self.right)), time.monotonic()
        answer = self.web.post(self.api, json=self.body(question))
        if not self.refused(answer):
            self.answered(question, answer.json()["choices"][0]["message"]["content"], began)

    def streamed(self, pause: float = 0.0) -> None:
        question, began = self.rng.choice(list(self.right)), time.monotonic()
        with self.web.stream("POST", self.api, json=self.body(question, stream=True)) as answer:
            if answer.status_code != 200:
                answer.read()
                self.refused(answer)
                return
            text, ended = "", False
            for line in answer.iter_lines():
                time.sleep(pause)
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, line
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        assert ended, "a stream without its end"
        self.answered(question, text, began)

    def read_slowly(self) -> None:
        self.streamed(pause=0.2)

    def left(self) -> None:
        """After some lines, or before the first."""
        question, leave = self.rng.choice(list(self.right)), self.rng.randint(0, 5)
        body = self.body(question, stream=True, n=self.rng.randint(1, 3), temperature=1)
        with self.web.stream("POST", self.api, json=body) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number >= leave:
                    break

    def garbage(self) -> None:
        noise, good = self.rng.randbytes(self.rng.choice((1, 100, 100_000))), self.body("What is it?")
        wrong: list[dict] = [
            self.body("What is it?", self.image[:60] + noise),
            *({**good, "messages": messages} for messages in ([], [{"role": "user", "content": {"a": 1}}])),
            {**good, "max_tokens": -1},
            {**good, "temperature": "hot"},
            {**good, "no_such_field": 1},
            {**good, "model": "another"},
        ]
        for answer in (
            self.web.post(self.api, json=self.rng.choice([*wrong, [good], None, "a" * 1000])),
            self.web.post(self.api, content=noise, headers=JSON),
            self.web.post(self.api, content=noise),
            self.web.get(self.api),
            self.web.get(self.url + "/v1/" + "x" * self.rng.randrange(200)),
        ):
            assert self.refused(answer), answer.text[:200]

    def too_large(self) -> None:
        """A body that is refused before all of it was sent: the connection may be closed meanwhile."""
        try:
            answer = self.web.post(self.api, content=b'{"messages": "' + bytes(80 * 2**20), headers=JSON)
        except httpx.TransportError:
            return
        assert self.refused(answer), answer.text[:200]


# Clients, how many, a page that answers when it is up, and the command: with less room than 64 clients fill,
# so that some are refused, and kept prefixes of some images make way for others'.
TARGETS: dict[str, tuple[type[Client], int, str, list[str]]] = {
    "server": (
        Program, 64, "/health",
        ["serve.py", "--model", EMBEDDED, "--dtype", "float32",
         "--queue", "32", "--prefix-bytes", "20000000"],
    ),
}  # fmt: skip


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


def start(target: str, folder: str) -> tuple[subprocess.Popen, str]:
    """A process whose temporary files are in `folder`, and its address when it answers there."""
    _, _, path, command = TARGETS[target]
    port, quiet = free_port(), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TMPDIR": folder}
    command = [sys.executable, *command, "--port", str(port)]
    process, url = subprocess.Popen(command, cwd=ROOT, env=environment, **quiet), f"http://127.0.0.1:{port}"
    for _ in range(3000):
        try:
            if httpx.get(url + path, timeout=5, trust_env=False).status_code == 200:
                return process, url
        except httpx.HTTPError:
            pass
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"{' '.join(command)} did not start")


def run(target: str, clients: int, seconds: float) -> dict:
    """Load the server for so long; what came of it. It is then ended."""
    kind, _, path, _ = TARGETS[target]
    checkpoint = open_checkpoint(EMBEDDED, device="cpu", dtype="float32")
    questions = [questions_of(number, checkpoint) for number in range(clients)]
    with TemporaryDirectory() as folder:
        process, url = start(target, folder)
        try:
            found, until, memory = Found(), time.monotonic() + seconds, []
            threads = [kind(number, url, own, until, found) for number, own in enumerate(questions)]
            for thread in threads:
                thread.start()
            while time.monotonic() < until or len(memory) < LEAST_LOOKS:
                memory.append(psutil.Process(process.pid).memory_info().rss)
                time.sleep(min(1.0, seconds / 100))
            for thread in threads:
                thread.join(300)
            stuck = sum(thread.is_alive() for thread in threads)
            up = process.poll() is None and httpx.get(url + path, timeout=300, trust_env=False).is_success
        finally:
            process.terminate()
            process.wait(300)
        left = os.listdir(folder)
    quarter = len(memory) // 4
    second, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return {
        "target": target,
        "clients": clients,
        "exit_status": process.returncode,
        **found.kinds,
        "wrong": found.wrong[:5],
        "errors": sorted(set(found.errors))[:5],
        "stuck_clients": stuck,
        "is_up": up,
        "files_left": left,
        "answer_seconds": statistics.median(found.seconds),
        "memory_mebibytes": [round(second / 2**20, 1), round(last / 2**20, 1)],
        "memory_grew_by": round(last / second - 1, 4),
    }


def is_sound(found: dict) -> bool:
    """Whether no answer was wrong, no request failed, and what answers is still there."""
    return found["is_up"] and not (found["wrong"] or found["errors"] or found["stuck_clients"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.load", description=__doc__.splitlines()[0])
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)"
    )
    parser.add_argument("--clients", type=int, help="(default: 64)")
    parser.add_argument("--minutes", type=float, default=10)
    options, bad = parser.parse_args(arguments), 0
    for target in options.targets or TARGETS:
        found = run(target, options.clients or TARGETS[target][1], 60 * options.minutes)
        print(json.dumps(found, ensure_ascii=False), flush=True)
        bad += not is_sound(found) or found["memory_grew_by"] > 0.05
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
