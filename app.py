"""Ask vision-language models about images in a browser.

    python app.py                                             # the embedded model, http://127.0.0.1:7860
    python app.py --model smolvlm-256m --dtype int8
    python app.py --model checkpoints/ocelli-shapes --model runs/mine
    python app.py --any-model --host 0.0.0.0                  # all networks, any model of the Hub

It works without a network and sends nothing anywhere. Exit status: 0 after Ctrl-C or SIGTERM, 2 with one
sentence if it cannot start. It also runs as a Hugging Face Space: see the README's header.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import webbrowser
from pathlib import Path
from tempfile import TemporaryDirectory

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
from web.sockets import address, listen

# What imports torch or gradio is imported inside functions: --help and a wrong argument answer at once.

ROOT = Path(__file__).resolve().parent
DEFAULT_MODEL = ROOT / "checkpoints" / "ocelli-shapes"
FIRST_PORT, PORTS = 7860, 100
KEPT_BYTES, MOST_NEW_TOKENS = 384 * 2**20, 1_024  # of a model's prompts; of an answer


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
    add("--model", action="append", type=model, dest="models", metavar="MODEL",
        help=f"{MODEL}; give it several times to let visitors choose (default: the embedded model)")
    add("--any-model", action=argparse.BooleanOptionalAction, default=False,
        help="let visitors name any repository on the Hub, which is then downloaded")
    add("--largest-model", type=positive, default=8, metavar="GB",
        help="size limit for --any-model, for a model's files and for its weights in memory; also the disk "
        "space to keep free (default 8)")
    add("--device", type=device, default="auto",
        help="auto (default: the best one on this machine), cpu, cuda or mps")
    add("--dtype", type=dtype, default="auto", choices=DTYPES,
        help="data type of the weights; auto (default): float32 on a CPU, bfloat16 on CUDA, elsewhere the "
        "checkpoint's own; int8 and int4 work on a CPU and on CUDA")
    add_machine(add)
    add("--share", action=argparse.BooleanOptionalAction, default=False,
        help="make the page public for a week, through Gradio's servers")
    add("--browser", action=argparse.BooleanOptionalAction, default=None,
        help="open the page in a browser (default: if you are at a terminal with a screen)")
    # fmt: on
    return parser


def has_screen() -> bool:
    screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return screen and sys.stdout.isatty()


def start(settings: argparse.Namespace, host: str, port: int):
    """Open the first model and lay out the page: (its server, its URL)."""
    names = settings.models or [str(DEFAULT_MODEL)]
    for name in names:  # a wrong name is refused before a model is loaded
        check_model(name, None)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    from web import engine, guard, models, page, service

    largest = settings.largest_model * 10**9
    opened = models.Models(names, settings.any_model, largest_guest=largest, **machine(settings))
    with log_if_slow("app.py", opened.default):
        first = opened.open(opened.default)
    space = os.environ.get("SPACE_HOST")  # a Space of Hugging Face is asked by its own name
    hosts = guard.Hosts(host, [*settings.allowed_host, *([space] if space else [])])
    limits = engine.EngineLimits(prefix_bytes=KEPT_BYTES, max_new_tokens=MOST_NEW_TOKENS)
    visitors = service.Service(engine.Engine(opened, limits))
    server = page.Server(visitors, hosts, remember=not first.single_turn)
    return server, server.share(host, port) if settings.share else address(host, port)


def run(settings: argparse.Namespace) -> int:
    # Uploads go into a folder of this process, and are deleted with it.
    with TemporaryDirectory(prefix="ocelli-page-", ignore_cleanup_errors=True) as uploads:
        os.environ["GRADIO_TEMP_DIR"] = uploads
        try:
            ports = (FIRST_PORT, FIRST_PORT + PORTS - 1) if settings.port is None else (settings.port,)
            listening = listen(settings.host, *ports)
            server, url = start(settings, settings.host, listening.getsockname()[1])
        except (ValueError, OSError) as error:  # what users get wrong are all ValueErrors
            note(f"error: {one_line(error)}")
            return 2
        note(f"{url} (press Ctrl-C to stop)")
        if has_screen() if settings.browser is None else settings.browser:
            webbrowser.open(url)
        server.run([listening])
    return 0


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
