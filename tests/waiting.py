"""How long tests wait for what takes a moment, and for what, on ports of their own."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

PATIENCE = 240  # seconds for what takes a few here: machines are slower, or busy with something else


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Whether something came about in time; looked at often."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    """A port that is free, below those that Linux by default hands out to whoever asks for any (32,768 on):
    one of those may be somebody else's before it is used here.

    Raises:
        RuntimeError: a hundred were not free.
    """
    drawn = random.SystemRandom()
    for _ in range(100):
        port = drawn.randint(10_000, 32_000)
        try:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", port))
        except OSError:
            continue
        return port
    raise RuntimeError("expected a free port between 10,000 and 32,000, found none in a hundred")
