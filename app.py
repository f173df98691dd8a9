"""Ask vision-language models about images in a browser.

    python app.py                                             # the embedded model, http://127.0.0.1:7860
    python app.py --model HuggingFaceTB/SmolVLM-256M-Instruct --dtype int8
    python app.py --model checkpoints/ocelli-shapes --model runs/mine
    python app.py --any-model --host 0.0.0.0                  # all networks, any model of the Hub

It works without a network and sends nothing anywhere. Exit status: 0 after Ctrl-C or SIGTERM, 2 with one
sentence if it cannot start. It also runs as a Hugging Face Space: see the README's header.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from data.errors import one_line
from inference.cli import DTYPES, Parser, check_model, device, dtype, log_if_slow, positive

# What imports torch or gradio is imported inside functions: --help and a wrong argument answer at once.

ROOT = Path(__file__).resolve().parent
DEFAULT_MODEL = ROOT / "checkpoints" / "ocelli-shapes"
FIRST_PORT, PORTS = 7860, 100
ATTEMPTS = 3  # to start the server
LAST_STEP = 1.0  # seconds to wait for the last step of an answer


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="app.py", description=__doc__)
    add = parser.add_argument
    # fmt: off
    add("--host", default=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"),
        help="address to listen on (default 127.0.0.1: this machine only; 0.0.0.0: all networks)")
    add("--port", type=int, default=os.environ.get("GRADIO_SERVER_PORT"),
        help=f"port to listen on (default: the first free one from {FIRST_PORT})")
    add("--allowed-host", action="append", default=[], metavar="NAME",
        help="another host name of the page, such as a proxy's; may be given several times")
    add("--model", action="append", dest="models", metavar="MODEL",
        help="folder or Hub repository; give it several times to let visitors choose (default: the embedded "
        "model)")
    add("--any-model", action=argparse.BooleanOptionalAction, default=False,
        help="let visitors name any repository on the Hub, which is then downloaded")
    add("--largest-model", type=positive, default=8, metavar="GB",
        help="size limit for --any-model, for a model's files and for its weights in memory; also the disk "
        "space to keep free (default 8)")
    add("--device", type=device, default="auto",
        help="auto (default: the best one on this machine), cpu, cuda or mps")
    add("--dtype", type=dtype, default="auto", choices=DTYPES,
        help="data type of the weights; auto (default): float32 on a CPU, bfloat16 on CUDA, elsewhere the "
        "checkpoint's own; int8 works on a CPU only")
    add("--share", action=argparse.BooleanOptionalAction, default=False,
        help="make the page public for a week, through Gradio's servers")
    add("--browser", action=argparse.BooleanOptionalAction, default=None,
        help="open the page in a browser (default: if you are at a terminal with a screen)")
    # fmt: on
    return parser


class StartError(Exception):
    """The page cannot be started; the message is one sentence."""


def free_port(host: str, port: int | None) -> int:
    """The port to listen on: `port`, or else the first free one. Raises StartError where there is none."""
    wanted = range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else [port]
    if not 0 < wanted[0] < 2**16:
        raise StartError(f"--port: expected 1 to 65535, got {port}")
    for number in wanted:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            return number
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise StartError(f"cannot listen on {host}, port {number}: {error}") from None
    taken = f"port {port} is" if port is not None else f"ports {FIRST_PORT} to {wanted[-1]} are"
    raise StartError(f"{taken} in use on {host}: give another --port")


def has_screen() -> bool:
    screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return screen and sys.stdout.isatty()


def start(settings: argparse.Namespace):
    """Open the first model, then the page: (page, its service, URL). Raises an error of USER_ERRORS, or
    StartError where there is no port."""
    names = settings.models or [str(DEFAULT_MODEL)]
    for name in names:  # a wrong name is refused before a model is loaded
        check_model(name, None)
    free_port(settings.host, settings.port)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    from web.models import Models
    from web.page import build, serve
    from web.service import Service

    largest = settings.largest_model * 10**9
    models = Models(names, settings.any_model, settings.device, settings.dtype, largest)
    with log_if_slow("app.py", models.default):
        first = models.open(models.default)
    service = Service(models)
    page = build(service, remember=not first.single_turn)
    browser = has_screen() if settings.browser is None else settings.browser
    for _ in range(ATTEMPTS):
        port = free_port(settings.host, settings.port)  # another page may have started meanwhile
        try:
            url = serve(page, service, settings.host, port, settings.share, browser, settings.allowed_host)
            return page, service, url
        except OSError as error:  # or start between that look and listening
            if error.errno not in (None, errno.EADDRINUSE):
                raise
    place = f"{settings.host}, port {port}"
    raise StartError(f"the server did not begin to listen on {place}: try again, or give another --port")


def run(settings: argparse.Namespace) -> int:
    # Uploads go into a folder of this process, and are deleted with it.
    with TemporaryDirectory(prefix="ocelli-page-", ignore_cleanup_errors=True) as uploads:
        os.environ["GRADIO_TEMP_DIR"] = uploads
        try:
            page, service, url = start(settings)
        except (StartError, ValueError, OSError) as error:  # what users get wrong are all ValueErrors
            note(f"error: {one_line(error)}")
            return 2
        from web.page import close

        note(f"{url} (press Ctrl-C to stop)")
        try:
            while True:
                time.sleep(3600)
        finally:
            service.close(LAST_STEP)
            close(page)


def note(text: str) -> None:
    print(f"app.py: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(build_parser().parse_args(arguments))
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does: uploads are taken along
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without waiting for a model that is being opened, or a long step
