"""How many steps so many passes over the data make: what a schedule of rates needs to know beforehand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice

from data.datasets import LaneReader, Mixture
from data.errors import BadRow, DatasetError
from data.loader import LoaderConfig
from data.packing import choose
from data.samples import SampleEncoder

_EXACT = 2_000  # rows, of all passes together, that are all looked at
_LOOKED_AT = 200  # else so many stand for all

Size = tuple[int, int]  # tokens and tiles of a sample


def steps_of_epochs(mixture: Mixture, encoder: SampleEncoder, config: LoaderConfig) -> int:
    """Steps until the data of a loader end: packed as it packs them, with no image decoded.

    Exact for small data, unless an image turns out to be broken; else from the first rows.

    Raises:
        DatasetError: a stream has no length.
    """
    rows, lanes = mixture.num_rows, config.num_lanes
    if rows is None or config.epochs is None:
        raise DatasetError("steps: a stream has no length, so that the run needs --steps")
    known: dict[tuple[int, int], Size | None] = {}
    if rows * config.epochs > _EXACT:
        lane = mixture.lane(0, 1, config.seed, 1, config.shuffle_buffer)
        sizes = list(islice(_sizes(lane, mixture, encoder, known), _LOOKED_AT))
        share = packed_rows(sizes, config) / max(len(sizes), 1)
        return max(1, math.ceil(rows * config.epochs * share / config.batch_size))
    last = 0  # number of the last row, see `data.loader`
    for number in range(lanes):
        lane = mixture.lane(number, lanes, config.seed, config.epochs, config.shuffle_buffer)
        made = packed_rows(_sizes(lane, mixture, encoder, known), config)
        last = max(last, (made - 1) * lanes + number)
    return last // config.batch_size + 1


def packed_rows(sizes: Iterable[Size], config: LoaderConfig) -> int:
    """How many rows hold these samples."""
    if not config.packing:
        return sum(1 for _ in sizes)
    coming, waiting, made = iter(sizes), list[Size](), 0
    while True:
        waiting += islice(coming, config.waiting - len(waiting))
        if not waiting:
            return made
        tokens, tiles = zip(*waiting)
        chosen = set(choose(tokens, tiles, config.sequence_length, config.max_tiles))
        waiting = [size for i, size in enumerate(waiting) if i not in chosen]
        made += 1


def _sizes(
    lane: LaneReader, mixture: Mixture, encoder: SampleEncoder, known: dict[tuple[int, int], Size | None]
) -> Iterator[Size]:
    """Of a lane's samples in their order; rows that cannot be used, or are filtered, have none."""
    while (mixed := lane.next()) is not None:
        key = (mixed.source, mixed.number)
        if key not in known:
            known[key] = None
            source = mixture.sources[mixed.source]
            try:
                conversation = source.layout.conversation(mixed.row)
                if conversation is not None:
                    sample = encoder.encode(conversation, (source.name, mixed.number))
                    known[key] = (sample.tokens, sample.tiles)
            except BadRow:  # the loader tells and counts them
                continue
        if (size := known[key]) is not None:
            yield size
