"""Damaged inputs by the ten thousand, in a process with limits that may die of them.

    python -m tests.soak.fuzz images --inputs 50000 --seed 0
    python -m tests.soak.fuzz images --seed 1234567 --inputs 1      # one input

An input is made by a random generator whose seed is its number. It must be taken, or refused by an exception
of our own in one printable sentence, within 5 s of processor time and 2 GiB of memory. Prints a line for each
kind of finding, with an input's number; the exit status is 1 if there are any. An input that ends the process
or hangs is the one whose number was printed last: go on behind it with --seed.
"""

from __future__ import annotations

import argparse
import base64
import copy
import faulthandler
import io
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, features
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from benchmarks.gguf_files import write_file
from data.errors import ImageError, ProcessorError, PromptError
from data.image_sizes import image_size
from data.images import load_image
from data.new_processor import SPECIAL_TOKENS
from data.processor import Processor
from models.checkpoints import CheckpointError
from models.checkpoints.gguf import read_header
from models.vision_language_model import VisionLanguageModel
from tests import gguf_files
from tests.processors import GOLDEN, embedded, processor
from tests.runs import tiny_checkpoint
from web.images import VisitorLimits

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 5.0  # of processor time for one input
MOST_BYTES = 2 * 2**30
LONGEST_SENTENCE = 4000


class Wrong(Exception):
    """An input was taken, and what came of it is not what was promised."""


class Outcome(NamedTuple):
    """kind: "accepted", "refused" or "finding". name: for counting. detail: of a finding."""

    kind: str
    name: str
    detail: str = ""


# ------------------------------------------------------------------------------------------------ changes
NUMBERS = (0, 1, 3, 7, 8, 255, 256, 1023, 32768, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
# What a value of JSON may be and no reader expects; and strings that mean something to one.
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 65_536, 2**31, 2**63, 10**30, -(2**63), 0.0, 0.5, 1e-300, 1e308),
    *(float("inf"), float("nan"), "", " ", "a", "-1", "\x00", "\ud800", "💥", "<image>", "../..", "x" * 3000),
    *([], {}, [[]], [None], [1, "a"], {"a": 1}, {"": {}}, [0] * 300, [[[[[]]]]]),
    *("idefics3", "llama", "linear", "llama3", "float16", "int8", "F64", "BF16", "I64", "F8_E4M3", "auto"),
    *("../model.safetensors", "/etc/passwd", "Qwen2Tokenizer", "{{ 1/0 }}"),
    "{% for x in range(9**9) %}{% endfor %}",
)
PIECES = (
    *SPECIAL_TOKENS[:9], "<|image|>", "＜image＞", "<im\u200bage>", "<image", ">", "\ue000", "\x00", "\ud800",
    "\u202e", "é", "e\u0301", "👩\u200d👩\u200d👧", "\ufeff", "\n", "    ", "{{ 7*7 }}", "%s", "how many?",
    "𝟟", "a" * 900, "İ",
)  # fmt: skip
ODD_SOURCES = (
    "", ".", "..", "/", "/etc/passwd", "/dev/zero", "no such file.png", "\x00", "http://127.0.0.1:1/a.png",
    "https://[::1/", "data:,", "data:image/png;base64,%", "file:///etc/passwd", "a" * 5000, "\ud800.png",
)  # fmt: skip
SIDES = (1, 2, 3, 31, 32, 33, 64, 65, 97, 128, 129, 200)


def mutate_bytes(rng: random.Random, data: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """Some random changes: bits, numbers, pieces lost, doubled, new or from another input."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5, 9))):
        size = len(out)
        at = rng.randrange(size + 1) if rng.random() < 0.6 else rng.randrange(min(size, 64) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < size:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            out[at : at + width] = (rng.choice(NUMBERS) % 256**width).to_bytes(width, order)
        elif kind == 2:
            del out[at : at + rng.choice((1, 2, 4, 8, size))]
        elif kind == 3:
            out[at:at] = out[at : at + rng.choice((1, 4, 16, 64))] * rng.choice((1, 2, 30))
        elif kind == 4 and others:
            other = rng.choice(others)
            begin = rng.randrange(len(other) + 1)
            out[at : at + rng.choice((0, 8, size))] = other[begin : begin + rng.choice((4, 32, 4096))]
        else:
            out[at:at] = rng.choice((rng.randbytes(8), b"\x00", b"\n", b'"', b"{", b"[", b"}", b"\xff\xfe"))
    return bytes(out)


def mutate_json(rng: random.Random, value: Any) -> Any:
    """A copy in which some values at random places are others, gone, renamed, nested or swapped."""
    out = [copy.deepcopy(value)]  # so that the whole has a place, too
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        holder, key = rng.choice(_places(out))
        old, kind = holder[key], rng.randrange(5)
        if kind == 0 and holder is not out:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(("", "x", f"{key}_", *map(str, holder)))] = holder.pop(key)
        elif kind == 2:
            other, name = rng.choice(_places(out))
            holder[key] = rng.choice(([old], {"a": old}, copy.deepcopy(other[name])))
        elif kind == 3 and isinstance(old, int) and not isinstance(old, bool):
            holder[key] = rng.choice((old * 2, -old, old + 1, old * 2**20))
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return out[0]


def _places(value: list) -> list[tuple[Any, Any]]:
    """(holder, key) of everything in a value, not counting what is below 500 places."""
    found: list[tuple[Any, Any]] = []
    waiting: list[Any] = [value]
    while waiting and len(found) < 500:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return found


# ------------------------------------------------------------------------------------------------- images
@cache
def images() -> tuple[bytes, ...]:
    """Small images of each format and mode that Pillow writes here."""
    noise = np.random.default_rng(0).integers(0, 256, (13, 18, 4), dtype=np.uint8)
    rgba, grey = Image.fromarray(noise), noise[..., 0]
    modes = [rgba.convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")]
    modes += map(Image.fromarray, (grey.astype(np.uint16) * 200, grey.astype(np.int32) * 70_000))
    modes += map(Image.fromarray, ((grey / 255).astype(np.float32), np.full((3, 4), np.nan, np.float32)))
    turned, frames = Image.Exif(), {"save_all": True, "append_images": modes[1:3]}
    turned[0x0112] = 6
    options: dict[str, list[dict]] = {
        "PNG": [{}, {"exif": turned.tobytes()}, {"icc_profile": bytes(200)}, {**frames, "duration": 20}],
        "JPEG": [{}, {"exif": turned.tobytes()}, {"progressive": True}],
        "WEBP": [{}, {"lossless": True}, frames],
        "GIF": [{}, frames],
        # Not JPEG in TIFF: writing some modes so ends the process.
        "TIFF": [{"compression": kind} for kind in (None, "tiff_lzw", "packbits")] + [frames],
        **{format: [{}] for format in ("BMP", "PPM", "MPO")},
        "AVIF": [{}] * features.check("avif"),
        "JPEG2000": [{}] * features.check("jpg_2000"),
    }
    found = []
    for format, image, way in ((f, i, w) for f, ways in options.items() for w in ways for i in modes):
        buffer = io.BytesIO()
        try:
            image.save(buffer, format, **way)
        except Exception:  # this format has no such mode, which plugins tell in many ways
            continue
        found.append(buffer.getvalue())
    return tuple(found)


def make_image(rng: random.Random) -> Any:
    """Bytes mostly; now and then a data: URL or noise."""
    kind = rng.random()
    if kind < 0.09:
        return rng.randbytes(rng.choice((0, 1, 8, 60, 2000)))
    data = rng.choice(images())
    if rng.random() < 0.97:
        data = mutate_bytes(rng, data, images())
    if kind < 0.13:
        front = rng.choice(("data:image/png;base64,", "data:;base64,", "data:", "DATA:,"))
        return front + base64.b64encode(data).decode()
    return data


def take_image(value: Any) -> str:
    """What is taken must be RGB, without leftover EXIF, and of the size that `image_size` tells."""
    limits = VisitorLimits(allow_urls=False)
    try:  # by itself: a row that is not loaded yet is measured
        told = image_size(value, limits)
    except ImageError:
        load_image(value, limits)
        raise Wrong("image_size refuses what load_image takes") from None
    image = load_image(value, limits)
    if image.mode != "RGB" or image.info or told != image.size:
        raise Wrong(f"expected RGB of {told}, got {image.mode} of {image.size} with {sorted(image.info)}")
    return type(value).__name__


# ---------------------------------------------------------------------------------------------- processor
def text(rng: random.Random) -> str:
    letter = lambda: rng.choice(PIECES) if rng.random() < 0.7 else chr(rng.randrange(0x3000))
    return "".join(letter() for _ in range(rng.randrange(5)))


def mostly(rng: random.Random, usual: Any) -> Any:
    """What belongs there; one time in eight anything."""
    if rng.randrange(8):
        return usual
    return rng.choice((text(rng), 10**400, rng.randbytes(8), *ODD_SOURCES, *ODD_VALUES))


def source(rng: random.Random) -> Any:
    size = rng.choice(SIDES), rng.choice(SIDES)
    if rng.randrange(2):
        return Image.new(rng.choice(("RGB", "L", "RGBA", "P", "1", "LA", "CMYK", "I;16", "F")), size)
    return rng.choice((*images()[:20], *(image[:40] for image in images()[:5]), *ODD_SOURCES))


def message(rng: random.Random) -> Any:
    parts = [
        mostly(rng, {"type": "text", "text": mostly(rng, text(rng))})
        if rng.randrange(3)
        else mostly(rng, {"type": "image", rng.choice(("image", "url", "path")): mostly(rng, source(rng))})
        for _ in range(rng.randrange(4))
    ]
    role = mostly(rng, rng.choice(("user", "user", "assistant", "system")))
    return mostly(rng, {"role": role, "content": mostly(rng, rng.choice((text(rng), parts)))})


def make_conversation(rng: random.Random) -> tuple[str, str, tuple]:
    """A kind of processor, one of its methods, and that one's arguments."""
    kinds = ("embedded", "llama", "merged", "nfkc", "unigram", "nanovlm-current", "nanovlm-v0.1")
    kind = rng.choice(kinds)
    if rng.randrange(2):
        given = rng.choice((None, source(rng), [source(rng) for _ in range(rng.randrange(4))]))
        return kind, "ask", (given, mostly(rng, text(rng)), rng.choice((None, text(rng))))
    one = lambda: mostly(rng, [message(rng) for _ in range(rng.randrange(5))])
    several = [one() for _ in range(rng.randrange(3))] if rng.randrange(2) else one()
    return kind, "prepare", (mostly(rng, several), rng.random() < 0.5, rng.choice(("left", "right")), True)


def take_conversation(value: tuple[str, str, tuple]) -> str:
    """What is taken has a placeholder for each feature, masks that fit, finite pixels, and decodes."""
    kind, method, arguments = value
    p = processor(kind)
    inputs = getattr(p, method)(*arguments)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if ids.shape != mask.shape or not mask.any(1).all():
        raise Wrong(f"ids {tuple(ids.shape)}, mask {tuple(mask.shape)} with an empty row")
    if p.image_token_id is not None:
        places = ((ids == p.image_token_id) & mask.bool()).sum(1).tolist()
        if places != inputs.image_tokens:
            raise Wrong(f"{places} placeholders for {inputs.image_tokens} features")
    if "pixel_values" in inputs and not inputs["pixel_values"].isfinite().all():
        raise Wrong("pixels that are not finite")
    p.decode(ids[0])
    return kind


# -------------------------------------------------------------------------------------------- checkpoints
def write_checkpoints(folder: Path) -> None:
    """One of each kind: ours, in shards, as GGUF, nanoVLM's, and bare backbones."""
    tiny_checkpoint(folder / "single")
    gguf_files.write(folder / "single", folder / "gguf")
    model = VisionLanguageModel.from_pretrained(folder / "single")
    model.save_pretrained(folder / "shards", processor=embedded(), max_shard_bytes=20_000)
    (folder / "nanovlm").mkdir()
    for path in (GOLDEN / "nanovlm-current").iterdir():
        if path.is_file() and not path.name.startswith("expected."):
            (folder / "nanovlm" / path.name).write_bytes(path.read_bytes())
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    SiglipVisionModel(vision).save_pretrained(folder / "vision")
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, num_key_value_heads=1)).save_pretrained(
        folder / "text"
    )


@cache
def checkpoints() -> dict[str, dict[str, bytes]]:
    """The files of each kind of checkpoint that are changed."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder))
        return {
            place.name: {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
            for place in Path(folder).iterdir()
        }


def make_checkpoint(rng: random.Random) -> tuple[str, str, dict[str, bytes | None]]:
    """A kind of checkpoint, what opens it, and other contents for some of its files; None: it is missing."""
    kind = rng.choice(("single", "single", "single", "shards", "nanovlm", "vision", "text"))
    opener = "backbones" if kind in ("vision", "text") else "processor" if rng.random() < 0.12 else "model"
    weights = [] if opener == "processor" else [n for n in checkpoints()[kind] if n.endswith(".safetensors")]
    names = [name for name in checkpoints()[kind] if name.endswith((".json", ".jinja"))] + weights
    chosen = rng.sample(names, min(len(names), rng.choice((1, 1, 1, 2))))
    return kind, opener, {name: changed(rng, name, checkpoints()[kind][name]) for name in chosen}


def changed(rng: random.Random, name: str, data: bytes) -> bytes | None:
    """JSON as JSON, in a safetensors header too, whose length is then right again; or as bytes."""
    kind = rng.random()
    if kind < 0.03:
        return None
    if kind < 0.05:
        return rng.choice((b"", b"null", b"[]", b"{}", b"[" * 3000 + b"]" * 3000, rng.randbytes(40)))
    if kind < 0.25 or name.endswith(".jinja"):
        return mutate_bytes(rng, data)
    dumped = lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    if name.endswith(".json"):
        return dumped(mutate_json(rng, json.loads(data)))
    length = int.from_bytes(data[:8], "little")
    header = dumped(mutate_json(rng, json.loads(data[8 : 8 + length])))
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


STRANGE = (
    0,
    1,
    7,
    2**31,
    2**32 - 1,
    0.5,
    -0.5,
    math.nan,
    math.inf,
    True,
    "",
    "a",
    "gpt2",
    [0],
    [1, 1],
    ["a"],
)


def make_gguf(rng: random.Random) -> tuple[str, str, dict[str, bytes | None]]:
    """GGUF files of which one has other bytes, mostly in its header, or says otherwise in metadata and names
    and shapes of tensors."""
    name = rng.choice(sorted(checkpoints()["gguf"]))
    data, opener = checkpoints()["gguf"][name], rng.choice(("model", "model", "processor"))
    if rng.random() < 0.4:
        size = rng.choice((400, 4000, len(data)))
        return "gguf", opener, {name: mutate_bytes(rng, data[:size]) + data[size:]}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / name
        path.write_bytes(data)
        header = read_header(path)
        metadata, tensors = header.metadata, dict(header.tensors)
        for _ in range(rng.choice((1, 1, 2, 4))):
            key = rng.choice(sorted(metadata))
            if rng.random() < 0.2 and key != "general.architecture":
                del metadata[key]
            else:
                metadata[key] = rng.choice(STRANGE)
        if rng.random() < 0.3:
            key = rng.choice(sorted(tensors))
            place_ = tensors.pop(key)
            if rng.random() < 0.7:
                other = rng.choice(sorted(tensors))
                shape = rng.choice((place_.shape, place_.shape[::-1], (math.prod(place_.shape),)))
                tensors[rng.choice((key, f"{key}.1", other))] = place_._replace(shape=shape)
        metadata["general.architecture"] = str(metadata["general.architecture"])
        bytes_of = lambda place: np.frombuffer(data[place.begin : place.end], np.uint8)
        write_file(path, metadata, {key: (one, partial(bytes_of, one)) for key, one in tensors.items()})
        return "gguf", opener, {name: path.read_bytes()}


def take_checkpoint(value: tuple[str, str, dict[str, bytes | None]]) -> str:
    """A model that is taken, and that can be saved, must be the same when it has been saved and loaded."""
    kind, opener, files = value
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for other in {kind, "vision", "text"} if opener == "backbones" else {kind}:
            (folder / other).mkdir()
            for name, data in (checkpoints()[other] | (files if other == kind else {})).items():
                if data is not None:
                    (folder / other / name).write_bytes(data)
        if opener == "processor":
            Processor.from_pretrained(folder / kind).ask(None, "how many?")
            return f"{kind} {opener}"
        if opener == "backbones":
            model = VisionLanguageModel.from_backbones(folder / "vision", folder / "text", scale_factor=1)
        else:
            model = VisionLanguageModel.from_pretrained(folder / kind)
        saved = model.save_pretrained(folder / "saved")
        try:
            again = VisionLanguageModel.from_pretrained(saved)
        except REFUSALS as error:
            raise Wrong(f"taken, but not saved and loaded: {error}") from error
        ours, theirs = model.state_dict(), again.state_dict()
        if ours.keys() != theirs.keys() or not all(same(ours[name], theirs[name]) for name in ours):
            raise Wrong("saved as other tensors")
    return f"{kind} {opener}"


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    equal = first.shape == second.shape and first.dtype == second.dtype
    return equal and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------------- runs
REFUSALS = (CheckpointError, ProcessorError, PromptError, ImageError)
TARGETS: dict[str, tuple[Callable[[random.Random], Any], Callable[[Any], str]]] = {
    "checkpoints": (make_checkpoint, take_checkpoint),
    "gguf": (make_gguf, take_checkpoint),
    "images": (make_image, take_image),
    "processor": (make_conversation, take_conversation),
}


def judge(run: Callable[[Any], str], value: Any, refusals: tuple[type[Exception], ...]) -> Outcome:
    """Run one input. Only the keyboard still interrupts: Rust's panics are no Exception."""
    began = time.process_time()
    try:
        outcome = Outcome("accepted", run(value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        trace, text = "".join(traceback.format_exception(error))[-6000:], str(error)
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if f.filename.startswith(str(ROOT)) and "/tests/" not in f.filename]
        last = (ours or frames)[-1]  # exceptions of one type from one place count as one finding
        place = f"{type(error).__name__}@{Path(last.filename).name}:{last.name}"
        if not isinstance(error, refusals):
            return Outcome("finding", place, trace)
        if not text.strip() or not text.isprintable() or len(text) > LONGEST_SENTENCE:
            return Outcome("finding", f"sentence:{place}", trace)
        if "MemoryError" in trace or "can't allocate memory" in trace:
            return Outcome("finding", f"memory:{place}", trace)
        outcome = Outcome("refused", type(error).__name__)
    seconds = time.process_time() - began
    return outcome if seconds <= MOST_SECONDS else Outcome("finding", "slow", f"{seconds:.1f} s")


def fuzz(name: str, numbers: range) -> tuple[Counter[str], dict[str, str]]:
    """How many inputs of each kind, and for each finding a number and a trace."""
    make, run = TARGETS[name]
    kinds, findings = Counter[str](), dict[str, str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            print(f"\r{name} {number}", end="", file=sys.stderr, flush=True)
            outcome = judge(run, make(random.Random(number)), REFUSALS)
            kinds[outcome.kind] += 1
            if outcome.kind == "finding":
                findings.setdefault(outcome.name, f"{name} --seed {number} --inputs 1\n{outcome.detail}")
    return kinds, findings


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(TARGETS)}; all")
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of each target (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first input")
    settings = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # waiting threads would count as computing
    faulthandler.enable()
    found = False
    for name in settings.targets or TARGETS:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_BYTES, resource.RLIM_INFINITY))
        kinds, findings = fuzz(name, range(settings.seed, settings.seed + settings.inputs))
        print(name, dict(kinds), *findings.values(), sep="\n", flush=True)
        found |= bool(findings)
    sys.exit(found)


if __name__ == "__main__":
    main()
