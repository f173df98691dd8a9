"""Weights in safetensors files: which tensor is where, and reading them.

A family of checkpoints says with a `StoredTensor` for each of our names where that tensor lies; names and
shapes are then compared with a file's header before anything is allocated, and one tensor at a time is read
from the file into memory of its own.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from messages import counted, some
from models.checkpoints.files import CheckpointError, Opened

Shape = tuple[int, ...]
HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.embed_tokens.weight"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What quantized weights consist of; of U32 the bits.
PARTS_OF_CODES = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8, "U8": torch.uint8,
    "I32": torch.int32, "U32": torch.int32, "I64": torch.int64,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- names
@dataclass(frozen=True)
class StoredTensor:
    """Rows part/parts of the stored tensor `name`, which may carry a leading axis of length one."""

    name: str
    part: int = 0
    parts: int = 1
    leading_axis: bool = False

    def stored_shape(self, ours: Shape) -> Shape:
        """Shape of the whole stored tensor, from the shape of ours."""
        whole = (ours[0] * self.parts, *ours[1:]) if self.parts > 1 else ours
        return (1, *whole) if self.leading_axis else whole


StoredTensorOf = Callable[[str], StoredTensor]  # our name -> where the tensor is stored


def rename(name: str, prefixes: Mapping[str, str], inside: Mapping[str, str] = MappingProxyType({})) -> str:
    """Replace what `name` has `inside` it, then the first of `prefixes` (the longer ones first, where they
    nest) that it starts with."""
    for old, new in inside.items():
        name = name.replace(old, new)
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name[len(old) :]
    raise KeyError(f"no rule renames tensor {name}")


def part_of_qkv(name: str, fused: str = "qkv") -> StoredTensor | None:
    """Where `….attn.q_proj.…`, `k_proj` or `v_proj` lies in a tensor `….attn.qkv.…`, whose rows are all of q,
    then all of k, then all of v; None for other names."""
    if found := re.fullmatch(r"(.+\.attn\.)([qkv])_proj(\..+)", name):
        return StoredTensor(f"{found[1]}{fused}{found[3]}", "qkv".index(found[2]), 3)
    return None


def check_shapes(
    expected: Mapping[str, Shape],
    stored_tensor: StoredTensorOf,
    stored: Mapping[str, Shape],
    ignorable: re.Pattern,
    source: str,
) -> None:
    """Compare the tensors `stored` in the checkpoint `source` with our `expected` ones, before any weight is
    allocated. `ignorable`: what stored tensors that nothing needs are called."""
    places = {name: stored_tensor(name) for name in expected}
    needed = {place.name: place.stored_shape(expected[name]) for name, place in places.items()}
    extra = [name for name in stored.keys() - needed.keys() if not ignorable.fullmatch(name)]
    has = f"it has {counted(len(extra), 'tensor')} that nothing there needs: {some(extra)}" if extra else ""
    if missing := needed.keys() - stored.keys():
        has = f"{len(missing)} of {len(needed)} tensors are missing: {some(missing)}" + (has and f"; {has}")
    elif wrong := [name for name in needed if stored[name] != needed[name]]:
        name = min(wrong)
        has = f"tensor {name} has shape {list(stored[name])}, expected {list(needed[name])}"
        has += f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
    if has:
        raise CheckpointError(f"{source}: the weights are not of the model that config.json describes: {has}")


# ---------------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype as stored, its shape, and where its bytes begin and end."""

    path: Path
    dtype: str
    shape: Shape
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def read(self, dtype: torch.dtype | None, part: int, parts: int) -> Tensor:
        """Rows part/parts of it in the order of the file, in memory of their own; `dtype` is a wish.

        We read the file ourselves: the library's tensors are views of the mapped file, and a process that
        touches one while someone writes the file anew is killed (SIGBUS).
        """
        if self.dtype not in FLOATS:
            raise CheckpointError(
                f"{self.path}: weights stored as {self.dtype} are not supported, expected F32, BF16, F16 or "
                f"F64: take the repository's unquantized checkpoint"
            )
        return self.stored(part, parts)

    def stored(self, part: int = 0, parts: int = 1) -> Tensor:
        """`read` in the type that the file has."""
        stored = (FLOATS | PARTS_OF_CODES)[self.dtype]
        length = self.num_bytes // parts
        tensor = torch.empty(length // stored.itemsize, dtype=stored)
        with self.path.open("rb") as file:
            file.seek(self.begin + part * length)
            if file.readinto(memory_of(tensor)) != length:
                raise self.shorter()
        return tensor

    def codes(self, part: int, parts: int) -> Any:
        """Rows part/parts of it as `generation.codes.Codes`; None for what cannot be kept so."""
        return None

    def shorter(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: the file became shorter while it was read; load it again")


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of a safetensors file. The library checks that header and length of the file agree, and
    that each byte of the data belongs to one tensor."""
    size = path.stat().st_size
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file of {size} bytes ({error}); download it again"
        ) from None
    except OSError as error:  # the library maps the file into the address space, which may be limited
        raise MemoryError(f"{path}: {size / 1e9:.3g} GB cannot be opened ({error})") from error
    header.pop("__metadata__", None)
    entries = {}
    for name, tensor in header.items():
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        entries[name] = Entry(path, tensor["dtype"], tuple(tensor["shape"]), begin, end)
    return entries


def shapes_of(entries: Mapping[str, Entry]) -> dict[str, Shape]:
    return {name: entry.shape for name, entry in entries.items()}


def stored_entries(opened: Opened) -> dict[str, Entry]:
    """Every tensor of all safetensors files, which must agree with the index where there is one."""
    weight_map = opened.weight_map
    entries: dict[str, Entry] = {}
    for path in opened.weights:
        for name, entry in read_header(path).items():
            if weight_map and weight_map.get(name) != path.name:
                raise CheckpointError(
                    f"{opened.source}: {path.name} holds {name}, which the index puts in "
                    f"{weight_map.get(name, 'no shard')}: index and shards do not belong together"
                )
            entries[name] = entry
    absent = weight_map.keys() - entries.keys()
    if absent:
        raise CheckpointError(f"{opened.source}: the index names tensors that no shard holds: {some(absent)}")
    return entries


def read_tensor(
    entry: Entry,
    shape: Shape | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    part: int = 0,
    parts: int = 1,
) -> Tensor:
    """Rows part/parts of a stored tensor, of this shape, dtype and device; None: as it is stored."""
    tensor = entry.read(dtype, part, parts)
    return tensor.view(entry.shape if shape is None else shape).to(device, dtype)


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, bfloat16 included, which NumPy does not have."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def trim() -> None:
    """Return to the system what was freed between blocks that are in use: a copy of each weight, after they
    have been rearranged. glibc alone keeps such memory, and has this call."""
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
