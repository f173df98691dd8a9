"""A batch's files: questions and earlier results, both damaged, through `run_batch` as generate.py uses it.

Every line that is not blank must end in one result, an answer or a sentence; a second run must find nothing
changed and keep the answers. Most inputs stop before the model; some go through it.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from data.errors import ImageError, PromptError
from generation.decoding import GenerationOptions
from inference.batch import Question, _requests, run_batch
from inference.batch_files import BatchFiles, read_lines
from inference.checkpoint import Checkpoint, RequestError
from inference.results import to_json
from tests.processors import draw_image
from tests.robustness.judging import Wrong
from tests.robustness.mutations import deep_json, generators, mutate_bytes, mutate_json

REFUSALS = (RequestError,)
OF_A_LINE = (RequestError, PromptError, ImageError)
OPTIONS = GenerationOptions(max_new_tokens=4)
MODEL = "tiny"
QUESTIONS: tuple[Any, ...] = (
    {"image": "a.png", "question": "how many?", "id": 7, "max_new_tokens": 3},
    {"images": ["a.png", "b.png"], "question": "what differs?", "system": "be short"},
    {"question": "what is it?", "note": {"deep": [1, 2]}},
    {"image": "missing.png", "question": "who?"},
    {"image": "a.png", "question": "<image><end_of_utterance>"},
)
_TESTED_LINES = 40


def inputs() -> st.SearchStrategy[tuple[bytes, bytes, bool]]:
    """(questions, earlier results, whether the model is asked)."""
    return generators().map(make)


def make(rng: random.Random) -> tuple[bytes, bytes, bool]:
    lines = [rng.choice(QUESTIONS) for _ in range(rng.choice((0, 1, 2, 3, 6)))]
    results = [answer(number, line) for number, line in enumerate(lines, 1) if rng.random() < 0.5]
    changed = [mutate_json(rng, line) if rng.random() < 0.5 else line for line in lines]
    results = [mutate_json(rng, record) if rng.random() < 0.2 else record for record in results]
    questions, out = _lines(rng, changed), _lines(rng, results)
    if rng.random() < 0.3:
        questions = mutate_bytes(rng, questions)
    if rng.random() < 0.3:
        out = out[: rng.randrange(len(out) + 1)] if rng.random() < 0.5 else mutate_bytes(rng, out)
    if rng.random() < 0.01:
        questions += deep_json(rng.choice((500, 20_000)), rng.choice("[{")) + b"\n"
    if rng.random() < 0.005:
        out += deep_json(20_000) + b"\n"
    return questions, out, rng.random() < 0.04


def _lines(rng: random.Random, values: list[Any]) -> bytes:
    text = b""
    for value in values:
        ascii_only = rng.random() < 0.5
        line = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        text += line + rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b" \n"))
    return text


def answer(number: int, line: dict) -> dict:
    """A result as a run would have written it."""
    images = line.get("images", [line["image"]] if "image" in line else [])
    own = {name: line[name] for name in ("system", "max_new_tokens") if name in line}
    asked = {"model": MODEL, "images": images, "question": line["question"]}
    return {"line": number, **asked, "answers": ["3"], "options": options() | own}


def options() -> dict[str, Any]:
    return {"max_new_tokens": OPTIONS.max_new_tokens, "system": None}


@cache
def checkpoint() -> Checkpoint:
    from tests.processors import embedded
    from tests.robustness.tiny_files import tiny_model

    processor = embedded(split=True)
    return Checkpoint(MODEL, tiny_model(processor), processor, 0.0)


def opened(folder: Path):
    for name in ("a.png", "b.png"):
        draw_image(20, 30, seed=len(name)).save(folder / name)
    questions, out = folder / "questions.jsonl", folder / "out.jsonl"

    def run(value: tuple[bytes, bytes, bool]) -> str:
        questions.write_bytes(value[0])
        out.write_bytes(value[1])
        files = BatchFiles(questions, out, MODEL, options())
        kept = out.read_bytes().splitlines()
        if len(kept) < len(files.answered):
            raise Wrong(f"{len(files.answered)} answers are counted, {len(kept)} are kept")
        if not value[2]:
            prepare_all(files)
            return f"{min(files.remaining, 3)} lines prepared"
        run_batch(files, checkpoint(), OPTIONS, batch_size=2, progress=False)
        check_results(questions, out, kept)
        return "answered"

    return run


def prepare_all(files: BatchFiles) -> None:
    """Make every request; what is wrong with one of them must be said in an own sentence."""
    for number, deferred in enumerate(_requests(files, checkpoint(), OPTIONS, None)):
        if number > _TESTED_LINES:
            break
        question: Question = deferred.key[0]
        try:
            deferred.prepare()
        except OF_A_LINE as error:
            question.error = error
            to_json(question.record()).encode()


def check_results(questions: Path, out: Path, kept: list[bytes]) -> None:
    """One result for each line, those there were among them, and a second run that has only errors to do."""
    raw = out.read_bytes().splitlines()
    if not set(kept) <= set(raw):
        raise Wrong("earlier answers were changed")
    records = [json.loads(line) for line in raw]
    asked = [number for number, _, _ in read_lines(questions)]
    if (
        sorted({record["line"] for record in records}) != asked
        or len(records) < len(asked)
        or ([record["line"] for record in records] != sorted(record["line"] for record in records))
    ):
        raise Wrong(f"results for lines {[record['line'] for record in records]}, asked were {asked}")
    again = BatchFiles(questions, out, MODEL, options())
    failed = {record["line"] for record in records if "error" in record}
    if again.remaining != len(failed):
        raise Wrong(f"{len(failed)} lines failed, a second run would do {again.remaining}")
