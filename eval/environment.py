"""What a result was measured with: the model and its revision, versions, device and date."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from inference.checkpoint import Checkpoint
from models.checkpoints.load import meta_init

_ROOT = Path(__file__).resolve().parent.parent
_PIECES, _PIECE = 16, 64 * 1024  # pieces that are read of each file of weights, and their bytes


def describe_model(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name, revision and precision of a model; the revision is the Hub's commit, or a digest of the files."""
    origin = checkpoint.model.origin
    assert origin is not None, "a loaded model knows where it came from"
    with meta_init():  # a compiled step packs weights, which are no parameters then
        whole = type(checkpoint.model)(checkpoint.model.config)
    return {
        "name": Path(checkpoint.name).name if Path(checkpoint.name).exists() else checkpoint.name,
        "revision": origin.commit or files_digest(origin.folder),
        "dtype": checkpoint.dtype,
        "parameters": sum(parameter.numel() for parameter in whole.parameters()),
    }


def files_digest(folder: Path) -> str:
    """Tells a folder's weights and settings from others: SHA-256 over sizes and pieces of its files."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.jinja")]):
        if path.name == "results.json":  # figures of the model, not the model
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(size * piece // _PIECES)
                digest.update(file.read(_PIECE))
    return f"sha256:{digest.hexdigest()[:16]}"


def environment(checkpoint: Checkpoint, *more: str) -> dict[str, Any]:
    """Date, device, decode step and versions, those of the packages `more` among them."""
    device = checkpoint.model.device
    names = ("torch", "transformers", "tokenizers", "Pillow", "numpy", *more)
    versions = {"ocelli": _commit(), "python": platform.python_version()}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "decode_step": checkpoint.decode_step_name,
        "versions": versions | {name: version(name) for name in names},
    }


def _commit() -> str | None:
    """The commit of this repository; None in a copy without its history or without git."""
    if shutil.which("git") is None or not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
