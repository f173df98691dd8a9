"""Loading: find the files, choose the reader, check names and shapes, then fill the parameters one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from models.checkpoints.errors import CheckpointError, some
from models.checkpoints.locate import CheckpointFiles, locate
from models.checkpoints.one_version import one_version
from models.checkpoints.registry import choose_reader
from models.checkpoints.safetensors_io import Entry, read_header, read_tensor
from models.checkpoints.tensor_map import StoredTensorOf, check_shapes
from models.checkpoints.tokenizer_files import end_token_id
from models.config import VLMConfig
from models.device_settings import prepare_device
from models.skeleton import without_weights
from models.vision_language_model import VisionLanguageModel

HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.embed_tokens.weight"
# Keys of generation_config.json that are in the config, or about the file itself.
_NOT_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
# What "auto" computes in: bfloat16 has no speed to offer a CPU at one question, and float32 is exact.
AUTO_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def load(
    source: str | Path,
    revision: str | None = None,
    dtype: torch.dtype | str | None = "auto",
    device: torch.device | str | None = None,
) -> VisionLanguageModel:
    """A checkpoint as a model in eval mode, with `model.config.eos_token_ids` from config, generation_config
    and, where it is in reach, the tokenizer.

    Nothing is allocated before config, names and shapes have been checked; then one tensor at a time is read
    from the file into its place, so the peak is one copy of the weights.

    Args:
        source: a folder, or a repository id on the Hub.
        revision: branch, tag or commit of the repository.
        dtype: a dtype or its name. "auto", everywhere the default, is what the device is right and fast with:
            float32 on a CPU, where it is exact and bfloat16 is seldom faster; bfloat16 on CUDA; elsewhere the
            stored one. "stored" is the config's own, float32 where it names none: for what is saved again.
        device: where the weights go; None is the CPU.

    Raises:
        CheckpointError: one sentence for anything that does not fit, or a folder that others keep writing to.
        MemoryError: the weights take more than there is.
    """
    return one_version(source, revision, lambda: _load(source, revision, dtype, device))


def _load(
    source: str | Path,
    revision: str | None,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
) -> VisionLanguageModel:
    files = locate(source, revision, check=choose_reader)  # no weights are fetched for nothing
    reader = choose_reader(files.config, files.source)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, files.config, device)
    entries = stored_entries(files)
    config, stored_tensor = read_layout(files, reader, entries)
    config = with_end_token(config, end_token_id(files))
    expected = expected_shapes(config)
    shapes = {name: entry.shape for name, entry in entries.items()}
    head_is_copy = stored_tensor(HEAD).name if config.tie_word_embeddings else None
    check_shapes(
        expected,
        stored_tensor,
        shapes,
        lambda name: name == head_is_copy or reader.is_harmless(name),
        files.source,
    )
    with without_weights():
        model = VisionLanguageModel(config)
    fill(model, expected, stored_tensor, entries, dtype, device)
    if config.tie_word_embeddings:
        model.language_model.lm_head.weight = model.language_model.embed_tokens.weight
    model.origin = files.origin
    model.generation_config = {
        name: value for name, value in files.generation_config.items() if name not in _NOT_KEPT
    }
    return model.eval()


def expected_shapes(config: VLMConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model that a config describes, and its shape, from a model of one layer a tower:
    a thousand layers take seconds to build, and whether the file has them is to be known before.
    """
    depth = {
        "vision_model": config.vision.num_hidden_layers,
        "language_model": config.text.num_hidden_layers,
    }
    one = replace(
        config,
        vision=replace(config.vision, num_hidden_layers=1),
        text=replace(config.text, num_hidden_layers=1),
    )
    with without_weights():
        model = VisionLanguageModel(one)
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        tower, is_layer, rest = name.partition(".layers.0.")
        layers = range(depth[tower]) if is_layer else ()
        names = [f"{tower}.layers.{index}.{rest}" for index in layers] or [name]
        expected |= dict.fromkeys(names, tuple(parameter.shape))
    return expected


def with_end_token(config: VLMConfig, token_id: int | None) -> VLMConfig:
    """The config with the tokenizer's end token among its stop tokens."""
    if token_id is None or not 0 <= token_id < config.text.vocab_size:
        return config
    return replace(config, eos_token_ids=tuple(sorted({*config.eos_token_ids, token_id})))


def read_layout(
    files: CheckpointFiles, reader: ModuleType, entries: Mapping[str, Entry]
) -> tuple[VLMConfig, StoredTensorOf]:
    """The config, with tying and whatever else only the tensors tell, and where our tensors lie."""
    if files.config.get("quantization_config"):
        raise CheckpointError(
            f"{files.source}: quantized checkpoints are not supported, take the unquantized one"
        )

    def read(name: str) -> Tensor | None:
        entry = entries.get(name)
        if entry is None or entry.dtype not in ("F64", "F32", "BF16", "F16"):
            return None
        stored = {"F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}.get(
            entry.dtype, torch.float32
        )
        return read_tensor(entry, 0, 1, entry.shape, stored, torch.device("cpu"))

    try:
        config = reader.refine(reader.read_config(files.config, files.generation_config), read)
    except CheckpointError as error:
        raise CheckpointError(f"{files.source}: {error}") from None
    stored_tensor = reader.tensor_map(entries)
    tied = resolve_tying(config.tie_word_embeddings, stored_tensor, entries, files.source)
    return replace(config, tie_word_embeddings=tied), stored_tensor


def resolve_tying(
    claimed: bool, stored_tensor: StoredTensorOf, entries: Mapping[str, Entry], where: str
) -> bool:
    """Whether head and embedding are one tensor, from what the config claims and what is stored.

    Claimed and no head of its own: tied. Claimed and a head that differs: both are kept. Not claimed and
    no head: transformers would put a random one; that is refused here.

    Raises:
        CheckpointError: for a head that is claimed to be its own and is not stored.
    """
    head, embedding = stored_tensor(HEAD).name, stored_tensor(EMBEDDING).name
    if not claimed:
        if head not in entries and embedding in entries:
            raise CheckpointError(
                f"{where}: {head} is missing while tie_word_embeddings is false or absent: set it to "
                f"true in config.json "
                f"if the head is the embedding, or download the weights again"
            )
        return False
    if head == embedding or head not in entries or embedding not in entries:
        return True
    return _same_values(entries[head], entries[embedding])


def _same_values(first: Entry, second: Entry) -> bool:
    """Whether two stored tensors are byte for byte the same, reading a little at a time."""
    if (first.shape, first.dtype, first.end - first.begin) != (
        second.shape,
        second.dtype,
        second.end - second.begin,
    ):
        return False
    with first.path.open("rb") as one, second.path.open("rb") as other:
        one.seek(first.begin)
        other.seek(second.begin)
        left = first.end - first.begin
        while left:
            step = min(left, 2**24)
            if one.read(step) != other.read(step):
                return False
            left -= step
    return True


def stored_entries(files: CheckpointFiles) -> dict[str, Entry]:
    """Every stored tensor of all shards, agreeing with the index where there is one.

    Raises:
        CheckpointError: for a shard that is broken or holds something other than its index says.
    """
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


def fill(
    module: nn.Module,
    names: Mapping[str, tuple[int, ...]],
    stored_tensor: StoredTensorOf,
    entries: Mapping[str, Entry],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace the (meta) parameters `names` of a module by stored tensors, one at a time.

    Raises:
        MemoryError: they take more memory than there is.
    """
    try:
        for name, shape in names.items():
            source = stored_tensor(name)
            tensor = read_tensor(entries[source.name], source.part, source.parts, shape, dtype, device)
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


def resolve_dtype(dtype: torch.dtype | str | None, config: Mapping, device: torch.device) -> torch.dtype:
    """The dtype to load in; see `load`.

    Raises:
        CheckpointError: for a name that is none of the floating-point dtypes we compute in.
    """
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
    """The device to load to; None is the CPU.

    Raises:
        CheckpointError: for a device that does not exist, or that PyTorch cannot use here.
    """
    try:
        chosen = torch.device("cpu" if device is None else device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError: built without CUDA
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"device {str(device)!r} cannot be used, expected cpu, cuda, cuda:N or mps as this machine has: "
            f"{reason}"
        ) from None
    return prepare_device(chosen)
