"""Requests a second over HTTP: serve.py beside `transformers serve`, with the same weights.

    python -m benchmarks.serving                             # the embedded model, 16 clients
    python -m benchmarks.serving --model SmolVLM-256M        # random weights, one tile an image
    python -m benchmarks.serving --quick

Every client asks one question after another, with one of a few images, over OpenAI's protocol, streamed.
Both servers are started on this machine and measured in turn; while one is asked the other one waits. The
texts are compared with those of generate.py's code for the same question alone (float32). The last line is
JSON with requests a second, and with seconds to the first word of an answer: median and 95th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import torch

from benchmarks.common import base_parser, finish, median
from benchmarks.shapes import SHAPES, build_ours
from data.processor import Processor
from generation.options import GenerationOptions
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from inference.cli import positive
from shapes import render, sample_scene

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ROOT / "checkpoints/ocelli-shapes"
SYSTEMS = ("ocelli", "transformers")
QUESTIONS = (
    "How many shapes are there?",
    "What is in the picture?",
    "What colour is the star?",
    "Is there a red circle?",
    "Describe the picture.",
    "How many circles are there?",
    "What does the word say?",
    "What is the digit?",
)
COLUMNS = {
    "system": "system",
    "precision": "precision",
    "clients": "clients",
    "requests": "requests",
    "seconds": "seconds:.1f",
    "requests_per_second": "requests/s:.2f",
    "over_transformers": "x transformers:.2f",
    "first_word_median": "first word s:.3f",
    "first_word_p95": "p95 s:.3f",
    "same_text": "as alone",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__)
    add = parser.add_argument
    add("--model", choices=("embedded", *SHAPES), default="embedded", help="weights (default embedded)")
    add("--precision", choices=("float32", "bfloat16"), default="float32", help="of both (default float32)")
    add("--clients", type=positive, default=16, metavar="N", help="who ask at the same time (default 16)")
    add("--questions", type=positive, default=8, metavar="N", help="of each client (default 8)")
    add("--images", type=positive, default=4, metavar="N", help="different images (default 4)")
    add("--tokens", type=positive, default=32, metavar="N", help="longest answer (default 32)")
    add("--systems", default=",".join(SYSTEMS), help="which, separated by commas (default both)")
    settings = parser.parse_args(arguments)
    settings.systems = settings.systems.split(",")
    if settings.quick:
        settings.rounds, settings.clients, settings.questions = 1, 2, 2
    return settings


def write_shape(name: str, folder: Path) -> Path:
    """A checkpoint of a real shape with random weights, which takes an image as one tile. Words and special
    tokens are those of the embedded model's tokenizer."""
    small = Processor.from_pretrained(EMBEDDED)
    config = json.loads((EMBEDDED / "config.json").read_text())
    ids = {key: config[key] for key in ("image_token_id", "pad_token_id")}
    side = SHAPES[name].vision.image_size
    processor = shutil.copytree(EMBEDDED, folder / "processor")
    path = processor / "preprocessor_config.json"
    sizes = {"size": {"longest_edge": side}, "max_image_size": {"longest_edge": side}}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    path = processor / "processor_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"image_seq_len": SHAPES[name].tokens_per_tile})
    )
    model = build_ours(name, torch.float32, "cpu")
    with torch.no_grad():  # answers of words, to their full length
        head = model.language_model.lm_head.weight
        head[len(small.tokenizer) :] = 0
        head[small.tokenizer.all_special_ids] = 0
    stop = (small.tokenizer.eos_token_id,)
    model.config = replace(model.config, **ids, eos_token_ids=stop)
    return model.save_pretrained(folder / name, Processor.from_pretrained(processor))


# ------------------------------------------------------------------------------------------- the servers
def start_server(
    system: str, model: Path, settings: argparse.Namespace, log: Path
) -> tuple[subprocess.Popen, str]:
    """(process, address of its /v1), once it is healthy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = {
        "ocelli": [sys.executable, ROOT / "serve.py", "--model", model, "--queue", "1000"],
        "transformers": [Path(sys.executable).with_name("transformers"), "serve", model],
    }[system]
    command = [*command, "--port", port, "--dtype", settings.precision, "--device", settings.device]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(settings.threads)}
    with log.open("w") as out:
        process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=out, env=environment)
    deadline, address = time.monotonic() + 600, f"http://127.0.0.1:{port}"
    while True:
        try:
            if httpx.get(address + "/health", timeout=5, trust_env=False).status_code == 200:
                return process, address + "/v1"
        except httpx.HTTPError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"error: {system} did not start: {log.read_text()[-2000:]}")
        time.sleep(0.2)


def model_name(system: str, address: str, model: Path) -> str:
    """What requests call the model: ours lists it, transformers takes the folder that it was started with."""
    if system == "transformers":
        return str(model)
    return httpx.get(address + "/models", trust_env=False).json()["data"][0]["id"]


@dataclass
class Asked:
    """What came of one request: seconds to its first word, and the text."""

    question: str
    image: int
    first_word: float
    text: str


async def ask_server(
    client: httpx.AsyncClient, address: str, model: str, image: int, url: str, question: str, tokens: int
) -> Asked:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    began, first, text = time.perf_counter(), None, ""
    async with client.stream("POST", address + "/chat/completions", json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:]).get("choices")
                if choices and (piece := choices[0]["delta"].get("content")):
                    first = first or time.perf_counter() - began
                    text += piece
    return Asked(question, image, first or time.perf_counter() - began, text)


async def measure(
    address: str, model: str, urls: list[str], settings: argparse.Namespace
) -> tuple[float, list[Asked]]:
    """All clients at once: (seconds, what each request got)."""
    limits = httpx.Limits(max_connections=settings.clients)
    async with httpx.AsyncClient(timeout=3600, limits=limits, trust_env=False) as client:

        async def visit(number: int) -> list[Asked]:
            found = []
            for turn in range(settings.questions):
                image = (number + turn) % len(urls)
                question = QUESTIONS[(3 * number + turn) % len(QUESTIONS)]
                found.append(
                    await ask_server(client, address, model, image, urls[image], question, settings.tokens)
                )
            return found

        began = time.perf_counter()
        answers = await asyncio.gather(*(visit(number) for number in range(settings.clients)))
        return time.perf_counter() - began, [one for own in answers for one in own]


def expected_texts(model: Path, images: list, settings: argparse.Namespace) -> dict[tuple[int, str], str]:
    """What each question gets alone, in this process."""
    checkpoint = open_checkpoint(str(model), device=settings.device, dtype=settings.precision).compiled()
    options = GenerationOptions(max_new_tokens=settings.tokens)
    return {
        (number, question): ask(checkpoint, [image], question, options).finish()["answers"][0]
        for number, image in enumerate(images)
        for question in QUESTIONS
    }


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    torch.set_num_threads(settings.threads)
    images = [render(sample_scene(random.Random(2**40 + n), "heldout"), 512) for n in range(settings.images)]
    urls = []
    for image in images:
        image.save(png := io.BytesIO(), "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(png.getvalue()).decode())
    with TemporaryDirectory() as folder:
        embedded = settings.model == "embedded"
        model = EMBEDDED if embedded else write_shape(settings.model, Path(folder))
        expected = expected_texts(model, images, settings)
        servers: dict[str, tuple[subprocess.Popen, str]] = {}
        names: dict[str, str] = {}
        found: dict[str, list[tuple[float, list[Asked]]]] = {system: [] for system in settings.systems}
        try:
            for system in settings.systems:
                servers[system] = start_server(system, model, settings, Path(folder) / f"{system}.log")
                names[system] = model_name(system, servers[system][1], model)
                warm_up = argparse.Namespace(**vars(settings) | {"clients": 1, "questions": 1})
                asyncio.run(measure(servers[system][1], names[system], urls, warm_up))
            for number in range(settings.rounds):
                for system in settings.systems:
                    print(f"round {number + 1}/{settings.rounds}: {system}", file=sys.stderr)
                    found[system].append(
                        asyncio.run(measure(servers[system][1], names[system], urls, settings))
                    )
        finally:
            for process, _ in servers.values():
                process.terminate()
                process.wait(60)
    finish("serving", settings, COLUMNS, make_rows(settings, found, expected))
    return 0


def make_rows(settings: argparse.Namespace, found: dict, expected: dict[tuple[int, str], str]) -> list[dict]:
    rows = []
    for system, rounds in found.items():
        firsts = [sorted(one.first_word for one in answers) for _, answers in rounds]
        same = [one.text.strip() == expected[one.image, one.question] for _, own in rounds for one in own]
        requests = len(rounds[0][1])
        seconds = median(seconds for seconds, _ in rounds)
        rows.append(
            {
                "system": system,
                **{key: getattr(settings, key) for key in ("model", "precision", "clients")},
                "requests": requests,
                "seconds": seconds,
                "requests_per_second": requests / seconds,
                "first_word_median": median(own[len(own) // 2] for own in firsts),
                "first_word_p95": median(own[int(0.95 * (len(own) - 1))] for own in firsts),
                "same_text": f"{sum(same)}/{len(same)}",
            }
        )
    base = next((row["requests_per_second"] for row in rows if row["system"] == "transformers"), None)
    return [
        row | {"over_transformers": None if base is None else row["requests_per_second"] / base}
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
