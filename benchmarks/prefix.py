"""What one prefill saves: several answers to one prompt, many questions about one image.

    python benchmarks/prefix.py                                  # 16 answers; 20 questions; 17 tiles
    python benchmarks/prefix.py --precision bfloat16 --peer-calls 4
    python benchmarks/prefix.py --quick

Measured: the cost of the prompt with 16 answers against that with one; 20 short questions about one image
through a `Session`, against asking ours one by one and against as many calls of transformers' generate.
Each question is answered alike in both ways of ours (in float32; in fewer bits a prefill in two pieces rounds
differently). Calls that cost the same may be measured in part (--peer-calls) and are scaled up; the table
says how many were made. Each system runs in a process of its own, all in turn; the last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: find the repository's packages, not this folder's files
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.common import base_parser, finish, median, now, positive, table
from benchmarks.shapes import DTYPES, build_precision, build_transformers, prompt, prompt_tokens
from benchmarks.workers import interleave, serve

COLUMNS = {
    "what": "what",
    "system": "system",
    "precision": "precision",
    "prompt_tokens": "prompt:,",
    "measured_calls": "calls",
    "seconds": "seconds:.3f",
    "ratio": "ratio:.2f",
    "equal_answers": "equal",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__, one_precision=True)
    add = parser.add_argument
    add("--tiles", type=positive, default=17, metavar="N", help="of the image (default 17)")
    add("--answers", type=positive, default=16, metavar="N", help="to one prompt (default 16)")
    add("--questions", type=positive, default=20, metavar="N", help="about one image (default 20)")
    add("--tokens", type=positive, default=8, metavar="N", help="of each answer (default 8)")
    add("--peer-calls", type=positive, metavar="N", help="measured one by one, of --questions (default: all)")
    settings = parser.parse_args(arguments)
    if settings.quick:
        settings.rounds, settings.tiles, settings.peer_calls = 1, 1, 2
    settings.peer_calls = min(settings.peer_calls or settings.questions, settings.questions)
    return settings


def make_setups(settings: argparse.Namespace) -> list[dict]:
    systems = ["ours", "transformers"] if settings.precision in DTYPES else ["ours"]
    keys = ("threads", "device", "shape", "precision", "tiles", "tokens")
    shared = {key: getattr(settings, key) for key in keys}
    return [{"name": system, "system": system, **shared} for system in systems]


def make_jobs(settings: argparse.Namespace, setup: dict) -> list[dict]:
    alone = {"what": "alone", "questions": settings.peer_calls}
    if setup["system"] == "transformers":
        return [alone]
    session = {"what": "session", "questions": settings.questions}
    return [alone, session, *({"what": "answers", "answers": count} for count in (1, settings.answers))]


# ------------------------------------------------------------------------------------------- the child


def make_handler(setup: dict):
    torch.set_num_threads(setup["threads"])
    return (OursPrefix if setup["system"] == "ours" else TransformersPrefix)(setup).handle


class OursPrefix:
    """Our three ways of asking, with the fast decode step where there is one."""

    def __init__(self, setup: dict):
        from generation.fast.choose_step import fast_step

        self.setup, self.device = setup, setup["device"]
        self.model = build_precision(setup, packed=True)
        step, _ = fast_step(self.model.language_model)
        self.options = {"max_new_tokens": setup["tokens"], "stop_token_ids": (), "decode_step": step}

    def handle(self, job: dict) -> dict:
        if job["what"] == "answers":
            return self._answers(job["answers"])
        from generation.session import Session

        prompts = [self._prompt(number) for number in range(job["questions"])]
        start = now(self.device)
        ask = self.model if job["what"] == "alone" else Session(self.model)
        made = [ask.generate_detailed(**inputs, **self.options) for inputs in prompts]
        seconds = now(self.device) - start
        return {"seconds": seconds, "token_ids": [answer.token_ids[0].tolist() for answer in made]}

    def _prompt(self, question: int) -> dict:
        return prompt(self.setup["shape"], self.setup["tiles"], question, self.device)

    def _answers(self, count: int) -> dict:
        """Seconds until decoding can begin: image, prefill and the copies of the cache."""
        made = self.model.generate_detailed(
            **self._prompt(0), **self.options, num_return_sequences=count, temperature=1.0, seed=0
        )
        return {"seconds": made.seconds["vision"] + made.seconds["prefill"]}


class TransformersPrefix:
    """One call of transformers' generate for each question."""

    def __init__(self, setup: dict):
        self.setup, self.device = setup, setup["device"]
        self.model = build_transformers(setup["shape"], DTYPES[setup["precision"]], self.device)

    def handle(self, job: dict) -> dict:
        shape, tiles, tokens = self.setup["shape"], self.setup["tiles"], self.setup["tokens"]
        prompts = [prompt(shape, tiles, number, self.device) for number in range(job["questions"])]
        start = now(self.device)
        for inputs in prompts:
            mask = torch.ones_like(inputs["input_ids"])
            self.model.generate(**inputs, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        return {"seconds": now(self.device) - start}


# -------------------------------------------------------------------------------------------- the table


def make_rows(settings: argparse.Namespace, replies) -> list[dict]:
    """Args: replies[system][job], as `make_jobs` orders them."""
    ours = replies[0]
    theirs = replies[1][0] if len(replies) > 1 else []
    scale = settings.questions / settings.peer_calls
    one_by_one = scale * median(reply["seconds"] for reply in ours[0])
    session = median(reply["seconds"] for reply in ours[1])
    one, many = (median(reply["seconds"] for reply in job) for job in ours[2:4])
    alone, shared = ours[0][0]["token_ids"], ours[1][0]["token_ids"]
    equal = sum(first == second for first, second in zip(alone, shared))
    questions = f"{settings.questions} questions"
    rows = [
        {"what": "1 answer", "system": "ours", "seconds": one, "ratio": 1.0, "measured_calls": 1},
        {"what": f"{settings.answers} answers", "system": "ours", "seconds": many, "ratio": many / one,
         "measured_calls": 1},
        {"what": questions, "system": "ours, session", "seconds": session, "ratio": 1.0,
         "measured_calls": settings.questions, "equal_answers": f"{equal}/{len(alone)}"},
        {"what": questions, "system": "ours, one by one", "seconds": one_by_one,
         "ratio": one_by_one / session, "measured_calls": settings.peer_calls},
    ]  # fmt: skip
    if theirs:
        seconds = scale * median(reply["seconds"] for reply in theirs)
        rows.append({"what": questions, "system": "transformers", "seconds": seconds,
                     "ratio": seconds / session, "measured_calls": settings.peer_calls})  # fmt: skip
    shared_keys = {
        "precision": settings.precision,
        "device": settings.device,
        "shape": settings.shape,
        "tiles": settings.tiles,
        "prompt_tokens": prompt_tokens(settings.shape, settings.tiles),
        "answer_tokens": settings.tokens,
    }
    return [row | shared_keys for row in rows]


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    if settings.child:
        serve(settings.child, make_handler)
        return 0
    setups = make_setups(settings)
    replies, failed = interleave(
        __file__, setups, lambda setup: make_jobs(settings, setup), settings.rounds, together=True
    )
    if 0 in failed:
        print(f"benchmarks/prefix.py: error: {failed[0]}", file=sys.stderr)
        return 1
    rows = make_rows(settings, replies)
    print(
        f"{settings.shape} on {settings.device}, {settings.tiles} tiles; seconds of the answers: prompt only"
    )
    print(table(COLUMNS, rows))
    finish("prefix", settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
