"""Where a checkpoint looked for an answer: by its decoder's attention, or by what it misses when greyed.

What can be set stands here, where importing it needs no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

METHODS = ("attention", "occlusion")
SIGNATURE = "Ocelli: where did it look"  # in the PNGs, which may therefore be overwritten


def is_sheet(path: Path) -> bool:
    """Whether a file is a PNG of these maps."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(256)
    return head.startswith(b"\x89PNG") and SIGNATURE.encode() in head  # the text stands before the pixels


def wrong_sheet(sheet: Path) -> str | None:
    """Why an image of ours cannot be written there, or None."""
    if sheet.suffix.lower() != ".png":
        return f"expected a name that ends in .png, got {str(sheet)!r}"
    if os.path.lexists(sheet) and not is_sheet(sheet):
        return f"{str(sheet)!r} exists and is not one that this program drew: choose another name"
    if not os.access(sheet.parent, os.W_OK | os.X_OK):
        return f"expected a folder that can be written to, got {str(sheet.parent)!r}"
    return None
