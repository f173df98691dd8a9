"""Many questions about few images: the evaluation's runner against transformers' model in padded batches.

    python benchmarks/evaluation.py                         # 400 questions on 20 images of one tile
    python benchmarks/evaluation.py --peer-questions 400    # nothing of transformers' scaled up
    python benchmarks/evaluation.py --quick

Both take the same images and prompts through their own processors and answer greedily, with as many tokens
for each answer. Ours is what `python -m eval` runs: grouped by image, `--slots` answers at a time. Of
transformers' batches the fastest size counts (--peer-batches); every question costs it the same, so that
some of them may be measured (--peer-questions) and are scaled up; the table says how many were. The
answers of both are compared. Each system runs in a process of its own, all in turn; the last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

if not __package__:  # run as a script: find the repository's packages, not this folder's files
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from PIL import Image

from benchmarks.common import base_parser, finish, integers, median, now, positive, table
from benchmarks.shapes import DTYPES, SHAPES, build_ours, build_transformers
from benchmarks.workers import interleave, serve
from models.checkpoints.idefics3 import stored_name

WORDS = 14  # of a question, which is as many tokens
COLUMNS = {
    "system": "system",
    "batch": "at a time",
    "questions": "questions",
    "tokens": "tokens",
    "tiles": "tiles",
    "seconds": "seconds:.2f",
    "samples_per_second": "samples/s:.3f",
    "over_best": "x transformers:.2f",
    "equal_answers": "equal",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__)
    add = parser.add_argument
    add("--precision", choices=DTYPES, default="float32", help="default float32")
    add("--pictures", type=positive, default=20, metavar="N", help="of one tile each (default 20)")
    add("--each", type=positive, default=20, metavar="N", help="questions about each (default 20)")
    add("--tokens", type=positive, default=8, metavar="N", help="of each answer (default 8)")
    add("--slots", type=positive, default=32, metavar="N", help="our answers at a time (default 32)")
    add("--peer-batches", type=integers, default=[1, 4, 8, 16], metavar="N,...", help="default 1,4,8,16")
    add("--peer-questions", type=positive, default=32, metavar="N", help="measured of each (default 32)")
    settings = parser.parse_args(arguments)
    if not settings.peer_batches or min(settings.peer_batches) < 1:
        parser.error(f"--peer-batches: expected numbers from 1, got {settings.peer_batches}")
    if settings.quick:
        settings.rounds, settings.pictures, settings.each = 1, 2, 6
        settings.peer_batches, settings.peer_questions = settings.peer_batches[:2], 4
    settings.peer_questions = min(settings.peer_questions, settings.pictures * settings.each)
    return settings


def make_setups(settings: argparse.Namespace) -> list[dict]:
    keys = ("threads", "device", "shape", "precision", "pictures", "each", "tokens")
    shared = {key: getattr(settings, key) for key in keys}
    return [{"name": name, "system": name, **shared} for name in ("ours", "transformers")]


def make_jobs(settings: argparse.Namespace, setup: dict) -> list[dict]:
    if setup["system"] == "ours":
        return [{"batch": settings.slots, "questions": settings.pictures * settings.each}]
    return [{"batch": batch, "questions": settings.peer_questions} for batch in settings.peer_batches]


# ------------------------------------------------------------------------------------------- the child


def make_handler(setup: dict):
    torch.set_num_threads(setup["threads"])
    return (Ours if setup["system"] == "ours" else Transformers)(setup).handle


class Questions:
    """The same model shape, processor, images and questions for both systems."""

    def __init__(self, setup: dict):
        from data.processor import make_processor

        self.setup, self.device = setup, setup["device"]
        shape = SHAPES[setup["shape"]]
        tokenizer = make_tokenizer(shape.text.vocab_size)
        self.config = replace(
            shape,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            eos_token_ids=(tokenizer.eos_token_id,),
        )
        self.side = shape.vision.image_size
        self.processor = make_processor(
            tokenizer, image_size=self.side, image_seq_len=shape.tokens_per_tile, config=self.config
        )

    def image(self, question: int) -> list[Image.Image]:
        """What question number so-and-so is about; the images take turns."""
        number = question % self.setup["pictures"]
        pixels = np.random.default_rng(number).integers(0, 256, (self.side, self.side, 3), dtype=np.uint8)
        return [Image.fromarray(pixels)]

    def question(self, number: int) -> str:
        drawn = np.random.default_rng(1000 + number).integers(100, self.config.text.vocab_size, WORDS)
        return " ".join(f"w{word}" for word in drawn)


def make_tokenizer(size: int):
    """A word for each id, so that ids and texts tell the same."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from data.tokenizer import SPECIAL_TOKENS

    names = [*SPECIAL_TOKENS, "User:", "Assistant:"]
    names += [f"w{number}" for number in range(len(names), size)]
    backend = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=SPECIAL_TOKENS[0])
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
        unk_token=SPECIAL_TOKENS[0],
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )


class Ours(Questions):
    """What `python -m eval` runs, from samples to texts."""

    def __init__(self, setup: dict):
        from inference.checkpoint import Checkpoint

        super().__init__(setup)
        model = build_ours(self.config, DTYPES[setup["precision"]], self.device)
        self.checkpoint = Checkpoint(setup["shape"], model, self.processor, 0.0).compiled()

    def handle(self, job: dict) -> dict:
        from eval.answering import answers
        from eval.tasks import Sample
        from generation.scheduler import Stats

        samples = [
            Sample(
                id=str(number),
                question=self.question(number),
                prompt=self.question(number),
                targets=("",),
                images=partial(self.image, number),
                group=str(number % self.setup["pictures"]),
                shows=(str(number % self.setup["pictures"]),),
                max_new_tokens=self.setup["tokens"],
            )
            for number in range(job["questions"])
        ]
        stats, start = Stats(), now(self.device)
        found = dict(answers(self.checkpoint, samples, job["batch"], stats=stats))
        seconds = now(self.device) - start
        if wrong := [answer.error for answer in found.values() if answer.error]:
            raise ValueError(wrong[0])
        texts = [found[number].text for number in range(len(samples))]
        return {
            "seconds": seconds,
            "answers": texts,
            "tiles": stats.tiles_encoded,
            "tokens": stats.new_tokens,
        }


class Transformers(Questions):
    """transformers' processor, and its model's generate on padded batches."""

    def __init__(self, setup: dict):
        super().__init__(setup)
        dtype = DTYPES[setup["precision"]]
        self.model = build_transformers(self.config, dtype, self.device)
        ours = build_ours(self.config, dtype, self.device).state_dict()
        self.model.load_state_dict({stored_name(name): tensor for name, tensor in ours.items()}, strict=True)
        del ours
        self.model.generation_config.pad_token_id = self.processor.pad_token_id

    def handle(self, job: dict) -> dict:
        texts, tiles, tokens, start = [], 0, 0, now(self.device)
        for begin in range(0, job["questions"], job["batch"]):
            numbers = range(begin, min(begin + job["batch"], job["questions"]))
            inputs = self.prepare(numbers)
            made = self.model.generate(**inputs, max_new_tokens=self.setup["tokens"], do_sample=False)
            new = made[:, inputs["input_ids"].shape[1] :]
            texts += [self.processor.decode(row).strip() for row in new]
            tiles += inputs["pixel_values"].shape[0] * inputs["pixel_values"].shape[1]
            tokens += new.numel()
        return {"seconds": now(self.device) - start, "answers": texts, "tiles": tiles, "tokens": tokens}

    def prepare(self, numbers):
        """Model inputs of some questions, as transformers' own processor makes them."""
        processor = self.processor.hf_processor
        content = [[{"type": "image"}, {"type": "text", "text": self.question(number)}] for number in numbers]
        prompts = [
            processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
            for parts in content
        ]
        images = [self.image(number) for number in numbers]
        return processor(
            text=prompts, images=images, padding=True, padding_side="left", return_tensors="pt"
        ).to(self.device, DTYPES[self.setup["precision"]])


# -------------------------------------------------------------------------------------------- the table


def make_rows(settings: argparse.Namespace, replies) -> list[dict]:
    """Args: replies[system][job], as `make_jobs` orders them."""
    ours, theirs = replies
    told = ours[0][0]["answers"] if ours[0] else []
    rows = []
    for system, jobs in (("ours", ours), ("transformers", theirs)):
        setup = {"system": system}
        for job, made in zip(make_jobs(settings, setup), jobs, strict=True):
            if not made:
                continue
            seconds, count = median(reply["seconds"] for reply in made), job["questions"]
            row = {"system": system, **job, "seconds": seconds, "samples_per_second": count / seconds}
            row |= {"tokens": made[0]["tokens"], "tiles": made[0]["tiles"]}
            if system == "transformers" and told:
                row["equal_answers"] = sum(a == b for a, b in zip(told, made[0]["answers"]))
            rows.append(row)
    best = max((row["samples_per_second"] for row in rows if row["system"] != "ours"), default=None)
    for row in rows:
        if row["system"] == "ours" and best:
            row["over_best"] = row["samples_per_second"] / best
    return rows


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    if settings.child:
        serve(settings.child, make_handler)
        return 0
    setups = make_setups(settings)
    replies, failed = interleave(
        __file__, setups, lambda setup: make_jobs(settings, setup), settings.rounds, together=False
    )
    rows = make_rows(settings, replies)
    print(
        f"{settings.pictures * settings.each} questions about {settings.pictures} images, "
        f"{settings.shape}, {settings.precision}, {settings.tokens} tokens an answer, "
        f"{settings.threads} threads"
    )
    print(table(COLUMNS, rows))
    finish("evaluation", settings, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
