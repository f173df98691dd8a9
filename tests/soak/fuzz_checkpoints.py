"""Checkpoints with damaged files, through `from_pretrained`, `from_backbones` and `Processor`.

An input names a kind of checkpoint and, for some of its files, other contents. JSON is changed as JSON, in
the header of a safetensors file too, whose length is then right again; and everything as bytes. A model that
is taken, and that transformers' layout can say, must be the same when it has been saved and loaded.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from data.errors import ProcessorError, PromptError
from data.processor import Processor
from models.checkpoints import CheckpointError
from models.checkpoints.save import written
from models.vision_language_model import VisionLanguageModel
from tests.soak.changes import ODD_VALUES, mutate_bytes, mutate_json
from tests.soak.fuzz import Wrong

REFUSALS = (CheckpointError, ProcessorError, PromptError)
# Strings that mean something to a checkpoint's readers.
WORDS = (
    "idefics3", "smolvlm", "llama", "linear", "llama3", "default", "yarn", "float16", "int8", "torch.float32",
    "F32", "F64", "BF16", "I64", "BOOL", "F8_E4M3", "../model.safetensors", "/etc/passwd", "a.safetensors",
    "model.safetensors", "auto", "Qwen2Tokenizer", "custom.py", "{{ 1/0 }}",
    "{% for x in range(9**9) %}{% endfor %}",
)  # fmt: skip
READERS = ("config.json", "generation_config.json", "model.safetensors.index.json")
TOKENIZERS = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "chat_template.jinja", *TOKENIZERS)

Input = tuple[str, str, tuple[tuple[str, bytes | None], ...]]  # kind of checkpoint, what opens it, files


@cache
def checkpoints() -> dict[str, dict[str, bytes]]:
    """The files of each kind of checkpoint."""
    from tests.tiny_files import write_all

    with tempfile.TemporaryDirectory() as folder:
        return {
            kind: {
                str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()
            }
            for kind, place in write_all(Path(folder)).items()
        }


def make(rng: random.Random) -> Input:
    kind = rng.choice(("single", "single", "single", "shards", "nanovlm", "vision", "text"))
    files = checkpoints()[kind]
    opener = "backbones" if kind in ("vision", "text") else "processor" if rng.random() < 0.12 else "model"
    names = [
        name
        for name in files
        if Path(name).name in (PROCESSORS if opener == "processor" else (*READERS, *TOKENIZERS))
        or (opener != "processor" and name.endswith(".safetensors"))
    ]
    chosen = rng.sample(names, min(len(names), rng.choice((1, 1, 1, 2))))
    return kind, opener, tuple((name, change(rng, name, files[name])) for name in chosen)


def change(rng: random.Random, name: str, data: bytes) -> bytes | None:
    """Other contents for a file; None where it is to be missing."""
    kind = rng.random()
    if kind < 0.03:
        return None
    if kind < 0.05:
        return rng.choice((b"", b"null", b"[]", b"{}", b"[" * 3000 + b"]" * 3000, rng.randbytes(40)))
    if kind < 0.25 or name.endswith(".jinja"):
        return mutate_bytes(rng, data)
    odd = (*ODD_VALUES, *WORDS)
    if name.endswith(".json"):
        return dumped(mutate_json(rng, json.loads(data), odd))
    length = int.from_bytes(data[:8], "little")
    header = mutate_json(rng, json.loads(data[8 : 8 + length]), odd)
    raw = dumped(header)
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def opened(folder: Path):
    os.environ["HF_HUB_OFFLINE"] = "1"
    for kind, files in checkpoints().items():
        for name, data in files.items():
            (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / kind / name).write_bytes(data)

    def run(value: Input) -> str:
        kind, opener, files = value
        place = folder / kind
        try:
            for name, data in files:
                (place / name).unlink(missing_ok=True)
                if data is not None:
                    (place / name).write_bytes(data)
            take(folder, place, opener)
            return f"{kind} {opener}"
        finally:
            for name, _ in files:
                (place / name).write_bytes(checkpoints()[kind][name])

    return run


def take(folder: Path, place: Path, opener: str) -> None:
    if opener == "processor":
        processor = Processor.from_pretrained(place)
        processor.ask(None, "how many?")
    elif opener == "backbones":
        check(VisionLanguageModel.from_backbones(folder / "vision", folder / "text", scale_factor=1), folder)
    else:
        check(VisionLanguageModel.from_pretrained(place), folder)


def check(model: VisionLanguageModel, folder: Path) -> None:
    """Raises Wrong where a model that was taken does not come back as it was saved. Without a first token, it
    comes back with the layout's own."""
    try:
        written(model.config)
    except CheckpointError:
        return
    try:
        again = VisionLanguageModel.from_pretrained(model.save_pretrained(folder / "saved"))
    except REFUSALS as error:
        raise Wrong(f"taken, but not saved and loaded: {error}") from error
    first = again.config.bos_token_id if model.config.bos_token_id is None else model.config.bos_token_id
    if again.config != replace(model.config, bos_token_id=first):
        raise Wrong(f"saved as another config: {again.config} after {model.config}")
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    if ours.keys() != theirs.keys() or not all(same(ours[name], theirs[name]) for name in ours):
        raise Wrong("saved as other tensors")


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    equal = first.shape == second.shape and first.dtype == second.dtype
    return equal and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
