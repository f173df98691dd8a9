"""Where a checkpoint is: the name that a person gives -> a folder here, or files of one commit on the Hub.

    resolve_source("ocelli-shapes")                     # the embedded model, from any folder
    resolve_source("smolvlm-256m")                      # a short name of models.checkpoints.names
    resolve_source("checkpoints/ocelli-shape")          # did you mean ocelli-shapes?
    locate("HuggingFaceTB/SmolVLM-256M-Instruct")       # its configs, and its weights in the client's cache

Downloads go through huggingface_hub: its cache, its tokens, HF_ENDPOINT, HF_HUB_OFFLINE. Only the files that
are needed are fetched, all from the commit that config.json came from. Importing this module imports neither
PyTorch nor the Hub's client: a mistyped name is refused at once.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from messages import printable, some
from models.checkpoints.gguf import SUFFIX, choose, header_of, read_header
from models.checkpoints.gguf_config import hub_files
from models.checkpoints.names import MODELS, alike, meant, other_weights, short_names

T = TypeVar("T")

EMBEDDED = Path(__file__).resolve().parents[2] / "checkpoints"  # the models that come with the repository
# What a processor, a tokenizer and a chat template may consist of, today's files and older ones.
# nanoVLM describes its processor in config.json.
PROCESSOR_FILES = (
    "config.json", "tokenizer_config.json", "tokenizer.json", "processor_config.json",
    "preprocessor_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "generation_config.json",
)  # fmt: skip
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_QUANTIZED = re.compile(r"(.+):([\w-]{1,40})")
_SHARD = re.compile(r"[\w-][\w.-]{,200}\.safetensors", re.ASCII)
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
REPO_ID = re.compile(rf"({_NAME.pattern}/)?{_NAME.pattern}", re.ASCII)
_WEB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")
_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
# Whose a model may be that was asked for by half its name.
KNOWN = tuple(known.repo for known in MODELS.values())
_PIECE = 2**20  # bytes of a header that are fetched at once
CONTROL = frozenset((*range(32), *range(127, 160))) - {*b"\n\t"}  # could do anything to a terminal


# --------------------------------------------------------------------------------------------------- errors
def for_terminal(text: str) -> str:
    """A text that somebody else wrote, such as a model's answer, without control characters: whoever prints
    one passes it through here. Line breaks and tabs are text."""
    return text.translate(dict.fromkeys(CONTROL))


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or written. The message is one sentence for the user.

    A message may quote the checkpoint, so it is made `printable`.
    """

    def __init__(self, message: str):
        super().__init__(printable(message, 1_000, end=200))  # what to do stands at the end


@contextmanager
def naming(what: object) -> Iterator[None]:
    """A ValueError inside comes out as a CheckpointError about this file or checkpoint."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{what}: {error}") from None


# ----------------------------------------------------------------------------------------------------- JSON
def read_json(path: Path) -> dict:
    """The JSON object in a file of a checkpoint; CheckpointError if there is none in it."""
    with naming(path):
        return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError if there is none in it."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def check_is_whole(path: Path) -> None:
    """Refuse what Git leaves in the place of a large file."""
    with path.open("rb") as file:
        if file.read(64).startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{path} is a Git-LFS pointer: run `git lfs pull` in {path.parent}")


@cache
def client() -> Any:
    """huggingface_hub with its constants, errors and utils, in 0.2 s."""
    import huggingface_hub.constants, huggingface_hub.errors, huggingface_hub.utils  # noqa: E401, I001

    return huggingface_hub


@contextmanager
def one_sentence(repo: str, revision: str | None, what: str) -> Iterator[None]:
    """Whatever the Hub's client raises inside comes out as a CheckpointError."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        # The client takes any answer with status 200 for one of the Hub's, so a proxy's page ends in
        # KeyError, TypeError or JSONDecodeError.
        raise CheckpointError(_hub_sentence(error, repo, revision, what)) from error


def _hub_sentence(error: Exception, repo: str, revision: str | None, what: str) -> str:
    errors, endpoint = client().errors, client().constants.ENDPOINT
    sought = repo if what == "config.json" else f"{what} of {repo}"  # without that one there is no checkpoint
    status = _status(error)
    if isinstance(error, errors.GatedRepoError):
        return f"repository {repo} is gated: accept its terms on its page and log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"repository {repo} has no revision {revision!r}: expected a branch, a tag or a commit"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return (
            f"there is no folder {repo} here and no repository {repo} on {endpoint}: check the spelling (a "
            f"private repository needs `hf auth login`)"
        )
    if status in (401, 403):  # as a mirror says it; the Hub itself says more
        refuses = "does not accept this token" if client().get_token() else "wants a login"
        return f"{endpoint} {refuses} for {sought} (status {status}): use `hf auth login`, or check the name"
    if status:
        return f"{endpoint} answers with status {status} for {sought}: try again later"
    if any(isinstance(cause, errors.FileMetadataError) for cause in _causes(error)):
        return f"{endpoint} answers for {sought}, but not as the Hub does: check the proxy and HF_ENDPOINT"
    if isinstance(error, (errors.LocalEntryNotFoundError, *_unreachable())):
        if client().constants.HF_HUB_OFFLINE:
            return f"{sought} is not in the local cache and HF_HUB_OFFLINE is set"
        return f"{endpoint} cannot be reached ({_why_not(error)}) for {sought}"
    reason = (isinstance(error, OSError) and error.strerror) or (str(error).strip().splitlines() or [""])[0]
    return (
        f"{what} of {repo} failed ({type(error).__name__}: {reason}): check the disk, the proxy and "
        f"HF_ENDPOINT, which is {endpoint}"
    )


def _status(error: BaseException | None) -> int:
    """The status that the Hub answered with, 0 where there was no answer."""
    responses = (
        cause.response for cause in _causes(error) if isinstance(cause, client().errors.HfHubHTTPError)
    )
    return next((response.status_code for response in responses), 0)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it came from."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def _why_not(error: BaseException) -> str:
    """Why there was no connection, in words."""
    words: dict[type[BaseException], str] = {
        socket.gaierror: "no network, or no host of that name",
        ConnectionRefusedError: "it refuses connections",
        ssl.SSLError: "its certificate is not trusted",
        TimeoutError: "no answer in time",
        client().utils.httpx.TimeoutException: "no answer in time",
    }
    said = (words[kind] for cause in _causes(error) for kind in words if isinstance(cause, kind))
    return next(said, "no network")


def _unreachable() -> tuple[type[Exception], ...]:
    """What the client raises where there is no network. We then do not ask again, as it would for 23 s."""
    httpx = client().utils.httpx
    offline = client().errors.OfflineModeIsEnabled
    return (offline, httpx.ConnectError, httpx.TimeoutException, httpx.ProxyError)


def _patience() -> Any:
    """The timeout of a first question: short for the connection, HF_HUB_ETAG_TIMEOUT for the answer."""
    return client().utils.httpx.Timeout(client().constants.HF_HUB_ETAG_TIMEOUT, connect=2.5)


def fetched(fetch: Callable[..., T], *what: Any, **how: Any) -> T:
    """What a call of the client gives. It is tried once more where the Hub had closed a connection that the
    client kept open, which the client finds out too late."""
    with suppress(client().utils.httpx.RemoteProtocolError):
        return fetch(*what, **how)
    return fetch(*what, **how)


# ---------------------------------------------------------------------------------------------------- names
def repository(name: str) -> str:
    """The repository of a short name. Any other name, and that of a folder here, as it is."""
    known = MODELS.get(name.lower())
    return known.repo if known and not os.path.isdir(name) else name


def resolve_source(source: str | Path, revision: str | None = None) -> str:
    """The path of a checkpoint's folder, or a repository's id.

    A folder of that name comes first, then a model that comes with Ocelli, then a short name of
    `models.checkpoints.names`. What can only be a path, what begins with the name of a folder of checkpoints,
    and what is nearly the name of a checkpoint here or a short name is not looked for on the Hub, unless a
    `revision` is given, which only repositories have.
    """
    named = repository(source) if isinstance(source, str) else str(source)
    text, wanted = _without_quantization(named)
    path = os.path.expanduser(text)
    name = text.removeprefix(EMBEDDED.name + "/")
    is_embedded = isinstance(source, str) and _NAME.fullmatch(name) and _is_checkpoint(EMBEDDED / name)
    if os.path.isdir(path) or is_embedded:
        if revision is not None:
            raise CheckpointError(
                f"{text} is a local folder, which has no revision {revision!r}: leave revision out"
            )
        return path if os.path.isdir(path) else str(EMBEDDED / name)
    if os.path.isfile(path) and path.endswith(SUFFIX):
        return path
    if os.path.isfile(path):
        raise CheckpointError(
            f"{text} is a file: expected the folder of a checkpoint, such as {os.path.dirname(path) or '.'}, "
            f"a GGUF file, or a repository id such as owner/name"
        )
    if wanted and text.lower() in MODELS:
        raise CheckpointError(
            f"{named}: a short name takes no quantization: name a repository of GGUF files, such as "
            f"ggml-org/SmolVLM-256M-Instruct-GGUF:Q8_0"
        )
    if match := _WEB.fullmatch(text):
        raise CheckpointError(f"there is no folder {text}: did you mean the repository {match[1]}?")
    only_path = isinstance(source, Path) or text[:1] in ("/", ".", "~") or text.endswith("/")
    only_path = only_path or text.count("/") > 1
    only_path = only_path or (text.endswith(SUFFIX) and os.path.isdir(os.path.dirname(path) or "."))
    if not only_path and not REPO_ID.fullmatch(text):
        raise CheckpointError(
            f"{text!r} is neither a folder here nor a valid repository id such as owner/name"
        )
    if only_path or revision is None:
        _refuse_misspelled(text, Path(os.path.normpath(path)), only_path)
    return text


def _refuse_misspelled(text: str, path: Path, only_path: bool) -> None:
    """Raise for a path, and for a name that was meant for something here."""
    here = _checkpoints_in(path.parent)
    looks_local = only_path or (len(path.parts) > 1 and here)
    embedded = _checkpoints_in(EMBEDDED) if str(path.parent) in (".", EMBEDDED.name) else []
    if (known := here + embedded) and (found := alike(path.name, known)):
        hint = meant(str(path.parent / name) for name in found)
    elif not only_path and len(path.parts) == 1 and (found := short_names(text)):
        hint = f"{meant(found, named=True)} (--model list shows the short names)"
        raise CheckpointError(f"there is no folder and no model {text}: {hint}")
    elif here and looks_local:
        hint = f"{path.parent} has {some(here)}"
    elif looks_local:
        hint = "expected a checkpoint folder, a GGUF file or a repository id such as owner/name"
    else:
        return
    if not only_path:
        hint += " (for a repository of that name give its revision, such as main, or start elsewhere)"
    raise CheckpointError(f"there is no {'file' if text.endswith(SUFFIX) else 'folder'} {text}: {hint}")


def _checkpoints_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if _is_checkpoint(folder / name))
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return []


def _is_checkpoint(folder: Path) -> bool:
    return os.path.isfile(folder / "config.json")


def check_repo_id(name: str) -> None:
    """Raise CheckpointError for what the Hub takes as no repository's name."""
    try:
        client().utils.validate_repo_id(name)
    except client().errors.HFValidationError as error:
        raise CheckpointError(f"expected a repository's name such as owner/name, got {name!r}") from error


# ---------------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class Origin:
    """Where a checkpoint came from: the name it was opened by, its folder here, the Hub's commit, and the
    files that its weights were read from."""

    source: str
    folder: Path
    commit: str | None = None
    weights: tuple[Path, ...] = ()


@dataclass(frozen=True)
class CheckpointFiles:
    """What was found: parsed configs, paths of the weights, and which shard should hold which tensor.

    `find` gives further files of the same folder or commit by name, or None where they are absent. `headers`:
    GGUF files, of which there may be only the headers here.
    """

    origin: Origin
    config: dict
    generation_config: dict
    find: Callable[[str], Path | None]
    weights: tuple[Path, ...] = ()
    weight_map: dict[str, str] = field(default_factory=dict)  # empty where there is one file
    headers: tuple[Path, ...] = ()

    @property
    def source(self) -> str:
        return self.origin.source


def locate(
    source: str | Path,
    revision: str | None = None,
    check: Callable[[dict, str], object] = lambda config, source: None,
) -> CheckpointFiles:
    """Find config.json, generation_config.json (which may be absent) and the files of weights.

    `check(config.json, source)` may refuse a checkpoint before its weights are looked for or fetched.
    """
    files = _finder(source, revision)
    found = _configs(source, files)
    check(found.config, found.source)
    return _with_weights(found, files, files.whole if isinstance(files, _Gguf) else files.file)


def describe(source: str | Path, revision: str | None = None) -> CheckpointFiles:
    """`locate` without downloading weights: those in a folder or in the cache are given, others left out, and
    of GGUF files the headers are fetched. A folder whose index names a shard that it lacks is refused, as it
    is by `locate`."""
    files = _finder(source, revision)
    found = _configs(source, files)
    try:
        return _with_weights(found, files, files.cached)
    except CheckpointError:
        if isinstance(files, _Folder) and any((files.path / name).is_file() for name in (WEIGHTS, INDEX)):
            raise
        return found


def check_has_config(source: str | Path, revision: str | None = None) -> None:
    """Raise CheckpointError unless there is a config.json, or GGUF files whose headers tell as much. The Hub
    is asked only where its cache has none, and for what GGUF files there are."""
    files = _finder(source, revision)
    if files.cached("config.json") is None:
        _config_path(files)


def snapshot(source: str | Path, revision: str | None = None) -> Path:
    """A local folder that holds all files of a processor: the one named, or that of the client's cache."""
    files = _finder(source, revision)
    names = sorted(PROCESSOR_FILES, key=lambda name: files.cached(name) is None)  # which needs no network
    found = [path for path in map(files.file, names) if path is not None]
    if isinstance(files, _Folder):
        return files.path
    if not found:
        raise CheckpointError(f"{files.name} has no files of a processor: expected tokenizer.json and others")
    return found[0].parent


def _finder(source: str | Path, revision: str | None) -> _Folder | _Hub:
    place, wanted = resolve_source(source, revision), _without_quantization(str(source))[1]
    if os.path.isfile(place):
        above, name = os.path.split(place)
        return _Gguf(_Folder(above or "."), os.listdir(above or "."), wanted, name)
    files = _Folder(place) if os.path.isdir(place) else _Hub(place, revision)
    with _with_advice(files):
        asked = wanted or "gguf" in place.lower()
        names = os.listdir(place) if isinstance(files, _Folder) else files.list() if asked else []
    return _Gguf(files, names, wanted) if wanted or _holds_gguf(names) else files


def _holds_gguf(names: Collection[str]) -> bool:
    """Whether a folder or repository with these files is opened by its GGUF files."""
    return any(name.endswith(SUFFIX) for name in names) and not {WEIGHTS, INDEX} & {*names}


def _without_quantization(name: str) -> tuple[str, str]:
    """owner/name:Q4_K_M -> the repository or folder, and the quantization, as llama.cpp takes them."""
    found = _QUANTIZED.fullmatch(name)
    return (found[1], found[2]) if found and not os.path.exists(os.path.expanduser(name)) else (name, "")


def last_name(source: str) -> str:
    """A model's name to show: of a path here the last part, with the quantization."""
    place = _without_quantization(source)[0]
    path = os.path.expanduser(place)
    return os.path.basename(os.path.abspath(path)) + source[len(place) :] if os.path.exists(path) else source


@contextmanager
def _with_advice(files: _Folder | _Hub) -> Iterator[None]:
    """What the Hub does not give was perhaps meant for something here."""
    try:
        yield
    except CheckpointError as error:
        # Not of a commit: whoever names one knows the repository, or is a visitor of the page, who is not
        # told what lies on this machine.
        if isinstance(files, _Folder) or files.commit is not None:
            raise
        said = files.repo in KNOWN or str(error).startswith("there is no folder")
        front = "" if said else f"there is no folder {files.repo} here, and "
        raise CheckpointError(f"{front}{error}{_advice(files.repo, error.__cause__)}") from error.__cause__


def _config_path(files: _Folder | _Hub) -> Path:
    with _with_advice(files):
        path = files.file("config.json")
    if path is None:
        others = other_weights(files.path) if isinstance(files, _Folder) else ""
        needed = f"a checkpoint needs one beside its weights{others}"
        if isinstance(files, _Folder) and (files.path / "adapter_config.json").is_file():
            run = files.path.resolve().parent
            needed = "it is an adapter; "
            needed += f"open {run}" if _is_checkpoint(run) else "merge it: tools convert BASE --adapter"
        raise CheckpointError(f"{files.name} has no config.json: {needed}")
    return path


def _advice(repo: str, error: BaseException | None) -> str:
    """The end of a sentence about a repository that was not found: whose it may be, and what is here."""
    cached, hints = _cached_models(), []
    if repo not in KNOWN and (similar := alike(repo, [*cached, *KNOWN], same_numbers=True)):
        hints.append(meant(similar))
    if not _status(error):
        here = [*_checkpoints_in(EMBEDDED), *(name for name, opens in cached.items() if opens)]
        hints.append(f"without the Hub there are {some(here)}, and any folder of a checkpoint")
    return "".join(f"; {hint}" for hint in hints)


def _cached_models() -> dict[str, bool]:
    """Repositories in the client's cache, and whether each has weights and a config with a vision tower."""
    found: dict[str, bool] = {}
    for path in Path(client().constants.HF_HUB_CACHE).glob("models--*/snapshots/*/config.json"):
        with suppress(OSError, ValueError):
            raw, name = path.read_bytes(), path.parents[2].name.removeprefix("models--").replace("--", "/", 1)
            sees = b'"vision_config"' in raw or b'"vit_hidden_dim"' in raw
            whole = any((path.parent / weights).is_file() for weights in (WEIGHTS, INDEX))
            found[name] = found.get(name, False) or (sees and whole)
    return found


def _configs(source: str | Path, files: _Folder | _Hub) -> CheckpointFiles:
    path = _config_path(files)
    generation_path = files.file("generation_config.json")
    generation = {} if generation_path is None else read_json(generation_path)
    name = files.repo if isinstance(files, _Hub) else str(source)  # a short name is for people alone
    origin = Origin(name, path.parent, files.commit)
    return CheckpointFiles(origin, read_json(path), generation, files.file)


def _with_weights(
    found: CheckpointFiles, files: _Folder | _Hub, find: Callable[[str], Path | None]
) -> CheckpointFiles:
    """With the safetensors file, or the shards that the index names and which of them holds which tensor; or
    with the GGUF files."""
    where = files.name
    if isinstance(files, _Gguf):
        weights = [path for path in map(find, files.pair) if path is not None]
        whole = len(weights) == len(files.pair)
        return replace(found, weights=tuple(weights) if whole else (), headers=files.headers)
    if (single := find(WEIGHTS)) is not None:
        return replace(found, weights=(single,))
    if (index_path := find(INDEX)) is None:
        below = ("*.incomplete", ".cache/huggingface/download/*.incomplete")
        if found.origin.commit is None and any(any(found.origin.folder.glob(name)) for name in below):
            raise CheckpointError(f"{where} has no {WEIGHTS}: a download was cut short, download it again")
        listed: list[str] = []
        if isinstance(files, _Hub) and files.reachable and find != files.cached:
            with suppress(CheckpointError):
                listed = files.list(below=True)
        others = other_weights(found.origin.folder, listed)
        others = others or "; weights in another format must be converted to safetensors first"
        raise CheckpointError(f"{where} has neither {WEIGHTS} nor {INDEX}{others}")
    weight_map: Any = read_json(index_path).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    # A shard is a plain file beside its index: a checkpoint must not name other files of this machine.
    if not names or not all(isinstance(name, str) and _SHARD.fullmatch(name) for name in names):
        raise CheckpointError(
            f"{index_path}: expected a weight_map of tensor names to shards beside it, which are called like "
            f"model-00001-of-00002.safetensors"
        )
    shards = {name: find(name) for name in sorted(set(names))}
    if absent := [name for name, path in shards.items() if path is None]:
        raise CheckpointError(f"{where} has no {absent[0]}, which its index names: download it again")
    paths = tuple(path for path in shards.values() if path is not None)
    return replace(found, weights=paths, weight_map=weight_map)


class _Folder:
    """Files of a local folder."""

    commit: str | None = None

    def __init__(self, path: str):
        self.path, self.name = Path(path), f"folder {path}"

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


class _Gguf(_Folder):
    """GGUF files as a folder in the Hub's layout: config, tokenizer and image settings are made of their
    metadata, in a temporary folder that this process has. `whole` gives the files themselves, fetched where
    they are not here, `cached` only what is here."""

    def __init__(self, files: _Folder | _Hub, names: Iterable[str], wanted: str, text: str = ""):
        """Of the files with these names: `text`, or the text part of that quantization, and its tower."""
        with naming(files.name):
            self._files, self.pair = files, choose(names, wanted, text)
        self.headers = tuple(self._there(name, files.header(name)) for name in self.pair)
        resolved = [path.resolve() for path in self.headers]
        super().__init__(_translated(*map(state_of, resolved)).name)
        self.name, self.commit = str(resolved[0]), files.commit

    def _there(self, name: str, path: Path | None) -> Path:
        if path is None:
            raise CheckpointError(f"{self._files.name} has no {name}: download it again")
        return path

    def whole(self, name: str) -> Path:
        return self._there(name, self._files.file(name))

    def file(self, name: str) -> Path | None:
        path = self.path / name
        return path if path.is_file() else None

    def cached(self, name: str) -> Path | None:
        return self._files.cached(name) if name in self.pair else self.file(name)


def state_of(path: Path) -> tuple[str, int, int, int, int, int]:
    """By what a file is taken for the one that it was: path, inode, size and times."""
    info = path.stat()
    return str(path), info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


@cache  # the folder is there as long as the process
def _translated(*parts: tuple[str, int, int, int, int, int]) -> tempfile.TemporaryDirectory:
    """Of files that have these states."""
    headers = []
    for place, *_ in parts:
        with naming(place):
            headers.append(read_header(Path(place)))
    with naming(parts[0][0]):
        files = hub_files(*headers)
    folder = tempfile.TemporaryDirectory(prefix="ocelli-gguf-")
    for name, content in files.items():
        written = content if isinstance(content, str) else json.dumps(content)
        (Path(folder.name) / name).write_text(written, encoding="utf-8")
    return folder


class _Hub:
    """Files of a repository, through the cache. The first file decides the commit of the others, and whether
    the Hub is asked for them at all: once it could not be reached, it is not asked again."""

    def __init__(self, repo: str, revision: str | None):
        self.repo, self.revision = repo, revision
        self.name = f"repository {repo}" + (f" at {revision}" if revision else "")
        self.commit = revision if revision and _COMMIT.fullmatch(revision) else None
        self.reachable: bool | None = None  # None: the Hub has not been asked
        self.listed = False

    def cached(self, name: str) -> Path | None:
        """A file that is in the client's cache: nothing is fetched."""
        known = client().try_to_load_from_cache(self.repo, name, revision=self.commit or self.revision)
        return Path(known) if isinstance(known, str) else None

    def file(self, name: str) -> Path | None:
        with one_sentence(self.repo, self.revision, name):
            known = self.commit and client().try_to_load_from_cache(self.repo, name, revision=self.commit)
            if isinstance(known, str):
                return Path(known)
            if known is not None or self.reachable is False:  # the Hub said before that this commit has none
                return None
            path = self._download(name) if self.commit and self.reachable else self._first(name)
            if path is not None:
                if self.commit not in (None, path.parent.name):
                    raise CheckpointError(f"{self.name} changed while it was read: load it again")
                self.commit = path.parent.name
            return path

    def list(self, below: bool = False) -> list[str]:
        """The names of its files at one commit, those in folders where asked for; where the Hub cannot be
        asked, of those in the client's cache."""
        hf, revision = client(), self.revision
        with one_sentence(self.repo, revision, "the list of files"):
            try:
                info = fetched(hf.HfApi().model_info, self.repo, revision=revision, timeout=_patience())
                self.commit, self.reachable, self.listed = str(info.sha), True, True
                names = [file.rfilename for file in info.siblings]
                return [name for name in names if below or "/" not in name]
            except _unreachable():
                folder = Path(hf.snapshot_download(self.repo, revision=revision, local_files_only=True))
                self.commit, self.reachable = folder.name, False
                return os.listdir(folder)

    def header(self, name: str) -> Path | None:
        """A GGUF file of the commit that `list` saw, or one as long with the header alone."""
        if (known := self.cached(name)) is not None or self.reachable is False:
            return known
        with one_sentence(self.repo, self.revision, f"the header of {name}"):
            return Path(_header_of(self.repo, str(self.commit), name).name) / name

    def _first(self, name: str) -> Path | None:
        """A file of the revision's present commit; without a network, of the commit in the cache."""
        hf, cached, commit = client(), self.cached(name), None
        try:
            url = hf.hf_hub_url(self.repo, name, revision=self.revision)
            commit = fetched(hf.get_hf_file_metadata, url, timeout=_patience()).commit_hash
        except _unreachable() as error:
            if cached is None and self.commit is None:
                raise hf.errors.LocalEntryNotFoundError(str(error)) from error
            self.reachable, self.name = False, f"the local cache of {self.name}"
            return cached
        except hf.errors.HfHubHTTPError as error:
            if cached is not None and error.response.status_code in (429, 500, 502, 503, 504):
                self.reachable, self.name = False, f"the local cache of {self.name}"
                return cached
            # Otherwise the client decides whether the cache will do.
        self.reachable = True
        return cached if cached is not None and cached.parent.name == commit else self._download(name)

    def _download(self, name: str) -> Path | None:
        """A file that is fetched now, None where there is none of that name.

        One that is stored as a large file has its SHA-256 as its name in the cache, and is held to it: the
        client compares lengths only.
        """
        began, hf = time.time(), client()
        # By the name of a branch once more after `list`: the client then notes which commit it is.
        revision = self.revision if self.listed else self.commit or self.revision
        try:
            file = fetched(hf.hf_hub_download, self.repo, name, revision=revision)
        except hf.errors.LocalEntryNotFoundError as error:
            bare = (
                isinstance(error.__cause__, hf.errors.HfHubHTTPError) and error.__cause__.response.status_code
            )
            if bare == 404 and self.commit and self.reachable:  # as a mirror says that a commit lacks a file
                return None
            raise
        except hf.errors.EntryNotFoundError:
            return None
        path, blob = Path(file), Path(file).resolve()
        if not _SHA256.fullmatch(blob.name) or blob.stat().st_mtime < began - 2:  # was there before
            return path
        with blob.open("rb") as data:
            whole = hashlib.file_digest(data, "sha256").hexdigest() == blob.name
        if not whole:
            path.unlink()
            blob.unlink()
            raise CheckpointError(
                f"{name} of {self.repo} arrived with other bytes than {hf.constants.ENDPOINT} announced "
                f"(by its SHA-256): it was removed, load it again"
            )
        return path


class _Ranges(io.RawIOBase):
    """A file on the Hub, read in pieces that are written to `copy` as well."""

    def __init__(self, url: str, size: int, copy: BinaryIO):
        self.url, self.size, self.copy, self.at = url, size, copy, 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        end = min(self.at + len(buffer), self.size)
        if self.at == end:
            return 0
        raw, utils = b"", client().utils
        headers = utils.build_hf_headers() | {"Range": f"bytes={self.at}-{end - 1}"}
        with utils.get_session().stream("GET", self.url, headers=headers) as response:
            utils.hf_raise_for_status(response)
            if response.status_code == 206:  # else it sends the whole file
                raw = response.read()
        if len(raw) != end - self.at:
            raise CheckpointError(f"{self.url}: expected bytes {self.at} to {end}, got another part")
        buffer[: len(raw)] = raw
        self.copy.write(raw)
        self.at = end
        return len(raw)


@cache  # the folder is there as long as the process
def _header_of(repo: str, commit: str, name: str) -> tempfile.TemporaryDirectory:
    """A folder with a GGUF file as long as that on the Hub, of which only the header was fetched."""
    hf, folder = client(), tempfile.TemporaryDirectory(prefix="ocelli-gguf-")
    url = hf.hf_hub_url(repo, name, revision=commit)
    size = fetched(hf.get_hf_file_metadata, url, timeout=_patience()).size
    with (Path(folder.name) / name).open("wb") as copy, naming(f"{name} of {repo}"):
        header_of(io.BufferedReader(_Ranges(url, size, copy), _PIECE), size, Path(name))
        copy.truncate(size)
    return folder
