"""The models that a page offers: opened when first asked for, kept, and few at a time.

models = Models(["checkpoints/ocelli-shapes", "HuggingFaceTB/SmolVLM-256M-Instruct"])
checkpoint = models.open("HuggingFaceTB/SmolVLM-256M-Instruct")
"""

from __future__ import annotations

import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import constants

from inference.checkpoint import Checkpoint, RequestError, open_checkpoint
from models.checkpoints.headers import download_bytes

GUESTS = 1  # models that visitors named themselves, kept open at a time
LARGEST_GUEST = 8 * 10**9  # bytes of the files of one
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class Models:
    """See the module's docstring. For any thread; one model is opened at a time, and nobody waits for it
    who asks for another one that is open.

    Args:
        names: folders or Hub ids that may be chosen; the first is the default.
        any_model: visitors may name other repositories on the Hub.
        largest_guest: bytes of such a repository's files at most, asked for before any comes; the disk keeps
            as much room again.
        device, dtype: as for `open_checkpoint`.
        closed: called with a checkpoint that is kept no longer.
    """

    def __init__(
        self,
        names: Sequence[str],
        any_model: bool = False,
        device: str = "auto",
        dtype: str = "auto",
        closed: Callable[[Checkpoint], None] = lambda checkpoint: None,
        largest_guest: int = LARGEST_GUEST,
    ):
        self.names, self.any_model = tuple(dict.fromkeys(names)), any_model
        self.closed, self.largest_guest = closed, largest_guest
        self._device, self._dtype = device, dtype
        self._open: dict[str, Checkpoint] = {}
        self._guests: OrderedDict[str, Checkpoint] = OrderedDict()  # the one asked last stands last
        self._changing = threading.Lock()  # held for moments
        self._opening = threading.Lock()  # held while a model is loaded

    @property
    def default(self) -> str:
        return self.names[0]

    def held(self, name: str) -> Checkpoint | None:
        """The model of that name if it is open: what `open` gives, without waiting for anything."""
        with self._changing:
            if name in self._guests:
                self._guests.move_to_end(name)
                return self._guests[name]
            return self._open.get(name)

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether this one is still kept here."""
        with self._changing:
            return any(checkpoint is kept for kept in (*self._open.values(), *self._guests.values()))

    def open(self, name: str) -> Checkpoint:
        """The model of that name with the fastest decode step of this machine; loaded if it is not open.

        Raises:
            RequestError: a name that may not be chosen here.
            CheckpointError, ProcessorError: see `open_checkpoint`.
        """
        self.check(name)
        if (held := self.held(name)) is not None:
            return held
        with self._opening:
            if (held := self.held(name)) is not None:  # by whoever waited in front
                return held
            checkpoint = self._load(name)
            with self._changing:
                kept = self._open if name in self.names else self._guests
                kept[name] = checkpoint
                surplus = [self._guests.popitem(last=False)[1] for _ in range(len(self._guests) - GUESTS)]
            for other in surplus:
                self.closed(other)
            return checkpoint

    def check(self, name: str) -> None:
        """Raises RequestError for a name that may not be chosen here; no folder may but those of `names`."""
        if name in self.names:
            return
        if not self.any_model:
            raise RequestError(f"model: expected one of {', '.join(self.names)}, got {name[:100]!r}")
        if not _HUB_ID.fullmatch(name) or Path(name).exists():
            raise RequestError(f"model: expected an id on the Hub such as owner/name, got {name[:100]!r}")

    def _load(self, name: str) -> Checkpoint:
        if name not in self.names:
            self._check_size(name)
        return open_checkpoint(name, device=self._device, dtype=self._dtype).compiled()

    def _check_size(self, name: str) -> None:
        size, most = download_bytes(name), self.largest_guest
        if size > most:
            raise RequestError(
                f"model: expected files of at most {most / 1e9:.3g} GB, {name} has {size / 1e9:.3g} GB"
            )
        cache = Path(constants.HF_HUB_CACHE).resolve()
        cache = next(folder for folder in (cache, *cache.parents) if folder.exists())
        if (free := shutil.disk_usage(cache).free) < size + most:
            raise RequestError(
                f"model: the disk has no room for the {size / 1e9:.3g} GB of {name} "
                f"({free / 1e9:.3g} GB are free, and {most / 1e9:.3g} GB are to stay so)"
            )
