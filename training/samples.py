"""What the model answers to held-out questions while it trains, kept with the images that were asked about.

output/samples/step-00000500/answers.jsonl     # {"pictures": ["00.png"], "question": …}
                             00.png
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from data.errors import BadRow, ImageError, PromptError
from data.images import load_image
from data.order import ShardReader
from data.processor import Processor
from data.sources import Mixture
from models.vision_language_model import VisionLanguageModel
from shapes import heldout_questions, render

FOLDER, ANSWERS = "samples", "answers.jsonl"
_NEW_TOKENS = 64
_LONGEST = 512  # pixels of an image's longer side as it is kept
_DRAWN = 128  # pixels a side of a drawn image
_LOOKED_AT = 200  # rows in which to look for good ones


@dataclass(frozen=True)
class Question:
    """Messages up to an answer, in the Hub's form; what they show and say; the answer, and others as good."""

    conversation: list[dict[str, Any]]
    images: tuple[Image.Image, ...]
    text: str
    target: str
    accept: tuple[str, ...] = ()

    def is_right(self, answer: str) -> bool:
        """Whether an answer is the target but for case, space and a final dot."""
        return _plain(answer) in {_plain(text) for text in (self.target, *self.accept)}


@dataclass(frozen=True)
class Answered:
    """A question with what the model made of it."""

    question: Question
    answer: str

    @property
    def right(self) -> bool:
        return self.question.is_right(self.answer)

    @property
    def caption(self) -> str:
        return f"{self.question.text} -> {self.answer} (expected: {self.question.target})"


def _plain(text: str) -> str:
    return text.strip().lower().removesuffix(".").strip()


# -------------------------------------------------------------------------------------------- questions
def questions_of_rows(mixture: Mixture, processor: Processor, count: int) -> list[Question]:
    """The first questions of held-out rows, in an order that is always the same; bad rows are passed over."""
    reader = ShardReader(mixture, 0, 1, seed=0, epochs=1)
    found: list[Question] = []
    for _ in range(_LOOKED_AT):
        if len(found) == count or (read := reader.next()) is None:
            break
        try:
            messages = mixture.sources[read.source].schema.conversation(read.row)
            if messages is not None:
                found.append(_first_question(messages, processor))
        except (BadRow, ImageError, PromptError):
            continue  # the loader counts them
    return found


def _first_question(messages: list[dict[str, Any]], processor: Processor) -> Question:
    """What stands in front of the first answer, with its images loaded."""
    end = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    conversation, images = [], []
    for message in messages[:end]:
        parts = []
        for part in message["content"]:
            if part["type"] == "image":
                part = {"type": "image", "image": load_image(part["image"], processor.limits)}
                images.append(part["image"])
            parts.append(part)
        conversation.append({"role": message["role"], "content": parts})
    return Question(conversation, tuple(images), _words(conversation), _words(messages[end : end + 1]))


def _words(messages: list[dict[str, Any]]) -> str:
    parts = (part for message in messages for part in message["content"])
    return " ".join(str(part["text"]).strip() for part in parts if part["type"] == "text")


def questions_of_shapes(processor: Processor, count: int) -> list[Question]:
    """Held-out questions about the image world."""
    questions = []
    for scene, qa in heldout_questions(count):
        image = render(scene, _DRAWN)
        conversation = processor.conversation(image, qa.question)
        questions.append(Question(conversation, (image,), qa.question, qa.answer, tuple(qa.accept)))
    return questions


# ---------------------------------------------------------------------------------------------- answers
def answer_all(
    model: VisionLanguageModel, processor: Processor, questions: Sequence[Question]
) -> list[Answered]:
    """Greedy answers, one question at a time; a question that leaves no room in the context has none."""
    was_training, answered = model.training, []
    model.eval()
    # Compiled blocks know the shapes of training: a token at a time would compile them anew.
    with torch.compiler.set_stance("force_eager"):
        for question in questions:
            inputs = processor.prepare(question.conversation).to(model.device)
            room = model.config.text.max_position_embeddings - inputs["input_ids"].shape[1]
            if room < 1:
                continue
            ids = model.generate(
                **inputs,
                max_new_tokens=min(room, _NEW_TOKENS),
                stop_token_ids=processor.stop_token_ids,
            )
            answered.append(Answered(question, processor.decode(ids[0]).strip()))
    model.train(was_training)
    return answered


def write_samples(output: Path, step: int, answered: Sequence[Answered]) -> Path:
    """Write the answers after `step` steps with their images, whole or not at all.

    Raises:
        OSError: they cannot be written.
    """
    folder = output / FOLDER / f"step-{step:08d}"
    writing = folder.with_name(f".{folder.name}")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    with (writing / ANSWERS).open("w", encoding="utf-8") as file:
        for number, one in enumerate(answered):
            names = []
            for place, image in enumerate(one.question.images):
                names.append(f"{number:02d}.png" if place == 0 else f"{number:02d}-{place + 1}.png")
                small(image).save(writing / names[-1])
            row: dict[str, Any] = {"pictures": names, "question": one.question.text}
            row |= {"target": one.question.target, "answer": one.answer, "right": one.right}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    shutil.rmtree(folder, ignore_errors=True)  # of the same step, done before
    writing.rename(folder)
    return folder


def small(image: Image.Image) -> Image.Image:
    """A copy that is no larger than samples need."""
    copy = image.convert("RGB")
    copy.thumbnail((_LONGEST, _LONGEST))
    return copy
