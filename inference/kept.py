"""Files that a user keeps for later processes: what prompts left in the cache, and weights in four bits.

    checkpoint = with_prefixes(checkpoint.compiled(), "~/.cache/ocelli/prefixes")
    session = Session(checkpoint.model, prefixes=checkpoint.prefixes)
    ...
    checkpoint.prefixes.close()               # waits for what is not written yet; so does the end of Python
    model = load_int4(open_files("Qwen/Qwen3-VL-2B-Instruct"), torch.device("cpu"))

A file is written under another name first: whenever a process is killed there are whole files and at most a
draft, which goes with a later cleaning. A file ends with a checksum. It is used if that is right and nobody
but this user may write to it; else what it held is computed anew. There is no index: what a folder holds is
what lies in it, and a file's time is when it was used last. So processes that share a folder need not know of
each other. Files of others are never touched.

A block of a prefix is a file of its numbers, named after it and read only as a whole. One thread in the
background writes them all. Weights that are not kept yet are rounded twice: errors of the second time count
by how large the inputs are that meet them, of which the model that was rounded first tells. The name of their
file is a digest of what the numbers depend on: the checkpoint's files, this repository's code, and how wide a
panel is on this processor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import platform
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from generation import memory
from generation.fast.native.build import cache_folder, digest_of, processor
from generation.fast.native.panels import (
    BITS,
    PanelEmbedding,
    PanelLinear,
    PanelWeight,
    load_panels,
    round_layer,
    second_moments,
    to_rows,
)
from generation.fast.native.step import NativeStep
from generation.fast.quantized import PackedEmbedding, put_layers
from generation.fast.tower import FastTower
from generation.prefix_store import PREFIX_BYTES, PrefixStore, is_finite
from inference.errors import RequestError
from models.checkpoints.files import CheckpointError, Opened, state_of
from models.checkpoints.weights import memory_of, trim
from models.vision_language_model import VisionLanguageModel

ROOT = Path(__file__).resolve().parent.parent
DRAFT_SECONDS = 600  # that none takes to write: the process ended before
CHECKSUM_BYTES = 16
FOLDER_BYTES = 8 * 2**30  # of prefixes: 180 images of 17 tiles for SmolVLM-256M in float32
WAITING_BYTES = 2**29  # of blocks that are not written yet; what comes on top is kept another time
READERS = 2  # threads that read and check
CLEAN_EVERY = 64  # files written, before the folder is looked at again: others may write there as well
WEIGHTS_BYTES = 2**35  # of all files of weights; those used longest ago go
LEAST_BYTES = 2**23  # of weights: less is rounded in half a second
BLOCKS, WEIGHTS = ".prefix", ".int4"  # endings of files
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


def own_folder(folder: str | Path) -> Path:
    """A folder that is this user's alone, made if need be; what a link leads to, so that it cannot lead
    elsewhere later. Raises RequestError where others may write to it, as answers are computed from it."""
    path = Path(os.path.expanduser(os.fspath(folder))).absolute()
    if path.exists() and not path.is_dir():
        raise RequestError(f"{path}: expected a folder for kept prefixes, got a file")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    real, me = path.resolve(), os.geteuid()
    link, info = path.lstat(), real.stat()
    # Whoever made a link can have it lead elsewhere.
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or info.st_uid != me or link.st_uid not in (me, 0):
        got = f"mode {stat.S_IMODE(info.st_mode):04o} of user {info.st_uid}, named by user {link.st_uid}"
        raise RequestError(
            f"{path}: expected a folder that only you can write to, because answers are computed from it, "
            f"got {got}: chmod go-w, or name one that does not exist yet"
        )
    return real


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


# ------------------------------------------------------------------------------------------------ prefixes
def with_prefixes(
    checkpoint: Any,
    folder: str | Path | None,
    max_bytes: int = PREFIX_BYTES,
    folder_bytes: int = FOLDER_BYTES,
) -> Any:
    """This `Checkpoint`, whose decode step and tower are chosen, with a store of kept prefixes.

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
        """Log the first trouble of this folder."""
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
                self._writer.submit(self._write, blocks, size)
                self._waiting_bytes += size

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until all is written that was to be kept; False if that takes longer."""
        with suppress(RuntimeError):  # closed before
            return bool(wait([self._writer.submit(int)], seconds).done)
        return True

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
            self._size, self._written = make_room(self.path, BLOCKS, self.max_bytes - size), 0
        return self._size + size <= self.max_bytes

    def _path(self, name: bytes) -> Path:
        return self.path / f"{name.hex()}{BLOCKS}"


def _about(name: bytes, tensor: Tensor) -> str:
    return f"{name.hex()} {tensor.dtype}"


def identity(checkpoint: Any) -> bytes:
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


def libraries(checkpoint: Any) -> list[str]:
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
        return self._folder / f"{self._identity}{WEIGHTS}"

    def _identify(self) -> str:
        """A digest of what the numbers depend on; "" while the files of weights are not all here."""
        try:
            adapter = () if self._opened.adapter is None else self._opened.adapter.files
            known = [version_of(path) for path in sorted((*self._opened.weights_here, *adapter))]
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
                others = ("scale", "sum", "bias", "words")
                parts = {part: self.tensors.get(f"{first}.{part}") for part in others}
                shape = tuple(module.weight.shape)
                rows = parts["words"] is parts["sum"] is None
                made = PackedEmbedding(kept, parts["scale"], torch.float32, shape[1]) if rows else None
                setattr(model.get_submodule(above), own, made or kind.of(shape, weight=kept, **parts))
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
            make_room(self._folder, WEIGHTS, WEIGHTS_BYTES - size)
            write_whole(self._path, self._identity, partial(torch.save, tensors))
        except OSError as error:  # a full disk, say: it is rounded again the next time
            logger.warning("%s: rounded weights cannot be kept: %s", self._folder, error.strerror)
