"""Saving: the transformers Idefics3 layout, written beside the target and moved into its place as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from models.checkpoints import idefics3
from models.checkpoints.atomic_folder import replace_folder
from models.checkpoints.errors import CheckpointError
from models.checkpoints.locate import INDEX, WEIGHTS
from models.checkpoints.processor_files import (
    check_processor,
    transformers_processor,
    write_json,
    write_processor,
)
from models.checkpoints.safetensors_io import write_file
from models.checkpoints.tensor_map import StoredTensor, export_tensors
from models.config import VLMConfig

if TYPE_CHECKING:
    from models.vision_language_model import VisionLanguageModel

MAX_SHARD_BYTES = 5_000_000_000
CARD = "README.md"

# Weights and configs of the checkpoint that is replaced: never carried over to the new one.
_REPLACED = re.compile(
    r"(model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|pytorch_model.*|config\.json"
    r"|generation_config\.json)"
)
_PROCESSOR = re.compile(
    r"((pre)?processor_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|chat_template\.jinja|additional_chat_templates|merges\.txt|tokenizer\.model"
)


def save(
    model: VisionLanguageModel,
    folder: str | Path,
    processor=None,
    card: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint that transformers 4.57 and 5, and with them vLLM and others, open unconverted.

    Args:
        model: weights are written bit for bit, in the dtype that they have.
        folder: made or replaced as a whole; files of others in it stay.
        processor: a transformers Idefics3Processor, or our Processor that holds one; its tokenizer's end
            token joins the stop tokens. Without one the processor files that the folder already has stay.
        card: text of the model card, README.md.
        max_shard_bytes: weights beyond this go into several files with an index.
        beside: writes what else belongs to the model into the new folder, before that takes its place.

    Returns:
        The folder.

    Raises:
        CheckpointError: if the layout cannot express the model, the processor does not fit it, or the folder
            cannot be written; in each case what the folder held is unchanged.
    """
    folder, contents = Path(folder), idefics3_contents(model, processor)

    def is_ours(name: str) -> bool:
        return is_checkpoint_file(name, with_processor=processor is not None)

    with replace_folder(folder, is_ours) as new:
        contents.write(new, max_shard_bytes)
        if card is not None:
            (new / CARD).write_text(card, encoding="utf-8")
        if beside is not None:
            beside(new)
    return folder


@dataclass(frozen=True)
class Contents:
    """What a checkpoint in transformers' layout consists of, checked and not yet written."""

    config: dict
    generation_config: dict
    tensors: Mapping[str, Tensor]
    processor: Any = None

    def write(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Into a folder that exists."""
        write_json(folder / "config.json", self.config)
        write_json(folder / "generation_config.json", self.generation_config)
        write_weights(self.tensors, folder, max_shard_bytes)
        if self.processor is not None:
            write_processor(self.processor, folder)


def idefics3_contents(model: VisionLanguageModel, processor=None) -> Contents:
    """A model, and its processor where given, in transformers' layout; see `save`.

    Raises:
        CheckpointError: if the layout cannot express the model, it has no weights, or the processor does not
            fit it.
    """
    config = model.config
    if processor is not None:
        processor = transformers_processor(processor)
        check_processor(processor, config)
        config = with_tokenizer_ids(config, processor.tokenizer)
    config_json = idefics3.write_config(config, str(model.dtype).removeprefix("torch."))
    generation_json = idefics3.write_generation_config(config, model.generation_config)
    state = dict(model.named_parameters())  # a tied head is listed once, as the embedding
    unloaded = [name for name, parameter in state.items() if parameter.is_meta]
    if unloaded:
        raise CheckpointError(
            f"the model has no weights yet: {len(unloaded)} of its parameters are on the meta device"
        )
    tensors = export_tensors(state, lambda name: StoredTensor(idefics3.stored_name(name)))
    return Contents(config_json, generation_json, tensors, processor)


def is_checkpoint_file(name: str, with_processor: bool = True) -> bool:
    """Whether a new checkpoint in a folder replaces this file of the old one."""
    return bool(_REPLACED.fullmatch(name) or (with_processor and _PROCESSOR.fullmatch(name)))


def with_tokenizer_ids(config: VLMConfig, tokenizer) -> VLMConfig:
    """The config with the tokenizer's end token among its stop tokens, and its pad and begin tokens by
    default.
    """
    stops = set(config.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    pad = config.pad_token_id if config.pad_token_id is not None else tokenizer.pad_token_id
    bos = config.bos_token_id if config.bos_token_id is not None else tokenizer.bos_token_id
    return replace(config, eos_token_ids=tuple(sorted(stops)), pad_token_id=pad, bos_token_id=bos)


def write_weights(tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
    """model.safetensors, or as many shards as needed and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled, total = filled + size, total + size
    if len(shards) == 1:
        write_file(folder / WEIGHTS, shards[0])
        return
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    metadata = {"total_parameters": parameters, "total_size": total}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
