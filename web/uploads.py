"""The files that visitors upload, and those that are made for them: all in one folder, within bounds.

uploads = Uploads(folder)
with uploads.coming(length):                   # while an upload arrives
    ...
    uploads.uploaded(paths, address)
uploads.make_room()                            # who holds most loses the oldest first
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KEEP = 3600  # seconds


class TooMuchError(Exception):
    """More is being uploaded at once than may be kept."""


class Uploads:
    """See the module's docstring. For any thread.

    Args:
        folder: everything that lies in it already is the page's own, and stays.
        most_bytes, most_files: of all others together.
        keep: seconds after which a file that nobody used is deleted.
    """

    def __init__(self, folder: str | Path, most_bytes: int, most_files: int, keep: float = KEEP):
        self.folder = Path(folder).resolve()
        self._most_bytes, self._most_files, self._keep = most_bytes, most_files, keep
        self._own = {path for path, _ in self._files()}
        self._owners: dict[Path, str] = {}
        self._coming = 0
        self._lock = threading.Lock()

    def holds(self, path: str) -> bool:
        """Whether that is where a file of this folder is, or was until it was deleted."""
        with suppress(OSError, ValueError):  # a NUL, or far too long
            place = Path(path).resolve()
            return place.is_relative_to(self.folder) and not place.is_dir()
        return False

    def used(self, path: str) -> None:
        """A file is asked about: it is not the oldest any more."""
        with suppress(OSError):
            os.utime(path)

    @contextmanager
    def coming(self, size: int) -> Iterator[None]:
        """Inside, an upload of at most so many bytes arrives, for which there is room.

        Raises:
            TooMuchError: there is none, for all that arrive at once.
        """
        with self._lock:
            if self._coming + size > self._most_bytes:
                raise TooMuchError
            self._coming += size
        try:
            yield
        finally:
            with self._lock:
                self._coming -= size

    def uploaded(self, paths: Iterable[str], owner: str) -> None:
        """Files have arrived from an address."""
        with self._lock:
            self._owners |= {Path(path).resolve(): owner for path in paths}

    def make_room(self) -> None:
        """Delete what is old; then, until the rest is within bounds, the oldest file of whoever holds most:
        nobody can have the files of all others deleted."""
        with self._lock:
            held: dict[str, list[tuple[float, int, Path]]] = defaultdict(list)
            latest = time.time() - self._keep
            for path, status in self._files():
                if path in self._own:
                    continue
                if status.st_ctime < latest:
                    self._delete(path)
                else:
                    held[self._owners.get(path, "")].append((status.st_ctime, status.st_size, path))
            for files in held.values():
                files.sort(reverse=True)  # the oldest last
            bytes_of = {owner: sum(size for _, size, _ in files) for owner, files in held.items()}
            while sum(bytes_of.values()) > self._most_bytes - self._coming:
                _, size, path = held[owner := max(bytes_of, key=bytes_of.__getitem__)].pop()
                bytes_of[owner] -= size
                self._delete(path)
            while sum(map(len, held.values())) > self._most_files:
                self._delete(max(held.values(), key=len).pop()[-1])

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):
                    path = Path(folder, name)
                    yield path, path.lstat()

    def _delete(self, path: Path) -> None:
        self._owners.pop(path, None)
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # unless there are others
