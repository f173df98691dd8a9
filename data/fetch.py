"""Bytes of a URL: data: URLs, and one image over http(s), bounded in size and time.

A URL that a stranger wrote must not make this machine ask its own network: a router's page, a cloud's
metadata service, a database on loopback. So each host name, also of a redirect, is resolved once, all its
addresses must be public, and the connection goes to one that was checked: a name server that answers
differently the second time changes nothing. Behind a proxy, which resolves names, they alone are checked.
The environment variable OCELLI_ALLOW_PRIVATE_URLS=1 turns this off.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
import threading
import urllib.parse
from contextlib import suppress
from urllib.request import getproxies, proxy_bypass

import httpx

from data.errors import ImageError
from messages import one_line

ALLOW = "OCELLI_ALLOW_PRIVATE_URLS"
TIMEOUT = 15.0  # seconds of each wait for the server; the whole download may take twice as long
MOST_ADDRESSES = 4  # of one host are tried
# All of IPv6 that is given out for the internet: outside of it lie, among others, addresses that translators
# make into those of IPv4 (RFC 4291, 6052, 8215, 7915), and segment routing (RFC 9602).
_GIVEN_OUT = ipaddress.ip_network("2000::/3")
# Within that, and of IPv4: protocols' own, Teredo among them, documentation, and 6to4 with its relays.
_OWN = [*map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20"))]


def is_public(address: str) -> bool:
    """True for an IPv4 or IPv6 address of the public internet, as `getaddrinfo` writes it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None and ip not in _GIVEN_OUT:
            return False
        ip = ip.ipv4_mapped or ip
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _OWN)


def _public_addresses(url: httpx.URL) -> list[str]:
    host = url.raw_host.decode("ascii")
    found = socket.getaddrinfo(host, url.port or 80, type=socket.SOCK_STREAM)
    addresses = [str(place[0]) for *_, place in found]
    for address in addresses:  # all of them: which one is taken is up to chance
        if not is_public(address):
            name = host if host.strip("[]") == address else f"{host} is {address}, which"
            raise ImageError(
                f"{name} is not on the public internet; the environment variable {ALLOW}=1 allows it"
            )
    return addresses


class _PublicTransport(httpx.HTTPTransport):
    """Connects to the address that was checked, under the name that was asked for."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        failed: httpx.TransportError = httpx.ConnectError("the host has no address")
        name, place = request.url.raw_host.decode("ascii"), request.url
        for address in _public_addresses(place)[:MOST_ADDRESSES]:
            request.url = place.copy_with(host=address)  # the header "Host" is set already
            request.extensions = {**request.extensions, "sni_hostname": name}
            try:
                return super().handle_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failed = error
            finally:
                request.url = place
        raise failed


def _check_name(request: httpx.Request) -> None:
    with suppress(OSError):  # a name that the proxy alone knows
        _public_addresses(request.url)


def _client(url: httpx.URL) -> httpx.Client:
    transport, hooks = None, []
    if os.environ.get(ALLOW) != "1":
        proxies = getproxies()
        if (url.scheme in proxies or "all" in proxies) and not proxy_bypass(url.host):
            hooks = [_check_name]
        else:
            transport = _PublicTransport()
    return httpx.Client(
        transport=transport,
        timeout=TIMEOUT,
        follow_redirects=True,
        max_redirects=5,
        headers={"User-Agent": "ocelli", "Accept": "image/*,*/*;q=0.1", "Accept-Encoding": "identity"},
        event_hooks={"request": hooks},
    )


def read_url(url: str, max_bytes: int) -> bytes:
    """The bytes of a data: or http(s) URL. A refusal is an ImageError without the URL."""
    if url[:8].lower().startswith(("http://", "https://")):
        return fetch(url, max_bytes)
    header, _, body = url.partition(",")
    if header[:5].lower() != "data:":
        raise ImageError("expected a path or an http(s) URL; no other kind of URL is read")
    if (least := len(body) // 3) > max_bytes:  # %xx is a byte
        raise ImageError(f"expected at most {max_bytes:,} bytes, got {least:,}; shrink the image")
    if not header.lower().endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ImageError(f"expected base64 after the comma ({one_line(error, 200)})") from error


def fetch(url: str, max_bytes: int) -> bytes:
    """The body at `url`. A refusal is an ImageError without the URL."""
    body, over = bytearray(), threading.Event()
    sockets: list[socket.socket] = []

    def end() -> None:  # a server may send a byte each second: no single wait is long, and there is no end
        over.set()
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def watch(event: str, info: dict) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            sockets.append(info["return_value"].get_extra_info("socket"))
        if over.is_set():
            raise httpx.ReadTimeout("the time is over")

    timer = threading.Timer(2 * TIMEOUT, end)
    timer.daemon = True
    timer.start()
    try:
        with (
            _client(httpx.URL(url)) as client,
            client.stream("GET", url, extensions={"trace": watch}) as response,
        ):
            if not response.is_success:
                answer = f"{response.status_code} {response.reason_phrase}"
                raise ImageError(f"expected an image, the server answered {answer}")
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > max_bytes:
                    raise ImageError(f"expected at most {max_bytes:,} bytes, got more; shrink the image")
            watch("", {})  # the body may have ended because `end` closed the connection
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError) as error:
        if over.is_set():  # what an ended connection says of it is chance
            late = f"expected the whole image within {2 * TIMEOUT:g} s, got {len(body):,} bytes"
            raise ImageError(late) from error
        if isinstance(error, ImageError):  # a ValueError
            raise
        raise ImageError(f"the download failed ({one_line(error, 200)})") from error
    finally:
        timer.cancel()
    return bytes(body)
