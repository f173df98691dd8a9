"""What tests of every room need: files of JSON, encoded images, commands that refuse, and a tiny model.

    edit_json(folder / "config.json", max_new_tokens=3)     # a setting of a checkpoint, changed
    rows = json_lines(out)                                  # what `batch` or a run wrote
    url = data_url(draw_image(40, 30))                      # an image as programs send it
    assert "--task" in sentence(train.main, ["--task", "?"], capsys)

Checkpoints are made by `tests.tiny` and `tests.*_checkpoints`, prompts by `tests.prompts`, rows by
`tests.rows`, training runs by `tests.runs`.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image


def json_lines(path: Path | str) -> list[Any]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of the object in a JSON file."""
    held = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(held | changes), encoding="utf-8")


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """An image as a file of a format, with the format's options as Pillow names them."""
    image.save(file := io.BytesIO(), format, **options)
    return file.getvalue()


def data_url(image: Image.Image | Path | bytes, kind: str = "image/png") -> str:
    """An image, or the content of a file, as a data URL."""
    if isinstance(image, Image.Image):
        image = encoded(image)
    raw = image if isinstance(image, bytes) else image.read_bytes()
    return f"data:{kind};base64," + base64.b64encode(raw).decode()


def sentence(main: Callable[[list[str]], int | None], arguments: Sequence[object], capsys) -> str:
    """The one sentence with which a command refuses its arguments, with status 2 and nothing on stdout."""
    capsys.readouterr()
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and "Traceback" not in err, err
    said = [line for line in err.splitlines() if ": error: " in line]
    assert len(said) == 1, err
    return said[0]
