"""A checkpoint into another layout or dtype, or with an adapter merged; verified before it is there.

    request = Request("lusxvr/nanoVLM-450M", Path("nanovlm-hub"))
    convert(VisionLanguageModel, request, open_processor, log=print)

The result is written beside its place under another name, opened again by our own loader and, in
transformers' layout, by transformers, and takes its place only if its logits are the original's: on pixels of
noise behind random tokens, in float32. Where weights are rounded, logits are compared before that as well,
as rounding hides small mistakes. What goes wrong (a full disk and Ctrl-C too) leaves the target unchanged.

From nanoVLM to transformers, weights need more than other names:
- Pixels. nanoVLM's run from 0 to 1, Idefics3's from -1 to 1. The difference goes into the first convolution,
  W x + b = (W / 2)(2 x - 1) + (b + sum(W) / 2): halves and doubles are exact, the bias is rounded once.
  (Pixels of 0 to 1 would do in transformers too, but for black tiles: all zeros there, as padding is.)
- Placeholders. nanoVLM v0.1 has none; in transformers' layout `<image>` needs an id, and its processor three
  more names. Ids beyond the vocabulary get rows that are the mean of the old ones: their logits are means of
  logits, so no greedy answer changes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from models.checkpoints import idefics3, nanovlm
from models.checkpoints.folder import check_replaceable, replace_folder
from models.checkpoints.hub import WEIGHTS, CheckpointError, CheckpointFiles, locate, read_json, snapshot
from models.checkpoints.load import choose_reader, load, one_version
from models.checkpoints.save import (
    CARD,
    MAX_SHARD_BYTES,
    card_of_origin,
    checkpoint_contents,
    is_checkpoint_file,
    model_card,
    push,
    write_json,
)
from models.checkpoints.weights import FLOATS, read_header, rename, stored_entries, write_file
from models.config import VLMConfig

HUB, NANOVLM = "hub", "nanovlm"
TOKENIZER_FOLDER = "tokenizer"
_WORDS = 12  # in the test prompt
# Of the largest logit, 10 at least: 1e-4 then. float32 differs by the order of sums, the others by the
# rounding of every weight, which a misplaced tensor exceeds many times over.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


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
class ProcessorBundle:
    """What a result has besides weights: in transformers' layout an Idefics3Processor, or None; in nanoVLM's
    a tokenizer and the fields of config.json about it and images."""

    processor: Any = None
    tokenizer: Any = None
    fields: dict[str, Any] | None = None


@dataclass(frozen=True)
class Result:
    """The new folder, and what it has besides weights."""

    folder: Path
    bundle: ProcessorBundle


def convert(
    cls: Any,
    request: Request,
    open_processor: Callable[[Path, bool], ProcessorBundle],
    log: Callable[[str], None] = lambda line: None,
) -> Result:
    """Convert, verify, and put the result in its place.

    Args:
        cls: `VisionLanguageModel`.
        open_processor: (folder of the original's processor files, whether that is nanoVLM's) -> what goes
            beside the weights. Tokenizers are not read in this package.
        log: takes a line for each thing done.
    """
    target = check_replaceable(request.target, request.overwrite)
    files = locate(request.source, request.revision, check=choose_reader)
    from_nanovlm = choose_reader(files.config, files.source) is nanovlm
    _check_direction(request, from_nanovlm)
    stored = _stored_dtypes(files)
    dtype = request.dtype or _name(functools.reduce(torch.promote_types, stored, next(iter(stored))))
    # In float32 at least, so that whatever is computed on the weights is rounded once, at the end.
    wide = "float64" if dtype == "float64" else "float32"
    revision = files.origin.commit or request.revision
    model, bundle = one_version(
        request.source,
        revision,
        lambda: (
            load(cls, request.source, revision, dtype=wide),
            open_processor(snapshot(request.source, revision), from_nanovlm),
        ),
    )
    family = "nanoVLM's layout" if from_nanovlm else "transformers' layout"
    log(f"read {request.source}: {family}, {_parameters(model):,} parameters, to {dtype}")

    image_token_id = _image_token_id(model, bundle)
    inputs = TestInputs.of(model.config, avoid=(image_token_id,))
    reference = our_logits(model, inputs, around_zero=not from_nanovlm)
    if request.adapter is not None:
        layers, reference = merge_adapter(model, files.origin.folder, request.adapter, inputs)
        log(f"merged {request.adapter}: {layers} layers")
    rewritten = _rewrite(model, request.layout, from_nanovlm, image_token_id, bundle)
    target_dtype = getattr(torch, dtype)
    # Whether the dtype does not hold every number of the stored ones.
    narrower = any(torch.promote_types(kind, target_dtype) != target_dtype for kind in stored)
    rounds = dtype != wide and (rewritten or request.adapter is not None or narrower)
    if rounds:  # afterwards only as closely as rounded weights can be told from wrong ones
        logits = our_logits(model, inputs, around_zero=request.layout == HUB)
        _verify(compare("rewritten", reference, logits, "float32"), request, log)
    model = model.to(target_dtype)

    with replace_folder(target, _is_replaced) as new:
        _write(model, new, request, bundle, rounds)
        for compared in _opened_again(cls, new, model, request.layout, inputs, reference, rounds):
            _verify(compare(*compared), request, log)
    log(f"wrote {request.target}")
    return Result(request.target, bundle)


def upload(
    cls: Any,
    result: Result,
    repo_id: str,
    private: bool | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str:
    """Upload a result in transformers' layout; see `models.checkpoints.save.push`."""
    model = load(cls, result.folder, dtype="stored")
    return push(model, repo_id, result.bundle.processor, private=private, max_shard_bytes=max_shard_bytes)


def _verify(check: Check, request: Request, log: Callable[[str], None]) -> None:
    log(str(check))
    if not check.passed:
        raise CheckpointError(
            f"the result is not the original ({check}): nothing was written to {request.target}"
        )


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
    return {FLOATS[kind] for kind in kinds if kind in FLOATS} or {torch.float32}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _image_token_id(model: Any, bundle: ProcessorBundle) -> int:
    """Of the result: the processor's, the model's own, or for v0.1 without a processor a new one."""
    if bundle.processor is not None:
        return bundle.processor.image_token_id
    own = model.config.image_token_id
    return model.config.text.vocab_size if own is None else own


# ------------------------------------------------------------------------------------- rewriting weights
def _rewrite(
    model: Any, layout: str, from_nanovlm: bool, image_token_id: int, bundle: ProcessorBundle
) -> bool:
    """Change a model's weights as the other layout needs it; whether numbers changed."""
    if from_nanovlm:
        rows = max(model.config.text.vocab_size, image_token_id + 1)
        if bundle.processor is not None:
            rows = max(rows, len(bundle.processor.tokenizer))
        _put_placeholders(model, image_token_id, rows)
        _scale_pixels(model, 0.5)
    elif layout == NANOVLM:
        nanovlm.check_expressible(model.config)
        _scale_pixels(model, 2.0)
    return from_nanovlm or layout == NANOVLM


@torch.no_grad()
def _scale_pixels(model: Any, factor: float) -> None:
    """W -> factor W, and the bias that goes with it: 1/2 and b + sum(W) / 2, or 2 and b - sum(W)."""
    convolution = model.vision_model.patch_embedding
    weight = convolution.weight.data
    moved = (1 - factor) * weight.sum((1, 2, 3), dtype=torch.float64)
    convolution.bias.data += moved.to(weight.dtype)
    convolution.weight.data = factor * weight


def _put_placeholders(model: Any, image_token_id: int, vocab_size: int) -> None:
    """Images at `image_token_id`, in a vocabulary of `vocab_size` rows, at least as many as there are."""
    language_model, config = model.language_model, model.config
    embedding, head = language_model.embed_tokens, language_model.lm_head
    rows = vocab_size - config.text.vocab_size
    if rows:
        embedding.weight = _with_mean_rows(embedding.weight, rows)
        head.weight = embedding.weight if config.tie_word_embeddings else _with_mean_rows(head.weight, rows)
    model.config = replace(
        config,
        text=replace(config.text, vocab_size=vocab_size),
        image_placement="placeholder",
        image_token_id=image_token_id,
    )


def _with_mean_rows(weight: Tensor, rows: int) -> nn.Parameter:
    mean = weight.data.double().mean(0, keepdim=True).to(weight.dtype)
    return nn.Parameter(torch.cat((weight.data, mean.expand(rows, -1))))


@torch.no_grad()
def merge_adapter(model: Any, base: Path, adapter: Path, inputs: TestInputs) -> tuple[int, Tensor]:
    """Put the weights that peft merges into our model: (layers that changed, logits of peft's unmerged one).

    Args:
        model: ours, in float32 at least.
        base: the folder in transformers' layout that the adapter is for.
        adapter: peft's folder, in safetensors.
    """
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (adapter / name).is_file():
            raise CheckpointError(f"{adapter} has no {name}: expected the folder of a peft adapter")
    kind = read_json(adapter / "adapter_config.json").get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{adapter}: expected an adapter of type LORA, got {kind!r}")
    stored = read_header(adapter / "adapter_model.safetensors")

    def adapted(theirs: nn.Module) -> nn.Module:
        from peft import PeftModel, get_peft_model_state_dict  # takes seconds

        with_adapter = PeftModel.from_pretrained(theirs, str(adapter))
        # peft ignores factors that have no layer, and makes up those that are missing.
        known = get_peft_model_state_dict(with_adapter).keys()
        if stored.keys() != known:
            raise ValueError(f"the adapter belongs to another model: {sorted(stored.keys() ^ known)[0]}")
        return with_adapter

    theirs = _open_in_transformers(base, adapted)
    reference = _their_logits(theirs, model.config, inputs)
    merged = theirs.merge_and_unload()
    weights = dict(model.named_parameters())
    ours = {theirs_name: name for name, theirs_name in idefics3.NAMES.items()}
    changed = 0
    for name, parameter in merged.named_parameters():
        weight = weights[rename(name, ours)]
        if not torch.equal(weight.float(), parameter):
            weight.copy_(parameter)
            changed += 1
    return changed, reference


# --------------------------------------------------------------------------------------------- writing
def _write(model: Any, folder: Path, request: Request, bundle: ProcessorBundle, rounded: bool) -> None:
    """Config, weights and what goes with them, into a folder that exists."""
    if request.layout == NANOVLM:
        assert bundle.fields is not None, "nanoVLM's layout needs the fields about tokens and images"
        # In the order given: the ids of vlm_extra_tokens follow from it.
        described = nanovlm.write_config(model.config, bundle.fields)
        write_json(folder / "config.json", described, sort_keys=False)
        tensors, metadata = nanovlm.write_tensors(model.config, dict(model.named_parameters()))
        write_file(folder / WEIGHTS, tensors, metadata=metadata)
        bundle.tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
        return
    checkpoint_contents(model, bundle.processor).write(folder, request.max_shard_bytes)
    (folder / CARD).write_text(_card(model, request, bundle, rounded), encoding="utf-8")


def _card(model: Any, request: Request, bundle: ProcessorBundle, rounded: bool) -> str:
    """The original's card where the result is the same model in the same layout, else a new one."""
    if request.adapter is None and idefics3.recognises(read_json(model.origin.folder / "config.json")):
        kept = card_of_origin(model)
        if kept is not None:
            return kept
    from_hub = model.origin.commit is not None
    name = request.source if from_hub else Path(request.source).resolve().name
    changes = ["with an adapter merged"] if request.adapter is not None else []
    changes += [f"rounded to {_name(model.dtype)}"] if rounded else []
    return model_card(
        request.push or str(request.target),
        model.config,
        _parameters(model),
        f"Made from {name} by Ocelli's converter, {', '.join(changes) or 'with the same logits'}.",
        with_processor=bundle.processor is not None,
        **({"base_model": name} if from_hub else {}),
    )


# ----------------------------------------------------------------------------------------- verification
@dataclass(frozen=True)
class TestInputs:
    """An image of n tiles, pixels (n, 3, M, M) from 0 to 1, after `lead` of the ids `words`. Real questions
    could not show more, and need a tokenizer."""

    __test__ = False  # no test class for pytest

    pixels: Tensor
    words: tuple[int, ...]
    lead: int

    @classmethod
    def of(cls, config: VLMConfig, avoid: Collection[int | None] = ()) -> TestInputs:
        """For a model of this config: two tiles, or one where features stand in front of the text or the
        context is short. Words are none of `avoid`, nor the image's."""
        in_front = config.image_placement == "prefix"
        two_fit = 2 * config.tokens_per_tile + _WORDS <= config.text.max_position_embeddings
        generator = torch.Generator().manual_seed(0)
        size = config.vision.image_size
        tiles = 1 if in_front or not two_fit else 2
        pixels = torch.rand(tiles, config.vision.num_channels, size, size, generator=generator)
        words = torch.randint(config.text.vocab_size, (_WORDS,), generator=generator).tolist()
        allowed = [word for word in words if word not in (config.image_token_id, *avoid)]
        return cls(pixels, tuple(allowed), 0 if in_front else 3)

    def arguments(self, config: VLMConfig, around_zero: bool) -> dict[str, Tensor]:
        """For a model of any config that the original became: input_ids (1, T), pixel_values
        (1, n, 3, M, M)."""
        ids = list(self.words)
        if config.image_placement == "placeholder":
            assert config.image_token_id is not None, "a placeholder config has an image token id"
            ids[self.lead : self.lead] = [config.image_token_id] * (len(self.pixels) * config.tokens_per_tile)
        pixels = 2 * self.pixels - 1 if around_zero else self.pixels
        return {"input_ids": torch.tensor([ids]), "pixel_values": pixels[None]}


@torch.no_grad()
def our_logits(model: Any, inputs: TestInputs, around_zero: bool) -> Tensor:
    """Logits (T, V) of a model of ours, which takes pixels from -1 (`around_zero`) or from 0 to 1."""
    arguments = inputs.arguments(model.config, around_zero)
    if not around_zero:  # no padding among them, black tiles or not: see generation.prompt.real_tiles
        arguments["pixel_values"] = arguments["pixel_values"][0]
    return model(**arguments).logits[0].float()


@torch.no_grad()
def _their_logits(model: Any, config: VLMConfig, inputs: TestInputs) -> Tensor:
    return model(**inputs.arguments(config, around_zero=True)).logits[0].float()


def _open_in_transformers(folder: Path, then: Callable[[Any], Any] = lambda model: model) -> Any:
    """A folder as a float32 model of transformers in eval mode, and what `then` makes of it."""
    logging = transformers.utils.logging
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):  # those that matter are errors here
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
            return then(model).eval()
    except Exception as error:  # transformers and peft raise anything
        raise CheckpointError(
            f"transformers does not open {folder} ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]})"
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class Check:
    """`difference` is the largest between logits, `agreement` the share of positions with the same likeliest
    token."""

    name: str
    difference: float
    tolerance: float
    agreement: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # NaN is not

    def __str__(self) -> str:
        return (
            f"{self.name}: largest difference of logits {self.difference:.1e}, "
            f"tolerance {self.tolerance:.1e}, same likeliest token {self.agreement:.0%}"
        )


def compare(name: str, reference: Tensor, logits: Tensor, dtype: str) -> Check:
    """Logits (T, V) compared with reference ones (T, V or fewer), as closely as weights of `dtype` can."""
    if len(logits) != len(reference) or logits.shape[1] < reference.shape[1]:
        raise CheckpointError(
            f"{name}: expected logits of {list(reference.shape)} positions and tokens, got "
            f"{list(logits.shape)}"
        )
    tolerance = TOLERANCE[dtype] * max(10.0, reference.abs().max().item())
    difference = (logits[:, : reference.shape[1]] - reference).abs().max().item()
    agreement = (logits.argmax(-1) == reference.argmax(-1)).double().mean().item()
    return Check(name, difference, tolerance, agreement)


def _opened_again(
    cls: Any,
    folder: Path,
    model: Any,
    layout: str,
    inputs: TestInputs,
    reference: Tensor,
    rounds: bool,
) -> Iterator[tuple[str, Tensor, Tensor, str]]:
    """What is to be compared: (name, logits expected, logits got, dtype whose tolerance holds).

    Rounding every weight moves logits more than reading a file may. Where weights were rounded, that is a
    comparison of its own, and the files are compared with the rounded ones.
    """
    around_zero, dtype = layout == HUB, _name(model.dtype)
    if rounds:
        expected, reference = reference, our_logits(model.float(), inputs, around_zero)
        yield f"rounded to {dtype}", expected, reference, dtype
    opened = load(cls, folder, dtype="float32")
    got, expected_id = opened.config.image_token_id, model.config.image_token_id
    if got != expected_id:
        raise CheckpointError(f"the result has images at token {got}, the original at {expected_id}")
    yield "opened by Ocelli", reference, our_logits(opened, inputs, around_zero), "float32"
    if around_zero:
        theirs = _their_logits(_open_in_transformers(folder), model.config, inputs)
        yield "opened by transformers", reference, theirs, "float32"
