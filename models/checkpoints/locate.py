"""A repository id or a folder, and a revision -> the files of a checkpoint on this machine.

Everything goes through huggingface_hub: its cache, its tokens, HF_ENDPOINT, HF_HUB_OFFLINE. Only the
files that are needed are fetched, and all from the commit that config.json came from, so that a repository
that changes meanwhile cannot give a mixture.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import huggingface_hub  # what asks the Hub is looked up when it is called: its import takes 0.1 s
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from models.checkpoints.errors import CheckpointError, some
from models.checkpoints.hub import OUT_OF_REACH, fetched, one_sentence, patience
from models.checkpoints.names import resolve_source
from models.checkpoints.strict_json import read_json
from models.untrusted import MAX_INDEX

# What a processor, a tokenizer and a chat template may consist of, today's files and older ones.
PROCESSOR_FILES = (
    "config.json",  # nanoVLM's processor is told there
    "processor_config.json",
    "preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"[\w-][\w.-]{,200}\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.ckpt")


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint came from: as it was asked for, its folder on this machine, and the Hub's commit."""

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
    check: Callable[[dict, str], object] = lambda config, where: None,
) -> CheckpointFiles:
    """Find config.json, generation_config.json (which may be absent) and the safetensors files.

    Args:
        source: a folder, or a repository id on the Hub.
        revision: branch, tag or commit; on the Hub only.
        check: refuses a config.json, given it and `source`, before weights are looked for or fetched.

    Raises:
        CheckpointError: for anything missing, unreadable or unreachable.
    """
    fetch = _fetcher(source, revision)
    described = _describe(source, fetch)
    check(described.config, str(source))
    weights, weight_map = _weights(fetch)
    return replace(described, weights=weights, weight_map=weight_map)


def describe(source: str | Path, revision: str | None = None) -> CheckpointFiles:
    """`locate` for the configs, and the weights as far as they are here: a repository's are not downloaded, a
    folder's not missed.

    Raises:
        CheckpointError: as in `locate`.
    """
    fetch = _fetcher(source, revision)
    described = _describe(source, fetch)
    if isinstance(fetch, _Folder) and any((fetch.path / name).is_file() for name in (WEIGHTS, INDEX)):
        weights, weight_map = _weights(fetch)
        return replace(described, weights=weights, weight_map=weight_map)
    if isinstance(fetch, _Hub) and (cache := _Cache(fetch.repo, fetch.commit)).has_weights():
        weights, weight_map = _weights(cache)
        return replace(described, weights=weights, weight_map=weight_map)
    return described


def check_has_config(source: str | Path, revision: str | None = None) -> None:
    """Ask for config.json alone, the Hub only where its cache has none: a mistyped name costs no more.

    Raises:
        CheckpointError: as in `locate`.
    """
    fetch = _fetcher(source, revision)
    if isinstance(fetch, _Folder) or _Cache(fetch.repo, revision).file("config.json") is None:
        _config_path(fetch)


def _config_path(fetch: _Folder | _Hub) -> Path:
    path = fetch.file("config.json")
    if path is None:
        raise CheckpointError(f"{fetch.name} has no config.json: a checkpoint needs one beside its weights")
    return path


def _describe(source: str | Path, fetch: _Folder | _Hub) -> CheckpointFiles:
    config_path = _config_path(fetch)
    generation_path = fetch.file("generation_config.json")
    return CheckpointFiles(
        origin=Origin(str(source), config_path.parent, fetch.commit),
        config=read_json(config_path),
        generation_config=read_json(generation_path) if generation_path else {},
        weights=(),
        find=fetch.file,
    )


def _fetcher(source: str | Path, revision: str | None) -> _Folder | _Hub:
    place = resolve_source(source, revision)
    return _Folder(place) if os.path.isdir(place) else _Hub(place, revision)


def snapshot(
    source: str | Path, revision: str | None = None, patterns: tuple[str, ...] = PROCESSOR_FILES
) -> Path:
    """A local folder with the files that match `patterns`: for tokenizers, processors and chat templates.

    Raises:
        CheckpointError: as in `locate`; a link out of a local folder.
    """
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
        folder = Path(fetched(huggingface_hub.snapshot_download, repo, **wanted))
        for path in folder.iterdir():
            _check_download(path, began, repo)
        return folder


def _is_listed(repo: str, revision: str | None) -> bool:
    """Whether the Hub, or the client's memory of it, lists files of a repository; False if out of reach.

    Raises:
        CheckpointError: for a list of none, which the client would remember for good.
    """
    if revision and (cache_folder(repo) / "trees" / f"{revision}.json").is_file():
        return True
    try:
        api = huggingface_hub.HfApi()
        fetched(api.model_info, repo, revision=revision, timeout=patience())  # soon: see `patience`
        listed = next(iter(api.list_repo_tree(repo, revision=revision)), None)
    except OUT_OF_REACH:
        return False
    except HfHubHTTPError:
        return True  # whether the cache will do is the client's to say
    if listed is None:
        raise CheckpointError(
            f"{constants.ENDPOINT} lists no files of repository {repo}: check HF_ENDPOINT and the proxy, and "
            f"try again"
        )
    return True


def cache_folder(repo: str) -> Path:
    """Where the client keeps what it has of a repository."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def is_cached(repo: str, commit: str) -> bool:
    """Whether config.json and all weights of a commit are in the client's cache."""
    cache = _Cache(repo, commit)
    return cache.file("config.json") is not None and cache.has_weights()


def _check_download(path: Path, began: float, repo: str) -> None:
    """Hold a file that has come since `began` against the Hub's name for it, where that is its SHA-256, as
    for weights; the client compares lengths only. What came wrong leaves the cache.

    Raises:
        CheckpointError: other bytes than announced.
    """
    blob = path.resolve()
    if not _SHA256.fullmatch(blob.name) or blob.stat().st_mtime < began - 2:
        return
    with blob.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != blob.name:
        path.unlink()
        blob.unlink()
        raise CheckpointError(
            f"{path.name} of {repo} arrived with other bytes than {constants.ENDPOINT} announced "
            f"(SHA-256 {got[:12]}…, expected {blob.name[:12]}…): it was removed, load it again"
        )


def _check_inside(folder: Path, path: Path) -> None:
    """Raises CheckpointError for a link that leads out of a checkpoint: an unpacked archive may hold links to
    any file of this machine. The client's own cache links its snapshots to its blobs."""
    home, target = folder.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs"
    if target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs)):
        return
    if os.environ.get("OCELLI_FOLLOW_LINKS") != "1":
        raise CheckpointError(
            f"{path} is a link out of its folder, to {target}: put the file itself there, or set "
            f"OCELLI_FOLLOW_LINKS=1 if the link is yours"
        )


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


class _Hub:
    """Files of a repository, through the cache. The first one decides the commit of the others, and whether
    the Hub is asked for them at all: out of reach once, it is not asked again."""

    def __init__(self, repo: str, revision: str | None):
        self.repo, self.revision = repo, revision
        self.name = f"repository {repo}" + (f" at {revision}" if revision else "")
        self.commit: str | None = None
        self.in_reach = True

    def file(self, name: str) -> Path | None:
        with one_sentence(self.repo, self.revision, name):
            if self.commit is None:
                path = self._first(name)
                if path is not None and path.parent.parent.name == "snapshots":
                    self.commit = path.parent.name
                return path
            known = try_to_load_from_cache(self.repo, name, revision=self.commit)
            if isinstance(known, str):
                return Path(known)
            if known is not None or not self.in_reach:  # the Hub said before that this commit has none
                return None
            return self._download(name)

    def _first(self, name: str) -> Path | None:
        """A file of the commit that the revision is now; without a network, of the one that the cache has."""
        known = try_to_load_from_cache(self.repo, name, revision=self.revision)
        cached = Path(known) if isinstance(known, str) else None
        commit = None
        try:
            url = hf_hub_url(self.repo, name, revision=self.revision)
            commit = fetched(get_hf_file_metadata, url, timeout=patience()).commit_hash
        except OUT_OF_REACH as error:
            if cached is None:
                raise LocalEntryNotFoundError(str(error)) from error
            self.in_reach, self.name = False, f"the local cache of {self.name}"
            return cached
        except HfHubHTTPError:
            pass  # whether the cache will do is the client's to say
        return cached if cached is not None and cached.parent.name == commit else self._download(name)

    def _download(self, name: str) -> Path | None:
        began = time.time()
        try:
            path = Path(fetched(hf_hub_download, self.repo, name, revision=self.commit or self.revision))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None
        _check_download(path, began, self.repo)
        return path


class _Cache:
    """Files of a repository's commit that are on this machine already; nothing is fetched."""

    def __init__(self, repo: str, commit: str | None):
        self.repo, self.commit, self.name = repo, commit, f"repository {repo}"

    def file(self, name: str) -> Path | None:
        known = try_to_load_from_cache(self.repo, name, revision=self.commit)
        return Path(known) if isinstance(known, str) else None

    def has_weights(self) -> bool:
        """Whether that is all of the weights: the file, or the index and each of its shards."""
        index = self.file(INDEX)
        if index is None or self.file(WEIGHTS) is not None:
            return self.file(WEIGHTS) is not None
        shards = read_json(index, MAX_INDEX).get("weight_map")
        return isinstance(shards, dict) and all(self.file(str(name)) for name in shards.values())


def _weights(fetch: _Folder | _Hub | _Cache) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The safetensors file, or the shards that the index names."""
    single = fetch.file(WEIGHTS)
    if single is not None:
        return (single,), {}
    index_path = fetch.file(INDEX)
    if index_path is None:
        pickled = [name for name in _PICKLED if isinstance(fetch, _Folder) and fetch.file(name)]
        hint = f"; {some(pickled)} must be converted to safetensors first" if pickled else ""
        raise CheckpointError(f"{fetch.name} has neither {WEIGHTS} nor {INDEX}{hint}")
    weight_map = read_json(index_path, MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: expected a weight_map of tensor names to shard files")
    for name in weight_map.values():
        # A shard is a plain file beside its index: nothing else of this machine is read.
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise CheckpointError(
                f"{index_path}: expected shards named like model-00001-of-00002.safetensors, got {name!r}"
            )
    shards = []
    for name in sorted(set(weight_map.values())):
        path = fetch.file(name)
        if path is None:
            raise CheckpointError(f"{fetch.name} has no {name}, which its index names: download it again")
        shards.append(path)
    return tuple(shards), weight_map
