"""GGUF, llama.cpp's file format: metadata and the places of tensors.

A file is a list of named values, a list of tensors (name, shape, type, place) and their bytes. `read_header`
raises ValueError with what is wrong. Blocks of quantized numbers are opened by the gguf library
(`dequantized`).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

SUFFIX = ".gguf"
_FEW = 16  # numbers of a list
_PIECE = 2**20  # bytes that are read at once
# Types of metadata: as struct has them; a text and a list besides.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
# Of several files the first of these is taken: what most people have, and a tower as exact as it can be.
_TEXTS, _TOWERS = ("Q4_K_M", "Q8_0"), ("F16", "BF16", "F32", "Q8_0")
_PRECISION = re.compile(
    r"(.*?)[-_.]?((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32))?(?:-\d{5}-of-\d{5})?", re.IGNORECASE | re.DOTALL
)
_BESIDE = re.compile(r"(.*/)?mtp-.*|.*imatrix.*", re.DOTALL)  # what drafts further tokens, or weighs weights


class Place(NamedTuple):
    """A tensor of a file: its type as llama.cpp calls it, its shape (rows first), where its bytes lie."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Place]


def choose(names: Iterable[str], wanted: str = "", text: str = "") -> tuple[str, ...]:
    """Of files with these names, the text part (`text`, or that of the quantization `wanted`, or Q4_K_M, else
    Q8_0, else the first) and the tower that goes with it, if there is one: of the most similar name, F16
    before others. ValueError where there is no text part."""
    known = sorted(name for name in names if name.endswith(SUFFIX) and not _BESIDE.fullmatch(name))
    towers = [name for name in known if "mmproj" in name.lower()]
    texts = [name for name in ([text] if text else known) if name not in towers]
    kinds = {name: _parts(name)[1] for name in texts}
    texts = [name for name in texts if kinds[name] == wanted.upper() or not wanted]
    if not texts:
        has = f"the quantizations {', '.join(sorted({*kinds.values()}))}" if kinds else "none"
        raise ValueError(f"expected the GGUF file of a text part{wanted and f' in {wanted}'}, found {has}")
    chosen = min(texts, key=lambda name: _rank(name, _TEXTS))

    def fit(name: str) -> tuple[float, int]:
        other = re.sub(r"[-_.]?mmproj[-_.]?", "", _parts(name)[0])
        return -SequenceMatcher(None, other, _parts(chosen)[0]).ratio(), _rank(name, _TOWERS)

    return chosen, *sorted(towers, key=fit)[:1]


def _parts(name: str) -> tuple[str, str]:
    """The model and the precision, in capitals, in a file's name."""
    found = _PRECISION.fullmatch(name.removesuffix(SUFFIX))
    assert found is not None, "every name matches"
    return found[1].lower(), (found[2] or "").upper()


def _rank(name: str, order: tuple[str, ...]) -> int:
    return order.index(kind) if (kind := _parts(name)[1]) in order else len(order)


class _Reader:
    """Reads a header, a piece of the file at a time. No more is asked of the file than it has."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size, self.data, self.at = file, size, bytearray(), 0

    def reach(self, end: int) -> None:
        if end > len(self.data):
            if end <= self.size:
                self.data += self.file.read(max(_PIECE, end - len(self.data)))
            if end > len(self.data):
                raise ValueError("the file ends within its header: it was cut short; download it again")

    def take(self, code: str) -> tuple[Any, ...]:
        begin = self.at
        self.at += struct.calcsize(f"<{code}")
        self.reach(self.at)
        return struct.unpack_from(f"<{code}", self.data, begin)

    def texts(self, count: int) -> list[str]:
        found, data, at, length = [], self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):  # there are half a million in a vocabulary
            if (begin := at + 8) > len(data):
                self.reach(begin)
            if (at := begin + length(data, at)[0]) > len(data):
                self.reach(at)
            found.append(data[begin:at].decode())  # else a UnicodeDecodeError, which is a ValueError
        self.at = at
        return found

    def value(self, name: str) -> Any:
        (kind,), count = self.take("I"), 1
        if whole := kind == _LIST:
            kind, count = self.take("IQ")
        values: list[Any]
        if kind == _TEXT:
            values = self.texts(count)
        elif code := _NUMBERS.get(kind):
            values = list(self.take(f"{count}{code}"))
            if code == "f" and count <= _FEW:  # not a vocabulary's scores
                from numpy import float32  # takes a tenth of a second

                # With the fewest digits that are the same in 32 bits: 1e-5 is stored as 9.99999975e-06.
                values = [float(str(float32(one))) for one in values]
        else:
            raise ValueError(f"{name}: expected numbers, texts or a list of them, got type {kind}")
        return values if whole else values[0]


def read_header(path: Path) -> Header:
    """Metadata and tensors of a file. Raises ValueError for one that is damaged or lies about itself."""
    with path.open("rb") as file:
        return header_of(file, path.stat().st_size, path)


def header_of(file: BinaryIO, size: int, path: Path) -> Header:
    """See `read_header`: of a file of so many bytes, of which only the header is read."""
    reader = _Reader(file, size)
    if (magic := reader.take("4s")[0]) != b"GGUF":
        raise ValueError(f"not a GGUF file: expected it to begin with GGUF, got {magic!r}")
    if (version := reader.take("I")[0]) not in (2, 3):
        raise ValueError(f"expected version 2 or 3 of GGUF, little-endian, got {version}")
    tensor_count, value_count = reader.take("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        (name,) = reader.texts(1)
        metadata[name] = reader.value(name)
    tensors: dict[str, Place] = {}
    for _ in range(tensor_count):
        (name,), (rank,) = reader.texts(1), reader.take("I")
        *shape, kind, offset = reader.take(f"{rank}QIQ")
        if (known := _types().get(kind)) is None:
            raise ValueError(f"tensor {name}: type {kind} is not known")
        label, block, of_block = known
        end = offset + math.prod(shape) // block * of_block
        tensors[name] = Place(label, tuple(reversed(shape)), offset, end)  # ours begin with rows
    begin = reader.at
    begin += -begin % metadata.get("general.alignment", 32)
    if tensors and (end := begin + max(place.end for place in tensors.values())) > size:
        raise ValueError(f"its tensors end at byte {end} of {size}: it was cut short; download it again")
    moved = {
        name: place._replace(begin=begin + place.begin, end=begin + place.end)
        for name, place in tensors.items()
    }
    return Header(path, metadata, moved)


def stored_numbers(header: Header, name: str) -> list[float]:
    """A small tensor of float32: [] where a file has none, zeros where only the file's header is here."""
    place = header.tensors.get(name, Place("", (), 0, 0))
    with header.path.open("rb") as file:
        file.seek(place.begin)
        raw = file.read(place.end - place.begin)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


@cache
def _library() -> Any:
    """The gguf library with its quants; importing it takes a tenth of a second."""
    import gguf

    return gguf


@cache
def _types() -> dict[int, tuple[str, int, int]]:
    """By its number: what a type is called, how many numbers stand in a block, and the bytes of one."""
    return {int(kind): (kind.name, *sizes) for kind, sizes in _library().GGML_QUANT_SIZES.items()}


# -------------------------------------------------------------------------------------------------- numbers
def dequantized(raw: Any, kind: str) -> Any:
    """Rows of bytes (R, B) of a type -> float32 (R, C), as the gguf library computes them. ValueError for a
    type that it does not open."""
    try:
        return _library().quants.dequantize(raw, _library().GGMLQuantizationType[kind])
    except NotImplementedError:
        raise ValueError(f"weights of type {kind} cannot be opened") from None
