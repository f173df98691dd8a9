"""The options of generate.py about where it looked. Nothing here needs torch: --help answers at once."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

METHODS = ("attention", "occlusion")
WINDOW = 0.33  # hides most things whole: what shows beside the window is not missed
LEAST_WINDOW = 0.02  # 10,000 windows
SIGNATURE = "Ocelli: where did it look"  # in the PNGs written, which may therefore be written again


def add_where_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where did it look")
    group.add_argument(
        "--show-attention",
        type=Path,
        metavar="OUT.png",
        help="write a heat map over the image for each word of the answer",
    )
    group.add_argument(
        "--method",
        choices=METHODS,
        help="attention (default): what the decoder read; occlusion: what the answer misses when greyed",
    )
    group.add_argument("--layers", type=_places, metavar="0,1,...", help="of attention; all by default")
    group.add_argument("--heads", type=_places, metavar="0,1,...", help="of attention; all by default")
    group.add_argument(
        "--window", type=float, metavar="SHARE", help="of occlusion: side of the grey window, a share of the "
        f"picture's longer side (default {WINDOW:g}); smaller is finer and slower",
    )  # fmt: skip


def mistake_about_where(settings: argparse.Namespace) -> str | None:
    """One sentence on what cannot be done as asked, or None."""
    out: Path | None = settings.show_attention
    given = [name for name in ("method", "layers", "heads", "window") if vars(settings)[name] is not None]
    if out is None:
        return f"--{given[0]} belongs to --show-attention OUT.png" if given else None
    if settings.chat or settings.batch is not None or len(settings.questions) > 1:
        several = "--batch" if settings.batch is not None else f"{len(settings.questions)} of them"
        got = "--chat" if settings.chat else several
        return f"--show-attention draws one question, got {got}"
    if settings.no_image:
        return "--show-attention needs an image to draw on: leave out --no-image"
    if settings.num_answers != 1:
        return f"--show-attention draws one answer, got --num-answers {settings.num_answers}"
    foreign = {"window"} if settings.method != "occlusion" else {"layers", "heads"}
    if wrong := foreign & set(given):
        owner = "occlusion" if settings.method != "occlusion" else "attention"
        return f"--{min(wrong)} belongs to --method {owner}"
    if settings.window is not None and not LEAST_WINDOW <= settings.window <= 1:
        return f"--window: expected a share from {LEAST_WINDOW:g} to 1, got {settings.window:g}"
    return _mistake_about_file(out)


def _mistake_about_file(out: Path) -> str | None:
    if out.suffix.lower() != ".png":
        return f"--show-attention: expected a name that ends in .png, got {str(out)!r}"
    if not out.parent.is_dir():
        return f"--show-attention: expected a folder that exists, got {str(out.parent)!r}"
    if not os.access(out.parent, os.W_OK):
        return f"--show-attention: the folder {str(out.parent)!r} cannot be written to"
    if out.exists() and not _is_ours(out):
        return f"--show-attention: {str(out)!r} exists and is none of these maps: choose another name"
    return None


def _is_ours(path: Path) -> bool:
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG",)) as image:
            return image.info.get("Software") == SIGNATURE
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # no PNG
        return False


def _places(text: str) -> list[int]:
    """ "0,3" → [0, 3]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 0,3, got {text!r}") from None
