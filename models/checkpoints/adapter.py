"""Adapters of peft (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353) for a base of any family and format.

    model = VisionLanguageModel.from_pretrained(base, adapter="runs/mine-lora/adapter")   # or a repository

What is read as floats is changed before anything is made of it: W + B A, with the scale in B. To codes
(`generation.codes`) nothing can be added: both factors stay beside them. Layers and ranks are those of the
file of weights: what adapter_config.json says of them may be for names that an older transformers had.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from families import FAMILIES, family_of
from messages import counted, some
from models.checkpoints.files import CheckpointError, naming
from models.checkpoints.sources import open_files
from models.checkpoints.weights import (
    EMBEDDING,
    HEAD,
    Shape,
    StoredTensor,
    StoredTensorOf,
    read_header,
    read_tensor,
)
from models.config import VLMConfig

# The last one is `read_tensor` of its arguments, or `changed_tensor`.
Put = Callable[[nn.Module, Sequence[str], "partial[Tensor]"], None]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A factor of a layer, by peft's names, with the adapter's own name or without.
_FACTOR = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight|bias)[^.]+)?(\.\w+)?"
)
# Settings under which weights are not W + B A, nor DoRA's; the last ones begin with another base.
_OTHERWISE = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora",
)  # fmt: skip
_OTHER_BASE = re.compile("corda|loftq|lora_ga|olora|pissa")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """What becomes of a tensor W: B A is added, or the tensor `whole` takes its place.

    a, b: (r, columns) and (rows, r), with the scale.
    lengths: DoRA's, of each row after that; of each column of a `table` of embeddings.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    lengths: Tensor | None = None
    table: bool = False
    whole: Tensor | None = None

    def of(self, place: StoredTensor) -> Change:
        """That of a part of the stored tensor."""
        if place.parts == 1:
            return self
        parts = {name: getattr(self, name) for name in ("b", "lengths", "whole")}
        own = {name: one.chunk(place.parts)[place.part] for name, one in parts.items() if one is not None}
        return replace(self, **own)

    @property
    def beside(self) -> tuple[Tensor, Tensor] | None:
        """The factors, where nothing but their product is added to a matrix."""
        alone = self.lengths is None and not self.table
        return (self.a, self.b) if alone and self.a is not None and self.b is not None else None

    def __call__(self, weight: Tensor) -> Tensor:
        """The changed tensor, in the memory of this one."""
        if self.whole is not None:
            return weight.copy_(self.whole.view_as(weight))
        assert self.a is not None and self.b is not None
        weight.view(len(weight), -1).addmm_(self.b.to(weight), self.a.to(weight))
        if self.lengths is None:
            return weight
        norm = torch.linalg.vector_norm(
            weight, dim=(0 if self.table else [*range(1, weight.dim())]), keepdim=True
        )
        return weight.mul_(self.lengths.to(weight).view_as(norm) / norm)


def changed_tensor(*given: Any, change: Change) -> Tensor:
    """`read_tensor` of these arguments, changed; rounded to its dtype once, at the end."""
    entry, shape, dtype, *where = given
    return change(read_tensor(entry, shape, torch.promote_types(dtype, torch.float32), *where)).to(dtype)


@dataclass(frozen=True)
class Adapter:
    """An adapter by the names that its file has.

    files: adapter_config.json and the weights.
    changes: of tensors, by their names with `.weight` or `.bias`.
    learnt: modules that learnt, with factors or whole.
    """

    source: str
    files: tuple[Path, ...]
    settings: Mapping[str, Any]
    changes: Mapping[str, Change]
    learnt: Sequence[str]

    def around(self, put: Put, model: Any) -> Put:
        """`put`, which gives this model, whose weights are read next, tensors changed by the adapter. A tied
        model is tied no longer where one of head and table learnt. Raises CheckpointError for an adapter of
        another model."""
        changes = self._changes_of(model)
        self._untie(model, changes)

        def put_changed(model: Any, names: Sequence[str], read: partial[Tensor]) -> None:
            for own in [names] if model.config.tie_word_embeddings else [(name,) for name in names]:
                change = changes.get(own[0])
                put(model, own, partial(changed_tensor, *read.args, change=change) if change else read)

        return put_changed

    def _changes_of(self, model: Any) -> dict[str, Change]:
        """Those of our tensors, by name."""
        place, found, missing = _places(model.config), dict[str, Change](), list[str]()
        shapes = {name: one.shape for name, one in model.named_parameters(remove_duplicate=False)}
        ours: dict[str, list[str]] = {}  # by the names that transformers has
        for name in shapes:
            ours.setdefault(place(name).name, []).append(name)
        text, ignorable = place(EMBEDDING).name, FAMILIES[model.config.family].IGNORABLE
        left = 0
        for name, change in self.changes.items():
            spellings = [*_spellings(name, text.removesuffix("embed_tokens.weight"))]
            if known := next((ours[one] for one in spellings if one in ours), None):
                self._check(name, change, place(known[0]).stored_shape(shapes[known[0]]))
                found |= {own: change.of(place(own)) for own in known}
            elif any(map(ignorable.fullmatch, spellings)):
                left += 1
            else:
                missing.append(name)
        if missing or not found:
            lost = some([one.removesuffix(".weight") for one in missing or self.changes])
            raise CheckpointError(
                f"{self.source} is for another model: the base has no place for {len(missing) or left} of "
                f"its {counted(len(self.changes), 'tensor')} ({lost})"
            )
        if left:
            logger.warning("%s: %s of parts that are not computed here", self.source, counted(left, "tensor"))
        return found

    def _check(self, name: str, change: Change, expected: Shape) -> None:
        """Refuse a change of a tensor of another shape."""
        got, wanted = None if change.whole is None else tuple(change.whole.shape), expected
        if change.a is not None and change.b is not None:
            got, wanted = (len(change.b), change.a.shape[1]), (expected[0], math.prod(expected[1:]))
        if got != wanted:
            raise CheckpointError(
                f"{self.source} is for another model: {name} has shape {got}, the base's {wanted}"
            )

    def _untie(self, model: Any, changes: dict[str, Change]) -> None:
        """Part a tied head and table where they are two from now on; a table that peft saved beside its
        factors is the head, too."""
        both = {name: changes[name] for name in (EMBEDDING, HEAD) if name in changes}
        if not both or not model.config.tie_word_embeddings:
            return
        place = _places(model.config)
        last = {f".{one.rpartition('.')[2]}." for one in self.learnt}
        inside = any(one in f".{place(name).name}" for name in both for one in last)
        saved = [one.whole for one in both.values() if one.whole is not None]
        if inside or any(not torch.equal(saved[0], one) for one in saved[1:]):
            if self.settings.get("ensure_weight_tying"):
                raise CheckpointError(
                    f"{self.source}: ensure_weight_tying is not supported: merge it with peft"
                )
            model.config = replace(model.config, tie_word_embeddings=False)
            model.language_model.tied = False
        else:
            changes[EMBEDDING] = next(iter(both.values()))


def read_adapter(source: str | Path) -> Adapter:
    """Read an adapter of a folder or a repository. Raises CheckpointError for what is no LoRA adapter, and
    for settings that need other code."""
    opened = open_files(source)
    settings, path = opened.json(CONFIG), opened.file(WEIGHTS)
    if path is None or not settings:
        lost = WEIGHTS if settings else CONFIG
        raise CheckpointError(f"{opened.files.name} has no {lost}: expected a LoRA adapter as peft saves it")
    if (kind := settings.get("peft_type")) != "LORA":
        raise CheckpointError(f"{source}: expected an adapter of type LORA, got {kind!r}")
    start = str(settings.get("init_lora_weights"))
    wrong = [name for name in _OTHERWISE if settings.get(name)]
    wrong += [f"init_lora_weights {start}"] if _OTHER_BASE.search(start) else []
    if wrong:
        raise CheckpointError(f"{source}: {wrong[0]} is not supported: merge the adapter with peft")
    factors: dict[str, dict[str, Tensor]] = {}
    changes: dict[str, Change] = {}
    for stored, entry in read_header(path).items():
        tensor, name = read_tensor(entry), stored.removeprefix("base_model.model.")
        if found := _FACTOR.fullmatch(name):
            end = found[3] if found[2] in ("lora_A", "lora_B") else ""
            factors.setdefault(found[1], {})[f"{found[2]}{end}"] = tensor
        elif "lora_" in name or "token_adapter" in name:
            raise CheckpointError(f"{source}: {stored} is not supported, expected factors of LoRA or DoRA")
        elif ".original_module." not in name:
            changes[name] = Change(whole=tensor)
    if not factors:
        raise CheckpointError(f"{source}: {WEIGHTS} has no factors, expected names with lora_A and lora_B")
    with naming(f"{source}: {CONFIG}"):
        learnt = [*factors, *map(str, settings.get("modules_to_save") or ())]
        scales = {layer: _scale(settings, layer, parts) for layer, parts in factors.items()}
    for layer, parts in factors.items():
        changes |= _changes(f"{source}: {layer}", layer, parts, scales[layer])
    return Adapter(str(source), (opened.file(CONFIG) or path, path), settings, changes, learnt)


def _rank(parts: Mapping[str, Tensor]) -> int:
    return len(next(one for name, one in parts.items() if name.endswith(("A", "A.weight"))))


def _scale(settings: Mapping[str, Any], layer: str, parts: Mapping[str, Tensor]) -> float:
    """What the product of a layer's factors is multiplied with, by peft's rule."""
    alphas, rank = dict(settings.get("alpha_pattern") or {}), _rank(parts)
    key = next((one for one in alphas if re.match(rf"(.*\.)?({one})$", layer)), None)
    alpha = settings.get("lora_alpha", 8) if key is None else alphas[key]
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)


def _changes(what: str, layer: str, parts: Mapping[str, Tensor], scale: float) -> dict[str, Change]:
    """Of a layer's weight, and of its bias where that learnt."""
    table = "lora_embedding_A" in parts
    names = ("lora_embedding_B", "lora_embedding_A") if table else ("lora_A.weight", "lora_B.weight")
    if not {*names} <= parts.keys():
        raise CheckpointError(f"{what} has one factor, expected two")
    # A table's factors are stored the other way round; a convolution's become matrices.
    a, b = (parts[name].float().flatten(1) for name in names)
    a, b = (a.T, b.T) if table else (a, b)
    if len(a) != b.shape[1]:
        raise CheckpointError(f"{what} has factors of ranks {len(a)} and {b.shape[1]}, expected one rank")
    lengths = parts.get("lora_magnitude_vector")
    lengths = None if lengths is None else lengths.float().flatten()
    made = {f"{layer}.weight": Change(a, scale * b, lengths, table)}
    if (bias := parts.get("lora_B.bias")) is not None:
        made[f"{layer}.bias"] = Change(torch.ones(1, 1), scale * bias.float()[:, None])
    return made


def _places(config: VLMConfig) -> StoredTensorOf:
    """Where today's transformers has our tensors."""
    described = FAMILIES[config.family].write(config, "float32")
    family: Any = family_of(described)
    return family.tensor_map((), config)


def _spellings(name: str, text: str) -> Iterator[str]:
    """How today's transformers may call a tensor; `text` is how names of the text part begin there."""
    plain = re.sub(r"\.(base_layer|modules_to_save\.[^.]+)\.", ".", name)
    fronts = {"": "", "language_model.model.": text, "language_model.": "", "model.": text}  # before 4.52
    for one in (plain, plain.replace(".vision_tower.vision_model.", ".vision_tower.")):
        yield from (new + one.removeprefix(old) for old, new in fronts.items() if one.startswith(old))
        yield f"model.{one}"
