"""Loading: find the files, choose the family, check names and shapes, then fill the parameters one by one.

    model = load(VisionLanguageModel, "HuggingFaceTB/SmolVLM-256M-Instruct", dtype="bfloat16")

What is a family's own is in its file of `families/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from families import FAMILIES, family_of
from families.keys import quantization, section, token_ids
from generation.devices import suited
from messages import some
from models.checkpoints.adapter import Put, read_adapter
from models.checkpoints.files import CheckpointError, Opened, naming
from models.checkpoints.gguf_weights import gguf_entries
from models.checkpoints.quantized import OF_MLX, quantized_entries, unreadable
from models.checkpoints.sources import one_version
from models.checkpoints.weights import (
    EMBEDDING,
    FLOATS,
    HEAD,
    Entry,
    Shape,
    StoredTensorOf,
    check_shapes,
    read_tensor,
    shapes_of,
    stored_entries,
)
from models.config import VLMConfig

T = TypeVar("T")
NOTHING: Mapping[str, Any] = MappingProxyType({})

# Keys of generation_config.json that are in the config, or about the file itself.
_NOT_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}


def put_parameter(model: nn.Module, names: Sequence[str], read: Callable[[], Tensor]) -> None:
    """Give a model a tensor as a parameter, under the names of all that share it. `read` reads it."""
    parameter = nn.Parameter(read())
    for name in names:
        owner, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, parameter)


def load(
    cls: type[T],
    source: str | Path | Opened,
    revision: str | None = None,
    dtype: torch.dtype | str | None = "auto",
    device: torch.device | str | None = None,
    put: Put = put_parameter,
    adapter: str | Path | None = None,
) -> T:
    """A checkpoint as a model of class `cls` (`VisionLanguageModel`) in eval mode.

    Nothing is allocated before config, names and shapes have been checked; then one tensor at a time is read
    from the file into its place, so the peak is one copy of the weights. `model.config.eos_token_ids` comes
    from config, generation_config and, where the checkpoint has one, the tokenizer.

    Args:
        source: a folder, a repository id on the Hub, or its files: whoever opened these sees to it that they
            do not change meanwhile (`models.checkpoints.sources.one_version`).
        revision: branch, tag or commit of the repository.
        dtype: a dtype or its name. "auto" is what the device is right and fast with: float32 on a CPU,
            bfloat16 on CUDA (`suited`), elsewhere the stored one. "stored" is the config's own, float32 where
            it names none: for what is saved again.
        device: where the weights go; None is the CPU.
        put: gives the model each tensor.
        adapter: a folder or a repository with a LoRA adapter that changes them; of an `Opened` its own.
    """
    if not isinstance(source, Opened):
        changed = None if adapter is None else read_adapter(adapter)
        return one_version(source, revision, lambda one: load(cls, one, None, dtype, device, put), changed)
    opened = source
    family = choose_family(opened.config, opened.source)  # no weights are fetched for nothing
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, opened.config, device)
    if quantization(opened.config) and (how := unreadable(opened.config)):
        raise CheckpointError(f"{opened.source}: its weights are {how}")
    entries = entries_of(opened)
    config = read_config(opened.config, opened.source, opened.generation_config, entries)
    stored_tensor = family.tensor_map(entries)
    tied = resolve_tying(config.tie_word_embeddings, stored_tensor, entries, opened.source)
    stops = token_ids(*config.eos_token_ids, end_token_id(opened), vocab_size=config.text.vocab_size)
    config = replace(config, tie_word_embeddings=tied, eos_token_ids=stops)
    model: Any = empty_model(cls, config)
    expected = parameter_shapes(model)
    check_shapes(expected, stored_tensor, shapes_of(entries), family.IGNORABLE, opened.source)
    if opened.adapter is not None:
        put = opened.adapter.around(put, model, opened.folder)
    # The tables first: what `put` makes of a tensor takes most beside it while little else is there.
    ordered = sorted(expected.items(), key=lambda item: item[0] not in (EMBEDDING, HEAD))
    fill(model, dict(ordered), stored_tensor, entries, dtype, device, put, (HEAD,) if tied else ())
    model.origin = opened.origin
    model.generation_config = {
        name: value for name, value in opened.generation_config.items() if name not in _NOT_KEPT
    }
    if opened.adapter is not None:  # it knows something else
        model.generation_config.pop("knows", None)
    return model.eval()


def entries_of(opened: Opened) -> dict[str, Entry]:
    """Every stored tensor of a checkpoint, by its name in the Hub's layout."""
    if opened.files.gguf:
        return gguf_entries(opened, opened.weights)
    entries = stored_entries(opened)
    foreign = quantization(opened.config) or any(map(OF_MLX, entries))
    if not foreign and (parts := [name for name in entries if name.endswith((".qweight", ".weight_scale"))]):
        raise CheckpointError(f"{opened.source}: {some(parts)}: quantized, and config.json does not say how")
    return quantized_entries(entries, opened.config) if foreign else entries


def choose_family(config: Mapping, source: str) -> ModuleType:
    """The family of a config.json; an architecture that no family reads is refused."""
    if (family := family_of(config)) is not None:
        return family
    raise CheckpointError(
        f"{source}: unsupported architecture (model_type {config.get('model_type')!r}); supported are "
        f"{'; '.join(family.TITLE for family in FAMILIES.values())}, and as backbones of a new "
        "model (VisionLanguageModel.from_backbones) SigLIP, Llama, Qwen2 and Qwen3"
    )


def read_config(
    config: Mapping, source: str, generation: Mapping = NOTHING, stored: Mapping[str, Entry] = NOTHING
) -> VLMConfig:
    """The model that a config.json describes. A CheckpointError says what is wrong with it, values of other
    kinds than its keys have included."""
    family = choose_family(config, source)
    with naming(f"{source}: config.json"):
        return family.read_config(config, generation, stored)


def resolve_tying(
    claimed: bool, stored_tensor: StoredTensorOf, entries: Mapping[str, Entry], source: str
) -> bool:
    """True if head and embedding are one tensor, by the config and the stored tensors.

    Claimed and no head of its own: tied. Claimed and a head that differs: both are kept. Not claimed and
    no head: transformers would put a random one; that is refused here.
    """
    first, second = (entries.get(stored_tensor(name).name) for name in (HEAD, EMBEDDING))
    if claimed and first is not None and second is not None and first != second:
        same_form = (first.shape, first.dtype) == (second.shape, second.dtype)
        return same_form and torch.equal(read_tensor(first), read_tensor(second))
    other = any(name.endswith("lm_head.weight") or name == "output.weight" for name in entries)
    if not claimed and first is None and second is not None and not other:  # else check_shapes names it
        raise CheckpointError(
            f"{source}: {stored_tensor(HEAD).name} is missing while tie_word_embeddings is false or absent: "
            "set it to true in config.json if the head is the embedding, or download the weights again"
        )
    return claimed


def empty_model(cls: type[T], config: VLMConfig) -> T:
    """The model that a config describes, on the meta device: shapes without numbers."""
    with meta_init():
        return cls(config)  # type: ignore[call-arg]


def parameter_shapes(model: Any) -> dict[str, Shape]:
    """Every parameter of a model by its name; a tied head is the embedding."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def fill(
    module: nn.Module,
    names: Mapping[str, Shape],
    stored_tensor: StoredTensorOf,
    entries: Mapping[str, Entry],
    dtype: torch.dtype,
    device: torch.device,
    put: Put = put_parameter,
    tied: tuple[str, ...] = (),
) -> None:
    """Replace the (meta) parameters `names` of a module by stored tensors, one at a time. `tied` are names
    that share the embedding."""
    try:
        for name, shape in names.items():
            place = stored_tensor(name)
            read = partial(read_tensor, entries[place.name], shape, dtype, device, place.part, place.parts)
            put(module, (name, *tied) if name == EMBEDDING else (name,), read)
    except (RuntimeError, MemoryError) as error:
        # On a CPU PyTorch raises a bare RuntimeError.
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)):
            raise
        count = sum(math.prod(shape) for shape in names.values()) / 1e9
        raise MemoryError(f"{count:.3g} billion weights take more memory than {device} has left") from error


@contextmanager
def meta_init() -> Iterator[None]:
    """Modules made inside have shapes and no numbers.

    PyTorch's own initialisation of them is left out: for drawing numbers that do not exist it would import
    its whole compiler (75 MB, one to three seconds).
    """
    with torch.device("meta"), Uninitialised():
        yield


class Uninitialised(TorchFunctionMode):
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
        text = config.get("text_config")
        sections = (config, text if isinstance(text, dict) else {})
        named = (section.get(key) for section in sections for key in ("dtype", "torch_dtype"))
        stored = resolve_dtype(next(filter(None, named), "float32"), {}, device)
        return stored if dtype == "stored" else suited(device, stored)
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"unknown dtype {dtype!r}: expected auto, {', '.join(_DTYPES)} or stored")
    return _DTYPES[name]


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device to load to, which must work here; None is the CPU."""
    try:
        chosen = torch.device("cpu" if device is None else device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:  # AssertionError: built without CUDA
        raise CheckpointError(
            f"device {str(device)!r} cannot be used, expected cpu, cuda, cuda:N or mps as this machine has: "
            f"{str(error).splitlines()[0]}"
        ) from None
    return chosen


def prepare_device(device: torch.device | str) -> torch.device:
    """The device, ready to compute on. Whoever chooses a device calls this: its settings are PyTorch's, and
    hold for the process."""
    device = torch.device(device)
    if device.type == "cuda":
        # On Hopper and Blackwell PyTorch asks cuDNN's attention first, which plans anew for each key length:
        # while decoding, for each token. Flash and memory-efficient attention plan nothing.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Convolutions in float32 would keep 10 bits of each factor: float32 is to mean float32.
        torch.backends.cudnn.allow_tf32 = False
        if device.index is not None:  # in this thread; what others do there names its device
            torch.cuda.set_device(device)
    return device


# ----------------------------------------------------------------------------------------------- end token
def end_token_id(opened: Opened) -> int | None:
    """The id of the tokenizer's end token; None where there is no tokenizer or it names none.

    tokenizer_config.json (or, in old repositories, special_tokens_map.json) names the token, and
    tokenizer_config.json or tokenizer.json gives its id. The large tokenizer.json is read only where the
    small one does not.
    """
    # nanoVLM's tokenizer is in the folder `lm_tokenizer`, where it is not beside the weights.
    inside, beside = opened.config.get("lm_tokenizer"), ("tokenizer.json", "tokenizer_config.json")
    folder = f"{inside}/" if inside and opened.commit is None and not any(map(opened.file, beside)) else ""
    config = opened.json(f"{folder}tokenizer_config.json")
    token = _text(config.get("eos_token"))
    token = token or _text(opened.json(f"{folder}special_tokens_map.json").get("eos_token"))
    added = {_text(one): int(id) for id, one in section(config, "added_tokens_decoder").items()}
    if token is None or token in added:
        return added.get(token)
    tokenizer = opened.json(f"{folder}tokenizer.json")
    added = {_text(one): one["id"] for one in tokenizer.get("added_tokens") or ()}
    vocab = section(section(tokenizer, "model"), "vocab")
    return added.get(token, vocab.get(token) if isinstance(vocab, dict) else None)


def _text(token: object) -> str | None:
    """A token's text, which is stored alone or in an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
