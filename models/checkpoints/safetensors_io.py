"""Reading and writing safetensors files tensor by tensor, straight from and to the file.

The format (https://github.com/huggingface/safetensors#format): eight bytes of header length, a JSON header
of {name: {dtype, shape, data_offsets}}, then the data. Reading into memory that is already the parameter's
own keeps the peak at one copy of the weights, leaves no file mapped, and lets a file that was cut short be
told from its header before anything is allocated.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from models.checkpoints.errors import CheckpointError
from models.untrusted import parse_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The largest model that a config may describe has 25,000 tensors, 4 MB of header. (The safetensors library
# reads 100 MB, which Python's objects make two gigabytes of.)
_MAX_HEADER = 8 * 2**20
_MOST_AXES, _LARGEST = 16, 2**62
_CHUNK = 8 * 2**20  # bytes read at once where the dtype has to change on the way


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype as stored, its shape, and where its bytes begin and end."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of a safetensors file, checked against the length of the file: each byte of the data
    belongs to one tensor.

    Raises:
        CheckpointError: header longer than the file or than any real one, not JSON, tensors that share bytes
            or leave some out, or data missing at the end.
    """
    size = path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{path}: not a safetensors file, it has {size} bytes; download it again")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise CheckpointError(
                f"{path}: the header claims {length} bytes but the file has {size}: it was cut short or "
                f"is not a safetensors file; download it again"
            )
        if length > _MAX_HEADER:
            raise CheckpointError(
                f"{path}: expected a header of at most {_MAX_HEADER} bytes, got {length}: no model that is "
                f"supported has so many tensors"
            )
        raw = file.read(length)
    try:
        header = parse_json(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(path, value, 8 + length) for name, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: the safetensors header cannot be read ({error}); download it again"
        ) from None
    needed = max((entry.end for entry in entries.values()), default=8 + length)
    if needed != size:
        what = "it was cut short" if size < needed else "it has bytes that belong to no tensor"
        raise CheckpointError(f"{path}: expected {needed} bytes, got {size}: {what}; download it again")
    _check_places(path, entries, 8 + length)
    return entries


def _check_places(path: Path, entries: Mapping[str, Entry], data_start: int) -> None:
    """Each tensor begins where the one before it ends: what the format demands, and what keeps two parsers
    from seeing two models in one file."""
    at = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "shares bytes with another tensor" if entry.begin < at else "follows bytes of no tensor"
            raise CheckpointError(f"{path}: tensor {name[:200]} {what}; download the file again")
        at = entry.end


def _entry(path: Path, value: dict, data_start: int) -> Entry:
    offsets, shape, dtype = value["data_offsets"], value["shape"], value["dtype"]
    numbers = [*offsets, *shape]
    if len(offsets) != 2 or len(shape) > _MOST_AXES or not isinstance(dtype, str):
        raise ValueError("a tensor without a dtype, a shape and two offsets")
    if not all(type(number) is int and 0 <= number <= _LARGEST for number in numbers):
        raise ValueError("a tensor whose shape and offsets are no whole numbers from 0 on")
    begin, end = offsets
    if end < begin:
        raise ValueError(f"a tensor that begins at {begin} and ends at {end}")
    if dtype in _DTYPES:
        expected = _DTYPES[dtype].itemsize * math.prod(shape)
        if expected != end - begin:
            raise ValueError(f"a {dtype} tensor of shape {shape} takes {expected} bytes, not {end - begin}")
    return Entry(path, dtype, tuple(shape), data_start + begin, data_start + end)


def read_tensor(
    entry: Entry, part: int, parts: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Rows part/parts of a stored tensor, as `shape` and `dtype`, in memory of its own on `device`.

    Raises:
        CheckpointError: if the tensor is stored in a form that is not floating point, quantized for instance.
    """
    stored = _DTYPES.get(entry.dtype)
    if stored is None or not stored.is_floating_point:
        raise CheckpointError(
            f"{entry.path}: weights stored as {entry.dtype} are not supported, expected F32, BF16, F16 "
            f"or F64: "
            f"take the repository's unquantized checkpoint"
        )
    length = (entry.end - entry.begin) // parts
    begin = entry.begin + part * length
    out = torch.empty(shape, dtype=dtype)
    with entry.path.open("rb", buffering=0) as file:
        file.seek(begin)
        if stored == dtype:
            _read_exactly(file, out, entry)
        else:
            flat, step = out.view(-1), _CHUNK // stored.itemsize
            for start in range(0, flat.numel(), step):
                piece = flat[start : start + step]
                buffer = torch.empty(piece.shape, dtype=stored)
                _read_exactly(file, buffer, entry)
                piece.copy_(buffer)
    return out.to(device)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor; bfloat16, which NumPy has not, included."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _read_exactly(file, out: Tensor, entry: Entry) -> None:
    if not out.numel():
        return
    view = _bytes(out)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{entry.path}: the file became shorter while it was read; load it again")
        done += count


def write_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    mode: int = 0o644,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a safetensors file with metadata {"format": "pt"} and what is given besides, one tensor in memory
    at a time, and sync it.
    """
    # The library orders by alignment, so that every tensor starts at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for name in names:
            tensor = tensors[name].detach().cpu().contiguous()
            if tensor.numel():
                file.write(_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    path.chmod(mode)
