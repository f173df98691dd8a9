"""The server of serve.py, which opens its page in a browser.

    python app.py                                             # the embedded model
    python app.py --model smolvlm-256m --dtype int8

It listens on the first free port from 7860 on; all options are those of serve.py.
"""

from __future__ import annotations

import os
import signal
import sys

import serve
from messages import named

FIRST_PORT, PORTS = 7860, 100


def main(arguments: list[str] | None = None) -> int:
    parser = serve.build_parser()
    parser.prog, parser.description = named("app.py"), named(__doc__)
    parser.set_defaults(prog=parser.prog, port=None)
    settings = parser.parse_args(arguments)
    last = None if settings.port else FIRST_PORT + PORTS - 1
    settings.port = settings.port or FIRST_PORT
    screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return serve.run(settings, last, browser=screen and sys.stdout.isatty())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without waiting for a long step
