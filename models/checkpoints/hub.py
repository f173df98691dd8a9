"""A repository on the Hub as the files of a checkpoint: all of one commit, each fetched when it is asked for.

Downloads go through huggingface_hub: its cache, its tokens, HF_ENDPOINT, HF_HUB_OFFLINE. Importing this
module does not import it. Whatever it raises becomes one sentence (`one_sentence`).
"""

from __future__ import annotations

import hashlib
import io
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from models.checkpoints.files import CheckpointError, Folder, naming
from models.checkpoints.gguf import header_of
from models.checkpoints.missing import INDEX, WEIGHTS
from models.checkpoints.names import KNOWN, hints

T = TypeVar("T")
_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
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
    kind = client().errors.HfHubHTTPError
    return next((one.response.status_code for one in _causes(error) if isinstance(one, kind)), 0)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it came from."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def _why_not(error: BaseException) -> str:
    """The reason why there was no connection, in words."""
    words: dict[tuple[type[BaseException], ...], str] = {
        (socket.gaierror,): "no network, or no host of that name",
        (ConnectionRefusedError,): "it refuses connections",
        (ssl.SSLError,): "its certificate is not trusted",
        (TimeoutError, client().utils.httpx.TimeoutException): "no answer in time",
    }
    said = (words[kinds] for cause in _causes(error) for kinds in words if isinstance(cause, kinds))
    return next(said, "no network")


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


class Repository:
    """Files of a repository, through the client's cache. The first file decides the commit of the others, and
    whether the Hub is asked for them at all: once it could not be reached, it is not asked again."""

    gguf: tuple[str, ...] = ()

    def __init__(self, repo: str, revision: str | None):
        self.repo = self.source = repo
        self.revision = revision
        self.name = f"repository {repo}" + (f" at {revision}" if revision else "")
        self.commit = revision if revision and _COMMIT.fullmatch(revision) else None
        self.reachable: bool | None = None  # None: the Hub has not been asked
        self.listed = False

    def cached(self, name: str) -> Path | None:
        known = client().try_to_load_from_cache(self.repo, name, revision=self.commit or self.revision)
        return Path(known) if isinstance(known, str) else None

    def file(self, name: str) -> Path | None:
        with self._asking(name):
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

    def names(self) -> list[str]:
        """The names of its files at one commit; where the Hub cannot be asked, of those in the cache."""
        hf, revision = client(), self.commit or self.revision
        with self._asking("the list of files"):
            if self.reachable is not False:
                with suppress(*_unreachable()):
                    info = fetched(hf.HfApi().model_info, self.repo, revision=revision, timeout=patience())
                    self.commit, self.reachable, self.listed = str(info.sha), True, True
                    return [file.rfilename for file in info.siblings]
            folder = Path(hf.snapshot_download(self.repo, revision=revision, local_files_only=True))
            self.commit, self.reachable = folder.name, False
            return Folder(folder, self.repo).names()

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """`one_sentence`; while the commit is not known, with what may have been meant instead. Whoever names
        a commit knows the repository."""
        try:
            with one_sentence(self.repo, self.revision, what):
                yield
        except CheckpointError as error:
            cause = error.__cause__
            if self.commit is not None or cause is None:
                raise
            said = self.repo in KNOWN or str(error).startswith("there is no folder")
            front = "" if said else f"there is no folder {self.repo} here, and "
            end = hints(self.repo, _cached_models(), bool(_status(cause)))
            raise CheckpointError(f"{front}{error}{end}") from cause

    def header(self, name: str) -> Path | None:
        """A GGUF file of the commit that `names` saw, or one as long with the header alone."""
        if (known := self.cached(name)) is not None or self.reachable is False:
            return known
        with one_sentence(self.repo, self.revision, f"the header of {name}"):
            return Path(_header_of(self.repo, str(self.commit), name).name) / name

    def _first(self, name: str) -> Path | None:
        """A file of the revision's present commit; without a network, of the commit in the cache."""
        hf, cached, commit = client(), self.cached(name), None
        try:
            url = hf.hf_hub_url(self.repo, name, revision=self.revision)
            commit = fetched(hf.get_hf_file_metadata, url, timeout=patience()).commit_hash
        except (*_unreachable(), hf.errors.HfHubHTTPError) as error:
            answered = isinstance(error, hf.errors.HfHubHTTPError)
            if not answered and cached is None and self.commit is None:
                raise hf.errors.LocalEntryNotFoundError(str(error)) from error
            busy = answered and cached is not None and _status(error) in (429, 500, 502, 503, 504)
            if busy or not answered:
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
        # By the name of a branch once more after `names`: the client then notes which commit it is.
        revision = self.revision if self.listed else self.commit or self.revision
        try:
            file = fetched(hf.hf_hub_download, self.repo, name, revision=revision)
        except hf.errors.LocalEntryNotFoundError as error:
            if (
                _status(error.__cause__) == 404 and self.commit and self.reachable
            ):  # as a mirror says that a commit lacks a file
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
    size = fetched(hf.get_hf_file_metadata, url, timeout=patience()).size
    with (Path(folder.name) / name).open("wb") as copy, naming(f"{name} of {repo}"):
        header_of(io.BufferedReader(_Ranges(url, size, copy), _PIECE), size, Path(name))
        copy.truncate(size)
    return folder
