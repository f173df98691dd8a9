"""A run as far as it has come, as a checkpoint in the Hub's layout with its card; adapters beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from data.errors import one_line
from models.checkpoints.hub import CheckpointError
from models.checkpoints.load import meta_init
from models.checkpoints.save import model_card
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig
from training.distributed import Ranks
from training.metrics import Metrics
from training.state import gathered
from training.tasks import Task

ADAPTER = "adapter"  # the folder of a run's adapter, in its output


def whole_tensors(
    model: nn.Module, average: dict[str, Tensor], ranks: Ranks, everywhere: bool = False
) -> dict[str, Tensor]:
    """Every parameter by its name, averaged where there is an average, gathered from all ranks; all call it,
    the first gets them.

    Args:
        average: under the names that parameters have in the module around the model (`model.…`).
        everywhere: all ranks get them.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        value = gathered(average.get(f"model.{name}", parameter))
        if ranks.is_first or everywhere:
            tensors[name] = value.cpu() if model.device.type != "cpu" else value
    return tensors


def export(
    model: VisionLanguageModel,
    tensors: dict[str, Tensor],
    processor,
    config: TrainConfig,
    card: str,
    folder: Path,
) -> None:
    """Write the model with these tensors to a folder, with adapters merged and beside it.

    Raises:
        CheckpointError: the folder cannot be written; what it held is unchanged.
    """
    beside = None
    if config.lora_rank:
        from training.lora import save_adapter  # peft takes seconds to import

        beside = partial(save_adapter, tensors, config)  # model and adapter change places together
    plain_model(model, tensors, config).save_pretrained(folder, processor, card=card, extra_files=beside)


def plain_model(
    model: VisionLanguageModel, tensors: dict[str, Tensor], config: TrainConfig
) -> VisionLanguageModel:
    """A model of its own with these tensors, adapters merged."""
    if config.lora_rank:
        from training.lora import merged

        tensors = merged(tensors, config)
    return filled(model, tensors)


def filled(model: VisionLanguageModel, tensors: dict[str, Tensor]) -> VisionLanguageModel:
    """A model like that one which holds these tensors, not copies."""
    with meta_init():
        new = VisionLanguageModel(model.config)
    tied = model.config.tie_word_embeddings
    missing, unexpected = new.load_state_dict(tensors, strict=False, assign=True)
    expected_missing = {"language_model.lm_head.weight"} if tied else set()
    assert set(missing) <= expected_missing and not unexpected, f"lacks {missing}, has {unexpected}"
    if tied:
        new.language_model.lm_head.weight = new.language_model.embed_tokens.weight
    new.generation_config = model.generation_config
    return new


def run_card(task, config: TrainConfig, step: int, scores: dict[str, float]) -> str:
    """The model card of a run as far as it has come."""
    rows = [{"held-out, in the run": k.removeprefix("eval_"), "value": f"{v:.3f}"} for k, v in scores.items()]
    extra: dict[str, Any] = {"license": "apache-2.0"} if config.is_shapes else {}
    return model_card(
        config.push_to_hub or Path(config.output).resolve().name,
        task.model.config,
        sum(p.numel() for n, p in task.model.named_parameters() if "lora_" not in n),
        summary=task.summary,
        training_data=task.training_data(step),
        evaluation=rows or None,
        **extra,
    )


def save_model(
    config: TrainConfig,
    ranks: Ranks,
    task: Task,
    average: dict[str, Tensor],
    metrics: Metrics,
    step: int,
    scores: dict[str, float],
) -> str:
    """The model as it is after a step, in the output folder; all ranks call it. What kept it from being
    written, which is said as well, on the first rank; empty where nothing did."""
    tensors = whole_tensors(task.model, average, ranks)
    if ranks.is_first:
        try:
            card = run_card(task, config, step, scores)
            export(task.model, tensors, task.processor, config, card, Path(config.output))
        except (CheckpointError, OSError) as error:
            metrics.say(f"step {step}: the model could not be saved, the run goes on: {error}")
            return one_line(error)
    return ""


def push(config: TrainConfig) -> None:
    """Upload what was written; it stays in the output folder whatever becomes of this."""
    from data.processor import Processor

    model = VisionLanguageModel.from_pretrained(config.output, dtype="stored")
    processor = Processor.from_pretrained(config.output, config=model.config)
    print(model.push_to_hub(config.push_to_hub, processor))
