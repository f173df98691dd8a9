"""Loading: find the files, choose the reader, check names and shapes, then fill the parameters one by one.

    model = load(VisionLanguageModel, "HuggingFaceTB/SmolVLM-256M-Instruct", dtype="bfloat16")

A reader is a module of pure functions: `recognises(config)`, `read_config(config, generation) -> VLMConfig`,
`tensor_map(stored names) -> (our name -> StoredTensor)`, `is_ignorable(stored name)`, and
`config_from_tensors(config, read) -> VLMConfig` for what only the tensors tell. A new family of whole models
is one more module in READERS.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.checkpoints import idefics3, nanovlm
from models.checkpoints.hub import (
    MAX_TOKENIZER,
    CheckpointError,
    CheckpointFiles,
    locate,
    read_json,
    resolve_source,
)
from models.checkpoints.weights import (
    FLOATS,
    Entry,
    Shape,
    StoredTensorOf,
    check_shapes,
    read_tensor,
    stored_entries,
)
from models.config import VLMConfig

T = TypeVar("T")

READERS = (idefics3, nanovlm)
HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.embed_tokens.weight"
# Keys of generation_config.json that are in the config, or about the file itself.
_NOT_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
# The dtype that "auto" means: on a CPU float32 is exact, and bfloat16 no faster for one question.
AUTO_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}


def load(
    cls: type[T],
    source: str | Path,
    revision: str | None = None,
    dtype: torch.dtype | str | None = "auto",
    device: torch.device | str | None = None,
) -> T:
    """A checkpoint as a model of class `cls` (`VisionLanguageModel`) in eval mode.

    Nothing is allocated before config, names and shapes have been checked; then one tensor at a time is read
    from the file into its place, so the peak is one copy of the weights. `model.config.eos_token_ids` comes
    from config, generation_config and, where the checkpoint has one, the tokenizer.

    Args:
        source: a folder, or a repository id on the Hub.
        revision: branch, tag or commit of the repository.
        dtype: a dtype or its name. "auto" is what the device is right and fast with: float32 on a CPU,
            bfloat16 on CUDA, elsewhere the stored one. "stored" is the config's own, float32 where it names
            none: for what is saved again.
        device: where the weights go; None is the CPU.
    """
    return one_version(source, revision, lambda: _load(cls, source, revision, dtype, device))


def _load(cls: Any, source, revision, dtype, device) -> Any:
    files = locate(source, revision, check=choose_reader)  # no weights are fetched for nothing
    reader = choose_reader(files.config, files.source)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, files.config, device)
    entries = stored_entries(files)
    config, stored_tensor = _read_layout(files, reader, entries)
    config = _with_end_token(config, end_token_id(files))
    expected = expected_shapes(cls, config)
    head_copy = stored_tensor(HEAD).name if config.tie_word_embeddings else None
    check_shapes(
        expected,
        stored_tensor,
        {name: entry.shape for name, entry in entries.items()},
        lambda name: name == head_copy or reader.is_ignorable(name),
        files.source,
    )
    with meta_init():
        model = cls(config)
    fill(model, expected, stored_tensor, entries, dtype, device)
    if config.tie_word_embeddings:
        model.language_model.lm_head.weight = model.language_model.embed_tokens.weight
    model.origin = files.origin
    model.generation_config = {
        name: value for name, value in files.generation_config.items() if name not in _NOT_KEPT
    }
    return model.eval()


def choose_reader(config: Mapping, source: str) -> ModuleType:
    """The reader for a config.json; an architecture that none of them reads is refused."""
    for reader in READERS:
        if reader.recognises(config):
            return reader
    kind = config.get("model_type")
    got = f"model_type {kind!r}" if kind is not None else f"no model_type, with keys {sorted(config)[:4]}"
    raise CheckpointError(
        f"{source}: unsupported architecture ({got}); supported are "
        f"{'; '.join(reader.FAMILY for reader in READERS)}, and bare SigLIP and Llama backbones through "
        f"VisionLanguageModel.from_backbones"
    )


def _read_layout(
    files: CheckpointFiles, reader: ModuleType, entries: Mapping[str, Entry]
) -> tuple[VLMConfig, StoredTensorOf]:
    """The config, with tying and whatever else only the tensors tell, and where our tensors lie."""
    if files.config.get("quantization_config"):
        raise CheckpointError(
            f"{files.source}: quantized checkpoints are not supported, take the unquantized one"
        )

    def read(name: str) -> Tensor | None:
        entry = entries.get(name)
        return None if entry is None or entry.dtype not in FLOATS else read_tensor(entry)

    try:
        config = reader.config_from_tensors(reader.read_config(files.config, files.generation_config), read)
    except CheckpointError as error:
        raise CheckpointError(f"{files.source}: {error}") from None
    stored_tensor = reader.tensor_map(entries)
    tied = resolve_tying(config.tie_word_embeddings, stored_tensor, entries, files.source)
    return replace(config, tie_word_embeddings=tied), stored_tensor


def resolve_tying(
    claimed: bool, stored_tensor: StoredTensorOf, entries: Mapping[str, Entry], source: str
) -> bool:
    """Whether head and embedding are one tensor, from what the config claims and what is stored.

    Claimed and no head of its own: tied. Claimed and a head that differs: both are kept. Not claimed and
    no head: transformers would put a random one; that is refused here.
    """
    head, embedding = stored_tensor(HEAD).name, stored_tensor(EMBEDDING).name
    if not claimed:
        if head not in entries and embedding in entries:
            raise CheckpointError(
                f"{source}: {head} is missing while tie_word_embeddings is false or absent: set it to true "
                f"in config.json if the head is the embedding, or download the weights again"
            )
        return False
    if head == embedding or head not in entries or embedding not in entries:
        return True
    first, second = entries[head], entries[embedding]
    same_form = (first.shape, first.dtype) == (second.shape, second.dtype)
    return same_form and torch.equal(read_tensor(first), read_tensor(second))


def expected_shapes(cls: Any, config: VLMConfig) -> dict[str, Shape]:
    """Every parameter of the model that a config describes, and its shape, from a model of one layer a tower:
    a thousand layers take seconds to build, and a file that does not have them is to be refused before.
    """
    depth = {
        "vision_model": config.vision.num_hidden_layers,
        "language_model": config.text.num_hidden_layers,
    }
    shallow = replace(
        config,
        vision=replace(config.vision, num_hidden_layers=1),
        text=replace(config.text, num_hidden_layers=1),
    )
    with meta_init():
        model = cls(shallow)
    expected: dict[str, Shape] = {}
    for name, parameter in model.named_parameters():
        tower, is_layer, rest = name.partition(".layers.0.")
        layers = range(depth[tower]) if is_layer else ()
        names = [f"{tower}.layers.{index}.{rest}" for index in layers] or [name]
        expected |= dict.fromkeys(names, tuple(parameter.shape))
    return expected


def fill(
    module: nn.Module,
    names: Mapping[str, Shape],
    stored_tensor: StoredTensorOf,
    entries: Mapping[str, Entry],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace the (meta) parameters `names` of a module by stored tensors, one at a time."""
    try:
        for name, shape in names.items():
            source = stored_tensor(name)
            tensor = read_tensor(entries[source.name], shape, dtype, device, source.part, source.parts)
            owner, leaf = name.rsplit(".", 1)
            setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor))
    except (RuntimeError, MemoryError) as error:
        # On a CPU PyTorch raises a bare RuntimeError.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            needed = sum(math.prod(shape) for shape in names.values()) * dtype.itemsize
            kind = str(dtype).removeprefix("torch.")
            raise MemoryError(
                f"the weights take {needed / 1e9:.3g} GB as {kind}, more memory than {device} has left"
            ) from error
        raise


@contextmanager
def meta_init() -> Iterator[None]:
    """Modules made inside have shapes and no numbers.

    PyTorch's own initialisation of them is left out: for drawing numbers that do not exist it would import
    its whole compiler (75 MB, one to three seconds).
    """
    with torch.device("meta"), _Uninitialised():
        yield


class _Uninitialised(TorchFunctionMode):
    """Turns the functions of torch.nn.init into ones that return their tensor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


# ------------------------------------------------------------------------------------- dtype and device
def resolve_dtype(dtype: torch.dtype | str | None, config: Mapping, device: torch.device) -> torch.dtype:
    """The dtype to load in; see `load`."""
    if dtype in (None, "auto", "stored"):
        section = config.get("text_config")
        text = section if isinstance(section, dict) else {}
        named = next((s[k] for s in (config, text) for k in ("dtype", "torch_dtype") if s.get(k)), "float32")
        stored = resolve_dtype(named, {}, device)
        return stored if dtype == "stored" else _DTYPES.get(AUTO_DTYPE.get(device.type, ""), stored)
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"unknown dtype {dtype!r}: expected auto, {', '.join(_DTYPES)} or stored")
    return _DTYPES[name]


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device to load to, which must work here; None is the CPU."""
    try:
        chosen = torch.device("cpu" if device is None else device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError: built without CUDA
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"device {str(device)!r} cannot be used, expected cpu, cuda, cuda:N or mps as this machine has: "
            f"{reason}"
        ) from None
    return chosen


# ----------------------------------------------------------------------------------------------- end token
_RELATIVE = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")


def end_token_id(files: CheckpointFiles) -> int | None:
    """The id of the tokenizer's end token; None where there is no tokenizer or it names none.

    tokenizer_config.json (or, in old repositories, special_tokens_map.json) names the token, and
    tokenizer_config.json or tokenizer.json gives its id. The large tokenizer.json is read only where the
    small one does not.
    """
    find, inside = files.find, files.config.get("lm_tokenizer")
    # nanoVLM's tokenizer is in the folder `lm_tokenizer`, where it is not beside the weights.
    has_folder = files.origin.commit is None and isinstance(inside, str) and _RELATIVE.fullmatch(inside)
    if has_folder and find("tokenizer.json") is None and find("tokenizer_config.json") is None:
        find = lambda name: files.find(f"{inside}/{name}")
    config_path = find("tokenizer_config.json")
    config = {} if config_path is None else read_json(config_path)
    token = _content(config.get("eos_token"))
    if token is None and (config_path is not None or files.origin.commit is None):
        map_path = find("special_tokens_map.json")
        token = _content(read_json(map_path).get("eos_token")) if map_path is not None else None
    if token is None:
        return None
    decoder = config.get("added_tokens_decoder")
    for token_id, added in decoder.items() if isinstance(decoder, dict) else ():
        if _content(added) == token and token_id.isdecimal() and len(token_id) < 10:
            return int(token_id)
    tokenizer_path = find("tokenizer.json")
    if tokenizer_path is None:
        return None
    tokenizer = read_json(tokenizer_path, MAX_TOKENIZER)
    listed = tokenizer.get("added_tokens")
    for added in listed if isinstance(listed, list) else ():
        if isinstance(added, Mapping) and added.get("content") == token and isinstance(added.get("id"), int):
            return added["id"]
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    found = vocab.get(token) if isinstance(vocab, Mapping) else None
    return found if isinstance(found, int) else None


def _content(token: object) -> str | None:
    """A token's text, which is stored alone or in an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _with_end_token(config: VLMConfig, token_id: int | None) -> VLMConfig:
    if token_id is None or not 0 <= token_id < config.text.vocab_size:
        return config
    return replace(config, eos_token_ids=tuple(sorted({*config.eos_token_ids, token_id})))


# --------------------------------------------------------------------------- a folder that others write to
# A checkpoint is many files, and nothing tells its readers when all of them belong together: whoever saves it
# may exchange the folder (as `save` does), rename files over it, or write into them (as transformers does).
# So the files' inodes, lengths and times of change are noted before reading and looked at afterwards, and
# what was read meanwhile is thrown away if they differ.

# What a model or a processor is read from. A run's log beside it grows without being part of it.
_NAMES = r"[\w-][\w.-]*\.(safetensors|json|jinja|model)|(merges|vocab)\.txt"
# Such a file on its way here has a temporary name, `.NAME.a1B2c3` from rsync: until it is renamed, all other
# files lie still, of two versions.
_READ = re.compile(rf"({_NAMES})|\.?({_NAMES})\.\w+", re.ASCII)
_READ_BELOW = re.compile(
    r"tokenizer[\w.-]*|[\w-]+\.jinja|(special_tokens_map|added_tokens|vocab)\.json|merges\.txt"
)
# `hf download --local-dir` keeps its temporary files here.
_DOWNLOADS, _INCOMPLETE = os.path.join(".cache", "huggingface", "download"), re.compile(r".*\.incomplete")
TRIES = 5
# Seconds without a change before reading: whoever writes file by file pauses between them, and file systems'
# clocks tick every few milliseconds.
QUIET, _MAX_WAIT = 0.5, 3.0

FolderState = frozenset[tuple]


class BeingWrittenError(CheckpointError):
    """A folder changed each time it was read."""


def one_version(source: str | Path, revision: str | None, read: Callable[[], T]) -> T:
    """The result of `read`, all of it from files that did not change meanwhile.

    `read` may be called several times, and what it raises about a folder that changes is forgotten. A
    repository's files are those of one commit and do not change.
    """
    folder = resolve_source(source, revision)
    if not os.path.isdir(folder):
        return read()
    for _ in range(TRIES):
        before = _state_at_rest(folder)
        if before is None:
            break
        try:
            result = read()
        except BeingWrittenError:
            break
        except Exception:
            if _state(folder) == before:
                raise
            continue
        if _state(folder) == before:
            return result
        del result  # so that two models are never held at once
    raise BeingWrittenError(
        f"{source} changed each time it was read: wait until the process that saves to it has finished, and "
        f"try again"
    )


def _state_at_rest(folder: str) -> FolderState | None:
    """The state of a folder whose files have not changed for `QUIET` seconds, or that was moved to its place
    as a whole since; None if that does not come."""
    deadline = time.monotonic() + _MAX_WAIT
    while time.monotonic() < deadline:
        state, now = _state(folder), time.time_ns()
        newest = max((changed for *_, changed in state), default=0)
        # A time that is still to come is of another machine's clock.
        if not 0 <= now - newest < QUIET * 1e9 or _moved_since(folder, newest):
            return state
        time.sleep(QUIET - (now - newest) / 1e9)
    return None


def _moved_since(folder: str, changed: int) -> bool:
    """Whether a folder got its name after its files were written, as `save` does it: moving it changes the
    folder's inode, and not its list of names."""
    try:
        stat = os.stat(folder)
    except OSError:
        return False
    return stat.st_ctime_ns > max(stat.st_mtime_ns, changed)


def _state(folder: str) -> FolderState:
    """(path, device, inode, length, time of change in ns) of each file that a checkpoint is read from."""
    found = set()
    downloads = _files(os.path.join(folder, _DOWNLOADS), _INCOMPLETE, below=False)
    for path in (*_files(folder, _READ, below=True), *downloads):
        try:
            stat = os.stat(path)
        except OSError:
            continue  # it went between the list and this
        found.add((path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return frozenset(found)


def _files(folder: str, names: re.Pattern[str], below: bool) -> list[str]:
    """Paths of the files of those names; with `below` also the tokenizers and templates in its folders."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    found = [entry.path for entry in entries if names.fullmatch(entry.name)]
    for entry in entries if below else ():
        if os.path.isdir(entry.path):  # not `entry.is_dir()`, which raises for links that go in circles
            found += _files(entry.path, _READ_BELOW, below=False)
    return found
