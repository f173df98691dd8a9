"""What a repository takes to open, as the Hub lists its files: known before any of them is downloaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from models.checkpoints.errors import CheckpointError
from models.checkpoints.hub import one_sentence, patience
from models.checkpoints.locate import INDEX, PROCESSOR_FILES, cache_folder, is_cached
from models.checkpoints.strict_json import most_bytes

_NEEDED = {*PROCESSOR_FILES, INDEX, "generation_config.json"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Measured:
    """The files that opening a repository at `commit` may fetch: their bytes by name, and those bytes that
    are not in the cache yet."""

    commit: str
    sizes: dict[str, int]
    missing: int

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def measure(repo: str) -> Measured:
    """The main branch of a repository; where the Hub cannot tell, the newest commit that the cache holds with
    its weights.

    Raises:
        CheckpointError: neither is there; a JSON file is larger than its reader would take.
    """
    try:
        with one_sentence(repo, None, "the list of files"):
            found = _listed(repo)
    except CheckpointError as error:
        cached = None if isinstance(error.__cause__, RepositoryNotFoundError) else _cached(repo)
        if cached is None:
            raise
        return cached
    for name, size in found.sizes.items():
        if name.endswith(".json") and size > most_bytes(name):
            raise CheckpointError(
                f"repository {repo}: expected at most {most_bytes(name)} bytes of JSON in {name}, got {size}"
            )
    return found


def _listed(repo: str) -> Measured:
    commit = HfApi().model_info(repo, timeout=patience()).sha
    if commit is None or not _COMMIT.fullmatch(commit):
        raise CheckpointError(f"{constants.ENDPOINT} names no commit of repository {repo}: try again")
    files = [entry for entry in HfApi().list_repo_tree(repo, revision=commit) if isinstance(entry, RepoFile)]
    sizes = {file.path: file.size for file in files if _is_needed(file.path)}
    if not sizes or not all(isinstance(size, int) and size >= 0 for size in sizes.values()):
        raise CheckpointError(
            f"{constants.ENDPOINT} lists no files of a checkpoint for repository {repo}: expected "
            f"config.json and safetensors with their sizes"
        )
    absent = [
        name for name in sizes if not isinstance(try_to_load_from_cache(repo, name, revision=commit), str)
    ]
    return Measured(commit, sizes, sum(sizes[name] for name in absent))


def _cached(repo: str) -> Measured | None:
    snapshots = [path for path in (cache_folder(repo) / "snapshots").glob("*") if path.is_dir()]
    for folder in sorted(snapshots, key=lambda path: path.stat().st_mtime, reverse=True):
        if is_cached(repo, folder.name):
            sizes = {path.name: path.stat().st_size for path in folder.iterdir() if _is_needed(path.name)}
            return Measured(folder.name, sizes, 0)
    return None


def _is_needed(path: str) -> bool:
    return path in _NEEDED or (path.endswith(".safetensors") and "/" not in path)
