"""The models of a server: each is opened when somebody first asks it, and kept.

models = Models(["checkpoints/ocelli-shapes", "HuggingFaceTB/SmolVLM-256M-Instruct"])
checkpoint = models.open("HuggingFaceTB/SmolVLM-256M-Instruct")
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from inference.checkpoint import Checkpoint, open_checkpoint
from models.checkpoints.sources import last_name


def model_ids(names: Sequence[str]) -> dict[str, str]:
    """What clients call each model: a repository by its id, what is here by its last name unless two share
    it."""
    short = list(map(last_name, names))
    unique = (called if short.count(called) == 1 else name for called, name in zip(short, names))
    return dict(zip(unique, names, strict=True))


class Models:
    """See the module's docstring. For any thread. While a model is being opened, those that are open can be
    asked, and others be opened.

    Args:
        names: folders or Hub ids; the first is the default.
        options: of `open_checkpoint`, such as device and dtype.

    `closed` is called with a checkpoint that is no longer kept.
    """

    def __init__(self, names: Sequence[str], **options: Any):
        self.names, self._options = tuple(dict.fromkeys(names)), options
        self.closed: Callable[[Checkpoint], None] = lambda checkpoint: None
        self._open: dict[str, Checkpoint] = {}  # changed while a lock of `_opening` is held, read without one
        self._opening = {name: threading.Lock() for name in self.names}

    @property
    def default(self) -> str:
        return self.names[0]

    def held(self, name: str) -> Checkpoint | None:
        """The model of that name if it is open."""
        return self._open.get(name)

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether this checkpoint is still kept here."""
        return any(checkpoint is kept for kept in list(self._open.values()))

    def open(self, name: str) -> Checkpoint:
        """The model of one of `names` with the fastest decode step of this machine; loaded if it is not open.
        Raises CheckpointError, ProcessorError: see `open_checkpoint`."""
        with self._opening[name]:
            if (held := self.held(name)) is None:
                held = self._open[name] = self._load(name)
            return held

    def _load(self, name: str) -> Checkpoint:
        return open_checkpoint(name, **self._options).compiled()
