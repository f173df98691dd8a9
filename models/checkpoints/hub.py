"""The Hub's client: what it raises, as sentences, and a second try where that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx, validate_repo_id

from models.checkpoints.errors import CheckpointError

# OSError covers the client's own HTTP errors, its offline mode, and a full disk. Where a connection fails
# while it uploads, what its HTTP library raises comes through.
# What says that there is no network: asked once, not again for 23 seconds as the client does.
OUT_OF_REACH = (OfflineModeIsEnabled, httpx.ConnectError, httpx.TimeoutException)
HUB_ERRORS = (OSError, HFValidationError, HfHubHTTPError, EntryNotFoundError, httpx.HTTPError)


Answer = TypeVar("Answer")


@contextmanager
def one_sentence(repo: str, revision: str | None, what: str) -> Iterator[None]:
    """Whatever the Hub's client raises inside, as a CheckpointError: it takes any answer with status 200 for
    one of the Hub's, and other bytes (a proxy's page) end in KeyError, TypeError or JSONDecodeError.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(hub_sentence(error, repo, revision, what)) from error


def check_repo_id(name: str) -> None:
    """Raises CheckpointError: the Hub takes no repository of that name."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise CheckpointError(f"expected a repository's name such as owner/name, got {name!r}") from error


def hub_sentence(error: Exception, repo: str, revision: str | None, what: str) -> str:
    """What went wrong with the Hub, in one sentence."""
    if isinstance(error, GatedRepoError):
        return f"repository {repo} is gated: accept its terms on its page and log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no folder {repo} here and no repository {repo} on {constants.ENDPOINT}: check the "
            f"spelling (a private one needs `hf auth login`)"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"repository {repo} has no revision {revision!r}: expected a branch, a tag or a commit"
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        if constants.HF_HUB_OFFLINE:
            return (
                f"{what} of {repo} is not in the local cache and HF_HUB_OFFLINE is set: fetch it once with "
                f"the network on"
            )
        return f"{constants.ENDPOINT} cannot be reached for {what} of {repo}, which is not in the local cache"
    if isinstance(error, EntryNotFoundError):
        return f"repository {repo} has no {what}"
    if isinstance(error, HFValidationError):
        return f"{repo!r} is neither a folder here nor a valid repository id such as owner/name"
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, OUT_OF_REACH):
        return f"{constants.ENDPOINT} cannot be reached for {what} of {repo} ({first_line})"
    if not isinstance(error, HUB_ERRORS):
        return (
            f"{what} of {repo}: {constants.ENDPOINT} answered with something other than a Hub does "
            f"({type(error).__name__}: {first_line}): check HF_ENDPOINT and the proxy, and try again"
        )
    return f"{what} of {repo} failed ({constants.ENDPOINT}): {first_line}"


def patience() -> float:
    """How long a first question waits: briefly for a connection, as long as HF_HUB_ETAG_TIMEOUT for its
    answer. The client declares one number, and passes on what it gets."""
    return cast(float, httpx.Timeout(constants.HF_HUB_ETAG_TIMEOUT, connect=2.5))


def fetched(fetch: Callable[..., Answer], *what: str, **how: Any) -> Answer:
    """What the client's `fetch` gives; tried once more where the Hub had closed a connection that the client
    kept for later, as it then finds out too late."""
    try:
        return fetch(*what, **how)
    except httpx.RemoteProtocolError:
        return fetch(*what, **how)
