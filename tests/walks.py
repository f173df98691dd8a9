"""How many of our files run between a user's input and what comes of it.

    python -m tests.walks             # the three walks: their numbers of files, and the files
    python -m tests.walks --json      # the files of each

A file counts where one of its functions runs; what importing a module runs does not.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_OURS = ("tests", ".venv")


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """The files whose functions run inside, on any thread, relative to the repository."""
    files: set[str] = set()
    importing = threading.local()  # how many module bodies are on this thread's stack

    def note(frame, event: str, _) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            importing.depth = getattr(importing, "depth", 0) + {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not getattr(importing, "depth", 0) and code.co_flags & inspect.CO_OPTIMIZED:
            files.add(code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    ours: set[str] = set()
    try:
        yield ours
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        for name in files:
            if name.startswith(f"{ROOT}{os.sep}"):
                path = Path(name).relative_to(ROOT)
                if path.parts[0] not in NOT_OURS:
                    ours.add(path.as_posix())


def question(folder: Path) -> set[str]:
    """generate.py: an image file and a question, until the answer stands on stdout."""
    import generate

    image, answer = ROOT / "assets" / "example.png", io.StringIO()
    with recorded() as files, contextlib.redirect_stdout(answer):
        assert generate.main([str(image), "-q", "How many objects are there?"]) == 0
    assert answer.getvalue().strip()
    return files


def training_row(folder: Path) -> set[str]:
    """A line of a JSONL file with an image beside it, until its loss."""
    import shutil

    from data.loader import Loader, LoaderConfig
    from data.processor import Processor
    from data.sources import open_datasets
    from models import VisionLanguageModel
    from training.rows import RowsLoss

    checkpoint = ROOT / "checkpoints" / "ocelli-shapes"
    model, processor = VisionLanguageModel.from_pretrained(checkpoint), Processor.from_pretrained(checkpoint)
    shutil.copy(ROOT / "assets" / "example.png", folder / "image.png")
    line = {"image": "image.png", "question": "What is there?", "answer": "A circle."}
    (folder / "rows.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    config = LoaderConfig(batch_size=1, sequence_length=512, epochs=1)
    with recorded() as files:
        loader = Loader(open_datasets([{"path": str(folder / "rows.jsonl")}]), processor, config)
        loss, _ = RowsLoss(model, blank=True)(**next(iter(loader)).to(model.device))
    assert loss.item() > 0
    return files


def hub_checkpoint(folder: Path) -> set[str]:
    """A repository on the Hub, until its model."""
    import pytest

    from models import VisionLanguageModel
    from tests.hub_server import HubServer, point_client_at

    repo = {"owner/name": ROOT / "checkpoints" / "ocelli-shapes"}
    with pytest.MonkeyPatch.context() as patch, HubServer(repo) as server:
        point_client_at(patch, server.url, folder / "cache")
        with recorded() as files:
            VisionLanguageModel.from_pretrained("owner/name")
    return files


# What a walk is, and how many files it may take.
WALKS: dict[str, tuple[Callable[[Path], set[str]], int]] = {
    "question": (question, 28),
    "training row": (training_row, 18),
    "Hub checkpoint": (hub_checkpoint, 9),
}


def main() -> None:
    files_of = {}
    for name, (walk, _) in WALKS.items():
        with tempfile.TemporaryDirectory() as folder:
            files_of[name] = sorted(walk(Path(folder)))
    if "--json" in sys.argv[1:]:
        print(json.dumps(files_of))
        return
    for name, files in files_of.items():
        most = WALKS[name][1]
        lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{name}: {len(files)} files (at most {most}), {lines:,} lines")
        print("".join(f"    {file}\n" for file in files), end="")


if __name__ == "__main__":
    main()
