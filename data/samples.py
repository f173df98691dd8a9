"""One conversation -> one sample: ids, labels, and images whose tiles are counted but not yet decoded.

The packer decides by tokens and tiles, and both are known from the text and the headers of the images. Pixels
are decoded only once a sample's row is certain, so that many samples may wait at a few kilobytes each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.chat import read_conversation
from data.errors import BadRow, ImageError, ProcessorError, PromptError
from data.images import describe, image_size, load_image
from data.processor import Processor, count_tiles, tile_image
from data.row_schemas import BAD_CONVERSATION, BROKEN_IMAGE, TOO_LONG, TOO_MANY_TILES

IGNORE_INDEX = -100  # label of a position that carries no loss
SampleId = tuple[str, int]  # name of the dataset, number of the row


@dataclass(frozen=True)
class Sample:
    """A document to train on.

    `labels` are the ids that the assistant says (its end of turn included), and IGNORE_INDEX elsewhere.
    `images` are what `load_image` takes, `image_tiles` how many tiles each makes, in order. `front` is the
    number of image positions before the ids, in models that place images there.
    """

    sample_id: SampleId
    input_ids: list[int]
    labels: list[int]
    images: tuple[Any, ...] = ()
    image_tiles: tuple[int, ...] = ()
    front: int = 0

    @property
    def tokens(self) -> int:
        """Positions it takes in the language model."""
        return self.front + len(self.input_ids)

    @property
    def tiles(self) -> int:
        return sum(self.image_tiles)


class SampleEncoder:
    """Makes samples with one processor.

    Args:
        max_tokens: maximum number of positions of a sample.
        max_tiles: maximum number of tiles of its images; None leaves that to the tokens.
    """

    def __init__(self, processor: Processor, max_tokens: int, max_tiles: int | None = None):
        self.processor, self.max_tokens, self.max_tiles = processor, max_tokens, max_tiles

    def encode(self, conversation: Sequence[Mapping[str, Any]], sample_id: SampleId) -> Sample:
        """A sample of a conversation in the Hub's form.

        Raises:
            BadRow: it cannot be used, or is too large; nothing is ever cut off.
        """
        processor, name = self.processor, f"{sample_id[0]}, row {sample_id[1]}"
        in_front = processor.image_token_id is None
        with _counted_as(BAD_CONVERSATION, PromptError):
            messages = processor.images.normalise_messages(read_conversation(conversation, name), name)
        sources = [value for message in messages for kind, value in message.parts if kind == "image"]
        grids = self._grids(sources)
        prompts: list[str] = []
        with _counted_as(TOO_MANY_TILES, PromptError):
            for i, (_, rows, columns) in enumerate([] if in_front else grids):
                prompts.append(processor.images.prompt(rows, columns, i, len(grids)))
        with _counted_as(BAD_CONVERSATION, PromptError):
            encoded = processor.chat.encode(messages, prompts, False, name)
        said = zip(encoded.input_ids, encoded.assistant_mask)
        tiles = tuple(count for count, _, _ in grids)
        sample = Sample(
            sample_id,
            encoded.input_ids,
            labels=[token if by_assistant else IGNORE_INDEX for token, by_assistant in said],
            images=tuple(sources),
            image_tiles=tiles,
            front=sum(tiles) * processor.images.tokens_per_tile if in_front else 0,
        )
        if sample.tokens > self.max_tokens:
            raise BadRow(TOO_LONG, f"expected at most {self.max_tokens} tokens, got {sample.tokens}")
        return sample

    def _grids(self, sources: list[Any]) -> list[tuple[int, int, int]]:
        """(tiles, rows, columns) of each image."""
        images, limits = self.processor.images, self.processor.limits
        grids: list[tuple[int, int, int]] = []
        for source in sources:
            with _counted_as(BROKEN_IMAGE, ImageError):
                width, height = image_size(source, limits)
            with _counted_as(TOO_MANY_TILES, ImageError), _counted_as(BROKEN_IMAGE, ProcessorError):
                grids.append(count_tiles(images, width, height, describe(source), limits.max_tiles))
        tiles = sum(count for count, _, _ in grids)
        if self.max_tiles is not None and tiles > self.max_tiles:
            raise BadRow(TOO_MANY_TILES, f"expected at most {self.max_tiles} tiles, got {tiles}")
        # The tiles alone do not fit, so no prompt of all their placeholders is built.
        if tiles * images.tokens_per_tile > self.max_tokens:
            raise BadRow(TOO_MANY_TILES, f"{tiles} tiles take more than {self.max_tokens} tokens")
        return grids

    def tiles(self, sample: Sample) -> Tensor | None:
        """A sample's tiles, (n, 3, M, M) float32 in the order of its placeholders; None without images.

        Raises:
            BadRow: an image turns out to be broken.
        """
        limits, tiles = self.processor.limits, []
        for source, expected in zip(sample.images, sample.image_tiles, strict=True):
            name = describe(source)
            with _counted_as(BROKEN_IMAGE, ImageError, ProcessorError):
                image = load_image(source, limits)
                cut_tiles = tile_image(self.processor.images, image, name, limits.max_tiles).tiles
            if len(cut_tiles) != expected:  # the header did not tell the size of the pixels
                raise BadRow(BROKEN_IMAGE, f"{name}: expected {expected} tiles, got {len(cut_tiles)}")
            tiles.append(cut_tiles)
        return torch.cat(tiles) if tiles else None


@contextmanager
def _counted_as(reason: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds make the row a bad one."""
    try:
        yield
    except kinds as error:
        raise BadRow(reason, str(error)) from error
