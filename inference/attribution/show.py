"""A question's maps as a PNG: what `generate.py --show-attention` does behind its answer."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from inference.attribution.attention import attention_maps, check_choice
from inference.attribution.drawing import draw_maps
from inference.attribution.occlusion import occlusion_maps
from inference.attribution.options import METHODS, SIGNATURE, WINDOW
from inference.attribution.words import answer_words
from inference.checkpoint import Checkpoint, RequestError


def where_sheet(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    answer_ids: Sequence[int],
    method: str | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    window: float | None = None,
    system: str | None = None,
    progress: bool = False,
) -> Image.Image:
    """The contact sheet of one answer, by "attention" (None) or "occlusion".

    Raises:
        RequestError: an answer without a word, and as `attention_maps` and `occlusion_maps` do.
    """
    if method not in (None, *METHODS):
        raise RequestError(f"method: expected {' or '.join(METHODS)}, got {method!r}")
    words = answer_words(checkpoint, answer_ids)
    if not words:
        raise RequestError("the answer has no word to draw a map for")
    if method == "occlusion":
        size = WINDOW if window is None else window
        found = occlusion_maps(checkpoint, images, question, answer_ids, size, system, progress)
        return draw_maps(found, words, question)
    read = attention_maps(checkpoint, images, question, answer_ids, layers, heads, system)
    return draw_maps(read, words, question)


def check_where(checkpoint: Checkpoint, settings: argparse.Namespace) -> None:
    """Raises RequestError where generate.py's options name layers or heads that the model does not have."""
    text = checkpoint.model.config.text
    check_choice("layers", settings.layers, text.num_hidden_layers)
    check_choice("heads", settings.heads, text.num_attention_heads)


def write_where(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    answer_ids: Sequence[int],
    settings: argparse.Namespace,
) -> None:
    """Write the sheet that generate.py's options ask for. Raises as `where_sheet` does, and OSError."""
    sheet = where_sheet(
        checkpoint,
        images,
        question,
        answer_ids,
        settings.method,
        settings.layers,
        settings.heads,
        settings.window,
        settings.system,
        progress=True,
    )
    write_sheet(sheet, settings.show_attention)


def write_sheet(sheet: Image.Image, path: Path) -> None:
    """Write a PNG that `--show-attention` knows again, whole or not at all. Raises OSError."""
    signed = PngInfo()
    signed.add_text("Software", SIGNATURE)
    try:
        handle, temporary = tempfile.mkstemp(suffix=".png", prefix=f".{path.stem}-", dir=path.parent)
    except OSError as error:  # which would name a file that nobody has asked for
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            sheet.save(file, "PNG", pnginfo=signed, optimize=True)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
