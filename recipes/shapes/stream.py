"""Plain drawings as training batches: one image, several questions, each blind to the others.

A row is laid out as

    prefix (chat opening, the image's placeholders) | question 1, answer 1 | question 2, answer 2 | …

Every question-answer branch sees the prefix and itself only, at the positions it would have alone, so that
the image is encoded once and all its questions are trained as if each had been asked by itself.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from data.packing import IGNORE_INDEX
from recipes.shapes.dense import dense_map
from recipes.shapes.questions import Mention, ask_list, facts, mentions
from shapes import FAMILIES, ask, render, sample_questions, sample_scene
from shapes.world import QA, Scene

# Images are drawn at one of these sizes and reduced, so that the model sees every softness of edge.
_RENDER_SIZES, _RENDER_WEIGHTS = (96, 128, 192, 256), (0.5, 0.35, 0.1, 0.05)
# Families are drawn from this list, which names more often what takes longer to learn.
SHORT = tuple(family for family in FAMILIES if family != "describe")
_MIX = (*SHORT, *("position",) * 3, *("size",) * 2, "count", "compare")


@dataclass(frozen=True)
class ShapesStreamConfig:
    """What a stream of batches is made of; `seed` and the batch index decide every image."""

    batch_size: int = 16
    sequence_length: int = 256
    image_size: int = 64
    patch_size: int = 8
    seed: int = 0
    split: str = "train"
    curriculum_pictures: int = 25_000  # images until scenes reach their full difficulty
    vision_steps: int = 0  # batches for the vision tower alone at the start; the curriculum begins anew after
    vision_batch_size: int = 64  # images in one of these
    describe_probability: float = 0.3  # images with a full description among their questions
    list_probability: float = 0.7  # images with a list (see `questions.ask_list`)

    @property
    def vision_pictures(self) -> int:
        return self.vision_steps * self.vision_batch_size


@dataclass(frozen=True)
class ChatPieces:
    """Token ids that a row is assembled from, in the model's own chat template."""

    prefix: tuple[int, ...]  # from the start of the prompt to the end of the image
    middle: tuple[int, ...]  # from the end of a question to the start of its answer
    end: int  # closes a turn
    pad: int


class ShapesStream(IterableDataset):
    """Yields batches as dicts of tensors.

    pixel_values (B, 3, S, S) and dense (B, P, DENSE), see `dense_map`. And (B, T): input_ids, labels,
    position_ids; segment_ids, 0 on the prefix, k on branch k, -1 on padding. (B, T, 4) and NaN where there is
    nothing to say: nouns, `facts` where a question's nouns end; pairs, where its answer begins, the first
    noun's facts minus the second's.
    """

    def __init__(
        self, config: ShapesStreamConfig, tokenizer, pieces: ChatPieces, rank: int = 0, world_size: int = 1
    ):
        self.config, self.tokenizer, self.pieces = config, tokenizer, pieces
        self.rank, self.world_size = rank, world_size  # B is this rank's share of a batch
        self.start_batch = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from map(self.batch, count(self.start_batch + first, step))

    def batch(self, index: int) -> dict[str, Tensor]:
        """Batch number `index`, the same whenever and wherever it is asked for."""
        rows = self.rows(index)
        batch = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
        batch["pixel_values"] = batch["pixel_values"].float().div_(127.5).sub_(1.0)
        return batch

    def rows(self, index: int) -> list[dict[str, np.ndarray]]:
        """Those of batch number `index`."""
        return [self.row(number) for number in self.numbers(index)]

    def numbers(self, index: int) -> range:
        """The images of batch number `index`, or of this rank's share of it."""
        config = self.config
        size, first = config.vision_batch_size, index * config.vision_batch_size
        if index >= config.vision_steps:
            size = config.batch_size
            first = config.vision_pictures + (index - config.vision_steps) * size
        share = size // self.world_size
        return range(first + self.rank * share, first + (self.rank + 1) * share)

    def difficulty(self, index: int) -> float:
        """How hard image number `index` is, from 0 to 1."""
        pictures = self.config.vision_pictures
        since = index if index < pictures else index - pictures
        return min(1.0, (since + 1) / max(self.config.curriculum_pictures, 1))

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Image number `index` with its dense targets and its packed questions."""
        config = self.config
        rng = random.Random(f"{config.split}:{config.seed}:{index}")
        scene = sample_scene(rng, split=config.split, difficulty=self.difficulty(index))
        size = rng.choices(_RENDER_SIZES, _RENDER_WEIGHTS)[0]
        grid = config.image_size // config.patch_size
        image = render(scene, size).resize((config.image_size, config.image_size), Image.Resampling.LANCZOS)
        questions = []
        if rng.random() < config.describe_probability:
            questions.append(ask(scene, rng, "describe"))
        if rng.random() < config.list_probability:
            questions.append(ask_list(scene, rng))
        questions += sample_questions(scene, rng, 18, _MIX)
        row = self._branches([qa for qa in questions if qa is not None], scene)
        row["pixel_values"] = np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))
        row["dense"] = dense_map(scene, grid, grid)
        return row

    def _branches(self, questions: list[QA], scene: Scene) -> dict[str, np.ndarray]:
        """Branches until the row is full; a branch that does not fit is left out, never cut."""
        pieces, branch = self.pieces, 0
        row = self.blank_row(pieces.prefix)
        start = at = len(pieces.prefix)
        for qa in questions:
            question = [*self.encode(qa.question), pieces.end, *pieces.middle]
            answer = [*self.encode(" " + qa.answer), pieces.end]
            end = at + len(question) + len(answer)
            if end > self.config.sequence_length:
                continue
            branch += 1
            row["input_ids"][at:end] = question + answer
            row["labels"][end - len(answer) : end] = answer
            row["position_ids"][at:end] = np.arange(start, start + end - at)
            row["segment_ids"][at:end] = branch
            self.mark_nouns(row, at, qa.question, at + len(question) - 1, scene)
            at = end
        return row

    def blank_row(self, prefix) -> dict[str, np.ndarray]:
        """A row that holds the prefix alone."""
        length, start = self.config.sequence_length, len(prefix)
        row: dict[str, np.ndarray] = {
            "input_ids": np.full(length, self.pieces.pad, np.int64),
            "labels": np.full(length, IGNORE_INDEX, np.int64),
            "position_ids": np.zeros(length, np.int64),
            "segment_ids": np.full(length, -1, np.int64),
            "nouns": np.full((length, 4), np.nan, np.float32),
            "pairs": np.full((length, 4), np.nan, np.float32),
        }
        row["input_ids"][:start] = prefix
        row["position_ids"][:start] = np.arange(start)
        row["segment_ids"][:start] = 0
        return row

    def mark_nouns(self, row, at: int, text: str, answer: int, scene: Scene) -> None:
        """What the nouns mean of a question that begins at `at` and whose answer comes after `answer`."""
        known = [(place, facts(scene, noun)) for place, noun in self.nouns(text)]
        for place, said in known:
            row["nouns"][at + place] = said
        if len(known) == 2:
            row["pairs"][answer] = np.subtract(known[0][1], known[1][1])

    @lru_cache(maxsize=50_000)  # noqa: B019 (a stream lives as long as its process)
    def nouns(self, text: str) -> list[tuple[int, Mention]]:
        """(index of its last token, noun) for each noun of a question that means something in an image, in
        their order."""
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in offsets["offset_mapping"]]
        found = sorted(mentions(text), key=lambda noun: noun.end)
        return [(bisect_right(ends, noun.end), noun) for noun in found]

    @lru_cache(maxsize=50_000)  # noqa: B019
    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
