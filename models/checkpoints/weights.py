"""Weights in safetensors and GGUF files: which tensor is where, reading them, writing the former; on the Hub,
their headers.

A family of checkpoints says with a `StoredTensor` for each of our names where that tensor lies; names and
shapes are then compared with a file's header before anything is allocated, and one tensor at a time is read
from the file into memory of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from messages import counted, some
from models.checkpoints import gguf
from models.checkpoints.gguf_tensors import arranged
from models.checkpoints.hub import CheckpointError, CheckpointFiles, client, fetched, naming, one_sentence
from models.checkpoints.names import nearest_name

Shape = tuple[int, ...]
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PARTS = ("vision", "projector", "embeddings", "blocks", "head")  # of a VisionLanguageModel
NAMES = {dtype: name for name, dtype in FLOATS.items()}
_OPENED = 4 * 2**20  # bytes of quantized blocks at a time
_SHORTER = "{}: the file became shorter while it was read; load it again"


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


def module_of(name: str) -> str:
    """The one of PARTS that a parameter of a `VisionLanguageModel` belongs to."""
    owner, _, rest = name.partition(".")
    if owner != "language_model":
        return {"vision_model": "vision", "projector": "projector"}[owner]
    return {"embed_tokens": "embeddings", "lm_head": "head"}.get(rest.partition(".")[0], "blocks")


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
    missing = needed.keys() - stored.keys()
    extra = [name for name in stored.keys() - needed.keys() if not ignorable.fullmatch(name)]
    if missing:
        found = nearest_name(missing, extra)
        raise CheckpointError(
            f"{source}: {len(missing)} of {len(needed)} tensors that config.json calls for are missing: "
            f"{some(missing)}" + (f"; it has {found[1]}, expected {found[0]}" if found else "")
        )
    wrong = [name for name in needed if stored[name] != needed[name]]
    if wrong:
        name = min(wrong)
        raise CheckpointError(
            f"{source}: tensor {name} has shape {list(stored[name])}, expected {list(needed[name])} from "
            f"config.json" + (f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else "")
        )
    if extra:
        many = counted(len(extra), "tensor")
        raise CheckpointError(
            f"{source}: the model that config.json describes has no place for {many}: {some(extra)}"
        )


# ---------------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype as stored, its shape, and where its bytes begin and end."""

    path: Path
    dtype: str
    shape: Shape
    begin: int
    end: int
    # Of several tensors of a GGUF file, or one that is arranged otherwise there: what makes ours of them.
    join: Callable[..., Tensor] | None = None
    pieces: tuple[Entry, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces) or self.end - self.begin


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


def stored_entries(files: CheckpointFiles) -> dict[str, Entry]:
    """Every stored tensor of all shards, which must agree with the index where there is one; those of GGUF
    files by their names in the Hub's layout."""
    if any(path.suffix == gguf.SUFFIX for path in files.weights):
        return _gguf_entries(files)
    entries: dict[str, Entry] = {}
    for path in files.weights:
        for name, entry in read_header(path).items():
            if files.weight_map and files.weight_map.get(name) != path.name:
                raise CheckpointError(
                    f"{files.source}: {path.name} holds {name}, which the index puts in "
                    f"{files.weight_map.get(name, 'no shard')}: index and shards do not belong together"
                )
            entries[name] = entry
    absent = files.weight_map.keys() - entries.keys()
    if absent:
        raise CheckpointError(f"{files.source}: the index names tensors that no shard holds: {some(absent)}")
    return entries


def _gguf_entries(files: CheckpointFiles) -> dict[str, Entry]:
    """What has no place in the Hub's layout keeps its own name."""
    stored: dict[str, Entry] = {}
    for path in files.weights:
        with naming(path):
            tensors = gguf.read_header(path).tensors
        stored |= {name: Entry(path, *place) for name, place in tensors.items()}
    _mend(stored, files.config["vision_config"])
    entries: dict[str, Entry] = {}
    for name, how in arranged(files.config).items():
        if all(one in stored for one in how.names):
            pieces = tuple(stored.pop(one) for one in how.names)
            entries[name] = pieces[0] if how.join is None else _joined(name, pieces, how.join)
    return stored | entries


def _joined(name: str, pieces: tuple[Entry, ...], join: Callable[..., Tensor]) -> Entry:
    first = pieces[0]
    try:
        shape = join(*(torch.empty(piece.shape, device="meta") for piece in pieces)).shape
    except (RuntimeError, IndexError):  # as torch says that shapes do not fit
        shapes = ", ".join(str(list(piece.shape)) for piece in pieces)
        raise CheckpointError(f"{first.path}: shapes of {name} that do not fit together: {shapes}") from None
    return Entry(first.path, first.dtype, tuple(shape), first.begin, first.end, join, pieces)


def _mend(stored: dict[str, Entry], vision: Mapping[str, Any]) -> None:
    """llama.cpp's older converters called the first matrix of a tower's MLP `ffn_down`."""
    first, shape = stored.get("v.blk.0.ffn_down.weight"), (vision["intermediate_size"], vision["hidden_size"])
    if first is not None and first.shape == shape and shape[0] != shape[1]:
        for up in [name for name in stored if name.startswith("v.blk.") and ".ffn_up." in name]:
            down = up.replace(".ffn_up.", ".ffn_down.")
            if down in stored:
                stored[up], stored[down] = stored[down], stored[up]


@dataclass(frozen=True)
class Headers:
    """Stored tensors by name, dtypes as the file calls them, all bytes, and the number of files."""

    shapes: dict[str, Shape]
    dtypes: dict[str, str]
    num_bytes: int
    files: int

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_headers(files: CheckpointFiles) -> Headers | None:
    """The headers of a checkpoint's weights; None for a folder that holds none.

    Headers of a folder or of a downloaded repository are read from the files, as are those of GGUF files.
    Those of other repositories come by range requests, at most the first 100 kB of a file unless its header
    is longer; nothing is kept.
    """
    tensors: dict[str, Any]
    repo, commit = files.source, files.origin.commit
    if weights := files.weights or files.headers:
        tensors, count = stored_entries(replace(files, weights=weights)), len(weights)
        size = sum(entry.num_bytes for entry in tensors.values())
    elif commit is None:
        return None
    else:
        with one_sentence(repo, commit, "the header of the weights"):
            metadata = fetched(client().HfApi().get_safetensors_metadata, repo, revision=commit)
        tensors = {n: info for file in metadata.files_metadata.values() for n, info in file.tensors.items()}
        count = len(metadata.files_metadata)
        size = sum(info.data_offsets[1] - info.data_offsets[0] for info in tensors.values())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Headers(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, size, count)


def read_tensor(
    entry: Entry,
    shape: Shape | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    part: int = 0,
    parts: int = 1,
) -> Tensor:
    """Rows part/parts of a stored tensor, in memory of its own.

    We read the file ourselves: the library's tensors are views of the mapped file, and a process that touches
    one while someone writes the file anew is killed (SIGBUS).
    """
    shape = entry.shape if shape is None else shape
    if entry.join is not None:
        whole = entry.join(*(read_tensor(piece, dtype=dtype) for piece in entry.pieces))
        return whole.chunk(parts)[part].contiguous().view(shape).to(device)
    stored = FLOATS.get(entry.dtype)
    if stored is None and entry.path.suffix == gguf.SUFFIX:
        return _read_blocks(entry, dtype or torch.float32, part, parts).view(shape).to(device)
    if stored is None:
        raise CheckpointError(
            f"{entry.path}: weights stored as {entry.dtype} are not supported, expected F32, BF16, F16 or "
            f"F64: take the repository's unquantized checkpoint"
        )
    length = (entry.end - entry.begin) // parts
    tensor = torch.empty(shape, dtype=stored)
    with entry.path.open("rb") as file:
        file.seek(entry.begin + part * length)
        if file.readinto(memory_of(tensor)) != length:
            raise CheckpointError(_SHORTER.format(entry.path))
    return tensor.to(device, dtype or stored)


def _read_blocks(entry: Entry, dtype: torch.dtype, part: int, parts: int) -> Tensor:
    """Rows part/parts (R, C) of a tensor of quantized blocks, opened some at a time."""
    rows = math.prod(entry.shape[:-1]) // parts
    of_row = (entry.end - entry.begin) // parts // rows
    tensor, step = torch.empty(rows, entry.shape[-1], dtype=dtype), max(1, _OPENED // of_row)
    with entry.path.open("rb") as file:
        file.seek(entry.begin + part * rows * of_row)
        for first in range(0, rows, step):
            raw = np.fromfile(file, np.uint8, wanted := min(step, rows - first) * of_row)
            if raw.size < wanted:
                raise CheckpointError(_SHORTER.format(entry.path))
            with naming(entry.path), np.errstate(all="ignore"):  # of damaged scales
                opened = gguf.dequantized(raw.reshape(-1, of_row), entry.dtype)
            tensor[first : first + step] = torch.from_numpy(opened)
    return tensor


@dataclass(frozen=True)
class Pending:
    """A tensor that is made when it is written."""

    shape: Shape
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def placed(tensors: Mapping[str, Pending], places: StoredTensorOf) -> dict[str, Pending]:
    """A model's tensors under a checkpoint's own names; what was split on the way in is fused again."""

    def fused(before: Callable[[], Tensor], last: Callable[[], Tensor]) -> Tensor:
        return torch.cat([before(), last()])

    stored: dict[str, Pending] = {}
    pairs = ((places(name), tensor) for name, tensor in tensors.items())
    for place, tensor in sorted(pairs, key=lambda pair: pair[0].part):
        make = partial(fused, stored[place.name].make, tensor.make) if place.part else tensor.make
        stored[place.name] = replace(tensor, shape=place.stored_shape(tensor.shape), make=make)
    return stored


def write_file(path: Path, tensors: Mapping[str, Tensor | Pending]) -> None:
    """Write a safetensors file: `file_header`, then each tensor.

    One tensor at a time is on the CPU; the library's `save_file` wants all of them there.
    """
    header, names = file_header(tensors)
    with path.open("wb") as file:
        file.write(header)
        for name in names:
            tensor = tensors[name]
            made = tensor.make() if isinstance(tensor, Pending) else tensor
            file.write(memory_of(made.detach().cpu().contiguous()))
    path.chmod(0o644)


def file_header(
    tensors: Mapping[str, Tensor | Pending], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """The first bytes of a safetensors file with metadata {"format": "pt"} and what is given besides, and the
    order of the tensors after it."""
    # The library orders by alignment, so that every tensor starts at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        kind, shape = NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw, names


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, bfloat16 included, which NumPy does not have."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
