"""A folder of kept prefixes, for a process that is started again and for several at once.

    checkpoint = with_prefixes(checkpoint.compiled(), "~/.cache/ocelli/prefixes")
    session = Session(checkpoint.model, prefixes=checkpoint.prefixes)
    ...
    checkpoint.prefixes.close()               # waits for what is not written yet; so does the end of Python

Each block is a file (`inference.kept`) of its numbers, named after it and read only as a whole. One that was
cut short, has a flipped bit, or is somebody else's is removed, and the prompt computed as without it.
Everything is written by one thread in the background. Processes that share a folder need not know of each
other. Files of others are never touched.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.errors import expanded
from generation.fast.native.build import digest_of, processor
from generation.fast.native.panels import BITS, PanelWeight, load_panels
from generation.fast.native.step import NativeStep
from generation.fast.tower import FastTower
from generation.prefix_store import PREFIX_BYTES, PrefixStore, is_finite
from inference.checkpoint import Checkpoint
from inference.errors import RequestError
from inference.kept import (
    CHECKSUM_BYTES,
    check,
    code_digest,
    make_room,
    open_own,
    version_of,
    write_whole,
)
from models.checkpoints.weights import memory_of

FOLDER_BYTES = 8 * 2**30  # of a folder: 180 images of 17 tiles for SmolVLM-256M in float32
WAITING_BYTES = 2**29  # of blocks that are not written yet; what comes on top is kept another time
READERS = 2  # threads that read and check
CLEAN_EVERY = 64  # files written, before the folder is looked at again: others may write there as well
ENDING = ".prefix"
logger = logging.getLogger(__name__)


def with_prefixes(
    checkpoint: Checkpoint,
    folder: str | Path | None,
    max_bytes: int = PREFIX_BYTES,
    folder_bytes: int = FOLDER_BYTES,
) -> Checkpoint:
    """This checkpoint, whose decode step and tower are chosen, with a store of kept prefixes.

    Args:
        folder: where they outlive the process; None keeps them in memory alone.
        max_bytes: of memory.
        folder_bytes: of the folder.

    Raises RequestError for a folder that others may write to or that cannot be one, and OSError.
    """
    if folder is None:
        return replace(checkpoint, prefixes=PrefixStore(checkpoint.model, max_bytes))
    files = PrefixFolder(folder, folder_bytes)
    return replace(checkpoint, prefixes=PrefixStore(checkpoint.model, max_bytes, files, identity(checkpoint)))


class PrefixFolder:
    """The blocks of a `PrefixStore` in a folder that belongs to one user: see the module's docstring.

    Args:
        max_bytes: of all files of blocks; the one used longest ago goes first.
    """

    def __init__(self, folder: str | Path, max_bytes: int = FOLDER_BYTES):
        self.path, self.max_bytes = own_folder(folder), max_bytes
        self._readers = ThreadPoolExecutor(READERS, "prefix-reader")
        self._writer = ThreadPoolExecutor(1, "prefix-writer")  # the end of Python waits for it
        self._lock = threading.Lock()
        self._last: Future[None] | None = None  # the chain that is written after all others
        self._waiting_bytes = 0  # of chains that are not written yet
        self._size, self._written = max_bytes, CLEAN_EVERY  # unknown: the first file looks at the folder
        self._warned, self._closed = False, False

    # ------------------------------------------------------------------------------------------- reading

    def holds(self, name: bytes) -> bool:
        return not self._closed and os.path.lexists(self._path(name))

    def read(self, blocks: Sequence[tuple[bytes, int, torch.dtype]], pin: bool) -> Iterator[Tensor | None]:
        """Blocks by name, how many numbers they have, and of which dtype, in order, in memory of their own
        (pinned, where a GPU is to read it); None for one that is not there, or not as it was written."""
        try:
            return self._readers.map(partial(self._read, pin), *zip(*blocks))
        except RuntimeError:  # closed meanwhile
            return iter([None] * len(blocks))

    def _read(self, pin: bool, name: bytes, count: int, dtype: torch.dtype) -> Tensor | None:
        path, out = self._path(name), torch.empty(count, dtype=dtype, pin_memory=pin)
        try:
            with open_own(path) as file:
                if (size := os.fstat(file.fileno()).st_size) != out.nbytes + CHECKSUM_BYTES:
                    raise ValueError(f"expected {out.nbytes + CHECKSUM_BYTES} bytes, got {size}")
                content, done = memory_of(out), 0
                while done < len(content) and (count := file.readinto(content[done:])):  # type: ignore
                    done += count
                check(_about(name, out), content, file.read())
            return out
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn(f"{path}: a kept prefix cannot be used and is removed: {error}")
            with suppress(OSError):
                path.unlink()
            return None

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s", text)

    # ------------------------------------------------------------------------------------------- writing

    def keep(self, blocks: Sequence[tuple[bytes, Tensor | None]]) -> None:
        """Note that these blocks, one after another from a prompt's front, have been used, and write those
        that come with their numbers. Does not wait for that."""
        size = sum(tensor.nbytes for _, tensor in blocks if tensor is not None)
        with self._lock, suppress(RuntimeError):  # closed meanwhile
            busy = self._waiting_bytes and self._waiting_bytes + size > WAITING_BYTES
            if not busy and not self._closed:
                self._last = self._writer.submit(self._write, blocks, size)
                self._waiting_bytes += size

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until all is written that was to be kept; False if that takes longer."""
        return self._last is None or bool(wait([self._last], seconds).done)

    def close(self, seconds: float = 60.0) -> None:
        """Take nothing more, give nothing more, and wait until what was to be kept is written, for so long at
        most. In vain the second time."""
        with self._lock:
            self._closed = True
        self.flush(seconds)
        for pool in (self._writer, self._readers):
            pool.shutdown(wait=False)

    def _write(self, blocks: Sequence, size: int) -> None:
        try:
            self._write_chain(blocks)
        except OSError as error:  # a full disk, say: answers need none of this
            self._warn(f"{self.path}: prefixes cannot be kept: {error.strerror}")
        finally:
            with self._lock:
                self._waiting_bytes -= size

    def _write_chain(self, blocks: Sequence[tuple[bytes, Tensor | None]]) -> None:
        """Write what is not there, from the front, and give each file a time just before that of the file it
        follows, so that it goes first."""
        now, size = time.time_ns(), 0
        for index, (name, tensor) in enumerate(blocks):
            path, times = self._path(name), (now - index, now - index)
            with suppress(FileNotFoundError):
                size += path.lstat().st_size
                os.utime(path, ns=times, follow_symlinks=False)
                continue
            if tensor is None or not is_finite(tensor):
                return  # nothing after it could be found
            size += (nbytes := tensor.nbytes + CHECKSUM_BYTES)
            if size > self.max_bytes or not self._make_room(nbytes):
                return
            numbers = memory_of(tensor)
            write_whole(path, _about(name, tensor), lambda file: file.write(numbers), times)  # noqa: B023
            self._size, self._written = self._size + nbytes, self._written + 1

    def _make_room(self, size: int) -> bool:
        """Whether `size` bytes more fit, once those used longest ago are gone."""
        if self._size + size > self.max_bytes or self._written >= CLEAN_EVERY:
            self._size, self._written = make_room(self.path, ENDING, self.max_bytes - size), 0
        return self._size + size <= self.max_bytes

    def _path(self, name: bytes) -> Path:
        return self.path / f"{name.hex()}{ENDING}"


def _about(name: bytes, tensor: Tensor) -> str:
    return f"{name.hex()} {tensor.dtype}"


def identity(checkpoint: Checkpoint) -> bytes:
    """What a checkpoint's keys and values depend on besides the prompt: its weights and config, to the byte,
    and the arithmetic, down to the source of all that computes, what the compiler made of it, and the
    processor that runs it."""
    model = checkpoint.model
    if model.origin is None:
        raise ValueError("checkpoint: expected one that was loaded from files")
    folder = model.origin.folder
    sources = [folder / "config.json", *model.origin.weights]
    parts: dict[str, Any] = {
        "files": {path.name: version_of(path) for path in sources},
        "dtype": [checkpoint.dtype, str(model.language_model.cache_dtype)],
        "step": checkpoint.fast.chosen.partition(":")[0],
        "tower": checkpoint.fast.tower.partition(":")[0],
        "code": code_digest(),
        "libraries": libraries(checkpoint),
        "device": device_kind(model.device),
        "torch": [torch.__version__, torch.get_float32_matmul_precision(), *platform.libc_ver()],
    }
    return json.dumps(parts, sort_keys=True).encode()


def libraries(checkpoint: Checkpoint) -> list[str]:
    """The digests of the compiled libraries that a checkpoint computes with."""
    users = (checkpoint.decode_step, checkpoint.model.vision_model)
    opened = [user.library for user in users if isinstance(user, NativeStep | FastTower)]
    panels = {part.weight.dtype for part in checkpoint.model.modules() if isinstance(part, PanelWeight)}
    opened += [load_panels(BITS[dtype]) for dtype in panels]
    return sorted({digest_of(library) for library in opened})


def device_kind(device: torch.device) -> list[str]:
    """The kind of a device, not which of several alike it is, and what of its vendor's computes there."""
    if device.type == "cuda":
        kind: list[object] = [torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]
        kind += [torch.version.cuda, torch.backends.cudnn.version()]
        with suppress(PackageNotFoundError):
            kind.append(version("triton"))
        return [device.type, *map(str, kind)]
    return [device.type, torch.backends.cpu.get_cpu_capability(), processor()]


def own_folder(folder: str | Path) -> Path:
    """A folder that is this user's alone, made if need be; what a link leads to, so that it cannot lead
    elsewhere later. Raises RequestError where others may write to it, as answers are computed from it."""
    path = Path(expanded(os.fspath(folder))).absolute()
    if path.exists() and not path.is_dir():
        raise RequestError(f"{path}: expected a folder for kept prefixes, got a file")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    real = path.resolve()
    link, info, me = path.lstat(), real.stat(), os.geteuid()
    wrong = ""
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = f"its mode is {stat.S_IMODE(info.st_mode):04o}: chmod go-w {path}, or"
    if link.st_uid not in (me, 0):  # whoever made the link can have it lead elsewhere
        wrong = f"it is a link of user {link.st_uid}:"
    if info.st_uid != me:
        wrong = f"it belongs to user {info.st_uid}:"
    if wrong:
        raise RequestError(
            f"{path}: expected a folder that only you can write to, because answers are computed from it; "
            f"{wrong} name one that does not exist yet"
        )
    return real
