"""Reading and cutting one photograph of 12 megapixels: ours, transformers' and what Pillow alone takes.

A function of `PREPARE` takes a file, a shape and whether the photograph is cut into tiles, and gives the
seconds from the file to the model's inputs: 17 tiles, or one.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.shapes import SHAPES
from data.processor import Processor, make_processor
from data.tokenizer import build_tokenizer

SIDE = 3464  # pixels: 12 million of a square, which is cut into 4 x 4 tiles and the whole
QUESTION = "What is on the table?"


def save_photograph(path: Path) -> None:
    """A JPEG with detail of every size, of about 4 MB."""
    random, picture = np.random.default_rng(0), np.zeros((SIDE, SIDE, 3), np.float32)
    for pixels in (4, 32, 256, SIDE):
        noise = Image.fromarray(random.integers(0, 256, (pixels, pixels, 3), dtype=np.uint8))
        picture += np.asarray(noise.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float32)
    weights = picture - picture.mean()
    Image.fromarray((128 + weights / 3).clip(0, 255).astype(np.uint8)).save(path, quality=80)


def _processor(shape: str, split: bool) -> Processor:
    config = SHAPES[shape]
    return make_processor(
        build_tokenizer([QUESTION]),
        image_size=config.vision.image_size,
        image_seq_len=config.tokens_per_tile,
        longest_edge=4 * config.vision.image_size,
        split=split,
    )


def ours(path: Path, shape: str, split: bool) -> float:
    processor = _processor(shape, split)
    start = time.perf_counter()
    processor.ask(path, QUESTION)
    return time.perf_counter() - start


def transformers(path: Path, shape: str, split: bool) -> float:
    theirs = _processor(shape, split).hf_processor
    assert theirs is not None, "made in transformers' form"
    start = time.perf_counter()
    with Image.open(path) as image:
        theirs(text=f"<image>{QUESTION}", images=[image.convert("RGB")], return_tensors="pt")
    return time.perf_counter() - start


def pillow(path: Path, shape: str, split: bool) -> float:
    """The same sizes, and nothing made of them."""
    side = SHAPES[shape].vision.image_size
    start = time.perf_counter()
    with Image.open(path) as image:
        large = image.convert("RGB").resize((4 * side, 4 * side), Image.Resampling.LANCZOS)
        large.resize((side, side), Image.Resampling.LANCZOS)
    return time.perf_counter() - start


PREPARE = {"ours-fast": ours, "ours-eager": ours, "transformers": transformers, "pillow": pillow}
