"""What a repository on the Hub takes, before it is downloaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from models.checkpoints import hub
from models.checkpoints.gguf import choose
from models.checkpoints.hub import CheckpointError, client, describe, fetched, naming, one_sentence


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
            info = fetched(client().HfApi().model_info, repo, files_metadata=True, timeout=hub._patience())
            names = [file.rfilename for file in info.siblings if "/" not in file.rfilename]
            with naming(f"repository {repo}"):
                pair = choose(names) if "gguf" in repo.lower() and hub._holds_gguf(names) else ()
            needed = (file for file in info.siblings if file.rfilename in pair or _is_needed(file.rfilename))
            sizes = {file.rfilename: int(file.size) for file in needed}
            files = hub._Hub(repo, str(info.sha))
    except CheckpointError as error:
        not_found = isinstance(error.__cause__, client().errors.RepositoryNotFoundError)
        if not_found or (found := _cached_size(repo)) is None:
            raise
        return found
    missing = sum(size for name, size in sizes.items() if not files.cached(name))
    return DownloadSize(str(info.sha), sizes, missing)


def _cached_size(repo: str) -> DownloadSize | None:
    place = Path(client().constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots"
    for folder in sorted(place.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(CheckpointError):
            if describe(folder).weights:
                sizes = {path.name: path.stat().st_size for path in folder.iterdir() if _is_needed(path.name)}
                return DownloadSize(folder.name, sizes, 0)
    return None


def _is_needed(path: str) -> bool:
    known = (*hub.PROCESSOR_FILES, hub.INDEX)
    return path in known or (path.endswith(".safetensors") and "/" not in path)
