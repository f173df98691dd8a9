"""Ask vision-language models about images in the browser.

    python app.py                                             # the embedded model, http://127.0.0.1:7860
    python app.py --model HuggingFaceTB/SmolVLM-256M-Instruct --dtype int8
    python app.py --model checkpoints/ocelli-shapes --model runs/mine
    python app.py --any-model --host 0.0.0.0                  # anybody here, any model of the Hub

Works without a network; nothing is sent anywhere. Exit status: 0 after Ctrl-C or SIGTERM, or 2 with one
sentence on what was wrong. As a Hugging Face Space it runs as it is: the README's header says how.
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

# Everything that imports torch or gradio is imported inside functions: --help and a mistake answer at once.

ROOT = Path(__file__).resolve().parent
DEFAULT_MODEL = ROOT / "checkpoints" / "ocelli-shapes"
FIRST_PORT, PORTS = 7860, 100
ATTEMPTS = 3  # to begin the server
LAST_STEP = 1.0  # seconds that the step of an answer may take in the end


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="app.py", description=__doc__)
    add = parser.add_argument
    add("--host", default=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"),
        help="address to listen on (default 127.0.0.1: nobody else; 0.0.0.0: all networks)")  # fmt: skip
    add("--port", type=int, default=os.environ.get("GRADIO_SERVER_PORT"),
        help=f"default: the first free one from {FIRST_PORT} on")  # fmt: skip
    add("--allowed-host", action="append", default=[], metavar="NAME",
        help="a name of the page besides those of this machine, such as a proxy's; may be given several "
        "times")  # fmt: skip
    add("--model", action="append", dest="models", metavar="MODEL",
        help="folder, or repository on the Hub; may be given several times, to choose from (default: the "
        "embedded model)")  # fmt: skip
    add("--any-model", action=argparse.BooleanOptionalAction, default=False,
        help="visitors may name any repository on the Hub, which is then downloaded")  # fmt: skip
    add("--largest-model", type=positive, default=8, metavar="GB",
        help="with --any-model: of files that are downloaded for a visitor, of their weights in memory, and "
        "kept free on the disk (default 8)")  # fmt: skip
    add("--device", type=device, default="auto", help="auto (default: the best one here), cpu, cuda, mps")
    add("--dtype", type=dtype, default="auto", choices=DTYPES,
        help="of the weights; auto (default): float32 on a CPU, bfloat16 on CUDA, elsewhere the checkpoint's "
        "own; int8 on a CPU only")  # fmt: skip
    add("--share", action=argparse.BooleanOptionalAction, default=False,
        help="a public address for a week, through Gradio's servers")  # fmt: skip
    add("--browser", action=argparse.BooleanOptionalAction, default=None,
        help="open one on the page (default: where a person at a terminal has a screen)")  # fmt: skip
    return parser


class StartError(Exception):
    """The page cannot be started; the message is one sentence."""


def free_port(host: str, port: int | None) -> int:
    """The port to listen on: the one that was asked for, or else the first that is free.

    Raises:
        StartError: there is none, or no such address on this machine.
    """
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
    """Whether a browser may be opened without being in anybody's way."""
    screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return screen and sys.stdout.isatty()


def start(settings: argparse.Namespace):
    """Open the first model, then the page: (page, its thread of the models, URL).

    Raises:
        StartError: no port.
        CheckpointError, ProcessorError, RequestError: the model cannot be opened.
    """
    names = settings.models or [str(DEFAULT_MODEL)]
    for name in names:  # what is wrong is said before seconds go into a model
        check_model(name, None)
    free_port(settings.host, settings.port)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    from web.asking import Desk
    from web.limits import PageLimits
    from web.model_thread import ModelThread
    from web.models import Models
    from web.page import build, serve
    from web.visitors import Visitors

    visitors = Visitors()
    models = Models(
        names,
        settings.any_model,
        settings.device,
        settings.dtype,
        closed=visitors.close_model,
        largest_guest=settings.largest_model * 10**9,
    )
    with log_if_slow("app.py", models.default):
        first = models.open(models.default)
    thread = ModelThread()
    desk = Desk(models, thread, visitors, PageLimits())
    page = build(desk, remember=not first.single_turn)
    browser = has_screen() if settings.browser is None else settings.browser
    try:
        for _ in range(ATTEMPTS):
            port = free_port(settings.host, settings.port)  # another page may have begun meanwhile
            try:
                url = serve(page, desk, settings.host, port, settings.share, browser, settings.allowed_host)
                return page, thread, url
            except OSError as error:  # or begin in the blink between looking and listening
                if error.errno not in (None, errno.EADDRINUSE):
                    raise
        place = f"{settings.host}, port {port}"
        raise StartError(f"the server did not begin to listen on {place}: try again, or give another --port")
    except BaseException:
        thread.close()
        raise


def run(settings: argparse.Namespace) -> int:
    # Uploads, which nobody else's Gradio shares, and which go with this process.
    with TemporaryDirectory(prefix="ocelli-page-", ignore_cleanup_errors=True) as uploads:
        os.environ["GRADIO_TEMP_DIR"] = uploads
        return serve_until_interrupted(settings)


def serve_until_interrupted(settings: argparse.Namespace) -> int:
    try:
        page, thread, url = start(settings)
    except Exception as error:
        # Of what people get wrong the names are known once torch is there, and without it nothing was opened.
        if not isinstance(error, StartError | ValueError | OSError):
            raise
        note(f"error: {one_line(error)}")
        return 2
    from web.page import close

    note(f"{url} (Ctrl-C ends it)")
    try:
        while True:
            time.sleep(3600)
    finally:
        thread.close(LAST_STEP)
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
