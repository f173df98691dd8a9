"""A repository on the Hub as the files of a checkpoint: all of one commit, each fetched when it is asked for.

Downloads go through huggingface_hub: its cache, its tokens, HF_ENDPOINT, HF_HUB_OFFLINE. Importing this
module does not import it. Whatever it raises becomes one sentence (`one_sentence`).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from models.checkpoints.files import CheckpointError, Folder, naming
from models.checkpoints.gguf import header_of

T = TypeVar("T")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIECE = 2**20  # bytes of a header that are fetched at once


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
    errors, endpoint, status = client().errors, client().constants.ENDPOINT, _status(error)
    sought = f"{what} of {repo}" if what else f"repository {repo}"
    if isinstance(error, errors.GatedRepoError):
        return f"repository {repo} is gated: accept its terms on its page and log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"repository {repo} has no revision {revision!r}: expected a branch, a tag or a commit"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return (
            f"there is no folder {repo} here and no repository {repo} on {endpoint} (status {status}): check "
            "the spelling (a private repository needs `hf auth login`)"
        )
    if status:
        return f"{endpoint} answers with status {status} for {sought}: try again later"
    if isinstance(error, (errors.LocalEntryNotFoundError, *_unreachable())):
        if client().constants.HF_HUB_OFFLINE:
            return f"{sought} is not in the local cache and HF_HUB_OFFLINE is set"
        return f"there is no folder {repo} here, and {endpoint} cannot be reached for {sought}"
    return (
        f"{sought}: {endpoint} did not answer as the Hub does ({type(error).__name__}): check the proxy, "
        f"HF_ENDPOINT and the disk"
    )


def _status(error: BaseException | None) -> int:
    """The status that the Hub answered with, 0 where there was no answer."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, client().errors.HfHubHTTPError):
            return error.response.status_code
        seen.append(error)
        error = error.__cause__ or error.__context__
    return 0


def _unreachable() -> tuple[type[Exception], ...]:
    """The errors of the client without a network. We do not ask again then; the client would, for 23 s."""
    httpx = client().utils.httpx
    offline = client().errors.OfflineModeIsEnabled
    return (offline, httpx.ConnectError, httpx.TimeoutException, httpx.ProxyError)


def patience() -> Any:
    """The timeout of a first question: short for the connection, HF_HUB_ETAG_TIMEOUT for the answer."""
    return client().utils.httpx.Timeout(client().constants.HF_HUB_ETAG_TIMEOUT, connect=2.5)


def fetched(fetch: Callable[..., T], *what: Any, **how: Any) -> T:
    """The result of a call of the client, which is tried once more where the Hub had closed a connection that
    the client kept open, which the client finds out too late."""
    with suppress(client().utils.httpx.RemoteProtocolError):
        return fetch(*what, **how)
    return fetch(*what, **how)


def check_repo_id(name: str) -> None:
    """Raise CheckpointError for what the Hub takes as no repository's name."""
    try:
        client().utils.validate_repo_id(name)
    except client().errors.HFValidationError as error:
        raise CheckpointError(f"expected a repository's name such as owner/name, got {name!r}") from error


class Repository:
    """Files of a repository, through the client's cache. The first question decides the commit of all files,
    and whether the Hub is asked for them: once it could not be reached, it is not asked again."""

    gguf: tuple[str, ...] = ()

    def __init__(self, repo: str, revision: str | None):
        self.repo = self.source = repo
        self.revision = revision
        self.name = f"repository {repo}" + (f" at {revision}" if revision else "")
        self.commit = revision if revision and _COMMIT.fullmatch(revision) else None
        self._names: list[str] | None = None  # of its files at that commit, once that was asked
        self._reachable = self._noted = False  # noted: the client knows which commit a branch is

    def cached(self, name: str) -> Path | None:
        known = client().try_to_load_from_cache(self.repo, name, revision=self.commit or self.revision)
        return Path(known) if isinstance(known, str) else None

    def file(self, name: str) -> Path | None:
        if self.commit is not None and (known := self.cached(name)) is not None:
            return known
        if name not in self.names():
            return None
        known = self.cached(name)
        return self._download(name) if known is None and self._reachable else known

    def names(self) -> list[str]:
        """The names of its files at one commit; where the Hub cannot be asked, of those in the cache."""
        if self._names is None:
            hf, revision = client(), self.commit or self.revision
            with one_sentence(self.repo, self.revision, ""):
                try:
                    ask = hf.HfApi().model_info
                    info = fetched(ask, self.repo, revision=revision, timeout=patience())
                    self.commit, self._reachable = str(info.sha), True
                    self._names = [file.rfilename for file in info.siblings]
                except (*_unreachable(), hf.errors.HfHubHTTPError) as error:
                    if _status(error) not in (0, 429, 500, 502, 503, 504):
                        raise
                    try:
                        folder = hf.snapshot_download(self.repo, revision=revision, local_files_only=True)
                    except hf.errors.LocalEntryNotFoundError:
                        raise error from None
                    self.name = f"the local cache of {self.name}"
                    self.commit, self._names = Path(folder).name, Folder(folder, self.repo).names()
        return self._names

    def header(self, name: str) -> Path | None:
        if (known := self.cached(name)) is not None or not self._reachable:
            return known
        with one_sentence(self.repo, self.revision, f"the header of {name}"):
            return Path(_header_of(self.repo, str(self.commit), name).name) / name

    def _download(self, name: str) -> Path:
        """A file that is fetched now."""
        with one_sentence(self.repo, self.revision, name):
            # By the name of a branch once: the client then notes which commit it is.
            revision = self.commit if self._noted else self.revision
            path = Path(fetched(client().hf_hub_download, self.repo, name, revision=revision))
        self._noted = True
        if path.parent.name != self.commit and "/" not in name:
            raise CheckpointError(f"{self.name} changed while it was read: load it again")
        return path


@cache  # the folder is there as long as the process
def _header_of(repo: str, commit: str, name: str) -> tempfile.TemporaryDirectory:
    """A folder with a GGUF file as long as that on the Hub, of which only the header was fetched."""
    hf, folder = client(), tempfile.TemporaryDirectory(prefix="ocelli-gguf-")
    hub = hf.HfFileSystem(endpoint=hf.constants.ENDPOINT, skip_instance_cache=True)
    with hub.open(f"{repo}@{commit}/{name}", block_size=_PIECE) as file, naming(f"{name} of {repo}"):
        header_of(file, file.size, Path(name))
        length, _ = file.tell(), file.seek(0)
        with (Path(folder.name) / name).open("wb") as copy:
            copy.write(file.read(length))
            copy.truncate(file.size)
    return folder
