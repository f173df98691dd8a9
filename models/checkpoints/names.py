"""What a person calls a checkpoint -> a folder on this machine, or a repository's id on the Hub.

    resolve_source("ocelli-shapes")                     # the embedded model, from any folder
    resolve_source("HuggingFaceTB/SmolVLM-256M-Instruct")
    resolve_source("checkpoints/ocelli-shape")          # did you mean checkpoints/ocelli-shapes?

Nothing here needs PyTorch, the network or the Hub's client: a mistyped path is refused at once.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from models.checkpoints.errors import CheckpointError, some

EMBEDDED = Path(__file__).resolve().parents[2] / "checkpoints"  # the models that come with the repository
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_REPO_ID = re.compile(rf"({_NAME.pattern}/)?{_NAME.pattern}", re.ASCII)
_WEB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")
# How alike two names must be (difflib's ratio): to be suggested for a path, and to be taken for what was
# meant by a name that the Hub may have, too.
_ALIKE, _SURELY_ALIKE = 0.6, 0.7
_MOST_ENTRIES = 2_000  # of a folder that is searched for a similar name


def resolve_source(source: str | Path, revision: str | None = None) -> str:
    """The path of a checkpoint's folder, or a repository's id.

    A folder of that name comes first, then a model that comes with the repository. What can only be a path,
    what begins with the name of a folder of checkpoints, and what is nearly the name of a checkpoint here is
    not looked for on the Hub, unless a `revision` is given, which only repositories have.

    Raises:
        CheckpointError: there is no such folder, with the nearest name there is; a revision of a folder; what
            is no name at all.
    """
    text = str(source)
    if not text.strip():
        raise CheckpointError("expected a checkpoint folder or a repository id such as owner/name, got none")
    path = _folder(source, text)
    if path is not None:
        if revision is not None:
            raise CheckpointError(
                f"{text} is a local folder, which has no revision {revision!r}: leave revision out"
            )
        return path
    path = os.path.expanduser(text)
    if os.path.isfile(path):
        folder = os.path.dirname(path)
        hint = f" such as its own, {folder}," if _is_checkpoint(folder) else ""
        raise CheckpointError(
            f"{text} is a file: expected a checkpoint folder{hint} or a repository id such as owner/name"
        )
    if match := _WEB.fullmatch(text):
        raise CheckpointError(f"there is no folder {text}: did you mean the repository {match[1]}?")
    only_path = isinstance(source, Path) or text.startswith(("/", ".", "~")) or text.endswith("/")
    only_path = only_path or text.count("/") > 1
    if not only_path and not _REPO_ID.fullmatch(text):
        raise CheckpointError(
            f"{text!r} is neither a folder here nor a valid repository id such as owner/name"
        )
    if only_path or revision is None:
        _refuse_what_is_not_here(text, path, only_path)
    return text


def _folder(source: str | Path, text: str) -> str | None:
    """The folder that a source names: one that is there, or a model that comes with the repository."""
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return path
    name = text.removeprefix(EMBEDDED.name + "/")
    if isinstance(source, str) and _NAME.fullmatch(name) and _is_checkpoint(EMBEDDED / name):
        return str(EMBEDDED / name)
    return None


def _refuse_what_is_not_here(text: str, path: str, only_path: bool) -> None:
    """Raises CheckpointError for a path, and for a name that was meant for something here."""
    first, slash, _ = text.partition("/")
    looks_local = only_path or (slash and _checkpoints_in(first))
    meant = nearest(path, _ALIKE if looks_local else _SURELY_ALIKE)
    if not looks_local and meant is None:
        return
    hint = f"did you mean {meant}?" if meant else _what_there_is(path)
    if not only_path:
        hint += " (for a repository of that name give its revision, such as main, or start elsewhere)"
    raise CheckpointError(f"there is no folder {text}: {hint}")


def nearest(path: str, alike: float) -> str | None:
    """The checkpoint here whose path is most like one that does not exist."""
    parts = Path(path).parts
    found = _similar(Path(parts[0]) if os.path.isabs(path) else Path(), parts[os.path.isabs(path) :], alike)
    if not found and len(parts) <= 2 and not os.path.isabs(path):
        found = _similar(EMBEDDED, parts[-1:], alike) if parts[0] in (parts[-1], EMBEDDED.name) else []
    if not found:
        return None
    best = max(found, key=lambda other: difflib.SequenceMatcher(None, path, str(other)).ratio())
    return best.name if best.parent == EMBEDDED else str(best)


def _similar(base: Path, parts: tuple[str, ...], alike: float) -> list[Path]:
    """Checkpoints below `base` whose path is like `parts`, part by part."""
    if not parts:
        return [base] if _is_checkpoint(base) else []
    if parts[0] in (".", "..") or (len(parts) > 1 and (base / parts[0]).is_dir()):
        return _similar(base / parts[0], parts[1:], alike)
    lowered: dict[str, list[str]] = {}
    for name in _folders_in(base):
        lowered.setdefault(name.lower(), []).append(name)
    close = difflib.get_close_matches(parts[0].lower(), lowered, n=5, cutoff=alike)
    names = [name for like in close for name in lowered[like]]
    return [found for name in names for found in _similar(base / name, parts[1:], alike)]


def _what_there_is(path: str) -> str:
    """What stands in the place of a path that does not exist: the checkpoints of its nearest folder."""
    parent = os.path.dirname(path.rstrip("/"))
    while parent and not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    here = _checkpoints_in(parent or ".")
    if here:
        return f"{parent or 'this folder'} has {some(here)}"
    return "expected a checkpoint folder or a repository id such as owner/name"


def _checkpoints_in(folder: str | Path) -> list[str]:
    return [name for name in _folders_in(folder) if _is_checkpoint(os.path.join(folder, name))]


def _folders_in(folder: str | Path) -> list[str]:
    """Names of the folders in a folder, none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            named = [entry for _, entry in zip(range(_MOST_ENTRIES), entries)]
            return [entry.name for entry in named if entry.is_dir()]
    except OSError:
        return []


def _is_checkpoint(folder: str | Path) -> bool:
    return os.path.isfile(os.path.join(folder, "config.json"))
