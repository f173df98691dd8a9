"""How many of our files run between a user's input and what comes of it.

    python -m tests.walks             # each walk: its files, their lines, and its classes
    python -m tests.walks --json      # the files and the classes of each

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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NOT_OURS = ("tests", ".venv")


class Seen(NamedTuple):
    """The files of ours of which a function runs, and the classes that are made or of which a method runs."""

    files: set[str]
    classes: set[str]


@contextlib.contextmanager
def recorded() -> Iterator[Seen]:
    """What runs inside, on any thread. Filled when the block ends."""
    files: set[str] = set()
    classes: set[type] = set()
    importing = threading.local()  # how many module bodies are on this thread's stack

    def note(frame, event: str, _) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            importing.depth = getattr(importing, "depth", 0) + {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not getattr(importing, "depth", 0) and code.co_flags & inspect.CO_OPTIMIZED:
            files.add(code.co_filename)
            # The constructors that dataclasses and named tuples write have no file.
            ours = code.co_filename == "<string>" or code.co_filename.startswith(f"{ROOT}{os.sep}")
            if ours and code.co_varnames[:1] in (("self",), ("cls",), ("_cls",)):
                owner = frame.f_locals.get(code.co_varnames[0])
                classes.add(owner if isinstance(owner, type) else type(owner))

    threading.setprofile(note)
    sys.setprofile(note)
    seen = Seen(set(), set())
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        seen.files.update(filter(None, map(place_in_repository, files)))
        for one in classes:
            file = getattr(sys.modules.get(one.__module__), "__file__", None)
            if file and place_in_repository(file):
                seen.classes.add(one.__qualname__)


def place_in_repository(name: str) -> str:
    """A file's path in it; "" if it is not one of ours."""
    if not name.startswith(f"{ROOT}{os.sep}"):
        return ""
    path = Path(name).relative_to(ROOT)
    return "" if path.parts[0] in NOT_OURS else path.as_posix()


def answer(folder: Path) -> Seen:
    """A question about an image file to an open checkpoint until its answer, in plain PyTorch: what README
    tells to read, and the concepts of CONTRIBUTING.md."""
    from generation.options import GenerationOptions
    from inference.answer import ask
    from inference.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(ROOT / "checkpoints" / "ocelli-shapes", device="cpu")
    options = GenerationOptions(max_new_tokens=8, lookup="off")
    with recorded() as seen:
        reply = ask(checkpoint, [ROOT / "assets" / "example.png"], "What colour is the star?", options)
        assert reply.finish()["answers"]
    return seen


def generate_py(*more: str) -> Seen:
    """generate.py: an image file and a question, until the answer stands on stdout."""
    import generate

    image, shown = ROOT / "assets" / "example.png", io.StringIO()
    with recorded() as seen, contextlib.redirect_stdout(shown):
        assert generate.main([str(image), "-q", "How many objects are there?", *more]) == 0
    assert shown.getvalue().strip()
    return seen


def plain_question(folder: Path) -> Seen:
    """From the shell to the answer, as `answer` makes it."""
    return generate_py("--compile", "off", "--lookup", "off")


def question(folder: Path) -> Seen:
    """As generate.py answers by itself: with the compiled step and looked-up tokens, by a session."""
    return generate_py()


def training_row(folder: Path) -> Seen:
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
    with recorded() as seen:
        loader = Loader(open_datasets([{"path": str(folder / "rows.jsonl")}]), processor, config)
        loss, _ = RowsLoss(model, blank=True)(**next(iter(loader)).to(model.device))
    assert loss.item() > 0
    return seen


def hub_checkpoint(folder: Path) -> Seen:
    """A repository on the Hub, until its model."""
    import pytest

    from models import VisionLanguageModel
    from tests.hub_server import HubServer, point_client_at

    repo = {"owner/name": ROOT / "checkpoints" / "ocelli-shapes"}
    with pytest.MonkeyPatch.context() as patch, HubServer(repo) as server:
        point_client_at(patch, server.url, folder / "cache")
        with recorded() as seen:
            VisionLanguageModel.from_pretrained("owner/name")
    return seen


# What a walk is, and how many lines its files may have. These numbers only fall.
WALKS: dict[str, tuple[Callable[[Path], Seen], int]] = {
    "answer": (answer, 4_950),
    "plain question": (plain_question, 7_652),
    "question": (question, 10_993),
    "training row": (training_row, 5_895),
    "Hub checkpoint": (hub_checkpoint, 2_669),
}


def main() -> None:
    found = {}
    for name, (walk, _) in WALKS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = walk(Path(folder))
    if "--json" in sys.argv[1:]:
        print(json.dumps({name: [sorted(part) for part in seen] for name, seen in found.items()}))
        return
    for name, seen in found.items():
        lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in seen.files)
        print(f"{name}: {len(seen.files)} files, {lines:,} of {WALKS[name][1]:,} lines")
        print("".join(f"    {file}\n" for file in sorted(seen.files)), end="")
        print(f"    {len(seen.classes)} classes: {', '.join(sorted(seen.classes))}")


if __name__ == "__main__":
    main()
