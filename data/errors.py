"""What `data/` raises about images, prompts, processors and datasets: one sentence each, for a person. And
files: those that a run writes are replaced as a whole, and what goes wrong with one names it."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from messages import OneSentence, one_line


class ImageError(OneSentence):
    """An image that cannot be used."""


def optional(module: str, advice: str) -> Any:
    """A module that not everybody has installed. Raises ImageError with `advice` where it is missing."""
    try:
        return import_module(module)
    except ImportError:
        raise ImageError(advice) from None


class PromptError(OneSentence):
    """A conversation that cannot be used."""


class ThinkingError(PromptError):
    """Thinking is asked of a model that has none, by this option."""

    def __init__(self, option: str):
        super().__init__(f"this model's chat template has no thinking: ask it without {option}")
        self.option = option


class ProcessorError(OneSentence):
    """A folder whose processor cannot be opened, or does not fit its model."""


class DatasetError(OneSentence):
    """A dataset that cannot be opened, or that a run cannot go on with."""


class BadRow(OneSentence):
    """A row that cannot be trained on and is left out whole; `reason` is what such rows are counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return type(self), (self.reason, str(self))


# --------------------------------------------------------------------------------------------------- files
ROWS = (".jsonl", ".json", ".parquet", ".csv", ".tar")  # the endings of files of rows
# Rows that lie somewhere else begin so, such as s3://bucket/rows.parquet.
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@contextmanager
def naming(path: Path, kept: str = "") -> Iterator[None]:
    """Writing to an open file fails without saying which one: the OSError raised in this block says it, and
    what has been `kept`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"{error.strerror}{kept and '; '}{kept}", str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to; it takes the place of `path` when the block is left, and is removed
    where the block fails: `path` is then as it was."""
    if path.exists() and not path.is_file():  # /dev/null would become a file
        raise OSError(
            errno.EINVAL, "expected the name of a file, got a folder, a device or a pipe", str(path)
        )
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(path, "what it held is unchanged" if path.exists() else ""):
            yield temporary
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_rows_path(path: str) -> None:
    """Refuse a path of rows that can be nothing but a file or folder here, where there is none, and a file of
    another kind, with a DatasetError. Of an address (s3://, gs://, hf://, https://) it refuses a scheme that
    cannot be read here; whether it exists, nobody knows yet."""
    if ADDRESS.match(path):
        import fsspec  # takes a tenth of a second

        try:
            fsspec.get_filesystem_class(path.partition("://")[0])
        except (ValueError, ImportError) as error:
            said = f"expected an address that can be read here ({one_line(error)})"
            raise DatasetError(f"{path}: {said}") from error
        return
    local = Path(os.path.expanduser(path))
    if local.is_file() and local.suffix not in ROWS:
        got = local.suffix or "no ending"
        raise DatasetError(f"{path}: expected files that end in one of {', '.join(ROWS)}, got {got}")
    if local.exists() or glob.glob(str(local), recursive=True):
        return
    if path.startswith((".", "/", "~")) or local.suffix in ROWS or "*" in path:
        raise DatasetError(f"{path}: no such file or folder (looked in {Path.cwd()}); check the path")
