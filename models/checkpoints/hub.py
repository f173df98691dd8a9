"""Where a checkpoint is: the name that a person gives -> a folder here, or files of one commit on the Hub.

    resolve_source("ocelli-shapes")                     # the embedded model, from any folder
    resolve_source("checkpoints/ocelli-shape")          # did you mean checkpoints/ocelli-shapes?
    locate("HuggingFaceTB/SmolVLM-256M-Instruct")       # its configs, and its weights in the client's cache

Downloads go through huggingface_hub: its cache, its tokens, HF_ENDPOINT, HF_HUB_OFFLINE. Only the files that
are needed are fetched, and all from the commit that config.json came from, so that a repository that changes
meanwhile cannot give a mixture. Importing this module imports neither PyTorch nor the Hub's client: a
mistyped name is refused at once.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

Answer = TypeVar("Answer")

EMBEDDED = Path(__file__).resolve().parents[2] / "checkpoints"  # the models that come with the repository
# What a processor, a tokenizer and a chat template may consist of, today's files and older ones.
# nanoVLM describes its processor in config.json.
PROCESSOR_FILES = (
    "config.json", "processor_config.json", "preprocessor_config.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
)  # fmt: skip
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.ckpt")
_SHARD = re.compile(r"[\w-][\w.-]{,200}\.safetensors", re.ASCII)
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_REPO_ID = re.compile(rf"({_NAME.pattern}/)?{_NAME.pattern}", re.ASCII)
_WEB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")
_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
# How similar two names must be (difflib's ratio): to be suggested for a path, and to be suggested for a name
# that the Hub may have, too.
_SIMILAR, _VERY_SIMILAR = 0.6, 0.7
# The largest config files are lists of a tokenizer's added tokens, a megabyte. An index lists at most the
# tensors of a thousand layers. tokenizer.json holds vocabulary and merges: Gemma's has 33 MB and two million
# values, and Python's objects take some twenty times a file's bytes.
MAX_CONFIG, MAX_INDEX, MAX_TOKENIZER = 4 * 2**20, 8 * 2**20, 32 * 2**20  # bytes
MAX_VALUES = 2_500_000  # of one file: commas and opening brackets
_MAX_ENTRIES = 2_000  # of a folder that is searched for a similar name
_MAX_MESSAGE = 1_000  # characters


# --------------------------------------------------------------------------------------------------- errors
class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or written. The message is one sentence for the user.

    A message may quote the checkpoint, so it is cut to one line of printable characters.
    """

    def __init__(self, message: str):
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE - 200]} … {message[-197:]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


def some(names: Collection[str], limit: int = 3) -> str:
    """The first few of many names, for a message: "a, b, c and 12 more"."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


# ------------------------------------------------------------------------------------- JSON of a stranger
def read_json(path: Path, max_bytes: int = MAX_CONFIG) -> dict:
    """A JSON object of a checkpoint; see `read_object`."""
    try:
        return read_object(path, max_bytes)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_object(path: Path, max_bytes: int = MAX_CONFIG) -> dict[str, Any]:
    """A JSON object from a file whose size is checked before it is read; ValueError where it is none."""
    check_size(path, max_bytes)
    raw = path.read_bytes()
    check_values(raw)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unambiguous)
    except RecursionError:
        raise ValueError("not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def check_size(path: Path, max_bytes: int) -> None:
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes, got {size}")


def check_values(raw: bytes) -> None:
    """Refuse JSON that would become more objects than any real file does."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"expected at most {MAX_VALUES} values of JSON, got more")


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of which each key has one value: of two, one reader would see one, the next the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"the key {name[:80]!r} stands twice, with different values")
    return found


@cache
def client() -> Any:
    """huggingface_hub with its constants, errors and utils; importing it takes 0.2 s."""
    import huggingface_hub.utils

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
    hf = client()
    errors, endpoint = hf.errors, hf.constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"repository {repo} is gated: accept its terms on its page and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {repo} here and no repository {repo} on {endpoint}: check the spelling "
            f"(a private repository needs `hf auth login`)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"repository {repo} has no revision {revision!r}: expected a branch, a tag or a commit"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        if hf.constants.HF_HUB_OFFLINE:
            return (
                f"{what} of {repo} is not in the local cache and HF_HUB_OFFLINE is set: fetch it once with "
                f"the network on"
            )
        return f"{endpoint} cannot be reached for {what} of {repo}, which is not in the local cache"
    if isinstance(error, errors.EntryNotFoundError):
        return f"repository {repo} has no {what}"
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is neither a folder here nor a valid repository id such as owner/name"
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, _unreachable()):
        return f"{endpoint} cannot be reached for {what} of {repo} ({first_line})"
    # OSError covers the client's own HTTP errors and a full disk.
    if isinstance(error, OSError | errors.HfHubHTTPError | hf.utils.httpx.HTTPError):
        return f"{what} of {repo} failed ({endpoint}): {first_line}"
    return (
        f"{what} of {repo}: {endpoint} answered with something other than a Hub does "
        f"({type(error).__name__}: {first_line}): check HF_ENDPOINT and the proxy, and try again"
    )


def _unreachable() -> tuple[type[Exception], ...]:
    """What the client raises where there is no network. We then do not ask again, as it would for 23 s."""
    httpx = client().utils.httpx
    return (client().errors.OfflineModeIsEnabled, httpx.ConnectError, httpx.TimeoutException)


def _patience() -> Any:
    """The timeout of a first question: short for the connection, HF_HUB_ETAG_TIMEOUT for the answer."""
    return client().utils.httpx.Timeout(client().constants.HF_HUB_ETAG_TIMEOUT, connect=2.5)


def _fetched(fetch: Callable[..., Answer], *arguments: Any, **options: Any) -> Answer:
    """The result of one of the client's functions, tried twice: the client finds out too late when the Hub
    has closed a connection that it kept open."""
    try:
        return fetch(*arguments, **options)
    except client().utils.httpx.RemoteProtocolError:
        return fetch(*arguments, **options)


# ---------------------------------------------------------------------------------------------------- names
def resolve_source(source: str | Path, revision: str | None = None) -> str:
    """The path of a checkpoint's folder, or a repository's id.

    A folder of that name comes first, then a model that comes with Ocelli. What can only be a path, what
    begins with the name of a folder of checkpoints, and what is nearly the name of a checkpoint here is not
    looked for on the Hub, unless a `revision` is given, which only repositories have.
    """
    text = str(source)
    if not text.strip():
        raise CheckpointError("expected a checkpoint folder or a repository id such as owner/name, got none")
    path = os.path.expanduser(text)
    name = text.removeprefix(EMBEDDED.name + "/")
    is_embedded = isinstance(source, str) and _NAME.fullmatch(name) and _is_checkpoint(EMBEDDED / name)
    if os.path.isdir(path) or is_embedded:
        if revision is not None:
            raise CheckpointError(
                f"{text} is a local folder, which has no revision {revision!r}: leave revision out"
            )
        return path if os.path.isdir(path) else str(EMBEDDED / name)
    if os.path.isfile(path):
        parent = os.path.dirname(path)
        hint = f" such as its own, {parent}," if _is_checkpoint(parent) else ""
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
        _refuse_misspelled(text, path, only_path)
    return text


def _refuse_misspelled(text: str, path: str, only_path: bool) -> None:
    """Raise for a path, and for a name that was meant for something here."""
    first, slash, _ = text.partition("/")
    looks_local = only_path or (slash and _checkpoints_in(first))
    meant = _nearest(path, _SIMILAR if looks_local else _VERY_SIMILAR)
    if not looks_local and meant is None:
        return
    if meant:
        hint = f"did you mean {meant}?"
    else:
        parent = os.path.dirname(path.rstrip("/"))
        while parent and not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        here = _checkpoints_in(parent or ".")
        hint = "expected a checkpoint folder or a repository id such as owner/name"
        hint = f"{parent or 'this folder'} has {some(here)}" if here else hint
    if not only_path:
        hint += " (for a repository of that name give its revision, such as main, or start elsewhere)"
    raise CheckpointError(f"there is no folder {text}: {hint}")


def _nearest(path: str, cutoff: float) -> str | None:
    """The checkpoint here whose path is most similar to one that does not exist."""
    parts = Path(path).parts
    absolute = os.path.isabs(path)
    found = _similar(Path(parts[0]) if absolute else Path(), parts[absolute:], cutoff)
    if not found and len(parts) <= 2 and not absolute:
        found = _similar(EMBEDDED, parts[-1:], cutoff) if parts[0] in (parts[-1], EMBEDDED.name) else []
    if not found:
        return None
    best = max(found, key=lambda other: difflib.SequenceMatcher(None, path, str(other)).ratio())
    return best.name if best.parent == EMBEDDED else str(best)


def _similar(base: Path, parts: tuple[str, ...], cutoff: float) -> list[Path]:
    """Checkpoints below `base` whose path is similar to `parts`, part by part."""
    if not parts:
        return [base] if _is_checkpoint(base) else []
    if parts[0] in (".", "..") or (len(parts) > 1 and (base / parts[0]).is_dir()):
        return _similar(base / parts[0], parts[1:], cutoff)
    lowered: dict[str, list[str]] = {}
    for name in _folders_in(base):
        lowered.setdefault(name.lower(), []).append(name)
    close = difflib.get_close_matches(parts[0].lower(), lowered, n=5, cutoff=cutoff)
    names = [name for key in close for name in lowered[key]]
    return [found for name in names for found in _similar(base / name, parts[1:], cutoff)]


def _checkpoints_in(folder: str | Path) -> list[str]:
    return [name for name in _folders_in(folder) if _is_checkpoint(os.path.join(folder, name))]


def _folders_in(folder: str | Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            first = [entry for _, entry in zip(range(_MAX_ENTRIES), entries)]
            return [entry.name for entry in first if entry.is_dir()]
    except OSError:
        return []


def _is_checkpoint(folder: str | Path) -> bool:
    return os.path.isfile(os.path.join(folder, "config.json"))


def check_repo_id(name: str) -> None:
    """Raise CheckpointError for what the Hub takes as no repository's name."""
    try:
        client().utils.validate_repo_id(name)
    except client().errors.HFValidationError as error:
        raise CheckpointError(f"expected a repository's name such as owner/name, got {name!r}") from error


# ---------------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class Origin:
    """Where a checkpoint came from: the name it was opened by, its folder here, and the Hub's commit."""

    source: str
    folder: Path
    commit: str | None = None


@dataclass(frozen=True)
class CheckpointFiles:
    """What was found: parsed configs, paths of the weights, and which shard should hold which tensor.

    `find` gives further files of the same folder or commit by name, or None where they are absent.
    """

    origin: Origin
    config: dict
    generation_config: dict
    weights: tuple[Path, ...]
    find: Callable[[str], Path | None]
    weight_map: dict[str, str] = field(default_factory=dict)  # empty where there is one file

    @property
    def source(self) -> str:
        return self.origin.source


def locate(
    source: str | Path,
    revision: str | None = None,
    check: Callable[[dict, str], object] = lambda config, source: None,
) -> CheckpointFiles:
    """Find config.json, generation_config.json (which may be absent) and the safetensors files.

    `check(config.json, source)` may refuse a checkpoint before its weights are looked for or fetched.
    """
    files = _finder(source, revision)
    described = _describe(source, files)
    check(described.config, str(source))
    weights, weight_map = _find_weights(files)
    return replace(described, weights=weights, weight_map=weight_map)


def describe(source: str | Path, revision: str | None = None) -> CheckpointFiles:
    """`locate` without downloading weights: those in a folder or in the cache are given, others left out."""
    files = _finder(source, revision)
    described = _describe(source, files)
    here = files if isinstance(files, _Folder) else _Cache(files.repo, files.commit)
    if not here.has_weights():
        return described
    weights, weight_map = _find_weights(here)
    return replace(described, weights=weights, weight_map=weight_map)


def check_has_config(source: str | Path, revision: str | None = None) -> None:
    """Raise CheckpointError unless there is a config.json. The Hub is asked only where its cache has none."""
    files = _finder(source, revision)
    if isinstance(files, _Folder) or _Cache(files.repo, revision).file("config.json") is None:
        _config_path(files)


def _config_path(files: _Folder | _Hub) -> Path:
    path = files.file("config.json")
    if path is None:
        raise CheckpointError(f"{files.name} has no config.json: a checkpoint needs one beside its weights")
    return path


def _describe(source: str | Path, files: _Folder | _Hub) -> CheckpointFiles:
    config_path = _config_path(files)
    generation_path = files.file("generation_config.json")
    return CheckpointFiles(
        origin=Origin(str(source), config_path.parent, files.commit),
        config=read_json(config_path),
        generation_config=read_json(generation_path) if generation_path else {},
        weights=(),
        find=files.file,
    )


def _finder(source: str | Path, revision: str | None) -> _Folder | _Hub:
    place = resolve_source(source, revision)
    return _Folder(place) if os.path.isdir(place) else _Hub(place, revision)


class _Folder:
    """Files of a local folder."""

    commit = None

    def __init__(self, path: str):
        self.path, self.name = Path(path), f"folder {path}"

    def file(self, name: str) -> Path | None:
        path = self.path / name
        if not path.is_file():
            return None
        _check_inside(self.path, path)
        return path

    def has_weights(self) -> bool:
        return any((self.path / name).is_file() for name in (WEIGHTS, INDEX))


class _Cache:
    """Files of a repository's commit that are in the client's cache. Nothing is fetched."""

    def __init__(self, repo: str, commit: str | None):
        self.repo, self.commit, self.name = repo, commit, f"repository {repo}"

    def file(self, name: str) -> Path | None:
        known = client().try_to_load_from_cache(self.repo, name, revision=self.commit)
        return Path(known) if isinstance(known, str) else None

    def has_weights(self) -> bool:
        """Whether all weights are here: the one file, or the index and each of its shards."""
        index = self.file(INDEX)
        if index is None or self.file(WEIGHTS) is not None:
            return self.file(WEIGHTS) is not None
        shards = read_json(index, MAX_INDEX).get("weight_map")
        return isinstance(shards, dict) and all(self.file(str(name)) for name in shards.values())


class _Hub:
    """Files of a repository, through the cache. The first file decides the commit of the others, and whether
    the Hub is asked for them at all: once it could not be reached, it is not asked again."""

    def __init__(self, repo: str, revision: str | None):
        self.repo, self.revision = repo, revision
        self.name = f"repository {repo}" + (f" at {revision}" if revision else "")
        self.commit: str | None = None
        self.reachable = True

    def file(self, name: str) -> Path | None:
        with one_sentence(self.repo, self.revision, name):
            if self.commit is None:
                path = self._first(name)
                if path is not None and path.parent.parent.name == "snapshots":
                    self.commit = path.parent.name
                return path
            known = client().try_to_load_from_cache(self.repo, name, revision=self.commit)
            if isinstance(known, str):
                return Path(known)
            if known is not None or not self.reachable:  # the Hub said before that this commit has none
                return None
            return self._download(name)

    def _first(self, name: str) -> Path | None:
        """A file of the revision's present commit; without a network, of the commit in the cache."""
        hf = client()
        cached = _Cache(self.repo, self.revision).file(name)
        commit = None
        try:
            url = hf.hf_hub_url(self.repo, name, revision=self.revision)
            commit = _fetched(hf.get_hf_file_metadata, url, timeout=_patience()).commit_hash
        except _unreachable() as error:
            if cached is None:
                raise hf.errors.LocalEntryNotFoundError(str(error)) from error
            self.reachable, self.name = False, f"the local cache of {self.name}"
            return cached
        except hf.errors.HfHubHTTPError:
            pass  # the client decides whether the cache will do
        return cached if cached is not None and cached.parent.name == commit else self._download(name)

    def _download(self, name: str) -> Path | None:
        began, hf = time.time(), client()
        try:
            path = Path(_fetched(hf.hf_hub_download, self.repo, name, revision=self.commit or self.revision))
        except hf.errors.LocalEntryNotFoundError:
            raise
        except hf.errors.EntryNotFoundError:
            return None
        _check_download(path, began, self.repo)
        return path


def _find_weights(files: _Folder | _Hub | _Cache) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The safetensors file, or the shards that the index names."""
    single = files.file(WEIGHTS)
    if single is not None:
        return (single,), {}
    index_path = files.file(INDEX)
    if index_path is None:
        pickled = [name for name in _PICKLED if isinstance(files, _Folder) and files.file(name)]
        hint = f"; {some(pickled)} must be converted to safetensors first" if pickled else ""
        raise CheckpointError(f"{files.name} has neither {WEIGHTS} nor {INDEX}{hint}")
    weight_map = read_json(index_path, MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: expected a weight_map of tensor names to shard files")
    for name in weight_map.values():
        # A shard is a plain file beside its index: a checkpoint must not name other files of this machine.
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise CheckpointError(
                f"{index_path}: expected shards named like model-00001-of-00002.safetensors, got {name!r}"
            )
    shards = []
    for name in sorted(set(weight_map.values())):
        path = files.file(name)
        if path is None:
            raise CheckpointError(f"{files.name} has no {name}, which its index names: download it again")
        shards.append(path)
    return tuple(shards), weight_map


def _check_inside(folder: Path, path: Path) -> None:
    """Refuse a link that leads out of a checkpoint: an unpacked archive may hold links to any file of this
    machine. The client's own cache links its snapshots to its blobs."""
    home, target = folder.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs"
    if target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs)):
        return
    if os.environ.get("OCELLI_FOLLOW_LINKS") != "1":
        raise CheckpointError(
            f"{path} is a link out of its folder, to {target}: put the file itself there, or set "
            f"OCELLI_FOLLOW_LINKS=1 if the link is yours"
        )


def _check_download(path: Path, began: float, repo: str) -> None:
    """Compare a file that was downloaded since `began` with its SHA-256, which is its name in the cache where
    it is stored as a large file. The client compares lengths only; a wrong file leaves the cache."""
    blob = path.resolve()
    if not _SHA256.fullmatch(blob.name) or blob.stat().st_mtime < began - 2:
        return
    with blob.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != blob.name:
        path.unlink()
        blob.unlink()
        raise CheckpointError(
            f"{path.name} of {repo} arrived with other bytes than {client().constants.ENDPOINT} announced "
            f"(SHA-256 {got[:12]}…, expected {blob.name[:12]}…): it was removed, load it again"
        )


# ------------------------------------------------------------------------------------------- whole folders
def snapshot(
    source: str | Path, revision: str | None = None, patterns: tuple[str, ...] = PROCESSOR_FILES
) -> Path:
    """A local folder with the files that match `patterns`: for tokenizers, processors and chat templates."""
    repo = resolve_source(source, revision)
    if os.path.isdir(repo):
        folder = Path(repo)
        for name in patterns:
            if (folder / name).is_file():
                _check_inside(folder, folder / name)
        return folder
    began = time.time()
    with one_sentence(repo, revision, "the processor's files"):
        cached_only = not _is_listed(repo, revision)
        wanted = {"revision": revision, "allow_patterns": list(patterns), "local_files_only": cached_only}
        folder = Path(_fetched(client().snapshot_download, repo, **wanted))
        for path in folder.iterdir():
            _check_download(path, began, repo)
        return folder


def _is_listed(repo: str, revision: str | None) -> bool:
    """Whether the Hub, or the client's memory of it, lists files of a repository; False if unreachable.

    An empty list is refused: the client would remember it for good.
    """
    hf = client()
    if revision and (_cache_folder(repo) / "trees" / f"{revision}.json").is_file():
        return True
    try:
        api = hf.HfApi()
        api.model_info(repo, revision=revision, timeout=_patience())  # asked once, and not for long
        listed = next(iter(api.list_repo_tree(repo, revision=revision)), None)
    except _unreachable():
        return False
    except hf.errors.HfHubHTTPError:
        return True  # the client decides whether the cache will do
    if listed is None:
        raise CheckpointError(
            f"{hf.constants.ENDPOINT} lists no files of repository {repo}: check HF_ENDPOINT and the proxy, "
            f"and try again"
        )
    return True


def _cache_folder(repo: str) -> Path:
    """Where the client keeps what it has of a repository."""
    return Path(client().constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


@dataclass(frozen=True)
class DownloadSize:
    """The files that opening a repository at `commit` may fetch: bytes by name, and the bytes that are not in
    the cache yet."""

    commit: str
    sizes: dict[str, int]
    missing: int

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def measure(repo: str) -> DownloadSize:
    """What the main branch of a repository takes, before any of it is downloaded; where the Hub cannot be
    asked, of the newest commit that the cache holds with its weights."""
    try:
        with one_sentence(repo, None, "the list of files"):
            found = _listed_size(repo)
    except CheckpointError as error:
        not_found = isinstance(error.__cause__, client().errors.RepositoryNotFoundError)
        cached = None if not_found else _cached_size(repo)
        if cached is None:
            raise
        return cached
    limits = {INDEX: MAX_INDEX, "tokenizer.json": MAX_TOKENIZER}
    for name, size in found.sizes.items():
        limit = limits.get(name, MAX_CONFIG)
        if name.endswith(".json") and size > limit:
            raise CheckpointError(
                f"repository {repo}: expected at most {limit} bytes of JSON in {name}, got {size}"
            )
    return found


def _listed_size(repo: str) -> DownloadSize:
    api = client().HfApi()
    commit = api.model_info(repo, timeout=_patience()).sha
    if commit is None or not _COMMIT.fullmatch(commit):
        raise CheckpointError(
            f"{client().constants.ENDPOINT} names no commit of repository {repo}: try again"
        )
    entries = api.list_repo_tree(repo, revision=commit)
    sizes: dict[str, Any] = {
        entry.path: getattr(entry, "size", None) for entry in entries if _is_needed(entry.path)
    }
    if not sizes or not all(isinstance(size, int) and size >= 0 for size in sizes.values()):
        raise CheckpointError(
            f"{client().constants.ENDPOINT} lists no files of a checkpoint for repository {repo}: expected "
            f"config.json and safetensors with their sizes"
        )
    in_cache = _Cache(repo, commit)
    return DownloadSize(commit, sizes, sum(sizes[name] for name in sizes if in_cache.file(name) is None))


def _cached_size(repo: str) -> DownloadSize | None:
    snapshots = [path for path in (_cache_folder(repo) / "snapshots").glob("*") if path.is_dir()]
    for folder in sorted(snapshots, key=lambda path: path.stat().st_mtime, reverse=True):
        in_cache = _Cache(repo, folder.name)
        if in_cache.file("config.json") is not None and in_cache.has_weights():
            sizes = {path.name: path.stat().st_size for path in folder.iterdir() if _is_needed(path.name)}
            return DownloadSize(folder.name, sizes, 0)
    return None


def _is_needed(path: str) -> bool:
    known = (*PROCESSOR_FILES, INDEX, "generation_config.json")
    return path in known or (path.endswith(".safetensors") and "/" not in path)
