"""The files of a checkpoint: each is found once, and each JSON file is parsed once.

    opened = open_files("runs/mine")          # models.checkpoints.sources
    opened.config["model_type"], opened.json("tokenizer_config.json"), opened.weights

Whatever reads a checkpoint, its model and its processor, is handed one `Opened`. Importing this module
imports neither PyTorch nor the Hub's client: a mistyped name is refused at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Protocol

from messages import printable

EMBEDDED = Path(__file__).resolve().parents[2] / "checkpoints"  # the models that come with the repository
# What a processor, a tokenizer and a chat template may consist of, today's files and older ones.
# nanoVLM describes its processor in config.json.
PROCESSOR_FILES = (
    "config.json", "tokenizer_config.json", "tokenizer.json", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "generation_config.json",
)  # fmt: skip
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"[\w-][\w.-]{,200}\.safetensors", re.ASCII)

# Names of files that are there where a checkpoint's own are missing -> what is said about the first of them.
_INSTEAD = {
    "adapter_config.json": "it is an adapter: name its base as the model, and this folder with --adapter",
    "*.incomplete": "a download was cut short, download it again",
    "openvino*.*": "it holds OpenVINO weights ({}): take the safetensors that they were made from",
    "*.onnx": "it holds ONNX weights ({}): take the safetensors that they were made from",
    "pytorch_model*.bin": "it holds PyTorch's pickle ({}): take the safetensors, or convert it to them",
}


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or written. The message is one sentence for the user.

    A message may quote the checkpoint, so it is made `printable`.
    """

    def __init__(self, message: str):
        super().__init__(printable(message, 1_000, end=200))  # what to do stands at the end


@contextmanager
def naming(what: object) -> Iterator[None]:
    """What is wrong with a file or a checkpoint inside, values of other kinds than they should be included,
    comes out as a CheckpointError about it."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, re.error) as error:
        said = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{what}: {said}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def instead(names: Iterable[str]) -> str:
    """The end of a sentence that refuses a checkpoint without config.json or weights: what it has instead,
    by the names of its files; "" for nothing."""
    known = sorted(names)
    found = ((said, name) for end, said in _INSTEAD.items() for name in known if PurePath(name).match(end))
    return next((f": {said.format(name)}" for said, name in found), "")


def state_of(path: Path) -> tuple[str, int, int, int, int, int]:
    """Path, inode, size and times of a file: it is the same as before if all of them are."""
    info = path.stat()
    return str(path), info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def check_is_whole(path: Path) -> None:
    """Refuse what Git leaves in the place of a large file."""
    with path.open("rb") as file:
        if file.read(64).startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{path} is a Git-LFS pointer: run `git lfs pull` in {path.parent}")


@dataclass(frozen=True)
class Origin:
    """The place that a checkpoint came from: the name it was opened by, its folder here, the Hub's commit,
    and the files that its weights were read from."""

    source: str
    folder: Path
    commit: str | None = None
    weights: tuple[Path, ...] = ()


class Files(Protocol):
    """A place that has a checkpoint's files: a folder, GGUF files, or a repository on the Hub.

    name: for messages, such as "folder runs/mine".
    source: the name that the checkpoint was opened by.
    commit: the Hub's, once a file was asked for.
    gguf: names of the GGUF files that hold the weights, if such files do.
    """

    name: str
    source: str
    commit: str | None
    gguf: tuple[str, ...]

    def file(self, name: str) -> Path | None:
        """The path of a file, fetched if need be; None where there is no such file."""

    def cached(self, name: str) -> Path | None:
        """The path of a file that is on this machine already, else None."""

    def header(self, name: str) -> Path | None:
        """The path of a GGUF file, or of one as long with the header alone."""

    def names(self) -> list[str]:
        """The names of all files, those in folders below as folder/name."""


class Folder:
    """Files of a local folder."""

    commit: str | None = None
    gguf: tuple[str, ...] = ()

    def __init__(self, path: str | Path, source: str | Path):
        self.path, self.name, self.source = Path(path), f"folder {path}", str(source)

    def file(self, name: str) -> Path | None:
        """Its path. A link that leads out of a checkpoint is refused: an unpacked archive may hold links to
        any file of this machine. The client's own cache links its snapshots to its blobs."""
        path = self.path / name
        if not path.is_file():
            return None
        home, target = self.path.resolve(), path.resolve()
        blobs = home.parent.parent / "blobs"
        inside = target.is_relative_to(home)
        inside = inside or (home.parent.name == "snapshots" and target.is_relative_to(blobs))
        if not inside and os.environ.get("OCELLI_FOLLOW_LINKS") != "1":
            raise CheckpointError(
                f"{path} is a link out of its folder, to {target}: put the file itself there, or set "
                f"OCELLI_FOLLOW_LINKS=1 if the link is yours"
            )
        check_is_whole(path)
        return path

    cached = header = file

    def names(self) -> list[str]:
        patterns = ("*", "*/*", ".cache/huggingface/download/*.incomplete")
        paths = (path for pattern in patterns for path in self.path.glob(pattern))
        return [path.relative_to(self.path).as_posix() for path in paths]


class Opened:
    """A checkpoint's files, found and parsed when they are first asked for. `other` opens another checkpoint,
    which this one names; `adapter` changes its weights (`models.checkpoints.adapter.Adapter`)."""

    def __init__(self, files: Files, other: Callable[[str | Path], Opened], adapter: Any = None):
        self.files, self.source, self.other, self.adapter = files, files.source, other, adapter
        self._paths: dict[str, Path | None] = {}
        self._parsed: dict[str, dict[str, Any]] = {}

    @property
    def commit(self) -> str | None:
        """The Hub's; None for what is on this machine alone."""
        return self.files.commit

    def file(self, name: str) -> Path | None:
        """The path of a file, as `Files.file` finds it."""
        if name not in self._paths:
            self._paths[name] = self.files.file(name)
        return self._paths[name]

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file, {} where there is no such file. Others read it too: do not change it."""
        if name not in self._parsed:
            path = self.file(name)
            self._parsed[name] = {} if path is None else read_json(path)
        return self._parsed[name]

    @property
    def config(self) -> dict[str, Any]:
        """config.json, which every model has."""
        if self.file("config.json") is None:
            said = instead(self.files.names()) or ": a checkpoint needs one beside its weights"
            raise CheckpointError(f"{self.files.name} has no config.json{said}")
        return self.json("config.json")

    @property
    def generation_config(self) -> dict[str, Any]:
        return self.json("generation_config.json")

    @property
    def folder(self) -> Path:
        """The folder of its files on this machine."""
        if (found := next(filter(None, map(self.file, PROCESSOR_FILES)), None)) is None:
            raise CheckpointError(
                f"{self.files.name} has no files of a processor: expected tokenizer.json and others"
            )
        return found.parent

    @cached_property
    def processor_folder(self) -> Path:
        """`folder`, once all files of a processor are in it."""
        for name in sorted(PROCESSOR_FILES, key=lambda name: self.files.cached(name) is None):
            self.file(name)  # first those that need no network
        return self.folder

    @property
    def origin(self) -> Origin:
        adapter = () if self.adapter is None else self.adapter.files
        return Origin(self.source, self.folder, self.commit, (*self.weights, *adapter))

    @cached_property
    def shards(self) -> list[str]:
        """The names of the files that hold the weights; [] where there are none."""
        names = self.files.names()
        if self.files.gguf or WEIGHTS in names or INDEX not in names:
            return [*self.files.gguf] or [WEIGHTS] * (WEIGHTS in names)
        weight_map = self.json(INDEX).get("weight_map")
        named = [*weight_map.values()] if isinstance(weight_map, dict) else []
        # A shard is a plain file beside its index: a checkpoint must not name other files of this machine.
        if not named or not all(isinstance(name, str) and _SHARD.fullmatch(name) for name in named):
            raise CheckpointError(
                f"{self.files.name}: {INDEX}: expected a weight_map of tensor names to shards beside it, "
                f"such as model-00001-of-00002.safetensors"
            )
        return sorted({*named})

    @cached_property
    def weights(self) -> tuple[Path, ...]:
        """The files that hold the weights, fetched where they are not here."""
        if not self.shards:
            said = instead(self.files.names()) or ": other formats must be converted to safetensors first"
            raise CheckpointError(f"{self.files.name} has neither {WEIGHTS} nor {INDEX}{said}")
        paths = tuple(filter(None, map(self.file, self.shards)))
        if len(paths) < len(self.shards):
            absent = {*self.shards} - {path.name for path in paths}
            raise CheckpointError(
                f"{self.files.name} has no {min(absent)}, which its index names: download it again"
            )
        return paths

    @property
    def weights_here(self) -> tuple[Path, ...]:
        """`weights` if they are on this machine, else ()."""
        if isinstance(self.files, Folder) and self.shards:  # all that there is: what is missing is an error
            return self.weights
        found = tuple(filter(None, map(self.files.cached, self.shards)))
        return found if len(found) == len(self.shards) else ()

    @property
    def weight_map(self) -> dict[str, str]:
        """The shard of each tensor by its name; {} where there is one file or GGUF."""
        return {} if self.files.gguf or self.shards == [WEIGHTS] else self.json(INDEX).get("weight_map", {})
