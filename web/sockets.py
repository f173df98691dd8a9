"""Where a server listens, and its address."""

from __future__ import annotations

import errno
import socket


def listen(host: str, port: int, last: int | None = None) -> socket.socket:
    """A socket on the first free port from `port` to `last`, by default on `port` alone. Raises OSError or
    ValueError without one."""
    last = port if last is None else last
    if not 0 < port <= last < 2**16:
        raise ValueError(f"--port: expected 1 to 65535, got {port}")
    for number in range(port, last + 1):
        try:
            family, *_, place = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            return socket.create_server(place[:2], family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(f"cannot listen on {host}, port {number}: {error}") from None
    taken = f"port {port} is" if port == last else f"ports {port} to {last} are"
    raise OSError(f"{taken} in use on {host}: give another --port")


def address(host: str, port: int) -> str:
    """The URL of a server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
