"""Saving and uploading in transformers' layout of the model's family, with processor files and a model card.

    save(model, "runs/mine", processor=processor)         # a folder that transformers opens unconverted
    push(model, "me/mine", processor=processor)           # the same on the Hub, in one commit

A folder is written beside its target and moved into its place as a whole.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from families import FAMILIES
from families.saving import write_ids
from models.checkpoints.files import INDEX, PROCESSOR_FILES, CheckpointError, read_json
from models.checkpoints.folder import replace_folder
from models.checkpoints.hub import client, fetched, one_sentence
from models.checkpoints.load import choose_family
from models.checkpoints.weights import FLOATS, Shape, StoredTensorOf, memory_of
from models.config import VLMConfig

MAX_SHARD_BYTES = 5_000_000_000
CARD = "README.md"
_NAMES = {dtype: name for name, dtype in FLOATS.items()}

# Files of the checkpoint that is replaced, and of its processor: never carried over to the new one.
_REPLACED = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|pytorch_model.*|(generation_)?config\.json"
)
_PROCESSOR = {*PROCESSOR_FILES, "additional_chat_templates"} - {"config.json", "generation_config.json"}


def save(
    model: Any,
    folder: str | Path,
    processor=None,
    card: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Callable[[Path], None] | None = None,
    tensors: Mapping[str, Pending] | None = None,
) -> Path:
    """Write a checkpoint that transformers 4.57 and 5, and with them vLLM and others, open unconverted.

    Args:
        model: a VisionLanguageModel; weights are written bit for bit, in the dtype that they have.
        folder: made or replaced as a whole; files of others in it stay. Where saving fails, it is unchanged.
        processor: transformers' of the model's family, or our Processor that holds one; its tokenizer's end
            token joins the stop tokens. Without one the processor files that the folder already has stay.
        card: text of the model card, README.md.
        max_shard_bytes: weights beyond this go into several files with an index.
        extra_files: writes what else belongs to the model into the new folder, before that takes its place.
        tensors: take the place of the model's own, by name, a tied head left out.
    """
    folder = Path(folder)
    with replace_folder(folder, lambda name: is_checkpoint_file(name, processor is not None)) as new:
        write_checkpoint(model, new, processor, max_shard_bytes, tensors)
        if card is not None:
            (new / CARD).write_text(card, encoding="utf-8")
        if extra_files is not None:
            extra_files(new)
    return folder


def write_checkpoint(
    model: Any,
    folder: Path,
    processor=None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tensors: Mapping[str, Pending] | None = None,
) -> None:
    """A model, and its processor where given, in transformers' layout, into a folder that exists."""
    config = model.config
    if processor is not None:
        processor = transformers_processor(processor)
        _check_processor(processor, config)
        config = _with_tokenizer_ids(config, processor.tokenizer)
    written(config)  # refused before anything is unpacked
    tensors = stored_tensors(model) if tensors is None else tensors
    dtype = min({tensor.dtype for tensor in tensors.values()}, key=lambda one: one == torch.bfloat16)
    described, places = written(config, str(dtype).removeprefix("torch."))
    write_json(folder / "config.json", described)
    # Greedy, unless what was loaded says otherwise.
    generation = {"do_sample": False, **model.generation_config, **write_ids(config)}
    write_json(folder / "generation_config.json", generation)
    family = FAMILIES[config.family]
    in_files = getattr(family, "saved_name", str)
    stored = {in_files(name): tensor for name, tensor in placed(tensors, places).items()}
    write_weights(stored, folder, max_shard_bytes)
    if processor is not None:
        _write_processor(processor, folder, *family.PROCESSORS[described["model_type"]])


def written(config: VLMConfig, dtype: str = "float32") -> tuple[dict, StoredTensorOf]:
    """The config.json that saving a model writes, and where each of our tensors goes. A CheckpointError says
    why it cannot be saved: a trainer asks before the first step, not after the last."""
    described = FAMILIES[config.family].write(config, dtype)
    return described, choose_family(described, "config.json").tensor_map((), config)


def stored_tensors(model: Any) -> dict[str, Pending]:
    """A model's tensors by name, a tied head once, as the embedding. Of one that was rearranged for decoding
    they are what it was loaded with, to the bit, and each is made when it is written. Raises CheckpointError
    for weights that are not there, on the meta device or rounded to int8 or four bits."""
    found: dict[str, Pending] = {}
    for read in _parts_of(model):
        for name, tensor in read().items():
            make = lambda read=read, name=name: read()[name]
            found[name] = Pending(tuple(tensor.shape), tensor.dtype, make)
            if tensor.is_meta:
                raise CheckpointError("the model has no weights yet: its parameters are on the meta device")
            if tensor.dtype in (torch.int8, torch.int32):
                raise CheckpointError(
                    "the model's weights were rounded to int8 or four bits, which no checkpoint holds: load "
                    "it in another dtype to save it"
                )
    if model.config.tie_word_embeddings:
        del found["language_model.lm_head.weight"]
    if {one.dtype for one in found.values()} == {torch.float32, torch.bfloat16}:
        # Rearranging makes all that is small float32: what loses nothing by it is bfloat16 again.
        for name, one in found.items():
            if one.dtype == torch.float32 and torch.equal((wide := one.make()).bfloat16().float(), wide):
                found[name] = Pending(one.shape, torch.bfloat16, partial(_narrow, one))
    return found


def _parts_of(module: nn.Module, prefix: str = "") -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Functions that give a module's tensors by name, submodule by submodule: rearranged ones are copies."""

    def own() -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        module._save_to_state_dict(tensors, prefix, keep_vars=False)
        return tensors

    yield own
    for name, child in module.named_children():
        yield from _parts_of(child, f"{prefix}{name}.")


def is_checkpoint_file(name: str, with_processor: bool = True) -> bool:
    """True for a file of the old checkpoint in a folder that a new one replaces."""
    return bool(_REPLACED.fullmatch(name)) or (with_processor and name in _PROCESSOR)


def _with_tokenizer_ids(config: VLMConfig, tokenizer) -> VLMConfig:
    """The config with the tokenizer's end token among its stop tokens, and its pad and begin tokens by
    default."""
    stops = {*config.eos_token_ids, tokenizer.eos_token_id} - {None}
    names = [name for name in ("pad_token_id", "bos_token_id") if getattr(config, name) is None]
    own = {name: getattr(tokenizer, name) for name in names}
    return replace(config, eos_token_ids=tuple(sorted(stops)), **own)


def write_weights(tensors: Mapping[str, Pending], folder: Path, max_shard_bytes: int) -> None:
    """model.safetensors, or as many shards as needed and their index."""
    split = client().split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_file(folder / file, {name: tensors[name] for name in names})
    if split.is_sharded:
        total = sum(math.prod(tensor.shape) for tensor in tensors.values())
        metadata = {"total_parameters": total, **split.metadata}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": split.tensor_to_filename})


def write_json(path: Path, value: dict) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------- weights
@dataclass(frozen=True)
class Pending:
    """A tensor that is made when it is written."""

    shape: Shape
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _narrow(wide: Pending) -> Tensor:
    return wide.make().bfloat16()


def placed(tensors: Mapping[str, Pending], places: StoredTensorOf) -> dict[str, Pending]:
    """A model's tensors under a checkpoint's own names; what was split on the way in is fused again."""
    parts: dict[str, list[Pending]] = {}
    stored: dict[str, Pending] = {}
    pairs = ((places(name), tensor) for name, tensor in tensors.items())
    for place, tensor in sorted(pairs, key=lambda pair: pair[0].part):
        own = parts.setdefault(place.name, [])
        own.append(tensor)
        fused = lambda own=own: torch.cat([part.make() for part in own])
        make = fused if place.part else tensor.make
        stored[place.name] = replace(tensor, shape=place.stored_shape(tensor.shape), make=make)
    return stored


def write_file(path: Path, tensors: Mapping[str, Tensor | Pending]) -> None:
    """Write a safetensors file. One tensor at a time is on the CPU; the library wants all of them there."""
    # The library orders by alignment, so that every tensor starts at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        kind, shape = _NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in names:
            tensor = tensors[name]
            made = tensor.make() if isinstance(tensor, Pending) else tensor
            file.write(memory_of(made.detach().cpu().contiguous()))
    path.chmod(0o644)


# ----------------------------------------------------------------------------------------- processor files
# These tokens have a place of their own in every tokenizer, so they are not extra special tokens.
_STANDARD = {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}


def transformers_processor(processor):
    """The transformers processor inside one of ours (`data.processor.Processor`), or the one given."""
    if (inner := getattr(processor, "hf_processor", processor)) is None:
        raise CheckpointError(
            "a nanoVLM processor has no transformers form: save without one, or give one of transformers' own"
        )
    return inner


def _check_processor(processor, config: VLMConfig) -> None:
    ids = processor.image_token_id, config.image_token_id
    checks = {"image token id": ids} if config.vision.num_hidden_layers else {}
    for name in ("image_seq_len", "image_seq_length"):  # the latter is InternVL's; images of own sizes: none
        if (positions := getattr(processor, name, None)) is not None:
            checks[f"tokens per tile ({name})"] = positions, FAMILIES[config.family].positions(config)
    tokens = len(processor.tokenizer)
    checks["number of tokens"] = tokens, min(tokens, config.text.vocab_size)
    for what, (got, expected) in checks.items():
        if got != expected:
            raise CheckpointError(f"the processor's {what}: expected {expected}, as the model has, got {got}")


def _write_processor(processor, folder: Path, kind: str, kind_of_images: str) -> None:
    """Write files that transformers 4.57 and 5 both open as processors of these classes.

    v5 alone writes a tokenizer class, a list of extra special tokens and nested image settings that 4.57 does
    not know; the older forms written here are read by both.
    """
    processor.save_pretrained(folder)
    settings = read_json(folder / "processor_config.json")
    settings["processor_class"] = kind
    image, video = (settings.pop(f"{what}_processor", None) for what in ("image", "video"))
    if image is not None:
        image |= {"image_processor_type": kind_of_images, "processor_class": kind}
        write_json(folder / "preprocessor_config.json", image)
    if video is not None:
        write_json(folder / "video_preprocessor_config.json", video)
    write_json(folder / "processor_config.json", settings)
    tokenizer = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", _portable_tokenizer(tokenizer, kind))


def _portable_tokenizer(config: dict, processor: str) -> dict:
    """tokenizer_config.json with the class and the dictionary of extra special tokens that 4.57 expects."""
    config = {name: value for name, value in config.items() if name not in ("backend", "is_local")}
    extra = config.get("extra_special_tokens") or {}
    roles = {name for name in config if name.endswith("_token")} - _STANDARD
    named = {name: config[name] for name in roles if isinstance(config[name], str)}
    if isinstance(extra, list):
        unnamed = (f"extra_{at}_token" for at in range(len(extra)))
        extra = {name: token for name, token in zip(unnamed, extra) if token not in named.values()}
    return config | {
        "extra_special_tokens": named | extra,
        # Without it 4.57 also returns token_type_ids, which the model does not take.
        "model_input_names": ["input_ids", "attention_mask"],
        "processor_class": processor,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


# --------------------------------------------------------------------------------------------------- upload
def push(
    model: Any,
    repo_id: str,
    processor=None,
    card: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str:
    """Save, then upload in one commit, whose address is returned; the repository is made if need be. Files of
    another model in it are deleted in the same commit, by the rule of `save`; all other files stay.

    Args:
        model, processor, max_shard_bytes: as in `save`.
        repo_id: owner/name.
        card: text of README.md; None takes the one in the folder that the model was loaded from, or leaves
            the one that the repository has, or else writes `model_card` with what the model itself tells.
        private: for a repository that is made now.
        revision: branch to commit to, made if need be.
    """
    with_processor = processor is not None
    card = card_of_origin(model) if card is None else card
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(model, Path(scratch) / "model", processor, card, max_shard_bytes)
        api = client().HfApi()
        with one_sentence(repo_id, revision, "the upload"):
            fetched(api.create_repo, repo_id, private=private, exist_ok=True)
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            held = api.list_repo_files(repo_id, revision=revision)
            if card is None and CARD not in held:
                parameters = sum(math.prod(tensor.shape) for tensor in stored_tensors(model).values())
                text = model_card(repo_id, model.config, parameters, with_processor=with_processor)
                (folder / CARD).write_text(text, encoding="utf-8")
            replaced = [path for path in held if is_checkpoint_file(path.split("/")[0], with_processor)]
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                delete_patterns=replaced or None,  # but for what is uploaded
            )
    return commit.commit_url


def card_of_origin(model: Any) -> str | None:
    """README.md of the folder that a model was loaded from, or None."""
    path = model.origin and model.origin.folder / CARD
    return path.read_text(encoding="utf-8") if path and path.is_file() else None


# ---------------------------------------------------------------------------------------------- model card
def model_card(
    repo_id: str,
    config: VLMConfig,
    parameters: int,
    summary: str = "A vision-language model in transformers' layout, made with Ocelli.",
    training_data: str = "Not stated.",
    evaluation: str = "None yet.",
    with_processor: bool = True,
    **metadata,
) -> str:
    """The text of a model card, README.md with the metadata that the Hub reads.

    Args:
        repo_id: where the model is (to be) found; used in the commands.
        parameters: how many the model has.
        summary: what it is, a sentence or two.
        evaluation: Markdown.
        with_processor: whether the repository has one: without, the card shows how to load the model only.
        metadata: further fields of `huggingface_hub.ModelCardData`: license, language, datasets,
            base_model, …
    """
    tags = ["ocelli", "vision-language", *metadata.pop("tags", [])]
    front = {"library_name": "transformers", "pipeline_tag": "image-text-to-text", "language": "en"}
    card = client().ModelCard.from_template(
        client().ModelCardData(tags=tags, **(front | metadata)),
        Path(__file__).with_name("card.md.jinja"),
        repo_id=repo_id,
        summary=summary,
        parameters=parameters,
        images=config.vision.images(config.scale_factor),
        vision=config.vision,
        text=config.text,
        training_data=training_data,
        evaluation=evaluation,
        with_processor=with_processor,
    )
    return f"{card}\n"


def public_name(source: str) -> str:
    """The name of a model or a dataset for a card: of a path on this machine the last part alone."""
    path = os.path.expanduser(source)
    is_path = os.path.exists(path) or source.startswith(("/", "./", "../", "~")) or source.count("/") > 1
    return os.path.basename(os.path.abspath(path)) if is_path and "://" not in source else source
