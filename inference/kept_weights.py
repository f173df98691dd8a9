"""Weights in four bits, kept in the cache folder: what was rounded once is only mapped the next time.

    opened = open_files("Qwen/Qwen3-VL-2B-Instruct")
    kept = KeptWeights(opened)
    model = kept.load(lambda: VisionLanguageModel.from_pretrained(opened, put=kept.put))

What is not kept yet is rounded twice: errors of the second time count by how large the inputs are that meet
them, of which the model that was rounded first tells.
A file holds what rounding made of all tensors. Its name is a digest of what that depends on: the checkpoint's
files, this repository's code, and how wide a panel is on this processor. It is used only if it is a file of
this user to which nobody else may write, and its last bytes are the checksum of all others. Else it is
written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_128, xxh3_128_digest

from generation import memory
from generation.fast.native.build import cache_folder
from generation.fast.native.panels import (
    PanelEmbedding,
    PanelLinear,
    PanelWeight,
    load_panels,
    round_layer,
    second_moments,
)
from generation.fast.quantized import put_layers
from models.checkpoints.files import CheckpointError, Opened, state_of
from models.checkpoints.weights import memory_of, trim

ROOT = Path(__file__).resolve().parent.parent
LEAST_BYTES = 2**23  # less is rounded in half a second
FOLDER_BYTES = 2**35  # of all files; those used longest ago go
DRAFT_SECONDS = 600  # that none takes to write: the process ended before
logger = logging.getLogger(__name__)


class KeptWeights:
    """The kept weights of one checkpoint."""

    def __init__(self, opened: Opened):
        self._opened = opened
        self._identity = self._identify()
        self.tensors: dict[str, Tensor] = {}  # mapped, or empty: nothing is kept
        self._moments: dict[str, Tensor] = {}  # of the inputs of matrices, by name
        if self._identity:
            with suppress(OSError, ValueError):
                self.tensors = _mapped(self._path, self._identity)
                os.utime(self._path)

    @cached_property
    def _path(self) -> Path:
        return cache_folder() / "weights" / f"{self._identity}.int4"

    def _identify(self) -> str:
        """A digest of what the numbers depend on; "" while the files of weights are not all here."""
        try:
            known = [state_of(path) for path in sorted(self._opened.weights_here)]
            config = self._opened.config
        except CheckpointError:
            return ""
        code = code_digest(), Path(__file__).read_bytes(), torch.__version__
        parts = known, config, code, load_panels(4).ocelli_panel()
        return hashlib.sha256(repr(parts).encode()).hexdigest() if known else ""

    def load(self, read: Callable[[], Any]) -> Any:
        """The VisionLanguageModel that `read` loads with `put`, and keep it where it was not."""
        model = read()
        if not self.tensors:
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
        """Write the file, if there is none and the checkpoint is still the one that was read."""
        before, self._identity = self._identity, self._identify()
        if self.tensors or not self._identity or before not in ("", self._identity):
            return
        found: dict[int, tuple[str, Tensor]] = {}  # by address: a tied head is kept once, as the embedding
        for name, tensor in model.state_dict().items():
            found.setdefault(tensor.data_ptr(), (name, tensor))
        tensors = dict(found.values())
        if (size := sum(tensor.nbytes for tensor in tensors.values())) < LEAST_BYTES:
            return
        header, begin = {}, 0
        for name, tensor in tensors.items():
            header[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), begin
            begin += tensor.nbytes + -tensor.nbytes % 64
        raw = json.dumps({"identity": self._identity, "tensors": header}).encode()
        raw += b" " * (-(len(raw) + 8) % 64)
        parts: list[bytes | memoryview] = [len(raw).to_bytes(8, "little"), raw]
        for tensor in tensors.values():
            parts += memory_of(tensor.contiguous()), bytes(-tensor.nbytes % 64)
        digest = xxh3_128()
        for part in parts:
            digest.update(part)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_room(self._path.parent, FOLDER_BYTES - size)
            write_whole(self._path, None, *parts, digest.digest())
        except OSError as error:  # a full disk, say: it is rounded again the next time
            logger.warning("%s: rounded weights cannot be kept: %s", self._path.parent, error.strerror)


def _mapped(path: Path, identity: str) -> dict[str, Tensor]:
    """The tensors of a file. Raises OSError, and ValueError if they are not those that this user wrote."""
    # Neither a link, nor a pipe that nobody writes to.
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(opened, "rb", buffering=0):
        info = os.fstat(opened)
        others = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or others:
            raise ValueError("it is not a file that only this user can write to")
        content = _Mapping(opened, 0, access=mmap.ACCESS_COPY)
    if xxh3_128_digest(memoryview(content)[:-16]) != content[-16:]:
        raise ValueError("its bytes are not those that were written")
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    if header["identity"] != identity:
        raise ValueError("it belongs to another checkpoint")
    tensors = {}
    for name, (kind, shape, begin) in header["tensors"].items():
        dtype, count = getattr(torch, kind), torch.Size(shape).numel()
        tensors[name] = torch.frombuffer(content, dtype=dtype, count=count, offset=start + begin).view(shape)
    memory.register(content)
    return tensors


class _Mapping(mmap.mmap):
    """A file, mapped as long as there are tensors in it. The system calls its pages free, since it could read
    them anew; but every token needs all of them."""


def _make_room(folder: Path, most: int) -> None:
    """Remove the files used longest ago until the rest take at most so many bytes, and drafts left behind."""
    for draft in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):  # another process was faster
            if draft.stat().st_mtime < time.time() - DRAFT_SECONDS:
                draft.unlink()
    found = sorted(((path.stat(), path) for path in folder.glob("*.int4")), key=lambda one: -one[0].st_mtime)
    for info, path in found:
        most -= info.st_size
        if most < 0:
            path.unlink(missing_ok=True)


def write_whole(path: Path, times: tuple[int, int] | None, *parts: bytes | memoryview) -> None:
    """Write a file of this user alone under another name, and then give it its own. times: of use, change."""
    draft = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")  # two containers may share a pid
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o600), "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        if times is not None:
            os.utime(draft, ns=times)
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


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
