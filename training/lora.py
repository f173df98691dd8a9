"""Low-rank adapters (arXiv:2106.09685) through peft: put in, saved as a standard adapter, merged.

The adapter's folder is what peft writes for the transformers model, so that
`PeftModel.from_pretrained(transformers_model, folder)` opens it. A projector that learns beside the adapters
is in it whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from models.checkpoints.save import write_file
from models.checkpoints.weights import StoredTensorOf
from training.config import TrainConfig
from training.optim import part_of

ADAPTER = "adapter"  # the folder of a run's adapter, in its output
_NAME, _BASE = "default", ".base_layer."
_FACTOR = re.compile(rf"(.+)\.lora_([AB])\.{_NAME}\.weight")


def _peft() -> ModuleType:
    import peft  # start-up: it takes seconds to import

    return peft


def lora_config(config: TrainConfig, pattern: str, whole: Sequence[str] = ()):
    """peft's settings, for layers whose names match the `pattern`, and for modules that learn `whole`."""
    return _peft().LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=config.lora_dropout,
        target_modules=pattern,
        bias="none",
        modules_to_save=list(whole) or None,
    )


def adapted_layers(model: nn.Module, config: TrainConfig, places: StoredTensorOf) -> dict[str, nn.Linear]:
    """The linear layers that get adapters. `places` is for names that the tower stores in one tensor: peft
    could not open adapters of these."""
    found = dict[str, nn.Linear]()
    for part, given in (
        ("language_model", config.lora_targets),
        ("vision_model", config.lora_vision_targets),
    ):
        names = [name.strip() for name in given.split(",")] if given else []
        layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear)
            and name.startswith(f"{part}.layers.")
            and places(f"{name}.weight").parts == 1
        }
        known = dict.fromkeys(name.rpartition(".")[2] for name in layers)
        # The default of the language model names what some families have, and others have not.
        wrong = [name for name in names if name not in known]
        if wrong and (part == "vision_model" or len(wrong) == len(names)):
            flag = "--lora-vision-targets" if part == "vision_model" else "--lora-targets"
            raise ValueError(f"{flag}: expected some of {', '.join(known)}, got {', '.join(wrong)}")
        found |= {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in names}
    return found


def add_adapters(model: nn.Module, config: TrainConfig, places: StoredTensorOf) -> None:
    """Put adapters in. From then on they alone train, and a projector with a rate of its own."""
    generator = torch.Generator().manual_seed(config.seed)
    pattern = "|".join(map(re.escape, adapted_layers(model, config, places)))
    _peft().inject_adapter_in_model(lora_config(config, pattern), model, _NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or part_of(name) in config.learns)
        if "lora_A" in name:  # drawn from the run's seed alone
            bound = parameter.shape[1] ** -0.5
            drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            parameter.data.copy_(drawn)


def merged(tensors: Mapping[str, Tensor], config: TrainConfig) -> dict[str, Tensor]:
    """The tensors of a model with adapters as those of one without: W + (alpha / rank) · B A."""
    plain = {
        name.replace(_BASE, "."): value for name, value in tensors.items() if not _FACTOR.fullmatch(name)
    }
    for name, a in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match and match[2] == "A":
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            weight = plain[f"{match[1]}.weight"]
            plain[f"{match[1]}.weight"] = weight + (config.lora_alpha / config.lora_rank) * (b @ a)
    return plain


def save_adapter(
    tensors: Mapping[str, Tensor], config: TrainConfig, places: StoredTensorOf, output: Path
) -> None:
    """Write adapter_model.safetensors and adapter_config.json, under transformers' names, to a new folder.

    places: where transformers has our tensors, of `models.checkpoints.save.written`.
    """
    named, whole, targets = {}, dict[str, None](), dict[str, set[str]]()  # names of modules, each once
    for name, value in tensors.items():
        if match := _FACTOR.fullmatch(name):
            layer = places(f"{match[1]}.weight").name.removesuffix(".weight")
            named[f"base_model.model.{layer}.lora_{match[2]}.weight"] = value.contiguous()
            layers, inside = re.split(r"\.\d+\.", layer, maxsplit=1)  # "self_attn.q_proj", from there on
            targets.setdefault(layers.removeprefix("model."), set()).add(inside)
        elif part_of(name) in config.learns:
            stored = places(name).name
            named[f"base_model.model.{stored}"] = value.contiguous()
            whole[stored.rpartition(".")[0]] = None
    within = [
        rf"{re.escape(layers)}\.\d+\.(.*\.)?({'|'.join(map(re.escape, sorted(names)))})"
        for layers, names in targets.items()
    ]
    described = lora_config(config, rf"(.*\.)?({'|'.join(within)})", [*whole])
    described.base_model_name_or_path = config.init_from
    described.inference_mode = True
    folder = output / ADAPTER
    folder.mkdir()
    described.save_pretrained(folder)
    write_file(folder / "adapter_model.safetensors", named)
