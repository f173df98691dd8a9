"""Adapters of peft (LoRA, arXiv:2106.09685) put into a model of transformers, to be merged by peft itself.

    adapted = put_in(transformers_model, read_adapter(Path("runs/mine-lora/adapter")))
    adapted.merge_and_unload()

Layers, ranks and shapes are those of the file of weights: what adapter_config.json says of them may be for
names that an older transformers had.
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
from models.checkpoints.weights import Entry, read_header, read_tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A factor of a layer, by peft's names, with the adapter's own name or without.
_FACTOR = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight|bias)[^.]+)?(\.\w+)?"
)
_OF_LAYER, _OF_TABLE = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
# Settings under which merged weights are not W + s · B A, nor DoRA's.
_OTHERWISE = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora",
)  # fmt: skip
_KINDS = (
    ("alpha_pattern", dict, "numbers by names of layers"),
    ("modules_to_save", list, "a list of names"),
    ("lora_alpha", int | float, "a number"),
)


@dataclass(frozen=True)
class Adapter:
    """settings: adapter_config.json. factors: of each layer, by its name in the file, what peft calls them,
    such as `lora_A.weight`. whole: tensors that take the place of the base's, biases among them."""

    folder: Path
    settings: Mapping[str, Any]
    factors: Mapping[str, Mapping[str, Entry]]
    whole: Mapping[str, Entry]


def read_adapter(folder: Path) -> Adapter:
    """Read a folder of peft's. Raises CheckpointError for one that is no LoRA adapter."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}: expected the folder of a peft adapter")
        check_is_whole(folder / name)
    settings = read_json(folder / CONFIG)
    if (kind := settings.get("peft_type")) != "LORA":
        raise CheckpointError(f"{folder}: expected an adapter of type LORA, got {kind!r}")
    for key, read, wanted in _KINDS:
        if not isinstance(said := settings.get(key), read | None):
            raise CheckpointError(f"{folder / CONFIG}: {key}: expected {wanted}, got {said!r:.80}")
    start = str(settings.get("init_lora_weights"))
    wrong = [name for name in _OTHERWISE if settings.get(name)]
    wrong += [f"init_lora_weights {start}"] if re.search("corda|loftq|lora_ga|_niter", start) else []
    if wrong:
        raise CheckpointError(f"{folder}: {wrong[0]} is not supported: merge the adapter with peft")
    factors: dict[str, dict[str, Entry]] = {}
    whole: dict[str, Entry] = {}
    for stored, entry in read_header(folder / WEIGHTS).items():
        name = stored.removeprefix("base_model.model.")
        if found := _FACTOR.fullmatch(name):
            end = found[3] if found[2] in ("lora_A", "lora_B") else ""
            factors.setdefault(found[1], {})[f"{found[2]}{end}"] = entry
        elif "lora_" in name or "token_adapter" in name:
            raise CheckpointError(f"{folder}: {stored} is not supported, expected factors of LoRA or DoRA")
        elif ".original_module." not in name:
            whole[name] = entry
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
    modules = {name: places[f"{name}.weight"].removesuffix(".weight") for name in adapter.factors}
    for name in adapter.factors:
        _check(adapter, name, known[places[f"{name}.weight"]].shape)
    _untie(model, adapter, places)
    known = model.state_dict()  # the head may be another
    for name, entry in adapter.whole.items():
        if entry.shape != (shape := known[places[name]].shape):
            got = f"{name} has shape {list(entry.shape)}, the base's has {list(shape)}"
            raise CheckpointError(f"{adapter.folder} is for another model: {got}")
        known[places[name]].copy_(read_tensor(entry))
    return _adapted(model, adapter, modules)


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


def _check(adapter: Adapter, name: str, shape: torch.Size) -> None:
    """Raise unless the factors of a layer are whole, and of a weight of this shape."""
    factors = adapter.factors[name]
    pair = _OF_TABLE if _OF_TABLE[0] in factors else _OF_LAYER
    if absent := [one for one in pair if one not in factors]:
        raise CheckpointError(f"{adapter.folder}: {name} has no {absent[0]}: the adapter is not whole")
    a, b = (factors[one].shape for one in pair)
    of = (*a[1:], b[0]) if pair == _OF_TABLE else (b[0], *a[1:])
    if len(a) < 2 or len(b) < 2 or a[0] != b[1] or of != tuple(shape):
        raise CheckpointError(
            f"{adapter.folder} is for another model: its factors of {name}, {list(a)} and {list(b)}, are for "
            f"a weight of {list(of)}, the base's has {list(shape)}"
        )


def _untie(model: Any, adapter: Adapter, places: Mapping[str, str]) -> None:
    """Give a tied head a weight of its own where the adapter changes it, or the table of embeddings, or has
    two of them. A table that peft saved beside its factors is the head, too."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    both = {name for name, one in model.named_parameters(remove_duplicate=False) if one is table.weight}
    changed = [f".{name}" for name in both & {*places.values()}]
    learnt = [*adapter.factors, *(adapter.settings.get("modules_to_save") or ())]
    inside = any(f".{str(name).rpartition('.')[2]}." in one for name in learnt for one in changed)
    saved = [read_tensor(entry) for name, entry in adapter.whole.items() if places[name] in both]
    two = any(not torch.equal(saved[0], one) for one in saved[1:])
    if head.weight is not table.weight or not (inside or two):
        return
    if adapter.settings.get("ensure_weight_tying"):
        raise CheckpointError(f"{adapter.folder}: ensure_weight_tying is not supported: merge it with peft")
    head.weight = nn.Parameter(table.weight.detach().clone())
    model.config.tie_word_embeddings = False


def _adapted(model: Any, adapter: Adapter, modules: Mapping[str, str]) -> Any:
    """peft's model, with the factors of the modules that the adapter has names for."""
    import peft  # takes seconds

    settings, ranks, alphas = adapter.settings, dict[str, int](), dict[str, float]()
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    alpha: Any = settings.get("lora_alpha", 8)
    for name, parts in adapter.factors.items():
        ranks[modules[name]] = (parts.get(_OF_LAYER[0]) or parts[_OF_TABLE[0]]).shape[0]
        alphas[modules[name]] = patterns.get(peft.utils.other.get_pattern_key([*patterns], name), alpha)
    rank = Counter(ranks.values()).most_common(1)[0][0]
    start = settings.get("init_lora_weights", True)  # the two below change the base before they begin
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(modules.values()),
        rank_pattern={re.escape(place): one for place, one in ranks.items() if one != rank},
        alpha_pattern={re.escape(place): one for place, one in alphas.items() if one != alpha},
        use_rslora=bool(settings.get("use_rslora")),
        use_dora=bool(settings.get("use_dora")),
        lora_bias=bool(settings.get("lora_bias")),
        init_lora_weights=start if str(start).startswith(("pissa", "olora")) else True,
    )
    state = {
        f"base_model.model.{modules[name]}.{part}": read_tensor(entry)
        for name, factors in adapter.factors.items()
        for part, entry in factors.items()
    }
    try:
        adapted: Any = peft.PeftModel(model, config)
        loaded: Any = peft.set_peft_model_state_dict(adapted, state)
    except Exception as error:  # peft raises anything
        raise CheckpointError(f"peft does not open {adapter.folder} ({one_line(error, 300)})") from error
    if left := loaded.unexpected_keys:
        raise CheckpointError(f"{adapter.folder}: peft has no place for {some(left)}")
    return adapted.eval()
