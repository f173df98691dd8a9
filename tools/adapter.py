"""Adapters of peft (LoRA, arXiv:2106.09685) put into a model of transformers, to be merged by peft itself.

    adapted = put_in(transformers_model, read_adapter(Path("runs/mine-lora/adapter")))
    adapted.merge_and_unload()

Layers and ranks are those of the file of weights: what adapter_config.json says of them may be for names that
an older transformers had.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from messages import counted, one_line, some
from models.checkpoints.files import CheckpointError, check_is_whole, read_json
from models.checkpoints.weights import read_header, read_tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A factor of a layer, by peft's names, with the adapter's own name or without.
_FACTOR = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight|bias)[^.]+)?(\.\w+)?"
)
# Settings under which merged weights are not W + s · B A, nor DoRA's.
_OTHERWISE = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora",
)  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """settings: adapter_config.json. factors: of each layer, by its name in the file, what peft calls them,
    such as `lora_A.weight`. whole: tensors that take the place of the base's, biases among them."""

    folder: Path
    settings: Mapping[str, Any]
    factors: Mapping[str, Mapping[str, Tensor]]
    whole: Mapping[str, Tensor]


def read_adapter(folder: Path) -> Adapter:
    """Read a folder of peft's. Raises CheckpointError for one that is no LoRA adapter."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}: expected the folder of a peft adapter")
        check_is_whole(folder / name)
    settings = read_json(folder / CONFIG)
    if (kind := settings.get("peft_type")) != "LORA":
        raise CheckpointError(f"{folder}: expected an adapter of type LORA, got {kind!r}")
    start = str(settings.get("init_lora_weights"))
    wrong = [name for name in _OTHERWISE if settings.get(name)]
    wrong += [f"init_lora_weights {start}"] if re.search("corda|loftq|lora_ga|_niter", start) else []
    if wrong:
        raise CheckpointError(f"{folder}: {wrong[0]} is not supported: merge the adapter with peft")
    factors: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for stored, entry in read_header(folder / WEIGHTS).items():
        tensor, name = read_tensor(entry), stored.removeprefix("base_model.model.")
        if found := _FACTOR.fullmatch(name):
            end = found[3] if found[2] in ("lora_A", "lora_B") else ""
            factors.setdefault(found[1], {})[f"{found[2]}{end}"] = tensor
        elif "lora_" in name or "token_adapter" in name:
            raise CheckpointError(f"{folder}: {stored} is not supported, expected factors of LoRA or DoRA")
        elif ".original_module." not in name:
            whole[name] = tensor
    if not factors:
        raise CheckpointError(f"{folder}: {WEIGHTS} has no factors, expected names with lora_A and lora_B")
    return Adapter(folder, settings, factors, whole)


@torch.no_grad()
def put_in(model: Any, adapter: Adapter) -> Any:
    """A model of transformers with the adapter: peft's. Its head and its table of embeddings are two tensors
    from then on where the adapter changes one of them. Raises CheckpointError for an adapter that is for
    another model."""
    known = model.state_dict()
    of_layers = [f"{name}.weight" for name in adapter.factors]
    of_layers += [f"{name}.bias" for name, parts in adapter.factors.items() if "lora_B.bias" in parts]
    places = _places(adapter, known, [*of_layers, *adapter.whole])
    try:
        _untie(model, adapter, places)
        known = model.state_dict()  # the head may be another
        for name, tensor in adapter.whole.items():
            if tensor.shape != (shape := known[places[name]].shape):
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the base's has {list(shape)}")
            known[places[name]].copy_(tensor)
        return _adapted(model, adapter, places)
    except CheckpointError:
        raise
    except Exception as error:  # peft raises anything
        reason = one_line(error, 300)
        raise CheckpointError(f"{adapter.folder} does not fit this model in peft ({reason})") from error


def _places(adapter: Adapter, known: Mapping[str, Tensor], names: list[str]) -> dict[str, str]:
    """Where in the model the tensors are that an adapter has `names` for."""
    table = next((name for name in known if name.endswith(".embed_tokens.weight")), "")
    text, found = table.removesuffix("embed_tokens.weight"), dict[str, str]()
    for name in names:
        if place := next((one for one in _spellings(name, text) if one in known), None):
            found[name] = place
    if missing := [name for name in names if name not in found]:
        end = "" if missing[0] in adapter.whole else ".weight"  # of a layer, which the file has factors of
        raise CheckpointError(
            f"{adapter.folder} is for another model: the base has no place for {len(missing)} of its "
            f"{counted(len(names), 'tensor')} ({some([name.removesuffix(end) for name in missing])})"
        )
    return found


def _spellings(name: str, text: str) -> Iterator[str]:
    """How today's transformers may call a tensor; `text` is how names of the text part begin there."""
    plain = re.sub(r"\.(base_layer|modules_to_save\.[^.]+)\.", ".", name)
    fronts = {"": "", "language_model.model.": text, "language_model.": "", "model.": text}  # before 4.52
    for one in (plain, plain.replace(".vision_tower.vision_model.", ".vision_tower.")):
        yield from (new + one.removeprefix(old) for old, new in fronts.items() if one.startswith(old))
        yield f"model.{one}"


def _untie(model: Any, adapter: Adapter, places: Mapping[str, str]) -> None:
    """Give a tied head a weight of its own where the adapter changes it, or the table of embeddings, or has
    two of them. A table that peft saved beside its factors is the head, too."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    both = {name for name, one in model.named_parameters(remove_duplicate=False) if one is table.weight}
    changed = [f".{name}" for name in both & {*places.values()}]
    learnt = [*adapter.factors, *(adapter.settings.get("modules_to_save") or ())]
    inside = any(f".{str(name).rpartition('.')[2]}." in one for name in learnt for one in changed)
    saved = [tensor for name, tensor in adapter.whole.items() if places[name] in both]
    two = any(not torch.equal(saved[0], one) for one in saved[1:])
    if head.weight is not table.weight or not (inside or two):
        return
    if adapter.settings.get("ensure_weight_tying"):
        raise CheckpointError(f"{adapter.folder}: ensure_weight_tying is not supported: merge it with peft")
    head.weight = nn.Parameter(table.weight.detach().clone())
    model.config.tie_word_embeddings = False


def _adapted(model: Any, adapter: Adapter, places: Mapping[str, str]) -> Any:
    """peft's model, with the factors of the modules that the adapter has names for."""
    import peft  # takes seconds

    settings, ranks, alphas, state = adapter.settings, dict[str, int](), dict[str, float](), dict[str, Any]()
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    alpha: Any = settings.get("lora_alpha", 8)
    for name, parts in adapter.factors.items():
        module = places[f"{name}.weight"].removesuffix(".weight")
        ranks[module] = next(one for part, one in parts.items() if part.endswith(("A", "A.weight"))).shape[0]
        alphas[module] = patterns.get(peft.utils.other.get_pattern_key([*patterns], name), alpha)
        state |= {f"base_model.model.{module}.{part}": tensor for part, tensor in parts.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    start = settings.get("init_lora_weights", True)  # the two below change the base before they begin
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[*ranks],
        rank_pattern={re.escape(place): one for place, one in ranks.items() if one != rank},
        alpha_pattern={re.escape(place): one for place, one in alphas.items() if one != alpha},
        use_rslora=bool(settings.get("use_rslora")),
        use_dora=bool(settings.get("use_dora")),
        lora_bias=bool(settings.get("lora_bias")),
        init_lora_weights=start if str(start).startswith(("pissa", "olora")) else True,
    )
    adapted: Any = peft.PeftModel(model, config)
    loaded: Any = peft.set_peft_model_state_dict(adapted, state)
    left = [*loaded.unexpected_keys, *(name for name in loaded.missing_keys if "lora_" in name)]
    if left:
        raise CheckpointError(f"{adapter.folder}: the adapter and peft differ in {some(left)}")
    return adapted.eval()
