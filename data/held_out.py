"""Rows that are held out from training, and a warning where all rows have the same answer.

    rows, held_out = open_both([{"path": "flowers"}], [], holdout=0.2)
    Share(0.2, held_out=True).of(rows, "flowers")    # of rows that are open

The same rows are held out each time, in training and in evaluation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from data.errors import BadRow, DatasetError
from data.row_files import Stream, library
from data.row_schemas import OF_BOXES
from data.sources import DatasetConfig, Mixture, Source, open_datasets, select

logger = logging.getLogger(__name__)
Entry = DatasetConfig | Mapping[str, Any]
_COMPARED = 500  # answers, at most


class Share(NamedTuple):
    """The `share` of a dataset's rows that is held out, if `held_out`, or the others. They are the same ones
    each time, shuffled, and where a column is a `ClassLabel` that share of each class."""

    share: float
    held_out: bool

    def of(self, rows: Any, path: str) -> Any:
        """These of the rows. Raises DatasetError for rows that cannot be divided."""
        if isinstance(rows, Stream):
            raise DatasetError(f"{path}: --holdout: expected rows that are not streamed; use --eval-data")
        features = getattr(rows, "features", None) or {}
        column = next((key for key, one in features.items() if isinstance(one, library().ClassLabel)), None)
        known = rows[column] if column else [0] * len(rows)
        classes = np.array([-1 if one is None else one for one in known])
        order = np.random.RandomState(0).permutation(len(rows))  # whose numbers never change
        chosen = np.zeros(len(rows), bool)
        for one in np.unique(classes):
            own = order[classes[order] == one]
            # At least one row of it, and not all: something of it is learnt.
            chosen[own[: min(max(1, round(self.share * len(own))), len(own) - 1)]] = True
        if not chosen.any():
            got = f"{len(rows)}{', each of a class of its own' * (len(rows) > 1)}"
            raise DatasetError(f"{path}: --holdout: expected at least 2 rows of a class, got {got}")
        return select(rows, order[chosen[order] == self.held_out])


def open_both(
    learnt: Sequence[Entry], held_out: Sequence[Entry], holdout: float, preferences: bool = False
) -> tuple[Mixture, Mixture | None]:
    """The rows to train on, and those to evaluate on, if any: datasets of their own, or the share `holdout`
    of the first. See `data.sources.open_datasets`."""
    if holdout:
        found = [open_datasets(learnt, preferences, Share(holdout, one).of) for one in (False, True)]
    else:
        found = [open_datasets(entries, preferences) for entries in (learnt, held_out) if entries]
    for mixture in () if preferences else found:
        warn_of_one_answer(mixture, bool(holdout))
    return found[0], found[1] if len(found) > 1 else None


def warn_of_one_answer(mixture: Mixture, shuffled: bool = False) -> None:
    """A message for each dataset of which all rows that are compared have one answer."""
    for source in mixture.sources:
        if isinstance(source.rows, Sized) and source.schema.text_columns not in OF_BOXES:
            warn_if_alike(source.name, _answers(source), shuffled)


def warn_if_alike(name: str, answers: Iterable[Any], shuffled: bool) -> None:
    """A message if these answers of several rows are all the same; they are read up to one that is not.
    `shuffled`: the rows have been divided by --holdout."""
    count, first = 0, None
    for count, answer in enumerate(answers, 1):
        first = answer if count == 1 else first
        if answer != first:
            return
    if count > 1:
        said = "%s: the %d rows that were compared have one answer, %.80r"
        advice = "; if rows are sorted, as in a folder for each class, take --holdout in place of a slice"
        logger.warning(said + advice * (not shuffled), name, count, first)


def _answers(source: Source) -> Iterator[str]:
    """The last answers and calls of some rows, of the last and first before others: rows are often sorted."""
    numbers = np.linspace(0, len(source.rows) - 1, min(len(source.rows), _COMPARED)).astype(int).tolist()
    for number in dict.fromkeys([*numbers[-1:], *numbers]):
        with suppress(BadRow):
            for message in (source.schema.conversation(source.rows[number]) or ())[-1:]:
                texts = [str(part["text"]) for part in message["content"] if part["type"] == "text"]
                calls = [f"{one.name}({one.arguments})" for one in message.get("tool_calls", ())]
                yield "".join(texts + calls)
