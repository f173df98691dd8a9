"""Download one picture: http(s) only, also after redirects, with limits on size and time."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from urllib.parse import quote, urlsplit

_CHUNK = 64 * 1024
_MAX_REDIRECTS = 5
_URL_CHARACTERS = "%/:?#[]@!$&'()*+,;=~"  # all others, such as spaces and accents, are escaped


class FetchError(ValueError):
    """Why a download was refused or failed, without the URL (the caller names it)."""


class _HttpRedirects(urllib.request.HTTPRedirectHandler):
    max_redirections = _MAX_REDIRECTS

    def redirect_request(self, request, response, code, message, headers, url):
        if urlsplit(url).scheme not in ("http", "https"):
            raise FetchError(f"redirected to {url[:100]!r}; expected http or https")
        return super().redirect_request(request, response, code, message, headers, url)


def _opener() -> urllib.request.OpenerDirector:
    """Only what http needs: the standard opener would also read file: and ftp: addresses."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _HttpRedirects(),
    ):
        opener.add_handler(handler)
    return opener


def fetch(url: str, max_bytes: int, timeout: float) -> bytes:
    """The body at `url`.

    `timeout` seconds bound both every wait for the server and, doubled, the whole download.

    Raises:
        FetchError: another scheme, no answer, an error status, a body past `max_bytes`, or too slow.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise FetchError("expected an http or https URL")
    deadline = time.monotonic() + 2 * timeout
    body = bytearray()
    try:
        request = urllib.request.Request(
            quote(url, safe=_URL_CHARACTERS), headers={"User-Agent": "ocelli", "Accept": "image/*,*/*;q=0.1"}
        )
        with _opener().open(request, timeout=timeout) as response:
            # read1 returns what has arrived, so a server that drips bytes still meets the deadline.
            while chunk := response.read1(_CHUNK):
                body += chunk
                if len(body) > max_bytes:
                    raise FetchError(f"expected at most {max_bytes:,} bytes, got more; shrink the picture")
                if time.monotonic() > deadline:
                    raise FetchError(
                        f"expected the whole picture within {2 * timeout:g} s, got {len(body):,} bytes"
                    )
            expected = response.headers.get("Content-Length", "")
    except urllib.error.HTTPError as error:
        raise FetchError(
            f"expected a picture, the server answered {error.code} {_one_line(error.reason)}"
        ) from error
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        reason = _one_line(getattr(error, "reason", None) or error) or type(error).__name__
        raise FetchError(f"the download failed ({reason})") from error
    except FetchError:
        raise
    except ValueError as error:  # an address that does not parse
        raise FetchError(f"not a usable address ({_one_line(error)})") from error
    if expected.isdecimal() and int(expected) != len(body):
        raise FetchError(f"expected {int(expected):,} bytes, got {len(body):,}: the download was cut off")
    return bytes(body)


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:200]
