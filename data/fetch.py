"""Download one image: http(s) only and from the public internet only, also after redirects, with limits on
size and time."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from urllib.parse import quote, urlsplit

from data.addresses import Deadline, PrivateAddressError, handlers, private_allowed
from data.errors import FetchError, one_line

_CHUNK = 64 * 1024
_MAX_REDIRECTS = 5
_URL_CHARACTERS = "%/:?#[]@!$&'()*+,;=~"  # all others, such as spaces and accents, are escaped


class _HttpRedirects(urllib.request.HTTPRedirectHandler):
    max_redirections = _MAX_REDIRECTS

    def redirect_request(self, request, response, code, message, headers, url):
        if urlsplit(url).scheme not in ("http", "https"):
            raise FetchError(f"redirected to {url[:100]!r}; expected http or https")
        return super().redirect_request(request, response, code, message, headers, url)


def _opener(allow_private: bool, deadline: Deadline) -> urllib.request.OpenerDirector:
    """Only what http needs: the standard opener would also read file: and ftp: addresses."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        *handlers(allow_private, deadline),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _HttpRedirects(),
    ):
        opener.add_handler(handler)
    return opener


def fetch(url: str, max_bytes: int, timeout: float, allow_private: bool = False) -> bytes:
    """The body at `url`.

    `timeout` seconds bound both every wait for the server and, doubled, the whole download. Hosts that are
    not on the public internet are asked only with `allow_private` or OCELLI_ALLOW_PRIVATE_URLS=1.

    Raises:
        FetchError: another scheme, a private address, no answer, an error status, a body past `max_bytes`, or
            too slow.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise FetchError("expected an http or https URL")
    body = bytearray()
    with Deadline(2 * timeout) as deadline:
        try:
            opener = _opener(allow_private or private_allowed(), deadline)
            expected = _read(opener, url, body, max_bytes, timeout, deadline)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # What a connection that was ended says of it is chance.
            raise (_too_slow(timeout, body) if deadline.over else _told(error)) from error
        if deadline.over:
            raise _too_slow(timeout, body)
    if expected.isdecimal() and len(expected) < 20 and int(expected) != len(body):
        raise FetchError(f"expected {int(expected):,} bytes, got {len(body):,}: the download was cut off")
    return bytes(body)


def _read(opener, url: str, body: bytearray, max_bytes: int, timeout: float, deadline: Deadline) -> str:
    """Append what comes to `body`, until it ends or the time is over; the length that was announced."""
    request = urllib.request.Request(
        quote(url, safe=_URL_CHARACTERS), headers={"User-Agent": "ocelli", "Accept": "image/*,*/*;q=0.1"}
    )
    with opener.open(request, timeout=timeout) as response:
        while not deadline.over and (chunk := response.read1(_CHUNK)):
            body += chunk
            if len(body) > max_bytes:
                raise FetchError(f"expected at most {max_bytes:,} bytes, got more; shrink the image")
        return response.headers.get("Content-Length", "")


def _too_slow(timeout: float, body: bytearray) -> FetchError:
    return FetchError(f"expected the whole image within {2 * timeout:g} s, got {len(body):,} bytes")


def _told(error: Exception) -> FetchError:
    """One sentence of whatever went wrong."""
    if isinstance(error, FetchError):
        return error
    if isinstance(error, urllib.error.HTTPError):
        return FetchError(
            f"expected an image, the server answered {error.code} {one_line(error.reason, 200)}"
        )
    if isinstance(error, OSError | http.client.HTTPException):  # URLError and timeouts are OSErrors
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, PrivateAddressError):
            return FetchError(str(reason))
        return FetchError(f"the download failed ({one_line(reason, 200) or type(error).__name__})")
    return FetchError(f"not a usable address ({one_line(error, 200)})")  # one that does not parse
