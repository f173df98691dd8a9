"""Look into checkpoints without loading them, and convert them.

    python -m tools inspect checkpoints/ocelli-shapes --image 640x480
    python -m tools inspect HuggingFaceTB/SmolVLM-256M-Instruct     # reads headers, no weights
    python -m tools convert lusxvr/nanoVLM-450M nanovlm-hub         # for transformers and vLLM
    python -m tools convert checkpoints/ocelli-shapes runs/shapes-bf16 --dtype bfloat16
    python -m tools convert BASE merged --adapter runs/mine-lora/adapter

A conversion is written under another name, opened again (by transformers, too) and
put in its place only if its logits are the original's. Exit status: 0, or 2 with one sentence on what was
wrong, or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from pathlib import Path

from data.errors import ImageError, ProcessorError, PromptError
from data.images import ImageLimits, check_size
from inference.flags import (
    ADAPTER,
    MODEL,
    Parser,
    adapter,
    check_image_name,
    check_model,
    dtype,
    model,
    positive,
)
from inference.results import to_json
from messages import for_terminal, named, one_line
from models.checkpoints.files import CheckpointError
from models.checkpoints.folder import check_replaceable

_SIZE = re.compile(r"(\d{1,9})[xX](\d{1,9})")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m tools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect|convert")
    flag = argparse.BooleanOptionalAction

    what = "show what a checkpoint is and needs, from its configs and the headers of its weights"
    add = commands.add_parser("inspect", help=what, description=what).add_argument
    add("source", type=model, metavar="ID_OR_DIR", help=f"a model or a bare backbone: {MODEL}")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--image", metavar="WxH|FILE", help="count the tiles and tokens of an image of this size, too")
    asked = "question in the prompt that --image counts (default: %(default)s)"
    add("--question", default="What is in the picture?", help=asked)
    pixels = "with --image, of a model that takes images whole: pixels that it is made to fit (default: the "
    pixels += "checkpoint's own budget)"
    add("--max-pixels", type=partial(positive, least=1024), metavar="N", help=pixels)
    add("--json", action=flag, default=False, help="print one JSON object")

    what = "rewrite a checkpoint for transformers, in another dtype or with an adapter merged, and verify it"
    add = commands.add_parser("convert", help=what, description=what).add_argument
    add("source", type=model, metavar="SRC", help=MODEL)
    add("target", metavar="DST", type=Path, help="folder to make")
    add("--revision", help="branch, tag or commit on the Hub")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", type=dtype, choices=dtypes, help="dtype of the weights (default: the widest stored)")
    add("--adapter", metavar="FOLDER", type=adapter, help=f"{ADAPTER}; it is merged")
    replaced = "replace the checkpoint that DST holds and its card; other files in it stay"
    add("--overwrite", action=flag, default=False, help=replaced)
    return parser


def inspect(settings: argparse.Namespace) -> None:
    pixels: tuple[int, int] | None = None
    if match := _SIZE.fullmatch(settings.image or ""):
        pixels = (int(match[1]), int(match[2]))
        check_size(*pixels, ImageLimits(), f"an image of {settings.image}")
    elif settings.image is not None:
        check_image_name(settings.image)
    check_model(settings.source, settings.revision)
    from tools import inspect  # with PyTorch

    report = inspect.inspect(settings.source, settings.revision)
    if settings.image is not None:
        report["picture"] = inspect.inspect_image(
            report, pixels or settings.image, settings.question, settings.max_pixels
        )
    print(to_json(report) if settings.json else for_terminal(inspect.as_text(report)))


def convert(settings: argparse.Namespace) -> None:
    check_replaceable(settings.target, settings.overwrite)
    check_model(settings.source, settings.revision)
    from tools import convert  # with PyTorch

    convert.convert(**vars(settings), log=note)


def note(text: str) -> None:
    print(for_terminal(named(text)), file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    settings = build_parser().parse_args(arguments)
    command = {"inspect": inspect, "convert": convert}[vars(settings).pop("command")]
    try:
        command(settings)
    except (CheckpointError, ImageError, ProcessorError, PromptError, OSError, MemoryError) as error:
        note(f"python -m tools: error: {one_line(error)}")
        return 2
    except KeyboardInterrupt:
        note("\npython -m tools: interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
