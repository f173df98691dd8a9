"""A checkpoint rewritten for transformers, in another dtype or with an adapter merged, and verified.

    convert("lusxvr/nanoVLM-450M", Path("nanovlm-hub"))
    convert("HuggingFaceTB/SmolVLM-256M-Instruct", Path("smolvlm-bf16"), dtype="bfloat16")

Logits of noise before random tokens are compared twice, in float32: those of the rewritten model with the
original's, before its weights are rounded, which would hide small mistakes; and those of the files, opened by
our own loader and by transformers, with the rounded model's. The result is written
beside its place and moved there last: what goes wrong (a full disk and Ctrl-C too) leaves the target alone.

From nanoVLM to transformers, weights need more than other names:
- Pixels. nanoVLM's run from 0 to 1, Idefics3's from -1 to 1. The difference goes into the first convolution,
  W x + b = (W / 2)(2 x - 1) + (b + sum(W) / 2): halves and doubles are exact, the bias is rounded once.
  (Pixels of 0 to 1 would do in transformers too, but for black tiles: all zeros there, as padding is.)
- Placeholders. nanoVLM v0.1 has none; in transformers' layout `<image>` needs a row, and its processor three
  more names. Ids beyond the vocabulary get rows that are the mean of the old ones: their logits are means of
  logits, so no greedy answer changes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from data.errors import ProcessorError
from data.processor import Processor
from families import FAMILIES, family_of, gemma4, idefics3, internvl, lfm2_vl, nanovlm, qwen3_5, qwen_vl
from messages import counted, some
from models.checkpoints.backbones import with_mean_rows
from models.checkpoints.files import CheckpointError, Opened, read_json
from models.checkpoints.folder import check_replaceable, replace_folder
from models.checkpoints.load import choose_family, entries_of
from models.checkpoints.save import (
    CARD,
    MAX_SHARD_BYTES,
    card_of_origin,
    is_checkpoint_file,
    model_card,
    write_checkpoint,
    written,
)
from models.checkpoints.sources import one_version, open_files
from models.checkpoints.weights import FLOATS, StoredTensor, StoredTensorOf
from models.config import VLMConfig
from models.packed_vision_transformer import PackedVisionConfig, block_order, patches_of
from models.vision_language_model import VisionLanguageModel
from tools.adapter import put_in, read_adapter
from tools.processor_conversion import as_idefics

AUTO_MAP = "auto_map"  # key of a config.json whose model transformers knows by code that comes with it
_WORDS = 12  # in the test prompt
# Of the logits' standard deviation: sums in another order. A misplaced tensor exceeds it many times over.
TOLERANCE = 1e-4
_TO_HUB = (
    "note: transformers' processor names tiles first and the whole image last, nanoVLM the other way "
    "round, and resamples pixels differently: the network is the same, its prompts are not those of its "
    "training"
)
Log = Callable[[str], None]


def convert(
    source: str,
    target: Path,
    *,
    dtype: str | None = None,
    adapter: Path | None = None,
    revision: str | None = None,
    with_processor: bool = True,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    push: str | None = None,
    private: bool | None = None,
    log: Log = print,
) -> None:
    """Convert, verify, put the result in its place, and upload it where `push` names a repository.

    Args:
        dtype: of the result's weights; None is the widest that the original's are stored in.
        adapter: folder of a peft LoRA adapter to merge.
        with_processor: whether tokenizer, image settings and chat template are written, too.
        log: takes a line for each thing done.
    """
    check_replaceable(target, overwrite)
    opened = open_files(source, revision)
    choose_family(opened.config, opened.source)  # no weights are fetched for nothing
    from_nanovlm = family_of(opened.config) is nanovlm
    layout_of_source = "transformers' layout"
    if from_nanovlm or AUTO_MAP in opened.config:
        layout_of_source = "nanoVLM's layout" if from_nanovlm else "the layout of code of its own"
        if adapter is not None:
            raise CheckpointError(
                f"{source} is in {layout_of_source}, and adapters name transformers' layers: convert it "
                f"first, then merge the adapter into the result"
            )
    kinds = {entry.dtype for name, entry in entries_of(opened).items() if name != nanovlm.INV_FREQ}
    stored = {FLOATS[kind] for kind in kinds if kind in FLOATS} or {torch.float32}
    target_dtype = getattr(torch, dtype) if dtype else functools.reduce(torch.promote_types, stored)
    # In float32 at least, so that whatever is computed on the weights is rounded once, at the end.
    wide = torch.promote_types(target_dtype, torch.float32)
    revision = opened.commit or revision

    def read(opened: Opened) -> tuple[VisionLanguageModel, Any]:
        model = VisionLanguageModel.from_pretrained(opened, dtype=wide)
        return model, _processor(opened.processor_folder, from_nanovlm, with_processor, log)

    model, processor = one_version(source, revision, read)
    dtype = str(target_dtype).removeprefix("torch.")
    log(f"read {source}: {layout_of_source}, {_parameters(model):,} parameters, to {dtype}")

    image_token_id = model.config.image_token_id
    if from_nanovlm and processor is not None:
        image_token_id = processor.image_token_id
    probe = Probe.of(model.config, avoid=image_token_id)
    reference = probe.ours(model, around_zero=not from_nanovlm)
    if adapter is not None:
        layers, reference = merge_adapter(model, opened.folder, adapter, probe)
        said = model.generation_config.items()  # what the base knows is not what it knows with the adapter
        model.generation_config = {key: value for key, value in said if key != "knows"}
        log(f"merged {adapter}: {counted(layers, 'layer')}")
    if from_nanovlm:
        rows = max(model.config.text.vocab_size, image_token_id + 1)
        rows = rows if processor is None else max(rows, len(processor.tokenizer))
        _put_placeholders(model, image_token_id, rows)
        _halve_pixels(model)
    verify("rewritten", reference, probe.ours(model), log)
    model = model.to(target_dtype)

    with replace_folder(target, _is_replaced) as new:
        write_checkpoint(model, new, processor, max_shard_bytes)
        changes = ["with an adapter merged"] if adapter is not None else []
        # Not where the dtype holds every number of the stored ones.
        narrower = any(torch.promote_types(kind, target_dtype) != target_dtype for kind in stored)
        rewritten = target_dtype != wide and (from_nanovlm or adapter is not None)
        changes += [f"rounded to {dtype}"] if narrower or rewritten else []
        card = _card(model, source, push or str(target), changes, processor is not None)
        (new / CARD).write_text(card, encoding="utf-8")
        reference = probe.ours(model.float())
        reopened = VisionLanguageModel.from_pretrained(new, dtype="float32")
        verify("opened by Ocelli", reference, probe.ours(reopened), log)
        theirs = probe.theirs(_open_in_transformers(new), model.config)
        verify("opened by transformers", reference, theirs, log)
    log(f"wrote {target}")
    if push:
        result = VisionLanguageModel.from_pretrained(target, dtype="stored")
        address = result.push_to_hub(push, processor, private=private, max_shard_bytes=max_shard_bytes)
        log(f"uploaded to {address}")


def _is_replaced(name: str) -> bool:
    """Whether a file of the target belongs to the checkpoint in it."""
    return is_checkpoint_file(name) or name == CARD


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _processor(folder: Path, from_nanovlm: bool, wanted: bool, log: Log) -> Any:
    """The transformers processor that goes with the weights, or None."""
    if not wanted:
        log("note: the result has no processor")
        return None
    names = ("processor_config.json", "preprocessor_config.json")
    held = from_nanovlm or any((folder / name).is_file() for name in names)
    try:
        if not from_nanovlm:
            return Processor.from_pretrained(folder).hf_processor
        found = as_idefics(folder)
    except ProcessorError as error:
        if not held:
            log("note: the result has no processor, as the original has none")
            return None
        raise ProcessorError(f"{error}; --no-processor converts the weights alone") from error
    log(_TO_HUB)
    return found


def _card(model: Any, source: str, repo_id: str, changes: list[str], with_processor: bool) -> str:
    """The original's card where the result is the same model in the same layout, else a new one."""
    same = not any("adapter" in change for change in changes)
    described = read_json(model.origin.folder / "config.json")
    same = same and AUTO_MAP not in described and family_of(described) is not nanovlm
    if same and (kept := card_of_origin(model)) is not None:
        return kept
    from_hub = model.origin.commit is not None
    name = source if from_hub else Path(source).resolve().name
    return model_card(
        repo_id,
        model.config,
        _parameters(model),
        f"Made from {name} by Ocelli's converter, {', '.join(changes) or 'with the same logits'}.",
        with_processor=with_processor,
        **({"base_model": name} if from_hub else {}),
    )


# ------------------------------------------------------------------------------------- rewriting weights
@torch.no_grad()
def _halve_pixels(model: Any) -> None:
    """Have a model of pixels from 0 to 1 take those from -1 to 1: W / 2 for W, and b + sum(W) / 2 for b."""
    convolution = model.vision_model.patch_embedding
    weight = convolution.weight.data
    convolution.bias.data += (0.5 * weight.sum((1, 2, 3), dtype=torch.float64)).to(weight.dtype)
    convolution.weight.data = 0.5 * weight


def _put_placeholders(model: Any, image_token_id: int, vocab_size: int) -> None:
    """Images at `image_token_id`, in a vocabulary of `vocab_size` rows, at least as many as there are."""
    language_model, config = model.language_model, model.config
    if rows := vocab_size - config.text.vocab_size:
        embedding, head = language_model.embed_tokens, language_model.lm_head
        embedding.weight = with_mean_rows(embedding.weight, rows, torch.float64)
        tied = config.tie_word_embeddings
        head.weight = embedding.weight if tied else with_mean_rows(head.weight, rows, torch.float64)
    model.config = replace(
        config,
        text=replace(config.text, vocab_size=vocab_size),
        family=idefics3.NAME,
        image_token_id=image_token_id,
    )


@torch.no_grad()
def merge_adapter(model: Any, base: Path, adapter: Path, probe: Probe) -> tuple[int, Tensor]:
    """Put the weights that peft merges into our model: (tensors that changed, logits of peft's unmerged one).
    A tied model is tied no longer where head and table became two.

    Args:
        model: ours, in float32 at least.
        base: the folder in transformers' layout that the adapter is for.
        adapter: peft's folder, in safetensors.
    """
    given = read_adapter(adapter)
    theirs = _open_in_transformers(base)
    _, place = written(model.config)
    _refill(theirs, model, place, base)
    with warnings.catch_warnings(action="ignore"):  # of peft's about transformers
        adapted = put_in(theirs, given)
        reference = probe.theirs(adapted, model.config)
        merged = adapted.merge_and_unload().state_dict()
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    if model.config.tie_word_embeddings and not tied:
        text = model.language_model
        text.tied, text.lm_head.weight = False, nn.Parameter(text.lm_head.weight.detach().clone())
        model.config = replace(model.config, tie_word_embeddings=False)
        _, place = written(model.config)
    changed = 0
    for name, weight in model.named_parameters():
        parameter = _part(merged, place(name), weight)
        changed += not torch.equal(weight.float(), parameter)
        weight.copy_(parameter)
    return changed, reference


def _refill(theirs: Any, model: Any, place: StoredTensorOf, base: Path) -> None:
    """Our weights in transformers' model: what it does not find by its names in the file is random there."""
    head, table = theirs.get_output_embeddings(), theirs.get_input_embeddings()
    if not model.config.tie_word_embeddings and head.weight is table.weight:
        head.weight = nn.Parameter(table.weight.detach().clone())
    tensors, filled = theirs.state_dict(), set[str]()
    for name, weight in model.named_parameters(remove_duplicate=False):
        own = place(name)
        _part(tensors, own, weight).copy_(weight)
        filled.add(own.name)
    ours, ignorable = {tensors[name].data_ptr() for name in filled}, FAMILIES[model.config.family].IGNORABLE
    left = [name for name, one in tensors.items() if one.data_ptr() not in ours]
    if left := [name for name in left if not ignorable.fullmatch(name)]:
        raise CheckpointError(f"{base}: transformers' model has {some(left)}, which no weights here are for")


def _part(tensors: Mapping[str, Tensor], own: StoredTensor, weight: Tensor) -> Tensor:
    return tensors[own.name].view(own.parts, *weight.shape)[own.part]


# ----------------------------------------------------------------------------------------- verification
@dataclass(frozen=True)
class Probe:
    """An image of one part, pixels (1, 3, H, W) from 0 to 1, before some ids. Real questions could not show
    more, and need a tokenizer."""

    pixels: Tensor
    words: tuple[int, ...]

    @classmethod
    def of(cls, config: VLMConfig, avoid: int) -> Probe:
        """For a model of this config; words are neither `avoid` nor the image's."""
        generator = torch.Generator().manual_seed(0)
        vision = config.vision
        if isinstance(vision, PackedVisionConfig):
            side = vision.patch_size * vision.merge_size
            size = 2 * side, 3 * side
        else:
            size = vision.image_size, vision.image_size
        pixels = torch.rand(1, vision.num_channels, *size, generator=generator)
        words = torch.randint(config.text.vocab_size, (_WORDS,), generator=generator).tolist()
        return cls(pixels, tuple(word for word in words if word not in (config.image_token_id, avoid)))

    def input_ids(self, config: VLMConfig) -> Tensor:
        """(1, T), for a model of any config that the original became."""
        count = FAMILIES[config.family].positions(config, *self.pixels.shape[2:])
        image = [config.image_token_id] * count
        return torch.tensor([image + list(self.words)])

    @torch.no_grad()
    def ours(self, model: Any, around_zero: bool = True) -> Tensor:
        """Logits (T, V) of a model of ours, which takes pixels from -1 (`around_zero`) or from 0 to 1."""
        pixels = 2 * self.pixels - 1 if around_zero else self.pixels
        return model(self.input_ids(model.config), pixels).logits[0].float()

    @torch.no_grad()
    def theirs(self, model: Any, config: VLMConfig) -> Tensor:
        ids, pixels, vision, more = self.input_ids(config), 2 * self.pixels - 1, config.vision, {}
        rows, columns = (side // vision.patch_size for side in pixels.shape[2:])
        if config.family in (qwen_vl.NAME, qwen3_5.NAME):
            more = {"image_grid_thw": torch.tensor([[1, rows, columns]])}
            more["mm_token_type_ids"] = torch.eq(ids, config.image_token_id).int()
            patches = patches_of(pixels[0], vision).unflatten(1, (3, 1, -1))
            pixels = patches.expand(-1, -1, vision.temporal_patch_size, -1).flatten(1)  # a still is repeated
        elif config.family == lfm2_vl.NAME:  # patches row by row, colours last
            cut = pixels[0].unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
            pixels = cut.permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
            more = {"spatial_shapes": torch.tensor([[rows, columns]])}
            more["pixel_attention_mask"] = torch.ones(1, rows * columns, dtype=torch.long)
        elif config.family == gemma4.NAME:
            pixels = patches_of(pixels[0], vision)[None]
            more = {"image_position_ids": block_order((rows, columns), vision.merge_size).flip(1)[None]}
            more["mm_token_type_ids"] = torch.eq(ids, config.image_token_id).int()
        elif config.family != internvl.NAME:
            pixels = pixels[None]  # (B, n, 3, M, M)
        return model(input_ids=ids, pixel_values=pixels, **more).logits[0].float()


def _open_in_transformers(folder: Path) -> Any:
    """A folder as a float32 model of transformers in eval mode."""
    logging = transformers.utils.logging
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):  # those that matter are errors here
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
            return model.eval()
    except Exception as error:  # transformers raises anything
        raise CheckpointError(
            f"transformers does not open {folder} ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]})"
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()


def verify(name: str, reference: Tensor, logits: Tensor, log: Log) -> None:
    """Refuse logits (T, V) that differ from reference ones (T, V or fewer)."""
    tolerance = TOLERANCE * reference.std().item()
    difference = (logits[:, : reference.shape[1]] - reference).abs().max().item()
    found = f"{name}: largest difference of logits {difference:.1e}, tolerance {tolerance:.1e}"
    log(found)
    if not difference <= tolerance:  # NaN is not
        raise CheckpointError(f"the result is not the original ({found}): nothing was written")
