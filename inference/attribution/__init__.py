"""Maps of where a checkpoint looked for an answer: its decoder's attention.

What can be set stands here, where importing it needs no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

SIGNATURE = "Ocelli: where did it look"  # in the PNGs, which may therefore be overwritten


def is_sheet(path: Path) -> bool:
    """True of a PNG of these maps."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(256)
    return head.startswith(b"\x89PNG") and SIGNATURE.encode() in head  # the text stands before the pixels


def sheet(name: str) -> Path:
    """The path of an image of ours that can be written. Raises ValueError."""
    path = Path(name)
    if path.suffix.lower() != ".png":
        raise ValueError(f"expected a name that ends in .png, got {name!r}")
    if os.path.lexists(path) and not is_sheet(path):
        raise ValueError(f"{name!r} exists and is not one that this program drew: choose another name")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"expected a folder that can be written to, got {str(path.parent)!r}")
    return path
