"""What ends a request, as programs and visitors are told: one table, one sentence each."""

from __future__ import annotations

import logging
import re
import traceback
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import OutOfMemoryError

from data.errors import ImageError, ProcessorError, ThinkingError
from generation.options import CacheMemoryError, NotFiniteError
from inference.conversation import ContextFullError
from inference.errors import FormError, user_errors
from messages import one_line, printable
from models.checkpoints.files import CheckpointError
from web.engine import Interrupted, QueueFull

log = logging.getLogger("ocelli.server")

CODES = {
    403: "forbidden", 408: "timeout", 413: "request_too_large", 415: "unsupported_media", 429: "queue_full",
    499: "client_gone", 500: "internal_error", 503: "overloaded", 504: "timeout",
}  # fmt: skip
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FOR_PROGRAMS = re.compile(r" or raise ImageLimits\.\w+| \(--model list\)")  # advice for others
_NO_MEMORY = "there is not enough memory: ask for fewer or shorter answers, or about smaller images"
_FAULT = "something went wrong on the server: other requests are not affected; ask again"


class Refused(Exception):
    """A request that ends here; the message is one sentence. `param` is the field that was wrong, `code` the
    kind for programs, `retry_after` is in seconds. `body` is OpenAI's form of it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 retry_after: float | None = None):  # fmt: skip
        super().__init__(printable(message))
        self.status, self.param, self.retry_after = status, param, retry_after
        self.code = code or CODES.get(status)

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}


def unsupported(name: str) -> Refused:
    return Refused(400, f"{name}: not supported by this server; remove it", name, "unsupported_parameter")


def unexpected(place: str, expected: str) -> Refused:
    """Of what stands at that place in a request."""
    return Refused(400, f"{place}: expected {expected}", place, "invalid_value")


def refusal(error: Exception) -> Refused:
    """The answer to a request that ends in an error. Our own faults stay here, and so do what is wrong with
    the model and paths of this machine."""
    match error:
        case Refused():
            return error
        case QueueFull():
            return Refused(429, one_line(error), retry_after=error.retry_after)
        case HTTPException():
            phrase = HTTPStatus(error.status_code).phrase.lower()
            return Refused(error.status_code, f"{phrase}: see GET / and GET /v1/models")
        case ClientDisconnect():
            return Refused(499, "the client has gone")
        case TimeoutError():
            return Refused(504, "this took longer than a request may take here")
        case CacheMemoryError() | MemoryError() | OutOfMemoryError():
            return Refused(503, _NO_MEMORY, code="out_of_memory", retry_after=10)
    ours = isinstance(error, CheckpointError | ProcessorError | NotFiniteError | OSError)
    if ours or not isinstance(error, user_errors()):
        return Refused(500, _FAULT)
    param = "messages" if isinstance(error, ImageError) else None
    param = error.option if isinstance(error, FormError | ThinkingError) else param
    too_long = isinstance(error, ContextFullError)
    code = "context_length_exceeded" if too_long else "invalid_value"
    return Refused(400, _FOR_PROGRAMS.sub("", one_line(error)), param, code)


def log_fault(error: BaseException) -> None:
    """Where it went wrong, without its message, which may quote a request."""
    if not isinstance(error, Interrupted):  # the engine has printed the reason
        log.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)).rstrip())
