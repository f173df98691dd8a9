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

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGE = b'{"x": [' + b"{}," * 5_000_000 + b"1]}"
MEMORY, SECONDS = 256 * 2**20, 5

Change = Callable[[Path], object]
NUMBERS = {
    "1e9": "1000000000",
    "5000 digits": "9" * 5000,
    "negative": "-1",
    "NaN": "NaN",
    "1e400": "1e400",
    "float": "2.5",
    "true": "true",
    "text": '"' + "x" * 100_000 + '"',
    "list": "[" + "1," * 100_000 + "1]",
    "nested": "[" * 100_000 + "]" * 100_000,
}
FIELDS = (
    "text_config.num_hidden_layers", "text_config.hidden_size", "text_config.vocab_size",
    "text_config.head_dim", "text_config.num_key_value_heads", "vision_config.image_size",
    "vision_config.patch_size", "scale_factor", "image_token_id",
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


def with_header(change_header: Callable[[dict], object], more: bytes = b"") -> Change:
    """The weights with another header, which `change_header` edits in place, and `more` data at the end."""

    def change(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change_header(header)
        write_weights(folder, json.dumps(header).encode(), raw[8 + length :] + more)

    return change


def head(**changes: object) -> Change:
    return with_header(lambda header: header["lm_head.weight"].update(changes))


def write_weights(folder: Path, header: bytes, data: bytes = b"") -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data)


def overlap(header: dict) -> None:
    """Two tensors in the bytes of one: what one program checks, another overwrites."""
    names = [name for name, entry in header.items() if entry.get("shape") == [48]]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]


def hole(header: dict) -> None:
    last = max((e for n, e in header.items() if n != "__metadata__"), key=lambda e: e["data_offsets"][1])
    last["data_offsets"] = [offset + 400 for offset in last["data_offsets"]]


def second_shape(folder: Path) -> None:
    """One name twice in a header, as two tensors."""
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    other = b', "lm_head.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    write_weights(folder, raw[8 : 8 + length].rstrip()[:-1] + other, raw[8 + length :])


def sparse(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(10 * 2**40)


def larger_than_memory(folder: Path) -> None:
    """A vocabulary that config and header agree on, in a file that takes no place on the disk."""
    words = 3_000_000  # times 48 numbers of 4 bytes: 576 MB
    with_number("text_config.vocab_size", str(words))(folder)
    raw = (folder / WEIGHTS).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                entry["shape"][0] = words
            begin, end = end, end + 4 * math.prod(entry["shape"])
            entry["data_offsets"] = [begin, end]
    write_weights(folder, json.dumps(header).encode())
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) + end)


def many_tensors(folder: Path) -> None:
    entries = (b'"a%d":{"dtype":"F32","shape":[],"data_offsets":[0,4]}' % i for i in range(200_000))
    write_weights(folder, b"{" + b",".join(entries) + b"}", bytes(4))


def index_of(shard: object) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder.parent / "secret.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))

    return change


def linked(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        if (folder / name).is_file():
            (folder / name).rename(folder.parent / f"moved-{folder.name}")
        (folder / name).symlink_to(target.format(moved=folder.parent / f"moved-{folder.name}"))

    return change


def twice(folder: Path) -> None:
    text = (folder / "config.json").read_text().rstrip()
    (folder / "config.json").write_text(text[:-1] + ', "scale_factor": 1}')


def fifo(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _list(count: int, of: bytes = b"{},") -> bytes:
    return b'{"x": [' + of * count + b"1]}"


CASES: dict[str, Change] = {
    **{f"{path} {kind}": with_number(path, text) for path in FIELDS for kind, text in NUMBERS.items()},
    "eps 1e-320": with_number("vision_config.layer_norm_eps", "1e-320"),
    "1024 layers": with_number("text_config.num_hidden_layers", "1024"),
    "1024 vision layers": with_number("vision_config.num_hidden_layers", "1024"),
    "a key twice": twice,
    "config of 15 MB": with_file("config.json", LARGE),
    "generation_config of 15 MB": with_file("generation_config.json", LARGE),
    "config of many values": with_file("config.json", _list(1_390_000)),
    "config of brackets": with_file("config.json", b"[" * 3_000_000),
    "config a pipe": fifo("config.json"),
    "weights a pipe": fifo(WEIGHTS),
    "tokenizer.json of brackets": with_file("tokenizer_config.json", b'{"x": ' + b"[" * 100_000),
    "header 2**60": with_file(WEIGHTS, struct.pack("<Q", 2**60) + bytes(100)),
    "header of brackets": with_file(WEIGHTS, struct.pack("<Q", 20_000_000) + b"[" * 20_000_000),
    "header of a million tensors": many_tensors,
    "header of huge numbers": lambda folder: write_weights(
        folder,
        b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":[' + b",".join([b"9" * 4000] * 500) + b"]}}",
    ),
    "a tensor of 10 TB": head(shape=[2_500_000, 1_000_000], data_offsets=[0, 10**13]),
    "a file of 10 TB": sparse,
    "offsets beyond 2**63": head(data_offsets=[2**63, 2**63 + 30720]),
    "offsets backwards": head(data_offsets=[30720, 0]),
    "shape of floats": head(shape=[160.0, 48.0]),
    "shape of a thousand axes": head(shape=[1] * 1000 + [160, 48]),
    "dtype of a million letters": head(dtype="F" * 1_000_000),
    "two tensors in one place": with_header(overlap, b""),
    "bytes of no tensor": with_header(hole, bytes(400)),
    "a tensor twice": second_shape,
    "a name of control characters": with_header(
        lambda header: header.update({"\x1b[31m\n" + "y" * 100_000: header["__metadata__"]})
    ),
    "index to the parent": index_of("../secret.safetensors"),
    "index with NUL": index_of("a\0.safetensors"),
    "index with half a surrogate": index_of("\ud800.safetensors"),
    "index with a long name": index_of("x" * 5000 + ".safetensors"),
    "index with a list": index_of(["model.safetensors"]),
    "config linked away": linked("config.json", "/etc/passwd"),
    "weights linked away": linked(WEIGHTS, "{moved}"),
    "weights linked to a device": linked(WEIGHTS, "/dev/zero"),
    "weights linked to themselves": linked(WEIGHTS, WEIGHTS),
}


def leads(name: str, key: str, other: str, content: bytes) -> Change:
    """To a file of another name, which transformers would read in place of the one that is looked at."""

    def change(folder: Path) -> None:
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {key: [other]}))
        (folder / other).write_bytes(content)

    return change


def second_value(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_text('{"a": 1, ' + (folder / name).read_text().strip()[1:-1] + ', "a": 2}')

    return change


def both_without_class(folder: Path) -> None:
    """config.json's class counts where tokenizer_config.json has none."""
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text('{"model_type": "idefics3", "tokenizer_class": "Idefics3Processor"}')


PROCESSOR_CASES: dict[str, Change] = {
    "processor_config.json with a key twice": second_value("processor_config.json"),
    "tokenizer_config.json with a key twice": second_value("tokenizer_config.json"),
    "preprocessor_config.json of 15 MB": with_file("preprocessor_config.json", LARGE),
    "chat_template.json of 15 MB": with_file("chat_template.json", LARGE),
    "a template of 5 MB": with_file("chat_template.jinja", b"x" * 5_000_000),
    "chat_template.json of brackets": with_file("chat_template.json", b"[" * 3_000_000),
    "chat_template.json of some brackets": with_file("chat_template.json", b"[" * 100_000),
    "processor_config.json of many values": with_file("processor_config.json", _list(1_390_000)),
    "tokenizer.json of 33 MiB": with_file("tokenizer.json", b" " * 33 * 2**20),
    "tokenizer.json of many values": with_file("tokenizer.json", _list(1_300_000)),
    "vocab.txt of many lines": with_file("vocab.txt", b"a\n" * 1_000_001),
    "tokenizer.model.v3 of 33 MiB": with_file("tokenizer.model.v3", b" " * 33 * 2**20),
    **{
        f"{named} as the tokenizer": with_file(
            "tokenizer_config.json", json.dumps({"tokenizer_class": named}).encode()
        )
        for named in ("Idefics3Processor", "AutoTokenizer", "pipeline")
    },
    "config.json asks for a processor": both_without_class,
    "config.json of another name": leads("config.json", "configuration_files", "config.5.0.0.json", LARGE),
    "tokenizer.json of another name": leads(
        "tokenizer_config.json", "fast_tokenizer_files", "tokenizer.5.0.0.json", LARGE
    ),
}  # fmt: skip
# Just below the limits: whatever becomes of them, it comes in time.
JUST_BELOW: dict[str, Change] = {
    "tokenizer.json": with_file("tokenizer.json", _list(1_240_000)),
    "tokenizer.json of blanks": with_file("tokenizer.json", _list(8) + b" " * (32 * 2**20 - 100)),
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
