"""GGUF files, of this machine or a repository, as the files of a checkpoint in the Hub's layout."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from models.checkpoints.files import CheckpointError, Files, naming, state_of
from models.checkpoints.gguf import Place, choose, read_header
from models.checkpoints.gguf_config import hub_files


class GgufFiles:
    """A text part and its tower, `gguf`, or a text part alone. Config, tokenizer and image settings are made
    of their metadata, in a temporary folder that this process has. headers: the files, or as much of them as
    is fetched; tensors: the places of theirs."""

    def __init__(
        self, files: Files, source: str | Path, names: Iterable[str], wanted: str = "", text: str = ""
    ):
        """Takes `text`, or the text part of the quantization `wanted`, and its tower, of files of these
        names."""
        with naming(files.name):
            self.gguf: tuple[str, ...] = choose(names, wanted, text)
        self._files = files
        self.headers = tuple(self._there(name, files.header(name)) for name in self.gguf)
        resolved = [path.resolve() for path in self.headers]
        folder, self.tensors = _translated(*map(state_of, resolved))
        self._folder = Path(folder.name)
        self.name, self.source, self.commit = str(resolved[0]), str(source), files.commit

    def _there(self, name: str, path: Path | None) -> Path:
        if path is None:
            raise CheckpointError(f"{self._files.name} has no {name}: download it again")
        return path

    def file(self, name: str) -> Path | None:
        if name in self.gguf:
            return self._there(name, self._files.file(name))
        path = self._folder / name
        return path if path.is_file() else None

    header = file

    def cached(self, name: str) -> Path | None:
        return self._files.cached(name) if name in self.gguf else self.file(name)

    def names(self) -> list[str]:
        return [*self.gguf, *(path.name for path in self._folder.iterdir())]


@cache  # the folder is there as long as the process
def _translated(
    *parts: tuple[str, int, int, int, int, int],
) -> tuple[tempfile.TemporaryDirectory, list[dict[str, Place]]]:
    """A folder in the Hub's layout of the GGUF files that have these states, and the tensors of each."""
    from families import FAMILIES  # imports torch, which takes seconds

    layouts = [named for family in FAMILIES.values() for named in family.GGUF.items()]
    headers = []
    for place, *_ in parts:
        with naming(place):
            headers.append(read_header(Path(place)))
    with naming(parts[0][0]):
        files = hub_files(headers[0], headers[1] if headers[1:] else None, layouts)
    folder = tempfile.TemporaryDirectory(prefix="ocelli-gguf-")
    for name, content in files.items():
        written = content if isinstance(content, str) else json.dumps(content)
        (Path(folder.name) / name).write_text(written, encoding="utf-8")
    return folder, [header.tensors for header in headers]
