"""Checkpoints that were made to do harm, each as a change to a good one; and a process that opens them.

    python -m tests.robustness.hostile_checkpoints FOLDER...     # one line of JSON for each
    python -m tests.robustness.hostile_checkpoints --processor GOOD FOLDER...     # as processors, GOOD first

The process may take 256 MiB more than it has once everything is imported, and five seconds for each; for
processors, twice as much more than for a good one, and five seconds of processor time.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MEMORY, SECONDS = 256 * 2**20, 5

Change = Callable[[Path], object]
NUMBERS = {
    "1e9": "1000000000",
    "5000 digits": "9" * 5000,
    "negative": "-1",
    "NaN": "NaN",
    "float": "2.5",
    "text": '"' + "x" * 100_000 + '"',
    "nested": "[" * 100_000 + "]" * 100_000,
}
FIELDS = (
    "text_config.num_hidden_layers", "text_config.vocab_size", "text_config.head_dim",
    "vision_config.image_size", "vision_config.patch_size", "scale_factor", "image_token_id",
)  # fmt: skip


def with_number(path: str, text: str) -> Change:
    """config.json with a field of it replaced by this JSON text."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        section, _, key = path.rpartition(".")
        (config[section] if section else config)[key] = "@"
        (folder / "config.json").write_text(json.dumps(config).replace('"@"', text))

    return change


def with_file(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def header_of(folder: Path) -> tuple[dict, bytes]:
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_weights(folder: Path, header: bytes, data: bytes = b"") -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data)


def with_header(change_header: Callable[[dict], object], more: bytes = b"") -> Change:
    """The weights with another header, which `change_header` edits in place, and `more` data at the end."""

    def change(folder: Path) -> None:
        header, data = header_of(folder)
        change_header(header)
        write_weights(folder, json.dumps(header).encode(), data + more)

    return change


def head(**changes: object) -> Change:
    return with_header(lambda header: header["lm_head.weight"].update(changes))


def overlap(header: dict) -> None:
    """Two tensors in the bytes of one: what one program checks, another overwrites."""
    names = [name for name, entry in header.items() if entry.get("shape") == [48]]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]


def hole(header: dict) -> None:
    last = max((e for n, e in header.items() if n != "__metadata__"), key=lambda e: e["data_offsets"][1])
    last["data_offsets"] = [offset + 400 for offset in last["data_offsets"]]


def second_shape(folder: Path) -> None:
    """One name twice in a header, as two tensors."""
    header, data = header_of(folder)
    other = b', "lm_head.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    write_weights(folder, json.dumps(header).encode()[:-1] + other, data)


def larger_than_memory(folder: Path) -> None:
    """A vocabulary that config and header agree on, in a file that takes no place on the disk."""
    words = 3_000_000  # times 48 numbers of 4 bytes: 576 MB
    with_number("text_config.vocab_size", str(words))(folder)
    header, _ = header_of(folder)
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                entry["shape"][0] = words
            begin, end = end, end + 4 * math.prod(entry["shape"])
            entry["data_offsets"] = [begin, end]
    write_weights(folder, json.dumps(header).encode())
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + end)


def index_of(shard: str) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder.parent / "secret.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))

    return change


def linked(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / f"moved-{folder.name}")
        (folder / name).symlink_to(target.format(moved=folder.parent / f"moved-{folder.name}"))

    return change


def fifo(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


DIGITS = b",".join([b"9" * 4000] * 500)

# Values that no model has, and what the refusal must name.
VALUES: tuple[tuple[str, object, str], ...] = (
    ("model_type", "qwen2_vl", "model_type"),
    ("text_config.model_type", "mamba", "mamba"),
    ("text_config.hidden_size", 10**12, "hidden_size"),
    ("text_config.num_hidden_layers", 3, "9 of 68 tensors"),
    ("text_config.hidden_act", "relu", "hidden_act"),
    ("text_config.rope_parameters", {"rope_type": "yarn"}, "yarn"),
    ("text_config.rope_parameters", {"rope_type": "llama3"}, "low_freq_factor"),
    ("text_config.rope_parameters", 3, "rope_parameters"),
    ("text_config.rope_parameters", {"rope_theta": "x"}, "rope_theta"),
    ("text_config.partial_rotary_factor", 0.5, "partial_rotary_factor"),
    ("vision_config.image_size", [32, 48], "image_size"),
    ("vision_config", [1], "vision_config"),
    ("eos_token_id", "stop", "token id"),
    ("quantization_config", {"bits": 4}, "quantized"),
    ("dtype", "int4", "int4"),
)
TENSORS: dict[str, torch.Tensor | None] = {  # None: it is missing
    "model.text_model.layers.1.mlp.up_proj.weight": None,
    "model.text_model.layers.0.mlp.gate_proj.lora_A": torch.ones(2, 3),
    "model.text_model.norm.weight": torch.ones(47),
    "lm_head.weight": torch.ones(160, 48, dtype=torch.int8),
}
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda raw: raw[: len(raw) // 2],
    "all but a little": lambda raw: raw[: int(len(raw) * 0.999)],
    "none": lambda raw: b"",
    "zeros": lambda raw: bytes(100),
    "a header longer than the file": lambda raw: struct.pack("<Q", 10**9) + raw[8:],
    "more": lambda raw: raw + b"more",
}


def with_tensor(name: str, value: torch.Tensor | None) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors.pop(name, None)
        own = {} if value is None else {name: value}
        save_file(tensors | own, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def with_bytes(edit: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / WEIGHTS).write_bytes(edit((folder / WEIGHTS).read_bytes()))


# What some of the cases must be refused for.
NAMED = {f"{path}: {value}": named for path, value, named in VALUES}
NAMED |= {f"tensor {name}": name for name in TENSORS} | {f"bytes: {kind}": WEIGHTS for kind in BYTES}
NAMED["tensor lm_head.weight"] = "I8"
CASES: dict[str, Change] = {
    **{f"{path} {kind}": with_number(path, text) for path in FIELDS for kind, text in NUMBERS.items()},
    **{f"{path}: {value}": with_number(path, json.dumps(value)) for path, value, _ in VALUES},
    **{f"tensor {name}": with_tensor(name, value) for name, value in TENSORS.items()},
    **{f"bytes: {kind}": with_bytes(edit) for kind, edit in BYTES.items()},
    "1024 layers": with_number("text_config.num_hidden_layers", "1024"),
    "config of brackets": with_file("config.json", b"[" * 3_000_000),
    "config a pipe": fifo,
    "header 2**60": with_file(WEIGHTS, struct.pack("<Q", 2**60) + bytes(100)),
    "header of brackets": with_file(WEIGHTS, struct.pack("<Q", 20_000_000) + b"[" * 20_000_000),
    "header of huge numbers": lambda folder: write_weights(
        folder, b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":[' + DIGITS + b"]}}"
    ),
    "a tensor of 10 TB": head(shape=[2_500_000, 1_000_000], data_offsets=[0, 10**13]),
    "a file of 10 TB": lambda folder: os.truncate(folder / WEIGHTS, 10 * 2**40),
    "offsets beyond 2**63": head(data_offsets=[2**63, 2**63 + 30720]),
    "shape of a thousand axes": head(shape=[1] * 1000 + [160, 48]),
    "dtype of a million letters": head(dtype="F" * 1_000_000),
    "two tensors in one place": with_header(overlap),
    "bytes of no tensor": with_header(hole, bytes(400)),
    "a tensor twice": second_shape,
    "index to the parent": index_of("../secret.safetensors"),
    "index with a long name": index_of("x" * 5000 + ".safetensors"),
    "config linked away": linked("config.json", "/etc/passwd"),
    "weights linked away": linked(WEIGHTS, "{moved}"),
    "weights linked to themselves": linked(WEIGHTS, WEIGHTS),
}


def asks_for(tokenizer_class: str) -> Change:
    return with_file("tokenizer_config.json", json.dumps({"tokenizer_class": tokenizer_class}).encode())


PROCESSOR_CASES: dict[str, Change] = {
    "chat_template.json of brackets": with_file("chat_template.json", b"[" * 3_000_000),
    "half a tokenizer.json": lambda folder: os.truncate(
        folder / "tokenizer.json", (folder / "tokenizer.json").stat().st_size // 2
    ),
    "half a tokenizer_config.json": lambda folder: os.truncate(folder / "tokenizer_config.json", 20),
    "a processor as the tokenizer": asks_for("Idefics3Processor"),
    "pipeline as the tokenizer": asks_for("pipeline"),
}


class Hang(BaseException):
    """The seconds are over; no `except Exception` or `except OSError` makes a refusal of it."""


def _hang(*_: object) -> None:
    raise Hang


def main(arguments: list[str]) -> None:
    if arguments[0] == "--processor":
        from data.processor import Processor

        opens = Processor.from_pretrained
        _judge(opens, arguments[1:2], 2**40, signal.ITIMER_PROF)  # transformers imports late
        _judge(opens, arguments[2:], 2 * MEMORY, signal.ITIMER_PROF)
    else:
        from models import VisionLanguageModel

        _judge(VisionLanguageModel.from_pretrained, arguments, MEMORY, signal.ITIMER_REAL)


def _judge(opens: Callable[[str], object], folders: list[str], memory: int, timer: int) -> None:
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + memory, resource.RLIM_INFINITY))
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _hang)
    for folder in folders:
        signal.setitimer(timer, SECONDS)
        try:
            opens(folder)
            kind, text = "loaded", ""
        except (Exception, Hang) as error:  # whatever comes is the result
            kind, text = type(error).__name__, str(error)
        signal.setitimer(timer, 0)
        print(json.dumps([kind, text]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
