"""What can be set about attribution maps, and how their files are known again. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path

METHODS = ("attention", "occlusion")
WINDOW = 0.33  # hides most objects whole: what shows beside a smaller window is not missed
MIN_WINDOW = 0.02  # 10,000 windows
SIGNATURE = "Ocelli: where did it look"  # in the PNGs, which may therefore be overwritten


def is_sheet(path: Path) -> bool:
    """Whether a file is a PNG of these maps."""
    with path.open("rb") as file:
        head = file.read(256)
    return head.startswith(b"\x89PNG") and SIGNATURE.encode() in head  # the text stands before the pixels
