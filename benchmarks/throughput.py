"""How much many requests together get: batches, prefixes that are kept, the server.

    python -m benchmarks.throughput batching                        # 64 requests, 8 slots, text prompts
    python -m benchmarks.throughput batching --pictures 20 --requests 400 --slots 32 --tokens 8
    python -m benchmarks.throughput prefix                          # 16 answers, 20 questions, 17 tiles
    python -m benchmarks.throughput serving                         # the embedded model, 16 clients

transformers takes part with the same weights where it has them. --quick shows whether it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from torch import Tensor

from benchmarks.common import (
    DTYPES,
    PRECISION,
    ROOT,
    SHAPES,
    Command,
    Handler,
    build_checkpoint,
    compare,
    execute,
    fill,
    finish,
    image_tokens,
    median,
    name_of,
    names,
    now,
    option,
    prompt,
    prompt_tokens,
    shared_setup,
    take_turns,
    tile_shape,
    words,
)
from benchmarks.peers import Transformers
from data.tiles import Parts
from generation.options import GenerationOptions
from generation.prefix_store import PrefixStore
from generation.requests import Request
from generation.scheduler import Scheduler
from generation.session import Session
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from inference.flags import positive
from inference.kept import PrefixFolder
from models.vision_language_model import VisionLanguageModel
from shapes import render, sample_scene

# -------------------------------------------------------------------------------------------- batching
SHORTEST, LONGEST, MEAN = 4, 128, 20  # tokens of an answer
PROMPT_WORDS = (16, 64)
BATCHED = ("scheduler", "padded batches", "one by one", "transformers")
BATCHING_COLUMNS = """system precision slots new_tokens:, decode_steps:, seconds:.2f tokens_per_second:.1f
    over_padded_batches:.2f identical"""


def check_batching(settings: argparse.Namespace) -> None:
    if settings.pictures < 0:
        raise ValueError(f"--pictures: expected 0 or more, got {settings.pictures}")
    if settings.peers and settings.precision not in DTYPES:
        raise ValueError(f"--peers: transformers has no {settings.precision} weights")
    if settings.quick:
        settings.rounds, settings.requests = 1, min(settings.requests, 12)


def answer_lengths(count: int) -> list[int]:
    """Tokens of each answer: exponential, so that most are short, with a full-length one in every 16."""
    generator = random.Random(0)
    lengths = [
        min(LONGEST, SHORTEST + int(generator.expovariate(1 / (MEAN - SHORTEST)))) for _ in range(count)
    ]
    lengths[7::16] = [LONGEST] * len(lengths[7::16])
    return lengths


def batched_prompts(shape: str, count: int, images: int) -> list[tuple[Tensor, Tensor | None]]:
    """(ids (T,), tiles (1, 3, H, W) or None) of each request; those about one image follow one another."""
    generator, prompts, each = random.Random(1), [], -(-count // max(1, images))
    for number in range(count):
        ids, tiles = words(shape, number, generator.randint(*PROMPT_WORDS)), None
        if images:
            ids = torch.cat((words(shape, 1000, 4), image_tokens(shape, 1), ids))
            pixels = torch.empty(1, *tile_shape(SHAPES[shape]))
            tiles = fill(pixels, 1.0, start=104_729 * (number // each))
        prompts.append((ids, tiles))
    return prompts


def batching(settings: argparse.Namespace, folder: str) -> None:
    """Many requests at once: the scheduler against padded batches that wait for their longest row.

    Answers are 4 to 128 tokens, most of them short, of lengths fixed beforehand and the same for all;
    --tokens gives all the same length. Requests about one image stand one after another, as in an evaluation.
    The padded batches take the requests as they come, as many as there are slots, and stop when all their
    rows have. The tokens of all are compared with those of each request alone (identical in float32).
    """
    shared = shared_setup(settings, "precision", "slots", "requests", "pictures", "tokens")
    setups = [{"system": system, **shared} for system in (*BATCHED[:3], *settings.peers)]
    measured, _ = take_turns(
        batching_handler, setups, lambda setup: [{}], settings.rounds, True, map(name_of, setups)
    )
    reference = measured[BATCHED.index("one by one")].replies[0]["token_ids"]
    rows = []
    for setup, _, rounds in measured:
        tokens = rounds[0]["token_ids"]
        same, seconds = sum(map(list.__eq__, tokens, reference)), median(one["seconds"] for one in rounds)
        row = setup | {"new_tokens": sum(map(len, tokens)), "decode_steps": rounds[0]["decode_steps"]}
        row |= {"slots": 1 if setup["system"] == "one by one" else settings.slots, "seconds": seconds}
        row |= {"tokens_per_second": row["new_tokens"] / seconds, "identical": f"{same}/{len(tokens)}"}
        rows.append(row | {"identical_to_alone": same == len(tokens)})
    compare(rows, "tokens_per_second", (), ["padded batches"])
    print(f"{settings.shape} on {settings.device}: {settings.requests} requests, {settings.pictures} images")
    finish("batching", settings, BATCHING_COLUMNS, rows)


def batching_handler(setup: dict) -> Handler:
    """The child's side: the requests of a setup, answered in one of the ways."""
    torch.set_num_threads(setup["threads"])
    system, device, slots = setup["system"], setup["device"], setup["slots"]
    prompts = batched_prompts(setup["shape"], setup["requests"], setup["pictures"])
    tokens = setup["tokens"]
    lengths = [tokens] * len(prompts) if tokens else answer_lengths(len(prompts))
    if system == "transformers":
        theirs = Transformers(setup)
    else:
        checkpoint = build_checkpoint(setup, fast=True)
        model, step = checkpoint.model, checkpoint.decode_step

    def scheduled() -> tuple[list[list[int]], int]:
        scheduler = Scheduler(model, slots=slots, decode_step=step)
        options = [GenerationOptions(max_new_tokens=length, stop_token_ids=()) for length in lengths]
        requests = (
            Request(ids, tiles, options=options[number], key=number)
            for number, (ids, tiles) in enumerate(prompts)
        )
        done = {completed.key: completed for completed in scheduler.run(requests)}
        if errors := [completed.error for completed in done.values() if completed.error is not None]:
            raise errors[0]
        return [done[number].token_ids for number in range(len(prompts))], scheduler.stats.decode_steps

    def batch(part: slice) -> tuple[list[list[int]], int]:
        """Rows padded on the left to one length; each answer cut where it was to end."""
        rows, ends = prompts[part], lengths[part]
        longest = max(len(ids) for ids, _ in rows)
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
        for row, (own, _) in enumerate(rows):
            ids[row, longest - len(own) :] = own
            mask[row, longest - len(own) :] = 1
        tiles = [tiles for _, tiles in rows if tiles is not None]
        inputs = {"input_ids": ids, "attention_mask": mask}
        inputs |= {"pixel_values": torch.cat(tiles)[:, None]} if tiles else {}
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        if system == "transformers":
            answers, steps = theirs.generate(max(ends), **inputs)[:, longest:].tolist(), max(ends) - 1
        else:
            made = model.generate_detailed(
                **inputs, max_new_tokens=max(ends), stop_token_ids=(), decode_step=step
            )
            answers, steps = made.token_ids.tolist(), made.decode_steps
        return [row[:end] for row, end in zip(answers, ends, strict=True)], steps

    def handle(job: dict) -> dict:
        start = now(device)
        if system == "scheduler":
            tokens, steps = scheduled()
        else:
            size = 1 if system == "one by one" else slots
            parts = [batch(slice(first, first + size)) for first in range(0, len(prompts), size)]
            tokens, steps = [row for rows, _ in parts for row in rows], sum(taken for _, taken in parts)
        return {"seconds": now(device) - start, "token_ids": tokens, "decode_steps": steps}

    return handle


# -------------------------------------------------------------------------------------------- prefixes
PREFIX_COLUMNS = """what system precision prompt_tokens:, measured_calls seconds:.3f ratio:.4f
    equal_answers"""


def check_prefix(settings: argparse.Namespace) -> None:
    if settings.quick:
        settings.rounds, settings.tiles, settings.peer_calls = 1, 1, 2
    settings.peer_calls = min(settings.peer_calls or settings.questions, settings.questions)


def prefix(settings: argparse.Namespace, folder: str) -> None:
    """What one prefill saves: several answers to one prompt, many questions about one image.

    Measured: the cost of the prompt with 16 answers against that with one; 20 short questions about one image
    through a `Session`, against our model without one and against as many calls of transformers' generate.
    The session gives the same answers (in float32; with fewer bits a prefill in two pieces rounds
    differently). Calls that cost the same may be measured in part (--peer-calls) and are scaled up; the table
    says how many were made. Then the first token of another question about an image, from the bytes of its
    tiles on: computed, with what was kept in memory, and, as after a restart, from files, which the system
    has in memory or reads from the disk.
    """
    shared = shared_setup(settings, "precision", "tiles", "tokens", "folder")
    systems = ["ours", "transformers"] if settings.precision in DTYPES else ["ours"]
    alone: dict[str, Any] = {"what": "alone", "questions": settings.peer_calls}
    jobs = [alone, {"what": "session", "questions": settings.questions}]
    jobs += [{"what": "answers", "answers": count} for count in (1, settings.answers)]
    jobs += [{"what": "restart"}]
    setups = [{"system": system, **shared} for system in systems]
    measured, _ = take_turns(
        prefix_handler, setups, lambda setup: jobs if setup["system"] == "ours" else [alone], settings.rounds,
        True, [name_of(setups[0])],
    )  # fmt: skip
    ours, theirs = [one.replies for one in measured[: len(jobs)]], measured[len(jobs) :]
    own, session, one, many = (median(reply["seconds"] for reply in replies) for replies in ours[:4])
    first = {name: median(reply[name] for reply in ours[4]) for name in ours[4][0]}
    equal = [a == b for a, b in zip(ours[0][0]["token_ids"], ours[1][0]["token_ids"])]
    scale, questions = settings.questions / settings.peer_calls, f"{settings.questions} questions"
    lines = [
        ("1 answer", "ours", one, one, 1),
        (f"{settings.answers} answers", "ours", many, one, 1),
        (questions, "ours, session", session, session, settings.questions),
        (questions, "ours, one by one", scale * own, session, settings.peer_calls),
    ]
    for peer in theirs:
        seconds = scale * median(reply["seconds"] for reply in peer.replies)
        lines.append((questions, "transformers", seconds, session, settings.peer_calls))
    lines += [("first token", f"ours, {name}", value, first["computed"], 1) for name, value in first.items()]
    shared |= {"prompt_tokens": prompt_tokens(settings.shape, settings.tiles)}
    rows = [
        shared
        | {"what": what, "system": system, "seconds": value, "ratio": value / over, "measured_calls": n}
        for what, system, value, over, n in lines
    ]
    rows[2]["equal_answers"] = f"{sum(equal)}/{len(equal)}"
    print(f"{settings.shape} on {settings.device}, {settings.tiles} tiles: seconds until decoding begins, or "
          "until all questions are answered")  # fmt: skip
    finish("prefix", settings, PREFIX_COLUMNS, rows)


def prefix_handler(setup: dict) -> Handler:
    """The child's side: our ways of asking with the fast decode step, or a call of transformers for each."""
    torch.set_num_threads(setup["threads"])
    device, tokens = setup["device"], setup["tokens"]

    def prompts(count: int) -> list[dict]:
        return [prompt(setup["shape"], setup["tiles"], number, device) for number in range(count)]

    def timed(ask_one: Callable[..., Any], count: int) -> tuple[float, list]:
        all_inputs, start = prompts(count), now(device)
        answers = [ask_one(**inputs) for inputs in all_inputs]
        return now(device) - start, answers

    if setup["system"] == "transformers":
        theirs = partial(Transformers(setup).generate, tokens)
        return lambda job: {"seconds": timed(theirs, job["questions"])[0]}

    checkpoint = build_checkpoint(setup, fast=True)
    model, step = checkpoint.model, checkpoint.decode_step
    options = {"max_new_tokens": tokens, "stop_token_ids": (), "decode_step": step}

    def handle(job: dict) -> dict:
        if job["what"] == "answers":  # seconds until decoding can begin: image, prefill, copies of the cache
            sampled = {"num_return_sequences": job["answers"], "temperature": 1.0, "seed": 0}
            generated = model.generate_detailed(**prompts(1)[0], **options, **sampled)
            return {"seconds": generated.seconds["vision"] + generated.seconds["prefill"]}
        if job["what"] == "restart":
            return first_tokens(model, options | {"max_new_tokens": 1}, setup)
        system = model if job["what"] == "alone" else Session(model)
        seconds, answers = timed(partial(system.generate_detailed, **options), job["questions"])
        return {"seconds": seconds, "token_ids": [answer.token_ids[0].tolist() for answer in answers]}

    return handle


def first_tokens(model: VisionLanguageModel, options: dict, setup: dict) -> dict[str, float]:
    """Seconds until a question about an image has its first token; the files are on the disk of `folder`."""
    device, shape = setup["device"], (setup["tiles"], *tile_shape(model.config))
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values = torch.linspace(-1, 1, 256).repeat(3, 1)

    def first_of(question: int, prefixes: PrefixStore | None) -> float:
        ids = prompt(setup["shape"], setup["tiles"], question, device)["input_ids"]
        tiles = Parts.of(codes, values)  # whose digests nobody has taken
        start = now(device)
        Session(model, prefixes=prefixes).generate_detailed(ids, tiles, **options)
        return now(device) - start

    def in_files() -> PrefixStore:
        return PrefixStore(model, files=PrefixFolder(folder), identity=b"random weights")

    seconds = {"computed": first_of(0, None)}
    with tempfile.TemporaryDirectory(dir=setup["folder"]) as folder:
        store = in_files()
        first_of(0, store)
        store.close()
        seconds["in memory"] = first_of(1, store)
        seconds["in files"] = first_of(1, in_files())
        if sys.platform == "linux":
            for path in Path(folder).iterdir():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            seconds["on the disk"] = first_of(1, in_files())
    return seconds


# --------------------------------------------------------------------------------------------- serving
EMBEDDED = ROOT / "checkpoints/ocelli-shapes"
SERVERS = ("ocelli", "transformers")
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
SERVING_COLUMNS = """system precision clients requests seconds:.1f requests_per_second:.2f
    over_transformers:.2f first_word_median:.3f first_word_p95:.3f same_text"""


def check_serving(settings: argparse.Namespace) -> None:
    if settings.quick:
        settings.rounds, settings.clients, settings.questions = 1, 2, 2


def serving(settings: argparse.Namespace, folder: str) -> None:
    """Requests a second over HTTP: serve.py beside `transformers serve`, with the same weights.

    Every client asks one question after another, with one of a few images, over OpenAI's protocol, streamed.
    Both servers are started on this machine and measured in turn; while one is asked the other one waits. The
    texts are compared with those of generate.py's code for the same question alone (float32). Requests a
    second, and seconds to the first word of an answer: median and 95th percentile.
    """
    torch.set_num_threads(settings.threads)
    images = [render(sample_scene(random.Random(2**40 + n), "heldout"), 512) for n in range(settings.images)]
    urls = []
    for image in images:
        image.save(png := io.BytesIO(), "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(png.getvalue()).decode())
    checkpoint = open_checkpoint(settings.model, device=settings.device, dtype=settings.precision).compiled()
    options = GenerationOptions(max_new_tokens=settings.tokens)
    expected = {
        (number, question): ask(checkpoint, [image], question, options).finish()["answers"][0]
        for number, image in enumerate(images)
        for question in QUESTIONS
    }
    found: dict[str, list[tuple[float, list[Answered]]]] = {system: [] for system in settings.systems}
    with contextlib.ExitStack() as stack:
        servers = {}
        for system in settings.systems:
            address = stack.enter_context(started(system, settings, Path(folder) / f"{system}.log"))
            name = settings.model  # transformers takes the folder that it was started with, ours lists it
            if system == "ocelli":
                name = httpx.get(address + "/models", trust_env=False).json()["data"][0]["id"]
            servers[system] = address, name
            asyncio.run(visit(servers[system], urls, settings.tokens, 1, 1))
        for number in range(settings.rounds):
            for system, server in servers.items():
                print(f"round {number + 1}/{settings.rounds}: {system}", file=sys.stderr)
                began, sizes = time.perf_counter(), (settings.tokens, settings.clients, settings.questions)
                answers = asyncio.run(visit(server, urls, *sizes))
                found[system].append((time.perf_counter() - began, answers))
    rows = []
    for system, rounds in found.items():
        firsts = [sorted(one.first_word for one in answers) for _, answers in rounds]
        same = [one.text.strip() == expected[one.image, one.question] for _, own in rounds for one in own]
        requests, seconds = len(rounds[0][1]), median(seconds for seconds, _ in rounds)
        row = {key: getattr(settings, key) for key in ("model", "precision", "clients")}
        row |= {"system": system, "requests": requests, "seconds": seconds}
        row |= {"requests_per_second": requests / seconds, "same_text": f"{sum(same)}/{len(same)}"}
        row |= {"first_word_median": median(own[len(own) // 2] for own in firsts)}
        rows.append(row | {"first_word_p95": median(own[int(0.95 * (len(own) - 1))] for own in firsts)})
    compare(rows, "requests_per_second", (), ["transformers"])
    finish("serving", settings, SERVING_COLUMNS, rows)


def command_of(system: str, settings: argparse.Namespace, port: int) -> list[str]:
    """What starts a server."""
    command = {
        "ocelli": [sys.executable, str(ROOT / "serve.py"), "--model", settings.model, "--queue", "1000"],
        "transformers": [str(Path(sys.executable).with_name("transformers")), "serve", settings.model],
    }[system]
    return [*command, "--port", str(port), "--dtype", settings.precision, "--device", settings.device]


@contextlib.contextmanager
def started(system: str, settings: argparse.Namespace, log: Path) -> Iterator[str]:
    """The address of a server's /v1, once it is healthy, as long as the block lasts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(settings.threads)}
    with log.open("w") as out:
        command = command_of(system, settings, port)
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    deadline, address = time.monotonic() + 600, f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(address + "/health", timeout=5, trust_env=False).status_code == 200:
                    break
            time.sleep(0.2)
        else:
            sys.exit(f"error: {system} did not start: {log.read_text()[-2000:]}")
        yield address + "/v1"
    finally:
        process.terminate()
        process.wait(60)


class Answered(NamedTuple):
    """What came of one request: seconds to its first word, and the text."""

    question: str
    image: int
    first_word: float
    text: str


async def visit(
    server: tuple[str, str], urls: list[str], tokens: int, clients: int, questions: int
) -> list[Answered]:
    """What each request got of so many clients at once, each with one question after another. A server is an
    address and a model's name."""
    address, model = server
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(timeout=3600, limits=limits, trust_env=False) as client:

        async def ask_one(image: int, question: str) -> Answered:
            shown = {"type": "image_url", "image_url": {"url": urls[image]}}
            message = {"role": "user", "content": [shown, {"type": "text", "text": question}]}
            body = {"model": model, "messages": [message], "max_tokens": tokens, "stream": True}
            began, first, text = time.perf_counter(), None, ""
            async with client.stream("POST", address + "/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:300]!r}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        choices = json.loads(line[6:]).get("choices")
                        if choices and (piece := choices[0]["delta"].get("content")):
                            first = first or time.perf_counter() - began
                            text += piece
            return Answered(question, image, first or time.perf_counter() - began, text)

        async def one_client(number: int) -> list[Answered]:
            return [
                await ask_one((number + turn) % len(urls), QUESTIONS[(3 * number + turn) % len(QUESTIONS)])
                for turn in range(questions)
            ]

        answers = await asyncio.gather(*map(one_client, range(clients)))
        return [one for own in answers for one in own]


COMMANDS = {
    "batching": Command(batching, check_batching, {
        "--precision": PRECISION,
        "--requests": option(positive, 64, "number of requests"),
        "--slots": option(positive, 8, "rows at once"),
        "--pictures": option(int, 0, "different images; 0 for text only"),
        "--tokens": option(positive, None, "tokens of each answer", "4 to 128"),
        "--peers": option(names("transformers"), [], "transformers, besides ours", "none"),
    }),
    "prefix": Command(prefix, check_prefix, {
        "--precision": PRECISION,
        "--tiles": option(positive, 17, "tiles of the image"),
        "--answers": option(positive, 16, "answers to one prompt"),
        "--questions": option(positive, 20, "questions about one image"),
        "--tokens": option(positive, 8, "tokens of each answer"),
        "--folder": option(str, None, "where prefixes are kept", "the folder for temporary files"),
        "--peer-calls": option(positive, None, "calls that are measured", "all questions"),
    }),
    "serving": Command(serving, check_serving, {
        "--precision": PRECISION | {"choices": tuple(DTYPES)},
        "--model": option(str, str(EMBEDDED), "checkpoint folder", "the embedded one"),
        "--clients": option(positive, 16, "who ask at the same time"),
        "--questions": option(positive, 8, "of each client"),
        "--images": option(positive, 4, "different images"),
        "--tokens": option(positive, 32, "longest answer"),
        "--systems": option(names(*SERVERS), list(SERVERS), "which", "both"),
    }),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    return execute(__doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
