"""Which JSON-lines files of a folder are which split: by the words that the `datasets` library goes by.

    rows/train/metadata.jsonl  rows/validation/metadata.jsonl      the names of folders, before those of files
    rows/train.jsonl           rows/my-dev-1.jsonl
    rows/a.jsonl               rows/b.jsonl                        all train, as nothing else is

Beside a name that says train, files whose names say nothing belong to no split: they may be held out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from data.errors import DatasetError

METADATA = "metadata.jsonl"  # of an image folder; beside it no other file counts
TRAIN = "train"
_WORDS = {
    TRAIN: {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")


def name_of(split: str) -> str:
    """The name in a split such as "train[:90%]"."""
    return split.partition("[")[0]


def files_by_split(folder: Path, asked: str) -> dict[str, list[Path]]:
    """Split -> its files; {} where the folder has no JSON lines. A folder of the very name that is asked for
    is a split, and no other belongs to it.

    Raises:
        DatasetError: one list of the images of several splits.
    """
    with os.scandir(folder) as entries:  # which knows folders without a look at each of a million images
        named = {Path(entry.path): _named(entry.name, asked) for entry in entries if entry.is_dir()}
    by_folder: dict[str, list[Path]] = {}
    for path, splits in sorted(named.items()):
        for split in splits if (lines := _lines(path)) else ():
            by_folder[split] = by_folder.get(split, []) + lines
    if asked and (lines := _lines(folder / asked)):
        by_folder[asked] = lines
    by_name: dict[str, list[Path]] = {}
    unnamed = []
    for path in _lines(folder):
        for split in (splits := _named(path.name)):
            by_name.setdefault(split, []).append(path)
        if not splits:
            unnamed.append(path)
    several = sorted({split for splits in named.values() for split in splits})
    if not by_folder and len(several) > 1 and any(path.name == METADATA for path in unnamed):
        raise DatasetError(
            f"{folder}: {METADATA} does not say which of its images are {' and which '.join(several)}; "
            "put one into each of their folders"
        )
    found = by_name | by_folder
    return {TRAIN: unnamed} | found if unnamed else found


def chosen(by_split: Mapping[str, list[Path]], asked: str, where: str) -> list[Path]:
    """The files of the split that is asked for, by any of its names; where none is, all that one folder has,
    or train of several folders.

    Raises:
        DatasetError: there is none.
    """
    everything = sorted({file for files in by_split.values() for file in files})
    if not asked and len({file.parent for file in everything}) == 1:
        return everything
    asked = asked or TRAIN
    known = next((split for split, words in _WORDS.items() if asked in words), asked)
    files = by_split.get(asked) or by_split.get(known)
    if not files:
        raise DatasetError(f"{where}: no split {asked!r}; it has {', '.join(by_split)}")
    return files


def check_only_train(split: str, where: str) -> None:
    """Raises DatasetError where another split is asked for of files that are named one by one."""
    if name_of(split) not in ("", TRAIN):
        raise DatasetError(
            f"{where}: no split {name_of(split)!r}; it has train, as all files that are named one by one: "
            "name the file whose rows you want, or a folder with a file for each split"
        )


def _lines(folder: Path) -> list[Path]:
    metadata = folder / METADATA
    return [metadata] if metadata.is_file() else sorted(folder.glob("*.jsonl"))


def _named(name: str, asked: str = "") -> list[str]:
    """The splits that a name names."""
    if name == asked:
        return [asked]
    words = set(_BETWEEN_WORDS.split(name.lower()))
    return [split for split, names in _WORDS.items() if words & names]
