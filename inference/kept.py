"""Files that a user keeps for later processes; and weights in four bits, rounded once and then mapped.

    model = load_int4(open_files("Qwen/Qwen3-VL-2B-Instruct"), torch.device("cpu"))

A file is written under another name first: whenever a process is killed there are whole files and at most a
draft, which goes with a later cleaning. A file ends with a checksum. It is used if that is right and nobody
but this user may write to it; else it is written anew. There is no index: what a folder holds is what lies
in it, and a file's time is when it was used last.

What is not kept yet is rounded twice: errors of the second time count by how large the inputs are that meet
them, of which the model that was rounded first tells. The name of a file of weights is a digest of what its
numbers depend on: the checkpoint's files, this repository's code, and how wide a panel is on this processor.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from generation import memory
from generation.fast.native.build import cache_folder
from generation.fast.native.panels import (
    PanelEmbedding,
    PanelLinear,
    PanelWeight,
    load_panels,
    round_layer,
    second_moments,
    to_rows,
)
from generation.fast.quantized import put_layers
from models.checkpoints.files import CheckpointError, Opened, state_of
from models.checkpoints.weights import trim
from models.vision_language_model import VisionLanguageModel

ROOT = Path(__file__).resolve().parent.parent
LEAST_BYTES = 2**23  # of weights: less is rounded in half a second
FOLDER_BYTES = 2**35  # of all files of weights; those used longest ago go
DRAFT_SECONDS = 600  # that none takes to write: the process ended before
CHECKSUM_BYTES = 16
ENDING = ".int4"
logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------ files of one user
def write_whole(
    path: Path, about: str, fill: Callable[[BinaryIO], Any], times: tuple[int, int] | None = None
) -> None:
    """Write a file for this user alone: what `fill` writes, and the checksum of that and of `about`.
    times: of use and change, in ns. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # two containers may share a pid
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o600), "w+b") as file:
            fill(file)
            file.flush()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                file.write(checksum(about, content))
            file.flush()
            os.fsync(file.fileno())
        if times is not None:
            os.utime(draft, ns=times)
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def open_own(path: Path) -> BinaryIO:
    """A file to which nobody but this user may write. Raises OSError, ValueError."""
    # Neither a link, nor a pipe that nobody writes to.
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(opened)
    others = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or others:
        os.close(opened)
        raise ValueError("it is not a file that only this user can write to")
    return open(opened, "rb", buffering=0)


def checksum(about: str, content: Any) -> bytes:
    """Against accidents: who may write here could forge any, and this is 13 times as fast as SHA-256."""
    digest = xxh3_128(about.encode())
    digest.update(content)
    return digest.digest()


def check(about: str, content: Any, expected: bytes) -> None:
    if checksum(about, content) != expected:
        raise ValueError("its bytes are not those that were written")


def make_room(folder: Path, ending: str, most: int) -> int:
    """Remove drafts left behind and, where the files with this ending take more than `most` bytes, those used
    longest ago, until a sixteenth of that is free. Returns the bytes that stay."""
    for draft in folder.glob(f".*{ending}.*.tmp"):
        with suppress(FileNotFoundError):  # another process was faster
            if draft.stat().st_mtime < time.time() - DRAFT_SECONDS:
                draft.unlink()
    found = []
    for path in folder.glob(f"*{ending}"):
        with suppress(FileNotFoundError):
            found.append((path.lstat(), path))
    size = sum(info.st_size for info, _ in found)
    goal = most if size <= most else most * 15 // 16
    for info, path in sorted(found, key=lambda one: one[0].st_mtime_ns):
        if size <= goal:
            break
        path.unlink(missing_ok=True)
        size -= info.st_size
    return size


# ------------------------------------------------------------------------------ what kept numbers depend on
def version_of(path: Path) -> str:
    """The version of a checkpoint's file: its digest in the Hub's cache, or else path, inode, size and
    times."""
    path = path.resolve()
    return path.name if path.parent.name == "blobs" else repr(state_of(path))


def code_digest() -> str:
    """A digest of every file of this repository that has a part in a key or a value: networks, what reads
    their weights, what computes them in C and on a GPU, and what makes numbers of pixels. A comment that
    changes costs what was kept; a mended mistake must not live on in it."""
    rooms = ("models", "families", "generation")
    files = [path for room in rooms for path in (ROOT / room).rglob("*")]
    code = sorted(path for path in files if path.suffix in (".py", ".c", ".h"))
    digest = hashlib.sha256()
    for path in (*code, ROOT / "data" / "tiles.py"):
        digest.update(f"{path.relative_to(ROOT).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------- weights
def load_int4(opened: Opened, device: torch.device) -> VisionLanguageModel:
    """A model with weights in four bits on this device: kept ones, or rounded now and kept."""
    kept = KeptWeights(opened)
    read = partial(VisionLanguageModel.from_pretrained, opened, None, "stored", "cpu", kept.put)
    model = kept.load(read)  # where C rounds
    if device.type != "cpu":
        to_rows(model, device)
    return model


class KeptWeights:
    """The kept weights of one checkpoint."""

    def __init__(self, opened: Opened):
        self._opened, self._folder = opened, cache_folder() / "weights"
        self._identity = self._identify()
        self.tensors: dict[str, Tensor] = {}  # mapped, or empty: nothing is kept
        self._moments: dict[str, Tensor] = {}  # of the inputs of matrices, by name
        self.unused_bytes = 0  # mapped: the system calls these pages free, but every token needs them all
        if self._identity:
            with suppress(OSError, ValueError):
                self._map()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._identity}{ENDING}"

    def _identify(self) -> str:
        """A digest of what the numbers depend on; "" while the files of weights are not all here."""
        try:
            known = [version_of(path) for path in sorted(self._opened.weights_here)]
            config = self._opened.config
        except CheckpointError:
            return ""
        code = code_digest(), Path(__file__).read_bytes(), torch.__version__
        parts = known, config, code, load_panels(4).ocelli_panel()
        return hashlib.sha256(repr(parts).encode()).hexdigest() if known else ""

    def _map(self) -> None:
        with open_own(self._path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            with memoryview(content) as raw, raw[:-CHECKSUM_BYTES] as written:
                check(self._identity, written, content[-CHECKSUM_BYTES:])
            self.unused_bytes = len(content)
        self.tensors = torch.load(self._path, "cpu", weights_only=True, mmap=True)
        os.utime(self._path)

    def load(self, read: Callable[[], VisionLanguageModel]) -> VisionLanguageModel:
        """The model that `read` loads with `put`, and keep it where it was not."""
        model = read()
        if self.tensors:
            model.mapped = self  # type: ignore[assignment]  # for as long as the model lives
            memory.register(self)
        else:
            self._moments = second_moments(model.language_model)
            del model.language_model  # before the next one comes
            trim()
            model.language_model = read().language_model
            self.keep(model)
        return model

    def put(self, model: nn.Module, names: Sequence[str], read: Callable[[], Tensor]) -> None:
        """Give a model a tensor, under the names of all that share it: what is kept of it, or rounded now."""
        if not self.tensors:
            if not self._moments or names[0].startswith("language_model."):  # else it is there already
                put_layers(model, names, read(), partial(round_layer, "int4", moments=self._moments))
                trim()  # else half of the memory becomes holes that no tensor fits into
            return
        kept = self.tensors[names[0]]
        for name in names:
            path, _, leaf = name.rpartition(".")
            module: Any = model.get_submodule(path)
            if not kept.is_floating_point():
                kind = PanelLinear if isinstance(module, nn.Linear) else PanelEmbedding
                above, _, own = path.rpartition(".")
                first = names[0].rpartition(".")[0]
                parts = {part: self.tensors.get(f"{first}.{part}") for part in ("scale", "sum", "bias")}
                made = kind.of(tuple(module.weight.shape), weight=kept, **parts)
                setattr(model.get_submodule(above), own, made)
            elif not isinstance(module, PanelWeight):  # else a bias, which came with its matrix
                setattr(module, leaf, nn.Parameter(kept))

    def keep(self, model: nn.Module) -> None:
        """Write the file, if the checkpoint is still the one that was read."""
        before, self._identity = self._identity, self._identify()
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        size = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}.values())
        if not self._identity or before not in ("", self._identity) or size < LEAST_BYTES:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_room(self._folder, ENDING, FOLDER_BYTES - size)
            write_whole(self._path, self._identity, partial(torch.save, tensors))
        except OSError as error:  # a full disk, say: it is rounded again the next time
            logger.warning("%s: rounded weights cannot be kept: %s", self._folder, error.strerror)
