"""Saves a run's model as a checkpoint in the Hub's layout with its card and adapters; uploads it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.processor import Processor
from messages import one_line
from models.checkpoints.files import CheckpointError
from models.checkpoints.load import empty_model, parameter_shapes
from models.checkpoints.save import Pending, model_card, public_name, written
from models.checkpoints.sources import open_files
from models.config import VLMConfig
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig, dataset_entries
from training.distributed import Ranks, has_codes, whole
from training.lora import all_merged, merged, save_adapter
from training.optim import part_of
from training.task import Score, Task

# Settings that a model card leaves out: they name places, or do not change what is learned.
_OF_THE_MACHINE = {
    "output",
    "resume",
    "init_from",
    "vision_from",
    "text_from",
    "device",
    "threads",
    "workers",
}
_OF_THE_MACHINE |= {"data", "eval_data", "tracker", "push_to_hub", "keep", "log_every", "save_every"}


def whole_tensors(
    model: nn.Module, average: dict[str, Tensor], ranks: Ranks, everywhere: bool = False
) -> dict[str, Tensor]:
    """Every parameter by its name, averaged where there is an average, gathered from all ranks. All call it;
    the first gets them, or `everywhere` all do. The average has the names of the module around the model
    (`model.…`)."""
    tensors = {}
    for name, parameter in model.named_parameters():
        value = whole(average.get(f"model.{name}", parameter))
        if ranks.is_first or everywhere:
            tensors[name] = value.cpu() if model.device.type != "cpu" else value
    return tensors


def save_model(
    task: Task, average: dict[str, Tensor], step: int, scores: dict[str, Score], folder: Path
) -> str:
    """Write the run's model to a folder, with adapters merged and saved beside it; all ranks call it.
    Returns, on the first rank, why it could not be written, or ""."""
    config, tensors = task.config, whole_tensors(task.model, average, task.ranks)
    if not task.ranks.is_first:
        return ""
    # Model and adapter are replaced together.
    extra = None
    if config.lora_rank:
        extra = partial(save_adapter, tensors, config, written(task.model.config)[1])
    try:
        card, pending = run_card(task, config, step, scores), None
        if has_codes(task.model):
            model, pending = merged_base(task.model, tensors, config)
        else:
            model = plain_model(task.model, tensors, config)
        model.generation_config = _said(task.model, config)
        model.save_pretrained(folder, task.processor, card=card, extra_files=extra, tensors=pending)
    except (CheckpointError, OSError) as error:
        return one_line(error)
    return ""


def _said(model: VisionLanguageModel, config: TrainConfig) -> dict[str, Any]:
    """The generation_config of a run's model. What the model that rows are trained on says that it knows is
    not what it knows afterwards."""
    return {key: value for key, value in model.generation_config.items() if config.is_drawn or key != "knows"}


def plain_model(
    model: VisionLanguageModel, tensors: dict[str, Tensor], config: TrainConfig
) -> VisionLanguageModel:
    """A separate model that holds these tensors (not copies), adapters merged."""
    if config.lora_rank:
        tensors = all_merged(tensors, config)
    new = empty_model(VisionLanguageModel, model.config)
    tied = model.config.tie_word_embeddings
    if tied:
        tensors = tensors | {"language_model.lm_head.weight": tensors["language_model.embed_tokens.weight"]}
    new.load_state_dict(tensors, assign=True)
    if tied:
        new.language_model.lm_head.weight = new.language_model.embed_tokens.weight
    return new


def merged_base(
    model: VisionLanguageModel, tensors: dict[str, Tensor], config: TrainConfig
) -> tuple[VisionLanguageModel, dict[str, Pending]]:
    """The base of a run beside codes, without numbers, and its tensors with adapters merged: each is read
    from the base's files again, in the config's type, bfloat16 for GGUF, when it is written."""
    pending: dict[str, Pending] = {}

    def put(_: nn.Module, names: Sequence[str], read: partial[Tensor]) -> None:
        name, (entry, shape, dtype, *place) = names[0], read.args

        def make() -> Tensor:
            weight = (
                tensors[name]
                if part_of(name) in config.learns
                else read.func(entry, shape, torch.float32, *place)
            )
            return merged(name, weight, tensors, config).to(dtype)

        pending[name] = Pending(shape, dtype, make)

    opened = open_files(config.init_from, model.origin.commit if model.origin else None)
    dtype = "bfloat16" if opened.files.gguf else "stored"
    return VisionLanguageModel.from_pretrained(opened, None, dtype, "cpu", put), pending


def answering_model(task: Task, everywhere: bool = True, copied: bool = False) -> VisionLanguageModel:
    """The model as it answers now: the one that trains, or, where that is sharded, computes in another dtype
    or is to be `copied`, one put together of its weights; beside codes it is always the one that trains. All
    ranks call it; the first gets it, or all do `everywhere`."""
    model, ranks, config = task.model, task.ranks, task.config
    sharded = config.parallel == "fsdp" and ranks.together
    if has_codes(model) or not (sharded or copied or task.dtype != model.dtype):
        return model
    tensors = whole_tensors(model, {}, ranks, everywhere)
    if copied:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return plain_model(model, tensors, config).to(ranks.device, task.dtype) if tensors else model


def size_of(config: VLMConfig) -> int:
    """The number of weights of a model, however they are kept."""
    return sum(map(math.prod, parameter_shapes(empty_model(VisionLanguageModel, config)).values()))


def run_card(task: Task, config: TrainConfig, step: int, scores: dict[str, Score]) -> str:
    rows = [
        f"| {name.removeprefix('eval_')} | {one.value:.3f} | {one.interval_text} | {one.n:,} |"
        for name, one in scores.items()
    ]
    table = "\n".join(["| held-out, in the run | value | 95% interval | n |", "| --- " * 4 + "|", *rows])
    extra: dict[str, Any] = {"license": task.license} if task.license else {}
    if not config.is_drawn:
        entries = dataset_entries(config.data)
        spoken = " ".join(str(entry.get("language", "")) for entry in entries)
        extra["language"] = sorted({*spoken.replace(",", " ").split()}) or None  # nobody said which
        extra["datasets"] = _on_the_hub(str(entry["path"]) for entry in entries)
    extra["base_model"] = _on_the_hub((config.init_from, config.vision_from, config.text_from))
    changed = (item for item in fields(config) if item.name not in _OF_THE_MACHINE)
    values = ((item.name, getattr(config, item.name), item.default) for item in changed)
    settings = [f"| `{name}` | {value} |" for name, value, default in values if value != default]
    table_of_settings = "\n".join(["", "", "| setting | value |", "| --- | --- |", *settings])
    return model_card(
        config.push_to_hub or Path(config.output).resolve().name,
        task.model.config,
        size_of(task.model.config),
        summary=task.summary,
        training_data=task.training_data(step) + (table_of_settings if settings else ""),
        evaluation=table if scores else "None yet.",
        **extra,
    )


def _on_the_hub(sources: Iterable[str]) -> list[str] | None:
    """Those of models or datasets that others find there."""
    there = (one for one in sources if one.count("/") == 1 and public_name(one) == one)
    return [*dict.fromkeys(there)] or None


def push(config: TrainConfig) -> None:
    """Upload the model that is in the output folder, unless the Hub has it already, from whichever machine.
    It stays in the folder if this fails, and the same command tries again."""
    model = VisionLanguageModel.from_pretrained(config.output, dtype="stored")
    processor = Processor.from_pretrained(config.output, config=model.config)
    # The client leaves out files of which the Hub has the same bytes; of none, it makes no commit.
    print(model.push_to_hub(config.push_to_hub, processor))
