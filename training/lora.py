"""Low-rank adapters (arXiv:2106.09685): put in, saved as peft has them, merged; and the frozen weights beside
them, in float32 or in fewer bits (QLoRA, arXiv:2305.14314).

    model = open_base(config, "cpu")                      # as `--weights` says
    add_adapters(model, config, written(model.config)[1])

The adapter's folder is what peft writes for the transformers model, so that
`PeftModel.from_pretrained(transformers_model, folder)` opens it. A projector that learns beside the adapters
is in it whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from generation.fast.native.build import NoCompiler
from generation.fast.native.panels import to_rows
from generation.fast.quantized import pack_layer, put_layers
from inference.checkpoint import kept_formats
from inference.coded import load_codes
from inference.kept import load_int4
from models.checkpoints.files import Opened
from models.checkpoints.load import Uninitialised, put_parameter
from models.checkpoints.save import write_file
from models.checkpoints.sources import one_version
from models.checkpoints.weights import StoredTensorOf
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig
from training.flops import LINEAR
from training.optim import part_of

ADAPTER = "adapter"  # the folder of a run's adapter, in its output
_NAME, _BASE = "default", ".base_layer."
_FACTOR = re.compile(rf"(.+)\.lora_([AB])\.{_NAME}\.weight")


# --------------------------------------------------------------------------------------------- the base
def weights_of(config: TrainConfig, opened: Opened | None) -> str:
    """The kind of a run's frozen matrices: one of `--weights`, or "codes" for those that the files have."""
    if config.weights != "auto":
        return config.weights
    kept = config.lora_rank and opened and kept_formats(opened, "auto", torch.device("cpu"))
    return "codes" if kept else "float32"


def open_base(config: TrainConfig, device: torch.device | str) -> VisionLanguageModel:
    """The model that a run starts from. All that learns and all that is small is float32; frozen matrices are
    what answers with that `--dtype` have, laid out for PyTorch."""
    return one_version(config.init_from, None, partial(_read_base, config, device))


def _read_base(config: TrainConfig, device: torch.device | str, opened: Opened) -> VisionLanguageModel:
    kind, read, cpu = weights_of(config, opened), VisionLanguageModel.from_pretrained, torch.device("cpu")
    if kind == "float32":
        return read(opened, None, torch.float32, device)

    def put(kind: str, model: nn.Module, names: Sequence[str], tensor: Any) -> None:
        if kind != "float32":
            put_layers(model, names, tensor(), partial(pack_layer, kind))
        elif part_of(names[0]) in config.learns:
            put_parameter(model, names, tensor)

    try:
        if kind == "codes":
            model = load_codes(opened, cpu, panels=False)
        elif kind == "int4":
            to_rows(model := load_int4(opened, cpu), cpu)
            vars(model).pop("mapped", None)  # the panels, which are not needed any more
        else:
            model = read(opened, None, "stored", cpu, partial(put, kind))
    except NoCompiler as error:
        raise ValueError(f"--weights {kind}: {error}; use int8, which needs none") from None
    for part in config.learns:
        setattr(model, part, getattr(read(opened, None, torch.float32, cpu, partial(put, "float32")), part))
    return model.to(device)


# ------------------------------------------------------------------------------------------ the adapters
class Adapted(nn.Module):
    """A frozen linear layer, and two factors that learn: y = W x + b + (alpha / rank) · B A x. The names of
    its parts are peft's."""

    def __init__(self, layer: Any, config: TrainConfig):
        super().__init__()
        self.base_layer, self.scaling = layer, config.lora_alpha / config.lora_rank
        self.dropout = nn.Dropout(config.lora_dropout)
        with Uninitialised():
            make = partial(nn.Linear, bias=False, device=layer.weight.device)
            self.lora_A = nn.ModuleDict({_NAME: make(layer.in_features, config.lora_rank)})
            self.lora_B = nn.ModuleDict({_NAME: make(config.lora_rank, layer.out_features)})

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A[_NAME](self.dropout(x))
        return self.base_layer(x) + self.lora_B[_NAME](low) * self.scaling


def adapted_layers(model: nn.Module, config: TrainConfig, places: StoredTensorOf) -> dict[str, nn.Module]:
    """The linear layers that get adapters. `places` is for names that the tower stores in one tensor: peft
    could not open adapters of these."""
    found = dict[str, nn.Module]()
    for part, given in (
        ("language_model", config.lora_targets),
        ("vision_model", config.lora_vision_targets),
    ):
        names = [name.strip() for name in given.split(",")] if given else []
        layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, LINEAR)
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
    for name, layer in adapted_layers(model, config, places).items():
        model.set_submodule(name, Adapted(layer, config))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or part_of(name) in config.learns)
        if "lora_B" in name:
            nn.init.zeros_(parameter)
        elif "lora_A" in name:  # drawn from the run's seed alone
            bound = parameter.shape[1] ** -0.5
            drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            parameter.data.copy_(drawn)


def merged(name: str, weight: Tensor, tensors: Mapping[str, Tensor], config: TrainConfig) -> Tensor:
    """A weight with the adapter that `tensors` of a model have for it, if any: W + (alpha / rank) · B A."""
    a, b = (tensors.get(f"{name.removesuffix('.weight')}.lora_{one}.{_NAME}.weight") for one in "AB")
    return weight if a is None or b is None else weight + (config.lora_alpha / config.lora_rank) * (b @ a)


def all_merged(tensors: Mapping[str, Tensor], config: TrainConfig) -> dict[str, Tensor]:
    """The tensors of a model with adapters as those of one without."""
    plain = {name.replace(_BASE, "."): one for name, one in tensors.items() if not _FACTOR.fullmatch(name)}
    return {name: merged(name, one, tensors, config) for name, one in plain.items()}


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
    import peft  # takes seconds

    described = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=config.lora_dropout,
        target_modules=rf"(.*\.)?({'|'.join(within)})",
        modules_to_save=[*whole] or None,
        base_model_name_or_path=config.init_from,
        inference_mode=True,
    )
    folder = output / ADAPTER
    folder.mkdir()
    described.save_pretrained(str(folder))
    write_file(folder / "adapter_model.safetensors", named)
