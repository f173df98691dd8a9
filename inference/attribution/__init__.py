"""Where a checkpoint looked for an answer: by its decoder's attention, or by what it misses when greyed.

What can be set stands here, where importing it needs no torch.
"""

from __future__ import annotations

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
