"""Drawn images in the columns of the official benchmarks, and the prompts that lmms-eval makes of them.

The prompts are written out, as they are to reach a model: MMStar's and MMMU's harness prompts have been worth
more than a model's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

LETTER = "\nAnswer with the option's letter from the given choices directly"
SHORT = "\nAnswer the question using a single word or phrase."
ASKED = "What colour is the sky?"
CHOICES = ["red", "blue"]
LISTED = "\nA. red\nB. blue"


@dataclass(frozen=True)
class Benchmark:
    """One document of a task, its prompt, and the figure that it is known by."""

    split: str
    row: dict[str, Any]
    prompt: str
    figure: str


def benchmarks(image: Image) -> dict[str, Benchmark]:
    """By lmms-eval's names."""
    asked = {"image": image, "question": ASKED}
    read = {**asked, "answers": ["blue"] * 10, "questionId": "7", "question_id": 7, "ocr_tokens": ["x"]}
    yes_no = {"image": image, "question_id": "7", "question": "Is it red?", "answer": "Yes"}
    return {
        "mmstar": Benchmark(
            "val",
            {**asked, "index": 0, "answer": "B", "category": "math", "l2_category": "geometry"},
            ASKED + LETTER,
            "average",
        ),
        "mmmu_val": Benchmark(
            "validation",
            {
                "id": "validation_Art_1",
                "question": "<image 1> What is it?",
                "options": "['red', 'blue']",
                "answer": "B",
                "question_type": "multiple-choice",
                "image_1": image,
            },
            f"What is it?{LISTED}\n{LETTER}.",
            "mmmu_acc",
        ),
        "ai2d": Benchmark(
            "test",
            {**asked, "options": CHOICES, "answer": "1"},
            f"{ASKED}{LISTED}{LETTER}.",
            "exact_match,flexible-extract",
        ),
        "scienceqa_img": Benchmark(
            "test",
            {**asked, "hint": "Look up.", "choices": CHOICES, "answer": 1},
            f"Context: Look up.\n{ASKED}{LISTED}{LETTER}.",
            "exact_match",
        ),
        "textvqa_val": Benchmark("validation", read, ASKED + SHORT, "exact_match"),
        "docvqa_val": Benchmark("validation", read, ASKED + SHORT, "anls"),
        "infovqa_val": Benchmark("validation", read, ASKED + SHORT, "anls"),
        "chartqa": Benchmark(
            "test",
            {**asked, "answer": "12", "type": "human_test"},
            f"{ASKED}\nAnswer the question with a single word.",
            "relaxed_overall",
        ),
        "ocrbench": Benchmark(
            "test",
            {**asked, "dataset": "x", "question_type": "Doc-oriented VQA", "answer": ["blue"]},
            ASKED,
            "ocrbench_accuracy",
        ),
        "mme": Benchmark(
            "test", {**yes_no, "category": "color"}, f"Is it red?{SHORT}", "mme_perception_score"
        ),
        "pope": Benchmark("test", yes_no, f"Is it red?{SHORT}", "pope_accuracy"),
    }
