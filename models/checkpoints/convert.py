"""A checkpoint into another layout or dtype, or with an adapter merged; verified before it is there.

    convert(Request("lusxvr/nanoVLM-450M", Path("nanovlm-hub")), open_companion, tell=print)

The result is written beside its place under another name, opened again by our own loader and, in
transformers' layout, by transformers, and takes its place only if its logits are the original's. What goes
wrong before that (a full disk and Ctrl-C too) leaves what the place held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.checkpoints import idefics3, nanovlm
from models.checkpoints.adapter import adapter_updates
from models.checkpoints.atomic_folder import check_new, replace_folder
from models.checkpoints.card import model_card
from models.checkpoints.errors import CheckpointError
from models.checkpoints.headers import DTYPE_NAMES
from models.checkpoints.load import load, stored_entries
from models.checkpoints.locate import WEIGHTS, CheckpointFiles, locate, snapshot
from models.checkpoints.one_version import one_version
from models.checkpoints.processor_files import write_json
from models.checkpoints.push import card_of_origin, push
from models.checkpoints.registry import choose_reader
from models.checkpoints.rewrite import (
    add_to_weights,
    put_placeholders,
    take_pixels_around_zero,
    take_pixels_from_zero,
)
from models.checkpoints.safetensors_io import write_file
from models.checkpoints.save import CARD, MAX_SHARD_BYTES, idefics3_contents, is_checkpoint_file
from models.checkpoints.strict_json import read_json
from models.checkpoints.verification import Check, Probe, compare, our_logits, transformers_logits

if TYPE_CHECKING:
    from models.vision_language_model import VisionLanguageModel

HUB, NANOVLM = "hub", "nanovlm"
TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True)
class Request:
    """What to convert: `source` (folder or Hub id) to the folder `target`.

    layout: HUB, transformers' Idefics3 / SmolVLM layout, or NANOVLM.
    dtype: of the result's weights; None is the widest that the original's are stored in.
    adapter: folder of a peft LoRA adapter to merge.
    push: the repository that the result will be uploaded to, for its card; None names `target` there.
    """

    source: str
    target: Path
    layout: str = HUB
    dtype: str | None = None
    adapter: Path | None = None
    revision: str | None = None
    overwrite: bool = False
    push: str | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES


@dataclass(frozen=True)
class Companion:
    """What a result has besides weights: in transformers' layout an Idefics3Processor, or None; in nanoVLM's
    a tokenizer and the fields of config.json about it and images."""

    processor: Any = None
    tokenizer: Any = None
    fields: dict[str, Any] | None = None


@dataclass(frozen=True)
class Result:
    """The new folder, what it has besides weights, and what was compared."""

    folder: Path
    companion: Companion
    checks: tuple[Check, ...]


def convert(
    request: Request,
    open_companion: Callable[[Path, bool], Companion],
    tell: Callable[[str], None] = lambda line: None,
) -> Result:
    """Convert, verify, and put the result in its place.

    Args:
        request: see there.
        open_companion: (folder of the original's processor files, whether that is nanoVLM's) -> what goes
            beside the weights. Tokenizers are not read in this package.
        tell: takes a line for each thing done.

    Raises:
        CheckpointError: the original cannot be read, the layout cannot express it, the target cannot be
            written, or the result is not the original. The target is unchanged.
    """
    target = check_new(request.target, request.overwrite)
    files = locate(request.source, request.revision, check=choose_reader)
    from_nanovlm = choose_reader(files.config, files.source) is nanovlm
    _check_direction(request, from_nanovlm)
    stored = _stored_dtypes(files)
    dtype = request.dtype or _widest(stored)
    # In float32 at least, so that whatever is computed on the weights is rounded once, at the end.
    wide = "float64" if dtype == "float64" else "float32"
    revision = files.origin.commit or request.revision
    model, companion = one_version(
        request.source,
        revision,
        lambda: (
            load(request.source, revision, dtype=wide),
            open_companion(snapshot(request.source, revision), from_nanovlm),
        ),
    )
    tell(f"read {request.source}: {_family(from_nanovlm)}, {_parameters(model):,} parameters, to {dtype}")

    image_token_id = _image_token_id(model, companion)
    probe = Probe.of(model.config, avoid=(image_token_id,))
    reference = our_logits(model, probe, around_zero=not from_nanovlm)
    if request.adapter is not None:
        updates = adapter_updates(request.adapter, model)
        # peft on transformers' model tells what the merged one must be.
        reference = transformers_logits(files.origin.folder, model.config, probe, request.adapter)
        add_to_weights(model, updates)
        tell(f"merged {request.adapter}: {len(updates)} layers")
    changed = _rewrite(model, request.layout, from_nanovlm, image_token_id, companion)
    rounds = dtype != wide and (changed or request.adapter is not None or not _holds(dtype, stored))
    checks = []
    if rounds:  # afterwards only as closely as rounded weights can be told from wrong ones
        logits = our_logits(model, probe, around_zero=request.layout == HUB)
        checks.append(_passed(compare("rewritten", reference, logits, "float32"), request, tell))
    model = model.to(getattr(torch, dtype))

    with replace_folder(target, _is_replaced) as new:
        _write(model, new, request, companion, rounds)
        for compared in _opened_again(new, model, request.layout, probe, reference, rounds):
            checks.append(_passed(compare(*compared), request, tell))
    tell(f"wrote {request.target}")
    return Result(request.target, companion, tuple(checks))


def upload(
    result: Result, repo_id: str, private: bool | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> str:
    """Upload a result in transformers' layout; see `models.checkpoints.push.push`."""
    model, processor = load(result.folder, dtype="stored"), result.companion.processor
    return push(model, repo_id, processor, private=private, max_shard_bytes=max_shard_bytes)


def _passed(check: Check, request: Request, tell: Callable[[str], None]) -> Check:
    """A comparison, told and held to its tolerance."""
    tell(str(check))
    if not check.passed:
        raise CheckpointError(
            f"the result is not the original ({check}): nothing was written to {request.target}"
        )
    return check


def _is_replaced(name: str) -> bool:
    """Whether a file or folder of the target belongs to the checkpoint in it, of either layout."""
    return is_checkpoint_file(name) or name in (TOKENIZER_FOLDER, CARD)


def _check_direction(request: Request, from_nanovlm: bool) -> None:
    if from_nanovlm and request.layout == NANOVLM:
        raise CheckpointError(f"{request.source} is in nanoVLM's layout already: expected --to {HUB}")
    if from_nanovlm and request.adapter is not None:
        raise CheckpointError(
            f"{request.source} is in nanoVLM's layout, and adapters name transformers' layers: convert it "
            f"first, then merge the adapter into the result"
        )


def _stored_dtypes(files: CheckpointFiles) -> set[torch.dtype]:
    """The floating-point dtypes of the stored weights."""
    kinds = {entry.dtype for name, entry in stored_entries(files).items() if name != nanovlm.INV_FREQ}
    return {getattr(torch, DTYPE_NAMES[kind]) for kind in kinds if kind in DTYPE_NAMES}


def _widest(stored: set[torch.dtype]) -> str:
    """The dtype that holds all that is stored, whatever the config says."""
    widest = functools.reduce(torch.promote_types, stored) if stored else torch.float32
    return str(widest).removeprefix("torch.")


def _holds(dtype: str, stored: set[torch.dtype]) -> bool:
    """Whether a dtype holds every number of others."""
    own = getattr(torch, dtype)
    return all(torch.promote_types(kind, own) == own for kind in stored)


def _family(from_nanovlm: bool) -> str:
    return "nanoVLM's layout" if from_nanovlm else "transformers' layout"


def _parameters(model: VisionLanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _image_token_id(model: VisionLanguageModel, companion: Companion) -> int:
    """Of the result: the processor's, the model's own, or for v0.1 without a processor a new one."""
    if companion.processor is not None:
        return companion.processor.image_token_id
    own = model.config.image_token_id
    return model.config.text.vocab_size if own is None else own


def _rewrite(
    model: VisionLanguageModel, layout: str, from_nanovlm: bool, image_token_id: int, companion: Companion
) -> bool:
    """What the weights need for the other layout; whether numbers changed."""
    if from_nanovlm:
        rows = max(model.config.text.vocab_size, image_token_id + 1)
        if companion.processor is not None:
            rows = max(rows, len(companion.processor.tokenizer))
        put_placeholders(model, image_token_id, rows)
        take_pixels_around_zero(model)
    elif layout == NANOVLM:
        nanovlm.check_expressible(model.config)
        take_pixels_from_zero(model)
    return from_nanovlm or layout == NANOVLM


def _write(
    model: VisionLanguageModel, folder: Path, request: Request, companion: Companion, rounded: bool
) -> None:
    """Config, weights and what goes with them, into a folder that exists."""
    if request.layout == NANOVLM:
        assert companion.fields is not None, "nanoVLM's layout needs the fields about tokens and images"
        # In the order given: the ids of vlm_extra_tokens follow from it.
        described = nanovlm.write_config(model.config, companion.fields)
        write_json(folder / "config.json", described, sort_keys=False)
        tensors, metadata = nanovlm.write_tensors(model.config, dict(model.named_parameters()))
        write_file(folder / WEIGHTS, tensors, metadata=metadata)
        companion.tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
        return
    idefics3_contents(model, companion.processor).write(folder, request.max_shard_bytes)
    (folder / CARD).write_text(_card(model, request, companion, rounded), encoding="utf-8")


def _card(model: VisionLanguageModel, request: Request, companion: Companion, rounded: bool) -> str:
    """The original's card where the result is the same model in the same layout, else a new one."""
    assert model.origin is not None, "the model was loaded"
    if request.adapter is None and idefics3.recognises(read_json(model.origin.folder / "config.json")):
        kept = card_of_origin(model)
        if kept is not None:
            return kept
    from_hub = model.origin.commit is not None
    name = request.source if from_hub else Path(request.source).resolve().name
    what = ["with an adapter merged"] if request.adapter is not None else []
    what += [f"rounded to {str(model.dtype).removeprefix('torch.')}"] if rounded else []
    return model_card(
        request.push or str(request.target),
        model.config,
        _parameters(model),
        f"Made from {name} by Ocelli's converter, {', '.join(what) or 'with the same logits'}.",
        with_processor=companion.processor is not None,
        **({"base_model": name} if from_hub else {}),
    )


def _opened_again(
    folder: Path,
    model: VisionLanguageModel,
    layout: str,
    probe: Probe,
    reference: Tensor,
    rounds: bool,
) -> Iterator[tuple[str, Tensor, Tensor, str]]:
    """What is to be compared: (name, logits expected, logits got, dtype whose tolerance holds).

    Rounding every weight moves logits more than reading a file may. Where weights were rounded, that is a
    comparison of its own, and the files are held to the rounded ones.
    """
    around_zero, dtype = layout == HUB, str(model.dtype).removeprefix("torch.")
    if rounds:
        expected, reference = reference, our_logits(model.float(), probe, around_zero)
        yield f"rounded to {dtype}", expected, reference, dtype
    opened = load(folder, dtype="float32")
    got, expected_id = opened.config.image_token_id, model.config.image_token_id
    if got != expected_id:
        raise CheckpointError(f"the result has images at token {got}, the original at {expected_id}")
    yield "opened by Ocelli", reference, our_logits(opened, probe, around_zero), "float32"
    if around_zero:
        theirs = transformers_logits(folder, model.config, probe)
        yield "opened by transformers", reference, theirs, "float32"
