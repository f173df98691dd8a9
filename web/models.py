"""The models that a page offers: opened when first asked for, kept, and few at a time.

models = Models(["checkpoints/ocelli-shapes", "HuggingFaceTB/SmolVLM-256M-Instruct"])
checkpoint = models.open("HuggingFaceTB/SmolVLM-256M-Instruct")
"""

from __future__ import annotations

import gc
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import constants

from inference.checkpoint import Checkpoint, RequestError, loading_dtype, open_checkpoint, pick_device
from models.checkpoints import nanovlm
from models.checkpoints.hub import CheckpointFiles, describe, measure
from models.checkpoints.inspect import read_headers
from models.checkpoints.load import resolve_dtype

GUESTS = 1  # models that visitors named themselves, kept open at a time
LARGEST_GUEST = 8 * 10**9  # bytes of the files of one, and of its weights in memory
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class Models:
    """See the module's docstring. For any thread; one model is opened at a time, and nobody waits for it
    who asks for another one that is open.

    Args:
        names: folders or Hub ids that may be chosen; the first is the default.
        any_model: visitors may name other repositories on the Hub.
        largest_guest: bytes at most of such a repository's files and of its weights in memory, asked for
            before any weights come; the disk keeps as much room again.
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
            self._drop_guests(GUESTS)
            return checkpoint

    def _drop_guests(self, most: int) -> None:
        """All but the `most` that were asked last."""
        with self._changing:
            surplus = [self._guests.popitem(last=False)[1] for _ in range(len(self._guests) - most)]
        if surplus:
            while surplus:
                self.closed(surplus.pop())
            gc.collect()  # a model and its decode step may hold each other

    def check(self, name: str) -> None:
        """Raises RequestError for a name that may not be chosen here; no folder may but those of `names`."""
        if name in self.names:
            return
        if not self.any_model:
            raise RequestError(f"model: expected one of {', '.join(self.names)}, got {name[:100]!r}")
        if not _HUB_ID.fullmatch(name) or Path(name).exists():
            raise RequestError(f"model: expected an id on the Hub such as owner/name, got {name[:100]!r}")

    def _load(self, name: str) -> Checkpoint:
        commit = None
        if name not in self.names:
            commit = self._measured(name)
            self._drop_guests(GUESTS - 1)  # two at once need not fit into memory
        return open_checkpoint(name, commit, device=self._device, dtype=self._dtype).compiled()

    def _measured(self, name: str) -> str:
        """The commit of a guest that fits: nothing but its configs has been downloaded.

        Raises:
            RequestError: too large for the disk or for memory; a tokenizer of another repository.
            CheckpointError: see `measure`.
        """
        found, most = measure(name), self.largest_guest
        if found.total > most:
            raise RequestError(
                f"model: expected files of at most {most / 1e9:.3g} GB, {name} has {found.total / 1e9:.3g} GB"
            )
        cache = Path(constants.HF_HUB_CACHE).resolve()
        cache = next(folder for folder in (cache, *cache.parents) if folder.exists())
        free = shutil.disk_usage(cache).free
        if found.missing and free < found.missing + most:
            raise RequestError(
                f"model: the disk has no room for the {found.missing / 1e9:.3g} GB of {name} "
                f"({free / 1e9:.3g} GB are free, and {most / 1e9:.3g} GB are to stay so)"
            )
        files = describe(name, found.commit)
        if nanovlm.recognises(files.config) and "tokenizer.json" not in found.sizes:
            raise RequestError(
                f"model: expected a tokenizer.json beside the weights, {name} takes its tokenizer from "
                f"another repository, which is not downloaded for a visitor"
            )
        self._check_memory(name, files)
        return found.commit

    def _check_memory(self, name: str, files: CheckpointFiles) -> None:
        dtype = resolve_dtype(loading_dtype(self._dtype), files.config, pick_device(self._device))
        headers = read_headers(files)
        needed = 0 if headers is None else headers.num_elements * dtype.itemsize
        if needed > self.largest_guest:
            raise RequestError(
                f"model: expected at most {self.largest_guest / 1e9:.3g} GB of weights in memory, {name} "
                f"takes {needed / 1e9:.3g} GB as {str(dtype).removeprefix('torch.')}"
            )
