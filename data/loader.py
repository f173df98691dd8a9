"""Mixed datasets → batches, on any number of ranks and worker processes, to be gone on with at any step.

    mixture = open_datasets([{"path": "rows.jsonl"}])
    loader = Loader(mixture, processor, LoaderConfig(batch_size=8, sequence_length=4096), rank, world_size)
    for batch in loader:                       # (micro_batch_size, 4096); batch_size / world_size rows a step
        batch = batch.to(model.device)         # images travel as bytes
        hidden, _ = model.hidden_states(batch["input_ids"], batch.get("pixel_values"),
                                        attention_mask=document_mask(batch["documents"]),
                                        position_ids=batch["position_ids"])
    state = merge_states([loader.state_dict()])   # of all ranks; fits any number of them

The rows of a run are numbered through: row g comes from lane g mod `lanes`, and step s trains on the
`batch_size` rows that follow row s · batch_size. So what a step sees depends neither on how many ranks share
the step nor on how many micro-batches it is cut into, nor on the number of workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from errno import ENOSPC
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from data.datasets import Mixture
from data.errors import DatasetError, one_line
from data.lanes import DropCount, Lane, Produced
from data.packing import Batch, PackedRow, collate
from data.processor import Processor
from data.samples import SampleEncoder
from data.workers import outliving_signals

_SHARED_MEMORY = (
    "that shared memory (/dev/shm) is full: use fewer workers, or give more of it (docker run --shm-size or "
    "--ipc=host)"
)
_LANES = 16  # at least so many, so that as many workers can help, however small the batch


@dataclass(frozen=True)
class LoaderConfig:
    """How batches are made.

    Args:
        batch_size: rows of one optimizer step, over all ranks and micro-batches.
        micro_batch_size: rows of one batch, on one rank.
        sequence_length: tokens that a row holds, and that a sample may take.
        max_tiles: tiles that a row holds, and that a sample may take; None leaves that to the tokens.
        packing: several samples in a row; else each has its own, padded to the longest of its batch.
        waiting: samples of each lane to choose from when a row is packed.
        shuffle_buffer: rows of a stream that are shuffled together, in each lane.
        lanes: how many sequences the rows are dealt to, a multiple of batch_size; None takes the first from
            16 up. Part of what decides the order.
        seed: of the order.
        epochs: after how often each row the data end; None goes on.
        workers: processes that read and decode on this rank; 0 does so in this one.
        prefetch: rows that each worker prepares in advance.
        max_drop_rate, drop_rate_after: of bad rows that stop the run; see `DropCount`.
    """

    batch_size: int = 8
    micro_batch_size: int = 1
    sequence_length: int = 4096
    max_tiles: int | None = None
    packing: bool = True
    waiting: int = 64
    shuffle_buffer: int = 256
    lanes: int | None = None
    seed: int = 0
    epochs: int | None = None
    workers: int = 0
    prefetch: int = 2
    max_drop_rate: float = 0.05
    drop_rate_after: int = 200

    def __post_init__(self):
        least = {"workers": 0, "drop_rate_after": 0, "seed": 0}
        for name in (
            *("batch_size", "micro_batch_size", "sequence_length", "max_tiles", "waiting", "shuffle_buffer"),
            *("lanes", "seed", "epochs", "workers", "prefetch", "drop_rate_after"),
        ):
            value = getattr(self, name)
            if value is not None and value < least.get(name, 1):
                raise DatasetError(f"{name}: expected at least {least.get(name, 1)}, got {value}")
        if not 0 <= self.max_drop_rate <= 1:
            raise DatasetError(f"max_drop_rate: expected a share from 0 to 1, got {self.max_drop_rate}")
        if self.lanes is not None and self.lanes % self.batch_size:
            raise DatasetError(
                f"lanes: expected a multiple of batch_size {self.batch_size}, got {self.lanes}"
            )

    @property
    def num_lanes(self) -> int:
        return self.lanes or self.batch_size * math.ceil(_LANES / self.batch_size)


@dataclass
class Place:
    """Where a loader stands: rows handed out on its rank, padding included; and, of the lanes, their states,
    which have ended, and what was left out. Never changed once it is a loader's: a copy is."""

    rows: int
    states: dict[int, dict[str, Any]]
    ended: set[int]
    drops: DropCount

    def copy(self) -> Place:
        return Place(self.rows, dict(self.states), set(self.ended), deepcopy(self.drops))


class Loader:
    """Iterate for `Batch`; each iteration goes on where the last batch left off, at `place`, which may be set
    to one that it had before.

    Args:
        rank, world_size: of this process; each rank is given its own rows of each step.

    Raises:
        DatasetError: ranks and micro-batches do not divide the batch, or packing with a model that cannot.
    """

    def __init__(
        self, mixture: Mixture, processor: Processor, config: LoaderConfig, rank: int = 0, world_size: int = 1
    ):
        per_rank, left = divmod(config.batch_size, world_size)
        if left or per_rank % config.micro_batch_size:
            raise DatasetError(
                f"batch_size {config.batch_size}: expected a multiple of ranks x micro_batch_size, "
                f"{world_size} x {config.micro_batch_size}"
            )
        if config.packing and processor.image_token_id is None:
            raise DatasetError(
                "packing: this model puts its image in front of a row, which then holds one sample; "
                "turn packing off"
            )
        self.mixture, self.processor, self.config = mixture, processor, config
        self.rank, self.world_size, self.rows_per_step = rank, world_size, per_rank
        # Ascending, they are visited in the order in which this rank's rows are numbered.
        self.lanes = [n for n in range(config.num_lanes) if n % config.batch_size // per_rank == rank]
        self.place = Place(0, {}, set(), DropCount(config.max_drop_rate, config.drop_rate_after))

    # ------------------------------------------------------------------------------------------ batches
    def __iter__(self) -> Iterator[Batch]:
        """Batches of `micro_batch_size` rows, in whole steps, until all of this rank's lanes have ended, if
        ever. Lanes end one after another: in the last steps, rows and whole batches may be padding.

        Raises:
            DatasetError: too many bad rows; on a single rank also none that is good.
        """
        produced, micro = self._producers(), self.config.micro_batch_size
        ahead, blank = self.place.copy(), list[Place]()  # blank: batches of padding alone, which are given
        while True:  # only if a row follows, or to complete a step
            turns = [self.lanes[(ahead.rows + i) % len(self.lanes)] for i in range(micro)]
            rows = [self._next_row(lane, ahead, produced) for lane in turns]
            ahead.rows += micro
            if any(rows):
                for place in blank:
                    yield self._batch([None] * micro, place)
                blank = []
                yield self._batch(rows, ahead.copy())
            elif len(ahead.ended) < len(self.lanes):
                blank.append(ahead.copy())
            else:
                break
        self.place = replace(ahead, rows=self.place.rows)
        if self.place.rows == 0 and self.world_size == 1:  # of several ranks, another may have some
            raise DatasetError(f"no row can be trained on: {ahead.drops.left_out() or 'none was read'}")
        while self.place.rows % self.rows_per_step:
            yield self._batch([None] * micro)

    def padding_step(self) -> list[Batch]:
        """A step of nothing but padding, for a rank whose data have ended before the others'."""
        micro = self.config.micro_batch_size
        return [self._batch([None] * micro) for _ in range(self.rows_per_step // micro)]

    def _batch(self, rows: Sequence[PackedRow | None], place: Place | None = None) -> Batch:
        """Hand rows out: from now on this loader stands behind them, at `place`."""
        self.place = place or replace(self.place, rows=self.place.rows + len(rows))
        length = self.config.sequence_length if self.config.packing else None
        return collate(rows, self.processor.pad_token_id, length)

    def _next_row(
        self, lane: int, ahead: Place, produced: Mapping[int, Iterator[Produced | Failure]]
    ) -> PackedRow | None:
        """A lane's next row, None once it has ended; what it tells of bad rows is counted."""
        while lane not in ahead.ended:
            try:
                item = next(produced[lane])
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker (pid"):
                    raise
                raise died(error) from error
            if isinstance(item, Failure):
                raise DatasetError(item.message)
            ahead.states[lane] = item.state
            ahead.drops.add(item)
            if item.ended:
                ahead.ended.add(lane)
            elif item.row is not None:
                return item.row
        return None

    def _producers(self) -> dict[int, Iterator[Produced | Failure]]:
        """What gives each lane's rows: the lane itself, or the worker process that it shares."""
        active = [lane for lane in self.lanes if lane not in self.place.ended]
        if not self.config.workers:
            return {lane: iter(self._lane(lane)) for lane in active}
        producers: dict[int, Iterator[Produced | Failure]] = {}
        for worker in range(min(self.config.workers, len(active))):
            # One loader for each worker: a loader of several would deal its turns out evenly, whatever the
            # number of lanes. A worker visits its lanes in the order in which their rows are wanted.
            share = active[worker :: self.config.workers]
            at = self.lanes[self.place.rows % len(self.lanes)]
            share = [lane for lane in share if lane >= at] + [lane for lane in share if lane < at]
            lanes = _WorkerLanes({lane: self._lane_arguments(lane) for lane in share})
            try:
                one = iter(
                    DataLoader(
                        lanes,
                        batch_size=None,
                        num_workers=1,
                        prefetch_factor=self.config.prefetch,
                        worker_init_fn=outliving_signals(),
                    )
                )
            except OSError as error:
                if error.errno != ENOSPC:
                    raise
                raise DatasetError(f"no worker can be started, which means {_SHARED_MEMORY}") from error
            producers |= dict.fromkeys(share, one)
        return producers

    def _lane(self, lane: int) -> Lane:
        return _open_lane(*self._lane_arguments(lane))

    def _lane_arguments(self, lane: int) -> tuple:
        return lane, self.mixture, self.processor, self.config, self.place.states.get(lane)

    # -------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """This rank's part of where the data stand: plain numbers, some kilobytes. Call it between steps.

        Raises:
            RuntimeError: in the middle of a step.
        """
        place = self.place
        if place.rows % self.rows_per_step:
            raise RuntimeError(
                f"the data can be saved between steps, of {self.rows_per_step} rows on this rank; "
                f"got {place.rows} rows"
            )
        return {
            "order": self._order(),
            "rows": place.rows * self.world_size,
            "lanes": {str(lane): state for lane, state in place.states.items()},
            "ended": sorted(place.ended),
            "read": place.drops.read,
            "filtered": place.drops.filtered,
            "dropped": dict(place.drops.dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `merge_states` of all ranks' states left off, on any number of ranks and workers.

        Raises:
            DatasetError: the state is of other data, of another order, or not of all ranks.
        """
        for name, expected in self._order().items():
            got = state["order"].get(name)
            if got != expected:
                raise DatasetError(f"the saved run's {name} was {got}, this one's is {expected}: keep it")
        if state["rows"] % self.config.batch_size:
            raise DatasetError(
                f"the saved run is {state['rows']} rows in, no multiple of batch_size, "
                f"{self.config.batch_size}"
            )
        missing = [n for n in self.lanes if state["rows"] > n and str(n) not in state["lanes"]]
        if missing:
            raise DatasetError(
                f"the state lacks lane {missing[0]}: it is of one rank only; merge those of all ranks"
            )
        states = {n: state["lanes"][str(n)] for n in self.lanes if str(n) in state["lanes"]}
        drops = DropCount(self.config.max_drop_rate, self.config.drop_rate_after)
        if self.rank == 0:  # the first rank counts on for all that were there before
            drops.read, drops.filtered = state["read"], state["filtered"]
            drops.dropped = Counter(state["dropped"])
        rows, ended = state["rows"] // self.world_size, set(self.lanes) & set(state["ended"])
        self.place = Place(rows, states, ended, drops)

    def _order(self) -> dict[str, Any]:
        """Everything that decides which rows come when."""
        config = self.config
        packing = [config.sequence_length, config.max_tiles, config.waiting] if config.packing else None
        return {
            "lanes": config.num_lanes,
            "seed": config.seed,
            "epochs": config.epochs,
            "shuffle_buffer": config.shuffle_buffer,
            "packing (sequence_length, max_tiles, waiting)": packing,
            "datasets (name, rows, weight)": [
                [source.name, source.num_rows, source.weight] for source in self.mixture.sources
            ],
        }


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks, saved at the same step, as one."""
    merged = dict(states[0])
    merged["lanes"] = {lane: value for state in states for lane, value in state["lanes"].items()}
    merged["ended"] = sorted({lane for state in states for lane in state["ended"]})
    merged["read"] = sum(state["read"] for state in states)
    merged["filtered"] = sum(state["filtered"] for state in states)
    merged["dropped"] = dict(sum((Counter(state["dropped"]) for state in states), Counter()))
    if any(state["rows"] != merged["rows"] for state in states):
        raise DatasetError(f"states of several steps: {sorted({state['rows'] for state in states})} rows in")
    return merged


def died(error: RuntimeError) -> DatasetError:
    """What PyTorch says of a worker that something has ended."""
    return DatasetError(
        f"a data worker has died ({one_line(str(error))}); if it was killed, memory was short; "
        f"a bus error means {_SHARED_MEMORY}"
    )


def _open_lane(
    lane: int, mixture: Mixture, processor: Processor, config: LoaderConfig, state: Mapping[str, Any] | None
) -> Lane:
    return Lane(
        mixture.lane(lane, config.num_lanes, config.seed, config.epochs, config.shuffle_buffer),
        mixture,
        SampleEncoder(processor, config.sequence_length, config.max_tiles),
        config.waiting if config.packing else 0,
        state,
    )


@dataclass(frozen=True)
class Failure:
    """What a worker says when its data cannot be gone on with, in place of an exception and its traceback."""

    message: str


class _WorkerLanes(IterableDataset):
    """The lanes of one worker process, a turn each, until each has ended."""

    def __init__(self, arguments: dict[int, tuple]):
        self.arguments = arguments

    def __iter__(self) -> Iterator[Produced | Failure]:
        try:
            lanes = {lane: iter(_open_lane(*arguments)) for lane, arguments in self.arguments.items()}
            while lanes:
                for lane in list(lanes):
                    for item in lanes[lane]:
                        yield item
                        if item.row is not None:
                            break
                        if item.ended:
                            del lanes[lane]
                            break
        except DatasetError as error:
            yield Failure(str(error))
