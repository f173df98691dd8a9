"""The models of a service: each is opened when somebody first asks it, and kept.

Visitors may be allowed to name other models of the Hub. Of these one is open at a time.

    models = Models(["checkpoints/ocelli-shapes", "HuggingFaceTB/SmolVLM-256M-Instruct"])
    checkpoint = models.open("HuggingFaceTB/SmolVLM-256M-Instruct")
"""

from __future__ import annotations

import gc
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants

import families
from inference.checkpoint import Checkpoint, RequestError, loading_dtype, open_checkpoint, pick_device
from models.checkpoints.files import CheckpointError
from models.checkpoints.load import resolve_dtype
from models.checkpoints.names import MODELS
from models.checkpoints.sizes import measure, read_headers
from models.checkpoints.sources import last_name, open_files, repository

LARGEST_GUEST = 8 * 10**9  # bytes
GUEST = ""  # in place of the name of a model that visitors may name
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def model_ids(names: Sequence[str]) -> dict[str, str]:
    """What clients call each model: a repository by its id, what is here by its last name unless two share
    it."""
    short = list(map(last_name, names))
    unique = (called if short.count(called) == 1 else name for called, name in zip(short, names))
    return dict(zip(unique, names, strict=True))


class Models:
    """See the module's docstring. For any thread. While a model is being opened, those that are open can be
    asked, and others of `names` be opened.

    Args:
        names: folders or Hub ids that visitors may choose; the first is the default.
        any_model: visitors may name other repositories on the Hub, one of which (the guest) is kept open.
        device, dtype, threads, max_pixels, fps, max_frames: as for `open_checkpoint`.
        largest_guest: most bytes of a guest's files, and of its weights in memory. Both are measured before
            any weights are downloaded. After the download as much room must be left on the disk.

    ids: what visitors call each of `names`: see `model_ids`.
    `closed` is called with a checkpoint that is no longer kept.
    """

    def __init__(
        self,
        names: Sequence[str],
        any_model: bool = False,
        device: str = "auto",
        dtype: str = "auto",
        largest_guest: int = LARGEST_GUEST,
        threads: int | None = None,
        max_pixels: int | None = None,
        fps: float | None = None,
        max_frames: int | None = None,
    ):
        self.names, self.any_model, self.largest_guest = tuple(dict.fromkeys(names)), any_model, largest_guest
        self.ids = model_ids(self.names)
        self.closed: Callable[[Checkpoint], None] = lambda checkpoint: None
        self._device, self._dtype = device, dtype
        self._more = threads, max_pixels, fps, max_frames
        self._open: dict[str, Checkpoint] = {}  # changed while a lock of `_opening` is held, read without one
        self._said: dict[str, Mapping[str, Any]] = {}  # of those that are not open
        self._opening = {name: threading.Lock() for name in (*self.names, GUEST)}

    @property
    def default(self) -> str:
        return self.names[0]

    def named(self, chosen: str) -> str:
        """The name of a model that a visitor has chosen by its id or, of the Hub, by its short name."""
        return self.ids.get(chosen) or repository(chosen)

    @property
    def choices(self) -> list[str]:
        """What a visitor can choose among: `ids`, and short names of all that are small enough."""
        short = (name for name, known in MODELS.items() if known.gigabytes * 1e9 <= self.largest_guest)
        return [*self.ids, *short] if self.any_model else [*self.ids]

    def how(self, short: str) -> str:
        """How a visitor gets the model of a short name."""
        here = short in self.choices or repository(short) in self.names
        return "choose it as the model" if here else f"this page has to be started with --model {short}"

    def shown(self, name: str) -> str:
        """What visitors call the model of that name."""
        return next((shown for shown, known in self.ids.items() if known == name), name)

    def held(self, name: str) -> Checkpoint | None:
        """The model of that name if it is open."""
        return self._open.get(name)

    @property
    def guests(self) -> list[str]:
        """Those that are open."""
        return [name for name in list(self._open) if name not in self.names]

    def said(self, name: str) -> Mapping[str, Any]:
        """The generation_config.json of a model of that name, which need not be open. {} where it cannot be
        read, and for a guest that is not open: a visitor's typing has nothing fetched."""
        if (held := self.held(name)) is not None:
            return held.model.generation_config
        if name not in self._said and name in self.names:
            self._said[name] = {}
            with suppress(CheckpointError):  # whoever asks the model reads why
                self._said[name] = open_files(name).generation_config
        return self._said.get(name, {})

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether this checkpoint is still kept here."""
        return any(checkpoint is kept for kept in list(self._open.values()))

    def place(self, name: str) -> str:
        """A model's name, or GUEST for those of visitors, who share one thread and queue."""
        return name if name in self.names else GUEST

    def check(self, name: str) -> None:
        """Raises RequestError for a name that visitors may not choose. No folder but those of `names` may be
        chosen."""
        if name in self.names:
            return
        if not self.any_model:
            raise RequestError(f"model: expected one of {', '.join(self.ids)}, got {name[:100]!r}")
        if not _HUB_ID.fullmatch(name) or Path(name).exists():
            raise RequestError(f"model: expected an id on the Hub such as owner/name, got {name[:100]!r}")

    def open(self, name: str) -> Checkpoint:
        """The model of that name with the fastest decode step of this machine; loaded if it is not open.

        Raises:
            RequestError: visitors may not choose this model, or it is too large.
            CheckpointError, ProcessorError: see `open_checkpoint`.
        """
        self.check(name)
        if (held := self.held(name)) is not None:
            return held
        with self._opening[self.place(name)]:
            if (held := self.held(name)) is not None:  # opened while this thread waited
                return held
            self._open[name] = checkpoint = self._load(name)
            return checkpoint

    def _load(self, name: str) -> Checkpoint:
        commit = None
        if name not in self.names:
            commit = self._measured(name)
            self._drop_guest()  # two at once need not fit into memory
        return open_checkpoint(name, commit, self._device, self._dtype, *self._more).compiled()

    def _drop_guest(self) -> None:
        for name in self.guests:
            self.closed(self._open.pop(name))
        gc.collect()  # a model and its decode step may hold each other

    def _measured(self, name: str) -> str:
        """The commit of a guest that fits, of which only the configs have been downloaded so far.

        Raises RequestError for a model that is too large for the disk or for memory, or whose tokenizer lies
        in another repository.
        """
        found, most = measure(name), self.largest_guest

        def check(what: str, limit: int, size: int) -> None:
            if size > limit:
                limit_gb, size_gb = f"{limit / 1e9:.3g} GB", f"{size / 1e9:.3g} GB"
                raise RequestError(f"model: expected at most {limit_gb} {what}, {name} has {size_gb}")

        check("of files", most, found.total)
        if found.missing:
            cache = Path(constants.HF_HUB_CACHE).resolve()
            cache = next(folder for folder in (cache, *cache.parents) if folder.exists())
            check("that fit on the disk", max(0, shutil.disk_usage(cache).free - most), found.missing)
        opened = open_files(name, found.commit)
        if families.nanovlm.recognises(opened.config) and "tokenizer.json" not in found.sizes:
            raise RequestError(f"model: expected a tokenizer.json beside the weights of {name}, found none")
        dtype = resolve_dtype(loading_dtype(self._dtype), opened.config, pick_device(self._device))
        if (headers := read_headers(opened)) is not None:
            check("of weights in memory", most, headers.num_elements * dtype.itemsize)
        return found.commit
