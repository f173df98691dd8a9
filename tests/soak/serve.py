"""The server under load: clients that ask, leave, read slowly and send garbage, all at once, for minutes.

    python -m tests.soak.serve                             # 64 clients, 10 minutes
    python -m tests.soak.serve --clients 8 --minutes 1

Starts `serve.py` on the embedded model. Every client has an image of its own and knows what the model answers
about it when asked alone: an answer that is not this one has crossed from another client or is wrong. The
last line is JSON: requests of each kind, wrong answers, errors, refusals that were not in OpenAI's form,
median seconds of an answer, memory of the server's process. Memory is flat where its median over the last
quarter is within 5 % of that over the second quarter: the first one warms up.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from inference.checkpoint import open_checkpoint
from tests.soak.load import EMBEDDED, LEAST_LOOKS, ROOT, questions_of
from tests.waiting import free_port

# Less than 64 clients fill: some are refused, and kept prefixes of some images make way for others'.
BOUNDS = ["--queue", "32", "--prefix-bytes", "20000000"]
JSON = {"Content-Type": "application/json"}
KINDS = {"asked": 0.5, "streamed": 0.2, "left": 0.12, "read_slowly": 0.05, "garbage": 0.1, "too_large": 0.03}


@dataclass
class Found:
    """What clients found out, from all their threads."""

    kinds: Counter = field(default_factory=Counter)
    busy: int = 0  # refusals with status 429
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of an answer
    lock: threading.Lock = field(default_factory=threading.Lock)


class Client(threading.Thread):
    """One client, until the time is over."""

    def __init__(self, number: int, url: str, questions, until: float, found: Found):
        super().__init__(daemon=True)
        self.url, self.until, self.found, self.rng = url, until, found, random.Random(number)
        self.image, self.right = questions
        self.web = httpx.Client(timeout=300, trust_env=False, headers={"X-Client": str(number)})

    def run(self) -> None:
        kinds = list(KINDS)
        while kinds or time.monotonic() < self.until:  # each kind once for certain
            kind = kinds.pop() if kinds else self.rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
            try:
                getattr(self, kind)()
            except Exception as error:  # one client's trouble is noted, and the others go on
                with self.found.lock:
                    self.found.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            with self.found.lock:
                self.found.kinds[kind] += 1
        self.web.close()

    def body(self, question: str, **more) -> dict[str, Any]:
        url = "data:image/png;base64," + base64.b64encode(self.image).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        return {"model": Path(EMBEDDED).name, "messages": messages, "max_tokens": 64} | more

    def post(self, body: Any) -> httpx.Response:
        return self.web.post(self.url + "/chat/completions", json=body)

    def refused(self, answer: httpx.Response) -> bool:
        """Whether a request was refused, in OpenAI's form."""
        if answer.status_code == 200:
            return False
        error = answer.json()["error"]
        assert answer.status_code < 500, answer.text[:200]
        assert set(error) == {"message", "type", "param", "code"}, answer.text[:200]
        assert "Traceback" not in answer.text
        if answer.status_code == 429:
            with self.found.lock:
                self.found.busy += 1
            time.sleep(min(1.0, float(answer.headers["Retry-After"])))
        return True

    def check(self, question: str, text: str) -> None:
        if text.strip() != self.right[question]:
            self.found.wrong.append(f"{question!r}: expected {self.right[question]!r}, got {text!r}")

    def asked(self) -> None:
        question, began = self.rng.choice(list(self.right)), time.monotonic()
        answer = self.post(self.body(question))
        if not self.refused(answer):
            self.check(question, answer.json()["choices"][0]["message"]["content"])
            self.found.seconds.append(time.monotonic() - began)

    def streamed(self, pause: Callable[[], None] = lambda: None) -> None:
        question = self.rng.choice(list(self.right))
        body = self.body(question, stream=True)
        with self.web.stream("POST", self.url + "/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                self.refused(answer)
                return
            text, ended = "", False
            for line in answer.iter_lines():
                pause()
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, line
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        assert ended, "a stream without its end"
        self.check(question, text)

    def read_slowly(self) -> None:
        self.streamed(lambda: time.sleep(0.2))

    def left(self) -> None:
        """Leave after some lines, or before the first."""
        question = self.rng.choice(list(self.right))
        body = self.body(question, stream=True, n=self.rng.randint(1, 3), temperature=1)
        leave = self.rng.randint(0, 5)
        with self.web.stream("POST", self.url + "/chat/completions", json=body) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number >= leave:
                    break

    def garbage(self) -> None:
        noise = self.rng.randbytes(self.rng.choice((1, 100, 100_000)))
        broken = base64.b64encode(self.image[:60] + noise).decode()
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + broken}}
        good = self.body("What is it?")
        bodies: list[Any] = [
            {**good, "messages": [{"role": "user", "content": [part]}]},
            {**good, "messages": []},
            {**good, "messages": [{"role": "user", "content": {"a": 1}}]},
            {**good, "max_tokens": -1},
            {**good, "temperature": "hot"},
            {**good, "no_such_field": 1},
            {**good, "model": "another"},
            [good],
            None,
            "a" * 1000,
        ]
        answer = self.post(self.rng.choice(bodies))
        assert self.refused(answer), answer.text[:200]
        for answer in (
            self.web.post(self.url + "/chat/completions", content=noise, headers=JSON),
            self.web.post(self.url + "/chat/completions", content=noise),
            self.web.get(self.url + "/chat/completions"),
            self.web.get(self.url + "/" + "x" * self.rng.randrange(200)),
        ):
            assert self.refused(answer), answer.text[:200]

    def too_large(self) -> None:
        """A body that is refused before all of it was sent: the connection may be closed meanwhile."""
        try:
            content = b'{"messages": "' + bytes(80 * 2**20)
            answer = self.web.post(self.url + "/chat/completions", content=content, headers=JSON)
        except httpx.TransportError:
            return
        assert self.refused(answer), answer.text[:200]


def start_server() -> tuple[subprocess.Popen, str]:
    port = free_port()
    flags = ["--model", EMBEDDED, "--port", str(port), "--dtype", "float32", *BOUNDS]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, ROOT / "serve.py", *flags], env=environment, **quiet)
    url = f"http://127.0.0.1:{port}"
    for _ in range(3000):
        try:
            if httpx.get(url + "/health", timeout=5, trust_env=False).status_code == 200:
                return process, url
        except httpx.HTTPError:
            pass
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError("serve.py did not start")


def run(clients: int, seconds: float) -> dict:
    """Load the server for so long; what came of it."""
    checkpoint = open_checkpoint(EMBEDDED, device="cpu", dtype="float32")
    questions = [questions_of(number, checkpoint) for number in range(clients)]
    process, url = start_server()
    try:
        found, until, memory = Found(), time.monotonic() + seconds, []
        threads = [Client(n, url + "/v1", own, until, found) for n, own in enumerate(questions)]
        for thread in threads:
            thread.start()
        while time.monotonic() < until or len(memory) < LEAST_LOOKS:
            memory.append(psutil.Process(process.pid).memory_info().rss)
            time.sleep(min(1.0, seconds / 100))
        for thread in threads:
            thread.join(300)
        stuck = sum(thread.is_alive() for thread in threads)
        up = process.poll() is None
        metrics = httpx.get(url + "/metrics", timeout=300, trust_env=False).text if up else ""
    finally:
        process.terminate()
        process.wait(300)
    quarter = len(memory) // 4
    second, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return {
        "clients": clients,
        "exit_status": process.returncode,
        **{kind: found.kinds[kind] for kind in KINDS},
        "busy": found.busy,
        "wrong": found.wrong[:5],
        "errors": sorted(set(found.errors))[:5],
        "stuck_clients": stuck,
        "server_is_up": up,
        "metrics": metrics,
        "answer_seconds": statistics.median(found.seconds),
        "memory_mebibytes": [round(second / 2**20, 1), round(last / 2**20, 1)],
        "memory_grew_by": round(last / second - 1, 4),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args(arguments)
    found = run(options.clients, 60 * options.minutes)
    print(found.pop("metrics"), file=sys.stderr)
    print(json.dumps(found, ensure_ascii=False))
    good = found["server_is_up"] and not (found["wrong"] or found["errors"] or found["stuck_clients"])
    return int(not good or found["memory_grew_by"] > 0.05)


if __name__ == "__main__":
    sys.exit(main())
