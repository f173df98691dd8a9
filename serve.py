"""Answer programs over HTTP in OpenAI's and Anthropic's protocols, and people on a page at the same address.

    python serve.py                                           # the embedded model: http://127.0.0.1:8000/v1
    python serve.py --model smolvlm-256m --dtype int8 --prefix-cache kept
    OCELLI_API_KEY=secret python serve.py --host 0.0.0.0      # all networks, for those who have the key

It works without a network and reads only what a request carries. Exit status: 0 after Ctrl-C or SIGTERM, when
what was accepted has been answered; 2 with one sentence if it cannot start.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any

from inference.flags import (
    DTYPES,
    MODEL,
    Parser,
    add_machine,
    check_model,
    device,
    dtype,
    log_if_slow,
    machine,
    model,
    positive,
)
from messages import one_line

# What imports torch or fastapi is imported inside functions: --help and a wrong argument answer at once.

DEFAULT_MODEL = Path(__file__).resolve().parent / "checkpoints" / "ocelli-shapes"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="serve.py", description=__doc__)
    parser.set_defaults(prog=parser.prog)
    add = parser.add_argument
    # fmt: off
    add("--host", default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine only; 0.0.0.0: all networks)")
    add("--port", type=positive, default=8000, help="port to listen on (default 8000)")
    add("--allowed-host", action="append", default=[], metavar="NAME",
        help="another host name of this server, such as a proxy's; may be given several times")
    add("--allowed-origin", action="append", default=[], metavar="URL",
        help="address of another site whose pages may send requests, such as https://ui.example, or * for "
        "all; may be given several times")
    add("--proxy", action="append", default=[], metavar="ADDRESS",
        help="address of a proxy whose X-Forwarded-For names the client; may be given several times")
    add("--api-key", default=os.environ.get("OCELLI_API_KEY") or None, metavar="KEY",
        help="key that clients have to send (default: the variable OCELLI_API_KEY, which is not seen in ps)")
    add("--model", type=model, default=str(DEFAULT_MODEL), metavar="MODEL",
        help=f"{MODEL} (default: the embedded model)")
    add("--device", type=device, default="auto",
        help="auto (default: the best one on this machine), cpu, cuda or mps")
    add("--dtype", type=dtype, default="auto", choices=DTYPES,
        help="data type of the weights; auto (default): on a CPU float32, or a quantized checkpoint's own "
        "codes; bfloat16 on CUDA (float16 before Ampere), elsewhere the checkpoint's own; int8 and int4 "
        "work on a CPU and on CUDA")
    add_machine(add)
    add("--slots", type=positive, default=8, metavar="N",
        help="answers that are made at the same time (default 8)")
    add("--queue", type=positive, default=128, dest="max_queue", metavar="N",
        help="requests that may wait; one client may fill half of that, and more are refused with status 429 "
        "(default 128)")
    add("--prefill-chunk", type=positive, default=256, metavar="N",
        help="prompt tokens computed between two decode steps of the others (default 256)")
    add("--prefix-cache", type=Path, dest="prefix_folder", metavar="DIR",
        help="folder that keeps what was computed about images and conversations across restarts")
    add("--prefix-bytes", type=positive, default=1_000_000_000, metavar="N",
        help="bytes that are kept of it in memory, and as many in the folder (default 1000000000)")
    add("--lookup", default="auto", choices=("auto", "on", "off"),
        help="verify tokens looked up in prompt and answer: auto (default): with the compiled step on "
        "a CPU (same tokens), as long as it pays")
    add("--max-body", type=positive, default=32 * 2**20, metavar="N",
        help="bytes of a request (default 33554432)")
    add("--max-images", type=positive, default=8, metavar="N", help="images in a request (default 8)")
    add("--max-tokens", type=positive, default=4096, dest="max_new_tokens", metavar="N",
        help="new tokens that a request may ask for (default 4096)")
    add("--timeout", type=positive, default=600, dest="seconds", metavar="SECONDS",
        help="seconds for a request from its arrival to its end (default 600)")
    add("--allow-urls", action=argparse.BooleanOptionalAction, default=False,
        help="fetch images that clients name from public addresses (default: off)")
    add("--drain", type=positive, default=30, metavar="SECONDS",
        help="seconds for the rest of the answers after SIGTERM or Ctrl-C (default 30)")
    # fmt: on
    return parser


def start(settings: argparse.Namespace, last_port: int | None = None):
    """(the server with its model open, the socket that it listens on: the first free one up to `last_port`).
    Raises ValueError or OSError."""
    check_model(settings.model, None)  # what is wrong is refused before a model is loaded
    if settings.api_key == "":  # of a variable that is not set, say
        raise ValueError("--api-key: expected a key, got an empty text")
    origins = [one if one == "*" else origin(one) for one in settings.allowed_origin]
    listening = listen(settings.host, settings.port, last_port)
    from inference.checkpoint import open_checkpoint
    from web import door, engine, guard, server

    def limits(kind: Any) -> Any:
        """Limits of a kind, of which options have the names."""
        return kind(**{name: value for name, value in vars(settings).items() if name in kind.__match_args__})

    with log_if_slow(settings.prog, settings.model):
        checkpoint = open_checkpoint(settings.model, **machine(settings)).compiled()
    answering = engine.Engine(checkpoint, limits(engine.EngineLimits))
    space = filter(None, [os.environ.get("SPACE_HOST")])  # a Space of Hugging Face is asked by its own name
    hosts = door.Hosts(settings.host, [*settings.allowed_host, *space], origins)
    bounds, key, drain = limits(guard.ApiLimits), settings.api_key, settings.drain
    return server.Server(answering, hosts, bounds, key, drain, settings.proxy), listening


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


def origin(url: str) -> str:
    """A site's address as browsers name it. Raises ValueError."""
    import httpx

    with suppress(httpx.InvalidURL):
        site = httpx.URL(url.lower().rstrip("/"))  # without the scheme's own port
        same = site.is_absolute_url and site == (name := f"{site.scheme}://{site.netloc.decode()}")
        if same and not {*"*%"} & {*name} and (site.port or 0) < 2**16:
            return name
    raise ValueError(f"--allowed-origin: expected an address such as https://ui.example:8443, got {url!r}")


def run(settings: argparse.Namespace, last_port: int | None = None, browser: bool = False) -> int:
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("ocelli.server").setLevel(logging.INFO)
    try:
        server, listening = start(settings, last_port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host}:{listening.getsockname()[1]}/"
        said = f"{url}v1 for programs, {url} for people (press Ctrl-C to stop)"
        print(f"{settings.prog}: {said}", file=sys.stderr)
        if browser:
            webbrowser.open(url)
        server.run([listening])
    except KeyboardInterrupt:
        pass
    except (ValueError, OSError) as error:  # what users get wrong are all ValueErrors
        print(f"{settings.prog}: error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run(build_parser().parse_args(arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without waiting for a long step
