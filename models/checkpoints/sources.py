"""Finding a checkpoint by the name that a person gives: a folder or GGUF files here, or a repository.

open_files("ocelli-shapes")                       # the embedded model, from any folder
open_files("smolvlm-256m")                        # a short name of models.checkpoints.names
open_files("ggml-org/SmolVLM-256M-Instruct-GGUF:Q8_0")
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from messages import did_you_mean, some
from models.checkpoints.files import (
    EMBEDDED,
    INDEX,
    WEIGHTS,
    CheckpointError,
    Files,
    Folder,
    Opened,
    state_of,
)
from models.checkpoints.gguf import SUFFIX
from models.checkpoints.gguf_files import GgufFiles
from models.checkpoints.hub import Repository
from models.checkpoints.names import MODELS, REPO_ID

T = TypeVar("T")
_QUANTIZED = re.compile(r"(.+):([\w-]{1,40})")


def open_files(source: str | Path, revision: str | None = None) -> Opened:
    """The files of a checkpoint. Nothing is fetched or parsed before it is asked for, but for GGUF files the
    headers."""
    return _opened(resolve_source(source, revision), source, revision)


def _opened(place: str, source: str | Path, revision: str | None, adapter: Any = None) -> Opened:
    wanted, text = _without_quantization(str(source))[1], ""
    folder = place
    if os.path.isfile(place):
        above, text = os.path.split(place)
        folder = above or "."
    files: Files = Folder(folder, source) if os.path.isdir(folder) else Repository(place, revision)
    if text or wanted or isinstance(files, Folder) or "gguf" in place.lower():
        names = [name for name in files.names() if "/" not in name]
        if text or wanted or (any(n.endswith(SUFFIX) for n in names) and not {WEIGHTS, INDEX} & {*names}):
            files = GgufFiles(files, source, names, wanted, text)
    return Opened(files, open_files, adapter)


def repository(name: str) -> str:
    """The repository of a short name. Any other name, and that of a folder here, as it is."""
    known = MODELS.get(name.lower())
    return known.repo if known and not os.path.isdir(name) else name


def resolve_source(source: str | Path, revision: str | None = None) -> str:
    """The path of a checkpoint's folder or GGUF file, or a repository's id.

    A folder of that name comes first, then a model that comes with Ocelli, then a short name of
    `models.checkpoints.names`. What can only be a path, what begins with the name of a folder of checkpoints,
    and what is nearly a short name or the name of a checkpoint here is not looked for on the Hub, unless a
    `revision` is given, which only repositories have.
    """
    text = _without_quantization(str(source))[0]
    text = repository(text) if isinstance(source, str) else text
    path, embedded = os.path.expanduser(text), EMBEDDED / text.removeprefix(EMBEDDED.name + "/")
    if isinstance(source, str) and embedded.parent == EMBEDDED and not os.path.isdir(path):
        path = str(embedded) if os.path.isfile(embedded / "config.json") else path
    if os.path.isdir(path):
        if revision is not None:
            raise CheckpointError(f"{text} is a local folder, which has no revision: leave {revision!r} out")
        return path
    if os.path.isfile(path) and path.endswith(SUFFIX):
        return path
    is_path = isinstance(source, Path) or path.endswith(SUFFIX) or os.path.isfile(path)
    is_path = is_path or not REPO_ID.fullmatch(text)
    if revision is None or is_path:
        place = Path(os.path.normpath(path))
        here = [str(place.parent / one.parent.name) for one in place.parent.glob("*/config.json")]
        alone = [] if "/" in text else [*MODELS, *(one.name for one in EMBEDDED.iterdir())]
        hint = did_you_mean(text, [*here, *alone])
        if here and not alone and not hint:
            hint = f": there are {some(here)}"
        if hint or is_path:
            expected = ": expected a folder, a GGUF file, or a repository's name such as owner/name"
            raise CheckpointError(f"there is no checkpoint {text}{hint or expected}")
    return text


def check_has_config(source: str | Path, revision: str | None = None) -> None:
    """Raise CheckpointError unless there is a config.json, or GGUF files whose headers tell as much. The Hub
    is asked only where its cache has none, and for what GGUF files there are."""
    opened = open_files(source, revision)
    if opened.files.cached("config.json") is None:
        assert opened.config is not None


def _without_quantization(name: str) -> tuple[str, str]:
    """owner/name:Q4_K_M -> the repository or folder, and the quantization, as llama.cpp takes them."""
    found = _QUANTIZED.fullmatch(name)
    return (found[1], found[2]) if found and not os.path.exists(os.path.expanduser(name)) else (name, "")


def last_name(source: str) -> str:
    """A model's name to show: of a path here the last part, with the quantization."""
    place = _without_quantization(source)[0]
    path = os.path.expanduser(place)
    return os.path.basename(os.path.abspath(path)) + source[len(place) :] if os.path.exists(path) else source


# --------------------------------------------------------------------------- a folder that others write to
# A checkpoint is many files, and nothing tells its readers when all of them belong together: whoever saves it
# may exchange the folder (as `save` does), rename files over it, or write into them (as transformers does).
# So the states of the folder's files are noted before reading and compared afterwards.

# What a model or a processor is read from, and its temporary names: `.NAME.a1B2c3` from rsync. A run's log
# beside it grows without being part of it.
_READ = re.compile(r"\.?[\w-][\w.-]*\.(safetensors|gguf|json|jinja|model|txt)(\.\w+)?", re.ASCII)
_READ_BELOW = ("*/tokenizer*", "*/*.jinja", ".cache/huggingface/download/*.incomplete")
_TRIES, _PAUSE = 5, 0.5  # seconds


def one_version(
    source: str | Path, revision: str | None, read: Callable[[Opened], T], adapter: Any = None
) -> T:
    """The result of `read`, all of it from files that did not change meanwhile, with an `Opened.adapter`.

    `read` may be called several times, and what it raises about a folder that changes is forgotten. A
    repository's files are those of one commit and do not change.
    """
    place = resolve_source(source, revision)
    folder = Path(place).parent if os.path.isfile(place) else Path(place)  # a file is GGUF
    if not folder.is_dir():
        return read(_opened(place, source, revision, adapter))
    for _ in range(_TRIES):
        before = _state(folder)
        try:
            result = read(_opened(place, source, revision, adapter))
        except Exception:
            if _state(folder) == before:
                raise
        else:
            if _state(folder) == before:
                return result
            del result  # so that two models are never held at once
        time.sleep(_PAUSE)
    raise CheckpointError(
        f"{source} changed each time it was read: wait until the process that saves to it has finished, and "
        f"try again"
    )


def _state(folder: Path) -> set[tuple]:
    """The state of each file that a checkpoint is read from."""
    paths = [path for path in folder.glob("*") if _READ.fullmatch(path.name)]
    found = set[tuple]()
    for path in (*paths, *(path for pattern in _READ_BELOW for path in folder.glob(pattern))):
        with suppress(OSError):  # it went between the list and this
            found.add(state_of(path))
    return found
