"""A checkpoint rewritten for transformers, in another dtype or with an adapter merged, and verified.

    convert("lusxvr/nanoVLM-450M", Path("nanovlm-hub"))
    convert("HuggingFaceTB/SmolVLM-256M-Instruct", Path("smolvlm-bf16"), dtype="bfloat16")

Logits of noise before random tokens are compared twice, in float32: those of the rewritten model with the
original's, before its weights are rounded, which would hide small mistakes; and those of the files, opened by
our own loader and by transformers, with the rounded model's. The result is written
beside its place and moved there last: what goes wrong (a full disk and Ctrl-C too) leaves the target alone.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from data.errors import ProcessorError
from data.processor import Processor
from families import FAMILIES
from families.nanovlm import INV_FREQ
from messages import counted
from models.checkpoints.adapter import read_adapter
from models.checkpoints.files import CheckpointError, Opened
from models.checkpoints.folder import check_replaceable, replace_folder
from models.checkpoints.load import choose_family, entries_of
from models.checkpoints.save import (
    CARD,
    MAX_SHARD_BYTES,
    card_of_origin,
    is_checkpoint_file,
    model_card,
    write_checkpoint,
)
from models.checkpoints.sources import one_version, open_files
from models.checkpoints.weights import FLOATS
from models.config import VLMConfig
from models.packed_vision_transformer import PackedVisionConfig
from models.vision_language_model import VisionLanguageModel
from tools import nanovlm

_WORDS = 12  # in the test prompt
# Of the logits' standard deviation: sums in another order. A misplaced tensor exceeds it many times over.
TOLERANCE = 1e-4
Log = Callable[[str], None]


def convert(
    source: str,
    target: Path,
    *,
    dtype: str | None = None,
    adapter: str | Path | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    log: Log = print,
) -> None:
    """Convert, verify, and put the result in its place.

    Args:
        dtype: of the result's weights; None is the widest that the original's are stored in.
        adapter: folder or repository of a peft LoRA adapter to merge.
        log: takes a line for each thing done.
    """
    check_replaceable(target, overwrite)
    opened = open_files(source, revision)
    choose_family(opened.config, opened.source)  # no weights are fetched for nothing
    other = nanovlm.recognises(opened.config)
    if other and adapter is not None:
        raise CheckpointError(
            f"{source} is in nanoVLM's layout, and adapters name transformers' layers: convert it first, "
            "then merge the adapter into the result"
        )
    kinds = {entry.dtype for name, entry in entries_of(opened).items() if name != INV_FREQ}
    stored = {FLOATS[kind] for kind in kinds if kind in FLOATS} or {torch.float32}
    rounded = getattr(torch, dtype) if dtype else functools.reduce(torch.promote_types, stored)
    # In float32 at least, so that whatever is computed on the weights is rounded once, at the end.
    wide = torch.promote_types(rounded, torch.float32)

    def read(opened: Opened) -> tuple[VisionLanguageModel, Any]:
        model = VisionLanguageModel.from_pretrained(opened, dtype=wide)
        return model, _processor(opened, log)

    changed = None if adapter is None else read_adapter(adapter)
    model, processor = one_version(source, opened.commit or revision, read, changed)
    shown = str(rounded).removeprefix("torch.")
    layout = "nanoVLM's" if other else "transformers'"
    log(f"read {source}: {layout} layout, {_parameters(model):,} parameters, to {shown}")
    if changed is not None:
        log(f"merged {adapter}: {counted(len(changed.changes), 'tensor')}")
    reference, probe = _rewrite(model, processor, other)
    verify("rewritten", reference, probe.ours(model), log)
    model = model.to(rounded)

    # Not where the dtype holds every number of the stored ones.
    narrower = any(torch.promote_types(kind, rounded) != rounded for kind in stored)
    narrower |= rounded != wide and (adapter is not None or other)
    changes = ["with an adapter merged"] * (adapter is not None) + [f"rounded to {shown}"] * narrower
    same = adapter is None and not other
    card = (card_of_origin(model) if same else None) or _new_card(
        model, source, str(target), changes, processor is not None
    )
    with replace_folder(target, lambda name: is_checkpoint_file(name) or name == CARD) as new:
        write_checkpoint(model, new, processor, MAX_SHARD_BYTES)
        (new / CARD).write_text(card, encoding="utf-8")
        reference = probe.ours(model.float())
        reopened = VisionLanguageModel.from_pretrained(new, dtype="float32")
        verify("opened by Ocelli", reference, probe.ours(reopened), log)
        verify("opened by transformers", reference, probe.theirs(_in_transformers(new), model.config), log)
    log(f"wrote {target}")


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _processor(opened: Opened, log: Log) -> Any:
    """The transformers processor that goes with the weights, or None."""
    folder, other = opened.processor_folder, nanovlm.recognises(opened.config)
    try:
        found = nanovlm.as_idefics(folder) if other else Processor.from_pretrained(folder).hf_processor
    except ProcessorError:
        names = ("processor_config.json", "preprocessor_config.json")
        if other or any((folder / name).is_file() for name in names):
            raise
        log("note: the result has no processor, as the original has none")
        return None
    if other:
        log(nanovlm.NOTE)
    return found


def _rewrite(model: VisionLanguageModel, processor: Any, other: bool) -> tuple[Tensor, Probe]:
    """Bring a model into transformers' layout, from an `other` one; returns what its logits have to be."""
    image = processor.image_token_id if other and processor is not None else model.config.image_token_id
    probe = Probe.of(model.config, avoid=image)
    reference = probe.ours(model, around_zero=not other)
    if other:
        nanovlm.rewrite(model, processor)
    return reference, probe


def _new_card(model: Any, source: str, repo_id: str, changes: list[str], with_processor: bool) -> str:
    from_hub = model.origin.commit is not None
    name = source if from_hub else Path(source).resolve().name
    made = f"Made from {name} by Ocelli's converter, {', '.join(changes) or 'with the same logits'}."
    base = {"base_model": name} if from_hub else {}
    return model_card(repo_id, model.config, _parameters(model), made, with_processor=with_processor, **base)


# ----------------------------------------------------------------------------------------- verification
@dataclass(frozen=True)
class Probe:
    """An image of one part, pixels (1, 3, H, W) from 0 to 1, before some ids. Real questions could not show
    more, and need a tokenizer."""

    pixels: Tensor
    words: tuple[int, ...]

    @classmethod
    def of(cls, config: VLMConfig, avoid: int | None) -> Probe:
        """For a model of this config; words are neither `avoid` nor the image's."""
        if not config.vision.num_hidden_layers:
            raise CheckpointError("this is a text model, which is not converted: transformers saves it anew")
        generator, vision = torch.Generator().manual_seed(0), config.vision
        size = vision.least_side, vision.least_side
        if isinstance(vision, PackedVisionConfig):
            side = vision.patch_size * vision.merge_size
            size = 2 * side, 3 * side
        pixels = torch.rand(1, vision.num_channels, *size, generator=generator)
        words = torch.randint(config.text.vocab_size, (_WORDS,), generator=generator).tolist()
        return cls(pixels, tuple(word for word in words if word not in (config.image_token_id, avoid)))

    def input_ids(self, config: VLMConfig) -> Tensor:
        """(1, T), for a model of any config that the original became."""
        count = FAMILIES[config.family].positions(config, *self.pixels.shape[2:])
        return torch.tensor([[config.image_token_id] * count + list(self.words)])

    @torch.no_grad()
    def ours(self, model: Any, around_zero: bool = True) -> Tensor:
        """Logits (T, V) of a model of ours, which takes pixels from -1 (`around_zero`) or from 0 to 1."""
        pixels = 2 * self.pixels - 1 if around_zero else self.pixels
        return model(self.input_ids(model.config), pixels).logits[0].float()

    @torch.no_grad()
    def theirs(self, model: Any, config: VLMConfig) -> Tensor:
        """The same of a model of transformers."""
        ids = self.input_ids(config)
        given = FAMILIES[config.family].their_inputs(ids, 2 * self.pixels - 1, config)
        return model(input_ids=ids, **given).logits[0].float()


def _in_transformers(folder: Path) -> Any:
    """A folder as a float32 model of transformers in eval mode."""
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):  # those that matter are errors here
            return transformers.AutoModelForImageTextToText.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            ).eval()
    except Exception as error:  # transformers raises anything
        said = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"transformers does not open {folder} ({type(error).__name__}: {said})"
        ) from error


def verify(name: str, reference: Tensor, logits: Tensor, log: Log) -> None:
    """Refuse logits (T, V) that differ from reference ones (T, V or fewer)."""
    tolerance = TOLERANCE * reference.std().item()
    difference = (logits[:, : reference.shape[1]] - reference).abs().max().item()
    found = f"{name}: largest difference of logits {difference:.1e}, tolerance {tolerance:.1e}"
    log(found)
    if not difference <= tolerance:  # NaN is not
        raise CheckpointError(f"the result is not the original ({found}): nothing was written")
