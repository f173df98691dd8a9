"""Loading: find the files, choose the family, check names and shapes, then fill the parameters one by one.

    model = load(VisionLanguageModel, "HuggingFaceTB/SmolVLM-256M-Instruct", dtype="bfloat16")

What is a family's own is in its file of `families/`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from families import FAMILIES
from families.keys import section
from models.checkpoints.hub import (
    CheckpointError,
    CheckpointFiles,
    locate,
    naming,
    read_json,
    resolve_source,
    state_of,
)
from models.checkpoints.weights import (
    FLOATS,
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
Put = Callable[[nn.Module, Sequence[str], Callable[[], Tensor]], None]

HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.embed_tokens.weight"
# Keys of generation_config.json that are in the config, or about the file itself.
_NOT_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
# The dtype that "auto" means: on a CPU float32 is exact, and bfloat16 no faster for one question.
AUTO_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
_LAYER = re.compile(r"(\w+)\.layers\.(\d+)\.(.+)")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}


def put_parameter(model: nn.Module, names: Sequence[str], read: Callable[[], Tensor]) -> None:
    """Give a model a tensor as a parameter, under the names of all that share it. `read` reads it."""
    parameter = nn.Parameter(read())
    for name in names:
        owner, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, parameter)


def load(
    cls: type[T],
    source: str | Path,
    revision: str | None = None,
    dtype: torch.dtype | str | None = "auto",
    device: torch.device | str | None = None,
    put: Put = put_parameter,
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
        put: gives the model each tensor.
    """
    return one_version(source, revision, lambda: _load(cls, source, revision, dtype, device, put))


def _load(cls: Any, source, revision, dtype, device, put) -> Any:
    files = locate(source, revision, check=choose_family)  # no weights are fetched for nothing
    family = choose_family(files.config, files.source)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, files.config, device)
    if how := quantization(files.config):
        raise CheckpointError(f"{files.source}: its weights are {how}: take the unquantized one")
    entries = stored_entries(files)
    with naming(files.source):
        config = family.read_config(files.config, files.generation_config, entries)
    stored_tensor = family.tensor_map(entries)
    tied = resolve_tying(config.tie_word_embeddings, stored_tensor, entries, files.source)
    stops = set(config.eos_token_ids)
    end = end_token_id(files)
    if end is not None and 0 <= end < config.text.vocab_size:
        stops.add(end)
    config = replace(config, tie_word_embeddings=tied, eos_token_ids=tuple(sorted(stops)))
    expected = expected_shapes(cls, config)
    check_shapes(expected, stored_tensor, shapes_of(entries), family.IGNORABLE, files.source)
    with meta_init():
        model = cls(config)
    # The tables first: what `put` makes of a tensor takes most beside it while little else is there.
    names = sorted(expected, key=lambda name: name not in (EMBEDDING, HEAD))
    ordered = {name: expected[name] for name in names}
    fill(model, ordered, stored_tensor, entries, dtype, device, put, (HEAD,) if tied else ())
    model.origin = replace(files.origin, weights=files.weights)
    model.generation_config = {
        name: value for name, value in files.generation_config.items() if name not in _NOT_KEPT
    }
    return model.eval()


def choose_family(config: Mapping, source: str) -> ModuleType:
    """The family of a config.json; an architecture that no family reads is refused."""
    for family in FAMILIES.values():
        if family.recognises(config):
            return family
    raise CheckpointError(
        f"{source}: unsupported architecture (model_type {config.get('model_type')!r}); supported are "
        f"{'; '.join(family.TITLE for family in FAMILIES.values())}, and as backbones of a new "
        "model (VisionLanguageModel.from_backbones) SigLIP, Llama, Qwen2 and Qwen3"
    )


def quantization(config: Mapping) -> str:
    """What a config.json says of quantized weights (MLX by the second key), such as "quantized (fp8)", else
    ""."""
    stored = section(config, "quantization_config") or section(config, "quantization")
    bits = f"{stored['bits']} bits" if stored.get("bits") else ""
    how = str(stored.get("quant_method") or stored.get("quant_algo") or bits)[:40]
    return "quantized" + (f" ({how})" if how else "") if stored else ""


def resolve_tying(
    claimed: bool, stored_tensor: StoredTensorOf, entries: Mapping[str, Entry], source: str
) -> bool:
    """Whether head and embedding are one tensor, from what the config claims and what is stored.

    Claimed and no head of its own: tied. Claimed and a head that differs: both are kept. Not claimed and
    no head: transformers would put a random one; that is refused here.
    """
    head, embedding = stored_tensor(HEAD).name, stored_tensor(EMBEDDING).name
    if not claimed:
        other = any(name.endswith("lm_head.weight") or name == "output.weight" for name in entries)
        if head not in entries and embedding in entries and not other:  # else check_shapes names it
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
    """Every parameter of the model that a config describes, and its shape, from a model of one layer a kind:
    a thousand layers take seconds to build, and a file that does not have them is to be refused before.
    """
    vision, text = config.vision, config.text
    depth = {"vision_model": vision.num_hidden_layers, "language_model": text.num_hidden_layers}
    kinds = sorted(set(text.layer_types))
    alike = replace(text, num_hidden_layers=len(kinds) or 1, layer_types=tuple(kinds))
    with meta_init():
        model = cls(replace(config, vision=replace(vision, num_hidden_layers=1), text=alike))
    expected: dict[str, Shape] = {}
    for name, parameter in model.named_parameters():
        names = [name]
        if found := _LAYER.fullmatch(name):
            tower, kind, rest = found[1], int(found[2]), found[3]
            layers = list(range(depth[tower]))
            if tower == "language_model" and kinds:
                layers = [layer for layer in layers if text.mixer(layer) == kinds[kind]]
            names = [f"{tower}.layers.{layer}.{rest}" for layer in layers]
        expected |= dict.fromkeys(names, tuple(parameter.shape))
    return expected


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
        text = config.get("text_config")
        sections = (config, text if isinstance(text, dict) else {})
        named = (section.get(key) for section in sections for key in ("dtype", "torch_dtype"))
        stored = resolve_dtype(next(filter(None, named), "float32"), {}, device)
        return stored if dtype == "stored" else AUTO_DTYPE.get(device.type, stored)
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


# ----------------------------------------------------------------------------------------------- end token
_RELATIVE = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")


def end_token_id(files: CheckpointFiles) -> int | None:
    """The id of the tokenizer's end token; None where there is no tokenizer or it names none.

    tokenizer_config.json (or, in old repositories, special_tokens_map.json) names the token, and
    tokenizer_config.json or tokenizer.json gives its id. The large tokenizer.json is read only where the
    small one does not.
    """
    folder, inside = "", files.config.get("lm_tokenizer")
    # nanoVLM's tokenizer is in the folder `lm_tokenizer`, where it is not beside the weights.
    has_folder = files.origin.commit is None and isinstance(inside, str) and _RELATIVE.fullmatch(inside)
    if has_folder and not files.find("tokenizer.json") and not files.find("tokenizer_config.json"):
        folder = f"{inside}/"

    def read(name: str) -> dict:
        path = files.find(folder + name)
        return {} if path is None else read_json(path)

    config = read("tokenizer_config.json")
    # A repository that has no tokenizer is not asked for the other files of one.
    if not config and files.origin.commit is not None:
        return None
    token = _text(config.get("eos_token")) or _text(read("special_tokens_map.json").get("eos_token"))
    if token is None:
        return None
    decoder = config.get("added_tokens_decoder")
    for token_id, added in decoder.items() if isinstance(decoder, dict) else ():
        if _text(added) == token and token_id.isdecimal() and len(token_id) < 10:
            return int(token_id)
    tokenizer = read("tokenizer.json")
    added_tokens, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocab) if isinstance(vocab, dict) else {}
    for added in reversed(added_tokens) if isinstance(added_tokens, list) else ():
        if isinstance(added, dict) and _text(added) == token:
            ids[token] = added.get("id")
    return ids[token] if isinstance(ids.get(token), int) else None


def _text(token: object) -> str | None:
    """A token's text, which is stored alone or in an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


# --------------------------------------------------------------------------- a folder that others write to
# A checkpoint is many files, and nothing tells its readers when all of them belong together: whoever saves it
# may exchange the folder (as `save` does), rename files over it, or write into them (as transformers does).
# So the files' inodes, lengths and times of change are noted before reading and compared afterwards.

# What a model or a processor is read from, and its temporary names: `.NAME.a1B2c3` from rsync. A run's log
# beside it grows without being part of it.
_READ = re.compile(r"\.?[\w-][\w.-]*\.(safetensors|gguf|json|jinja|model|txt)(\.\w+)?", re.ASCII)
_READ_BELOW = ("*/tokenizer*", "*/*.jinja", ".cache/huggingface/download/*.incomplete")
_TRIES, _PAUSE = 5, 0.5  # seconds


class BeingWrittenError(CheckpointError):
    """A folder changed each time it was read."""


def one_version(source: str | Path, revision: str | None, read: Callable[[], T]) -> T:
    """The result of `read`, all of it from files that did not change meanwhile.

    `read` may be called several times, and what it raises about a folder that changes is forgotten. A
    repository's files are those of one commit and do not change.
    """
    folder = Path(resolve_source(source, revision))
    folder = folder.parent if folder.is_file() else folder  # of GGUF files
    if not folder.is_dir():
        return read()
    for _ in range(_TRIES):
        before = _state(folder)
        try:
            result = read()
        except BeingWrittenError:
            break
        except Exception:
            if _state(folder) == before:
                raise
        else:
            if _state(folder) == before:
                return result
            del result  # so that two models are never held at once
        time.sleep(_PAUSE)
    raise BeingWrittenError(
        f"{source} changed each time it was read: wait until the process that saves to it has finished, and "
        f"try again"
    )


def _state(folder: Path) -> set[tuple]:
    """The state of each file that a checkpoint is read from."""
    paths = [path for path in folder.glob("*") if _READ.fullmatch(path.name)]
    found = set[tuple]()
    for path in (*paths, *(path for pattern in _READ_BELOW for path in folder.glob(pattern))):
        with suppress(OSError):  # it went between the list and this
            found.add(state_of(path))
    return found
