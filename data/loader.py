"""Mixed datasets -> batches, on any number of ranks and worker processes, resumable at any step.

    mixture = open_datasets([{"path": "rows.jsonl"}])
    loader = Loader(mixture, processor, LoaderConfig(batch_size=8, sequence_length=4096), rank, world_size)
    for batch in loader:                       # (micro_batch_size, 4096); batch_size / world_size rows a step
        batch = batch.to(model.device)         # images travel as bytes
        hidden, _ = model.hidden_states(batch["input_ids"], batch.get("pixel_values"),
                                        attention_mask=segment_mask(batch["segment_ids"]),
                                        position_ids=batch["position_ids"])
    state = merge_states([loader.state_dict()])   # of all ranks; fits any number of them

The rows of a run are the sequences that its shards pack: row g comes from shard g mod `shards`, and step s
trains on the `batch_size` rows from row s * batch_size on. So what a step sees depends neither on the number
of ranks, nor on how many micro-batches a step is cut into, nor on the number of workers.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from data.errors import BadRow, DatasetError
from data.order import RowPosition, RowRead, ShardReader, most_bytes
from data.packing import Batch, PackedSequence, Sample, SampleEncoder, collate, pack, pack_indices
from data.processor import Processor
from data.row_files import Stream, reading
from data.row_schemas import BAD_CONVERSATION, plain_columns
from data.sources import Mixture, Source
from messages import one_line

logger = logging.getLogger(__name__)
_SHARDS = 16  # at least so many, so that as many workers can help, however small the batch
_READING = "reading the data failed"
_PATIENCE = 50  # bad rows after which a shard reports them although it has no sequence to give
STREAM_ORDER = 2  # a number of the way in which blocks of a stream are shuffled, which a state goes on with
_ESTIMATED_FROM = 1_000  # rows of an estimate of an epoch's length
_COUNTED = 2_000  # rows up to which it is counted


@dataclass(frozen=True)
class LoaderConfig:
    """The settings of batches.

    Args:
        batch_size: rows of one optimizer step, over all ranks and micro-batches.
        micro_batch_size: rows of one batch on one rank.
        sequence_length: maximum number of tokens of a row, and of a sample.
        max_tiles: maximum number of tiles of a row, and of a sample; None leaves that to the tokens.
        packing: put several samples into a row; if not, each has its own, padded to its batch's longest.
        packing_buffer_size: samples of each shard to select from when a row is packed; fewer if their images,
            where they came in rows or from the network, take more than `data.order.most_bytes`.
        shuffle_buffer: rows of a stream that each shard shuffles together, undecoded; fewer large ones.
        seed: of the order.
        epochs: number of passes over the data; None never ends.
        endless: go on beyond `epochs`, for a run that ends after an estimated number of steps.
        workers: processes that read and decode on this rank; with 0, this process does.
        max_drop_rate: share of bad rows that stops the run, from 0 to 1; see `DropCount`.
        questions: the assistant's last message is the end of each conversation, and samples hold their rows.
    """

    batch_size: int = 8
    micro_batch_size: int = 1
    sequence_length: int = 4096
    max_tiles: int | None = None
    packing: bool = True
    packing_buffer_size: int = 64
    shuffle_buffer: int = 1024
    seed: int = 0
    epochs: int | None = None
    endless: bool = False
    workers: int = 0
    max_drop_rate: float = 0.05
    questions: bool = False

    @property
    def num_shards(self) -> int:
        """The first multiple of `batch_size` from 16 up. It is part of what decides the order."""
        return self.batch_size * math.ceil(_SHARDS / self.batch_size)


# -------------------------------------------------------------------------------------------- left-out rows
@dataclass(frozen=True)
class Dropped:
    """A bad row: its place (`Source.where`), the reason that it is counted under, and what was wrong."""

    row: str
    reason: str
    message: str


@dataclass
class DropCount:
    """Rows read and left out so far, and the rate at which bad ones stop a run.

    A run stops when more of its latest one or two thousand rows are bad than `max_rate` and chance explain
    (four standard deviations and three rows), or when none of them is good. So images that are gone stop a
    long run soon, and a few bad rows at its beginning do not. At the end of the data, `exceeded` holds all
    rows to `max_rate` exactly.
    """

    max_rate: float = 0.05
    read: int = 0
    dropped: Counter = field(default_factory=Counter)
    _latest: tuple[int, int] = (0, 0)  # rows, and bad ones among them

    def add(self, read: int, dropped: Sequence[Dropped]) -> None:
        """Count and log what a shard reports; DatasetError if too many rows were bad."""
        self.read += read
        for bad in dropped:
            self.dropped[bad.reason] += 1
            count = self.dropped[bad.reason]
            if count <= 5 or count & (count - 1) == 0:  # the first few, then ever fewer: a log is for reading
                logger.warning("%s left out, %s (number %d): %s", bad.row, bad.reason, count, bad.message)
        used, bad_rows = self._latest[0] + read, self._latest[1] + len(dropped)
        by_chance = 4 * math.sqrt(self.max_rate * (1 - self.max_rate) * used) + 3
        if dropped and (bad_rows > self.max_rate * used + by_chance or bad_rows == used >= 200):
            last = f"; the last is {dropped[-1].row}: {dropped[-1].message}"
            raise DatasetError(self._sentence(f"{bad_rows} of the latest {used}", last))
        self._latest = (used, bad_rows) if used < 2_000 else (used // 2, bad_rows // 2)

    def exceeded(self) -> str:
        """A sentence if too many rows were bad, where these are all the rows that there are; else ""."""
        dropped = self.dropped.total()
        return self._sentence(f"{dropped} of {self.read}") if dropped > self.max_rate * self.read else ""

    def _sentence(self, share: str, more: str = "") -> str:
        said = f"{share} rows cannot be used ({self.left_out()}), more than {self.max_rate:.1%}{more}"
        return f"{said}; correct the data or raise max_drop_rate"

    def left_out(self) -> str:
        """Counts of the rows that were not trained on, by reason."""
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))


# -------------------------------------------------------------------------------------------------- shards
@dataclass(frozen=True)
class ShardItem:
    """An item of a shard: a sequence, or None with a report of rows left out or, if `ended`, of its end."""

    sequence: PackedSequence | None
    state: dict[str, Any]
    read: int  # rows since the last item
    dropped: tuple[Dropped, ...]
    ended: bool = False


class Shard:
    """The sequences that the rows of one shard pack: iterate for `ShardItem`, up to and including one that
    has `ended`.

    Its state is that of its reader, and the positions of the samples that wait to be packed: on resume those
    rows are read once more. Pixels are never part of it.
    """

    def __init__(
        self,
        shard: int,
        mixture: Mixture,
        processor: Processor,
        config: LoaderConfig,
        state: Mapping[str, Any] | None = None,
    ):
        self.mixture, self.config = mixture, config
        epochs = None if config.endless else config.epochs
        order = (config.num_shards, config.seed, epochs, config.shuffle_buffer)
        self.reader = ShardReader(mixture, shard, *order)
        self.encoder = SampleEncoder(processor, config.sequence_length, config.max_tiles, config.questions)
        self._buffer: list[tuple[RowPosition, Sample]] = []  # a position here begins with the dataset's index
        self._read = 0
        self._dropped: list[Dropped] = []
        if state is None:
            return
        with reading(_READING):
            self.reader.restore(state["reader"])
            again = self.reader.reread(state["waiting"])
        for read in again:
            self._use(read)
            if self._dropped:
                bad = self._dropped[-1]
                raise DatasetError(f"{bad.row}: was good when it was saved; now: {bad.message}")

    def __iter__(self) -> Iterator[ShardItem]:
        for samples in self._sequences():
            sequence = None if samples is None else self._pack(samples)
            if samples is None or sequence is not None:
                yield self._item(sequence)
        yield self._item(None, ended=True)

    def count(self, most: float = math.inf) -> tuple[int, int]:
        """(rows read, sequences packed) of all or about `most` rows, without decoding an image. Of `most`,
        those that still wait do not count: the last sequences, with nothing to choose from, are short."""
        sequences = 0
        for samples in self._sequences():
            sequences += samples is not None
            if self._read >= most and sequences:
                return self._read - len(self._buffer), sequences
        return self._read, sequences

    def _sequences(self) -> Iterator[list[Sample] | None]:
        """The samples of each sequence; in between None, where many rows were left out and none was used."""
        ended = False
        while not ended or self._buffer:
            while not ended and self._has_room():
                ended = not self._take()
                if len(self._dropped) >= _PATIENCE:
                    yield None
            if self._buffer:
                yield self._next_samples()

    def _has_room(self) -> bool:
        if not self._buffer or not self.config.packing:
            return not self._buffer
        if len(self._buffer) >= self.config.packing_buffer_size:
            return False
        held = sum(sample.image_bytes for _, sample in self._buffer)
        return held < most_bytes(self.config.num_shards)

    def _take(self) -> bool:
        """Read one row into the buffer, or leave it out; False at the end."""
        with reading(_READING):
            read = self.reader.next()
        if read is None:
            return False
        self._read += 1
        self._use(read)
        return True

    def _use(self, read: RowRead) -> None:
        """Put a row's sample into the buffer, or a bad row among those."""
        source, form_for = self.mixture.sources[read.source], self.encoder.processor.form
        try:
            given = [schema.conversation(read.row, form_for) for schema in source.schemas]
            sample_id, tools = (source.name, read.number), source.schema.tools(read.row)
            if len(given) > 1:
                sample = self.encoder.encode_answers(given, sample_id, tools)
            else:
                row = None
                if self.config.questions:
                    row = source.schema.accepted(read.row) | asked(given[0], read.row)
                sample = replace(self.encoder.encode(given[0], sample_id, tools), row=row)
        except BadRow as error:
            self._drop(source, read.number, error)
        else:
            self._buffer.append(([read.source, *read.position], sample))

    def _drop(self, source: Source, number: int, error: BadRow) -> None:
        self._dropped.append(Dropped(source.where(number), error.reason, str(error)))

    def _next_samples(self) -> list[Sample]:
        """Take the samples of the next sequence off the buffer."""
        chosen = [0]
        if self.config.packing:
            tokens, tiles = zip(*((sample.tokens, sample.tiles) for _, sample in self._buffer))
            chosen = pack_indices(tokens, tiles, self.encoder.max_tokens, self.encoder.max_tiles)
        return [self._buffer.pop(index)[1] for index in reversed(chosen)][::-1]

    def _pack(self, samples: list[Sample]) -> PackedSequence | None:
        """Decode their images and join those that are whole; None if none is."""
        whole, tiles = [], []
        for sample in samples:
            try:
                tiles.append(self.encoder.tiles(sample))
                whole.append(sample)
            except BadRow as error:
                name, number = sample.sample_id
                self._drop(next(one for one in self.mixture.sources if one.name == name), number, error)
        return pack(whole, tiles, self.encoder.processor.config) if whole else None

    def _item(self, sequence: PackedSequence | None, ended: bool = False) -> ShardItem:
        state = {"reader": self.reader.state(), "waiting": [position for position, _ in self._buffer]}
        item = ShardItem(sequence, state, self._read, tuple(self._dropped), ended)
        self._read, self._dropped = 0, []
        return item


def asked(conversation: list[dict[str, Any]], row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that score answers to the last question of a conversation: the row's columns without images
    (of boxes those of `data.box_rows.BoxRows.asked`), `question` and `target`. The conversation is cut off
    after that question's answer."""
    while conversation[-1]["role"] != "assistant":
        conversation.pop()
    if conversation[-1].get("tool_calls"):
        raise BadRow(BAD_CONVERSATION, "tool_calls: expected an answer in words, which rewards compare")

    def text(message: dict[str, Any]) -> str:
        return " ".join(str(part["text"]).strip() for part in message["content"] if part["type"] == "text")

    asks = next(one for one in reversed(conversation) if one["role"] not in ("assistant", "tool"))
    own = {**plain_columns(row), **asks.get("asked", {})}
    return {"question": text(asks)} | own | {"target": text(conversation[-1])}


def _whole(mixture: Mixture, processor: Processor, config: LoaderConfig) -> Shard:
    """A shard that reads all rows."""
    shard = Shard(0, mixture, processor, config)
    shard.reader = ShardReader(mixture, 0, 1, config.seed, epochs=1)
    return shard


def look(
    mixture: Mixture, processor: Processor, config: LoaderConfig, most: int
) -> tuple[list[Sample], list[Dropped]]:
    """The samples of up to `most` rows in a run's order, and the rows that cannot be used, because an image
    cannot be decoded, say."""
    one = _whole(mixture, processor, config)
    while one._read < most and one._take():
        pass
    samples = [sample for _, sample in one._buffer]
    return [sample for sample in samples if one._pack([sample])], one._dropped


def counts_exactly(mixture: Mixture, config: LoaderConfig) -> bool:
    """True where `steps_per_run` counts all rows."""
    return (mixture.num_rows or 0) * (config.epochs or 1) <= _COUNTED


def steps_per_run(mixture: Mixture, processor: Processor, config: LoaderConfig) -> int:
    """Number of steps until a loader's data end, which a schedule of learning rates needs in advance.

    Up to 2,000 rows (over all epochs) are packed as the loader packs them, without decoding images: that is
    exact, unless an image turns out to be broken. Of more rows, the first 1,000 give an estimate.
    """
    rows, shards = mixture.num_rows, config.num_shards
    if rows is None or config.epochs is None:
        raise DatasetError("steps: a stream has no known length; set --steps")
    if not counts_exactly(mixture, config):
        read, sequences = _whole(mixture, processor, config).count(_ESTIMATED_FROM)
        return max(1, math.ceil(rows * config.epochs * sequences / max(read, 1) / config.batch_size))
    last = 0  # number of the last row
    for shard in range(shards):
        _, sequences = Shard(shard, mixture, processor, config).count()
        last = max(last, (sequences - 1) * shards + shard)
    return last // config.batch_size + 1


# -------------------------------------------------------------------------------------------------- loader
@dataclass
class LoaderState:
    """A position of a loader: rows handed out on its rank, padding included, the states of its shards, those
    that have ended, and counts of what was left out. A loader's own is never changed: copies are."""

    rows: int
    shard_states: dict[int, dict[str, Any]]
    ended: set[int]
    drops: DropCount

    def copy(self) -> LoaderState:
        return LoaderState(self.rows, dict(self.shard_states), set(self.ended), deepcopy(self.drops))


class Loader:
    """Iterate for `Batch`. Each iteration continues after the last batch, at `state`, which may be set back
    to one that the loader had before. Each rank gets its own rows of each step."""

    def __init__(
        self, mixture: Mixture, processor: Processor, config: LoaderConfig, rank: int = 0, world_size: int = 1
    ):
        per_rank, left = divmod(config.batch_size, world_size)
        if left or per_rank % config.micro_batch_size:
            raise DatasetError(
                f"batch_size {config.batch_size}: expected a multiple of ranks x micro_batch_size, "
                f"{world_size} x {config.micro_batch_size}"
            )
        self.mixture, self.processor, self.config = mixture, processor, config
        self.rank, self.world_size, self.rows_per_step = rank, world_size, per_rank
        # In ascending order, in which this rank's rows are numbered.
        self.shards = [n for n in range(config.num_shards) if n % config.batch_size // per_rank == rank]
        self.state = LoaderState(0, {}, set(), DropCount(config.max_drop_rate))

    def __iter__(self) -> Iterator[Batch]:
        """Batches of `micro_batch_size` rows, in whole steps, until all shards of this rank have ended. They
        end one after another: in the last steps, rows and whole batches may be padding."""
        items, micro = self._open_shards(), self.config.micro_batch_size
        ahead = self.state.copy()
        blank: list[LoaderState] = []  # batches of padding, given only if a row follows or to complete a step
        while True:
            turns = [self.shards[(ahead.rows + i) % len(self.shards)] for i in range(micro)]
            rows = [self._next_row(shard, ahead, items) for shard in turns]
            ahead.rows += micro
            if any(rows):
                for state in blank:
                    yield self._batch([None] * micro, state)
                blank = []
                yield self._batch(rows, ahead.copy())
            elif len(ahead.ended) < len(self.shards):
                blank.append(ahead.copy())
            else:
                break
        self.state = replace(ahead, rows=self.state.rows)
        if self.state.rows == 0 and self.world_size == 1:  # of several ranks, another may have some
            raise DatasetError(f"no row can be trained on: {ahead.drops.left_out() or 'none was read'}")
        while self.state.rows % self.rows_per_step:
            yield self._batch([None] * micro)

    def padding_step(self) -> list[Batch]:
        """A step of nothing but padding, for a rank whose data end before the others'."""
        micro = self.config.micro_batch_size
        return [self._batch([None] * micro) for _ in range(self.rows_per_step // micro)]

    def _batch(self, rows: Sequence[PackedSequence | None], state: LoaderState | None = None) -> Batch:
        """Hand rows out: from now on this loader stands after them."""
        self.state = state or replace(self.state, rows=self.state.rows + len(rows))
        length = self.config.sequence_length if self.config.packing else None
        return collate(rows, self.processor.pad_token_id, length, self.processor.image_token_id)

    def _next_row(
        self, shard: int, ahead: LoaderState, items: Mapping[int, Iterator[ShardItem | str]]
    ) -> PackedSequence | None:
        """A shard's next row, None once it has ended; the bad rows that it reports are counted."""
        while shard not in ahead.ended:
            try:
                item = next(items[shard])
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker (pid"):
                    raise
                raise DatasetError(
                    f"a data worker has died ({one_line(str(error))}): (shared) memory was short; "
                    "use fewer --workers, or give more (docker run --ipc=host)"
                ) from error
            if isinstance(item, str):
                raise DatasetError(item)
            ahead.shard_states[shard] = item.state
            ahead.drops.add(item.read, item.dropped)
            if item.ended:
                ahead.ended.add(shard)
            elif item.sequence is not None:
                return item.sequence
        return None

    def _open_shards(self) -> dict[int, Iterator[ShardItem | str]]:
        """The iterator of each shard's items: its own, or that of a worker process, which it shares."""
        active = [shard for shard in self.shards if shard not in self.state.ended]
        common, states = (self.mixture, self.processor, self.config), self.state.shard_states
        make = {shard: partial(Shard, shard, *common, states.get(shard)) for shard in active}
        if not self.config.workers:
            return {shard: iter(make[shard]()) for shard in active}
        # One DataLoader for each worker: one of several workers would take their items in turn, whatever the
        # number of shards. A worker visits its shards in the order in which their rows are needed.
        first = self.shards[self.state.rows % len(self.shards)]
        items: dict[int, Iterator[ShardItem | str]] = {}
        # A DataLoader draws a seed: not from the generator that dropout needs, which evaluations leave alone.
        generator = torch.Generator()
        for worker in range(min(self.config.workers, len(active))):
            share = sorted(active[worker :: self.config.workers], key=lambda shard: (shard < first, shard))
            loader = DataLoader(
                _WorkerShards([make[shard] for shard in share]),
                batch_size=None,
                num_workers=1,
                prefetch_factor=2,
                worker_init_fn=outliving_signals(),
                generator=generator,
            )
            items |= dict.fromkeys(share, iter(loader))
        return items

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the position in the data: plain numbers, some kilobytes. Call it between
        steps."""
        state = self.state
        assert state.rows % self.rows_per_step == 0, f"{state.rows} rows are no whole number of steps"
        return {
            "order": self._order(),
            "rows": state.rows * self.world_size,
            "lanes": {str(shard): of_shard for shard, of_shard in state.shard_states.items()},
            "ended": sorted(state.ended),
            "read": state.drops.read,
            "dropped": dict(state.drops.dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the merged states of all ranks, on any number of ranks and workers."""
        order, saved = self._order(), state["order"]
        for name in dict.fromkeys((*order, *saved)):
            expected, got = saved.get(name) or None, order.get(name) or None
            if expected != got:
                called = "shards, which follow from batch_size" if name == "lanes" else name
                raise DatasetError(
                    f"{called}: expected {one_line(expected, 200)}, as in the saved run, got "
                    f"{one_line(got, 200)}; put it back, or start again with --no-resume"
                )
        if state["rows"] % self.config.batch_size:
            raise DatasetError(
                f"batch_size: {self.config.batch_size} does not divide the {state['rows']} rows read"
            )
        shards = {n: state["lanes"][str(n)] for n in self.shards if str(n) in state["lanes"]}
        drops = DropCount(self.config.max_drop_rate)
        if self.rank == 0:  # the first rank continues the counts of all
            drops.read, drops.dropped = state["read"], Counter(state["dropped"])
        rows, ended = state["rows"] // self.world_size, set(self.shards) & set(state["ended"])
        self.state = LoaderState(rows, shards, ended, drops)

    def _order(self) -> dict[str, Any]:
        """Settings and data that decide the order of rows, under the keys of saved states."""
        config, sources = self.config, self.mixture.sources
        packing = [config.sequence_length, config.max_tiles, config.packing_buffer_size]
        return {
            "lanes": config.num_shards,
            "seed": config.seed,
            "epochs": config.epochs,
            "shuffle_buffer": config.shuffle_buffer,
            "packing (sequence_length, max_tiles, waiting)": packing if config.packing else None,
            "datasets (name, rows, weight)": [[one.name, one.num_rows, one.weight] for one in sources],
            "streams (sections)": {
                one.name: [STREAM_ORDER, [one.rows.num_sections]]
                for one in sources
                if isinstance(one.rows, Stream)
            },
        }


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks, saved at the same step, as one."""
    merged = dict(states[0])
    merged["lanes"] = {shard: value for state in states for shard, value in state["lanes"].items()}
    merged["ended"] = sorted({shard for state in states for shard in state["ended"]})
    merged["read"] = sum(state["read"] for state in states)
    merged["dropped"] = dict(sum((Counter(state["dropped"]) for state in states), Counter()))
    return merged


# ------------------------------------------------------------------------------------------------- workers
class _WorkerShards(IterableDataset):
    """The shards of one worker process, a sequence of each in turn, until each has ended.

    A DatasetError's message is an item. Raised here, it would arrive with a traceback in it; an error that is
    an item and raised there would hold the workers' queues in a circle, and these take ten seconds to close.
    """

    def __init__(self, make: Sequence[Callable[[], Shard]]):
        self.make = make

    def __iter__(self) -> Iterator[ShardItem | str]:
        try:
            shards = [iter(make()) for make in self.make]
            while shards:
                for shard in list(shards):
                    for item in shard:
                        yield item
                        if item.ended:
                            shards.remove(shard)
                        if item.ended or item.sequence is not None:
                            break
        except DatasetError as error:
            yield str(error)


def outliving_signals() -> Callable[[int], None]:
    """The `worker_init_fn` of a DataLoader: a worker lives on for two minutes after SIGTERM or SIGINT.

    Slurm, systemd, Docker and Ctrl-C send these to all processes of a job. A worker that died of one would
    end the training process before it has saved. So workers leave with that process, or after two minutes.
    At its end, also after an error, Python itself sends its workers SIGTERM and waits for them: they know
    that from `ending`, and leave at once.
    """
    ending = RawValue("b", 0)
    Finalize(None, setattr, (ending, "value", 1), exitpriority=0)
    return partial(_outlive, ending)


def _outlive(ending: Any, worker: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Without an error: PyTorch's handler would have the run end with one of its own.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0) if ending.value else signal.alarm(120))
