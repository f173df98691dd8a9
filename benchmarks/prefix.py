"""What one prefill saves: several answers to one prompt, many questions about one image.

    python -m benchmarks.prefix                                  # 16 answers; 20 questions; 17 tiles
    python -m benchmarks.prefix --precision bfloat16 --peer-calls 4
    python -m benchmarks.prefix --precision int8 --folder /tmp/prefixes  # on the disk to be measured
    python -m benchmarks.prefix --quick

Measured: the cost of the prompt with 16 answers against that with one; 20 short questions about one image
through a `Session`, against our model without one and against as many calls of transformers' generate. The
session gives the same answers (in float32; with fewer bits a prefill in two pieces rounds differently). Calls
that cost the same may be measured in part (--peer-calls) and are scaled up; the table says how many were
made. Then the first token of another question about an image, from the bytes of its tiles on: computed, with
what was kept in memory, and, as after a restart, from files, which the system has in memory or reads from the
disk. Each system runs in a process of its own, all in turn; the last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import (
    Handler,
    base_parser,
    finish,
    median,
    now,
    shared_setup,
    stop_without,
    take_turns,
)
from benchmarks.peers import build_transformers
from benchmarks.shapes import DTYPES, build_checkpoint, prompt, prompt_tokens
from data.tiles import Tiles
from generation.prefix_store import PrefixStore
from generation.session import Session
from inference.cli import positive
from inference.prefix_files import PrefixFolder
from models.vision_language_model import VisionLanguageModel

COLUMNS = {
    "what": "what",
    "system": "system",
    "precision": "precision",
    "prompt_tokens": "prompt:,",
    "measured_calls": "calls",
    "seconds": "seconds:.3f",
    "ratio": "ratio:.4f",
    "equal_answers": "equal",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__, precision=True)
    add = parser.add_argument
    add("--tiles", type=positive, default=17, metavar="N", help="tiles of the image (default 17)")
    add("--answers", type=positive, default=16, metavar="N", help="answers to one prompt (default 16)")
    add("--questions", type=positive, default=20, metavar="N", help="questions about one image (default 20)")
    add("--tokens", type=positive, default=8, metavar="N", help="tokens of each answer (default 8)")
    add("--folder", metavar="DIR", help="where prefixes are kept (default: the folder for temporary files)")
    add("--peer-calls", type=positive, metavar="N", help="calls that are measured (default: all questions)")
    settings = parser.parse_args(arguments)
    if settings.quick:
        settings.rounds, settings.tiles, settings.peer_calls = 1, 1, 2
    settings.peer_calls = min(settings.peer_calls or settings.questions, settings.questions)
    return settings


def make_jobs(settings: argparse.Namespace, setup: dict) -> list[dict]:
    alone = {"what": "alone", "questions": settings.peer_calls}
    if setup["system"] == "transformers":
        return [alone]
    session = {"what": "session", "questions": settings.questions}
    answers = [{"what": "answers", "answers": count} for count in (1, settings.answers)]
    return [alone, session, *answers, {"what": "restart"}]


def make_handler(setup: dict) -> Handler:
    """The child's side: our ways of asking with the fast decode step, or a call of transformers for each."""
    torch.set_num_threads(setup["threads"])
    device, tokens = setup["device"], setup["tokens"]

    def prompts(count: int) -> list[dict]:
        return [prompt(setup["shape"], setup["tiles"], number, device) for number in range(count)]

    if setup["system"] == "transformers":
        theirs = build_transformers(setup["shape"], DTYPES[setup["precision"]], device)

        def handle_theirs(job: dict) -> dict:
            all_inputs, start = prompts(job["questions"]), now(device)
            for inputs in all_inputs:
                mask = torch.ones_like(inputs["input_ids"])
                theirs.generate(**inputs, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
            return {"seconds": now(device) - start}

        return handle_theirs

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
        all_inputs, start = prompts(job["questions"]), now(device)
        system = model if job["what"] == "alone" else Session(model)
        answers = [system.generate_detailed(**inputs, **options) for inputs in all_inputs]
        seconds = now(device) - start
        return {"seconds": seconds, "token_ids": [answer.token_ids[0].tolist() for answer in answers]}

    return handle


def first_tokens(model: VisionLanguageModel, options: dict, setup: dict) -> dict[str, float]:
    """Seconds until a question about an image has its first token; the files are on the disk of `folder`."""
    device, size = setup["device"], model.config.vision.image_size
    shape = (setup["tiles"], 3, size, size)
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values = torch.linspace(-1, 1, 256).repeat(3, 1)

    def ask(question: int, prefixes: PrefixStore | None) -> float:
        ids = prompt(setup["shape"], setup["tiles"], question, device)["input_ids"]
        tiles = Tiles.of(codes, values)  # whose digests nobody has taken
        start = now(device)
        Session(model, prefixes=prefixes).generate_detailed(ids, tiles, **options)
        return now(device) - start

    def in_files() -> PrefixStore:
        return PrefixStore(model, files=PrefixFolder(folder), identity=b"random weights")

    seconds = {"computed": ask(0, None)}
    with tempfile.TemporaryDirectory(dir=setup["folder"]) as folder:
        store = in_files()
        ask(0, store)
        store.close()
        seconds["in memory"] = ask(1, store)
        seconds["in files"] = ask(1, in_files())
        if sys.platform == "linux":
            for path in Path(folder).iterdir():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            seconds["on the disk"] = ask(1, in_files())
    return seconds


def make_rows(settings: argparse.Namespace, ours: list[list[dict]], theirs: list[dict]) -> list[dict]:
    """Args: the replies of our model, as `make_jobs` orders them, and of transformers'."""
    alone, session, one, many = (median(reply["seconds"] for reply in job) for job in ours[:4])
    first = {name: median(reply[name] for reply in ours[4]) for name in ours[4][0]}
    equal = [a == b for a, b in zip(ours[0][0]["token_ids"], ours[1][0]["token_ids"])]
    scale, questions = settings.questions / settings.peer_calls, f"{settings.questions} questions"
    lines = [
        ("1 answer", "ours", one, one, 1),
        (f"{settings.answers} answers", "ours", many, one, 1),
        (questions, "ours, session", session, session, settings.questions),
        (questions, "ours, one by one", scale * alone, session, settings.peer_calls),
    ]
    if theirs:
        seconds = scale * median(reply["seconds"] for reply in theirs)
        lines.append((questions, "transformers", seconds, session, settings.peer_calls))
    computed = first["computed"]
    lines += [("first token", f"ours, {name}", value, computed, 1) for name, value in first.items()]
    shared = {key: getattr(settings, key) for key in ("precision", "device", "shape", "tiles")}
    shared |= {"prompt_tokens": prompt_tokens(settings.shape, settings.tiles)}
    rows = []
    for what, system, seconds, over, calls in lines:
        row = {"what": what, "system": system, "seconds": seconds, "ratio": seconds / over}
        rows.append(row | {"measured_calls": calls} | shared | {"answer_tokens": settings.tokens})
    rows[2]["equal_answers"] = f"{sum(equal)}/{len(equal)}"
    return rows


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    systems = ["ours", "transformers"] if settings.precision in DTYPES else ["ours"]
    shared = shared_setup(settings, "precision", "tiles", "tokens", "folder")
    setups = [{"system": system, **shared} for system in systems]
    replies, failed = take_turns(
        make_handler, setups, lambda setup: make_jobs(settings, setup), settings.rounds, together=True
    )
    stop_without([f"ours {settings.precision}"], failed)
    print(f"{settings.shape} on {settings.device}, {settings.tiles} tiles; seconds until decoding begins, or "
          "until all questions are answered")  # fmt: skip
    finish(
        "prefix",
        settings,
        COLUMNS,
        make_rows(settings, replies[0], [r for own in replies[1:] for r in own[0]]),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
