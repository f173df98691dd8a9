"""Questions about each of many images: of folders, globs and names, in an order that no file system decides.

    images = ImageQuestions(["photos"], ["How many boats?"])
    list(images)        # ("a/boat.jpg", (0, 0), {"image": "a/boat.jpg", "question": "How many boats?"}), ...

A folder is read with its subfolders. What is hidden, what does not end as images do, and links to folders are
left out and counted. Nothing is opened here: an image that cannot be read is an error of its own.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.errors import expanded, nearest_file
from inference.errors import RequestError
from messages import one_line

ENDINGS = frozenset(
    (".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
     ".jpg", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)  # fmt: skip


def are_images(names: Sequence[str], asked: bool) -> bool:
    """Whether the names after --batch are of images, not of a file of questions; `asked`: questions are given
    beside them."""
    if len(names) > 1 or os.path.isdir(expanded(names[0])) or _is_image(names[0]):
        return True
    is_pattern = glob.has_magic(names[0]) and not os.path.lexists(expanded(names[0]))
    return is_pattern or (
        asked and not os.path.lexists(expanded(names[0])) and not names[0].endswith(".jsonl")
    )


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in ENDINGS


class ImageQuestions:
    """Each question about each image. Iterate for (id, place, question as an object).

    images: paths, sorted and each once: of a single folder relative to it, otherwise as the names have them.
    left_out: how many files and folders of which kind were left out; unread: why a folder could not be read.
    things: what a question asks to locate, by the question.

    An id is the image's path, with #1, #2, ... where there are several questions. Raises RequestError where
    there is no image.
    """

    key = "id"

    def __init__(self, names: Sequence[str], questions: Sequence[str], things: dict[str, str] | None = None):
        self.questions, self.things = list(dict.fromkeys(questions)), things or {}
        self.left_out, self.unread = Counter[str](), list[str]()
        self._folder = expanded(names[0]) if len(names) == 1 and os.path.isdir(expanded(names[0])) else ""
        self.name = names[0] if len(names) == 1 else f"{len(names)} names"
        found = {path for name in names for path in self._found(name)}
        if self._folder:
            found = {os.path.relpath(path, self._folder) for path in found}
        # The order of code points is the same in any language and on any disk.
        self.images = sorted(Path(path).as_posix() for path in found)
        if not self.images:
            why = f" ({self.said_left_out()})" if self.left_out else ""
            raise RequestError("; ".join([f"{self.name}: no images there{why}", *self.unread]))

    def __len__(self) -> int:
        return len(self.images) * len(self.questions)

    def __iter__(self) -> Iterator[tuple[str, tuple[int, int], dict[str, Any]]]:
        digits = len(str(len(self.questions)))
        for place, image in enumerate(self.images):
            for number, question in enumerate(self.questions):
                own = f"#{number + 1:0{digits}}" if len(self.questions) > 1 else ""
                yield image + own, (place, number), {"image": image, "question": question}

    @contextmanager
    def reading(self) -> Iterator[Callable[[tuple[int, int]], dict[str, Any]]]:
        yield lambda place: {"image": self.images[place[0]], "question": self.questions[place[1]]}

    def part(self, entries: list[tuple], number: int, count: int) -> list[tuple]:
        """The entries (…, place) of one of `count` shards. An image is in the same shard wherever and
        whenever this is asked, whatever other images there are."""

        def shard(entry: tuple) -> int:
            digest = hashlib.sha256(self.images[entry[-1][0]].encode("utf-8", "surrogatepass")).digest()
            return int.from_bytes(digest[:8], "big") % count + 1

        return [entry for entry in entries if shard(entry) == number]

    def image_path(self, image: str) -> str:
        """Where an image is, in a form that is nothing but a path: no home and no URL."""
        path = os.path.normpath(os.path.join(self._folder, image))
        return os.path.abspath(path) if path.startswith("~") or ":" in path else path

    def said_left_out(self) -> str:
        """What was left out, for a person."""
        kinds = self.left_out.most_common(6)
        rest = self.left_out.total() - sum(count for _, count in kinds)
        listed = [f"{count} {kind}" for kind, count in kinds] + ([f"{rest} others"] if rest else [])
        return f"left out: {', '.join(listed)}"

    def _found(self, name: str) -> Iterator[str]:
        """The images that one name means."""
        path = expanded(name)
        matches = [path]
        if not os.path.lexists(path):
            matches = self._matching(Path(path)) if glob.has_magic(path) else []
            if not matches:
                raise RequestError(f"{name}: no such file or folder{nearest_file(path, folders=True)}")
        for match in matches:
            if os.path.isdir(match):
                yield from self._within(match)
            elif self._takes(os.path.basename(match), os.path.isfile(match) or os.path.islink(match)):
                yield os.path.normpath(match)

    def _matching(self, pattern: Path) -> list[str]:
        """What a glob matches, as a shell does: hidden names only where the pattern says so. `**` goes into
        no links to folders, which may go round in a circle."""
        parts = pattern.relative_to(pattern.anchor).parts
        parts = tuple(part if part == "**" else part.replace("**", "*") for part in parts)
        found = []
        for match in Path(pattern.anchor).glob(str(Path(*parts))):
            hidden = {part for part in match.parts if part.startswith(".") and part != ".."}
            if hidden <= set(pattern.parts) or any(part[:1] == "." and "*" in part for part in pattern.parts):
                found.append(str(match))
            else:
                self.left_out["hidden"] += 1
        return found

    def _within(self, top: str) -> Iterator[str]:
        folders = [top]
        while folders:
            try:
                entries = list(os.scandir(folder := folders.pop()))
            except OSError as error:
                self.unread.append(one_line(error))
                continue
            for entry in entries:
                if entry.name.startswith("."):
                    self.left_out["hidden"] += 1
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_dir():
                    self.left_out["links to folders"] += 1
                elif self._takes(entry.name, entry.is_file() or entry.is_symlink()):
                    yield os.path.join(folder, entry.name)

    def _takes(self, name: str, is_file: bool) -> bool:
        """Whether a file is taken for an image; a link that leads nowhere is, as a person would see one."""
        if is_file and _is_image(name):
            return True
        self.left_out[
            (os.path.splitext(name)[1].lower() or "without an ending") if is_file else "no files"
        ] += 1
        return False
