"""Small rows, images and loaders for the tests of datasets and packing."""

from __future__ import annotations

import io
import random

from data.loader import Loader, LoaderConfig
from data.processor import Processor
from data.row_files import Stream
from data.sources import DatasetConfig, Mixture, Source, open_source
from tests.processors import draw_image, embedded

WORDS = ("how", "many", "circles", "are", "there", "three", "of", "them", "and", "two", "red", "squares")


def png(width: int = 8, height: int = 6, seed: int = 0) -> bytes:
    """An encoded image."""
    file = io.BytesIO()
    draw_image(width, height, seed).save(file, "PNG")
    return file.getvalue()


def rows(count: int, every: int = 5, longest: int = 24) -> list[dict]:
    """Questions of 1 to `longest` words, answers that name the row, and an image with each `every`th."""
    rng = random.Random(0)
    return [
        {
            "question": " ".join(rng.choices(WORDS, k=rng.randint(1, longest))),
            "answer": f"row {i}",
            "image": png(seed=i) if i % every == 0 else None,
        }
        for i in range(count)
    ]


class ListStream(Stream):
    """Lists as the files of a stream, each in `parts` parts; `rows_read` counts rows read."""

    def __init__(self, *files: list, parts: int = 1):
        self.files, self.of_each, self.rows_read = files, parts, 0
        self.num_sections, self.features = len(files) * parts, None

    def read(self, part: int, start: int = 0):
        file, part = divmod(part, self.of_each)
        rows = self.files[file]
        begin, end = (len(rows) * number // self.of_each for number in (part, part + 1))
        for number, row in enumerate(rows[begin + start : end], begin + start):
            self.rows_read += 1
            yield number * len(self.files) + file, row

    def where(self, number: int) -> str:
        row, file = divmod(number, len(self.files))
        return f"list {file}, row {row}"


def source(data, name: str = "toy", preferences: bool = False, **config) -> Source:
    return open_source(data, DatasetConfig(name, **config), preferences=preferences)


def mixture(data, **config) -> Mixture:
    return Mixture([source(data, **config)])


def loader(
    data, rank: int = 0, world_size: int = 1, *, processor: Processor | None = None, **config
) -> Loader:
    """A loader of rows, of a mixture, or of a stream."""
    mixed = data if isinstance(data, Mixture) else mixture(data)
    settings = LoaderConfig(**{"batch_size": 4, "sequence_length": 128, "packing_buffer_size": 3} | config)
    return Loader(mixed, processor or embedded(), settings, rank, world_size)


def flat(batches) -> list:
    return [sample for batch in batches for row in batch.sample_ids for sample in row]
