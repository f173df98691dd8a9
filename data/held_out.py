"""Rows that are held out from training.

    rows, held_out = open_both([{"path": "flowers"}], [], holdout=0.2)
    Share(0.2, held_out=True).of(rows, "flowers")    # of rows that are open

The same rows are held out each time, in training and in evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from data.errors import DatasetError
from data.row_files import Stream, library
from data.sources import DatasetConfig, Mixture, open_datasets, select

Entry = DatasetConfig | Mapping[str, Any]


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
        divided = [open_datasets(learnt, preferences, Share(holdout, one).of) for one in (False, True)]
        return divided[0], divided[1]
    return open_datasets(learnt, preferences), open_datasets(held_out, preferences) if held_out else None
