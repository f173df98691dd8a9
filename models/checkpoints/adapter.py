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
from models.checkpoints.files import naming
from models.checkpoints.sources import open_files
from models.checkpoints.weights import EMBEDDING, HEAD, StoredTensorOf, read_header, read_tensor

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
    """What becomes of a tensor W: W + B A, or B in its place where there is no A.

    a, b: (r, columns) and (rows, r), with the scale; or (rows, columns).
    lengths: DoRA's, of each row after that; of each column of a `table` of embeddings.
    """

    b: Tensor
    a: Tensor | None = None
    lengths: Tensor | None = None
    table: bool = False

    def of(self, part: int, parts: int) -> Change:
        """That of rows part/parts of the tensor."""
        lengths = self.lengths if self.lengths is None or parts == 1 else self.lengths.chunk(parts)[part]
        return replace(self, b=self.b.chunk(parts)[part], lengths=lengths)

    @property
    def beside(self) -> tuple[Tensor, Tensor] | None:
        """The factors, where nothing but their product is added to a matrix."""
        return None if self.a is None or self.lengths is not None or self.table else (self.a, self.b)

    def __call__(self, weight: Tensor) -> Tensor:
        """The changed tensor, in the memory of this one."""
        if self.a is None:
            return weight.copy_(self.b.view_as(weight))
        weight.view(len(weight), -1).addmm_(self.b.to(weight), self.a.to(weight))
        if self.lengths is None:
            return weight
        across = (0,) if self.table else tuple(range(1, weight.dim()))
        norm = torch.linalg.vector_norm(weight, dim=across, keepdim=True)
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

    def around(self, put: Put, model: Any, folder: Path) -> Put:
        """`put`, which gives this model of a folder, whose weights are read next, tensors changed by the
        adapter. A tied model is tied no longer where one of head and table learnt. Raises CheckpointError for
        an adapter of another model, and for a run's own one, which its model has merged."""
        described = FAMILIES[model.config.family].write(model.config, "float32")
        family: Any = family_of(described)
        place = family.tensor_map((), model.config)  # where today's transformers has our tensors
        with naming(self.source):
            if self.files[0].parent.parent == folder:
                base = self.settings.get("base_model_name_or_path")
                raise ValueError(f"the model of {folder} has it merged already: name its base, {base}")
            changes = self._changes_of(model, place)
            self._untie(model, changes, place)

        def put_changed(model: Any, names: Sequence[str], read: partial[Tensor]) -> None:
            for own in [names] if model.config.tie_word_embeddings else [(name,) for name in names]:
                change = changes.get(own[0])
                put(model, own, partial(changed_tensor, *read.args, change=change) if change else read)

        return put_changed

    def _changes_of(self, model: Any, place: StoredTensorOf) -> dict[str, Change]:
        """Those of our tensors, by name."""
        found, missing, left = dict[str, Change](), list[str](), list[str]()
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}
        ours: dict[str, list[str]] = {}  # by the names that transformers has
        for name in shapes:
            ours.setdefault(place(name).name, []).append(name)
        text, ignorable = place(EMBEDDING).name, FAMILIES[model.config.family].IGNORABLE
        for name, change in self.changes.items():
            spellings = [*_spellings(name, text.removesuffix("embed_tokens.weight"))]
            if not (known := next((ours[one] for one in spellings if one in ours), None)):
                (left if any(map(ignorable.fullmatch, spellings)) else missing).append(name)
                continue
            rows, *rest = place(known[0]).stored_shape(shapes[known[0]]) or (1,)
            got = len(change.b), (change.b if change.a is None else change.a).shape[1]
            if got != (rows, math.prod(rest)):
                wanted = f"the base's {(rows, math.prod(rest))}"
                raise ValueError(f"it is for another model: {name} has shape {got}, {wanted}")
            found |= {own: change.of(place(own).part, place(own).parts) for own in known}
        if missing or not found:
            lost = [name.removesuffix(".weight") for name in missing or left]
            of = f"no place for {len(lost)} of its {counted(len(self.changes), 'tensor')}"
            raise ValueError(f"it is for another model: the base has {of} ({some(lost)})")
        if left:
            parts = counted(len(left), "tensor")
            logger.warning("%s: %s of parts that are not computed here", self.source, parts)
        return found

    def _untie(self, model: Any, changes: dict[str, Change], place: StoredTensorOf) -> None:
        """Part a tied head and table where they are two from now on; a table that peft saved beside its
        factors is the head, too."""
        both = {name: changes[name] for name in (EMBEDDING, HEAD) if name in changes}
        if not both or not model.config.tie_word_embeddings:
            return
        last = {f".{one.rpartition('.')[2]}." for one in self.learnt}
        inside = any(one in f".{place(name).name}" for name in both for one in last)
        saved = [one.b for one in both.values() if one.a is None]
        if not inside and all(torch.equal(saved[0], one) for one in saved):
            changes[EMBEDDING] = next(iter(both.values()))
            return
        if self.settings.get("ensure_weight_tying"):
            raise ValueError("ensure_weight_tying is not supported: merge it with peft")
        model.config = replace(model.config, tie_word_embeddings=False)
        model.language_model.tied = False


def read_adapter(source: str | Path) -> Adapter:
    """Read an adapter of a folder or a repository. Raises CheckpointError for what is no LoRA adapter, and
    for settings that need other code."""
    opened, factors, changes = open_files(source), dict[str, dict[str, Tensor]](), dict[str, Change]()
    with naming(source):
        settings, config, path = opened.json(CONFIG), opened.file(CONFIG), opened.file(WEIGHTS)
        if path is None or config is None or settings.get("peft_type") != "LORA":
            got = f"peft_type {settings.get('peft_type')!r}" + f", no {WEIGHTS}" * (path is None)
            raise ValueError(f"expected {CONFIG} of peft_type LORA and {WEIGHTS} beside it, got {got}")
        wrong = [name for name in _OTHERWISE if settings.get(name)]
        if wrong := wrong + _OTHER_BASE.findall(str(settings.get("init_lora_weights"))):
            raise ValueError(f"{wrong[0]} is not supported: merge the adapter with peft")
        for stored, entry in read_header(path).items():
            tensor, name = read_tensor(entry), stored.removeprefix("base_model.model.")
            if found := _FACTOR.fullmatch(name):
                end = found[3] if found[2] in ("lora_A", "lora_B") else ""
                factors.setdefault(found[1], {})[f"{found[2]}{end}"] = tensor.float()
            elif "lora_" in name or "token_adapter" in name:
                raise ValueError(f"{stored} is not supported, expected factors of LoRA or DoRA")
            elif ".original_module." not in name:
                changes[name] = Change(tensor.reshape(len(tensor) if tensor.dim() else 1, -1))
        if not factors:
            raise ValueError(f"{WEIGHTS} has no factors, expected names with lora_A and lora_B")
        for layer, parts in factors.items():
            changes |= _changes(settings, layer, parts)
        learnt = [*factors, *map(str, settings.get("modules_to_save") or ())]
        return Adapter(str(source), (config, path), settings, changes, learnt)


def _changes(settings: Mapping[str, Any], layer: str, parts: Mapping[str, Tensor]) -> dict[str, Change]:
    """Of a layer's weight, and of its bias where that learnt; scaled by peft's rule."""
    table = "lora_embedding_A" in parts
    names = ("lora_embedding_B", "lora_embedding_A") if table else ("lora_A.weight", "lora_B.weight")
    if not {*names} <= parts.keys():
        raise ValueError(f"{layer} has one factor, expected two")
    # A table's factors are stored the other way round; a convolution's become matrices.
    a, b = (parts[name].flatten(1) for name in names)
    a, b = (a.T, b.T) if table else (a, b)
    if (rank := len(a)) != b.shape[1]:
        raise ValueError(f"{layer} has factors of ranks {rank} and {b.shape[1]}, expected one rank")
    alphas = dict(settings.get("alpha_pattern") or {})
    own = [alphas[key] for key in alphas if re.match(rf"(.*\.)?({key})$", layer)]
    alpha = (own or [settings.get("lora_alpha", 8)])[0]
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    made = {f"{layer}.weight": Change(scale * b, a, parts.get("lora_magnitude_vector"), table)}
    if (bias := parts.get("lora_B.bias")) is not None:
        made[f"{layer}.bias"] = Change(scale * bias[:, None], torch.ones(1, 1))
    return made


def _spellings(name: str, text: str) -> Iterator[str]:
    """How today's transformers may call a tensor; `text` is how names of the text part begin there."""
    plain = re.sub(r"\.(base_layer|modules_to_save\.[^.]+)\.", ".", name)
    fronts = {"": "", "language_model.model.": text, "language_model.": "", "model.": text}  # before 4.52
    for one in (plain, plain.replace(".vision_tower.vision_model.", ".vision_tower.")):
        yield from (new + one.removeprefix(old) for old, new in fronts.items() if one.startswith(old))
        yield f"model.{one}"
