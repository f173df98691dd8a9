"""Connections that only lead to the public internet.

A URL that came from someone else must not make this machine ask its own network: a router's page, a cloud's
metadata service, a database on loopback. A name is resolved once, every address it has is looked at, and the
connection goes to one that was looked at: a name server that answers differently the second time changes
nothing. Each redirect makes a connection of its own and is held to the same.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import ssl
import threading
import time
import urllib.request
from contextlib import suppress
from urllib.parse import unquote, urlsplit

ALLOW = "OCELLI_ALLOW_PRIVATE_URLS"
# Addresses that carry one of IPv4 inside (RFC 4291, 6052, 8215, 3056): a translator on the way decides whose.
_CARRIERS = tuple(map(ipaddress.IPv6Network, ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")))


MOST_ADDRESSES = 4  # of a host, tried one behind another


class PrivateAddressError(OSError):
    """A host that is not on the public internet."""


def is_public(address: str) -> bool:
    """Whether an IPv4 or IPv6 address, as `getaddrinfo` writes it, is one of the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.is_site_local or any(ip in network for network in _CARRIERS):
            return False
    return ip.is_global and not ip.is_multicast


def private_allowed() -> bool:
    return os.environ.get(ALLOW) == "1"


def _resolve(host: str, port: int, allow_private: bool) -> list[tuple]:
    """What `getaddrinfo` finds, every address of it checked."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, place in found:
        if not allow_private and not is_public(str(place[0])):
            raise PrivateAddressError(
                f"{host} is {place[0]}, which is not on the public internet; set {ALLOW}=1 to allow it"
            )
    return found


class Deadline:
    """Ends connections when a time is over, whatever they are waiting for: a server may send one byte of its
    headers each second, and no wait is ever long.

        with Deadline(30.0) as deadline: ... deadline.watch(connection)
    """

    def __init__(self, seconds: float):
        self._end_at = time.monotonic() + seconds
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._watched: list[socket.socket] = []
        self._ended = False

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end_at - time.monotonic()

    @property
    def over(self) -> bool:
        return self._ended or self.left <= 0  # the timer may be late

    def watch(self, connection: socket.socket) -> None:
        self._watched.append(connection)
        if self.over:
            self._end()

    def _end(self) -> None:
        self._ended = True
        for connection in self._watched:
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()


def connect(host: str, port: int, timeout: float, deadline: Deadline, allow_private: bool) -> socket.socket:
    """A TCP connection to a host, at one of the first of its addresses, which are all checked.

    It is watched by `deadline`, whose time bounds all attempts together; `timeout` is of each.

    Raises:
        PrivateAddressError: any of them is not public. (All must be: which one is taken is up to chance.)
        OSError: no such name, no answer.
    """
    failed: OSError | None = None
    for family, kind, protocol, _, place in _resolve(host, port, allow_private)[:MOST_ADDRESSES]:
        if deadline.left <= 0:
            raise TimeoutError("timed out")
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(min(timeout, deadline.left))
            connection.connect(place)
            connection.settimeout(timeout)
            deadline.watch(connection)
        except OSError as error:
            connection.close()
            failed = error
        else:
            return connection
    raise failed or OSError(f"{host} has no address")


def handlers(allow_private: bool, deadline: Deadline) -> tuple[urllib.request.BaseHandler, ...]:
    """urllib's handlers of http and https, with connections made by `connect`.

    Behind a proxy it is the proxy that resolves names; what this machine can tell of them is looked at.
    """
    context = ssl.create_default_context()
    proxies = {
        urlsplit(url if "//" in url else f"//{url}").netloc.rpartition("@")[2]
        for url in urllib.request.getproxies().values()
    }

    class Plain(http.client.HTTPConnection):
        private_too = allow_private

        def connect(self) -> None:
            self.sock = connect(self.host, self.port, self.timeout, deadline, self.private_too)

    class Secure(http.client.HTTPSConnection):
        private_too = allow_private

        def connect(self) -> None:
            self.sock = connect(self.host, self.port, self.timeout, deadline, self.private_too)
            if self._tunnel_host:  # through a proxy
                self._tunnel()
            self.sock = context.wrap_socket(self.sock, server_hostname=self._tunnel_host or self.host)
            deadline.watch(self.sock)

    class ProxiedPlain(Plain):
        private_too = True  # the proxy itself may be

    class ProxiedSecure(Secure):
        private_too = True

    def by_proxy(request: urllib.request.Request) -> bool:
        if request.host not in proxies:
            return False
        target = urlsplit(request.full_url)
        with suppress(socket.gaierror):
            _resolve(unquote(target.hostname or ""), target.port or 80, allow_private)
        return True

    class PlainHandler(urllib.request.HTTPHandler):
        def http_open(self, request):
            return self.do_open(ProxiedPlain if by_proxy(request) else Plain, request)

    class SecureHandler(urllib.request.HTTPSHandler):
        def https_open(self, request):
            return self.do_open(ProxiedSecure if by_proxy(request) else Secure, request)

    return PlainHandler(), SecureHandler()
